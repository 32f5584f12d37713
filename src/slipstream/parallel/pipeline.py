"""Pipeline parallelism: each process keeps some layers; hidden states go forward from stage to stage, their gradients back.

Torch's schedules (`torch.distributed.pipelining`) decide who works on which row when. A micro-batch is a row: rows have lengths of their
own and a schedule has buffers of one shape, so hidden states are filled up for the way between two processes and cut again on arrival.
No layer sees the filling. Stage s is in process s mod pp: neighbours in a row of stages are neighbours in `Mesh.pipes`.

Everything runs within the forward pass of the one (sharded) model of the process, the loss too: FSDP then gathers before each use, in
both directions, in whatever order a schedule asks for. Gradients are reduced after every backward pass, as without a pipeline: nothing
but shards is kept between two of them.

Shapes: T tokens of a row here, P tokens of the longest, D hidden features, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from slipstream.config.parallel import ParallelConfig
from slipstream.models.context import Context
from slipstream.models.decoder import Decoder
from slipstream.models.language_model import LanguageModel
from slipstream.models.spec import ModelSpec
from slipstream.parallel.mesh import Mesh
from slipstream.parallel.stages import Stage, stages

_CPU = torch.device("cpu")


class Elsewhere(nn.Module):
    """In the place of a layer that another process holds."""


def own_layers(model: LanguageModel) -> list[nn.Module]:
    """The layers that this process holds."""
    return [layer for layer in model.decoder_layers if not isinstance(layer, Elsewhere)]


def own_stages(spec: ModelSpec, mesh: Mesh) -> list[Stage]:
    return [stage for stage in stages(spec, mesh.config.num_stages) if stage.number % mesh.config.pp == mesh.pipe]


def keep_stages(model: Decoder, mesh: Mesh) -> None:
    """Drop what other processes hold, in place; what stays keeps its name. The model can then be run by `run_pipeline` only."""
    own = own_stages(model.spec, mesh)
    kept = {layer for stage in own for layer in range(stage.first, stage.end)}
    for layer in range(model.spec.num_layers):
        if layer not in kept:
            model.layers[layer] = Elsewhere()
    if not own[0].is_first:
        model.register_parameter("embed", None)
    if not own[-1].is_last:
        model.register_parameter("norm", None)
        model.register_parameter("head", None)
    model.forward = _within  # pyright: ignore[reportAttributeAccessIssue]


def _within(work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`work` on `x` within the hooks of the model, which gather and let go of its weights."""
    return work(x)


@dataclass(frozen=True, slots=True)
class StageRun:
    """One pass of a row through a stage. Is called like a whole model."""

    model: Decoder
    stage: Stage
    x: Tensor
    """Hidden states [T, D] from the stage before; unused in the first."""

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def __call__(self, token_ids_T: Tensor, positions_T: Tensor, ctx: Context) -> Tensor:
        x_TD = self.model.enter(token_ids_T) if self.stage.is_first else self.x
        x_TD = self.model.through(x_TD, positions_T, ctx, self.stage.first, self.stage.end)
        return self.model.leave(x_TD) if self.stage.is_last else x_TD


def run_pipeline(model: Decoder, mesh: Mesh, lengths_R: Sequence[int], dtype: torch.dtype, row: Callable[[int, StageRun], Tensor]) -> None:
    """Forward and backward of rows of so many tokens; gradients add up in the parameters. All processes call this together.

    `row(i, run)` returns hidden states [T, D] of row i, of the last stage the loss. Losses are added, not averaged.
    """
    if not lengths_R:
        return
    parts = [_part(_Segment(model, stage, lengths_R, row), stage, max(lengths_R), dtype, mesh) for stage in own_stages(model.spec, mesh)]
    rows_R = torch.arange(len(lengths_R))
    try:
        _schedule(parts, len(lengths_R), mesh.config).step(rows_R, row=rows_R, target=rows_R, return_outputs=False)
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None  # torch puts shapes of arguments in the place of the reason


class _Segment(nn.Module):
    """A stage as torch's schedules want it: exchanges tensors of one shape."""

    def __init__(self, model: Decoder, stage: Stage, lengths_R: Sequence[int], row: Callable[[int, StageRun], Tensor]) -> None:
        super().__init__()
        self.model, self.stage, self.lengths_R, self.row = model, stage, lengths_R, row

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        """`x`: hidden states [P, D]; of the first stage anything. `row`: [1], its number."""
        length, stage = self.lengths_R[int(row)], self.stage
        out = self.model(lambda x: self.row(int(row), StageRun(self.model, stage, x)), x if stage.is_first else x[:length])
        return out if stage.is_last else F.pad(out, (0, 0, 0, max(self.lengths_R) - length))


def _part(segment: nn.Module, stage: Stage, longest: int, dtype: torch.dtype, mesh: Mesh) -> PipelineStage:
    """With the shapes of what comes and goes, or torch would run a forward and a backward pass to find out."""
    assert isinstance(segment, _Segment)
    hidden_PD = torch.empty(longest, segment.model.spec.hidden, dtype=dtype, requires_grad=True)
    comes = torch.empty(1, dtype=torch.int64) if stage.is_first else hidden_PD
    goes = torch.empty((), requires_grad=True) if stage.is_last else hidden_PD
    return PipelineStage(segment, stage.number, stage.count, _CPU, input_args=comes, output_args=goes, group=mesh.pipes)


def _schedule(parts: list[PipelineStage], num_rows: int, config: ParallelConfig) -> Any:
    options: dict[str, Any] = {"n_microbatches": num_rows, "loss_fn": lambda loss, _: loss, "scale_grads": False}
    if config.pp_schedule == "interleaved_1f1b":
        return ScheduleInterleaved1F1B(list(parts), **options)
    return {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[config.pp_schedule](parts[0], **options)
