"""Code that stops a whole process: the watchdog ends it, and its dump names the rollout. Each case is a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.envs.frozen import dump_file, suspects
from tests.waiting import HUNG_S

PLAY = """
import asyncio, re, sys, time
from pathlib import Path
from slipstream.envs.frozen import Watchdog, play_named
from slipstream.envs.hooks import run_hook
from slipstream.types import Task

def backtrack():  # keeps the interpreter's lock
    re.match(r"(a+)+$", "a" * 60 + "b")

async def blocks():
    {body}

async def waits():
    await asyncio.sleep(600)

async def main():
    limit_s = float(sys.argv[2])
    watchdog = Watchdog(Path(sys.argv[1]), limit_s)
    for i, play in enumerate([waits, blocks, waits]):
        asyncio.create_task(play_named(f"g1/{{i}}", Task(f"é in two/{{i}}", sys.argv[3], 0, {{}}), play))
    started = time.monotonic()
    while time.monotonic() < started + 2 * limit_s:
        watchdog.arm()
        await asyncio.sleep(0.1)
    watchdog.close()
    time.sleep(1.2 * limit_s)

asyncio.run(main())
"""
FREEZES_S, TURNS_S = 2, 4
"""Limits of the watchdog: for loops that stop, and for loops that turn, which a busy machine must not hold up for so long."""


def start(body: str, file: Path, limit_s: float, env: str = "my env") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PLAY.format(body=body), str(file), str(limit_s), env]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def code(process: subprocess.Popen[bytes]) -> int:
    """How it ended."""
    process.communicate(timeout=HUNG_S)
    return process.returncode


@pytest.mark.parametrize(
    "body",
    ["time.sleep(600)", "backtrack()", "while True: pass", "await run_hook(backtrack, timeout=600)"],
    ids=["sleep", "regex", "spin", "thread"],
)
def test_code_that_stops_the_loop_ends_the_process_and_is_named(tmp_path, body):
    file = tmp_path / "logs" / "dump"
    assert code(start(body, file, FREEZES_S)) == 1
    assert suspects(file.read_text()) == {("my env", "é in two/1"): "g1/1"}


def test_a_loop_that_turns_is_left_alone(tmp_path):
    bodies = (f"await run_hook(time.sleep, {1.5 * TURNS_S}, timeout=600)", "await waits()", "time.sleep(0.1)")
    turning = [(tmp_path / f"dump-{i}", start(body, tmp_path / f"dump-{i}", TURNS_S)) for i, body in enumerate(bodies)]
    for file, process in turning:
        assert code(process) == 0 and file.read_text() == ""


def test_dumps_add_up(tmp_path):
    file = dump_file(tmp_path)
    for name in ("a", "b"):
        code(start("time.sleep(600)", file, FREEZES_S, name))
    assert set(suspects(file.read_text())) == {("a", "é in two/1"), ("b", "é in two/1")}
