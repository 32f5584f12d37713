"""float32 weights to train, and the copy of them in the compute dtype that runs forward and backward.

In float32 both are the same module. In bfloat16 a second module computes; each of its gradients is added to the float32 gradient of
its master as soon as it is complete, so rows accumulate in float32, and after an optimizer step the copy is rounded from the masters.
What is published is the copy: exactly the weights that the next step trains from.

A model that is sharded over processes needs no second module: FSDP keeps float32 shards, gathers them rounded, and adds up gradients
in float32 (`parallel.fsdp`). Both are then the sharded module, and rounding is left to whoever publishes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from slipstream.models.decoder import Decoder


class Weights:
    """`master` is optimised and checkpointed; `compute` runs and is published."""

    def __init__(self, master: Decoder, dtype: torch.dtype) -> None:
        """`dtype` is that of the copy; float32 for none."""
        self.master = master
        self.compute = master
        if dtype != torch.float32:
            self.compute = copy.deepcopy(master).to(dtype)
            for source, target in zip(self.compute.parameters(), master.parameters(), strict=True):
                if source.requires_grad:
                    source.register_post_accumulate_grad_hook(_hand_over_to(target))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The masters that train."""
        return [p for p in self.master.parameters() if p.requires_grad]

    @torch.no_grad()
    def sync(self) -> None:
        """Round the masters into the compute copy."""
        if self.compute is not self.master:
            for copied, master in zip(self.compute.parameters(), self.master.parameters(), strict=True):
                copied.copy_(master)


def _hand_over_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hand_over(parameter: Tensor) -> None:
        assert parameter.grad is not None
        grad = parameter.grad.to(master.dtype)
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        parameter.grad = None

    return hand_over
