"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, an indexer in every layer.

Architecture: DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025, section 2.
"""

from __future__ import annotations

from slipstream.models.deepseek_v3 import LATENT_ATTENTION, block
from slipstream.models.glm4_moe import BIAS_AND_SHARED_EXPERT
from slipstream.models.names import DECODER, DENSE, Columns, NameTable, Same
from slipstream.models.qwen3_moe import EXPERTS

_OURS, _INDEXER = "layers.{layer}.attention.indexer", "model.layers.{layer}.self_attn.indexer"
INDEXER = (
    Columns(f"{_OURS}.queries", ((f"{_INDEXER}.wq_b.weight", "index_rows"),)),
    Columns(
        f"{_OURS}.key_weights",
        ((f"{_INDEXER}.wk.weight", "indexer.head_dim"), (f"{_INDEXER}.weights_proj.weight", "indexer.heads")),
    ),
    Same(f"{_OURS}.k_norm", f"{_INDEXER}.k_norm.weight"),
    Same(f"{_OURS}.k_norm_bias", f"{_INDEXER}.k_norm.bias"),
)
NAMES = NameTable(model=DECODER, layer=(*LATENT_ATTENTION, *INDEXER, *DENSE, *EXPERTS, *BIAS_AND_SHARED_EXPERT))

__all__ = ["NAMES", "block"]
