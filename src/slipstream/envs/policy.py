"""The policy as an environment sees it: chat in, message out. One per rollout.

Turns messages into engine requests and completions into messages, keeps the budgets, and records every turn. Knows the engine port
and the tokenizer; knows nothing of tasks, rewards or training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from slipstream.config.envs import EnvConfig
from slipstream.envs.base import TruncatedError, one_line
from slipstream.envs.tokens import TokenPrefix, TurnTokens
from slipstream.errors import EngineError, EngineUnavailable, EnvError
from slipstream.ports import Engine
from slipstream.types import Completion, GenerateRequest, Sampling, Turn


class EnginePolicy:
    """Samples one rollout's turns from an engine. Satisfies `ports.Policy`."""

    def __init__(
        self,
        engine: Engine,
        turn_tokens: TurnTokens,
        config: EnvConfig,
        sampling: Sampling,
        seq_len: int,
        rollout_id: str,
        salt: int,
    ):
        self._engine = engine
        self._tokenizer = turn_tokens.tokenizer
        self._prefix = TokenPrefix(turn_tokens)
        self._config = config
        self._sampling = sampling
        self._seq_len = seq_len
        self._rollout_id = rollout_id
        self._salt = salt
        self._num_sampled = 0
        self.turns: list[Turn] = []
        self.messages: list[dict] = []
        """The conversation as of the last reply."""
        self.failure: EngineError | None = None
        """Why the last request failed; None once one succeeds. An environment cannot hide it by catching the exception."""
        self.truncated = False
        """A budget ran out: TruncatedError was raised, or the last completion ended by length."""

    async def reply(self, messages: Sequence[dict], tools: Sequence[dict] = ()) -> dict:
        """Sample the assistant's next message. One caller at a time.

        Raises TruncatedError (no turns, tokens or context left), EnvError (first prompt does not fit the context, or the template
        refuses the messages), EngineError (the engine failed, or missed the turn's deadline).
        """
        if len(self.turns) >= self._config.max_turns:
            raise self._out_of(f"{self._config.max_turns} turns (max_turns)")
        prompt_T, known = self._prefix.next_prompt(messages, tools)
        sampling = replace(self._sampling, max_tokens=self._budget(len(prompt_T)))
        request = GenerateRequest(f"{self._rollout_id}/{len(self.turns)}", prompt_T, sampling, self._salt, max(known - 1, 0))
        try:
            self.failure = None
            return self._record(messages, Turn(prompt_T, await self._generate(request), sampling))
        except EngineError as error:
            self.failure = error
            raise

    def _budget(self, prompt_len: int) -> int:
        """Most tokens that this turn may sample."""
        room = self._seq_len - prompt_len
        if room <= 0 and not self.turns:
            raise EnvError(
                f"the first prompt has {prompt_len} tokens and model.seq_len = {self._seq_len}: nothing can be sampled; "
                "shorten the prompt or raise model.seq_len"
            )
        if room <= 0:
            raise self._out_of(f"{self._seq_len} tokens of context (model.seq_len; the next prompt has {prompt_len})")
        cap = self._config.max_rollout_tokens
        left = self._sampling.max_tokens if cap is None else cap - self._num_sampled
        if left <= 0:
            raise self._out_of(f"{cap} sampled tokens (max_rollout_tokens)")
        return min(self._sampling.max_tokens, left, room)

    async def _generate(self, request: GenerateRequest) -> Completion:
        deadline = asyncio.timeout(self._config.turn_timeout_s)
        try:
            async with deadline:
                return await self._engine.generate(request)
        except TimeoutError as error:
            what = f"within {self._config.turn_timeout_s:g} s (turn_timeout_s)" if deadline.expired() else f"in time: {error}"
            raise EngineUnavailable(f"request {request.id}: the engine did not answer {what}") from None
        except EngineError:
            raise
        except Exception as error:  # whatever a client library raises is the infrastructure's failure, not the environment's
            raise EngineError(f"request {request.id}: {one_line(error)}") from error

    def _record(self, messages: Sequence[dict], turn: Turn) -> dict:
        completion = turn.completion
        reply = self._tokenizer.parse_reply(self._tokenizer.decode(completion.tokens_N), id_prefix=f"call_{len(self.turns)}")
        self.turns.append(turn)
        self._num_sampled += len(completion.tokens_N)
        self.messages = [*messages, reply]
        if completion.finish_reason == "abort":
            raise EngineUnavailable(f"request {completion.id}: the engine aborted it after {len(completion.tokens_N)} tokens")
        self.truncated = completion.finish_reason == "length"
        self._prefix.add(messages, turn.prompt_T, completion.tokens_N, reply)
        return reply

    def _out_of(self, budget: str) -> TruncatedError:
        self.truncated = True
        return TruncatedError(f"rollout {self._rollout_id} has used up its {budget}")
