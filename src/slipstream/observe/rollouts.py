"""The rollout store: every trajectory of a run as columns, one compressed parquet file a step, and how to read it as text.

    rollouts/step_000012.parquet     what ended before batch 12 was shipped, dropped rollouts included
    rollouts/eval_v000012.parquet    the evaluation of policy version 12

One row is one rollout; per-turn columns are nested lists (turn, then token). Routing is left out: it is as large as everything
else together and only the trainer can use it. Files appear by rename: a reader never sees half of one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slipstream.errors import WireError
from slipstream.observe.columns import SCHEMA, to_table, whole_prompts
from slipstream.observe.transcript import format_rollout
from slipstream.types import Rollout

__all__ = ["RolloutRecord", "RolloutWriter", "file_number", "format_rollout", "read_rollouts", "rollout_files"]

FOLDER = "rollouts"
_JSON_COLUMNS = ("payload", "reward_parts", "messages")

RolloutRecord = dict[str, Any]
"""One row: the scalars of `Rollout` under their names, `payload`, `reward_parts` and `messages` decoded, and a list a turn for
`prompt`, `tokens`, `logprobs`, `versions`, `finish_reason` and the timings."""


class RolloutWriter:
    """Writes rollouts of a run. Called by the orchestrator, once a step and once an evaluation."""

    def __init__(self, run_folder: Path):
        self._folder = Path(run_folder) / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        *,
        advantages: Mapping[str, float] | None = None,
        dropped: Mapping[str, str] | None = None,
    ) -> Path:
        """All rollouts that ended since the last step. By rollout id: `advantages` of the trained, reasons of the `dropped`."""
        return self._write(f"step_{step:06d}.parquet", step, rollouts, advantages or {}, dropped or {})

    def write_eval(self, version: int, rollouts: Sequence[Rollout]) -> Path:
        """The rollouts of one evaluation, whose step is the policy version."""
        return self._write(f"eval_v{version:06d}.parquet", version, rollouts, {}, {})

    def _write(
        self, name: str, step: int, rollouts: Sequence[Rollout], advantages: Mapping[str, float], dropped: Mapping[str, str]
    ) -> Path:
        table = to_table(step, rollouts, advantages, dropped)
        path, temporary = self._folder / name, self._folder / f".{name}.tmp"
        pq.write_table(table, temporary, compression="zstd", use_dictionary=False)  # tokens and logprobs do not repeat
        os.replace(temporary, path)
        return path


def read_rollouts(
    run_folder: Path,
    *,
    env: str | None = None,
    outcome: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    version: int | None = None,
    step: int | None = None,
    evals: bool = False,
    newest: bool = False,
) -> Iterator[RolloutRecord]:
    """Rollouts of a run that fit every given filter, by step, then in the order in which they were written.

    `version`: rollouts dispatched while it was live. `evals`: evaluation rollouts instead of training ones; `step` is then
    the evaluated version. `newest`: the last step first. Raises WireError: a file is not readable parquet of this schema.
    """
    wanted = _filter(env, outcome, min_reward, max_reward, version)
    files = [path for path in rollout_files(run_folder, evals=evals) if step is None or file_number(path) == step]
    for path in files[::-1] if newest else files:
        yield from _read(path, wanted)


def rollout_files(run_folder: Path, *, evals: bool = False) -> list[Path]:
    """The files of a run in order; [] when it has none yet."""
    return sorted((Path(run_folder) / FOLDER).glob("eval_v*.parquet" if evals else "step_*.parquet"), key=file_number)


def file_number(path: Path) -> int:
    """The step, or the evaluated version, of a file."""
    return int(re.sub(r"\D", "", path.stem))


def _filter(
    env: str | None, outcome: str | None, min_reward: float | None, max_reward: float | None, version: int | None
) -> pc.Expression | None:
    """One expression for parquet to apply while it reads."""
    terms: list[pc.Expression] = []
    if env is not None:
        terms.append(pc.field("env") == env)
    if outcome is not None:
        terms.append(pc.field("outcome") == outcome)
    if min_reward is not None:
        terms.append(pc.field("reward") >= min_reward)
    if max_reward is not None:
        terms.append(pc.field("reward") <= max_reward)
    if version is not None:
        terms.append(pc.field("version_start") == version)
    result = None
    for term in terms:
        result = term if result is None else result & term
    return result


def _read(path: Path, wanted: pc.Expression | None) -> Iterator[RolloutRecord]:
    try:
        table = pq.read_table(path, filters=wanted)
    except (pa.ArrowException, OSError) as error:
        raise WireError(f"{path} is not readable parquet ({error}); delete it or restore it from a backup") from error
    found = (table.schema.metadata or {}).get(b"slipstream_schema")
    if found != SCHEMA:
        raise WireError(f"{path} has rollout schema {found!r}; this build reads {SCHEMA!r}")
    for row in range(table.num_rows):
        record = table.slice(row, 1).to_pylist()[0]
        for column in _JSON_COLUMNS:
            record[column] = msgspec.json.decode(record[column])
        record["prompt"] = whole_prompts(record.pop("prompt_kept"), record.pop("prompt_new"), record["tokens"])
        yield record
