import asyncio
import subprocess
import sys

import pytest

from slipstream.errors import ConfigError
from slipstream.observe.rollouts import read_rollouts
from slipstream.orchestrator.store import FolderLock, RunStore
from tests.unit.orchestrator.make import rollout


def test_two_runs_on_one_folder_are_refused_with_the_process_that_has_it(tmp_path):
    lock = FolderLock(tmp_path)
    with pytest.raises(ConfigError, match=r"two runs on one folder: .* process id \d+"):
        FolderLock(tmp_path)
    lock.close()
    FolderLock(tmp_path).close()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    program = (
        "import os, pathlib, sys; from slipstream.orchestrator.store import FolderLock; "
        "FolderLock(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == -9
    FolderLock(tmp_path).close()


def test_rollouts_of_a_step_and_of_an_evaluation_are_kept_with_their_fate(tmp_path):
    store = RunStore(tmp_path)
    asyncio.run(store.write_rollouts(3, [rollout("g1-0"), rollout("g1-1")], {"g1-0": 0.5}, {"g1-1": "stale"}))
    asyncio.run(store.write_eval(3, [rollout("e1-0")]))
    assert [record["id"] for record in read_rollouts(tmp_path, step=3)] == ["g1-0", "g1-1"]
    assert [record["id"] for record in read_rollouts(tmp_path, evals=True)] == ["e1-0"]


def test_only_weights_that_nobody_reads_are_deleted(tmp_path):
    for number in range(5):
        (tmp_path / "weights" / f"v{number:06d}").mkdir(parents=True)
    asyncio.run(RunStore(tmp_path).retire_weights(3))
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["v000003", "v000004"]
