"""Mistakes at the command line end in a line that names the thing and what to do, never in a traceback."""

import resource

import pytest
from typer.testing import CliRunner

from slipstream import cli
from slipstream.jobs.make_model import make

RUN_FILE = """
sft = {}
[model]
path = "models/none"
seq_len = 192
[[envs]]
id = "calculator"
sampling = { max_tokens = 32 }
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    return tmp_path


def run(monkeypatch, capsys, *args):
    """(exit code, what was said on stderr) of the program as a user starts it."""
    monkeypatch.setattr("sys.argv", ["slipstream", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


def test_a_command_takes_as_many_open_files_as_it_may_have(monkeypatch, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert run(monkeypatch, capsys, "--help")[0] == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, cli.MOST_FILES), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


COMMANDS = {
    "rl": ["rl", "run.toml", "--set", "model.path={}"],
    "sft": ["sft", "run.toml", "--out", "out", "--model", "{}"],
    "eval": ["eval", "run.toml", "--model", "{}"],
    "generate": ["generate", "{}", "hello"],
    "engine": ["engine", "--model", "{}"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("folder", "what"), [("absent", "does not exist"), ("file", "is not a folder"), ("folder", "has no config.json")])
def test_a_missing_model_is_named_with_how_to_make_one(place, monkeypatch, capsys, command, folder, what):
    monkeypatch.setattr("slipstream.launch.local.die_with_parent", lambda: None)
    monkeypatch.setattr("setproctitle.setproctitle", lambda title: None)
    code, said = run(monkeypatch, capsys, *(arg.format(folder) for arg in COMMANDS[command]))
    assert code == 2
    assert f"{folder} {what}" in said and "slipstream make-model" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["generate", "m", "hi", "--seed", "-1"], "--seed"),
        (["make-model", "m", "--seed", "-1"], "--seed"),
        (["engine", "--run", "r", "--replica", "-1"], "--replica"),
        (["rollouts", "r", "--limit", "0"], "--limit"),
    ],
)
def test_a_number_that_makes_no_sense_names_its_option(args, said):
    result = CliRunner().invoke(cli.app, args, env={"COLUMNS": "200"})
    assert result.exit_code == 2 and f"Invalid value for '{said}'" in result.stderr


@pytest.mark.parametrize("setting", ["type=vllm", "replicas=2", "ep.ranks=2", "disaggregation.prefill_replicas=1"])
def test_an_engine_that_stands_alone_takes_no_setting_that_it_would_ignore(place, monkeypatch, capsys, setting):
    monkeypatch.setattr("slipstream.launch.local.die_with_parent", lambda: None)
    monkeypatch.setattr("setproctitle.setproctitle", lambda title: None)
    make(place / "model", "tiny-moe", ["calculator"], seed=0)
    code, said = run(monkeypatch, capsys, "engine", "--model", "model", "--set", setting)
    assert code == 2 and f"--set {setting.split('=')[0].removesuffix('.prefill_replicas')}: one process" in said and "--ranks N" in said


def test_a_negative_seed_in_a_run_file_is_refused(place, monkeypatch, capsys):
    code, said = run(monkeypatch, capsys, "rl", "run.toml", "--set", "seed=-1")
    assert code == 2 and "seed = -1: Input should be greater than or equal to 0" in said


@pytest.mark.parametrize("command", ["summary", "report", "rollouts"])
def test_a_run_that_is_not_there_names_those_that_are(place, monkeypatch, capsys, command):
    (place / "runs" / "first").mkdir(parents=True)
    (place / "runs" / "first" / "config.toml").write_text(RUN_FILE)
    code, said = run(monkeypatch, capsys, command, "runs/frist")
    assert (code, "Traceback" in said) == (2, False)
    assert "runs/frist is not a run folder" in said and "runs/first" in said


def test_a_configuration_that_cannot_be_read_is_said_beside_what_can_be_shown(place, monkeypatch, capsys):
    (place / "config.toml").write_text("nonsense = 1")
    code, said = run(monkeypatch, capsys, "summary", ".")
    assert code == 0 and "warning" in said and "nonsense: unknown key" in said


def test_sft_says_that_it_cannot_write_before_it_trains(place, monkeypatch, capsys):
    make(place / "models" / "none", "tiny-moe", ["calculator"], seed=0)
    code, said = run(monkeypatch, capsys, "sft", "run.toml", "--out", "file/model")
    assert code == 2 and "error: --out file/" in said and "demonstrations" not in said and "Traceback" not in said
