"""Chat messages to token ids, turn by turn, keeping what was already fed and sampled byte for byte.

Rendering a whole conversation again and encoding it would change tokens that the policy sampled (other merges, other JSON spacing,
dropped reasoning): the engine's cache would miss and the logprobs would belong to other tokens. So each next prompt is

    previous prompt ids + completion ids + ids of the *link*

where the link is what the chat template writes between the end of the assistant's text and its next reply: the end of the assistant's
turn, the new messages, the generation prompt. It is cut out of a rendering in which a marker stands for the assistant's text:

    render([user "x", assistant MARKER, *new messages], generation prompt) = ... MARKER link

and its end-of-turn token is left out where the completion already ends with it. For a template that renders a message independently
of the ones before (ChatML, Llama 3), decoding these ids gives exactly the rendering of the whole conversation.

Suffix T: tokens. Knows neither engines nor environments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.errors import EnvError, ModelError, RequestError
from slipstream.observe.metrics import plain
from slipstream.types import IntArray

_MARKER = "MARKER-of-the-reply"
_USER = {"role": "user", "content": "x"}


class TurnTokens:
    """What one tokenizer and its chat template put between turns. One for all rollouts of a model.

    Rendering costs more than everything else that a turn needs, and the rollouts of a group share their first prompt and many of their
    tool results: what was rendered lately is remembered by its messages (as JSON), tokens and all.
    """

    def __init__(self, tokenizer: ChatTokenizer):
        self.tokenizer = tokenizer
        self._prompt = lru_cache(maxsize=256)(lambda key: tokenizer.prompt_ids(*msgspec.json.decode(key)))
        self._link = lru_cache(maxsize=1024)(lambda key: tokenizer.encode(self._after_marker(msgspec.json.decode(key), generation=True)))
        end_T = tokenizer.encode(self._after_marker((), generation=False))
        ends = [i for i, token in enumerate(end_T.tolist()) if token in tokenizer.eos_ids]
        self._end_index = ends[0] if ends else None
        """Where the end-of-turn token stands in every link; None: the template writes none."""
        self._reply_start = len(tokenizer.render([_USER]))

    def prompt(self, messages: Sequence[dict], tools: Sequence[dict]) -> IntArray:
        """Ids of a conversation's first prompt. Raises EnvError: the template refuses the messages."""
        try:
            return self._prompt(_key((messages, tools)))
        except RequestError as error:
            raise EnvError(str(error)) from None

    def link(self, completion_T: IntArray, new_messages: Sequence[dict]) -> IntArray:
        """Ids between a completion and the next one, with `new_messages` in between. Raises EnvError: the template refuses them."""
        link_T = self._link(_key(new_messages))
        if self._end_index is None or not len(completion_T) or completion_T[-1] != link_T[self._end_index]:
            return link_T
        return link_T[self._end_index + 1 :]

    def reply(self, message: dict) -> IntArray:
        """Ids of an assistant message as the policy would sample them: its text and the end-of-turn token, nothing after.

        Raises ModelError when the template writes no end-of-turn token.
        """
        if self._end_index is None:
            raise ModelError("the chat template writes no end-of-sequence token after an assistant message; demonstrations need one")
        ids_T = self.tokenizer.encode(self.tokenizer.render([_USER, message], add_generation_prompt=False)[self._reply_start :])
        ends = np.flatnonzero(np.isin(ids_T, list(self.tokenizer.eos_ids)))
        return ids_T[: ends[0] + 1]

    def _after_marker(self, new_messages: Sequence[dict], generation: bool) -> str:
        conversation = [_USER, {"role": "assistant", "content": _MARKER}, *new_messages]
        try:
            text = self.tokenizer.render(conversation, add_generation_prompt=generation)
        except RequestError as error:
            raise EnvError(str(error)) from None
        _, marker, after = text.partition(_MARKER)
        if not marker:
            raise ModelError("the chat template does not show the content of assistant messages; use another template")
        return after


def _key(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=plain)


class TokenPrefix:
    """The token sequence of one conversation as it grows."""

    def __init__(self, turn_tokens: TurnTokens):
        self._turn_tokens = turn_tokens
        self._messages: list[dict[str, Any]] = []
        self._tokens_T: IntArray = np.zeros(0, np.int32)
        self._completion_T: IntArray = np.zeros(0, np.int32)

    def next_prompt(self, messages: Sequence[dict], tools: Sequence[dict] = ()) -> tuple[IntArray, int]:
        """Prompt ids for the assistant's next message, and how many of them are the tokens so far (0: a fresh start).

        A conversation that does not go on from the one before (messages edited, dropped, or summarised) is rendered afresh.
        """
        known = len(self._messages)
        if not known or list(messages[:known]) != self._messages:
            return self._turn_tokens.prompt(messages, tools), 0
        link_T = self._turn_tokens.link(self._completion_T, messages[known:])
        return np.concatenate([self._tokens_T, link_T]), len(self._tokens_T)

    def add(self, messages: Sequence[dict], prompt_T: IntArray, completion_T: IntArray, reply: dict) -> None:
        """Record a turn: `messages` was rendered as `prompt_T`, and `completion_T` came back, parsed as `reply`."""
        self._messages = [*(dict(message) for message in messages), dict(reply)]
        self._tokens_T = np.concatenate([prompt_T, completion_T])
        self._completion_T = completion_T
