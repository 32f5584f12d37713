"""Tiny random models of every family in transformers and here, and how far the two are apart.

What the parity tests assert and `benchmarks.parity_families` reports. Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models import hf
from slipstream.models.context import FullContext
from slipstream.models.decoder import Decoder

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
MOE = {**BASE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM = {**BASE, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
QUARTER = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
WHOLE = {**QUARTER, "partial_rotary_factor": 1.0}
MINIMAX = {**BASE, "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": QUARTER}
GPT_OSS = {
    **BASE,
    "intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 6,
    "swiglu_limit": 1.0,
    "rope_parameters": WHOLE,
}
MLA = {
    **{key: value for key, value in GLM.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
GPT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
}
DSA = {**MLA, "index_n_heads": 16, "index_head_dim": 12, "index_topk": 7}
SHARED = {**DSA, "num_hidden_layers": 5, "index_topk_freq": 3, "index_skip_topk_offset": 2}
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", MOE),
    "qwen3_moe-normalised": ("Qwen3Moe", {**MOE, "norm_topk_prob": True, "num_experts_per_tok": 3}),
    "qwen3_moe-tied": ("Qwen3Moe", {**MOE, "tie_word_embeddings": True, "norm_topk_prob": True}),
    "qwen3_moe-dense-first": ("Qwen3Moe", {**MOE, "mlp_only_layers": [0, 2]}),
    "qwen3_moe-every-second": ("Qwen3Moe", {**MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "qwen3_moe-one-head-group": ("Qwen3Moe", {**MOE, "num_key_value_heads": 1, "head_dim": 8, "num_experts_per_tok": 1}),
    "qwen3_moe-bias": ("Qwen3Moe", {**MOE, "attention_bias": True}),
    "qwen3": ("Qwen3", BASE),
    "qwen3-tied": ("Qwen3", {**BASE, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3-bias": ("Qwen3", {**BASE, "attention_bias": True, "head_dim": 24}),
    "glm4_moe": ("Glm4Moe", GLM),
    "glm4_moe-grouped": ("Glm4Moe", {**GLM, "n_group": 4, "topk_group": 2, "n_routed_experts": 12, "routed_scaling_factor": 2.5}),
    "glm4_moe-qk-norm-tied": ("Glm4Moe", {**GLM, "use_qk_norm": True, "tie_word_embeddings": True, "first_k_dense_replace": 0}),
    "glm4_moe-bias": ("Glm4Moe", {**GLM, "attention_bias": True, "num_key_value_heads": 1, "n_shared_experts": 2}),
    "glm4_moe-unnormalised": ("Glm4Moe", {**GLM, "norm_topk_prob": False, "rope_parameters": QUARTER, "head_dim": 24}),
    "glm4_moe-whole-heads": ("Glm4Moe", {**GLM, "rope_parameters": WHOLE, "first_k_dense_replace": 2, "num_experts_per_tok": 1}),
    "minimax_m2": ("MiniMaxM2", MINIMAX),
    "minimax_m2-rotary-dim": ("MiniMaxM2", {**MINIMAX, "rope_parameters": None, "rotary_dim": 12, "num_attention_heads": 8}),
    "minimax_m2-tied": ("MiniMaxM2", {**MINIMAX, "tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "minimax_m2-one-expert": ("MiniMaxM2", {**MINIMAX, "num_experts_per_tok": 1, "num_key_value_heads": 1, "head_dim": 24}),
    "gpt_oss": ("GptOss", GPT_OSS),
    "gpt_oss-yarn": ("GptOss", {**GPT_OSS, "rope_parameters": GPT_YARN, "swiglu_limit": 7.0, "tie_word_embeddings": True}),
    "gpt_oss-one-head-group": ("GptOss", {**GPT_OSS, "num_key_value_heads": 1, "head_dim": 24, "num_experts_per_tok": 1}),
    "gpt_oss-without-bias": ("GptOss", {**GPT_OSS, "attention_bias": False, "swiglu_alpha": 0.5, "num_key_value_heads": 4}),
    "gpt_oss-windows-last": ("GptOss", {**GPT_OSS, "layer_types": [*["full_attention"] * 2, "sliding_attention"], "sliding_window": 1}),
    "deepseek_v3": ("DeepseekV3", MLA),
    "deepseek_v3-yarn": ("DeepseekV3", {**MLA, "rope_parameters": YARN}),
    "deepseek_v3-yarn-factors": ("DeepseekV3", {**MLA, "rope_parameters": {**YARN, "mscale": 0.7, "beta_fast": 4, "truncate": False}}),
    "deepseek_v3-yarn-plain": ("DeepseekV3", {**MLA, "rope_parameters": {**YARN, "mscale": None, "mscale_all_dim": None}}),
    "deepseek_v3-whole-queries": ("DeepseekV3", {**MLA, "q_lora_rank": None, "attention_bias": True, "v_head_dim": 16}),
    "deepseek_v3-halves": ("DeepseekV3", {**MLA, "rope_interleave": False, "tie_word_embeddings": True, "attention_bias": True}),
    "deepseek_v3-wide-values": ("DeepseekV3", {**MLA, "v_head_dim": 32, "first_k_dense_replace": 0, "rms_norm_eps": 1e-3}),
    "deepseek_v32": ("DeepseekV32", DSA),
    "deepseek_v32-yarn": ("DeepseekV32", {**DSA, "rope_parameters": YARN, "index_topk": 16, "v_head_dim": 32}),
    "deepseek_v32-nothing-left-out": ("DeepseekV32", {**DSA, "index_topk": 23, "attention_bias": True, "tie_word_embeddings": True}),
    "deepseek_v32-two-tokens": ("DeepseekV32", {**DSA, "index_topk": 2, "index_n_heads": 24, "index_head_dim": 8}),
    "glm_moe_dsa": ("GlmMoeDsa", {**DSA, "n_group": 1, "topk_group": 1}),
    "glm_moe_dsa-shared": ("GlmMoeDsa", {**SHARED, "attention_bias": True}),
    "glm_moe_dsa-pattern": ("GlmMoeDsa", {**DSA, "indexer_types": ["full", "shared", "shared"], "first_k_dense_replace": 0}),
    "llama": ("Llama", BASE),
    "llama-tied": ("Llama", {**BASE, "tie_word_embeddings": True, "num_attention_heads": 2, "rope_theta": 100000.0}),
    "llama-bias": ("Llama", {**BASE, "attention_bias": True, "head_dim": None, "rms_norm_eps": 1e-3}),
}
TOKENS = 23


def reference(name: str, folder: Path, seed: int = 0, **save: Any) -> Any:
    """A transformers model with weights that tell its parts apart (no ones, no zeros), saved to `folder`."""
    import transformers

    transformers.logging.disable_progress_bar()
    family, sizes = ZOO[name]
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    tell_apart(model, 1000 * seed + len(name))
    model.save_pretrained(folder, **save)
    return model


def tell_apart(model: Any, seed: int) -> None:
    """Weights of a transformers model by which its parts can be told apart: no ones, no zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.3 * noise + (0 if key.endswith("bias") else 1))
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def reference_grads(model: Any) -> dict[str, torch.Tensor]:
    """Gradients under the names of the checkpoint (in memory transformers fuses the experts)."""
    minimax = model.config.model_type == "minimax_m2"
    gate_name, up_name, down_name = ("w1", "w3", "w2") if minimax else ("gate_proj", "up_proj", "down_proj")
    grads = {}
    for name, parameter in model.named_parameters():
        name = name.replace(".mlp.", ".block_sparse_moe.") if minimax else name
        if model.config.model_type == "gpt_oss":
            grads[name] = parameter.grad
        elif name.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(parameter.grad):
                gate, up = matrix.chunk(2)
                grads |= {name.replace("gate_up_proj", f"{expert}.{gate_name}.weight"): gate}
                grads |= {name.replace("gate_up_proj", f"{expert}.{up_name}.weight"): up}
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(parameter.grad):
                grads[name.replace("down_proj", f"{expert}.{down_name}.weight")] = matrix
        else:
            grads[name] = parameter.grad
    return {name: grad for name, grad in grads.items() if grad is not None}


