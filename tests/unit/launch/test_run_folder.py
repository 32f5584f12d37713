import io
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.config import RunConfig, load
from slipstream.errors import ConfigError
from slipstream.launch import run_folder
from slipstream.launch.topology import processes
from tests.waiting import HUNG_S


@pytest.fixture
def config(tmp_path):
    return load(RunConfig, (), ['model.path="m"', 'envs=[{"id": "calculator"}]', f'runs_dir="{tmp_path}"', "name=first"])


def test_a_new_run_gets_its_configuration_and_manifest(config):
    folder = run_folder.create(config)
    assert run_folder.open_config(folder) == config
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["config_fingerprint"] == config.fingerprint() and "torch" in manifest["starts"][0]["packages"]


def test_a_second_run_of_the_same_name_is_refused(config):
    run_folder.create(config)
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume.*--clean"):
        run_folder.create(config)


def test_resume_needs_a_run(config):
    with pytest.raises(ConfigError, match="holds no run"):
        run_folder.reopen(config)


def test_resume_may_train_longer_but_not_be_another_run(config):
    run_folder.create(config)
    run_folder.reopen(config.replace(max_steps=500))
    with pytest.raises(ConfigError, match=r"seed: 0 -> 4"):
        run_folder.reopen(config.replace(max_steps=500, seed=4))


def test_clean_refuses_a_folder_that_is_not_a_run(config):
    config.folder.mkdir()
    (config.folder / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="is not a run"):
        run_folder.clean(config)
    assert (config.folder / "thesis.txt").exists()


def test_clean_empties_a_run(config):
    folder = run_folder.create(config)
    run_folder.clean(config)
    assert list(folder.iterdir()) == []


def test_only_engines_are_restarted_and_every_role_has_its_thread_count(config):
    specs = processes(config.replace(engine=config.engine.replace(replicas=2, threads=3)), config.folder)
    assert [(s.name, s.restart) for s in specs] == [("trainer", False), ("engine-0", True), ("engine-1", True), ("orchestrator", False)]
    assert specs[1].env["OMP_NUM_THREADS"] == "3" and specs[0].env["OMP_NUM_THREADS"] == "1"


def test_engines_that_share_experts_are_groups_of_neighbours(config):
    engine = config.engine.replace(replicas=4, ep=config.engine.ep.replace(ranks=2))
    specs = [spec for spec in processes(config.replace(engine=engine), config.folder) if spec.name.startswith("engine")]
    assert [(s.group, s.env["RANK"], s.env["WORLD_SIZE"]) for s in specs] == [
        ("engines-0", "0", "2"),
        ("engines-0", "1", "2"),
        ("engines-1", "0", "2"),
        ("engines-1", "1", "2"),
    ]
    assert all(not spec.group for spec in processes(config, config.folder))


def test_engines_that_somebody_else_runs_are_not_started(config):
    specs = processes(config.replace(router=config.router.replace(urls=("http://10.0.0.5:8000",))), config.folder)
    assert [spec.name for spec in specs] == ["trainer", "orchestrator"]


HOLD = """
import sys
from pathlib import Path
from setproctitle import setproctitle
from slipstream.launch.run_folder import held
with held(Path(sys.argv[1])):
    setproctitle(sys.argv[2])
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another(folder: Path, title: str):
    """A process of this title that holds the folder until its input ends."""
    command = [sys.executable, "-c", HOLD, str(folder), title]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def test_a_second_run_on_a_folder_is_refused_with_the_process_id_of_the_first(config):
    with another(config.folder, "slipstream-cli rl x.toml") as first:
        with pytest.raises(ConfigError, match=rf"two runs on one folder: .*slipstream-cli rl x.toml \(process {first.pid}\)"):
            run_folder.held(config.folder).__enter__()
        assert config.folder.exists()
    with run_folder.held(config.folder):
        pass


def test_roles_that_a_killed_supervisor_left_are_waited_for(config, monkeypatch):
    with another(config.folder, "slipstream trainer") as left:

        class EndsIt(io.StringIO):
            def write(self, text: str) -> int:
                left.stdin.close()
                return super().write(text)

        monkeypatch.setattr(sys, "stderr", said := EndsIt())
        with run_folder.held(config.folder):
            assert left.wait(HUNG_S) == 0
    assert said.getvalue().count(f"waiting for slipstream trainer (process {left.pid})") == 1


def test_a_role_that_does_not_end_is_named_with_how_to_end_it(config, monkeypatch):
    monkeypatch.setattr(run_folder, "ENDING_S", 0.3)
    with (
        another(config.folder, "slipstream trainer") as left,
        pytest.raises(ConfigError, match=rf"supervisor was killed.*kill -9 {left.pid}\)"),
    ):
        run_folder.held(config.folder).__enter__()


def test_a_folder_that_nothing_came_of_is_not_left_behind(config):
    with pytest.raises(ConfigError, match="holds no run"), run_folder.held(config.folder):
        run_folder.reopen(config)
    assert not config.folder.exists()


def test_going_on_forgets_where_the_old_engines_listened(config):
    folder = run_folder.create(config)
    (folder / "endpoints" / "engine-0.json").write_text("{}")
    run_folder.reopen(config)
    assert not (folder / "endpoints" / "engine-0.json").exists()


def test_what_an_error_message_says_to_change_may_change(config):
    run_folder.create(config)
    trainer = {**config.trainer.model_dump(), "batch_timeout_s": 9.0, "max_bad_steps": 9}
    trainer["optim"]["lr"] = 1e-7
    orchestrator = config.orchestrator.replace(max_fruitless_groups=9)
    run_folder.reopen(config.replace(trainer=trainer, orchestrator=orchestrator, engine=config.engine.replace(host="::1", port=9)))
