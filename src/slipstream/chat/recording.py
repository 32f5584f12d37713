"""The engine calls of one rollout: their prompts, budgets and deadlines, and what came back, as turns.

Used by whoever lets a policy speak: the environments' own chats (`envs.policy`) and the sessions of agents (`serving.gateway`). Several
calls may be on their way at once. Knows tokens and the engine's port; knows neither HTTP nor tasks, rewards or training.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

from slipstream.chat.branches import Branches, Prompt
from slipstream.chat.prefix import TurnTokens
from slipstream.errors import EngineError, EngineUnavailable, RequestError
from slipstream.types import ChatMessage, Completion, GenerateRequest, Sampling, Turn


class TruncatedError(Exception):
    """The policy has no token, context or turn left. An environment that wants to grade what there is catches it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one rollout may use. None: as much as it likes."""

    seq_len: int
    turn_timeout_s: float
    max_turns: int | None = None
    max_rollout_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One engine call on its way."""

    number: int
    request: GenerateRequest
    prompt: Prompt
    messages: tuple[ChatMessage, ...]


class Recording:
    """One rollout. `prepare` a call, `wait` for its completion, `record` what the caller was told."""

    def __init__(self, turn_tokens: TurnTokens, sampling: Sampling, limits: Limits, rollout_id: str, salt: int):
        self._branches = Branches(turn_tokens)
        self._sampling = sampling
        self._limits = limits
        self._rollout_id = rollout_id
        self._salt = salt
        self._calls = self._open = 0
        self._turns: dict[int, Turn] = {}
        self._aborted: dict[bytes, int] = {}
        self._failures: dict[bytes, EngineError] = {}
        self.messages: list[ChatMessage] = []
        """The conversation as of the last reply."""
        self.truncated = False
        """A budget ran out: TruncatedError was raised, or the last completion ended by length."""
        self.forks: Counter[str] = Counter()
        """Calls that do not simply go on from the last reply of a branch, by kind; see `chat.branches`."""

    @property
    def turns(self) -> list[Turn]:
        """In the order in which they were asked for."""
        return [turn for _, turn in sorted(self._turns.items())]

    @property
    def failure(self) -> EngineError | None:
        """Why the engine failed a call that has not succeeded since. An environment cannot hide it by catching the exception."""
        return next(iter(self._failures.values()), None)

    def prepare(self, messages: Sequence[ChatMessage], tools: Sequence[dict] = (), sampling: Sampling | None = None) -> Call:
        """The engine's request for the next reply; `sampling` replaces the rollout's own.

        Raises TruncatedError (no turns, tokens or context left), RequestError (the template refuses the messages, or the first prompt
        does not fit the context). A call that was prepared must be waited for, or given up with `drop`.
        """
        if self._limits.max_turns is not None and len(self._turns) + self._open >= self._limits.max_turns:
            raise self._out_of(f"{self._limits.max_turns} turns (max_turns)")
        prompt = self._branches.prompt(messages, tools)
        try:
            asked = sampling or self._sampling
            sampling = replace(asked, max_tokens=self._budget(len(prompt.tokens_T), asked.max_tokens))
        except BaseException:
            self._branches.release(prompt)
            raise
        if prompt.fork:
            self.forks[prompt.fork] += 1
        number, self._calls, self._open = self._calls, self._calls + 1, self._open + 1
        request = GenerateRequest(f"{self._rollout_id}/{number}", prompt.tokens_T, sampling, self._salt, max(prompt.known - 1, 0))
        return Call(number, request, prompt, tuple(messages))

    async def wait(self, call: Call, answer: Awaitable[Completion]) -> Completion:
        """The engine's answer, within the turn's deadline. Raises EngineError, whatever went wrong."""
        deadline, error = asyncio.timeout(self._limits.turn_timeout_s), None
        try:
            async with deadline:
                return await answer
        except TimeoutError as late:
            limit = f"within {self._limits.turn_timeout_s:g} s (turn_timeout_s)"
            what = limit if deadline.expired() else f"in time: {late}"
            error = EngineUnavailable(f"request {call.request.id}: the engine did not answer {what}")
        except EngineError as failure:
            error = failure
        except Exception as failure:  # whatever a client library raises is the infrastructure's failure, not the environment's
            error = EngineError(f"request {call.request.id}: {type(failure).__name__}: {' '.join(str(failure).split())}")
        except BaseException:  # cancelled
            self.drop(call)
            raise
        self._failures[call.prompt.key] = error
        self.drop(call)
        raise error

    def record(self, call: Call, completion: Completion, reply: ChatMessage) -> None:
        """The call's turn. `reply` is what the caller sees of it. Raises EngineUnavailable when the engine aborted it."""
        turn, key = Turn(call.request.prompt_T, completion, call.request.sampling), call.prompt.key
        self._turns[call.number] = turn
        self.messages = [*call.messages, reply]
        if completion.finish_reason == "abort":
            self._aborted[key] = call.number
            tokens = len(completion.tokens_N)
            self._failures[key] = EngineUnavailable(f"request {completion.id}: the engine aborted it after {tokens} tokens")
            self.drop(call)
            raise self._failures[key]
        self._open -= 1
        self._failures.pop(key, None)
        self._turns.pop(self._aborted.pop(key, -1), None)  # asked again and answered: what was cut short is no part of the rollout
        self.truncated = completion.finish_reason == "length"
        self._branches.add(call.prompt, completion.tokens_N, reply)

    def drop(self, call: Call) -> None:
        """Nothing came of the call."""
        self._open -= 1
        self._branches.release(call.prompt)

    def _budget(self, prompt_len: int, max_tokens: int) -> int:
        """Most tokens that this turn may sample. Calls side by side do not count one another's."""
        seq_len = self._limits.seq_len
        room = seq_len - prompt_len
        if room <= 0 and not self._turns:
            raise RequestError(
                f"the first prompt has {prompt_len} tokens and model.seq_len = {seq_len}: nothing can be sampled; "
                "shorten the prompt or raise model.seq_len"
            )
        if room <= 0:
            raise self._out_of(f"{seq_len} tokens of context (model.seq_len; the next prompt has {prompt_len})")
        cap = self._limits.max_rollout_tokens
        left = max_tokens if cap is None else cap - sum(len(turn.completion.tokens_N) for turn in self._turns.values())
        if left <= 0:
            raise self._out_of(f"{cap} sampled tokens (max_rollout_tokens)")
        return min(max_tokens, left, room)

    def _out_of(self, budget: str) -> TruncatedError:
        self.truncated = True
        return TruncatedError(f"rollout {self._rollout_id} has used up its {budget}")
