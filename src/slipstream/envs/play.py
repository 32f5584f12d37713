"""Plays one rollout: an environment against an engine, whatever happens, into a Rollout with a typed outcome.

The only place that turns exceptions into outcomes: an engine's failure is `infra_error`, a reward's `reward_error`, anything else
that an environment raises `env_error`. None of them carries a reward. Knows no groups, versions or batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slipstream.chat.prefix import TurnTokens
from slipstream.chat.recording import Limits
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config.envs import EnvConfig
from slipstream.config.serve import SamplingConfig
from slipstream.envs.agent import AgentEnv
from slipstream.envs.base import TruncatedError, check_reward, one_line
from slipstream.envs.policy import EnginePolicy
from slipstream.errors import EngineError, EnvError, RewardError, StateError
from slipstream.ports import AgentSession, Engine, Env, Gateway, Played
from slipstream.types import Outcome, Rollout, Sampling, Task


class EnvPlayer:
    """Binds one environment to an engine. Satisfies `ports.Player`; one player plays any number of rollouts at once."""

    def __init__(
        self,
        env: Env,
        engine: Engine,
        tokenizer: ChatTokenizer,
        config: EnvConfig,
        seq_len: int,
        sampling: SamplingConfig | None = None,
        gateway: Gateway | None = None,
    ):
        """`sampling` replaces the environment's own (evaluations are greedy, for example). `gateway`: where an AgentEnv's agents call."""
        if isinstance(env, AgentEnv) and gateway is None:
            raise StateError(f"environment {env.name!r} lets agents play, and its player was given no gateway for their calls")
        self.env = env
        self._engine = engine
        self._gateway = gateway
        self._turn_tokens = TurnTokens(tokenizer)
        self._limits = Limits(seq_len, config.turn_timeout_s, config.max_turns, config.max_rollout_tokens)
        self._sampling = engine_sampling(sampling or config.sampling)

    async def __call__(self, task: Task, rollout_id: str, group_id: str, version_start: int) -> Rollout:
        """Never raises but for cancellation: a failure becomes the rollout's outcome, with the turns that were played."""
        started_s, clock = time.time(), time.perf_counter()
        with self._policy(rollout_id, salt=max(version_start, 0)) as policy:
            result = await self._outcome(task, policy)
        result.setdefault("messages", tuple(policy.messages))
        return Rollout(
            id=rollout_id,
            task=task,
            group_id=group_id,
            turns=tuple(policy.turns),
            version_start=version_start,
            started_s=started_s,
            duration_s=time.perf_counter() - clock,
            **result,
        )

    @contextmanager
    def _policy(self, rollout_id: str, salt: int) -> Iterator[EnginePolicy | AgentSession]:
        if self._gateway is None or not isinstance(self.env, AgentEnv):
            yield EnginePolicy(self._engine, self._turn_tokens, self._sampling, self._limits, rollout_id, salt)
            return
        session = self._gateway.open(rollout_id, salt, self._sampling, self._limits)
        try:
            yield session
        finally:
            self._gateway.end(rollout_id)  # calls that the agent left behind are aborted

    async def _outcome(self, task: Task, policy: Any) -> dict[str, Any]:
        """Outcome, and with it reward, messages or error: fields of the Rollout."""
        try:
            result = self._graded(task, await self.env.play(task, policy), policy)
        except TruncatedError:
            result = {"outcome": Outcome.truncated, "reward": 0.0}  # the environment does not grade unfinished conversations
        except EngineError as error:
            result = {"outcome": Outcome.infra_error, "error": one_line(error)}
        except RewardError as error:
            result = {"outcome": Outcome.reward_error, "error": one_line(error)}
        except (Exception, SystemExit) as error:  # a library that calls sys.exit must not end the orchestrator
            result = {"outcome": Outcome.env_error, "error": f"environment {self.env.name!r}, task {task.id}: {one_line(error)}"}
        if policy.failure is not None:  # whatever the environment made of it: a failed engine never becomes a reward
            result = {"outcome": Outcome.infra_error, "error": one_line(policy.failure)}
        return result

    def _graded(self, task: Task, played: Played, policy: EnginePolicy | AgentSession) -> dict[str, Any]:
        for name in ("messages", "reward", "reward_parts"):
            if not hasattr(played, name):
                raise EnvError(f"play returned {played!r}; expected slipstream.envs.base.Played(messages, reward)")
        return {
            "outcome": Outcome.truncated if policy.truncated else Outcome.completed,
            "messages": tuple(dict(message) for message in played.messages),
            "reward": check_reward(played.reward, self.env.name, task),
            "reward_parts": {key: check_reward(value, self.env.name, task, key) for key, value in played.reward_parts.items()},
        }


def engine_sampling(config: SamplingConfig) -> Sampling:
    """A run file's sampling section as the engine wants it."""
    return Sampling(**config.model_dump())


def greedy(config: SamplingConfig) -> SamplingConfig:
    """The same limits, without randomness."""
    return config.replace(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
