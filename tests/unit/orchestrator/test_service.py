"""The process around the loop, with the real folder, ledger and signals, and fakes for the engine and the environment."""

import json
import os
import random
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipstream.config import RunConfig, to_toml
from slipstream.envs.frozen import dump_file
from slipstream.errors import ConfigError
from slipstream.fakes.engine import FakeEngine
from slipstream.fakes.envs import FakeEnv
from slipstream.observe.metrics import read_metrics
from slipstream.orchestrator import service
from slipstream.orchestrator.curriculum import Curriculum
from slipstream.orchestrator.ledger import Ledger
from slipstream.orchestrator.loop import BoundEnv
from slipstream.orchestrator.store import FolderLock
from slipstream.transport.weights import seal
from slipstream.types import Outcome, Rollout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    values = {"model": {"path": "none"}, "envs": [{"id": "fake"}], "eval": {"tasks": 0}}
    (tmp_path / "config.toml").write_text(to_toml(RunConfig.model_validate(values)))
    temp = tmp_path / "weights" / "temp"
    temp.mkdir(parents=True)
    save_file({"w": np.zeros(3, np.float32)}, temp / "model.safetensors")
    seal(temp, tmp_path / "weights", 0, None)
    return tmp_path


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch):
    """Fakes in place of the engine and the environments; returns how to set what playing a rollout does."""
    played = {}

    @asynccontextmanager
    async def pool(run_folder, replicas, config):
        engine = FakeEngine(random.Random(0))
        engine.metrics = dict
        yield engine

    async def player(task, rollout_id, group_id, version_start):
        return played["do"](Rollout(rollout_id, task, group_id, Outcome.env_error, error="nothing to play", version_start=version_start))

    def bind(config, envs, engine, gateway, state):
        env = config.envs[0]
        return (BoundEnv(env, FakeEnv("fake"), player, player, Curriculum(config.orchestrator.curriculum, 9, 0)),)

    monkeypatch.setattr(service.EnginePool, "of_run", pool)
    monkeypatch.setattr(service, "load_env", lambda config, seed: FakeEnv(config.label))
    monkeypatch.setattr(service, "_bind_envs", bind)
    return lambda do: played.update(do=do)


def finish_reason(folder: Path) -> str:
    return json.loads((folder / "batches" / "finish.json").read_text())["reason"]


def test_sigterm_ends_the_run_in_order(folder, around):
    def interrupt(rollout):
        os.kill(os.getpid(), signal.SIGTERM)
        return rollout

    around(interrupt)
    assert service.main(folder) == 143
    assert finish_reason(folder) == "stopped"
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.audit()
    assert ledger.in_flight == ledger.num_ready == 0
    assert ledger.issued > 0
    ledger.close()
    FolderLock(folder).close()  # nobody holds it any more


def test_nothing_to_learn_has_an_exit_code_and_a_reason_of_its_own(folder, around, capfd):
    around(lambda rollout: rollout)
    assert service.main(folder) == 3
    assert finish_reason(folder).startswith("fruitless: 200 groups")
    assert "fruitless: 200 groups" in capfd.readouterr().err
    assert any(record.get("name") == "published" for record in read_metrics(folder))


def test_what_an_earlier_process_froze_in_is_not_played_again(folder, around, capfd):
    played = []
    around(lambda rollout: played.append(rollout.task.id) or rollout)
    dump_file(folder).parent.mkdir()
    dump_file(folder).write_text(
        "".join(f'  File "x.py", line 1 in rollout g1/0 env fake task {quote(f"fake/train/{i}")}\n' for i in range(1, 9))
    )
    assert service.main(folder) == 3
    assert set(played) == {"fake/train/0"}
    assert "not played: environment 'fake', task fake/train/3: rollout g1/0" in capfd.readouterr().err
    assert sum(record.get("name") == "frozen" for record in read_metrics(folder)) == 8


def test_a_second_orchestrator_on_the_folder_is_refused_before_it_touches_anything(folder, around):
    lock = FolderLock(folder)
    with pytest.raises(ConfigError, match="two runs on one folder"):
        service.main(folder)
    assert not (folder / "ledger.sqlite").exists()
    lock.close()


@pytest.mark.parametrize(
    ("reason", "code"), [("max_steps", 0), ("stop_at_eval", 0), ("max_minutes", 0), ("stopped", 143), ("fruitless: ...", 3)]
)
def test_exit_codes_say_how_the_run_ended(reason, code, folder, monkeypatch):
    async def run(*args):
        return reason

    monkeypatch.setattr(service, "_run", run)
    assert service.main(folder) == code
