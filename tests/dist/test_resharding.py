"""Model folders and checkpoints do not care how many processes read or write them, nor what these share."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.models import hf
from slipstream.models.load import build_model, load_model
from slipstream.models.spec import ModelSpec
from slipstream.trainer import checkpoint
from slipstream.trainer.shards import Stored
from slipstream.transport.weights import TENSORS_FILE
from tests.dist.cases import MODELS
from tests.dist.conftest import finish, start
from tests.dist.resharding import run

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"fsdp": {}, "ep": {"ep": 2}, "cp": {"cp": 2}, "hsdp": {"dp_replicate": 2}, "pp": {"pp": 2}},
    4: {"fsdp": {}, "ep": {"ep": 4}, "ep x fsdp": {"ep": 2}, "hsdp x ep x cp": {"dp_replicate": 2, "ep": 2, "cp": 2}, "pp x ep": {"pp": 2, "ep": 2}},
}


def write_model(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    config = {**MODELS["qwen3_moe"], "num_experts": 8, "vocab_size": 51, **changes}  # 51: no number of processes divides it
    (folder / "config.json").write_text(json.dumps(config))
    hf.write_tensors(folder, hf.hf_tensors(build_model(ModelSpec.from_config(config), seed=1)), shard_bytes=20_000)
    return folder


def world(folder: Path, size: int, jobs: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    finish(start(size, "-m", "tests.dist.resharding", str(folder)), timeout=400)


def job(model: Path, layout: dict[str, Any], out: Path, begin: Path | str = "", full: int = -1) -> dict[str, Any]:
    return {"model": str(model), "layout": layout, "start": str(begin), "out": str(out), "full": full}


def saved(out: Path) -> Path:
    return checkpoint.step_folder(out / "checkpoints", 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FOLDER/alone, FOLDER/2/<layout>: from the model; then 4/<layout>, 2/back, alone-back: from checkpoints of another number."""
    folder = tmp_path_factory.mktemp("resharding")
    model = write_model(folder / "model")
    run(model, "", folder / "alone")
    world(folder / "2", 2, [job(model, layout, folder / "2" / name) for name, layout in LAYOUTS[2].items()])
    sources = dict(zip(LAYOUTS[4], LAYOUTS[2], strict=True))
    world(
        folder / "4",
        4,
        [job(model, layout, folder / "4" / name, saved(folder / "2" / sources[name])) for name, layout in LAYOUTS[4].items()],
    )
    back = [job(model, {"ep": 2}, folder / "back" / "2", saved(folder / "4" / "ep x fsdp"))]
    world(folder / "back", 2, [*back, job(model, {}, folder / "back" / "from one", saved(folder / "alone"))])
    run(model, str(saved(folder / "4" / "ep")), folder / "back" / "1")
    return folder


