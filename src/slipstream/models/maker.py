"""Make a small model from nothing: a preset of sizes, a tokenizer trained on a corpus, a chat template with tools, random weights.

The result is an ordinary HF folder. Knows no environments: the caller brings the corpus (best: conversations rendered with
`CHAT_TEMPLATE`, so that the merges fit what the model will read and write).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from slipstream.errors import ConfigError
from slipstream.models import hf
from slipstream.models.folders import atomic_folder
from slipstream.models.load import build_model
from slipstream.models.spec import ModelSpec

CHAT_TEMPLATE = (Path(__file__).parent / "chatml.jinja").read_text().rstrip("\n")
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

SPLITS: Mapping[str, str] = MappingProxyType(
    {
        "phrases": r"\p{N}|\n|[^\p{N}\n]+",
        "words": r"\p{N}|\n|[^\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|\s",
    }
)
"""How text is cut before merging; digits and line ends always stand alone. 'phrases': merges may cross spaces and punctuation, so that
fixed parts of templated text (the JSON around a tool call) become single tokens. 'words': merges stay within words."""

_COMMON: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
_MOE: Mapping[str, Any] = {
    **_COMMON,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_ALL_MOE: Mapping[str, Any] = {
    **_COMMON,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
}
"""`intermediate_size` is that of an expert."""
_SIGMOID_MOE: Mapping[str, Any] = {
    **_COMMON,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}
_LATENT: Mapping[str, Any] = {
    **_SIGMOID_MOE,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rope_interleave": True,
}
_SPARSE: Mapping[str, Any] = {**_LATENT, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 32}
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny-moe": {
            **_MOE,
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
        },
        "small-moe": {
            **_MOE,
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 224,
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "max_position_embeddings": 8192,
        },
        "tiny-glm": {
            **_SIGMOID_MOE,
            "model_type": "glm4_moe",
            "architectures": ["Glm4MoeForCausalLM"],
            "num_key_value_heads": 2,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
        },
        "tiny-minimax": {
            **_ALL_MOE,
            "model_type": "minimax_m2",
            "architectures": ["MiniMaxM2ForCausalLM"],
            "rotary_dim": 8,
        },
        "tiny-gpt-oss": {
            **_ALL_MOE,
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_scaling": {"rope_type": "default"},
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        "tiny-deepseek": {
            **_LATENT,
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "n_group": 4,
            "topk_group": 2,
        },
        "tiny-deepseek-v32": {
            **_SPARSE,
            "model_type": "deepseek_v32",
            "architectures": ["DeepseekV32ForCausalLM"],
            "n_group": 4,
            "topk_group": 2,
        },
        "tiny-glm-dsa": {
            **_SPARSE,
            "model_type": "glm_moe_dsa",
            "architectures": ["GlmMoeDsaForCausalLM"],
            "indexer_types": ["full", "full", "shared", "shared"],
        },
        "tiny-dense": {
            **_COMMON,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
        },
    }
)
"""Keys of config.json by preset. `vocab_size` is an upper bound: a small corpus gives fewer merges."""


def make_model(
    folder: str | Path, preset: str, corpus: Iterable[str], seed: int = 0, split: str = "phrases", **overrides: Any
) -> ModelSpec:
    """Write a model folder: config, generation config, tokenizer with chat template, seeded fp32 weights. Replaces an earlier one.

    `overrides` are keys of the preset, such as hidden_size=96. The same arguments give the same bytes.
    Raises ConfigError: an unknown preset, split or key, or a vocabulary too small for the byte alphabet.
    ModelError: sizes that do not go together.
    """
    config = _config(preset, overrides)
    tokenizer = train_tokenizer(corpus, config["vocab_size"], split)
    eos_ids = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)]
    config |= {"vocab_size": tokenizer.get_vocab_size(), "dtype": "float32", "bos_token_id": None}
    config |= {"eos_token_id": eos_ids[0], "pad_token_id": eos_ids[1]}
    spec = ModelSpec.from_config({**config, "eos_token_id": eos_ids}, f"preset {preset!r}")
    with atomic_folder(folder) as fresh:
        _write_json(fresh / "config.json", config)
        _write_json(fresh / "generation_config.json", {"eos_token_id": eos_ids, "pad_token_id": eos_ids[1], "do_sample": True})
        _write_tokenizer(fresh, tokenizer, config["max_position_embeddings"])
        hf.write_tensors(fresh, hf.hf_tensors(build_model(spec, seed=seed)))
    return spec


def train_tokenizer(corpus: Iterable[str], vocab_size: int, split: str = "phrases") -> Tokenizer:
    """A byte-level BPE tokenizer: any text round-trips. Special tokens in the corpus are boundaries, never learned as text."""
    if split not in SPLITS:
        raise ConfigError(f"split = {split!r}; expected one of {', '.join(SPLITS)}")
    specials = [*CONTROL_TOKENS, *TOOL_TOKENS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(specials) + len(alphabet):
        raise ConfigError(f"vocab_size = {vocab_size}; the bytes and the special tokens alone need {len(specials) + len(alphabet)}")
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=specials, initial_alphabet=sorted(alphabet), show_progress=False
    )
    boundary = re.compile("|".join(re.escape(token) for token in specials))
    tokenizer.train_from_iterator((part for text in corpus for part in boundary.split(text) if part), trainer)
    return tokenizer


def _config(preset: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    if preset not in PRESETS:
        raise ConfigError(f"preset = {preset!r}; expected one of {', '.join(PRESETS)}")
    for key in overrides:
        if key not in PRESETS[preset]:
            near = difflib.get_close_matches(key, PRESETS[preset], n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(PRESETS[preset])}"
            raise ConfigError(f"{key}: preset {preset!r} has no such key{hint}")
    return {**PRESETS[preset], **overrides}


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, max_positions: int) -> None:
    """Tool markers are ordinary added tokens, as in Qwen's: decoding without special tokens must keep them."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    _write_json(folder / "tokenizer.json", content)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
