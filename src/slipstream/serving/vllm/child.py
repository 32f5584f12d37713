"""vLLM's server as a child of this process: found by its interpreter, with our plugin on its path, gone when we are.

The plugin needs neither an installation nor a change of vLLM's environment: a folder of our own, first on PYTHONPATH, holds a link to this
package and the metadata that names the entry point. Nothing else of our environment can be imported through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import slipstream
from slipstream.errors import ConfigError, EngineUnavailable
from slipstream.serving.vllm.api import Api

ENTRY_POINTS = "[vllm.general_plugins]\nslipstream = slipstream.serving.vllm.plugin:register\n"
STOP_S = 30.0
"""More than all of the guard's deadlines together."""
POLL_S = 0.25


def plugin_folder(folder: Path) -> Path:
    """Make the folder for PYTHONPATH."""
    metadata = folder / f"slipstream-{slipstream.__version__}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: slipstream\nVersion: {slipstream.__version__}\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "slipstream").symlink_to(Path(slipstream.__file__).parent, target_is_directory=True)
    return folder


def environment(plugin: Path, extra: Mapping[str, str], capturing: bool = False) -> dict[str, str]:
    """Of vLLM's processes. `extra` is the user's (engine.env). `capturing`: routing is recorded in the model runner that the plugin knows,
    which on GPUs is not the one that vLLM 0.32 takes by itself."""
    chosen = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if capturing else {}
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", **chosen, **extra}
    paths = [str(plugin), *filter(None, [extra.get("PYTHONPATH")])]  # not ours: it may hold another torch
    env.pop("VLLM_API_KEY", None)  # the socket is ours alone, and it would guard the routes that we ask
    plugins = env.get("VLLM_PLUGINS")
    if plugins is not None and "slipstream" not in plugins.split(","):
        env["VLLM_PLUGINS"] = f"{plugins},slipstream"
    # pause, weight transfer and the worker extension are behind this
    return {**env, "PYTHONPATH": os.pathsep.join(paths), "VLLM_SERVER_DEV_MODE": "1", "SLIPSTREAM_PARENT": str(os.getpid())}


class Server:
    """One running vLLM server, below its guard."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    @classmethod
    async def start(cls, python: Path, argv: Sequence[str], env: Mapping[str, str]) -> Server:
        """It speaks on our standard output and error, away from the signals of our terminal."""
        command = [str(python), str(Path(__file__).with_name("guard.py").resolve()), *argv]
        return cls(await asyncio.create_subprocess_exec(*command, env=dict(env), stdin=asyncio.subprocess.DEVNULL, start_new_session=True))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> int:
        return await self._process.wait()

    async def healthy(self, api: Api, timeout_s: float) -> None:
        """Wait for the first good answer. Raises ConfigError: it ended, as it will again. EngineUnavailable: the time is over."""
        ended = asyncio.ensure_future(self.ended())
        try:
            async with asyncio.timeout(timeout_s):
                while not await api.healthy():
                    if ended.done():
                        raise ConfigError(f"vLLM ended with exit code {ended.result()} before it served; its own words are above")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EngineUnavailable(f"vLLM did not answer within engine.start_timeout_s = {timeout_s:g}") from None
        finally:
            ended.cancel()

    async def stop(self) -> None:
        """Has the guard end it and all that it started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
