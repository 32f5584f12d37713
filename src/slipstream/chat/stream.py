"""Incremental detokenisation: token ids in, as much text as is certain out.

A character may span tokens and a token's text may depend on its neighbour, so text is only released once it can no longer change. The
two-offset method is that of text-generation-inference and vLLM (vllm/transformers_utils/detokenizer_utils.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.chat.tokenizer import ChatTokenizer

_UNFINISHED = "\ufffd"


class TextStream:
    """Text of one growing completion. What `push` and `flush` return, joined, is `decode` of all ids, special tokens left out."""

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        """First token of the decoding window: the tokens up to `_done` are released and only there as left context."""
        self._done = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids; often empty in the middle of a character."""
        self._ids.extend(int(i) for i in ids)
        text = self._pending()
        if text.endswith(_UNFINISHED) or not text:
            return ""
        self._context, self._done = self._done, len(self._ids)
        return text

    def flush(self) -> str:
        """The rest, at the end of the completion: an unfinished character becomes U+FFFD."""
        text = self._pending()
        self._context = self._done = len(self._ids)
        return text

    def _pending(self) -> str:
        known = self._tokenizer.decode(self._ids[self._context : self._done], skip_special=True)
        return self._tokenizer.decode(self._ids[self._context :], skip_special=True)[len(known) :]
