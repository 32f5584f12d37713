"""A full disk: one line that names the file, books that balance, and a run that goes on once there is room."""

from __future__ import annotations

import asyncio
import errno
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.observe.metrics import MetricsWriter, read_metrics
from slipstream.orchestrator.ledger import Ledger
from slipstream.orchestrator.store import RunStore
from slipstream.types import Outcome, Rollout, Task


@contextmanager
def no_file_beyond(size: int):
    """Writes beyond `size` bytes of any file fail, as on a full disk (with EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def issue(ledger: Ledger, start: int, stop: int) -> list[str]:
    ids = [f"g{i:08d}/0" for i in range(start, stop)]
    for id in ids:
        ledger.issue(id, id.partition("/")[0], "env", "task " * 50, 0.0, 0)
    return ids


def fill(ledger: Ledger) -> None:
    """From now on SQLite finds no room for another page."""
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")


@pytest.mark.parametrize("what", ["flush", "ship"])
def test_a_ledger_without_room_says_so_and_the_next_start_goes_on_from_balanced_books(tmp_path: Path, what: str):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ids = issue(ledger, 0, 8)
    for id in ids:
        ledger.ready(id, "completed", 1.0, 5)
    ledger.flush()
    fill(ledger)
    with pytest.raises(OSError, match=r"database or disk is full.*ledger\.sqlite") as caught:
        if what == "flush":
            issue(ledger, 8, 2000)
            ledger.flush()
        else:
            ledger.ship(1, ids, "hash", {"state": "x" * 1_000_000})
    assert caught.value.errno == errno.ENOSPC
    ledger._db.execute("PRAGMA max_page_count = 1000000")  # room comes too late for what failed, but in time for the end of the run
    ledger.drop_open("stopped")
    ledger.close()

    again = Ledger(path)
    again.drop_open("restart")
    again.audit()
    assert (again.last_step(), again.trained, again.in_flight, again.num_ready) == (0, 0, 0, 0)
    assert again.issued >= 8
    again.close()


def test_notes_about_steps_and_evaluations_leave_the_changed_rows_to_be_written(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    issue(ledger, 0, 3)
    ledger.sent(1)
    ledger.record_eval(0, {})
    ledger.audit()
    ledger.close()


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path):
    (tmp_path / "ledger.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(OSError, match=r"file is not a database.*ledger\.sqlite"):
        Ledger(tmp_path / "ledger.sqlite")


def test_rollouts_without_room_name_their_folder(tmp_path: Path):
    store = RunStore(tmp_path)
    messages = tuple({"role": "user", "content": str(hash((i, "text")))} for i in range(20_000))
    rollout = Rollout("g1/0", Task("t", "e", 0), "g1", Outcome.cut, messages=messages)
    with no_file_beyond(10_000), pytest.raises(OSError) as caught:
        asyncio.run(store.write_rollouts(1, [rollout], {}, {}))
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(tmp_path / "rollouts")
    assert not list((tmp_path / "rollouts").glob("*.parquet"))
    asyncio.run(store.write_rollouts(1, [rollout], {}, {}))
    assert len(list((tmp_path / "rollouts").glob("*.parquet"))) == 1


def test_metrics_without_room_name_their_file_and_the_next_writer_goes_on(tmp_path: Path):
    with MetricsWriter(tmp_path, "trainer") as writer, no_file_beyond(100), pytest.raises(OSError) as caught:
        for _ in range(2):
            writer.event("heartbeat", step=1)
    assert caught.value.filename == str(tmp_path / "metrics.jsonl")
    with MetricsWriter(tmp_path, "trainer") as writer:
        writer.event("heartbeat", step=2)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
