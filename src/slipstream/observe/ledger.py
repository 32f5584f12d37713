"""Counts out of a run's ledger. Reads only: the orchestrator owns the file and may be writing to it at the same time."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from slipstream.errors import WireError

LEDGER = "ledger.sqlite"
STATUSES = ("trained", "dropped", "in_flight", "ready")
"""Where an issued rollout can be. The ledger balances when each is in exactly one of these."""


def read_ledger(run_folder: Path) -> dict[str, Any] | None:
    """The counts of `_counts`. Raises WireError when the file is no readable ledger."""
    try:
        return _counts(run_folder)
    except sqlite3.DatabaseError as error:
        path = Path(run_folder) / LEDGER
        raise WireError(f"{path} is not a readable ledger ({error}); restore it from a backup, or move it away to see the rest") from error


def _counts(run_folder: Path) -> dict[str, Any] | None:
    """Counts of the ledger: `by_status`, `by_outcome`, `by_reason`, `issued`, `balanced`. None when there is no ledger yet.

    Balanced: every issued rollout is in exactly one status, and those that are trained are exactly those of the table `trained`, at
    the same step (its primary key keeps a rollout from being trained twice).
    """
    path = Path(run_folder) / LEDGER
    if not path.exists():
        return None
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=60, isolation_level=None)) as ledger:
        ledger.execute("begin")  # one snapshot for all counts: the orchestrator may be writing
        if not ledger.execute("select 1 from sqlite_master where name = 'rollouts'").fetchone():
            return None

        def counts(query: str) -> dict[str, int]:
            return {str(name): int(count) for name, count in ledger.execute(query)}

        by_status = counts("select status, count(*) from rollouts group by status")
        issued, distinct = ledger.execute("select count(*), count(distinct id) from rollouts").fetchone()
        unproved = ledger.execute(
            "select count(*) from rollouts left join trained on id = rollout_id "
            "where (status = 'trained') <> (rollout_id is not null) or rollouts.step is not trained.step"
        ).fetchone()[0]
        return {
            "issued": issued,
            "by_status": by_status,
            "by_outcome": counts("select outcome, count(*) from rollouts where outcome is not null and outcome <> '' group by outcome"),
            "by_reason": counts("select reason, count(*) from rollouts where status = 'dropped' group by reason"),
            "balanced": issued == sum(by_status.get(status, 0) for status in STATUSES) and issued == distinct and unproved == 0,
        }
