"""What `impl = "hf"` refuses, by name, before a weight is read; and which implementation is chosen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.models.foreign.probe import probe
from slipstream.models.foreign.router import look_at_router
from slipstream.models.foreign.spec import HfSpec
from slipstream.models.impl import read_spec
from tests.waiting import HUNG_S

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
MOE = {**BASE, "num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def folder(tmp_path: Path, family: str, options: dict[str, Any]) -> Path:
    """config.json alone."""
    getattr(transformers, f"{family}Config")(**options).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("Gemma2", BASE, "attn_logit_softcapping|final_logit_softcapping"),
        ("Cohere", BASE, "logit_scale = 0.0625"),
        ("Granite", {**BASE, "logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ("Qwen2", {**BASE, "attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("GPT2", GPT2, "resid_pdrop = 0.1"),
        ("Mixtral", {**MOE, "router_jitter_noise": 0.01}, "router_jitter_noise = 0.01"),
        ("Qwen2", {**BASE, "rope_parameters": DYNAMIC}, "rope_type = 'dynamic'"),
        ("Qwen3Next", MOE, "linear_attention"),
        ("Llama4Text", MOE, "chunked_attention"),
        ("Lfm2", {**BASE, "layer_types": ["conv", "full_attention"]}, "layer_types has conv"),
        ("Mamba", {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}, "state-space"),
        ("FalconH1", BASE, "state-space"),
        ("T5", {"d_model": 32, "num_layers": 2, "vocab_size": 61}, "is_encoder_decoder = True"),
        ("Qwen2VL", {}, "vision_config"),
        ("Gemma3Text", {**BASE, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Phi", BASE, "the head has a bias"),
        ("Bloom", {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0}, "attention interface"),
        ("Phimoe", {**MOE, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0}, "PhimoeTopKRouter|PhimoeSparse"),
        ("Qwen2", {**BASE, "quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config"),
    ],
)
def test_a_feature_that_cannot_be_honoured_is_refused_by_name(family: str, options: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=named) as refused:
        probe(folder(tmp_path, family, options))
    assert str(tmp_path / "config.json") in str(refused.value)


def test_an_architecture_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsuch"}')
    with pytest.raises(ModelError, match="nonsuch"):
        probe(tmp_path)


def test_group_limited_gates_that_vanish_when_forced_are_refused(tmp_path: Path) -> None:
    sizes = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 0,
        "n_shared_experts": 1,
    }
    latent = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    with pytest.raises(ModelError, match=r"DeepseekV2TopkRouter.*every chosen expert a weight"):
        probe(folder(tmp_path, "DeepseekV2", {**BASE, **sizes, **latent, **groups, "num_key_value_heads": 4}))


class _Router(nn.Module):
    """Softmax over six experts, of which two are taken; kinds differ in what is wrong."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.empty(6, 8, device="meta"))

    def forward(self, x_TD: Tensor) -> Any:
        logits_TE = x_TD @ self.weight.T
        if self.kind == "sorts":
            ids_TK = logits_TE.argsort(-1, descending=True)[:, :2]
            return logits_TE, logits_TE.gather(1, ids_TK), ids_TK
        values_TK, ids_TK = torch.topk(logits_TE.softmax(-1), 2, dim=-1)
        if self.kind == "twice":
            values_TK, ids_TK = torch.topk(logits_TE.softmax(-1), 2, dim=-1)
        if self.kind == "keeps ids":
            return logits_TE, values_TK
        if self.kind == "own choice":
            ids_TK = logits_TE.argsort(-1, descending=True)[:, :2]
        return logits_TE, values_TK.detach() if self.kind == "no gradient" else values_TK, ids_TK


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("sorts", "no top-k"),
        ("twice", "more than once"),
        ("keeps ids", "hand over the ids"),
        ("own choice", "hand over the ids"),
        ("no gradient", "a weight with a gradient"),
    ],
)
def test_a_router_that_cannot_be_forced_is_refused(kind: str, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        look_at_router(_Router(kind), 8, "here")
    assert look_at_router(_Router("right"), 8, "here") == (6, 2)


def test_the_spec_is_read_from_the_modules(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    spec = probe(folder(tmp_path, "Qwen2", {**BASE, **windows, "eos_token_id": [3, 4], "tie_word_embeddings": True}))
    assert isinstance(spec, HfSpec) and spec.family == "qwen2" and spec.eos_ids == (3, 4) and spec.tie_embeddings
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_positions) == (4, 2, 8, 128)
    assert (spec.window, spec.window_layers, spec.moe_layers) == (9, (1,), ())
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**BASE, tie_word_embeddings=True))
    assert spec.num_params == sum(p.numel() for p in model.parameters())


def test_nothing_falls_back_to_transformers_by_itself(tmp_path: Path) -> None:
    folder(tmp_path, "Mixtral", MOE)
    with pytest.raises(ModelError, match=r'mixtral.*set model\.impl = "hf" in the run file, or --impl hf'):
        read_spec(tmp_path, "auto")
    assert read_spec(tmp_path, "hf").num_experts == 6


def test_our_own_families_are_read_without_torch(tmp_path: Path) -> None:
    folder(tmp_path, "Qwen3", {**BASE, "head_dim": 16})
    block = "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None"
    code = f"{block}; from slipstream.models.impl import read_spec; print(read_spec({str(tmp_path)!r}, 'auto').family)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert result.stdout.strip() == "qwen3", result.stderr[-2000:]
