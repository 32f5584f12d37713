"""Training with FP8 products: what is quantised, when, and what stays exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.engine.weights import LiveWeights
from slipstream.models.fp8 import load_in_fp8, stream_in_fp8
from slipstream.models.hf import hf_tensors, hf_views, read_tensors
from slipstream.models.load import load_model
from slipstream.models.matrices import SCALE_SUFFIX, fused_columns, is_matrix
from slipstream.ops import fp8_weight
from slipstream.ops.fp8 import WEIGHT, Quantised, quantise
from slipstream.ops.fp8_weight import Fp8Weight
from slipstream.transport.weights import read_version, version_folder
from tests.unit.trainer.helpers import make_batch, model_folder, run_config, write_run
from tests.unit.trainer.test_rl import fingerprints, train, whole_and_resumed
from tests.unit.trainer.test_step import gradients, learner, parameters

SIZES = {"hidden_size": 136, "moe_intermediate_size": 72}
"""So that matrices have more than one block of 128, and a smaller last one."""
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 0,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "intermediate_size": 72,
    "num_local_experts": 8,
    "attention_bias": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": {"rope_type": "default"},
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
FAMILIES = {"qwen3_moe": {}, "deepseek_v3": DEEPSEEK, "gpt_oss": GPT_OSS}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), **{**SIZES, **FAMILIES[request.param]})


def test_the_matrices_of_the_precision_map_are_multiplied_in_fp8_and_nothing_else_is(folder):
    model = learner(folder, dtype="float8").weights.compute
    columns = fused_columns(model.names, model.spec)
    assert {name for name, p in model.named_parameters() if isinstance(p, Fp8Weight)} == columns.keys() & dict(
        model.named_parameters()
    ).keys()
    assert not any(isinstance(p, Fp8Weight) for p in learner(folder, dtype="bfloat16").weights.compute.parameters())


def test_every_fp8_weight_is_used_in_fp8_by_every_row(folder, monkeypatch):
    used: list[int] = []
    apply = fp8_weight._Product.apply
    monkeypatch.setattr(fp8_weight._Product, "apply", lambda x, w, ends: used.append(id(w)) or apply(x, w, ends))
    subject, batch = learner(folder, dtype="float8"), make_batch()
    subject.accumulate(batch)
    weights = [id(p) for p in subject.weights.compute.parameters() if isinstance(p, Fp8Weight)]
    assert sorted(used) == sorted(weights * len(batch.micro_batches))


def test_each_weight_is_quantised_once_a_step_however_many_rows_there_are(folder, monkeypatch):
    subject = learner(folder, dtype="float8")
    quantised: list[tuple[int, int]] = []
    original = fp8_weight.quantise
    monkeypatch.setattr(fp8_weight, "quantise", lambda x, tile, power=False: quantised.append(tile) or original(x, tile, power))
    batch = make_batch(row_tokens=32)
    assert len(batch.micro_batches) > 3
    subject.step(batch)
    weights = [p for p in subject.weights.compute.parameters() if isinstance(p, Fp8Weight)]
    assert quantised.count(WEIGHT) == sum(len(w.columns) for w in weights)


@pytest.mark.parametrize("scales", ["float32", "power_of_two"])
def test_what_is_published_quantises_to_the_codes_that_the_trainer_multiplies(folder, scales):
    subject = learner(folder, dtype="float8", fp8_scales=scales)
    before = parameters(subject)
    subject.step(make_batch())
    assert all(not torch.equal(before[name], p) for name, p in parameters(subject).items() if not name.endswith("router_bias"))
    model = subject.weights.compute
    published = hf_tensors(model)
    masters = hf_tensors(subject.weights.master)
    assert all(torch.equal(published[name], masters[name].to(published[name].dtype)) for name in masters)
    codes = {
        name: torch.cat([part.dequantise() for part in p.parts], -1) for name, p in model.named_parameters() if isinstance(p, Fp8Weight)
    }
    for name, values in hf_views(model, codes).items():
        assert is_matrix(name)
        assert torch.equal(quantise(published[name], WEIGHT, scales == "power_of_two").dequantise(), values), name


@pytest.mark.parametrize("scales", ["float32", "power_of_two"])
def test_codes_that_are_published_are_those_that_the_trainer_multiplies(folder, scales):
    subject = learner(folder, dtype="float8", fp8_scales=scales)
    subject.step(make_batch())
    published = dict(stream_in_fp8(subject.published(), scales == "power_of_two").items())
    model = subject.weights.compute
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, Fp8Weight)}
    multiplied = hf_views(model, {name: torch.cat([part.codes.view(torch.uint8) for part in p.parts], -1) for name, p in weights.items()})
    values = hf_views(model, {name: torch.cat([part.dequantise() for part in p.parts], -1) for name, p in weights.items()})
    assert {name for name, tensor in published.items() if tensor.dtype == torch.float8_e4m3fn} == multiplied.keys()
    for name, codes in multiplied.items():
        assert torch.equal(published[name].view(torch.uint8), codes), name
        assert torch.equal(Quantised(published[name], published[name + SCALE_SUFFIX], WEIGHT).dequantise(), values[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_a_run_that_publishes_in_fp8_has_the_codes_of_an_engine_that_quantises_and_exports_values(tmp_path, dtype):
    model = model_folder(tmp_path / "model", **SIZES)
    trainer, engine = {"dtype": dtype, "publish": "float8"}, {"dtype": "float8"}
    run = write_run(run_config(tmp_path / "run", model, trainer=trainer, engine=engine))
    assert train(run, 1, 2) == 0
    assert fingerprints(run).keys() == {0, 1, 2}
    live = LiveWeights(model, torch.bfloat16, -1, fp8="float32")
    live.prepare(read_version(version_folder(run / "weights", 2)))
    live.commit(2)
    assert all(tensor.dtype != torch.float8_e4m3fn for tensor in read_tensors(run / "final").values())
    expected = load_in_fp8(run / "final", False)
    for name, mine in live.model.named_parameters():
        other = expected.get_parameter(name)
        assert isinstance(mine, Fp8Weight) == isinstance(other, Fp8Weight)
        pairs = zip(mine.memory, other.memory, strict=True) if isinstance(mine, Fp8Weight) else [(mine, other)]
        assert all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs), name


def test_gradients_are_near_those_of_float32_where_nothing_flips(folder):
    """Experts forced everywhere, and a loss without a mask: rounding has no threshold to push a token across."""
    batch = make_batch()
    rows = tuple(replace(row, routing_valid_T=np.ones_like(row.routing_valid_T)) for row in batch.micro_batches)
    batch, loss = replace(batch, micro_batches=rows), {"type": "policy_gradient"}
    exact, rounded, fp8 = (gradients(learner(folder, dtype=d, loss=loss), batch) for d in ("float32", "bfloat16", "float8"))
    assert exact.keys() == rounded.keys() == fp8.keys() and all(g.dtype == torch.float32 for g in fp8.values())
    norm = sum(float(g.square().sum()) for g in exact.values()) ** 0.5
    errors = [sum(float((exact[name] - g[name]).square().sum()) for name in exact) ** 0.5 / norm for g in (rounded, fp8)]
    assert errors[0] < 0.03 and 2 * errors[0] < errors[1] < 0.25, errors


def test_gradients_of_fp8_weights_reach_the_masters_unrounded(folder):
    batch = make_batch(num_samples=4, row_tokens=256)
    assert len(batch.micro_batches) == 1  # a sum over rows would hide it
    subject = learner(folder, dtype="float8")
    found = gradients(subject, batch)
    for name in subject.weights.columns.keys() & found.keys():
        assert not torch.equal(found[name], found[name].bfloat16().float()), name


def test_recomputing_activations_changes_no_gradient(folder):
    kept, recomputed = (gradients(learner(folder, dtype="float8", recompute=on), make_batch()) for on in ("none", "layer"))
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def test_the_errors_of_rounding_are_reported_and_only_in_float8(folder):
    subject = learner(folder, dtype="float8")
    subject.accumulate(make_batch())
    _, underflow = subject.weights._errors.shares()["grad"]
    assert subject.weights.metrics()["trainer/fp8/grad_underflow_frac"] == underflow
    metrics = subject.step(make_batch()).metrics
    assert subject.weights.metrics() == {}  # each step's own
    errors = {key: value for key, value in metrics.items() if "/fp8/" in key}
    assert errors.keys() == {f"trainer/fp8/{name}" for name in ("weight_error", "input_error", "grad_error", "grad_underflow_frac")}
    assert all(0.015 < value < 0.05 for key, value in errors.items() if key.endswith("_error"))
    assert not any("/fp8/" in key for key in learner(folder, dtype="bfloat16").step(make_batch()).metrics)


def test_a_gradient_that_is_not_finite_is_not_hidden_by_rounding(folder):
    subject, batch = learner(folder, dtype="float8"), make_batch()
    first = batch.micro_batches[0]
    bad = replace(first, advantages_T=np.full_like(first.advantages_T, np.inf))
    assert subject.step(replace(batch, micro_batches=(bad, *batch.micro_batches[1:]))).problem
    with torch.no_grad():
        subject.weights.master.layers[0].ffn.experts.down[0, 0, 0] = torch.nan
    subject.weights.sync()
    assert subject.step(batch).problem


def test_a_run_that_is_interrupted_and_resumed_ends_with_bit_identical_weights(tmp_path, folder):
    trainer = {"dtype": "float8"}
    whole, resumed = whole_and_resumed(tmp_path, folder, trainer)
    assert fingerprints(resumed) == fingerprints(whole)
    assert load_model(whole / "final", torch.bfloat16).spec.family in FAMILIES
