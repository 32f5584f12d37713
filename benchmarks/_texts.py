"""Documents to train on: pieces of this repository's text, in the tokens of a small random model made for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks._process import ROOT
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.models.maker import make_model

MAX_TOKENS = 1024
"""Of a document, and of TRL's packed rows (its own default)."""


def make(folder: Path, preset: str, sizes: Mapping[str, int]) -> Path:
    """A model with random weights and a tokenizer of this repository's text."""
    make_model(folder, preset, repository_texts(), seed=0, split="words", **sizes)
    return folder


def repository_texts() -> list[str]:
    return [file.read_text() for file in [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]]


class Documents:
    """Pieces of this repository's text: lengths are log-normal (median 192, sigma 0.8), cut to 16 and `MAX_TOKENS`."""

    def __init__(self, folder: Path) -> None:
        tokenizer = ChatTokenizer.load(folder)
        self.tokens_T = np.concatenate([tokenizer.encode(text) for text in repository_texts()])

    def draw(self, count: int, seed: int) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(np.log(192), 0.8, count), 16, MAX_TOKENS).astype(int)
        starts = rng.integers(0, len(self.tokens_T) - MAX_TOKENS, count)
        return [self.tokens_T[at : at + length].tolist() for at, length in zip(starts, lengths, strict=True)]
