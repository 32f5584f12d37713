import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import StateError
from slipstream.orchestrator.ledger import Ledger


def issue(ledger, *ids):
    for id in ids:
        ledger.issue(id, "g00000001", "env", "env/train/0", 1.0, 0)


def test_issued_is_trained_plus_dropped_plus_in_flight_plus_ready():
    ledger = Ledger(":memory:")
    issue(ledger, "a", "b", "c", "d")
    ledger.ready("a", "completed", 1.0, 3)
    ledger.ready("b", "completed", 0.0, 3)
    ledger.drop("c", "cut", "cut")
    ledger.ship(1, ["a"], "hash", {})
    assert (ledger.issued, ledger.trained, dict(ledger.dropped), ledger.in_flight, ledger.num_ready) == (4, 1, {"cut": 1}, 1, 1)
    assert ledger.outcomes == {"completed": 2, "cut": 1}
    ledger.check(in_flight=1, ready=1)
    ledger.audit()
    ledger.close()


def test_a_difference_between_books_and_run_is_an_error():
    ledger = Ledger(":memory:")
    issue(ledger, "a")
    with pytest.raises(StateError, match="does not balance"):
        ledger.check(in_flight=0, ready=0)
    ledger.close()


def test_an_audit_notices_rows_that_were_changed_behind_its_back():
    ledger = Ledger(":memory:")
    issue(ledger, "a")
    ledger.flush()
    ledger._db.execute("UPDATE rollouts SET status = 'trained'")
    with pytest.raises(StateError, match="does not balance"):
        ledger.audit()
    ledger.close()


def test_no_rollout_is_trained_twice():
    ledger = Ledger(":memory:")
    issue(ledger, "a")
    ledger.ready("a", "completed", 1.0, 3)
    ledger.ship(1, ["a"], "hash", {})
    with pytest.raises(StateError, match="cannot become trained"):
        ledger.ship(2, ["a"], "hash", {})
    with pytest.raises(sqlite3.IntegrityError):
        ledger._db.execute("INSERT INTO trained VALUES ('a', 2)")
    ledger.close()


def test_a_step_is_shipped_once_and_a_refused_one_leaves_nothing(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    issue(ledger, "a", "b")
    for id in "ab":
        ledger.ready(id, "completed", 1.0, 3)
    ledger.ship(1, ["a"], "hash", {})
    with pytest.raises(StateError, match="step 1"):
        ledger.ship(1, ["b"], "hash", {})
    assert ledger._db.execute("SELECT rollout_id FROM trained").fetchall() == [("a",)]
    ledger.close()


@pytest.mark.parametrize("move", ["ready", "drop", "issue"])
def test_a_rollout_that_is_done_stays_done(move):
    ledger = Ledger(":memory:")
    issue(ledger, "a")
    ledger.ready("a", "completed", 1.0, 3)
    with pytest.raises(StateError):
        {
            "ready": lambda: ledger.ready("a", "completed", 1.0, 3),
            "drop": lambda: ledger.drop("b", "cut"),
            "issue": lambda: issue(ledger, "a"),
        }[move]()
    ledger.close()


def test_a_killed_run_continues_with_what_was_shipped(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    issue(ledger, "a", "b", "c")
    ledger.ready("a", "completed", 1.0, 3)
    ledger.ready("b", "completed", 1.0, 3)
    ledger.ship(1, ["a"], "hash", {"cursor": 7})
    issue(ledger, "never flushed")
    ledger._db.close()

    again = Ledger(path)
    assert (again.in_flight, again.num_ready, again.trained) == (1, 1, 1)
    assert again.unsent() == [(1, "hash")]
    assert (again.last_step(), again.last_state(), again.last_group()) == (1, {"cursor": 7}, "g00000001")
    assert again.drop_open("restart") == 2
    again.audit()
    assert again.dropped == {"restart": 2}
    again.sent(1)
    assert again.unsent() == []
    again.close()


def test_evaluations_are_remembered_by_version():
    ledger = Ledger(":memory:")
    assert ledger.last_eval() == -1
    ledger.record_eval(3, {"env": {}})
    assert ledger.last_eval() == 3
    ledger.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["issue", "ready", "drop", "ship"]), max_size=40))
def test_books_balance_after_any_sequence_of_moves(moves):
    ledger = Ledger(":memory:", synchronous="OFF")
    flying, waiting, step = [], [], 0
    for i, move in enumerate(moves):
        if move == "issue":
            issue(ledger, f"r{i}")
            flying.append(f"r{i}")
        elif move == "ready" and flying:
            ledger.ready(flying[0], "completed", 1.0, 1)
            waiting.append(flying.pop(0))
        elif move == "drop" and flying:
            ledger.drop(flying.pop(), "cut", "cut")
        elif move == "ship":
            step += 1
            ledger.ship(step, waiting, "hash", {})
            waiting = []
        ledger.check(len(flying), len(waiting))
    ledger.audit()
    ledger.close()
