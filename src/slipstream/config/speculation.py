"""[engine.speculation]: tokens that the engine guesses and verifies, several in one step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.config.base import Section


class NoSpeculation(Section):
    """One token a step."""

    type: Literal["off"] = "off"


class PromptLookup(Section):
    """Guess what followed the same tokens earlier in the sequence, prompt included. Tokens and logprobs are those of type = "off": each
    position is sampled as ever, and a guess only saves the step when it is what was sampled."""

    type: Literal["prompt_lookup"] = "prompt_lookup"
    max_draft_tokens: int = Field(default=12, ge=1, le=256)
    """Most guesses of a sequence in a step. There are fewer where guesses of that sequence were wrong lately, where many sequences share
    the step, and where the step is full (engine.max_step_tokens)."""
    min_match_tokens: int = Field(default=2, ge=1, le=32)
    """Last tokens of the sequence that must have stood together before. Of longer matches, the longest is taken."""
    overhead_tokens: float = Field(default=4.0, ge=0)
    """What a step costs beside its tokens, in tokens. In a step of n tokens a guess is made when it is right more often than
    n / (n + overhead_tokens): below that, it costs more than it brings."""


Speculation = Annotated[NoSpeculation | PromptLookup, Field(discriminator="type")]
