"""Reading the orchestrator's own ledger: while it is open, after it is closed, and when it does not add up."""

import sqlite3
from contextlib import closing

import pytest

from slipstream.errors import WireError
from slipstream.observe.ledger import LEDGER, read_ledger
from slipstream.orchestrator.ledger import Ledger

from .synthetic import make_run


def write(folder) -> Ledger:
    ledger = Ledger(folder / LEDGER)
    for i in range(6):
        ledger.issue(f"r{i}", "g", "calculator", "t", 0.0, 0)
    for i in range(3):
        ledger.ready(f"r{i}", "completed", 1.0, 10)
    ledger.drop("r3", "cut", "cut")
    ledger.drop("r2", "stale")
    ledger.ship(1, ["r0"], "hash", {})
    return ledger


def check(counts):
    assert counts is not None
    assert counts["issued"] == 6
    assert counts["by_status"] == {"trained": 1, "dropped": 2, "ready": 1, "in_flight": 2}
    assert counts["by_outcome"] == {"completed": 3, "cut": 1}
    assert counts["by_reason"] == {"cut": 1, "stale": 1}
    assert counts["balanced"] is True


def test_the_orchestrators_ledger_is_read_while_it_is_open_and_after_it_is_closed(tmp_path):
    ledger = write(tmp_path)
    check(read_ledger(tmp_path))
    ledger.close()
    check(read_ledger(tmp_path))


def test_no_ledger_and_an_empty_one_are_none(tmp_path):
    assert read_ledger(tmp_path) is None
    (tmp_path / LEDGER).touch()
    assert read_ledger(tmp_path) is None


@pytest.mark.parametrize(
    "damage",
    [
        "update rollouts set status = 'lost' where id = 'y'",
        "update rollouts set step = null where id = 'r1-0'",
        "update rollouts set step = 2 where id = 'r1-0'",
        "update rollouts set status = 'ready' where id = 'r1-0'",
        "delete from trained where rollout_id = 'r1-0'",
        "insert into trained values ('y', 1)",
    ],
)
def test_a_ledger_that_does_not_add_up_is_not_balanced(tmp_path, monkeypatch, damage):
    run = make_run(tmp_path / "run", monkeypatch, rollouts=False)
    with closing(sqlite3.connect(run / LEDGER)) as ledger:
        ledger.execute(damage)
        ledger.commit()
    counts = read_ledger(run)
    assert counts is not None and counts["balanced"] is False


def test_a_damaged_ledger_is_named(tmp_path):
    (tmp_path / LEDGER).write_text("garbage " * 200)
    with pytest.raises(WireError, match=r"ledger\.sqlite is not a readable ledger"):
        read_ledger(tmp_path)
