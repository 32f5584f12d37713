"""Transformers' modules behind our seams (`impl = "hf"`), against transformers alone: tiny random models of families that we have not."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models import fill, hf
from slipstream.models.context import FullContext
from slipstream.models.language_model import LanguageModel
from slipstream.models.load import load_model
from tests.parity.zoo import tell_apart
from tests.unit.engine.helpers import Reference, ask, make_engine, prompt, run

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 60,
    "pad_token_id": None,
}
MOE = {**BASE, "num_experts_per_tok": 2, "tie_word_embeddings": False}
MLA = {
    **{key: value for key, value in MOE.items() if key != "num_key_value_heads"},
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "topk_method": "greedy",
}
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {**BASE, "tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {**BASE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "olmo2": ("Olmo2", {**BASE, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "phi3": ("Phi3", {**BASE, "num_key_value_heads": 1, "num_hidden_layers": 2}),
    "gemma": ("Gemma", {**BASE, "head_dim": 24, "hidden_activation": "gelu_pytorch_tanh"}),
    "mistral": ("Mistral", {**BASE, "sliding_window": 4, "head_dim": 16}),
    "gpt_neox": ("GPTNeoX", {**BASE, "rotary_pct": 0.5, "use_parallel_residual": True}),
    "mixtral": ("Mixtral", {**MOE, "num_local_experts": 5}),
    "mixtral-windows": ("Mixtral", {**MOE, "num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 6}),
    "olmoe": ("Olmoe", {**MOE, "num_experts": 6, "intermediate_size": 24}),
    "olmoe-normalised": ("Olmoe", {**MOE, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "num_key_value_heads": 4}),
    "qwen2_moe": ("Qwen2Moe", {**MOE, "num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}),
    "qwen2_moe-dense-first": (
        "Qwen2Moe",
        {
            **MOE,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 8,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
        },
    ),
    "granitemoe": ("GraniteMoe", {**MOE, "num_local_experts": 6, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}),
    "deepseek_v2": ("DeepseekV2", MLA),
    "ernie4_5_moe": ("Ernie4_5_Moe", {**MOE, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24}),
}
DENSE = ["qwen2", "qwen2-windows", "olmo2", "phi3", "gemma", "mistral", "gpt_neox"]
EXPERTS = [name for name in ZOO if name not in DENSE]
STARTS = [0, 7, 8, 23]
"""Documents of 7, 1 and 15 tokens."""


def theirs(name: str, folder: Path, seed: int = 0, **save: Any) -> Any:
    """A transformers model with weights that tell its parts apart (no ones, no zeros), saved to `folder`."""
    import transformers

    transformers.logging.disable_progress_bar()
    family, sizes = ZOO[name]
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="eager", experts_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    tell_apart(model, seed)
    model.save_pretrained(folder, **save)
    return model


def their_grads(model: Any) -> dict[str, Tensor]:
    """Gradients under the names of the checkpoint, by transformers' own conversion."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, BASE["vocab_size"], (STARTS[-1],), generator=torch.Generator().manual_seed(seed))


def places() -> Tensor:
    return torch.cat([torch.arange(b - a) for a, b in pairwise(STARTS)])


def our_logits(model: LanguageModel, ids_T: Tensor, context: FullContext | None = None) -> Tensor:
    return model.logits(model(ids_T, places(), context or FullContext(STARTS)))


def their_logits(model: Any, ids_T: Tensor) -> Tensor:
    """Every document by itself."""
    return torch.cat([model(ids_T[None, a:b]).logits[0] for a, b in pairwise(STARTS)])


