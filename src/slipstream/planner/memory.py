"""Memory of one trainer process and of one node, from the shapes of the model and the settings of the run.

Symbols: P stored parameters, n processes that share a copy of the weights (fsdp = dp_shard x cp), R tokens of the longest row, t of them in
one process (R / cp), L layers, h hidden features, V vocabulary, K experts per token, b bytes of the compute dtype (4 or 2).

Sources: masters, gradients and AdamW's moments in float32, 16 bytes a parameter: Rajbhandari et al., "ZeRO", 2020, section 3.1. Two layers
gathered at a time, one of them ahead: torch's FSDP2. The rest follows the code that is named in the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from slipstream.config.run import RunConfig
from slipstream.config.train import OptimConfig
from slipstream.engine.room import MIB, routing_item_bytes
from slipstream.engine.wide.fit import params_here
from slipstream.models.spec import ModelSpec
from slipstream.planner.activations import DISPATCH_BUFFERS, dispatched_features, feed_forward_bytes, kept_bytes
from slipstream.planner.batch import Arithmetic
from slipstream.planner.figures import GB, Figure, total
from slipstream.planner.layout import Layout

ROW_BYTES = 30
"""A token in a batch, beside its expert ids: types.MicroBatch."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is needed, and what there is."""

    process: tuple[Figure, ...]
    """Of one process: on its GPU, or in the memory of its node."""
    node: tuple[Figure, ...]
    """In the memory of one node. On CPUs the processes are part of it."""
    process_limit: float | None
    """Bytes that a process may fill; None on CPUs, where the node has a limit only."""
    node_limit: float

    @property
    def excess(self) -> float:
        """Bytes that are missing, in the place where most are; at most 0 when it fits."""
        over_node = total(self.node) - self.node_limit
        return over_node if self.process_limit is None else max(over_node, total(self.process) - self.process_limit)


