"""The run folder: created once, resumed by path, never overwritten.

runs/<name>/config.toml      the resolved configuration (paths absolute)
runs/<name>/manifest.json    what produced it: versions, hardware, configuration hash, one entry for each start
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from slipstream.config import RunConfig, load, to_toml
from slipstream.config.vllm import VllmConfig
from slipstream.errors import ConfigError
from slipstream.transport.files import write_atomically

CHANGEABLE = (
    "max_steps",
    "stop_at_eval",
    "max_minutes",
    "checkpoint.",
    "cluster.",
    "eval.interval",
    "engine.disaggregation.",
    "engine.ep.",
    "engine.host",
    "engine.kv_memory_mib",
    "engine.port",
    "engine.replicas",
    "orchestrator.max_fruitless_groups",
    "orchestrator.max_freeze_s",
    "router.",
    "trainer.batch_timeout_s",
    "trainer.logprob_chunk_tokens",
    "trainer.max_bad_steps",
    "trainer.offload.",
    "trainer.optim.lr",
    "trainer.recompute",
    "trainer.stall_timeout_s",
    "trainer.threads",
)
"""Settings that may differ when a run is resumed: among them each one that an error message says to change."""
ENDING_S = 60.0
"""How long a new start waits for the roles of a killed supervisor: the trainer ends its step and writes a checkpoint."""
UNSEEN_S = 5.0
"""How long somebody may hold the folder whom /proc does not show: a process that is just ending, which takes its time on a busy machine."""
PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "aiohttp", "pyarrow")


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Hold a run folder for the block, made if it is missing, against every other `slipstream rl`. Yields the descriptor that holds it.

    A process that inherits the descriptor holds the folder too, so that no second run starts while a role of the first one lives. The
    kernel lets go however they end. Raises ConfigError, naming them, while others hold it; roles whose supervisor is gone are on
    their way out and are waited for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(folder, handle)
        try:
            yield handle
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()  # where nothing came of it
    finally:
        os.close(handle)


def _lock(folder: Path, handle: int) -> None:
    started = known = time.monotonic()
    told = False
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            others, now = holders(folder), time.monotonic()
        known = now if others else known
        names = ", ".join(f"{title} (process {pid})" for pid, title in others.items()) or "another process"
        if not all(title.startswith("slipstream ") for title in others.values()) or now > known + UNSEEN_S:
            raise ConfigError(
                f"two runs on one folder: {folder} is in use by {names}. Wait for it, stop it, or choose another name with --set name=..."
            )
        if now > started + ENDING_S:
            raise ConfigError(
                f"{folder} is still in use by {names}, left over from a run whose supervisor was killed and not ended within "
                f"{ENDING_S:g} s. End them (kill -9 {' '.join(map(str, others))}) and try again"
            )
        if others and not told:
            print(f"waiting for {names} of a run whose supervisor was killed", file=sys.stderr, flush=True)
            told = True
        time.sleep(0.2)


def holders(folder: Path) -> dict[int, str]:
    """Other processes that have the folder open, by process id: 'slipstream trainer' for a role, else a command line. Linux only."""
    found = {}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        pid = int(descriptor.parts[2])
        with contextlib.suppress(OSError, psutil.Error):  # ended meanwhile, or another user's
            if pid != os.getpid() and os.readlink(descriptor) == str(folder.resolve()):
                found[pid] = " ".join(psutil.Process(pid).cmdline()).strip()
    return {pid: title for pid, title in found.items() if title}  # without one it is just ending


def check_new(config: RunConfig) -> None:
    """Raises ConfigError when the folder already holds a run."""
    if (config.folder / "config.toml").exists():
        raise ConfigError(
            f"run folder {config.folder} already holds a run. Continue it with --resume, choose another name with --set name=..., "
            "or start it afresh with --clean (deletes the folder)"
        )


def create(config: RunConfig) -> Path:
    """Lay out the folder of a new run and write its configuration. Raises ConfigError, see `check_new`."""
    check_new(config)
    folder = config.folder
    for part in ("logs", "endpoints", "weights", "batches", "rollouts", "checkpoints"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.toml", to_toml(config).encode())
    _record_start(folder, config)
    return folder


def check_same(config: RunConfig) -> None:
    """Raises ConfigError: the folder holds no run, or one with other settings."""
    folder = config.folder
    if not (folder / "config.toml").exists():
        raise ConfigError(f"--resume: {folder} holds no run (no config.toml). Leave --resume out to start it")
    stored = load(RunConfig, [folder / "config.toml"])
    changed = differences(stored.model_dump(mode="json"), config.model_dump(mode="json"))
    forbidden = [line for key, line in changed if not key.startswith(CHANGEABLE)]
    if forbidden:
        raise ConfigError(
            f"--resume: these settings differ from those in {folder / 'config.toml'} and would make it another run:\n  "
            + "\n  ".join(forbidden)
        )


def reopen(config: RunConfig) -> Path:
    """The folder of an existing run. Raises ConfigError, see `check_same`."""
    check_same(config)
    folder = config.folder
    write_atomically(folder / "config.toml", to_toml(config).encode())
    for endpoint in (folder / "endpoints").glob("*.json"):
        endpoint.unlink()
    (folder / "batches" / "finish.json").unlink(missing_ok=True)
    _record_start(folder, config)
    return folder


def check_cleanable(config: RunConfig) -> None:
    """Raises ConfigError for a folder that does not look like one of a run."""
    folder = config.folder
    if folder.exists() and not (folder / "config.toml").exists() and any(folder.iterdir()):
        raise ConfigError(f"--clean: {folder} is not empty and holds no config.toml, so it is not a run; delete it yourself if you mean to")


def clean(config: RunConfig) -> None:
    """Empty the folder of a run. Raises ConfigError, see `check_cleanable`."""
    check_cleanable(config)
    for path in config.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def open_config(folder: Path) -> RunConfig:
    """The configuration stored in a run folder. Raises ConfigError when there is none."""
    if not (folder / "config.toml").exists():
        raise ConfigError(f"{folder} is not a run folder: it has no config.toml")
    return load(RunConfig, [folder / "config.toml"])


def absolute(config: RunConfig) -> RunConfig:
    """The same configuration with absolute paths, so that every role finds them from anywhere."""
    engine = config.engine
    if isinstance(engine, VllmConfig):  # not resolved: an interpreter that is a link is that of its environment
        engine = engine.replace(python=engine.python.absolute())
    model = config.model.replace(path=config.model.path.resolve())
    return config.replace(model=model, engine=engine, runs_dir=config.runs_dir.resolve())


def differences(old: Any, new: Any, prefix: str = "") -> list[tuple[str, str]]:
    """(key, 'key: old -> new') for every leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [item for key in keys for item in differences(old.get(key), new.get(key), f"{prefix}{key}.")]
    key = prefix.removesuffix(".")
    return [] if old == new else [(key, f"{key}: {old!r} -> {new!r}")]


def _record_start(folder: Path, config: RunConfig) -> None:
    path = folder / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"starts": []}
    manifest["config_fingerprint"] = config.fingerprint()
    manifest["starts"].append(
        {
            "time": time.time(),
            "commit": _commit(),
            "python": platform.python_version(),
            "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
            "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "system": platform.platform()},
        }
    )
    write_atomically(path, json.dumps(manifest, indent=1).encode())


def _commit() -> str | None:
    """Commit of the source tree that runs, with '+' when it is modified; None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+"], capture_output=True, text=True, timeout=10, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return result.stdout.strip() or None
