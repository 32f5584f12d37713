import json

import pytest

from slipstream.config import RunConfig, load
from slipstream.errors import ConfigError
from slipstream.launch import run_folder
from slipstream.launch.topology import processes


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


def test_clean_deletes_a_run(config):
    folder = run_folder.create(config)
    run_folder.clean(config)
    assert not folder.exists()


def test_only_engines_are_restarted_and_every_role_has_its_thread_count(config):
    specs = processes(config.replace(engine=config.engine.replace(replicas=2, threads=3)), config.folder)
    assert [(s.name, s.restart) for s in specs] == [("trainer", False), ("engine-0", True), ("engine-1", True), ("orchestrator", False)]
    assert specs[1].env["OMP_NUM_THREADS"] == "3" and specs[0].env["OMP_NUM_THREADS"] == "1"


def test_a_run_that_goes_on_is_neither_resumed_nor_deleted(config):
    with run_folder.opened(config, resume=False) as folder:
        (folder / "endpoints" / "engine-0.json").write_text("{}")
        for attempt in (lambda: run_folder.opened(config, resume=True).__enter__(), lambda: run_folder.clean(config)):
            with pytest.raises(ConfigError, match="two runs on one folder"):
                attempt()
        assert (folder / "endpoints" / "engine-0.json").exists()
    with run_folder.opened(config, resume=True):
        assert not (folder / "endpoints" / "engine-0.json").exists()


def test_what_an_error_message_says_to_change_may_change(config):
    run_folder.create(config)
    trainer = {**config.trainer.model_dump(), "batch_timeout_s": 9.0, "max_bad_steps": 9}
    trainer["optim"]["lr"] = 1e-7
    orchestrator = config.orchestrator.replace(max_fruitless_groups=9)
    run_folder.reopen(config.replace(trainer=trainer, orchestrator=orchestrator, engine=config.engine.replace(host="::1", port=9)))
