"""Checkpoint folders: whole, sharded, broken in every way we could think of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import ModelError
from slipstream.models import fill, hf
from slipstream.models.decoder import Decoder
from slipstream.models.load import load_model
from slipstream.models.tensor_file import TensorFile

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / hf.SINGLE)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / hf.SINGLE)


def test_loading_gives_back_what_was_saved_bit_for_bit(model: Decoder, folder: Path) -> None:
    loaded = load_model(folder)
    for (name, p), q in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("shard_bytes", [None, 1, 4000, 10**9])
def test_any_sharding_holds_the_same_tensors_within_its_limit(
    model: Decoder, folder: Path, tmp_path: Path, shard_bytes: int | None
) -> None:
    fill.save_folder(model, tmp_path / "out", like=folder, shard_bytes=shard_bytes)
    before, after = hf.read_tensors(folder), hf.read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    files = set(hf.tensor_files(tmp_path / "out").values())
    assert (len(files) == 1) == (shard_bytes in (None, 10**9))
    for file in files:
        held = load_file(file)
        assert shard_bytes is None or len(held) == 1 or sum(t.nbytes for t in held.values()) <= shard_bytes


def test_saving_copies_what_lies_beside_the_weights_and_corrects_the_dtype(model: Decoder, folder: Path, tmp_path: Path) -> None:
    fill.save_folder(model.bfloat16(), tmp_path / "out", like=folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {**json.loads((folder / "config.json").read_text()), "dtype": "bfloat16"}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert {t.dtype for t in hf.read_tensors(tmp_path / "out").values()} == {torch.bfloat16}


def test_a_failed_save_leaves_the_earlier_folder_whole(
    model: Decoder, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill.save_folder(model, tmp_path / "out", like=folder)
    before = (tmp_path / "out" / hf.SINGLE).read_bytes()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorFile, "write", full)
    with pytest.raises(OSError, match="No space"):
        fill.save_folder(model, tmp_path / "out", like=folder)
    assert (tmp_path / "out" / hf.SINGLE).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_saving_over_the_folder_that_was_copied_from_works(model: Decoder, folder: Path) -> None:
    fill.save_folder(model, folder, like=folder)
    assert torch.equal(load_model(folder).embed, model.embed)
    assert (folder / "tokenizer.json").exists()


def test_converting_on_load_rounds_like_torch(model: Decoder, folder: Path) -> None:
    assert torch.equal(load_model(folder, torch.bfloat16).embed, model.embed.bfloat16())


@pytest.mark.parametrize("keep", [0, 4, 100, -50])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    content = (folder / hf.SINGLE).read_bytes()
    (folder / hf.SINGLE).write_bytes(content[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors .*truncated"):
        load_model(folder)


def test_a_truncated_shard_is_named_with_the_tensor_that_it_cuts(model: Decoder, folder: Path, tmp_path: Path) -> None:
    fill.save_folder(model, tmp_path / "out", like=folder, shard_bytes=4000)
    file = hf.tensor_files(tmp_path / "out")[Q_PROJ]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"{file} .*truncated.*; the file ends within or before model\.layers\.0\."):
        load_model(tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [Q_PROJ, "model.layers.2.mlp.experts.4.down_proj.weight", "model.norm.weight"])
def test_a_value_that_is_not_finite_is_named_with_its_file(folder: Path, name: str, value: float) -> None:
    tensor = load_file(folder / hf.SINGLE)[name].clone()
    tensor.view(-1)[3] = value
    edit(folder, **{name: tensor})
    with pytest.raises(ModelError, match=rf"tensor {name} in {folder / hf.SINGLE} has 1 values that are not finite, .*: {value}"):
        load_model(folder)


def test_large_values_are_no_infinities(folder: Path) -> None:
    edit(folder, **{"model.norm.weight": torch.full((16,), 3e38)})
    assert load_model(folder).norm.max() == 3e38


def test_all_that_does_not_fit_is_named(folder: Path) -> None:
    names = [f"model.layers.0.mlp.experts.{e}.{part}_proj.weight" for e in range(5) for part in ("gate", "up", "down")]
    edit(folder, **dict.fromkeys(names), surprise=torch.zeros(1), **{Q_PROJ: torch.zeros(3, 4)})
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert all(f"tensor {name} is missing" in str(caught.value) for name in names)
    assert "tensor surprise in" in str(caught.value) and f"tensor {Q_PROJ} in" in str(caught.value)


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / hf.SINGLE).unlink()
    with pytest.raises(ModelError, match=r"has no weights: expected model\.safetensors"):
        load_model(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, **{Q_PROJ: None})
    with pytest.raises(ModelError, match=f"{Q_PROJ} is missing from {folder}"):
        load_model(folder)


def test_a_wrong_shape_names_tensor_file_and_both_shapes(folder: Path) -> None:
    edit(folder, **{Q_PROJ: torch.zeros(3, 4)})
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert all(part in str(caught.value) for part in (Q_PROJ, str(folder / hf.SINGLE), "[3, 4]", "[32, 16]"))


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    edit(folder, **{"model.layers.0.self_attn.sinks": torch.zeros(4)})
    with pytest.raises(ModelError, match=r"self_attn\.sinks .*unexpected"):
        load_model(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2])
def test_quantised_weights_are_refused_by_name_with_what_to_do(folder: Path, dtype: torch.dtype) -> None:
    edit(folder, **{Q_PROJ: torch.zeros(32, 16, dtype=dtype)})
    with pytest.raises(ModelError, match=rf"tensor {Q_PROJ} in .* is {str(dtype)[6:]}.*convert it to bfloat16 first"):
        load_model(folder)


@pytest.mark.parametrize("scale", [f"{Q_PROJ}_scale_inv", "model.layers.0.mlp.experts.gate_up_proj_scales"])
def test_the_scales_of_quantised_weights_are_named_before_what_they_leave_missing(folder: Path, scale: str) -> None:
    edit(folder, **{Q_PROJ: None, scale: torch.zeros(1, 1)})
    with pytest.raises(ModelError, match=rf"fit the qwen3_moe model: tensor {scale} in .* convert it to bfloat16 first"):
        load_model(folder)


def test_a_refused_load_changes_nothing(model: Decoder) -> None:
    tensors = {name: tensor + 1 for name, tensor in hf.hf_tensors(model).items()}
    before = model.embed.clone()
    with pytest.raises(ModelError):
        fill.load_hf_tensors(model, {**tensors, Q_PROJ: torch.zeros(1)})
    assert torch.equal(model.embed, before)
    fill.load_hf_tensors(model, tensors)
    assert torch.equal(model.embed, before + 1)


def test_a_missing_shard_names_file_and_tensor(model: Decoder, folder: Path, tmp_path: Path) -> None:
    fill.save_folder(model, tmp_path / "out", like=folder, shard_bytes=4000)
    gone = hf.tensor_files(tmp_path / "out")[Q_PROJ]
    gone.unlink()
    with pytest.raises(ModelError, match=rf"{gone} is missing; .* holds model\."):
        load_model(tmp_path / "out")


def test_a_shard_without_its_tensor_names_both(model: Decoder, folder: Path, tmp_path: Path) -> None:
    fill.save_folder(model, tmp_path / "out", like=folder, shard_bytes=4000)
    file = hf.tensor_files(tmp_path / "out")[Q_PROJ]
    save_file({name: tensor for name, tensor in load_file(file).items() if name != Q_PROJ}, file)
    with pytest.raises(ModelError, match=f"{file} does not hold {Q_PROJ}"):
        load_model(tmp_path / "out")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_named(folder: Path, text: str) -> None:
    (folder / hf.SINGLE).unlink()
    (folder / hf.INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json is broken"):
        load_model(folder)


def test_a_stored_copy_of_a_tied_head_must_equal_the_embedding(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load_model(folder)
    edit(folder, **{"lm_head.weight": load_file(folder / hf.SINGLE)["model.embed_tokens.weight"].clone()})
    assert load_model(folder).head is None
