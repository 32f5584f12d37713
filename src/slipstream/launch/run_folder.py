"""The run folder: created once, resumed by path, never overwritten.

runs/<name>/config.toml      the resolved configuration (paths absolute)
runs/<name>/manifest.json    what produced it: versions, hardware, configuration hash, one entry for each start
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.config import RunConfig, load, to_toml
from slipstream.errors import ConfigError

CHANGEABLE = (
    "max_steps",
    "stop_at_eval",
    "checkpoint.",
    "eval.interval",
    "engine.host",
    "engine.port",
    "engine.replicas",
    "orchestrator.max_fruitless_groups",
    "orchestrator.max_freeze_s",
    "trainer.batch_timeout_s",
    "trainer.max_bad_steps",
    "trainer.optim.lr",
)
"""Settings that may differ when a run is resumed: among them each one that an error message says to change."""
PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "aiohttp", "pyarrow")


@contextmanager
def opened(config: RunConfig, resume: bool) -> Iterator[Path]:
    """The folder of a new run, or with `resume` of an earlier one, held against every other `slipstream rl` for the block.

    Raises ConfigError: see `held`, `create` and `reopen`.
    """
    if not resume:
        config.folder.mkdir(parents=True, exist_ok=True)
    with held(config.folder):
        yield reopen(config) if resume else create(config)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a run folder for the block; the kernel lets go of it however the process ends. Nothing to hold where there is no folder.

    Raises ConfigError when another process holds it.
    """
    if not folder.is_dir():
        yield
        return
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"two runs on one folder: another `slipstream rl` is running in {folder}. Wait for it, stop it, or choose another name "
                "with --set name=..."
            ) from None
        yield
    finally:
        os.close(handle)


def create(config: RunConfig) -> Path:
    """Make the folder of a new run and write its configuration. Raises ConfigError when it already holds a run."""
    folder = config.folder
    if (folder / "config.toml").exists():
        raise ConfigError(
            f"run folder {folder} already holds a run. Continue it with --resume, choose another name with --set name=..., "
            "or start it afresh with --clean (deletes the folder)"
        )
    for part in ("logs", "endpoints", "weights", "batches", "rollouts", "checkpoints"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    _write(folder / "config.toml", to_toml(config))
    _record_start(folder, config)
    return folder


def reopen(config: RunConfig) -> Path:
    """The folder of an existing run, checked to be the same run. Raises ConfigError: no such run, or settings differ."""
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
    _write(folder / "config.toml", to_toml(config))
    for endpoint in (folder / "endpoints").glob("*.json"):
        endpoint.unlink()
    (folder / "batches" / "finish.json").unlink(missing_ok=True)
    _record_start(folder, config)
    return folder


def clean(config: RunConfig) -> None:
    """Delete a run. Raises ConfigError for a folder that does not look like one, and while the run goes on."""
    folder = config.folder
    if not folder.exists():
        return
    if not (folder / "config.toml").exists() and any(folder.iterdir()):
        raise ConfigError(f"--clean: {folder} is not empty and holds no config.toml, so it is not a run; delete it yourself if you mean to")
    with held(folder):
        shutil.rmtree(folder)


def open_config(folder: Path) -> RunConfig:
    """The configuration stored in a run folder. Raises ConfigError when there is none."""
    if not (folder / "config.toml").exists():
        raise ConfigError(f"{folder} is not a run folder: it has no config.toml")
    return load(RunConfig, [folder / "config.toml"])


def absolute(config: RunConfig) -> RunConfig:
    """The same configuration with absolute paths, so that every role finds them from anywhere."""
    return config.replace(model=config.model.replace(path=config.model.path.resolve()), runs_dir=config.runs_dir.resolve())


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
    _write(path, json.dumps(manifest, indent=1))


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


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
