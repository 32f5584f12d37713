"""How many rollouts, tokens, rows and passes one optimizer step is made of.

Symbols: S samples of a step, n tokens of a sample (assumed equal), R tokens of a row, t tokens of a row in one process, K experts per
token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config.run import BySamples, RunConfig
from slipstream.models.spec import ModelSpec
from slipstream.planner.figures import Figure
from slipstream.planner.layout import Layout


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The sizes of one step. `sample_tokens` is an assumption: model.seq_len, the most that there can be, or a given mean."""

    sample_tokens: int
    samples: int
    row_tokens: int
    """Of a full row: no more than a batch has."""
    rows: int
    passes: int
    """Rows that each process runs forward and backward, one after the other."""
    own_tokens: int
    """t: of a row, in one process."""

    @classmethod
    def of(cls, config: RunConfig, layout: Layout, mean_tokens: int | None = None) -> Arithmetic:
        length, batch = min(mean_tokens or config.model.seq_len, config.model.seq_len), config.orchestrator.batch
        samples = batch.samples if isinstance(batch, BySamples) else -(-batch.tokens // length)
        per_row = max(1, config.trainer.row_tokens // length)
        rows = -(-samples // per_row)
        row_tokens = min(samples, per_row) * length
        return cls(length, samples, row_tokens, rows, -(-rows // layout.data), -(-row_tokens // layout.cp))

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.samples * self.sample_tokens


def batch_figures(config: RunConfig, spec: ModelSpec, layout: Layout, step: Arithmetic) -> tuple[Figure, ...]:
    """The batch arithmetic with its units."""
    orchestrator, lag = config.orchestrator, config.orchestrator.max_off_policy_steps
    n, data, limits = step.sample_tokens, layout.data, orchestrator.concurrency
    by = f"orchestrator.batch: {orchestrator.batch.type}"
    figures = [
        Figure("samples a step", step.samples, "samples", by),
        *(
            Figure(f"samples a group, {env.label}", env.group_size, "samples", "envs.group_size: rollouts of one task")
            for env in config.envs
        ),
        Figure("tokens a sample", n, "tokens", f"assumed; at most model.seq_len = {config.model.seq_len:,}"),
        Figure("tokens a step", step.tokens, "tokens", f"{step.samples:,} samples x {n:,}"),
        Figure("row", step.row_tokens, "tokens", f"whole samples within trainer.row_tokens = {config.trainer.row_tokens:,}"),
        Figure("row, of each process", step.own_tokens, "tokens", f"row / cp = {step.row_tokens:,} / {layout.cp}"),
        Figure("rows a step", step.rows, "rows", f"{step.samples:,} samples / {max(1, config.trainer.row_tokens // n)} a row"),
        Figure("data ranks", data, "ranks", f"dp_replicate x dp_shard = {layout.dp_replicate} x {layout.dp_shard}"),
        Figure("micro-batches a step", step.passes, "passes of one row", f"rows / data ranks = {step.rows} / {data}, rounded up"),
        Figure(
            "places without a row",
            step.passes * data - step.rows,
            "rows",
            "passes x data ranks - rows: rows are split to fill them, or empty",
        ),
    ]
    if spec.moe_layers:
        formula = f"t x ep x K / E = {step.own_tokens:,} x {layout.ep} x {spec.top_k} / {spec.num_experts}, if all are chosen equally often"
        tokens = step.own_tokens * layout.ep * spec.top_k / spec.num_experts
        figures.append(Figure("tokens an expert, each pass and layer", tokens, "tokens", formula))
    figures += [
        Figure("rollouts in flight, first", limits.initial, "rollouts", "orchestrator.concurrency.initial"),
        Figure("rollouts in flight, most", limits.max, "rollouts", "orchestrator.concurrency.max"),
        Figure(
            "samples issued, not yet trained, most",
            (lag + 1) * step.samples,
            "samples",
            f"(max_off_policy_steps + 1) x samples = {lag + 1} x {step.samples}: what is issued later would be too old for any batch",
        ),
        Figure("lag of a trained token, most", lag, "versions", "orchestrator.max_off_policy_steps; counted token by token"),
        Figure("steps", config.max_steps, "steps", "max_steps"),
    ]
    return tuple(figures)
