"""What leaves the GPU for the memory of its node. THE ONE PLACE that says so to the planner.

No key of the run file moves anything yet, so nothing is. When `trainer` gets such keys, `Offload.of` reads them here, and memory, levers
and their texts follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config.train import TrainerConfig

OPTIMIZER = "optimizer offload (no key of this build does it yet)"
ACTIVATIONS = "activation offload (no key of this build does it yet)"
"""What to write in the run file, as a refusal advises it."""


@dataclass(frozen=True, slots=True)
class Offload:
    """What is kept on the host."""

    optimizer: bool = False
    """Moments."""
    activations: bool = False
    """What each layer keeps for the backward pass, but for two layers on their way."""

    @classmethod
    def of(cls, trainer: TrainerConfig) -> Offload:
        return cls()
