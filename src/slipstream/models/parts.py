"""Parts of a `ModelSpec` that only some models have. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Yarn:
    """Rotary positions stretched beyond the context of pre-training (see `models.rotary`)."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    """Features that turn more often than `beta_fast` within the original context stay, those below `beta_slow` are stretched."""
    truncate: bool
    table_scale: float
    """Of cos and sin."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention (see `models.latent`)."""

    q_rank: int
    """Features of the short vector of queries; 0: none."""
    kv_rank: int
    nope_dim: int
    """Features of a query or key head that carry no position."""
    rope_dim: int
    v_dim: int
    interleaved: bool
    """The checkpoint rotates features 2i and 2i + 1 together, not i and i + r/2."""
    score_gain: float
    """Scores are multiplied with this beside (nope_dim + rope_dim)^-1/2."""


@dataclass(frozen=True, slots=True)
class ClampedGlu:
    """The activation of gpt-oss's experts (see `ops.clamped_experts`)."""

    alpha: float
    """Steepness of the gate's sigmoid."""
    limit: float
    """Gates are cut above it, the other factors at ± it."""


@dataclass(frozen=True, slots=True)
class Indexer:
    """Sparse attention: which tokens a token sees is chosen by an indexer (see `models.indexer`)."""

    heads: int
    head_dim: int
    top_k: int
    """Tokens that a token sees at most."""
    interleaved: bool
    """As in `Latent`, of the indexer's own heads."""
    sources: tuple[int, ...]
    """Of each layer: the layer whose choice it takes, itself or an earlier one."""
