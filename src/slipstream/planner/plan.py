"""The whole plan of a run: what `slipstream explain` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.config.run import RunConfig
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.models.impl import read_spec
from slipstream.models.spec import ModelSpec
from slipstream.planner.batch import Arithmetic, batch_figures
from slipstream.planner.checks import problems
from slipstream.planner.comm import communication
from slipstream.planner.figures import Figure, total
from slipstream.planner.layout import Layout
from slipstream.planner.memory import Memory, memory


@dataclass(frozen=True, slots=True)
class Plan:
    """Figures by subject, and everything that speaks against the run."""

    config: RunConfig
    layout: Layout
    model: tuple[Figure, ...]
    batch: tuple[Figure, ...]
    memory: Memory
    communication: tuple[Figure, ...]
    problems: tuple[SlipstreamError, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, bytes as numbers."""
        need = self.memory
        return {
            "run": self.config.name,
            "layout": self.layout.as_dict(),
            "model": [figure.as_dict() for figure in self.model],
            "batch": [figure.as_dict() for figure in self.batch],
            "memory": {
                "process": [figure.as_dict() for figure in need.process],
                "process_bytes": total(need.process),
                "process_limit_bytes": need.process_limit,
                "node": [figure.as_dict() for figure in need.node],
                "node_bytes": total(need.node),
                "node_limit_bytes": need.node_limit,
            },
            "communication": [figure.as_dict() for figure in self.communication],
            "problems": [str(problem) for problem in self.problems],
        }


def plan(config: RunConfig, mean_tokens: int | None = None) -> Plan:
    """Reads config.json and nothing else. Raises ModelError: an unknown model; ConfigError: a pipeline, whose stages are unlike one
    another, or adapters; neither is planned yet."""
    if config.trainer.parallel.pp > 1:
        raise ConfigError(
            f"trainer.parallel.pp = {config.trainer.parallel.pp}: `slipstream explain` does not plan pipelines; set pp = 1 to see the plan "
            "of the other sizes (their processes then hold all layers)"
        )
    if config.trainer.lora is not None:
        raise ConfigError("trainer.lora: `slipstream explain` does not plan adapters; leave [trainer.lora] out to see full training")
    spec = read_spec(config.model.path, config.model.impl)
    layout = Layout.of(config, spec)
    step, full = Arithmetic.of(config, layout, mean_tokens), Arithmetic.of(config, layout)
    return Plan(
        config,
        layout,
        model_figures(spec),
        batch_figures(config, spec, layout, step),
        memory(config, spec, layout, full),
        communication(config, spec, layout, step),
        tuple(problems(config, spec)),
    )


def model_figures(spec: ModelSpec) -> tuple[Figure, ...]:
    """Parameters. Active ones are those that a token is multiplied with: the embedding, which is looked up, does not count."""
    looked_up = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden
    routed = spec.expert_params * spec.num_experts * len(spec.moe_layers)
    figures = [
        Figure("parameters", spec.num_params, "", "stored, without prediction layers"),
        Figure(
            "active parameters", spec.num_active_params - looked_up, "", "multiplied for a token: chosen experts, without the embedding"
        ),
        Figure("layers", spec.num_layers, "", f"{len(spec.moe_layers)} with experts"),
    ]
    if spec.moe_layers:
        figures += [
            Figure(
                "of that, routed experts",
                routed,
                "",
                f"{spec.num_experts} experts x {spec.expert_params:,} x {len(spec.moe_layers)} layers",
            ),
            Figure("experts a layer", spec.num_experts, "", f"{spec.top_k} of them chosen by a token"),
        ]
    return tuple(figures)
