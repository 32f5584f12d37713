"""Adapters of a model: which matrices, and PEFT's folder format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import ConfigError, ModelError
from slipstream.models.decoder import Decoder
from slipstream.models.load import build_model
from slipstream.models.lora import Adapters
from slipstream.models.peft import CONFIG, TENSORS, read_adapter, write_adapter
from slipstream.models.spec import ModelSpec
from tests.unit.models.conftest import CONFIG as MIXED

PREFIX = "base_model.model.model.layers"


def adapters(model: Decoder, *targets: str, rank: int = 2, alpha: float = 4.0, seed: int = 0) -> Adapters:
    return Adapters(model, rank, alpha, targets or ("all",), seed)


def merge(given: Adapters, model: Decoder) -> None:
    for ours in given.within:
        given.merge(ours, model.get_parameter(ours).detach())


def written(folder: Path, given: Adapters, **changes: Any) -> Path:
    """An adapter folder with some keys of its configuration changed."""
    write_adapter(folder, given, Path("base"))
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**values, **changes}))
    return folder


def test_each_matrix_of_the_checkpoint_and_each_expert_has_an_adapter_of_its_own_by_peft_names_and_shapes(model):
    shapes = {name: list(view.shape) for name, view in adapters(model).tensors().items()}
    modules = {name.partition(".lora_")[0] for name in shapes}
    assert len(shapes) == 2 * len(modules) == 2 * (3 * 4 + 1 * 3 + 2 * 5 * 3)
    assert shapes[f"{PREFIX}.0.self_attn.k_proj.lora_A.weight"] == [2, 16]
    assert shapes[f"{PREFIX}.0.self_attn.k_proj.lora_B.weight"] == [16, 2]
    assert shapes[f"{PREFIX}.1.mlp.gate_proj.lora_B.weight"] == [24, 2]
    assert shapes[f"{PREFIX}.2.mlp.experts.4.down_proj.lora_A.weight"] == [2, 8]
    assert shapes[f"{PREFIX}.2.mlp.experts.4.down_proj.lora_B.weight"] == [16, 2]


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (("attention",), 12),
        (("dense",), 3),
        (("experts",), 30),
        (("q_proj", "v_proj"), 6),
        (("down_proj",), 11),
        (("dense", "q_proj"), 6),
        (("all", "q_proj"), 45),
    ],
)
def test_targets_choose_by_kind_and_by_name(model, targets, count):
    assert len(adapters(model, *targets).tensors()) == 2 * count


@pytest.mark.parametrize(
    ("family", "sizes", "expected"),
    [
        ("gpt_oss", {"num_local_experts": 4, "rope_parameters": {"rope_type": "default"}}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}, {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"}),
    ],
)
def test_other_families_have_what_the_precision_map_has(family, sizes, expected):
    values = {key: value for key, value in MIXED.items() if key not in ("mlp_only_layers", "attention_bias")}
    built = build_model(ModelSpec.from_config({**values, "model_type": family, **sizes}))
    assert {site.last for site in adapters(built).possible} == expected
    if family == "gpt_oss":
        with pytest.raises(ConfigError, match=r"'experts' matches no matrix of this gpt_oss model; it has attention \(k_proj, o_proj"):
            adapters(built, "experts")


def test_first_values_are_peft_ones_of_the_seed(model):
    wide = build_model(ModelSpec.from_config({**MIXED, "hidden_size": 400, "head_dim": 100}))
    first, again, other = (adapters(wide, "attention", rank=16, seed=seed) for seed in (3, 3, 4))
    down = first.parameters["model.layers.0.self_attn.q_proj.lora_A"].detach()
    assert 0.95 * 400**-0.5 < float(down.abs().max()) <= 400**-0.5
    assert float(down.std()) == pytest.approx(400**-0.5 / math.sqrt(3), rel=0.05)
    assert torch.equal(down, again.parameters["model.layers.0.self_attn.q_proj.lora_A"])
    assert not torch.equal(down, other.parameters["model.layers.0.self_attn.q_proj.lora_A"])
    assert all(not p.any() for name, p in first.parameters.items() if name.endswith("lora_B"))


def test_an_adapter_that_goes_out_and_in_is_the_same(tmp_path, model):
    given, taken = adapters(model, seed=1), adapters(model, seed=2)
    with torch.no_grad():
        for parameter in given.parameters.values():
            parameter.normal_()
    write_adapter(tmp_path / "a", given, Path("base"))
    found = read_adapter(tmp_path / "a")
    assert (found.rank, found.alpha) == (2, 4.0)
    taken.load(found.tensors, "a")
    assert all(torch.equal(taken.parameters[name], p) for name, p in given.parameters.items())
    merge(taken, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    merge(given, model)  # starts from the base that it was made with, not from what is there
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("cuts", [[0, 7], [0, 1, 5, 16], [0, 0, 3]])
def test_processes_that_hold_some_rows_each_merge_and_receive_what_one_with_all_of_them_does(model, cuts):
    """Rows of the first dimension: features in, of which there are 16, or 5 experts."""
    one = adapters(model)
    with torch.no_grad():
        for parameter in one.parameters.values():
            parameter.normal_()
    for ours, sites in one.within.items():
        shape = model.get_parameter(ours).shape
        ends = [min(cut, shape[0]) for cut in cuts[1:]] + [shape[0]]
        starts, grad, expected, found = [0, *ends[:-1]], torch.randn(shape), torch.empty(shape), torch.empty(shape)
        summed = {name: torch.zeros_like(p) for name, p in one.parameters.items() if name.rpartition(".")[0] in {s.module for s in sites}}
        for first, end in zip(starts, ends, strict=True):
            some = adapters(model)
            some.load(one.tensors(), "all")
            some.keep(ours, slice(first, end))
            some.merge(ours, found[first:end])
            some.receive(ours, grad[first:end])
            for name, total in summed.items():
                part = some.parameters[name].grad
                assert part is not None
                total += part
        one.merge(ours, expected)
        one.receive(ours, grad)
        torch.testing.assert_close(found, expected)
        for name, total in summed.items():
            torch.testing.assert_close(total, one.parameters[name].grad)


def test_the_configuration_names_exactly_the_modules_that_have_an_adapter(tmp_path, model):
    def of(*targets: str) -> dict[str, Any]:
        return json.loads((written(tmp_path / "a", adapters(model, *targets)) / CONFIG).read_text())

    values = of("attention")
    assert values["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"] and values["target_parameters"] is None
    assert (values["peft_type"], values["task_type"], values["r"], values["lora_alpha"]) == ("LORA", "CAUSAL_LM", 2, 4)
    assert values["base_model_name_or_path"] == "base" and values["bias"] == "none"
    values, dense = of("all"), [f"model.layers.1.mlp.{name}_proj.weight" for name in ("down", "gate", "up")]
    assert values["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert values["target_parameters"] == dense
    values = of("dense", "q_proj")
    assert values["target_modules"] == ["q_proj"] and values["target_parameters"] == dense
    modules = of("experts")["target_modules"]
    assert len(modules) == 30 and "model.layers.2.mlp.experts.4.gate_proj" in modules


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("use_dora", True),
        ("use_rslora", True),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 4}),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
    ],
)
def test_options_that_change_what_the_tensors_mean_are_refused_by_name(tmp_path, model, key, value):
    folder = written(tmp_path / "a", adapters(model))
    assert read_adapter(folder).rank == 2
    with pytest.raises(ModelError, match=rf"{CONFIG}: {key} = .* is not implemented"):
        read_adapter(written(folder, adapters(model), **{key: value}))


def test_files_that_are_missing_or_broken_are_named(tmp_path, model):
    with pytest.raises(ModelError, match=f"{CONFIG} is missing"):
        read_adapter(tmp_path)
    for text in ("{", "[]", '{"r": 2}', '{"r": "two", "lora_alpha": 2}'):
        (tmp_path / CONFIG).write_text(text)
        with pytest.raises(ModelError, match=f"{CONFIG} is broken"):
            read_adapter(tmp_path)
    folder = written(tmp_path / "a", adapters(model))
    content = (folder / TENSORS).read_bytes()
    for damaged in (content[:100], content[:-10]):
        (folder / TENSORS).write_bytes(damaged)
        with pytest.raises(ModelError, match=f"{TENSORS} is missing, truncated"):
            read_adapter(folder)
    (folder / TENSORS).unlink()
    with pytest.raises(ModelError, match=f"{TENSORS} is missing"):
        read_adapter(folder)


def test_tensors_that_do_not_fit_are_named_and_nothing_is_changed(tmp_path, model):
    folder, taken = written(tmp_path / "a", adapters(model, seed=1)), adapters(model)
    tensors, name = load_file(folder / TENSORS), f"{PREFIX}.2.mlp.experts.4.down_proj.lora_A.weight"
    before = {key: view.clone() for key, view in taken.tensors().items()}
    bad = {
        "is missing": {key: tensor for key, tensor in tensors.items() if key != name},
        r"has shape \[3, 8\], expected \[2, 8\]": {**tensors, name: torch.zeros(3, 8)},
        "is torch.int64": {**tensors, name: torch.zeros(2, 8, dtype=torch.int64)},
        "holds values that are not finite": {**tensors, name: torch.full((2, 8), torch.nan)},
    }
    for problem, given in bad.items():
        with pytest.raises(ModelError, match=rf"^adapter a does not fit.*tensor {name} {problem}"):
            taken.load(given, "adapter a")
    fused = f"{PREFIX}.2.mlp.experts.lora_A.weight"
    with pytest.raises(ModelError, match=rf"tensor {fused} is unexpected"):
        taken.load({**tensors, fused: torch.zeros(1)}, "adapter a")
    assert all(torch.equal(before[key], view) for key, view in taken.tensors().items())
    save_file({key: tensor.bfloat16() for key, tensor in tensors.items()}, folder / TENSORS)
    taken.load(read_adapter(folder).tensors, "adapter a")
    assert all(torch.equal(tensors[key].bfloat16().float(), view) for key, view in taken.tensors().items())


def test_a_folder_that_is_not_an_adapter_is_not_replaced(tmp_path, model):
    write_adapter(tmp_path / "a", adapters(model), Path("base"))
    write_adapter(tmp_path / "a", adapters(model), Path("base"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="b is an existing folder that is not an adapter folder and is not replaced by an adapter"):
        write_adapter(tmp_path / "b", adapters(model), Path("base"))
