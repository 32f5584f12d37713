"""Environments that somebody else's agent plays: its calls go to the policy over HTTP, and it is none the wiser.

`run` gets a base URL, an API key and a model name, as the agent would get those of a hosted model, and returns a reward. The gateway
behind the URL records each call as tokens, so that the ordinary run trains on what the agent did. See docs/gateway.md.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from slipstream.envs.base import Env, Played, Score, TruncatedError, one_line
from slipstream.envs.hooks import run_hook
from slipstream.types import Task


@dataclass(frozen=True, slots=True)
class AgentApi:
    """What an agent needs to call the policy."""

    base_url: str
    """For OpenAI's clients: ends with /v1."""
    api_key: str
    """Names the rollout's session: use it for this task only."""
    model: str

    @property
    def anthropic_url(self) -> str:
        """For Anthropic's clients, which add /v1 themselves."""
        return self.base_url.removesuffix("/v1")


class AgentEnv(Env):
    """Override `num_tasks`, `task` and `run`.

    `run` may be a coroutine function, which shares the orchestrator's event loop, or a plain one, which gets a thread of its own.
    """

    def run(self, task: Task, api: AgentApi) -> Score | Awaitable[Score]:
        """Let an agent play the task, and score what it did: a reward, or named parts with the reward under the key 'reward'.

        RewardError is for a score that cannot be had; any other exception is the environment's error, unless the policy had used up its
        turns, tokens or context: then the rollout is truncated, with reward 0.
        """
        self._missing("run(self, task, api) -> float")

    async def play(self, task: Task, policy: Any) -> Played:
        """`policy` is the rollout's session at the gateway (`ports.AgentSession`)."""
        api = AgentApi(policy.base_url, policy.api_key, policy.model)
        try:
            score = await run_hook(self.run, task, api, timeout=self.rollout_timeout_s)
        except Exception as error:
            if policy.truncated:
                raise TruncatedError(one_line(error)) from error
            raise
        return self.checked(task, policy.messages, score)
