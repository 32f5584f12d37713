"""The books of a run: every rollout that was ever issued, and where it is now. SQLite (WAL) in the run folder.

    in_flight ──> ready ──> trained at step n
        │           │
        └───────────┴─────> dropped[reason]

    issued = trained + dropped + in_flight + ready        (asserted every step; a difference is a StateError)

Rows change in memory and reach the disk in batches: `flush` when a group opens or closes, `ship` when a batch is cut. Only `ship`
waits for the disk. What a crash takes away is never a trained rollout: `ship` is one transaction over the rollouts, the step and
the orchestrator's state, and a primary key keeps a rollout from being trained twice.

It does not know tasks, tokens or versions beyond what it writes down, and it takes no decision.
"""

from __future__ import annotations

import errno
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import StateError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
    id TEXT PRIMARY KEY, group_id TEXT NOT NULL, env TEXT NOT NULL, task TEXT NOT NULL, issued_at REAL NOT NULL,
    version_start INTEGER NOT NULL, status TEXT NOT NULL CHECK (status IN ('in_flight', 'ready', 'trained', 'dropped')),
    outcome TEXT, reason TEXT, step INTEGER, reward REAL, tokens INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS trained (rollout_id TEXT PRIMARY KEY, step INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, batch_hash TEXT NOT NULL, state TEXT NOT NULL, shipped INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS evals (version INTEGER PRIMARY KEY, result TEXT NOT NULL);
"""
_UPSERT = """
INSERT INTO rollouts (id, group_id, env, task, issued_at, version_start, status, outcome, reason, step, reward, tokens)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET status = excluded.status, outcome = excluded.outcome, reason = excluded.reason,
    step = excluded.step, reward = excluded.reward, tokens = excluded.tokens
"""
_OPEN = ("in_flight", "ready")


@dataclass(slots=True)
class _Row:
    """One line of `rollouts`, in column order."""

    id: str
    group_id: str
    env: str
    task: str
    issued_at: float
    version_start: int
    status: str = "in_flight"
    outcome: str | None = None
    reason: str | None = None
    step: int | None = None
    reward: float | None = None
    tokens: int = 0

    def values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


class Ledger:
    """Opened by one orchestrator at a time (the run folder's lock sees to that)."""

    def __init__(self, path: Path | str, synchronous: Literal["FULL", "OFF"] = "FULL"):
        """`synchronous` = FULL: `ship` survives a power cut. OFF: for simulations, where only the process can die."""
        self._durable = synchronous == "FULL"
        self._path = str(path)
        with self._errors():
            self._db = sqlite3.connect(path, timeout=60, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(f"PRAGMA synchronous = {'NORMAL' if self._durable else 'OFF'}")
            self._db.executescript(_SCHEMA)
        self._rows: dict[str, _Row] = {}
        self._dirty: dict[str, _Row] = {}
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        """Rollouts that ended, by outcome, over the whole run."""
        with self._errors():
            self._load()

    # ---- life of a rollout ----

    def issue(self, id: str, group_id: str, env: str, task: str, issued_at: float, version_start: int) -> None:
        """A rollout starts. `issued_at` in seconds since the epoch. Raises StateError when the id is in use."""
        if id in self._rows:
            raise StateError(f"rollout {id} is issued twice")
        self._rows[id] = self._dirty[id] = _Row(id, group_id, env, task, issued_at, version_start)

    def ready(self, id: str, outcome: str, reward: float | None, tokens: int) -> None:
        """It ended with something to train. It now waits for its group, then for its batch."""
        row = self._take(id, ("in_flight",), "ready")
        row.outcome, row.reward, row.tokens = outcome, reward, tokens
        self.outcomes[outcome] += 1

    def drop(self, id: str, reason: str, outcome: str | None = None, tokens: int = 0) -> None:
        """It will not be trained. `outcome` is given for one that was in flight, and ends with it."""
        row = self._take(id, _OPEN, "dropped")
        row.reason = reason
        if outcome is not None:
            row.outcome, row.tokens = outcome, tokens
            self.outcomes[outcome] += 1
        self.dropped[reason] += 1

    def flush(self) -> None:
        """Write what changed, in one transaction. Does not wait for the disk."""
        if changed := self._take_changed():
            with self._transaction():
                self._db.executemany(_UPSERT, changed)

    def drop_open(self, reason: str) -> int:
        """Drop everything that is in flight or ready (the run drains, stops, or starts again). Returns how many."""
        ids = [row.id for row in self._rows.values() if row.status in _OPEN]
        for id in ids:
            self.drop(id, reason)
        self.flush()
        return len(ids)

    # ---- steps ----

    def ship(self, step: int, rollout_ids: Sequence[str], batch_hash: str, state: Mapping[str, Any]) -> None:
        """The rollouts are trained at `step`, and `state` is what a restart continues from. Durable on return.

        The caller has staged the batch durably before, and hands it over after; see `unsent`.
        Raises StateError: a rollout is not ready (or was trained before), or the step exists.
        """
        for id in rollout_ids:
            row = self._take(id, ("ready",), "trained")
            row.step = step
        self.trained += len(rollout_ids)
        if self._durable:
            self._db.execute("PRAGMA synchronous = FULL")
        try:
            changed = self._take_changed()
            with self._transaction():
                self._db.executemany(_UPSERT, changed)
                self._db.executemany("INSERT INTO trained VALUES (?, ?)", [(id, step) for id in rollout_ids])
                self._db.execute("INSERT INTO steps VALUES (?, ?, ?, 0)", (step, batch_hash, json.dumps(state)))
        except sqlite3.IntegrityError as error:
            raise StateError(f"step {step}: a rollout or the step itself is in the ledger already: {error}") from None
        finally:
            if self._durable:
                self._db.execute("PRAGMA synchronous = NORMAL")

    def sent(self, step: int) -> None:
        """The trainer holds the batch of this step durably."""
        with self._transaction():
            self._db.execute("UPDATE steps SET shipped = 1 WHERE step = ?", (step,))

    def unsent(self) -> list[tuple[int, str]]:
        """(step, batch hash) of batches that were shipped on the books but maybe not handed over: a restart rolls them forward."""
        return self._db.execute("SELECT step, batch_hash FROM steps WHERE shipped = 0 ORDER BY step").fetchall()

    def last_step(self) -> int:
        return self._db.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()[0]

    def last_state(self) -> dict[str, Any]:
        """Orchestrator state of the last step; empty before the first."""
        row = self._db.execute("SELECT state FROM steps ORDER BY step DESC LIMIT 1").fetchone()
        return json.loads(row[0]) if row else {}

    def last_group(self) -> str:
        """Greatest group id ever issued; '' for none."""
        return self._db.execute("SELECT coalesce(max(group_id), '') FROM rollouts").fetchone()[0]

    # ---- evaluations ----

    def record_eval(self, version: int, result: Mapping[str, Any]) -> None:
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO evals VALUES (?, ?)", (version, json.dumps(result)))

    def last_eval(self) -> int:
        """Newest version that was evaluated; -1 for none."""
        return self._db.execute("SELECT coalesce(max(version), -1) FROM evals").fetchone()[0]

    # ---- conservation ----

    @property
    def issued(self) -> int:
        return self.trained + sum(self.dropped.values()) + len(self._rows)

    @property
    def in_flight(self) -> int:
        return sum(row.status == "in_flight" for row in self._rows.values())

    @property
    def num_ready(self) -> int:
        return sum(row.status == "ready" for row in self._rows.values())

    def check(self, in_flight: int, ready: int) -> None:
        """Compare the books with what the run really holds. Raises StateError."""
        if (self.in_flight, self.num_ready) != (in_flight, ready):
            raise StateError(
                f"the ledger does not balance: it has {self.in_flight} rollouts in flight and {self.num_ready} ready, "
                f"the run holds {in_flight} and {ready}"
            )

    def audit(self) -> None:
        """Compare memory with the disk, and the disk with itself (reads the whole table). Raises StateError."""
        self.flush()
        counts = Counter(dict(self._db.execute("SELECT status, count(*) FROM rollouts GROUP BY status")))
        wanted = Counter(trained=self.trained, dropped=sum(self.dropped.values()), in_flight=self.in_flight, ready=self.num_ready)
        trained = self._db.execute("SELECT count(*) FROM trained JOIN rollouts ON id = rollout_id AND status = 'trained'").fetchone()[0]
        total = self._db.execute("SELECT count(*) FROM rollouts").fetchone()[0]
        if +counts != +wanted or trained != self.trained or total != self.issued:
            raise StateError(f"the ledger does not balance: {dict(counts)} on disk, {dict(wanted)} in memory, {trained} in batches")

    def close(self) -> None:
        self.flush()
        self._db.close()

    # ---- inside ----

    def _take(self, id: str, allowed: Iterable[str], status: str) -> _Row:
        row = self._rows.get(id)
        if row is None or row.status not in allowed:
            now = row.status if row else "trained or dropped already, or was never issued"
            raise StateError(f"rollout {id} cannot become {status}: it is {now}")
        row.status = status
        self._dirty[id] = row
        if status not in _OPEN:
            del self._rows[id]
        return row

    def _take_changed(self) -> list[tuple[Any, ...]]:
        """What is to be written, once: when that fails, the rows stay on disk as they were, which is what the next start goes on from.
        Written later without the rest of their transaction they would unbalance the books.
        """
        changed = [row.values() for row in self._dirty.values()]
        self._dirty.clear()
        return changed

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of the block or nothing of it."""
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have rolled it back already
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """What the file system, or what is in the file, does to SQLite is an OSError that names the file."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error), self._path) from error

    def _load(self) -> None:
        """Counters and open rows from an existing file. Open rows are those of a run that died; see `drop_open`."""
        for status, outcome, reason, count in self._db.execute(
            "SELECT status, outcome, reason, count(*) FROM rollouts GROUP BY status, outcome, reason"
        ):
            if outcome is not None:
                self.outcomes[outcome] += count
            if status == "trained":
                self.trained += count
            elif status == "dropped":
                self.dropped[reason] += count
        for values in self._db.execute("SELECT * FROM rollouts WHERE status IN ('in_flight', 'ready')"):
            row = _Row(*values)
            self._rows[row.id] = row
