"""Code that stops a whole process: the watchdog ends it, and its dump names the rollout. Each case is a process of its own."""

import subprocess
import sys
import textwrap

import pytest

from slipstream.envs.frozen import dump_file, suspects

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
    await asyncio.sleep(60)

async def main():
    watchdog = Watchdog(Path(sys.argv[1]), 0.5)
    for i, play in enumerate([waits, blocks, waits]):
        asyncio.create_task(play_named(f"g1/{{i}}", Task(f"é in two/{{i}}", "my env", 0, {{}}), play))
    started = time.monotonic()
    while time.monotonic() < started + 3:
        watchdog.arm()
        await asyncio.sleep(0.1)
    watchdog.close()
    time.sleep(1)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "body",
    ["time.sleep(60)", "backtrack()", "while True: pass", "await run_hook(backtrack, timeout=60)"],
    ids=["sleep", "regex", "spin", "thread"],
)
def test_code_that_stops_the_loop_ends_the_process_and_is_named(tmp_path, body):
    file = tmp_path / "logs" / "dump"
    ended = subprocess.run([sys.executable, "-c", PLAY.format(body=body), str(file)], timeout=60, check=False)
    assert ended.returncode == 1
    assert suspects(file.read_text()) == {("my env", "é in two/1"): "g1/1"}


@pytest.mark.parametrize("body", ["await run_hook(time.sleep, 2, timeout=9)", "await waits()", "time.sleep(0.1)"])
def test_a_loop_that_turns_is_left_alone(tmp_path, body):
    file = tmp_path / "dump"
    ended = subprocess.run([sys.executable, "-c", PLAY.format(body=body), str(file)], timeout=60, check=False, stderr=subprocess.PIPE)
    assert ended.returncode == 0
    assert file.read_text() == ""


def test_dumps_add_up(tmp_path):
    file = dump_file(tmp_path)
    for name in ("a", "b"):
        text = PLAY.format(body="time.sleep(60)").replace("my env", name)
        subprocess.run([sys.executable, "-c", textwrap.dedent(text), str(file)], timeout=60, check=False)
    assert set(suspects(file.read_text())) == {("a", "é in two/1"), ("b", "é in two/1")}