def contents(out: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint, put together without the code under test."""
    found: dict[str, torch.Tensor] = {}
    kinds = Stored(saved(out)).kinds
    for file in sorted(saved(out).glob("shard_*")):
        header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
        offsets = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        for name, tensor in load_file(file).items():
            dtype, shape = kinds[name]
            whole = found.setdefault(name, torch.full(shape, float("nan"), dtype=dtype))
            box = tuple(slice(a, a + n) for a, n in zip(offsets[name]["saved_offsets"], tensor.shape, strict=True))
            assert whole[box].isnan().all(), f"{name} is stored twice"
            whole[box] = tensor
    assert not any(tensor.isnan().any() for tensor in found.values())
    return {name.removeprefix("model/"): tensor for name, tensor in found.items()}


@pytest.mark.parametrize("name", [*LAYOUTS[2]])
def test_a_model_folder_is_loaded_by_part_to_the_weights_that_one_process_loads(runs: Path, name: str):
    expected = torch.load(runs / "alone" / "loaded.pt")
    found = torch.load(runs / "2" / name / "loaded.pt")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name", [*LAYOUTS[2]])
def test_versions_published_from_parts_have_the_bytes_of_one_process(runs: Path, tmp_path: Path, name: str):
    published = runs / "2" / name / "weights" / "v000000" / TENSORS_FILE
    model = load_model(runs / "model")
    save_file({key: view.bfloat16() for key, view in hf.hf_tensors(model).items()}, tmp_path / "whole", metadata={"format": "pt"})
    assert published.read_bytes() == (tmp_path / "whole").read_bytes()


PAIRS = [("4/fsdp", "2/fsdp"), ("4/ep", "2/ep"), ("4/ep x fsdp", "2/cp"), ("4/hsdp x ep x cp", "2/hsdp")]
PAIRS += [("4/pp x ep", "2/pp"), ("back/2", "4/ep x fsdp"), ("back/1", "4/ep"), ("back/from one", "alone")]


@pytest.mark.parametrize(("reader", "writer"), PAIRS)
def test_a_checkpoint_is_read_bit_for_bit_by_another_number_of_processes(runs: Path, reader: str, writer: str):
    expected, found = contents(runs / writer), torch.load(runs / reader / "loaded.pt")
    assert any(name.startswith("exp_avg_sq/") for name in expected)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", [*LAYOUTS[2]])
def test_what_is_stored_is_the_state_of_its_step_although_training_went_on(runs: Path, name: str):
    expected, found = contents(runs / "alone"), contents(runs / "2" / name)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0.05, atol=2e-3 if "exp_avg" not in key else 0.05, msg=key)
        assert key.startswith("step/") is False or float(found[key]) == 1.0


@pytest.mark.parametrize("name", ["2/fsdp", "4/ep x fsdp", "alone"])
def test_every_process_writes_its_own_part(runs: Path, name: str):
    files = sorted(saved(runs / name).glob("shard_*"))
    assert len(files) == (1 if name == "alone" else int(name[0]))
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 1.4 * min(sizes)


def test_a_full_disk_of_one_process_costs_the_checkpoint_of_all_and_nothing_else(tmp_path: Path):
    model = write_model(tmp_path / "model")
    world(tmp_path / "2", 2, [job(model, {}, tmp_path / str(rank), full=rank) for rank in range(2)])
    for rank in range(2):
        number, file, left = json.loads((tmp_path / str(rank) / "failed.json").read_text())
        assert (number, left) == (errno.ENOSPC, []) and file.endswith(f".tmp-step_000001/shard_{rank:05d}.safetensors")
        found = checkpoint.newest(tmp_path / str(rank) / "checkpoints")
        assert found is not None and found.step == 2


def test_what_one_process_cannot_load_all_refuse_with_the_tensor(tmp_path: Path):
    model = write_model(tmp_path / "model")
    name = "model.layers.1.mlp.experts.7.up_proj.weight"
    file = hf.tensor_files(model)[name]
    tensors = load_file(file)
    tensors[name][3, 5] = float("inf")  # of the last expert: only one of the processes reads it
    save_file(tensors, file)
    other = write_model(tmp_path / "other", num_hidden_layers=1, vocab_size=60)
    run(other, "", tmp_path / "made")
    shutil.copytree(tmp_path / "other", tmp_path / "fits")
    (tmp_path / "fits" / "config.json").write_text((model / "config.json").read_text())
    whole = write_model(tmp_path / "whole")
    world(
        tmp_path / "2",
        2,
        [
            job(model, {"ep": 2}, tmp_path / "inf"),
            job(tmp_path / "fits", {}, tmp_path / "missing"),
            job(whole, {}, tmp_path / "foreign", saved(tmp_path / "made")),
        ],
    )
    for rank in range(2):
        found = (tmp_path / "inf" / f"problem{rank}").read_text()
        assert f"tensor {name} in {file} has 1 values that are not finite" in found and "inf" in found
        found = (tmp_path / "missing" / f"problem{rank}").read_text()
        assert "tensor model.layers.1.mlp.gate.weight is missing" in found
        assert "tensor model.embed_tokens.weight" in found and "has shape [60, 16], but config.json implies [51, 16]" in found
        found = (tmp_path / "foreign" / f"problem{rank}").read_text()
        assert "tensor model/embed has shape [60, 16], but the model's is [51, 16]" in found
        assert "tensor model/layers.1.ffn.router is missing" in found
