"""Our decoders against transformers', on tiny random models: the same folder, the same logits, the same gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import ModelError
from slipstream.models import fill, hf
from slipstream.models.load import load_model
from tests.parity.zoo import ZOO, changed_tensors, gaps, our_logits, reference, tokens

MLA_KINDS = ["deepseek_v3-yarn", "deepseek_v3-whole-queries"]
NEWER = ["minimax_m2-rotary-dim", "gpt_oss-yarn", "deepseek_v32-yarn", "glm_moe_dsa-shared"]


@pytest.mark.parametrize("name", ZOO)
def test_logits_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = reference(name, tmp_path)
    ours = load_model(tmp_path)
    found = gaps(ours, theirs, tokens())
    assert found.spread > 0.3
    assert found.logits <= 1e-5 and found.logits_serving <= 1e-5
    own = {key for key, p in ours.named_parameters() if p.grad is not None}
    assert own == {key for key, _ in ours.named_parameters() if not key.endswith("router_bias") and ".indexer." not in key}
    assert {key: gap for key, gap in found.grads_relative.items() if gap > 1e-5} == {}


@pytest.mark.parametrize("name", ["qwen3_moe-dense-first", "qwen3-tied", "llama-bias", "glm4_moe-grouped", *MLA_KINDS, *NEWER])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_goes_in_and_out_bit_for_bit(name: str, sharded: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    theirs = in_dtype(reference(name, source), dtype)
    theirs.save_pretrained(source, max_shard_size="20KB" if sharded else "1GB")
    if sharded:
        (source / hf.SINGLE).unlink()
    assert (source / hf.INDEX).exists() == sharded
    fill.save_folder(load_model(source, dtype), copy, like=source, shard_bytes=20_000 if sharded else None)
    assert (copy / hf.INDEX).exists() == sharded
    assert changed_tensors(source, copy) == []
    for key, tensor in hf.read_tensors(copy).items():
        assert tensor.dtype == (torch.float32 if key.endswith("correction_bias") else dtype), key
    assert (copy / "config.json").read_bytes() == (source / "config.json").read_bytes()


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """As published checkpoints are: weights in `dtype`, the routing bias in float32."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    model.to(dtype)
    for name, values_E in kept.items():
        model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = values_E
    return model


@pytest.mark.parametrize("sharded", [False, True])
def test_a_prediction_layer_is_carried_along_bit_for_bit_and_changes_nothing(sharded: bool, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    reference("glm4_moe", source)
    plain = load_model(source)
    extra = {"model.layers.3.eh_proj.weight": torch.randn(32, 64).bfloat16(), "model.layers.3.mlp.gate.weight": torch.randn(8, 32)}
    hf.write_tensors(source, hf.read_tensors(source) | extra)
    loaded = load_model(source)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), loaded.parameters(), strict=True))
    fill.save_folder(loaded, copy, like=source, shard_bytes=20_000 if sharded else None)
    before, after = hf.read_tensors(source), hf.read_tensors(copy)
    assert extra.keys() < before.keys() and before.keys() == after.keys()
    assert all(tensor.dtype == after[key].dtype and torch.equal(tensor, after[key]) for key, tensor in before.items())


def test_a_layer_behind_the_last_that_the_config_does_not_announce_is_refused(tmp_path: Path) -> None:
    reference("glm4_moe", tmp_path)
    hf.write_tensors(tmp_path, hf.read_tensors(tmp_path) | {"model.layers.4.eh_proj.weight": torch.zeros(32, 64)})
    with pytest.raises(ModelError, match=r"layers\.4\.eh_proj.*unexpected"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["qwen3_moe-dense-first", "glm4_moe-grouped", *MLA_KINDS, *NEWER])
def test_transformers_loads_what_we_save(name: str, tmp_path: Path) -> None:
    import transformers

    theirs = reference(name, tmp_path / "source")
    fill.save_folder(load_model(tmp_path / "source"), tmp_path / "copy", like=tmp_path / "source", shard_bytes=30_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy", attn_implementation="eager")
    ids_T = tokens()
    with torch.no_grad():
        assert torch.equal(again(ids_T[None]).logits, theirs(ids_T[None]).logits)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "llama", "glm4_moe", "deepseek_v3", "minimax_m2", "gpt_oss", "deepseek_v32-nothing-left-out"]
)
def test_bf16_logits_are_near_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = in_dtype(reference(name, tmp_path), torch.bfloat16)
    ids_T = tokens()
    with torch.no_grad():
        logits = our_logits(load_model(tmp_path, torch.bfloat16), ids_T)
        their_logits = theirs(ids_T[None]).logits[0]
    assert logits.dtype == torch.bfloat16
    # 8 bits of mantissa through three layers; a token may also flip an expert, so most rows, not all, are held to it
    close = ((logits - their_logits).float().abs() < 0.08).all(dim=-1).float().mean()
    assert close > 0.8


@pytest.mark.parametrize("name", ["llama-tied", "minimax_m2-rotary-dim"])
def test_the_older_form_of_the_rope_options_gives_the_same_model(name: str, tmp_path: Path) -> None:
    theirs = reference(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": None}))
    ids_T = tokens()
    with torch.no_grad():
        torch.testing.assert_close(our_logits(load_model(tmp_path), ids_T), theirs(ids_T[None]).logits[0], atol=1e-5, rtol=0)