def tokens(seed: int = 0, count: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, BASE["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


def our_logits(model: Decoder, ids_T: torch.Tensor) -> torch.Tensor:
    return model.logits(model(ids_T, torch.arange(len(ids_T)), FullContext([0, len(ids_T)])))


@dataclass(frozen=True, slots=True)
class Gaps:
    """Largest differences between two models on the same tokens."""

    logits: float
    logits_serving: float
    """Without gradients, where other kernels serve."""
    grads: dict[str, float]
    """Of the mean cross-entropy, by HF name."""
    grads_relative: dict[str, float]
    """By the largest element of the same gradient; or by a thousandth of the largest of all (of a sink: a hundredth), if that is more."""
    spread: float
    """Standard deviation of their logits: what makes the differences large or small."""


def gaps(ours: Decoder, theirs: Any, ids_T: Tensor) -> Gaps:
    """Run both forward and backward; the gradients stay in their parameters."""
    their_logits_TV, logits_TV = theirs(ids_T[None]).logits[0], our_logits(ours, ids_T)
    with torch.no_grad():
        serving_TV = our_logits(ours, ids_T)
    for logits in (their_logits_TV, logits_TV):
        F.cross_entropy(logits[:-1], ids_T[1:]).backward()
    own = {key: p.grad for key, p in ours.named_parameters() if p.grad is not None}
    grads, their_grads = hf.hf_views(ours, own), reference_grads(theirs)
    assert grads.keys() == their_grads.keys()
    largest = max(float(g.abs().max()) for g in their_grads.values())
    # a sink's gradient is a sum that cancels: rounding alone moves transformers' by 9e-6 of itself (against float64; ours by 3e-6)
    least = {key: (1e-2 if key.endswith("sinks") else 1e-3) * largest for key in grads}
    apart = {key: _apart(grad, their_grads[key]) for key, grad in grads.items()}
    relative = {key: gap / max(float(their_grads[key].abs().max()), least[key]) for key, gap in apart.items()}
    spread = float(their_logits_TV.detach().std())
    return Gaps(_apart(logits_TV, their_logits_TV), _apart(serving_TV, their_logits_TV), apart, relative, spread)


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def changed_tensors(before: Path, after: Path) -> list[str]:
    """Names of the tensors that two HF folders do not share byte for byte, dtype and shape included."""
    one, two = hf.read_tensors(before), hf.read_tensors(after)
    same = {key for key in one.keys() & two.keys() if _same_bytes(one[key], two[key])}
    return sorted((one.keys() | two.keys()) - same)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
