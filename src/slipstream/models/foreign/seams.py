"""Our seams in transformers' modules: at attention, at routers, and at experts through transformers' own interfaces.

Layers and routers change class in place, to a subclass that calls the original within the seam (torch's `fully_shard` does the same to the
modules that it shards): names, parameters and copies of the module stay what they were. Everything here is called within one decoder
layer, which knows the context of the pass; a layer that is recomputed in the backward pass is therefore in the same context again.

Interfaces: `AttentionInterface` and `ExpertsInterface` of transformers 5; routers are what it records router logits of
(`_can_record_outputs`). Shapes: T tokens, H query heads, G key/value heads, d head features, E experts, K experts per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from slipstream.models.context import Context
from slipstream.ops import Sight

NAME = "slipstream"
"""Of our attention and experts functions in transformers' registries."""
CONTEXT = "slipstream_context"
"""Argument that carries the context from the model's call to its layers."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The decoder layer that is running."""

    index: int
    window: int
    ctx: Context


_RUNNING: ContextVar[_Layer] = ContextVar("slipstream_layer")


class LayerSeam:
    """Mixin of a decoder layer: what runs within knows the context."""

    seam_index: int
    seam_window: int

    def forward(self, *args: Any, slipstream_context: Context, **kwargs: Any) -> Any:
        running = _RUNNING.set(_Layer(self.seam_index, self.seam_window, slipstream_context))
        try:
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            _RUNNING.reset(running)


class RouterSeam:
    """Mixin of a router: the choice of experts is the context's, gate weights are computed by the router at whatever experts it took."""

    seam_moe_layer: int
    seam_experts: int
    seam_top_k: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Choice(self, _RUNNING.get().ctx):
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class _Choice(TorchFunctionMode):
    """Answers the router's top-k over all experts: ids from the context, and the values that stand there, with their gradient."""

    def __init__(self, router: RouterSeam, ctx: Context) -> None:
        super().__init__()
        self._router, self._ctx = router, ctx

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (call := top_k_call(func, args, kwargs)) is None or call[1:] != (self._router.seam_experts, self._router.seam_top_k):
            return func(*args, **kwargs)
        scores, _, top_k = call
        ids_TK = self._ctx.route(self._router.seam_moe_layer, scores.detach().float(), top_k).long()
        return torch.return_types.topk((scores.gather(1, ids_TK), ids_TK))


def top_k_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int, int] | None:
    """(scores, their width, k) if this is a top-k over the columns of a matrix: not one within groups of experts."""
    if func not in (torch.topk, torch.Tensor.topk):
        return None
    given = dict(zip(("input", "k", "dim"), args, strict=False)) | kwargs
    scores = given["input"]
    return (scores, scores.shape[1], int(given["k"])) if scores.dim() == 2 and given.get("dim", -1) in (-1, 1) else None


def seam(module: nn.Module, mixin: type[LayerSeam] | type[RouterSeam], **fields: int) -> None:
    """Put the seam around `module`, in place. `fields` are those of the mixin."""
    module.__class__ = _seamed(mixin, type(module))
    for name, value in fields.items():
        setattr(module, name, value)


@lru_cache
def _seamed(mixin: type, kind: type) -> type:
    return type(f"Seamed{kind.__name__}", (mixin, kind), {})


@contextlib.contextmanager
def within_layer(ctx: Context) -> Iterator[None]:
    """Run a router alone, as if a layer ran it."""
    running = _RUNNING.set(_Layer(0, 0, ctx))
    try:
        yield
    finally:
        _RUNNING.reset(running)


def running_layer() -> tuple[int, Context]:
    """(index, context) of the decoder layer that is running. Raises LookupError outside of one."""
    running = _RUNNING.get()
    return running.index, running.ctx


def _attend(
    module: nn.Module,
    q_1HTd: Tensor,
    k_1GTd: Tensor,
    v_1GTd: Tensor,
    attention_mask: None = None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention through `Context.attend`. `s_aux`: sinks. What else transformers passes was looked at by the probe (`foreign.probe`).

    Keys and values of different sizes are filled up with zeros, as in `latent`. The context scales by d^-1/2; another scale is a factor of
    the queries.
    """
    running = _RUNNING.get()
    q_THd, k_TGd, v_TGd = (x[0].transpose(0, 1) for x in (q_1HTd, k_1GTd, v_1GTd))
    q_dim, v_dim = q_THd.shape[-1], v_TGd.shape[-1]
    head_dim = max(q_dim, v_dim)
    factor = 1.0 if scaling is None and head_dim == q_dim else (scaling or q_dim**-0.5) * head_dim**0.5
    if abs(factor - 1) > 1e-12:
        q_THd = q_THd * factor
    q_THd, k_TGd, v_TGd = (F.pad(x, (0, head_dim - x.shape[-1])) if x.shape[-1] < head_dim else x for x in (q_THd, k_TGd, v_TGd))
    sight = Sight(running.window, s_aux) if running.window or s_aux is not None else None
    return running.ctx.attend(running.index, q_THd.contiguous(), k_TGd.contiguous(), v_TGd.contiguous(), sight)[None, ..., :v_dim], None


def _experts(module: nn.Module, hidden_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """transformers' grouped products; on the meta device only the shape."""
    return torch.empty_like(hidden_TD) if hidden_TD.is_meta else grouped_mm_experts_forward(module, hidden_TD, ids_TK, gates_TK)


AttentionInterface.register(NAME, _attend)
ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
