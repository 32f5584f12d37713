"""The precision map says of every weight of every family which side it is on."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import StateError
from slipstream.models.decoder import Decoder
from slipstream.models.hf import hf_views
from slipstream.models.load import build_model
from slipstream.models.maker import PRESETS
from slipstream.models.matrices import fused_columns, is_matrix
from slipstream.models.names import Columns, NameTable
from slipstream.models.spec import ModelSpec


def model(preset: str) -> Decoder:
    return build_model(ModelSpec.from_config({**PRESETS[preset], "vocab_size": 64}), device="meta")


FP8_ENDS = ("_proj", "_mqa", "w1", "w2", "w3")
"""Of the modules of all families; but an indexer's `weights_proj` only weighs its choices."""


@pytest.mark.parametrize("preset", PRESETS)
def test_every_weight_is_on_one_side_and_those_that_steer_or_end_the_model_never_in_fp8(preset):
    by_module: dict[str, set[bool]] = {}
    for name in filter(lambda name: name.endswith(".weight"), hf_views(model(preset))):
        by_module.setdefault(name.split(".")[-2], set()).add(is_matrix(name))
    assert all(len(sides) == 1 for sides in by_module.values())
    assert {module for module, sides in by_module.items() if sides == {True}} == {m for m in by_module if m.endswith(FP8_ENDS)} - {
        "weights_proj"
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_the_map_under_our_names_is_the_map_under_those_of_the_checkpoint(preset):
    subject = model(preset)
    columns = fused_columns(subject.names, subject.spec)
    for name, parameter in subject.named_parameters():
        sides = {is_matrix(hf_name) for hf_name in hf_views(subject, {name: parameter})}
        assert sides == {name in columns}
        if name in columns:
            assert sum(columns[name]) == parameter.shape[-1]
            views = hf_views(subject, {name: parameter}).values()  # [out, in], or stacks [experts, in, out]
            assert tuple(view.shape[0 if view.ndim == 2 else 2] for view in views)[: len(columns[name])] == columns[name]


def test_the_stacked_experts_of_gpt_oss_are_matrices_and_their_biases_are_not():
    subject = model("tiny-gpt-oss")
    columns = fused_columns(subject.names, subject.spec)
    assert columns["layers.1.ffn.experts.gate_up"] == (2 * subject.spec.expert_intermediate,)
    assert columns["layers.1.ffn.experts.down"] == (subject.spec.hidden,)
    assert not any("bias" in name for name in columns)


def test_the_router_is_no_gate_projection():
    assert not is_matrix("model.layers.3.mlp.gate.weight") and is_matrix("model.layers.3.mlp.gate_proj.weight")
    assert not is_matrix("lm_head.weight") and not is_matrix("model.embed_tokens.weight")
    assert not is_matrix("model.layers.3.mlp.gate.e_score_correction_bias") and not is_matrix("model.layers.3.self_attn.q_proj.bias")


def test_a_weight_that_is_on_no_list_is_an_error():
    with pytest.raises(StateError, match=r"does not know model\.layers\.0\.self_attn\.indexer\.wz\.weight: add 'wz'"):
        is_matrix("model.layers.0.self_attn.indexer.wz.weight")


def test_a_parameter_on_both_sides_is_an_error():
    mixed = Columns(
        "layers.{layer}.x", (("model.layers.{layer}.mlp.gate.weight", "hidden"), ("model.layers.{layer}.a.q_proj.weight", "hidden"))
    )
    with pytest.raises(StateError, match="fuses weights that are multiplied in FP8 with others"):
        fused_columns(NameTable(model=(), layer=(mixed,)), model("tiny-moe").spec)


def test_the_map_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, slipstream.models.matrices; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch is not None
