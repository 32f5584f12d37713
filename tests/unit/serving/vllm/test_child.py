"""vLLM's server as a child: told what is wrong when it ends, and gone when its parent is. A stand-in with vLLM's module name plays it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.errors import ConfigError, EngineUnavailable
from slipstream.serving.vllm.api import Api
from slipstream.serving.vllm.child import Server, environment, plugin_folder
from tests.waiting import HUNG_S, wait_until

PARENT = """
import asyncio, sys
from pathlib import Path
from slipstream.serving.vllm.child import Server, environment
async def main():
    server = await Server.start(Path(sys.executable), ["--x", "1"], environment(Path(sys.argv[1]), {"PYTHONPATH": sys.argv[1]}))
    print(server.pid, flush=True)
    await server.ended()
asyncio.run(main())
"""


def stand_in(folder: Path, code: str) -> Path:
    """A package `vllm` whose server runs `code`."""
    server = folder / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    server.write_text(code)
    return folder


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def started(folder: Path, code: str) -> Server:
    env = environment(plugin_folder(folder / "plugin"), {"PYTHONPATH": str(stand_in(folder / "stand-in", code))})
    return await Server.start(Path(sys.executable), ["--flag"], env)


async def test_a_server_that_ends_before_it_serves_is_a_mistake_to_mend(tmp_path):
    server, api = await started(tmp_path, "import sys; sys.exit(7)"), Api(tmp_path / "socket")
    with pytest.raises(ConfigError, match="exit code 7 before it served"):
        await server.healthy(api, HUNG_S)
    await api.close()
    await server.stop()


async def test_a_server_that_does_not_answer_in_time_is_unavailable(tmp_path):
    server, api = await started(tmp_path, "import time; time.sleep(600)"), Api(tmp_path / "socket")
    with pytest.raises(EngineUnavailable, match="start_timeout_s"):
        await server.healthy(api, 0.1)
    await api.close()
    await server.stop()
    assert gone(server.pid)


async def test_the_server_sees_the_plugin_and_our_arguments(tmp_path):
    code = (
        f"import slipstream.types, sys, os; open({str(tmp_path / 'seen')!r}, 'w').write(sys.argv[1] + os.environ['VLLM_SERVER_DEV_MODE'])"
    )
    server = await started(tmp_path, code)
    assert await server.ended() == 0
    assert (tmp_path / "seen").read_text() == "--flag1"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc, and the kernel's word that a parent is gone: Linux only")
class TestNothingIsLeft:
    """Of a server that ends at once (vLLM while it starts) above a child with shared memory that takes no hint."""

    LITTER = """
import os, subprocess, sys, time
child = '''
import os, signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
block = SharedMemory(create=True, size=4096)
with open({said!r} + ".new", "w") as file:
    file.write(f"{{os.getpid()}} {{block.name}}")
os.rename({said!r} + ".new", {said!r})
time.sleep(600)
'''
subprocess.Popen([sys.executable, "-c", child])
while not os.path.exists({said!r}):
    time.sleep(0.01)
{end}
"""

    def code(self, folder: Path, end: str = "time.sleep(600)") -> str:
        return self.LITTER.format(said=str(folder / "said"), end=end)

    def litter(self, folder: Path) -> tuple[int, Path]:
        """The child and the shared memory, once they are there."""
        wait_until(lambda: (folder / "said").exists())
        pid, name = (folder / "said").read_text().split()
        return int(pid), Path("/dev/shm") / name

    async def test_when_it_is_told_to_stop(self, tmp_path):
        server = await started(tmp_path, self.code(tmp_path))
        child, block = self.litter(tmp_path)
        assert block.exists() and not gone(child)
        await server.stop()
        assert gone(server.pid) and gone(child) and not block.exists()

    def test_when_its_parent_is_killed(self, tmp_path):
        folder = stand_in(tmp_path / "stand-in", self.code(tmp_path))
        command = [sys.executable, "-c", PARENT, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ), text=True) as parent:
            assert parent.stdout is not None
            guard = int(parent.stdout.readline())
            child, block = self.litter(tmp_path)
            os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: gone(guard))
        assert gone(child) and not block.exists()

    async def test_when_it_is_killed_itself_and_its_exit_code_is_told(self, tmp_path):
        server = await started(tmp_path, self.code(tmp_path, "os.kill(os.getpid(), 9)"))
        assert await server.ended() == 137
        child, block = self.litter(tmp_path)
        assert gone(child) and not block.exists()
