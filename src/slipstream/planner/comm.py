"""What travels in one optimizer step: bytes that one process receives (and as many that it sends), and what goes to the engines.

Symbols as in `memory`; m = expert_fsdp processes that share the weights of the same experts, E/ep experts of a layer in one process. A
pass is one row, forward and backward. Of x bytes that n processes end up with, (n - 1) / n come from others.

Sources: EP all-to-all, K hidden states of a token each way: Lepikhin et al., "GShard", 2020, section 3.2; FSDP: "ZeRO", 2020, section 7;
Ulysses: Jacobs et al., 2023, section 3.2. The gathered short vectors of sparse attention: DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1.
"""

from __future__ import annotations

from slipstream.config.run import RunConfig
from slipstream.models.spec import ModelSpec
from slipstream.planner.batch import Arithmetic
from slipstream.planner.figures import Figure
from slipstream.planner.layout import Layout
from slipstream.planner.memory import Sizes, crossing_features, replay_bytes


def communication(config: RunConfig, spec: ModelSpec, layout: Layout, step: Arithmetic) -> tuple[Figure, ...]:
    """By kind; kinds that move nothing are left out."""
    sizes = Sizes(config, spec, layout, step)
    figures = [*_experts(sizes), *_weights(sizes), *_context(sizes), *_outside(sizes)]
    return tuple(figure for figure in figures if figure.value)


def _experts(s: Sizes) -> list[Figure]:
    """Dispatch and combine, forward and backward; once more where layers are computed again."""
    ep, times, token = s.layout.ep, 2 + (s.trainer.recompute != "none"), s.spec.top_k * s.spec.hidden * s.b
    if ep == 1:
        return []
    value = s.step.passes * len(s.spec.moe_layers) * times * 2 * token * s.step.own_tokens * (ep - 1) / ep
    formula = (
        f"passes x MoE layers x {times} x 2 K h b x t x (ep - 1) / ep = "
        f"{s.step.passes} x {len(s.spec.moe_layers)} x {times} x 2 x {token:,} x {s.step.own_tokens:,} x {ep - 1}/{ep}"
    )
    return [
        Figure("ep: dispatch, or combine, of a token in a layer", token, "bytes", f"K h b = {s.spec.top_k} x {s.spec.hidden} x {s.b}"),
        Figure("ep: dispatch and combine", value, "bytes", formula),
    ]


def _weights(s: Sizes) -> list[Figure]:
    """Layers are gathered twice a pass, embedding and head once; gradients go back in float32."""
    n, copies, passes, spec = s.layout.fsdp, s.layout.dp_replicate, s.step.passes, s.spec
    m, ep = (s.layout.expert_fsdp, s.layout.ep) if s.layout.ep > 1 else (n, 1)
    experts = spec.expert_params * spec.num_experts * len(spec.moe_layers) / ep
    rest = spec.num_params - spec.end_params - experts * ep
    outside, inside = s.b * (2 * rest + spec.end_params) * (n - 1) / n, s.b * 2 * experts * (m - 1) / m
    back = 4 * ((rest - spec.indexer_params + spec.end_params) * (n - 1) / n + experts * (m - 1) / m)
    copied = 4 * s.trained / n * 2 * (copies - 1) / copies
    return [
        Figure(
            "fsdp: weights outside the experts",
            passes * outside,
            "bytes",
            f"passes x b x (2 x {rest:,.0f} + {spec.end_params:,}) x (n - 1) / n = {passes} x {s.b} x ... x {n - 1}/{n}",
        ),
        Figure(
            "fsdp: weights of experts",
            passes * inside,
            "bytes",
            f"passes x b x 2 x {experts:,.0f} x (m - 1) / m = {passes} x {s.b} x ... x {m - 1}/{m}",
        ),
        Figure("fsdp: gradients", passes * back, "bytes", f"passes x 4 x the same parameters once, without indexers; {passes} passes"),
        Figure("dp_replicate: gradients", passes * copied, "bytes", f"passes x 4 x trained / n x 2 (r - 1) / r, r = {copies}"),
    ]


def _context(s: Sizes) -> list[Figure]:
    cp, times, layers = s.layout.cp, 2 + (s.trainer.recompute == "layer"), s.spec.num_layers
    if cp == 1:
        return []
    if s.trainer.parallel.cp_method == "ulysses":
        features = 2 * (s.spec.num_heads + s.spec.num_kv_heads) * s.spec.head_dim
        value = s.step.passes * layers * times * s.b * features * s.step.own_tokens * (cp - 1) / cp
        formula = f"passes x layers x {times} x b x {features:,} features x t x (cp - 1) / cp: queries, keys, values there, results back"
        return [Figure("cp: tokens for heads", value, "bytes", formula)]
    times += 1  # forward, backward, where they are not kept, and their gradients
    features = crossing_features(s.spec)
    value = s.step.passes * layers * times * s.b * features * s.step.row_tokens * (cp - 1) / cp
    formula = f"passes x layers x {times} x b x {features:,} features x R x (cp - 1) / cp, R = {s.step.row_tokens:,}; at most"
    return [Figure("cp: keys and values", value, "bytes", formula)]


def _outside(s: Sizes) -> list[Figure]:
    p, replay, tokens = s.spec.num_params, replay_bytes(s.config, s.spec), s.step.tokens
    replicas = s.config.engine.replicas if s.config.cluster.engines == "beside" else 1
    published, formula = s.b * p, f"replicas x b x P = {replicas} x {s.b} x {p:,}"
    if s.trainer.publish == "float8":
        published -= (s.b - 1) * s.matrices
        formula = f"replicas x (b P - (b - 1) matrices) = {replicas} x ({s.b} x {p:,} - {s.b - 1} x {s.matrices:,})"
    return [
        Figure("published weights", replicas * published, "bytes", f"{formula}, from the first process"),
        Figure(
            "expert ids of the batch (replay)",
            replay * tokens,
            "bytes",
            f"MoE layers x K x id = {replay} bytes x {tokens:,} tokens, to the trainer",
        ),
    ]
