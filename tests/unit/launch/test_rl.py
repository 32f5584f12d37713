import contextlib
import socket
import sys

import pytest

from slipstream import cli
from slipstream.config import RunConfig, load
from slipstream.errors import ConfigError
from slipstream.launch import checks, rl, run_folder
from slipstream.launch.topology import ProcessSpec
from slipstream.models.maker import make_model


@pytest.fixture
def config(tmp_path):
    sets = ['model.path="m"', 'envs=[{"id": "calculator"}]', f'runs_dir="{tmp_path}"', "name=first"]
    return load(RunConfig, (), sets)


def test_the_reason_of_a_failure_is_shown_as_it_is(config, monkeypatch, capsys):
    """Brackets are not markup, and a long line is not broken."""
    reason = "envs[calculator].args: [/nope] " + "x" * 200
    spec = ProcessSpec("trainer", (sys.executable, "-c", f"import sys; print({reason!r}); sys.exit(2)"))
    monkeypatch.setattr(rl, "check_inputs", lambda config: [])
    monkeypatch.setattr(rl, "processes", lambda config, folder, port: [spec])
    assert rl.run(config, resume=False, clean=False) == 1
    shown = capsys.readouterr().err
    assert reason in shown and "No batch was trained yet" in shown


def two_free_ports() -> int:
    """The first of two free neighbours, below those that the kernel hands out by itself."""
    for port in range(20_000, 30_000, 2):
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no two free ports")


def test_a_taken_port_is_refused_before_the_earlier_run_is_cleaned(config, monkeypatch):
    monkeypatch.setattr(rl, "check_inputs", lambda config: [])
    run_folder.create(config)
    port = two_free_ports()
    config = config.replace(engine=config.engine.replace(port=port, replicas=2))
    checks.check_ports(config)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        with pytest.raises(
            ConfigError, match=rf"engine.port = {port}.* cannot listen on port {port + 1}: Address already in use.*another engine.port"
        ):
            rl.run(config, resume=False, clean=True)
    assert (config.folder / "config.toml").exists()
    with pytest.raises(ConfigError, match=r"no\.such\.host"):
        checks.check_ports(config.replace(engine=config.engine.replace(host="no.such.host.invalid")))


def test_a_kv_pool_without_room_for_one_sequence_is_refused_before_anything_starts(config, tmp_path):
    make_model(tmp_path / "m", "tiny-moe", ["a b c"] * 9, vocab_size=300)
    config = config.replace(
        model={"path": str(tmp_path / "m"), "seq_len": 1024}, engine=config.engine.replace(kv_memory_mib=1, max_running=2)
    )
    with pytest.raises(ConfigError, match=r"kv_memory_mib = 1 and model.seq_len = 1024: .* use engine.kv_memory_mib = \d+ or more"):
        checks.check_inputs(config)
    assert not config.folder.exists()


@pytest.mark.parametrize("key", ["trainer.loss", "envs[calculator].advantage"])
def test_a_custom_function_is_looked_for_before_anything_starts(config, key):
    custom = {"type": "custom", "path": "no_such_module:f"}
    if key == "trainer.loss":
        config = config.replace(trainer={**config.trainer.model_dump(), "loss": custom})
    else:
        config = config.replace(envs=[{"id": "calculator", "advantage": custom}])
    with pytest.raises(ConfigError, match="no_such_module"):
        checks.check_inputs(config)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["slipstream", "make-model", str(tmp_path / "file" / "model")])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and "Not a directory" in shown and shown.count("\n") == 1
