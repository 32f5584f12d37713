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
    return AllToAll(x, sent_P, received_P, group).wait()


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all processes, equally many each, in order of rank. The gradients of a row are added up where it came from.

    Every process of the group must use the result: the backward pass is an exchange too.
    """
    return _AllGather.apply(x, group)  # pyright: ignore[reportReturnType]


class AllToAll:
    """An `all_to_all` that goes on beside other work until `wait`. So does its gradient's, from where the backward pass meets `wait` to
    where it meets the start. All processes start and wait in the same order."""

    def __init__(self, x: Tensor, sent_P: Sequence[int], received_P: Sequence[int], group: dist.ProcessGroup) -> None:
        self._sent_P, self._received_P, self._group = list(sent_P), list(received_P), group
        self._way: tuple[dist.Work, Tensor, Tensor] | None = None
        """(work, what comes, what leaves) of the exchange that goes on, forward or backward."""
        self._rows = _Start.apply(x, self)

    def wait(self) -> Tensor:
        """The rows that came."""
        return _Wait.apply(self._rows, self)  # pyright: ignore[reportReturnType]

    def start(self, x: Tensor, back: bool) -> Tensor:
        leave, come = (self._received_P, self._sent_P) if back else (self._sent_P, self._received_P)
        x, out = x.contiguous(), x.new_empty(sum(come), *x.shape[1:])
        work = dist.all_to_all_single(out, x, come, leave, group=self._group, async_op=True)
        assert work is not None
        self._way = work, out, x
        return out

    def finish(self) -> Tensor:
        assert self._way is not None
        work, out, _ = self._way
        work.wait()
        self._way = None
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: AllToAll) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.exchange = exchange
        return exchange.start(x, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.finish(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: AllToAll) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.exchange = exchange
        exchange.finish()
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.exchange.start(grads[0], back=True)
        return grads[0], None  # only its shape counts: `_Start` has the gradient


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
