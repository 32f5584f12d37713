"""The policy as an environment sees it: chat in, message out. One per rollout.

Turns messages into engine requests and completions into messages; prompts, budgets and turns are `chat.recording`'s. Knows the engine port
and the tokenizer; knows nothing of tasks, rewards or training.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.chat.prefix import TurnTokens
from slipstream.chat.recording import Limits, Recording
from slipstream.errors import EnvError, RequestError
from slipstream.ports import Engine
from slipstream.types import Sampling


class EnginePolicy(Recording):
    """Samples one rollout's turns from an engine. Satisfies `ports.Policy`."""

    def __init__(self, engine: Engine, turn_tokens: TurnTokens, sampling: Sampling, limits: Limits, rollout_id: str, salt: int):
        super().__init__(turn_tokens, sampling, limits, rollout_id, salt)
        self._engine = engine
        self._tokenizer = turn_tokens.tokenizer

    async def reply(self, messages: Sequence[dict], tools: Sequence[dict] = ()) -> dict:
        """Sample the assistant's next message.

        Raises TruncatedError (no turns, tokens or context left), EnvError (first prompt does not fit the context, or the template
        refuses the messages), EngineError (the engine failed, or missed the turn's deadline).
        """
        try:
            call = self.prepare(messages, tools)
        except RequestError as error:
            raise EnvError(str(error)) from None
        completion = await self.wait(call, self._engine.generate(call.request))
        reply = self._tokenizer.parse_reply(self._tokenizer.decode(completion.tokens_N), id_prefix=f"call_{call.number}")
        self.record(call, completion, reply)
        return reply
