"""What the caller of one streamed request has heard so far: tokens in order, each with the policy version that sampled it.

vLLM stamps its tokens when a request ends. Until the first update they are of the version that was live at the beginning; after each
update the server is asked once where it changed. Shapes: N tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from slipstream.errors import EngineError
from slipstream.ports import Hear
from slipstream.serving.vllm import calls
from slipstream.types import GenerateRequest, TokenPiece

log = logging.getLogger(__name__)

Spans = Callable[[str], Awaitable[Sequence[tuple[int, int]]]]
"""Request id -> (version, its first token) of a request that runs, in order; none when it has ended."""


class Told:
    """Pieces of vLLM's answer go in, and are told while it is certain what sampled them."""

    def __init__(self, request: GenerateRequest, hear: Hear, spans: Spans, version: int, update: int):
        """`version` is live since update number `update`."""
        self.pieces: list[Mapping[str, Any]] = []
        """The whole answer so far."""
        self._request, self._hear, self._spans = request, hear, spans
        self._version, self._update, self._count = version, update, 0
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._silent = False

    def add(self, piece: Mapping[str, Any]) -> None:
        """The last tokens, with which it ended, are in the completion alone. Raises EngineUnavailable: a token without a logprob."""
        self.pieces.append(piece)
        choice = next(iter(piece["choices"]), None)
        if choice is not None and choice["finish_reason"] is None:
            self._waiting.append(calls.tokens_of(self._request, choice))

    async def tell(self, version: int, update: int) -> None:
        """All that waits. `version` is live since update number `update`: it or earlier ones sampled what waits."""
        if not self._waiting or self._silent:
            return
        spans = [(self._version, 0)] if update == self._update else await self._ask()
        if not spans:
            self._silent = True  # it has ended, or nobody knows: the rest comes with the completion
            return
        if spans[-1][0] == version:
            self._version, self._update = version, update
        tokens_N, logprobs_N = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting.clear()
        first, self._count = self._count, self._count + len(tokens_N)
        for (number, start), (_, end) in pairwise([*spans, (0, self._count)]):
            begin, end = max(start, first) - first, min(end, self._count) - first
            if begin < end:
                self._hear(TokenPiece(tokens_N[begin:end], logprobs_N[begin:end], number))

    async def _ask(self) -> Sequence[tuple[int, int]]:
        try:
            return await self._spans(self._request.id)
        except EngineError as error:  # another version of vLLM; where the server is gone, the stream itself says so
            log.warning("request %s is heard no further, its completion will be whole: %s", self._request.id, error)
            return []
