"""The precision map: which weights are multiplied in block-scaled FP8, and which never are. Pure data, shared by trainer and engine.

The matrices of attention, dense layers and experts are in; embedding, head, norms, biases, the router and its bias stay as they are
(DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.1). Muon orthogonalises the same matrices (see `trainer.muon`).

Names are those of the checkpoint and are compared whole: a pattern such as "mlp.gate" would find the router and `gate_proj` alike.
"""

from __future__ import annotations

from operator import attrgetter

from slipstream.errors import StateError
from slipstream.models.names import Columns, ExpertColumns, ExpertStack, Names
from slipstream.models.spec import ModelSpec

TILE = 128
"""Rows and columns of a weight that share a scale; features of an activation that do."""
SCALE_SUFFIX = "_scale_inv"
"""In checkpoints the scales of tensor NAME are the tensor NAME_scale_inv, [ceil(out / TILE), ceil(in / TILE)]."""
MATRICES = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        *("gate_proj", "up_proj", "down_proj"),
        *("w1", "w2", "w3"),
    }
)
"""Modules whose `weight` is multiplied in FP8."""
OTHERS = frozenset(
    {
        *("embed_tokens", "lm_head", "gate", "router"),
        *("wq_b", "wk", "weights_proj"),  # an indexer's: they only choose
        *("norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm"),
    }
)
"""Modules whose `weight` is not."""
STACKS = frozenset({"gate_up_proj", "down_proj"})
"""Tensors of a module `experts` that hold a matrix for each expert, which is multiplied in FP8 (gpt-oss)."""


def is_matrix(hf_name: str) -> bool:
    """Whether the tensor of that name is multiplied in FP8. Raises StateError: its module is in neither list."""
    module, _, kind = hf_name.rpartition(".")
    if module.endswith(".experts"):
        return kind in STACKS
    if kind != "weight":
        return False
    last = module.rpartition(".")[2]
    if last not in MATRICES | OTHERS:
        raise StateError(f"the precision map does not know {hf_name}: add {last!r} to MATRICES or OTHERS in slipstream.models.matrices")
    return last in MATRICES


def fused_columns(names: Names, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Our parameters that are matrices in this sense: name to the widths of the checkpoint's matrices that lie side by side in it.

    Holds every entry of the family, also those that this model does not have. Each of the checkpoint's matrices is quantised (or
    orthogonalised) by itself, so that fusing them changes nothing.
    """
    found: dict[str, tuple[int, ...]] = {}
    for entry in names.layer:
        if isinstance(entry, Columns | ExpertColumns):
            parts, widths = [name for name, _ in entry.parts], [attrgetter(size)(spec) for _, size in entry.parts]
        elif isinstance(entry, ExpertStack):
            parts, widths = [entry.hf], [sum(attrgetter(size)(spec) for size in entry.widths)]
        else:
            continue
        kinds = {is_matrix(name) for name in parts}
        if len(kinds) != 1:
            raise StateError(f"{entry.ours} fuses weights that are multiplied in FP8 with others: {parts}")
        if kinds.pop():
            found |= {entry.ours.replace("{layer}", str(layer)): tuple(widths) for layer in range(spec.num_layers)}
    return found
