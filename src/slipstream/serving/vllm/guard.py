"""The process above vLLM's server, which leaves nothing of it behind: run by vLLM's interpreter as a script, so it imports nothing but the
standard library.

It ends when vLLM does, with its exit code; when told to (SIGTERM); and when the process that started it is gone, however that went (Linux
only). First it ends whatever vLLM started: an engine core that was loading when its server was killed would go on for ever.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SERVER = "vllm.entrypoints.openai.api_server"
"""The `vllm` command is missing from rebuilds under another name; the module is there in all of them."""
STOP_S, END_S = 10.0, 3.0
"""Time of vLLM itself to end, and of each harder step after it: less than the supervisor gives a role, all together."""
POLL_S = 0.1


def main(argv: list[str]) -> int:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != int(os.environ["SLIPSTREAM_PARENT"]):
        raise SystemExit("the process that started this server is gone")
    server = subprocess.Popen([sys.executable, "-m", SERVER, *argv], start_new_session=True)
    while server.poll() is None and not told:
        time.sleep(POLL_S)
    server.terminate()
    _until(lambda: server.poll() is not None, STOP_S)
    _end_group(server.pid)
    code = server.wait()
    return code if code >= 0 else 128 - code  # of a signal, as a shell has it


def _end_group(group: int) -> None:
    """Multiprocessing's resource trackers go last and by themselves: they remove the shared memory of those that were killed."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid in _members(group, trackers=False):
            _kill(os.kill, pid, sign)
        _until(lambda: not _members(group, trackers=False), END_S)
    _until(lambda: not _members(group, trackers=True), END_S)
    _kill(os.killpg, group, signal.SIGKILL)


def _members(group: int, trackers: bool) -> list[int]:
    """Processes of the group that run, as /proc has them (elsewhere: none)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, member_of = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(member_of) == group and state != "Z" and (trackers or b"resource_tracker" not in (folder / "cmdline").read_bytes()):
                found.append(int(folder.name))
        except OSError:  # it has just ended
            pass
    return found


def _kill(how, target: int, sign: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(target, sign)


def _until(holds, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(POLL_S)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
