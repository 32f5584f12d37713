"""A completion that outlives its replica: what was heard so far becomes part of the prompt, and another replica goes on from there.

The seed's random numbers belong to positions in the sequence, so a seeded request gets the tokens that it would have got; tokens,
logprobs and version stamps are put together, and the routing rows of the whole sequence come from the replica that ends it (which
processes it anew, as an engine does that was short of KV memory). A stop string that lies across the seam is not seen by the engine;
its APIs cut the text all the same. Suffix N: sampled tokens.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np

from slipstream.ports import Hear
from slipstream.types import Completion, GenerateRequest, TokenPiece, Versions


class Resumable:
    """One streamed request over several tries."""

    def __init__(self, request: GenerateRequest, hear: Hear):
        self._request = request
        self._forward = hear
        self._pieces: list[TokenPiece] = []

    @property
    def num_heard(self) -> int:
        return sum(len(piece.tokens_N) for piece in self._pieces)

    @property
    def request(self) -> GenerateRequest:
        """What is left to ask for."""
        if not self._pieces:
            return self._request
        sampling = replace(self._request.sampling, max_tokens=self._request.sampling.max_tokens - self.num_heard)
        prompt_T = np.concatenate([self._request.prompt_T, *(piece.tokens_N for piece in self._pieces)])
        return replace(self._request, prompt_T=prompt_T, sampling=sampling)

    def hear(self, piece: TokenPiece) -> None:
        self._pieces.append(piece)
        self._forward(piece)

    def whole(self, completion: Completion, before: int) -> Completion:
        """The completion of the last try with what was heard `before` it (that many pieces) in front."""
        pieces = self._pieces[:before]
        if not pieces:
            return completion
        heard = [(piece.version, len(piece.tokens_N)) for piece in pieces]
        return replace(
            completion,
            tokens_N=np.concatenate([*(piece.tokens_N for piece in pieces), completion.tokens_N]),
            logprobs_N=np.concatenate([*(piece.logprobs_N for piece in pieces), completion.logprobs_N]),
            versions=_joined((*heard, *completion.versions)),
            cached_tokens=min(completion.cached_tokens, len(self._request.prompt_T)),
        )

    @property
    def num_pieces(self) -> int:
        return len(self._pieces)


def _joined(segments: Versions) -> Versions:
    """Neighbouring segments of one version as one."""
    return tuple((version, sum(n for _, n in run)) for version, run in groupby(segments, key=lambda segment: segment[0]))
