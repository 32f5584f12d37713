"""Exchanges between processes: those that gradients pass through, and one that goes on in the background.

Shapes: N rows that leave or arrive, P processes of the group; whatever follows the first dimension is carried along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def all_to_all(x: Tensor, sent_P: Sequence[int], received_P: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows in the order of the process that they go to; back come rows in the order of the process that they come from."""
    return _AllToAll.apply(x, list(sent_P), list(received_P), group)  # pyright: ignore[reportReturnType]


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all processes, equally many each, in order of rank. The gradients of a row are added up where it came from.

    Every process of the group must use the result: the backward pass is an exchange too.
    """
    return _AllGather.apply(x, group)  # pyright: ignore[reportReturnType]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent_P: list[int], received_P: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.exchange = sent_P, received_P, group
        out = x.new_empty(sum(received_P), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received_P, sent_P, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent_P, received_P, group = ctx.exchange
        grad = grads[0].new_empty(sum(sent_P), *grads[0].shape[1:])
        dist.all_to_all_single(grad, grads[0].contiguous(), sent_P, received_P, group=group)
        return grad, None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        dist.all_gather(list(out.split(len(x))), x.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grads[0].new_empty(grads[0].shape[0] // ctx.group.size(), *grads[0].shape[1:])
        dist.reduce_scatter(grad, list(grads[0].contiguous().split(len(grad))), group=ctx.group)
        return grad, None


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows on their way to one process and from another one; either may be none."""

    rows: Tensor
    _sent: Tensor
    """Kept until it has left."""
    _works: tuple[Any, ...]

    @staticmethod
    def start(sent: Tensor, to: int, received: int, by: int, group: dist.ProcessGroup, tag: int = 0) -> Exchange:
        """`received` rows come from rank `by` of the group, as many as it sends. Both sides start theirs in the same order, or under
        another `tag`."""
        rows, works = sent.new_empty(received, *sent.shape[1:]), []
        if len(sent):
            works.append(dist.isend(sent, group=group, group_dst=to, tag=tag))
        if received:
            works.append(dist.irecv(rows, group=group, group_src=by, tag=tag))
        return Exchange(rows, sent, tuple(works))

    @staticmethod
    def nothing(like: Tensor) -> Exchange:
        return Exchange(like[:0], like[:0], ())

    def wait(self) -> Tensor:
        """The rows that came."""
        for work in self._works:
            work.wait()
        return self.rows
