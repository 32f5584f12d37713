"""The trainer role in one process: batches in, versions and checkpoints out, and every way of stopping and going on."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.errors import ModelError, TrainerError
from slipstream.models.load import load_model
from slipstream.observe.metrics import read_metrics
from slipstream.trainer import checkpoint, rl, shards
from slipstream.trainer.step import Learner
from slipstream.transport.codec import decode_batch
from slipstream.transport.folder import FolderTrainer, list_batches
from slipstream.transport.weights import list_versions, read_version, verify, version_folder
from slipstream.types import Batch
from tests.unit.trainer.helpers import make_batch, model_folder, run_config, write_run
from tests.waiting import HUNG_S, wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def send(folder: Path, *steps: int, finish: str = "", change=lambda batch: batch) -> None:
    async def go() -> None:
        trainer = FolderTrainer(folder)
        for step in steps:
            await trainer.send(change(make_batch(step)))
        if finish:
            await trainer.finish(finish)

    asyncio.run(go())


def train(folder: Path, *steps: int, change=lambda batch: batch) -> int:
    """One start of the role that ends in an orderly way."""
    (folder / "batches" / "finish.json").unlink(missing_ok=True)
    send(folder, *steps, finish="done", change=change)
    return rl.main(folder)


def whole_and_resumed(tmp_path: Path, model: Path, trainer: dict) -> tuple[Path, Path]:
    """Two runs of four steps with the same settings: one in a piece, one that ended after two steps and went on."""
    whole, resumed = (write_run(run_config(tmp_path / name, model, trainer=trainer)) for name in ("whole", "resumed"))
    train(whole, 1, 2, 3, 4)
    train(resumed, 1, 2)
    train(resumed, 3, 4)
    return whole, resumed


def fingerprints(folder: Path) -> dict[int, str]:
    versions = [read_version(version_folder(folder / "weights", number)) for number in list_versions(folder / "weights")]
    for version in versions:
        verify(version)
    return {version.number: version.fingerprint for version in versions}


def spoil(batch: Batch) -> Batch:
    rows = [replace(row, advantages_T=np.full_like(row.advantages_T, np.nan)) for row in batch.micro_batches]
    return replace(batch, micro_batches=tuple(rows))


def events(folder: Path, name: str) -> list[dict]:
    return [line for line in read_metrics(folder) if line["kind"] == "event" and line["name"] == name]


def reports(folder: Path) -> dict[int, dict]:
    lines = [line for line in read_metrics(folder) if line["kind"] == "metrics" and "trainer/loss/mean" in line["values"]]
    return {line["step"]: line["values"] for line in lines}


def test_every_batch_becomes_a_version_with_its_parent_and_the_last_one_is_the_final_model(tmp_path, model):
    folder = write_run(run_config(tmp_path / "run", model))
    assert train(folder, 1, 2, 3, 4) == 0
    assert sorted(fingerprints(folder)) == [0, 1, 2, 3, 4] and len(set(fingerprints(folder).values())) == 5
    assert read_version(version_folder(folder / "weights", 3)).parent == 2
    assert read_version(version_folder(folder / "weights", 0)).parent is None
    last = load_model(version_folder_as_model(folder, 4, model))
    for a, b in zip(last.parameters(), load_model(folder / "final").parameters(), strict=True):
        assert np.array_equal(a.detach().numpy(), b.detach().numpy())


def version_folder_as_model(folder: Path, number: int, model: Path) -> Path:
    target = version_folder(folder / "weights", number)
    (target / "config.json").write_text((model / "config.json").read_text())
    return target


def test_every_step_is_reported_with_work_and_waiting_apart(tmp_path, model):
    folder = write_run(run_config(tmp_path / "run", model))
    train(folder, 1, 2)
    assert sorted(reports(folder)) == [1, 2]
    assert {"trainer/time/step_s", "trainer/time/wait_batch_s", "trainer/replay/coverage_frac", "trainer/lag/max"} <= reports(folder)[
        1
    ].keys()
    spans = {(line["name"], line["step"]) for line in read_metrics(folder) if line["kind"] == "span"}
    assert spans >= {("publish", 0), ("wait_batch", 1), ("step", 1), ("publish", 1), ("step", 2), ("checkpoint", 2)}
    load = np.array(events(folder, "expert_load")[0]["load"])
    assert load.shape == (2, 8) and np.allclose(load.sum(1), 1, atol=1e-4)


def test_a_run_that_is_interrupted_and_resumed_ends_with_bit_identical_weights(tmp_path, model):
    whole, resumed = whole_and_resumed(tmp_path, model, {})
    assert fingerprints(resumed) == fingerprints(whole)
    assert len(events(resumed, "resumed")) == 1 and sorted(reports(resumed)) == [1, 2, 3, 4]


def test_batches_after_the_checkpoint_are_trained_again_to_the_same_versions(tmp_path, model):
    folder = write_run(run_config(tmp_path / "run", model, max_steps=5, checkpoint={"interval": 2, "keep_last": 3}))
    train(folder, 1, 2, 3, 4, 5)
    before = fingerprints(folder)
    for step in (4, 5):  # as after a kill at step 5, before the checkpoint of step 4 was committed
        shutil.rmtree(checkpoint.step_folder(folder / "checkpoints", step))
    train(folder)
    assert fingerprints(folder) == before
    trained = [line["step"] for line in read_metrics(folder) if line["kind"] == "span" and line["name"] == "step"]
    assert trained == [1, 2, 3, 4, 5, 3, 4, 5]


def test_versions_of_batches_that_were_there_before_do_not_fill_the_disk(tmp_path, model):
    folder = write_run(run_config(tmp_path, model))
    train(folder, *range(1, 13))
    assert list_versions(folder / "weights") == [7, 8, 9, 10, 11, 12]


def test_a_checkpoint_carries_the_orchestrators_state_of_its_batch_and_frees_the_batches_it_covers(tmp_path, model):
    folder = write_run(run_config(tmp_path / "run", model, checkpoint={"interval": 1, "keep_last": 2}))
    train(folder, 1, 2, 3, 4)
    assert checkpoint.list_steps(folder / "checkpoints") == [3, 4]
    assert checkpoint.read(checkpoint.step_folder(folder / "checkpoints", 4)).orchestrator_state == {"cursor": 4}
    assert list_batches(folder) == [4]


def test_without_an_interval_there_is_one_checkpoint_at_the_end(tmp_path, model):
    folder = write_run(run_config(tmp_path / "run", model, checkpoint={"interval": 0}))
    train(folder, 1, 2, 3)
    assert checkpoint.list_steps(folder / "checkpoints") == [3]


def test_being_told_to_stop_leaves_a_checkpoint_of_the_last_step_and_no_final_model(tmp_path, model):
    config = run_config(tmp_path / "run", model, checkpoint={"interval": 100})
    folder = write_run(config)
    send(folder, 1)
    learner = Learner(load_model(model), config.trainer, config.trainer.optim, config.max_steps)
    with rl.MetricsWriter(folder, "trainer") as metrics, rl.Team(learner) as team:
        trainer = rl.RlTrainer(folder, config, metrics, team)
        poll = trainer._poll
        trainer._poll = lambda: (trainer.stop(), poll())[1]  # type: ignore[method-assign]
        trainer.run()
    assert checkpoint.list_steps(folder / "checkpoints") == [1] and not (folder / "final").exists()


def test_a_bad_step_is_skipped_its_batch_kept_and_its_version_published_so_that_nobody_waits(tmp_path, model):
    folder = write_run(run_config(tmp_path / "run", model))
    train(folder, 1, 2, 3, change=lambda batch: spoil(batch) if batch.step == 2 else batch)
    prints = fingerprints(folder)
    assert prints[2] == prints[1] != prints[3]
    assert reports(folder)[2]["trainer/step/skipped"] == 1.0
    kept = folder / "bad_batches" / "step_000002.batch"
    assert decode_batch(kept.read_bytes()).step == 2
    assert json.loads(kept.with_suffix(".json").read_text())["reason"].startswith("the loss is nan")
    assert events(folder, "step_skipped")[0]["step"] == 2


def test_too_many_bad_steps_in_a_row_stop_the_run_even_across_a_resume(tmp_path, model):
    config = {"trainer": {"max_bad_steps": 3}, "checkpoint": {"interval": 1}}
    folder = write_run(run_config(tmp_path / "run", model, **config))
    train(folder, 1, 2, change=spoil)
    with pytest.raises(TrainerError, match=r"3 steps in a row were skipped \(trainer\.max_bad_steps\)"):
        train(folder, 3, change=spoil)


def test_no_batch_within_the_deadline_ends_the_role(tmp_path, model):
    folder = write_run(run_config(tmp_path / "run", model, trainer={"batch_timeout_s": 0.05}))
    with pytest.raises(TrainerError, match="no batch for step 1"):
        rl.main(folder)


def test_a_full_disk_costs_the_checkpoint_but_not_the_run_unless_it_is_the_last(tmp_path, model, monkeypatch, capsys):
    write = shards.write_shard

    def full(path: Path, staged: shards.Staged) -> dict:
        if int(path.parent.name[-6:]) in full_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, staged)

    monkeypatch.setattr(shards, "write_shard", full)
    folder, full_at = write_run(run_config(tmp_path / "run", model, checkpoint={"interval": 1})), {2}
    train(folder, 1, 2, 3)
    assert checkpoint.list_steps(folder / "checkpoints") == [1, 3]
    assert events(folder, "checkpoint_failed")[0]["step"] == 2
    assert "checkpoint of step 2 failed" in capsys.readouterr().err
    full_at = {4, 5}
    with pytest.raises(OSError, match="No space left"):
        train(folder, 4, 5)
    assert checkpoint.list_steps(folder / "checkpoints") == [1, 3] and not list((folder / "checkpoints").glob(".tmp*"))


def test_the_next_step_runs_while_a_checkpoint_is_written_and_the_one_after_waits(tmp_path, model, monkeypatch):
    order, write, train_step = [], shards.write_shard, rl.RlTrainer._train

    def slow(path: Path, staged: shards.Staged) -> dict:
        number = int(path.parent.name[-6:])
        order.append(f"write {number}")
        wait_until(lambda: number != 1 or "step 2" in order)
        entry = write(path, staged)
        order.append(f"written {number}")
        return entry

    def step(self: rl.RlTrainer, batch) -> None:
        train_step(self, batch)
        order.append(f"step {batch.step}")

    monkeypatch.setattr(shards, "write_shard", slow)
    monkeypatch.setattr(rl.RlTrainer, "_train", step)
    folder = write_run(run_config(tmp_path / "run", model, checkpoint={"interval": 1, "keep_last": 5}))
    train(folder, 1, 2)
    assert order == ["step 1", "write 1", "step 2", "written 1", "write 2", "written 2"]
    assert checkpoint.list_steps(folder / "checkpoints") == [1, 2]
    first, second = ({**checkpoint.read(checkpoint.step_folder(folder / "checkpoints", n)).orchestrator_state} for n in (1, 2))
    assert (first, second) == ({"cursor": 1}, {"cursor": 2})
    for number in (1, 2):  # what was written is the state of its step, though the first was written after the second step
        stored = load_file(checkpoint.step_folder(folder / "checkpoints", number) / "shard_00000.safetensors")
        published = load_file(version_folder(folder / "weights", number) / "model.safetensors")
        assert torch.equal(stored["model/embed"], published["model.embed_tokens.weight"]) and float(stored["step/embed"]) == number


def test_a_damaged_checkpoint_is_never_passed_over_and_going_back_on_demand_loses_nothing(tmp_path, model):
    folder = write_run(run_config(tmp_path / "run", model, checkpoint={"interval": 1, "keep_last": 2}))
    train(folder, 1, 2, 3)
    before = fingerprints(folder)
    damaged = checkpoint.step_folder(folder / "checkpoints", 3)
    (damaged / "shard_00000.safetensors").unlink()
    with pytest.raises(ModelError, match=rf"shard_00000.safetensors is missing.*step 2 is whole.*rm -r {damaged}\)"):
        train(folder)
    shutil.rmtree(damaged)
    train(folder)
    assert fingerprints(folder) == before


def test_a_checkpoint_of_another_model_names_what_does_not_fit(tmp_path, model):
    folder = write_run(run_config(tmp_path / "run", model))
    train(folder, 1)
    dense = model_folder(tmp_path / "dense", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    write_run(run_config(folder, dense))
    with pytest.raises(ModelError, match=r"checkpoint .*step_000001 is of the family 'qwen3_moe', but the model is of 'qwen3'"):
        train(folder)
    write_run(run_config(folder, model_folder(tmp_path / "deeper", num_hidden_layers=3, vocab_size=60)))
    with pytest.raises(ModelError) as caught:
        train(folder)
    assert "does not fit the qwen3_moe model" in str(caught.value)
    assert "tensor model/layers.2.attention.qkv is missing" in str(caught.value)
    assert "tensor exp_avg/embed has shape [50, 16], but the model's is [60, 16]" in str(caught.value)
    write_run(run_config(folder, model_folder(tmp_path / "shallower", num_hidden_layers=1)))
    with pytest.raises(ModelError, match=r"tensor model/layers\.1\.attention\.out is unexpected.*tensor exp_avg/layers\.1"):
        train(folder)


def test_without_the_checkpoint_that_the_batches_start_from_the_run_does_not_start_from_scratch(tmp_path, model):
    folder = write_run(run_config(tmp_path / "run", model, checkpoint={"interval": 1, "keep_last": 2}))
    train(folder, 1, 2, 3)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(
        ModelError, match=r"it has no checkpoint: the batches of the steps before 3 are gone\. Restore a checkpoint of step 2 or"
    ):
        train(folder)


def test_a_bfloat16_run_publishes_the_weights_that_it_computes_with_and_resumes_bit_identically(tmp_path, model):
    whole = write_run(run_config(tmp_path / "whole", model, trainer={"dtype": "bfloat16"}))
    train(whole, 1, 2, 3)
    resumed = write_run(run_config(tmp_path / "resumed", model, trainer={"dtype": "bfloat16"}))
    train(resumed, 1, 2)
    train(resumed, 3)
    assert fingerprints(whole) == fingerprints(resumed)
    assert json.loads((whole / "final" / "config.json").read_text())["dtype"] == "bfloat16"


def test_sigterm_ends_the_process_with_a_checkpoint_and_exit_code_0(tmp_path, model):
    folder = write_run(run_config(tmp_path / "run", model, checkpoint={"interval": 100}))
    send(folder, 1)
    code = f"from pathlib import Path; from slipstream.trainer.rl import main; raise SystemExit(main(Path({str(folder)!r})))"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_until(lambda: 1 in list_versions(folder / "weights") or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=HUNG_S) == 0
    finally:
        process.kill()
    assert checkpoint.list_steps(folder / "checkpoints") == [1]
