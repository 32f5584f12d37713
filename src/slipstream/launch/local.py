"""Run every role of one run on this machine, and answer for them.

The supervisor starts the processes of `topology`, restarts engines that die and an orchestrator that an environment froze, and ends
everything as soon as a role that holds state (trainer, orchestrator) dies otherwise or the run is finished. It computes nothing
itself; what a person sees while it waits comes from the run folder through the dashboard.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from slipstream.envs.frozen import suspects
from slipstream.errors import NO_SPACE, SlipstreamError, StateError
from slipstream.launch.topology import ProcessSpec

POLL_S = 0.25
GRACE_S = 20.0
"""Time for a role to write its checkpoint after SIGTERM before it is killed."""
GROUP_GRACE_S = 2.0
"""The same for the rest of a group of engines of which one has died: what they still could do is said with less."""
MAX_RESTARTS = 20
"""Restarts of one engine within RESTART_WINDOW_S after which it is considered broken, not unlucky."""
RESTART_WINDOW_S = 600.0
PORTS = range(15_000, 20_000)
"""For processes that have to meet. Linux gives connections ports from 32768 up, others from 49152."""
FULL_BYTES = 1 << 20
"""A disk with less free space is called full."""
MAX_FREEZES = 5
"""Restarts of a frozen role in one run after which its environments are considered broken."""


class RoleDied(SlipstreamError):
    """A role process ended that the run cannot go on without."""


class Supervisor:
    """Starts, watches and ends the role processes of one run."""

    def __init__(self, specs: list[ProcessSpec], run_folder: Path, on_event: Callable[[str], None] = print, hold: int | None = None):
        """`hold`: the descriptor that holds the run folder; the roles inherit it."""
        self._specs = {spec.name: spec for spec in specs}
        self._folder = run_folder
        self._on_event = on_event
        self._inherited = () if hold is None else (hold,)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []
        self._log_starts: dict[str, int] = {}
        """Bytes of each log that an earlier start of the run has written."""
        self._restarts: dict[str, list[float]] = {name: [] for name in self._specs}
        self._ports: dict[str, int] = {}
        """Where the processes of each group meet."""
        self._freezes = 0
        self._dumped: dict[str, int] = {}
        """Bytes of each role's `frozen` file that are known."""
        self._stop = False

    def run(self, on_poll: Callable[[], None]) -> None:
        """Start everything; return when trainer and orchestrator have both ended well. Engines are ended then.

        `on_poll` is called a few times a second. SIGINT and SIGTERM end the run in order: roles write their checkpoints.
        Raises RoleDied when a role failed, naming it, how it ended and its log.
        """
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for name in self._specs:
                self._start(name)
            while not self._stop and not self._finished():
                time.sleep(POLL_S)
                on_poll()
                self._check()
            if self._stop:
                raise RoleDied("interrupted; everything was stopped in order")
        finally:
            self.terminate()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def terminate(self) -> None:
        """End all processes."""
        _end([*self._processes.values()], GRACE_S)
        for log in self._logs:
            log.close()
        self._logs.clear()

    def _start(self, name: str) -> None:
        spec = self._specs[name]
        self._dumped[name] = len(_dump(spec))
        log = (self._folder / "logs" / f"{name}.log").open("ab")
        self._log_starts.setdefault(name, log.tell())
        self._logs.append(log)
        env = {**os.environ, **spec.env, "SLIPSTREAM_PARENT": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        if spec.group:
            env["MASTER_PORT"] = str(self._ports.setdefault(spec.group, free_port()))
        self._processes[name] = subprocess.Popen(
            spec.argv,
            env=env,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=self._inherited,
        )

    def _finished(self) -> bool:
        return all(self._processes[name].poll() == 0 for name, spec in self._specs.items() if not spec.restart)

    def _check(self) -> None:
        for name, spec in self._specs.items():
            code = self._processes[name].poll()
            if code is None or (code == 0 and not spec.restart):
                continue
            if spec.restart:
                self._restart(self._first_to_die(name))
            elif len(dump := _dump(spec)) > self._dumped[name]:
                self._thaw(spec, dump[self._dumped[name] :])
            else:
                raise RoleDied(f"{name} {how_ended(code)}. {self._words(name)}")

    def _members(self, name: str) -> list[str]:
        """Of its group, or itself alone."""
        group = self._specs[name].group
        return [other for other, spec in self._specs.items() if other == name or (group and spec.group == group)]

    def _first_to_die(self, name: str) -> str:
        """Of the group of a process that has ended: one that a signal has ended, where there is one. The others end because it is gone."""
        codes = {member: self._processes[member].poll() for member in self._members(name)}
        return next((member for member, code in codes.items() if code is not None and code < 0), name)

    def _restart(self, name: str) -> None:
        now, code = time.monotonic(), self._processes[name].poll()
        assert code is not None
        recent = [t for t in self._restarts[name] if now - t < RESTART_WINDOW_S]
        if len(recent) >= MAX_RESTARTS or self._failed_at_start(name):
            raise RoleDied(f"{name} {how_ended(code)} {len(recent) + 1} times. {self._words(name)}")
        self._restarts[name] = [*recent, now]
        what = f"it and the rest of {group} again" if (group := self._specs[name].group) else "it again"
        self._on_event(f"{name} {how_ended(code)}; starting {what} ({len(recent) + 1}/{MAX_RESTARTS})")
        members = self._members(name)
        _end([self._processes[member] for member in members], GROUP_GRACE_S)
        self._ports.pop(group, None)  # something may be left on it
        for member in members:
            self._start(member)

    def _thaw(self, spec: ProcessSpec, dump: str) -> None:
        """Start a role again that the watchdog has ended. The new process leaves out the tasks in `dump`."""
        tasks = "; ".join(f"environment {env!r}, task {task}" for env, task in suspects(dump)) or "no rollout: see the stacks"
        self._freezes += 1
        if self._freezes > MAX_FREEZES:
            raise RoleDied(
                f"{spec.name} stood still for longer than orchestrator.max_freeze_s {self._freezes} times, the last time in {tasks}. "
                f"Every stack is in {spec.frozen}; mend the environment, and delete that file to have its tasks played again"
            )
        self._on_event(
            f"{spec.name} stood still in {tasks}; starting it again without them ({self._freezes}/{MAX_FREEZES}). "
            f"Every stack: {spec.frozen}"
        )
        self._start(spec.name)

    def _failed_at_start(self, name: str) -> bool:
        """An engine that ends by itself with a user error (exit code 2) will end so again."""
        return self._processes[name].poll() == 2

    def _words(self, name: str, lines: int = 5) -> str:
        """Where the role's log is and how it ends; and that the disk is full, for then the log may not say so."""
        log = self._folder / "logs" / f"{name}.log"
        text = log.read_bytes()[self._log_starts[name] :].decode(errors="replace").strip()  # not of an earlier start of the run
        last = "".join(f"\n  {name} | {line}" for line in text.splitlines()[-lines:])
        free = shutil.disk_usage(self._folder).free
        full = free < FULL_BYTES or self._processes[name].poll() == NO_SPACE  # what it could not write may be free again
        advice = f"\nThe disk of {self._folder} is full ({free} bytes are free): make room first." if full else ""
        return f"Its log: {log}{last}{advice}"

    def _on_signal(self, *_: object) -> None:
        self._stop = True


def _dump(spec: ProcessSpec) -> str:
    return spec.frozen.read_text(errors="replace") if spec.frozen is not None and spec.frozen.exists() else ""


def _end(processes: list[subprocess.Popen[bytes]], grace_s: float) -> None:
    """SIGTERM to all, SIGKILL to what is left after the grace period."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + grace_s
    for process in alive:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()


def free_port() -> int:
    """A TCP port of this machine that nobody uses now. It is one of those that no system gives to outgoing connections by itself, so that
    it is still free when a process that has to start first listens on it.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise StateError(f"no TCP port from {PORTS.start} to {PORTS.stop - 1} is free")


def how_ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def die_with_parent() -> None:
    """Called by a role process at its start: end it when the supervisor that started it is gone, however it went.

    Linux only (PR_SET_PDEATHSIG); elsewhere a killed supervisor leaves its roles to their own deadlines.
    """
    parent = os.environ.get("SLIPSTREAM_PARENT")
    if parent is None:
        return
    import ctypes
    import sys

    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != int(parent):
        raise SystemExit("the supervisor that started this role is gone")
