"""What one layer keeps of each token for its backward pass, counted operation by operation as `models.layers` and `models.latent` are
written (a test compares it with what autograd keeps).

Two kinds of kernels. *Lean* ones keep inputs and outputs and nothing in between: the native ones, for float32 on a CPU; what is assumed of
GPUs. For bfloat16 on a CPU norms and attention compute, and keep, float32, and experts keep every step between. Not counted: what the
plain torch references of sparse attention, windows and sinks keep (tokens² of a document).

Symbols: h hidden, q query and k key features of all heads, K experts per token, m features of an expert, E experts.
"""

from __future__ import annotations

from slipstream.models.spec import ModelSpec


def kept_bytes(spec: ModelSpec, layer: int, item_bytes: int, lean: bool) -> int:
    """Bytes a token that decoder layer `layer` keeps, its input included. What expert parallelism adds is not: see `DISPATCH_BUFFERS`."""
    wide = item_bytes if lean else 4
    norms = 2 * spec.hidden * (wide + item_bytes)  # input and output of both
    return norms + _attention(spec, item_bytes, wide, lean) + feed_forward_bytes(spec, layer, item_bytes, lean)


def feed_forward_bytes(spec: ModelSpec, layer: int, item_bytes: int, lean: bool) -> int:
    """Of these, what lies behind the second norm: what trainer.recompute = "feed_forward" does not keep."""
    if layer in spec.moe_layers:
        return _moe(spec, item_bytes, lean)
    return 4 * spec.intermediate * item_bytes  # gate and up, the activated gate, the product


def dispatched_features(spec: ModelSpec) -> int:
    """Features a token in one buffer of expert parallelism: K copies of the hidden state, if all experts are chosen equally often."""
    return spec.top_k * spec.hidden


DISPATCH_BUFFERS = 4
"""Hidden states that arrived, results that came back, and the gradients of both."""


def _attention(spec: ModelSpec, item_bytes: int, wide: int, lean: bool) -> int:
    heads_sum = 4 * spec.num_heads
    if spec.latent is not None:
        sizes, full = spec.latent, spec.num_heads * spec.head_dim
        down = (sizes.q_rank or spec.q_latent_rows) + spec.kv_down_rows if lean else sizes.q_rank + sizes.kv_rank
        normed = sizes.q_rank + sizes.kv_rank
        cut = spec.num_heads * sizes.v_dim if sizes.v_dim != spec.head_dim or not lean else 0
        return wide * (down + 4 * full) + item_bytes * (normed + cut) + heads_sum  # q, k, v and the result at full width
    q, k = spec.q_rows, spec.kv_rows
    if lean:
        return item_bytes * ((q + 2 * k) + (q + k) + q) + heads_sum  # projected; rotated; the result
    return wide * ((q + k) * spec.qk_norm + 2 * q + 2 * k) + item_bytes * q + heads_sum


def _moe(spec: ModelSpec, item_bytes: int, lean: bool) -> int:
    pairs, m = spec.top_k, spec.expert_intermediate
    router = 4 * (2 * spec.num_experts + (0 if lean else spec.hidden))  # logits and scores are float32
    experts = pairs * 2 * m if lean else pairs * (2 * spec.hidden + 4 * m)  # lean: before the activation, which is computed again
    return router + item_bytes * (experts + 4 * spec.shared_intermediate)
