import os
import shutil
import signal
import sys
import textwrap
from types import SimpleNamespace

import psutil
import pytest

from slipstream.launch.local import RoleDied, Supervisor
from slipstream.launch.run_folder import held
from slipstream.launch.topology import ProcessSpec
from tests.waiting import HUNG_S, wait_until


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", textwrap.dedent(text))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def alive(supervisor: Supervisor) -> list[str]:
    return [name for name, p in supervisor._processes.items() if p.poll() is None]


def test_it_returns_when_the_stateful_roles_end_well_and_ends_the_engines(folder):
    supervisor = Supervisor(
        [ProcessSpec("engine-0", script("import time; time.sleep(600)"), restart=True), ProcessSpec("trainer", script("print('done')"))],
        folder,
    )
    supervisor.run(on_poll=lambda: None)
    assert alive(supervisor) == []
    assert (folder / "logs" / "trainer.log").read_text() == "done\n"


def test_a_dead_trainer_ends_the_run_and_names_its_log_and_last_words(folder):
    supervisor = Supervisor(
        [
            ProcessSpec("engine-0", script("import time; time.sleep(600)"), restart=True),
            ProcessSpec("trainer", script("import sys; print('the reason'); sys.exit(3)")),
        ],
        folder,
    )
    with pytest.raises(RoleDied, match=r"trainer ended with exit code 3.*trainer\.log(.|\n)*the reason"):
        supervisor.run(on_poll=lambda: None)
    assert alive(supervisor) == []


def test_a_role_that_dies_on_a_full_disk_says_so_although_its_log_cannot(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    spec = ProcessSpec("trainer", script("import sys; sys.exit(1)"))
    with pytest.raises(RoleDied, match=r"trainer ended with exit code 1(.|\n)*is full \(4096 bytes are free\): make room first"):
        Supervisor([spec], folder).run(on_poll=lambda: None)


def test_a_killed_engine_is_started_again(folder):
    marker = folder / "starts"
    engine = script(f"import time; open({str(marker)!r}, 'a').write('x'); time.sleep(600)")
    trainer = script(
        f"import os, time\nwhile not os.path.exists({str(marker)!r}) or len(open({str(marker)!r}).read()) < 2: time.sleep(0.05)"
    )
    events: list[str] = []
    supervisor = Supervisor([ProcessSpec("trainer", trainer), ProcessSpec("engine-0", engine, restart=True)], folder, events.append)
    killed = []

    def kill_once() -> None:
        if not killed and marker.exists() and marker.read_text() == "x":
            os.kill(supervisor._processes["engine-0"].pid, signal.SIGKILL)
            killed.append(True)

    supervisor.run(on_poll=kill_once)
    assert marker.read_text() == "xx"
    assert len(events) == 1 and "engine-0 was killed by SIGKILL" in events[0]


def test_an_engine_that_refuses_its_configuration_is_not_restarted(folder):
    specs = [
        ProcessSpec("trainer", script("import time; time.sleep(600)")),
        ProcessSpec("engine-0", script("import sys; print('port taken'); sys.exit(2)"), restart=True),
    ]
    with pytest.raises(RoleDied, match="port taken"):
        Supervisor(specs, folder).run(on_poll=lambda: None)


FREEZE = """
    import sys
    from pathlib import Path
    frozen = Path({0!r})
    before = frozen.read_text() if frozen.exists() else ""
    if before.count("Timeout") < {1}:
        frozen.write_text(before + 'Timeout\\n  File "x.py", line 1 in rollout g1/0 env mine task t%2F1\\n')
        sys.exit(1)
    """


def test_a_role_that_an_environment_froze_is_started_again(folder):
    frozen, events = folder / "frozen", []
    spec = ProcessSpec("orchestrator", script(FREEZE.format(str(frozen), 2)), frozen=frozen)
    Supervisor([spec], folder, events.append).run(on_poll=lambda: None)
    assert len(events) == 2 and "environment 'mine', task t/1" in events[0] and "(2/5)" in events[1]


def test_a_role_that_freezes_for_ever_ends_the_run_and_names_the_task(folder):
    frozen = folder / "frozen"
    spec = ProcessSpec("orchestrator", script(FREEZE.format(str(frozen), 99)), frozen=frozen)
    with pytest.raises(RoleDied, match=r"6 times, the last time in environment 'mine', task t/1. .*frozen.*delete that file"):
        Supervisor([spec], folder, lambda line: None).run(on_poll=lambda: None)


def test_a_role_that_dies_beside_an_old_dump_ends_the_run(folder):
    frozen = folder / "frozen"
    frozen.write_text("Timeout\n")
    spec = ProcessSpec("orchestrator", script("import sys; sys.exit(1)"), frozen=frozen)
    with pytest.raises(RoleDied, match="ended with exit code 1"):
        Supervisor([spec], folder).run(on_poll=lambda: None)


def test_sigterm_stops_every_role_in_order(folder):
    marker = folder / "saved"
    trainer = script(
        f"""
        import signal, sys, time
        def save(*_):
            open({str(marker)!r}, "w").write("saved"); sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        open({str(marker)!r}, "w").write("ready")
        time.sleep(600)
        """
    )
    supervisor = Supervisor([ProcessSpec("trainer", trainer)], folder)

    def interrupt() -> None:
        if marker.exists() and marker.read_text() == "ready":
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RoleDied, match="interrupted"):
        supervisor.run(on_poll=interrupt)
    assert marker.read_text() == "saved"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux only")
