"""Tables of rotary positions, with YaRN where the model has it. What they rotate is for the attention to say.

Shapes: P positions, r rotated features of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.models.parts import Yarn
from slipstream.models.spec import ModelSpec


def rope_tables(spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [P, r] with the angles repeated in both halves; computed in fp32.

    Source: Su et al., "RoFormer", 2021, section 3.2.2: angle = position · theta^(-2i/r).
    """
    powers = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device=device) / spec.rotary_dim
    frequencies = 1.0 / spec.rope_theta**powers
    scale = 1.0
    if spec.yarn is not None:
        frequencies, scale = _stretched(frequencies, spec.rope_theta, spec.yarn), spec.yarn.table_scale
    positions_P = torch.arange(spec.max_positions, dtype=torch.float32, device=device)
    angles_Pr = torch.outer(positions_P, frequencies).repeat(1, 2)
    return (angles_Pr.cos() * scale).to(dtype), (angles_Pr.sin() * scale).to(dtype)


def _stretched(frequencies: Tensor, theta: float, yarn: Yarn) -> Tensor:
    """Slow features are slowed down by `factor`, fast ones stay, with a linear ramp between the two.

    Source: Peng et al., "YaRN", 2023, section 3.2: fast and slow are told by the turns within the original context. The ramp runs over
    the index of the feature, as in the published checkpoints.
    """
    rotary_dim = 2 * len(frequencies)

    def index_that_turns(times: float) -> float:
        return rotary_dim * math.log(yarn.original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index_that_turns(yarn.beta_fast), index_that_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    index = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    slow = ((index - first) / (last - first or 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * slow + frequencies * (1 - slow)


def halves(x_THr: Tensor) -> Tensor:
    """The kernel rotates pairs (i, i + r/2); interleaved checkpoints have (2i, 2i + 1). The order of features within a head is free."""
    return torch.cat((x_THr[..., 0::2], x_THr[..., 1::2]), -1)
