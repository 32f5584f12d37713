"""Chat messages to token ids, turn by turn, keeping what was already fed and sampled byte for byte.

Rendering a whole conversation again and encoding it would change tokens that the policy sampled (other merges, other JSON spacing,
dropped reasoning): the engine's cache would miss and the logprobs would belong to other tokens. So each next prompt is

    previous prompt ids + completion ids + ids of the *link*

where the link is what the chat template writes between the end of the assistant's text and its next reply: the end of the assistant's
turn, the new messages, the generation prompt. It is cut out of a rendering in which a marker stands for the assistant's text:

    render([user "x", assistant MARKER, *new messages], generation prompt) = ... MARKER link

and its end-of-turn token is left out where the completion already ends with it. For a template that renders a message independently
of the ones before (ChatML, Llama 3), decoding these ids gives exactly the rendering of the whole conversation.

Which earlier completion a conversation goes on from is `chat.branches`. Suffix T: tokens. Knows neither engines nor environments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.errors import ModelError
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
        """Ids of a conversation's first prompt. Raises RequestError: the template refuses the messages."""
        return self._prompt(_key((messages, tools)))

    def link(self, completion_T: IntArray, new_messages: Sequence[dict]) -> IntArray:
        """Ids between a completion and the next one, with `new_messages` in between. Raises RequestError: the template refuses them."""
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
        _, marker, after = self.tokenizer.render(conversation, add_generation_prompt=generation).partition(_MARKER)
        if not marker:
            raise ModelError("the chat template does not show the content of assistant messages; use another template")
        return after


def _key(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=plain)