def test_roles_end_when_their_supervisor_is_killed(folder):
    child = script(
        f"""
        import os, signal, sys, time
        from setproctitle import setproctitle
        from slipstream.launch.local import die_with_parent
        setproctitle("slipstream trainer")
        die_with_parent()
        def end(*_):
            time.sleep(1)
            open({str(folder / "ended")!r}, "w").close()
            sys.exit()
        signal.signal(signal.SIGTERM, end)
        open({str(folder / "pid.tmp")!r}, "w").write(str(os.getpid()))
        os.rename({str(folder / "pid.tmp")!r}, {str(folder / "pid")!r})
        time.sleep(600)
        """
    )
    parent = script(
        f"""
        from pathlib import Path
        from slipstream.launch.local import Supervisor
        from slipstream.launch.run_folder import held
        from slipstream.launch.topology import ProcessSpec
        with held(Path({str(folder)!r})) as hold:
            Supervisor([ProcessSpec("trainer", {child!r})], Path({str(folder)!r}), hold=hold).run(on_poll=lambda: None)
        """
    )
    process = psutil.Popen(parent)
    wait_until(lambda: (folder / "pid").exists() or process.poll() is not None)
    process.kill()
    process.wait()
    with held(folder):  # not before the role has ended, which takes its time
        assert (folder / "ended").exists()


@pytest.mark.parametrize("notices", [False, True], ids=["waits", "notices"])
def test_when_one_of_a_group_dies_all_of_it_starts_again_and_meets_elsewhere(folder, notices):
    """The others cannot go on without it: they wait for something, or end, and are not what died. Engines of no group, or of another one,
    are left alone."""
    starts, gone = folder / "starts", folder / "gone"
    engine = f"""
        import os, sys, time
        open({str(starts)!r}, "a").write(os.environ["NAME"] + " " + os.environ.get("MASTER_PORT", "-") + "\\n")
        while os.environ["NAME"] != "a0" or not os.path.exists({str(gone)!r}):
            time.sleep(0.02)
        os.remove({str(gone)!r})
        sys.exit(1)
    """
    trainer = f"import os, time\nwhile not os.path.exists({str(starts)!r}) or open({str(starts)!r}).read().count('a') < 5: time.sleep(0.05)"
    groups = {"a0": "a", "a1": "a", "b0": "b", "alone": ""}
    specs = [ProcessSpec(name, script(engine), {"NAME": name}, restart=True, group=group) for name, group in groups.items()]
    events: list[str] = []
    supervisor = Supervisor([*specs, ProcessSpec("trainer", script(trainer))], folder, events.append)
    killed = []

    def kill_once() -> None:
        if not killed and starts.exists() and starts.read_text().count("\n") == 4:
            os.kill(supervisor._processes["a1"].pid, signal.SIGKILL)
            killed.append(True)
            if notices:
                gone.touch()
                assert supervisor._processes["a0"].wait(HUNG_S) == 1

    supervisor.run(on_poll=kill_once)
    started = [line.split() for line in starts.read_text().splitlines()]
    assert sorted(name for name, _ in started) == ["a0", "a0", "a1", "a1", "alone", "b0"]
    ports = {name: [port for other, port in started if other == name] for name in groups}
    assert ports["a0"] == ports["a1"] and ports["a0"][0] != ports["a0"][1] and ports["alone"] == ["-"] and ports["b0"][0] not in ports["a0"]
    assert len(events) == 1 and "a1 was killed by SIGKILL; starting it and the rest of a again" in events[0]
