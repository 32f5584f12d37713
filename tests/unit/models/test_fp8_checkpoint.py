"""Checkpoints in block-scaled FP8, as DeepSeek-V3 is published: quantised here, tile by tile, and read back as what they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models import fill, hf
from slipstream.models.load import build_model, load_model
from slipstream.models.spec import ModelSpec

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 40,
    "hidden_size": 136,
    "intermediate_size": 144,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 3,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 80,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "dtype": "bfloat16",
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
}
Q_A = "model.layers.0.self_attn.q_a_proj.weight"


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the float32 values that they stand for."""
    codes, values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[at].float().abs().max() / 448
            codes[at] = (weight[at].float() / scales[i, j]).to(torch.float8_e4m3fn)
            values[at] = codes[at].float() * scales[i, j]
    return codes, scales, values


def fp8_folder(folder: Path, config: dict = CONFIG) -> tuple[Path, dict[str, Tensor]]:
    """A folder whose projections are FP8, and the values of all its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    tensors = {name: tensor.bfloat16() for name, tensor in hf.hf_tensors(build_model(ModelSpec.from_config(plain), seed=3)).items()}
    values: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        if "_proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"], values[name] = quantised(tensor)
        else:
            values[name] = tensor.float()
    hf.write_tensors(folder, tensors)
    return folder, values


def edit(folder: Path, **changes: Tensor | None) -> None:
    tensors = {**load_file(folder / hf.SINGLE), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / hf.SINGLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_are_read_as_the_weights_that_they_stand_for(tmp_path, dtype):
    folder, values = fp8_folder(tmp_path / "model")
    loaded = hf.hf_views(load_model(folder, dtype))
    assert loaded.keys() == values.keys() and any(min(v.shape) > 128 for v in values.values())
    for name, value in values.items():
        assert torch.equal(loaded[name], value.to(loaded[name].dtype)), name


def test_any_family_in_that_form_is_read(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    kind = {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    common = {key: CONFIG[key] for key in ("vocab_size", "max_position_embeddings", "quantization_config")}
    folder, values = fp8_folder(tmp_path / "model", {**sizes, **kind, **common})
    loaded = hf.hf_views(load_model(folder))
    assert all(torch.equal(loaded[name], value) for name, value in values.items())


def test_scales_may_lie_in_another_shard_than_their_codes(tmp_path):
    folder, values = fp8_folder(tmp_path / "model")
    tensors = load_file(folder / hf.SINGLE)
    (folder / hf.SINGLE).unlink()
    hf.write_tensors(folder, tensors, shard_bytes=20_000)
    files = hf.tensor_files(folder)
    assert any(files[name] != files[f"{name}_scale_inv"] for name in files if f"{name}_scale_inv" in files)
    assert torch.equal(hf.hf_views(load_model(folder))[Q_A], values[Q_A])


def test_what_is_saved_from_such_a_model_is_not_quantised_and_says_so(tmp_path):
    folder, values = fp8_folder(tmp_path / "model")
    fill.save_folder(load_model(folder), tmp_path / "out", like=folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    saved = hf.read_tensors(tmp_path / "out")
    assert saved.keys() == values.keys() and all(torch.equal(saved[name], value) for name, value in values.items())


def test_a_prediction_layer_in_fp8_is_carried_along_as_its_values(tmp_path):
    folder, _ = fp8_folder(tmp_path / "model", {**CONFIG, "num_nextn_predict_layers": 1})
    codes, scales, values = quantised(torch.randn(130, 200, generator=torch.Generator().manual_seed(0)))
    name = "model.layers.2.mlp.down_proj.weight"
    edit(folder, **{name: codes, f"{name}_scale_inv": scales, "model.layers.2.eh_proj.weight": torch.ones(2, 2)})
    fill.save_folder(load_model(folder, torch.bfloat16), tmp_path / "out", like=folder)
    saved = hf.read_tensors(tmp_path / "out")
    assert torch.equal(saved[name], values.bfloat16()) and saved["model.layers.2.eh_proj.weight"].dtype == torch.float32
    assert not any(key.endswith("_scale_inv") for key in saved)
    edit(folder, **{f"{name}_scale_inv": None})
    with pytest.raises(ModelError, match=f"its scales {name}_scale_inv are missing"):
        fill.save_folder(load_model(folder), tmp_path / "out", like=folder)


def test_codes_without_scales_are_refused(tmp_path):
    folder, _ = fp8_folder(tmp_path / "model")
    edit(folder, **{f"{Q_A}_scale_inv": None})
    with pytest.raises(
        ModelError, match=f"{Q_A} in .*model.safetensors is torch.float8_e4m3fn, but its scales {Q_A}_scale_inv are missing"
    ):
        load_model(folder)


@pytest.mark.parametrize("scales", [torch.ones(2, 2), torch.ones(1, 1), torch.ones(1, 2, dtype=torch.int32)])
def test_scales_of_another_shape_or_kind_are_refused(tmp_path, scales):
    folder, _ = fp8_folder(tmp_path / "model")
    edit(folder, **{f"{Q_A}_scale_inv": scales})
    with pytest.raises(ModelError, match=rf"{Q_A}_scale_inv .*expected float32 \[1, 2\]"):
        load_model(folder)


def test_scales_without_codes_are_unexpected(tmp_path):
    folder, values = fp8_folder(tmp_path / "model")
    edit(folder, **{Q_A: values[Q_A]})
    with pytest.raises(ModelError, match=f"{Q_A}_scale_inv .*of a quantised checkpoint"):
        load_model(folder)


def test_another_eight_bit_type_is_refused(tmp_path):
    folder, values = fp8_folder(tmp_path / "model")
    edit(folder, **{Q_A: values[Q_A].to(torch.float8_e5m2), f"{Q_A}_scale_inv": None})
    with pytest.raises(ModelError, match="float8_e5m2, of a quantised checkpoint"):
        load_model(folder)


@pytest.mark.parametrize(
    "changes", [{"quant_method": "awq"}, {"fmt": "e5m2"}, {"weight_block_size": None}, {"weight_block_size": [64, 64]}]
)
def test_another_way_to_quantise_is_refused_by_name(changes):
    with pytest.raises(ModelError, match="quantization_config"):
        ModelSpec.from_config({**CONFIG, "quantization_config": {**CONFIG["quantization_config"], **changes}})