class Sizes:
    """What the memory figures have in common."""

    def __init__(self, config: RunConfig, spec: ModelSpec, layout: Layout, step: Arithmetic) -> None:
        self.config, self.spec, self.layout, self.step = config, spec, layout, step
        self.trainer, self.on_gpu = config.trainer, config.cluster.gpus_per_node > 0
        self.b = 4 if config.trainer.dtype == "float32" else 2
        self.lean = self.on_gpu or self.b == 4
        self.row = min(config.trainer.row_tokens, step.samples * config.model.seq_len)
        self.t = -(-self.row // layout.cp)
        self.routers = len(spec.moe_layers) * spec.num_experts * (spec.hidden + spec.router_logit_bias)
        biases = len(spec.moe_layers) * spec.num_experts * spec.router_bias
        self.trained = spec.num_params - spec.indexer_params - biases - self.routers * config.trainer.freeze_router
        self.matrices = spec.num_params - spec.end_params - spec.indexer_params - self.routers

    @property
    def gathered_layer(self) -> float:
        """Parameters of the largest layer as one process gathers it: of the experts, those of its ep rank."""
        experts = self.spec.expert_params * self.spec.num_experts / self.layout.ep
        return max(self.spec.layer_params(i) + experts * (i in self.spec.moe_layers) for i in range(self.spec.num_layers))


def memory(config: RunConfig, spec: ModelSpec, layout: Layout, step: Arithmetic) -> Memory:
    """The plan of memory. Nothing is allocated."""
    sizes = Sizes(config, spec, layout, step)
    process = (*_states(sizes), *_gathered(sizes), *_activations(sizes), _logits(sizes))
    process = tuple(figure for figure in process if figure.value)
    cluster = config.cluster
    there = cluster.host_memory_gb * GB if cluster.host_memory_gb else psutil.virtual_memory().total
    limit = cluster.gpu_memory_gb * GB * cluster.usable_frac if cluster.gpu_memory_gb else None
    return Memory(process, _node(sizes, process), limit, there * cluster.usable_frac)


def moment_bytes(optim: OptimConfig, sizes: Sizes) -> float:
    """Of all moments together: `trainer.rules`."""
    item = 4 if optim.moments == "float32" else 2
    if optim.type == "adamw":
        return 2 * item * sizes.trained
    if optim.type == "muon":  # norms and biases count as matrices here
        return item * (2 * sizes.trained - min(sizes.matrices, sizes.trained))
    return item * sizes.trained if optim.momentum else 0


def _states(s: Sizes) -> list[Figure]:
    p, n, optim = s.spec.num_params, s.layout.fsdp, s.trainer.optim
    moments = moment_bytes(optim, s)
    figures = [
        Figure("master weights", 4 * p / n, "bytes", f"4 P / n = 4 x {p:,} / {n}"),
        Figure("gradients", 4 * s.trained / n, "bytes", f"4 x trained parameters / n = 4 x {s.trained:,} / {n}"),
    ]
    if not s.trainer.offload.moments:
        name, each = f"moments ({optim.type}, {optim.moments})", moments / s.trained
        figures.append(Figure(name, moments / n, "bytes", f"{each:.3g} x trained parameters / n = {each:.3g} x {s.trained:,} / {n}"))
    if n * s.layout.dp_replicate == 1 and s.b == 2:
        figures.append(Figure("compute copy", 2 * p, "bytes", f"2 P = 2 x {p:,} (trainer.precision)"))
        if s.trainer.dtype == "float8":
            figures.append(Figure("FP8 codes", s.matrices, "bytes", f"1 x matrices = {s.matrices:,}"))
    return figures


def _gathered(s: Sizes) -> list[Figure]:
    """Of FSDP: what is whole for a while. One process has nothing to gather."""
    if s.layout.processes == 1:
        return []
    layer, ends = s.gathered_layer, s.spec.end_params
    experts = f"layer with {s.spec.num_experts} / {s.layout.ep} experts" if s.spec.moe_layers else "largest layer"
    figures = [
        Figure("gathered layer", s.b * layer, "bytes", f"b x {experts} = {s.b} x {layer:,.0f}"),
        Figure("gathered layer, next one", s.b * layer, "bytes", "the same, gathered ahead"),
        Figure("gathered embedding, head", s.b * ends, "bytes", f"b x {ends:,}: whole for the whole pass (parallel.fsdp)"),
        Figure("gradients of embedding, head", s.b * ends, "bytes", f"b x {ends:,}: whole until the end of the pass"),
        Figure("gradients of a layer", (s.b + 4) * layer, "bytes", f"(b + 4) x {layer:,.0f}: as computed, and float32 to be added up"),
    ]
    if s.trainer.dtype == "float8":
        figures.append(Figure("FP8 codes of a layer", layer, "bytes", f"1 x {layer:,.0f}"))
    return figures


def _activations(s: Sizes) -> list[Figure]:
    spec, t, layers = s.spec, s.t, range(s.spec.num_layers)
    kept = [kept_bytes(spec, i, s.b, s.lean) * t for i in layers]
    crossing = _crossing_bytes(s)
    buffer = dispatched_features(spec) * t * s.b if s.layout.ep > 1 else 0
    own = f"t = {t:,}"
    if s.trainer.recompute == "layer":
        inputs = s.b * spec.hidden * t
        count, note = (min(2, len(kept)), " (two on their way)") if s.trainer.offload.activations else (len(kept), "")
        return [
            Figure("inputs of the layers", inputs * count, "bytes", f"b h t x layers{note} = {s.b} x {spec.hidden} x {t:,} x {count}"),
            Figure("activations of a layer, again", max(kept), "bytes", f"the layer that keeps most (planner.activations), {own}"),
            Figure("keys, values of the row (cp)", crossing, "bytes", _crossing_formula(s)),
            Figure("MoE dispatch buffers", DISPATCH_BUFFERS * buffer, "bytes", f"{DISPATCH_BUFFERS} x t K h b, {own}"),
        ]
    again = [feed_forward_bytes(spec, i, s.b, s.lean) * t for i in layers]
    if s.trainer.recompute == "feed_forward":
        kept, kept_buffers = [all_of_it - part for all_of_it, part in zip(kept, again, strict=True)], DISPATCH_BUFFERS
    else:
        again, kept_buffers = [0], len(spec.moe_layers) * 2 + 2
    return [
        Figure("activations", sum(kept), "bytes", f"what all layers keep (planner.activations), {own}"),
        Figure("activations of a feed-forward part, again", max(again), "bytes", f"the one that keeps most, {own}"),
        Figure("keys, values of the row (cp)", crossing * len(kept), "bytes", f"{len(kept)} layers x ({_crossing_formula(s)})"),
        Figure("MoE dispatch buffers", kept_buffers * buffer, "bytes", f"{kept_buffers} x t K h b, {own}"),
    ]


def _crossing_bytes(s: Sizes) -> int:
    return crossing_features(s.spec) * s.row * s.b if s.layout.cp > 1 and s.trainer.parallel.cp_method == "all_gather" else 0


def _crossing_formula(s: Sizes) -> str:
    return f"b x {crossing_features(s.spec)} features x R = {s.b} x {crossing_features(s.spec)} x {s.row:,}"


def crossing_features(spec: ModelSpec) -> int:
    """Features a token that a layer gathers with cp_method = all_gather. Sparse attention: latent and index keys."""
    if spec.indexer is not None:
        return spec.kv_down_rows + spec.indexer.head_dim
    return 2 * spec.num_kv_heads * spec.head_dim


def _logits(s: Sizes) -> Figure:
    chunk = min(s.trainer.logprob_chunk_tokens, s.t)
    whole = s.t * s.spec.vocab_size * 4 / GB
    return Figure(
        "logits",
        chunk * s.spec.vocab_size * 4,
        "bytes",
        f"4 V x logprob_chunk_tokens = 4 x {s.spec.vocab_size:,} x {chunk:,}; {whole:,.3g} GB at once",
    )


def _node(s: Sizes, process: tuple[Figure, ...]) -> tuple[Figure, ...]:
    here, spec, engine = s.layout.processes_per_node, s.spec, s.config.engine
    figures = []
    if not s.on_gpu:
        figures.append(Figure("trainer processes", here * total(process), "bytes", f"{here} x what one needs"))
    if s.trainer.offload.moments and s.on_gpu:
        moments = moment_bytes(s.trainer.optim, s) / s.layout.fsdp
        figures.append(Figure("moments, off the GPU", here * moments, "bytes", f"{here} processes x moments / n"))
    if s.trainer.offload.activations and s.on_gpu:
        inputs = s.b * spec.hidden * s.t * spec.num_layers
        figures.append(Figure("inputs of layers, off the GPU", here * inputs, "bytes", f"{here} processes x b h t x layers"))
    each = ROW_BYTES + replay_bytes(s.config, spec)
    formula = f"{here} processes x {s.step.tokens:,} tokens x {each} bytes: each has the batch"
    figures.append(Figure("batch", here * s.step.tokens * each, "bytes", formula))
    if s.config.cluster.engines == "beside":
        item = 4 if engine.dtype == "float32" else 2
        held = params_here(spec, engine)
        codes = s.matrices - (spec.num_params - held) if engine.dtype == "float8" else 0  # a byte less for each
        weights = f"{engine.replicas} replicas x 2 versions x " + (f"({item} P - matrices)" if codes else f"{item} P")
        shared = f", of which each has the experts of engine.ep.ranks = {engine.ranks}" if engine.ranks > 1 else ""
        size = engine.replicas * 2 * (item * held - codes)
        figures.append(Figure("engine weights", size, "bytes", f"{weights}{shared}: live, and the next (engine.weights)"))
        figures.append(
            Figure(
                "engine KV cache",
                engine.replicas * engine.kv_memory_mib * MIB,
                "bytes",
                f"{engine.replicas} replicas x engine.kv_memory_mib",
            )
        )
        if engine.offload_mib:
            size = engine.replicas * engine.offload_mib * MIB
            what = "kv_offload_mib" if engine.type == "vllm" else "tiers (ram_mib, and queue_mib with a disk or shared tier)"
            figures.append(
                Figure("KV beyond the device", size, "bytes", f"{engine.replicas} replicas x {engine.offload_mib} MiB: engine.{what}")
            )
    return tuple(figures)


def replay_bytes(config: RunConfig, spec: ModelSpec) -> int:
    """Expert ids a token: MoE layers x K x (1 byte up to 256 experts, 2 above)."""
    return len(spec.moe_layers) * spec.top_k * routing_item_bytes(spec) if config.engine.capture_routing else 0
