"""The engine against one full forward pass of the same weights, and against itself under every way of scheduling the same request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.engine import fused, runner
from slipstream.models import fill
from slipstream.models.load import load_model
from slipstream.models.spec import ModelSpec
from tests.unit.engine.helpers import Reference, ask, make_engine, prompt, run, write_model

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 40]


GLM = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
}
MLA = {
    **GLM,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
}
MINIMAX = {
    "model_type": "minimax_m2",
    "architectures": ["MiniMaxM2ForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rotary_dim": 16,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 6,
    "swiglu_limit": 1.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
}
DSA = {
    **MLA,
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "index_n_heads": 16,
    "index_head_dim": 24,
    "index_topk": 6,
    "indexer_types": ["full", "full", "shared"],
}
FAMILIES = {"qwen3_moe": {}, "glm4_moe": GLM, "minimax_m2": MINIMAX, "gpt_oss": GPT_OSS, "deepseek_v3": MLA, "glm_moe_dsa": DSA}


@pytest.fixture(scope="module", params=FAMILIES)
def moe_folder(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("parity") / "moe", moe=True, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("parity") / "dense", moe=False)


@pytest.fixture(scope="module")
def reference(moe_folder):
    return Reference(moe_folder)


def mixed_requests(count: int, **sampling):
    return [ask(f"r{i}", prompt(i, LENGTHS[i % len(LENGTHS)] + i // 13), max_tokens=4 + i % 9, **sampling) for i in range(count)]


def same(a, b, atol: float = 1e-5) -> None:
    assert a.tokens_N.tolist() == b.tokens_N.tolist()
    assert a.finish_reason == b.finish_reason
    np.testing.assert_allclose(a.logprobs_N, b.logprobs_N, atol=atol)
    np.testing.assert_array_equal(a.routing.ids_TLK, b.routing.ids_TLK)


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_decoding_equals_the_argmax_of_a_full_forward_pass(moe_folder, reference, length):
    done = run(make_engine(moe_folder), [ask("a", prompt(length, length))])
    reference.check_greedy(prompt(length, length), done["a"])


def test_a_dense_model_decodes_as_its_full_forward_pass_and_has_no_routing(dense_folder):
    done = run(make_engine(dense_folder), [ask("a", prompt(5, 9))])
    assert done["a"].routing is None
    Reference(dense_folder).check_greedy(prompt(5, 9), done["a"])


def test_a_batch_of_64_mixed_lengths_equals_each_request_alone(moe_folder, reference):
    together = run(make_engine(moe_folder, kv_memory_mib=4), mixed_requests(64))
    for request in mixed_requests(64):
        alone = run(make_engine(moe_folder), [request])[request.id]
        same(alone, together[request.id])
        reference.check_greedy(request.prompt_T, alone)


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 5}])
def test_a_seeded_request_samples_the_same_tokens_alone_and_in_a_batch_of_64(moe_folder, sampling):
    requests = [ask(f"r{i}", prompt(i, 1 + i % 23), max_tokens=10, seed=i, **sampling) for i in range(64)]
    together = run(make_engine(moe_folder, kv_memory_mib=4), requests)
    engine = make_engine(moe_folder, prefix_cache=False)
    for request in requests[::5]:
        same(run(engine, [request])[request.id], together[request.id])


@pytest.mark.parametrize("budget", [4, 7, 16])
def test_chunked_prefill_equals_one_shot_prefill(moe_folder, budget):
    requests = mixed_requests(13)
    once = run(make_engine(moe_folder), requests)
    chunked = run(make_engine(moe_folder, max_step_tokens=budget, max_running=4), requests)
    for request in requests:
        same(once[request.id], chunked[request.id])


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (30, 28), (32, 28)])
def test_a_prefix_hit_gives_the_same_completion_and_the_same_routing_rows(moe_folder, reference, length, cached):
    engine = make_engine(moe_folder)
    prompt_T = prompt(3, length)
    first = run(engine, [ask("first", prompt_T)])["first"]
    hit = run(engine, [ask("hit", prompt_T)])["hit"]
    assert (first.cached_tokens, hit.cached_tokens) == (0, cached), "whole blocks, but never the token that is sampled from"
    same(first, hit)
    reference.check_greedy(prompt_T, hit)


def test_a_block_that_an_aborted_prefill_left_half_filled_is_never_found(moe_folder, reference):
    engine = make_engine(moe_folder, max_step_tokens=6, max_running=4)
    prompt_T = prompt(3, 20)
    engine.add(ask("cut", prompt_T))
    engine.step()
    engine.abort(["cut"])
    done = run(engine, [ask("next", prompt_T)])["next"]
    assert done.cached_tokens == 4
    reference.check_greedy(prompt_T, done)


def test_the_next_turn_hits_the_blocks_that_the_last_one_generated(moe_folder, reference):
    engine = make_engine(moe_folder)
    prompt_T = prompt(4, 10)
    first = run(engine, [ask("r/0", prompt_T, max_tokens=15)])["r/0"]
    longer_T = np.concatenate([prompt_T, first.tokens_N, prompt(5, 6)])
    start = len(prompt_T) + len(first.tokens_N) - 1
    second = run(engine, [ask("r/1", longer_T, routing_from=start)])["r/1"]
    assert second.cached_tokens == 24, "10 + 15 tokens, of which the last was never processed: six blocks of four"
    assert second.routing.start == start and len(second.routing.ids_TLK) == len(longer_T) + len(second.tokens_N) - 1 - start
    reference.check_greedy(longer_T, second)


def test_requests_admitted_together_share_the_prompt_that_one_of_them_computes(moe_folder, reference):
    engine = make_engine(moe_folder)
    prompt_T = prompt(6, 21)
    done = run(engine, [ask(f"g{i}", prompt_T) for i in range(8)])
    assert sorted(c.cached_tokens for c in done.values()) == [0] + [20] * 7
    for completion in done.values():
        reference.check_greedy(prompt_T, completion)


def test_preemption_changes_neither_tokens_nor_logprobs_nor_routing(moe_folder, reference):
    requests = [ask(f"r{i}", prompt(i, 20 + i), max_tokens=50, seed=i, temperature=float(i % 2)) for i in range(24)]
    roomy = run(make_engine(moe_folder, kv_memory_mib=8), requests)
    engine = make_engine(moe_folder)
    tight = run(engine, requests)
    assert engine.preemptions > 0
    for request in requests:
        same(roomy[request.id], tight[request.id])
        assert tight[request.id].routing.valid_T.all()
    assert engine.state().kv_used_frac == 0
    reference.check_greedy(requests[0].prompt_T, tight["r0"])


def test_bfloat16_routes_and_samples_close_to_float32(moe_folder):
    sparse = ModelSpec.from_folder(moe_folder).indexer
    prompt_T = prompt(1, 20 if sparse is None else sparse.top_k)  # beyond, rounding also changes which tokens are seen
    wide = run(make_engine(moe_folder), [ask("a", prompt_T, max_tokens=1)])["a"]
    narrow = run(make_engine(moe_folder, dtype="bfloat16"), [ask("a", prompt_T, max_tokens=1)])["a"]
    np.testing.assert_allclose(wide.logprobs_N, narrow.logprobs_N, atol=0.1)


@pytest.fixture(params=["moe", "dense", "unnormalised", "biased"])
def family_folder(request, tmp_path):
    options = {
        "moe": {},
        "dense": {"moe": False},
        "unnormalised": {"norm_topk_prob": False, "num_experts_per_tok": 3},
        "biased": {"moe": False, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True},
    }[request.param]
    return write_model(tmp_path / "model", **{"moe": True, **options})


def test_the_fused_step_equals_the_models_own_forward_pass(family_folder, monkeypatch):
    requests = mixed_requests(24, temperature=1.0, seed=3)
    fused_engine = make_engine(family_folder)
    native = run(fused_engine, requests)
    assert fused_engine._runner._fused is not None
    monkeypatch.setattr(runner, "bind", lambda *args: None)
    plain_engine = make_engine(family_folder)
    plain = run(plain_engine, requests)
    assert plain_engine._runner._fused is None
    for request in requests:
        a, b = native[request.id], plain[request.id]
        assert a.tokens_N.tolist() == b.tokens_N.tolist()
        np.testing.assert_allclose(a.logprobs_N, b.logprobs_N, atol=1e-5)
        if a.routing is not None:
            np.testing.assert_array_equal(np.sort(a.routing.ids_TLK), np.sort(b.routing.ids_TLK))
    np.testing.assert_array_equal(fused_engine.expert_load, plain_engine.expert_load)


@pytest.mark.parametrize("family", [GLM, MLA, MINIMAX, GPT_OSS, DSA], ids=lambda family: family["model_type"])
def test_an_architecture_that_the_fused_step_does_not_know_takes_the_models_own_forward_pass(tmp_path, family):
    engine = make_engine(write_model(tmp_path / "model", moe=True, **family))
    run(engine, [ask("a", prompt(1, 9))])
    assert engine._runner._fused is None


def test_the_routing_bias_decides_who_is_chosen_and_what_is_captured(tmp_path):
    """Expert 7 is far ahead by its bias, and with it its group (4 to 7); a second group is free."""
    folder = write_model(tmp_path / "model", moe=True, **GLM)
    model = load_model(folder)
    with torch.no_grad():
        for layer in (1, 2):
            model.get_parameter(f"layers.{layer}.ffn.router_bias")[7] += 100.0
    fill.save_folder(model, folder, like=folder)
    ids_TLK = run(make_engine(folder), [ask("a", prompt(1, 20))])["a"].routing.ids_TLK
    assert (ids_TLK == 7).any(-1).all()
    assert all(len({1, *groups}) <= 2 for groups in (ids_TLK // 4).reshape(-1, 3).tolist())


def test_the_models_own_forward_pass_is_the_same_alone_and_in_a_batch(moe_folder, monkeypatch):
    monkeypatch.setattr(runner, "bind", lambda *args: None)
    together = run(make_engine(moe_folder, kv_memory_mib=4), mixed_requests(40))
    for request in mixed_requests(40)[::4]:
        same(run(make_engine(moe_folder), [request])[request.id], together[request.id])


def test_models_with_large_matrices_keep_to_torchs_products(moe_folder, monkeypatch):
    monkeypatch.setitem(fused.MAX_MATRIX_BYTES, torch.float32, 1)
    engine = make_engine(moe_folder)
    run(engine, [ask("a", prompt(1, 9))])
    assert engine._runner._fused is None
