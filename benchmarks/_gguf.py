"""A qwen3_moe checkpoint as GGUF, for llama.cpp: tensors renamed, experts stacked, no tokenizer.

Names and keys are those of the `gguf` package (its constants for the architecture `qwen3moe`). bfloat16 rounds to nearest even; norms and
routers stay float32, as llama.cpp wants them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ARCH = "qwen3moe"
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def convert(folder: Path, to: Path, dtype: str) -> None:
    """Write `to` from the HF checkpoint in `folder` (float32, one safetensors file, experts in every layer)."""
    import gguf  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    partial = to.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, ARCH)
    _describe(writer, config)
    for name, tensor in _renamed(tensors, config).items():
        plain = tensor.ndim == 1 or "ffn_gate_inp" in name or dtype == "float32"
        kind = gguf.GGMLQuantizationType.F32 if plain else gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, tensor if plain else gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(to)


def _renamed(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Matrices stay [out, in]; GGUF says their dimensions the other way round by itself."""
    renamed = {"token_embd.weight": tensors["model.embed_tokens.weight"], "output_norm.weight": tensors["model.norm.weight"]}
    if "lm_head.weight" in tensors:
        renamed["output.weight"] = tensors["lm_head.weight"]
    for i in range(config["num_hidden_layers"]):
        for ours, theirs in LAYER.items():
            renamed[f"blk.{i}.{theirs}.weight"] = tensors[f"model.layers.{i}.{ours}.weight"]
        for ours, theirs in EXPERTS.items():
            experts = [tensors[f"model.layers.{i}.mlp.experts.{e}.{ours}.weight"] for e in range(config["num_experts"])]
            renamed[f"blk.{i}.{theirs}.weight"] = np.stack(experts)
    return renamed


def _describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