def loss(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
    carries = places()[1:] > 0
    return F.cross_entropy(logits_TV[:-1][carries], ids_T[1:][carries])


def check_grads(ours: LanguageModel, reference: Any) -> None:
    grads = hf.hf_views(ours, {name: p.grad for name, p in ours.named_parameters() if p.grad is not None})
    expected = their_grads(reference)
    assert grads.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for key, grad in grads.items():
        scale = max(float(expected[key].abs().max()), 1e-3 * largest)
        assert (grad - expected[key]).abs().max() <= 2e-5 * scale, key


@pytest.mark.parametrize("name", ZOO)
def test_packed_documents_have_the_logits_and_gradients_of_each_by_itself(name: str, tmp_path: Path) -> None:
    reference = theirs(name, tmp_path)
    ours = load_model(tmp_path, impl="hf")
    ids_T = tokens()
    expected = their_logits(reference, ids_T)
    logits = our_logits(ours, ids_T)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
    loss(expected, ids_T).backward()
    loss(logits, ids_T).backward()
    check_grads(ours, reference)


@pytest.mark.parametrize("name", ["qwen2", "phi3", "mixtral-windows", "qwen2_moe-dense-first", "deepseek_v2", "ernie4_5_moe"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_goes_in_and_out_bit_for_bit(name: str, sharded: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    reference = theirs(name, source)
    biases = {key: buffer.clone() for key, buffer in reference.named_buffers() if key.endswith("e_score_correction_bias")}
    reference.to(dtype)
    for key, values in biases.items():  # published in float32 whatever the model
        reference.get_submodule(key.rpartition(".")[0]).e_score_correction_bias = values
    reference.save_pretrained(source, max_shard_size="20KB" if sharded else "1GB")
    if sharded:
        (source / hf.SINGLE).unlink()
    fill.save_folder(load_model(source, dtype, impl="hf"), copy, like=source, shard_bytes=20_000 if sharded else None)
    assert (copy / hf.INDEX).exists() == sharded
    before, after = hf.read_tensors(source), hf.read_tensors(copy)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if key.endswith(("mlp.gate.weight", "e_score_correction_bias")) and name in (
            "deepseek_v2",
            "ernie4_5_moe",
        ):  # transformers keeps it in float32
            assert after[key].dtype == torch.float32
            after[key] = after[key].to(tensor.dtype)
        assert tensor.dtype == after[key].dtype, key
        assert torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8)), key
    assert (copy / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("name", EXPERTS)
def test_the_recorded_routing_replayed_changes_nothing(name: str, tmp_path: Path) -> None:
    theirs(name, tmp_path)
    model, ids_T = load_model(tmp_path, impl="hf"), tokens()
    with torch.no_grad():
        native = FullContext(STARTS, record=True)
        logits = our_logits(model, ids_T, native)
        again = FullContext(STARTS, native.ids_TLK, record=True)
        assert torch.equal(our_logits(model, ids_T, again), logits)
    assert native.ids_TLK.shape == (STARTS[-1], len(model.spec.moe_layers), model.spec.top_k)
    assert len(model.spec.moe_layers) == 3 - (name in ("qwen2_moe-dense-first", "deepseek_v2", "ernie4_5_moe"))


def gates(name: str, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Gate weights as the architecture's publication has them, at ids that are forced."""
    if name.startswith("mixtral") or name == "granitemoe":
        return logits_TE.gather(1, ids_TK).float().softmax(-1)
    weights_TK = logits_TE.float().softmax(-1).gather(1, ids_TK)
    normalised = name in ("olmoe-normalised", "qwen2_moe-dense-first", "ernie4_5_moe")
    return weights_TK / weights_TK.sum(-1, keepdim=True) if normalised else weights_TK


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", EXPERTS)
def test_forced_experts_are_taken_with_the_routers_own_weights(name: str, seed: int, tmp_path: Path) -> None:
    reference = theirs(name, tmp_path, seed)
    model, ids_T = load_model(tmp_path, impl="hf"), tokens(seed)
    spec, generator = model.spec, torch.Generator().manual_seed(seed)
    scores = torch.rand(STARTS[-1], len(spec.moe_layers), spec.num_experts, generator=generator)
    forced_TLK = scores.argsort(-1)[..., : spec.top_k]
    valid_T = torch.rand(STARTS[-1], generator=generator) < 0.7

    def patched(layer: int, router: Any) -> None:
        forward = router.forward

        def force(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits_TE, _, ids_TK = forward(hidden)
            here = slice(document.start, document.stop)
            ids_TK = torch.where(valid_T[here, None], forced_TLK[here, layer], ids_TK)
            return logits_TE, gates(name, logits_TE, ids_TK), ids_TK

        router.forward = force

    routers = [m for m in reference.modules() if type(m).__name__.endswith(("TopKRouter", "TopkRouter"))]
    assert len(routers) == len(spec.moe_layers)
    for layer, router in enumerate(routers):
        patched(layer, router)
    rows = []
    for a, b in pairwise(STARTS):
        document = slice(a, b)
        rows.append(reference(ids_T[None, a:b]).logits[0])
    expected = torch.cat(rows)
    context = FullContext(STARTS, forced_TLK, valid_T, record=True)
    logits = our_logits(model, ids_T, context)
    assert torch.equal(context.ids_TLK[valid_T], forced_TLK[valid_T])
    assert not torch.equal(context.ids_TLK, context.native_ids_TLK)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
    loss(expected, ids_T).backward()
    loss(logits, ids_T).backward()
    check_grads(model, reference)


@pytest.mark.parametrize("name", ZOO)
def test_the_engine_decodes_what_one_full_pass_says(name: str, tmp_path: Path) -> None:
    theirs(name, tmp_path)
    reference, engine = Reference(tmp_path, "hf"), make_engine(tmp_path, impl="hf", max_running=6, max_step_tokens=24)
    prompts = {f"r{i}": prompt(i, length) for i, length in enumerate([1, 2, 4, 5, 13, 30])}
    done = run(engine, [ask(key, tokens_T, max_tokens=9 + len(tokens_T) % 4) for key, tokens_T in prompts.items()])
    for key, tokens_T in prompts.items():
        assert (done[key].routing is not None) == (name in EXPERTS)
        reference.check_greedy(tokens_T, done[key])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3-yarn", "glm4_moe-grouped"])
def test_our_own_families_run_alike_through_transformers(name: str, tmp_path: Path) -> None:
    from tests.parity import test_models

    test_models.reference(name, tmp_path)
    native, foreign = load_model(tmp_path), load_model(tmp_path, impl="hf")
    ids_T = tokens()
    with torch.no_grad():
        torch.testing.assert_close(our_logits(foreign, ids_T), our_logits(native, ids_T), atol=2e-5, rtol=0)
    same = ("family", "vocab_size", "hidden", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions", "moe_layers")
    for field in (*same, "num_experts", "top_k", "window", "window_layers", "sinks", "tie_embeddings", "num_params", "num_active_params"):
        assert getattr(foreign.spec, field) == getattr(native.spec, field), field
