"""Batches and versions through the run folder: whole or not at all, each step once, waits that end."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch

from slipstream.errors import StateError, TrainerError, WireError
from slipstream.models.tensor_file import TensorStream
from slipstream.trainer.publish import publish
from slipstream.transport.folder import Finish, FolderInbox, FolderTrainer, batch_path, list_batches
from slipstream.types import Batch, MicroBatch


def make_batch(step: int) -> Batch:
    n = 5
    row = MicroBatch(
        tokens_T=np.arange(n, dtype=np.int32),
        positions_T=np.arange(n, dtype=np.int32),
        doc_starts_D=np.array([0, n], dtype=np.int32),
        loss_mask_T=np.array([0, 1, 1, 1, 1], dtype=bool),
        logprobs_T=np.zeros(n, dtype=np.float32),
        versions_T=np.full(n, step - 1, dtype=np.int32),
        advantages_T=np.ones(n, dtype=np.float32),
        temperature_T=np.ones(n, dtype=np.float32),
        sample_T=np.zeros(n, dtype=np.int32),
    )
    one = np.ones(1, dtype=np.float32)
    return Batch(step, (row,), 4, ("r",), one, one, {"cursor": step})


async def test_a_sent_batch_arrives_whole(tmp_path):
    await FolderTrainer(tmp_path).send(make_batch(1))
    batch = FolderInbox(tmp_path).next(1, timeout_s=1)
    assert isinstance(batch, Batch)
    assert (batch.step, batch.loss_tokens, batch.orchestrator_state) == (1, 4, {"cursor": 1})
    np.testing.assert_array_equal(batch.micro_batches[0].tokens_T, np.arange(5))


async def test_a_staged_batch_is_invisible_until_it_is_released_and_survives_a_restart(tmp_path):
    await FolderTrainer(tmp_path).stage(make_batch(1))
    assert list_batches(tmp_path) == []
    restarted = FolderTrainer(tmp_path)
    assert restarted.staged() == [1]
    await restarted.release(1)
    await restarted.release(1)
    assert restarted.staged() == [] and list_batches(tmp_path) == [1]


async def test_a_discarded_batch_is_gone_and_releasing_it_is_a_bug(tmp_path):
    trainer = FolderTrainer(tmp_path)
    await trainer.stage(make_batch(1))
    trainer.discard(1)
    with pytest.raises(StateError, match="neither staged nor sent"):
        await trainer.release(1)


async def test_a_step_is_sent_once(tmp_path):
    trainer = FolderTrainer(tmp_path)
    await trainer.send(make_batch(1))
    with pytest.raises(StateError, match="sent already"):
        await trainer.send(make_batch(1))


async def test_the_inbox_finishes_only_after_everything_that_was_sent(tmp_path):
    trainer, inbox = FolderTrainer(tmp_path), FolderInbox(tmp_path)
    await trainer.send(make_batch(1))
    await trainer.finish("max_steps")
    assert isinstance(inbox.next(1, timeout_s=1), Batch)
    assert inbox.next(2, timeout_s=1) == Finish("max_steps")
    (tmp_path / "batches" / "finish.json").unlink()  # what a resume does
    with pytest.raises(TrainerError, match="no batch for step 2"):
        inbox.next(2, timeout_s=0)


async def test_finishing_after_a_restart_counts_the_batches_on_disk(tmp_path):
    await FolderTrainer(tmp_path).send(make_batch(3))
    await FolderTrainer(tmp_path).finish("done")
    assert json.loads((tmp_path / "batches" / "finish.json").read_text()) == {"reason": "done", "last_step": 3}


def test_a_wait_without_a_batch_ends_at_its_deadline_or_when_stopped(tmp_path):
    with pytest.raises(TrainerError, match=r"within 0.01 s .*batch_timeout_s"):
        FolderInbox(tmp_path).next(1, timeout_s=0.01)
    assert FolderInbox(tmp_path).next(1, timeout_s=60, stopped=lambda: True) is None


async def test_a_damaged_or_misplaced_batch_is_named(tmp_path):
    trainer, inbox = FolderTrainer(tmp_path), FolderInbox(tmp_path)
    await trainer.send(make_batch(1))
    data = batch_path(tmp_path, 1).read_bytes()
    batch_path(tmp_path, 1).write_bytes(data[:-3])
    with pytest.raises(WireError, match=r"step_000001\.batch: .*truncated or corrupt"):
        inbox.next(1, timeout_s=1)
    batch_path(tmp_path, 2).write_bytes(data)
    with pytest.raises(WireError, match="holds the batch of step 1; expected step 2"):
        inbox.next(2, timeout_s=1)


async def test_updates_give_each_newest_version_once_and_survive_a_cancelled_wait(tmp_path):
    updates = FolderTrainer(tmp_path).updates(after=-1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await anext(updates)
    publish(tmp_path / "weights", 0, TensorStream.of({"w": torch.ones(2)}), None)
    assert (await anext(updates)).number == 0
    publish(tmp_path / "weights", 1, TensorStream.of({"w": torch.ones(2)}), 0)
    publish(tmp_path / "weights", 2, TensorStream.of({"w": torch.ones(2)}), 1)
    assert (await anext(updates)).number == 2


async def test_reports_come_in_order_once_and_only_from_whole_lines_of_the_trainer(tmp_path):
    def line(step: int, role: str = "trainer", key: str = "trainer/loss/mean") -> str:
        return json.dumps({"kind": "metrics", "role": role, "time": 0.0, "step": step, "values": {key: 0.5}}) + "\n"

    path = tmp_path / "metrics.jsonl"
    reports = FolderTrainer(tmp_path).reports(after=1)
    path.write_text(line(1) + line(2, role="orchestrator") + line(2, key="trainer/time/checkpoint_s") + line(2) + line(3)[:20])
    assert (await anext(reports)).step == 2
    path.write_text(path.read_text() + line(3)[20:] + line(3) + line(4))
    assert [(await anext(reports)).step, (await anext(reports)).step] == [3, 4]
