"""Compiles and loads the C files in `kernels/`, and decides whether a call may use it.

It knows no op: each op module passes pointers and sizes. The shared library lies in the user's cache, named by a hash of the
source, the flags and the processor, so that a changed source or another machine gets its own; it is written under a temporary
name and renamed, so that processes starting together cannot see half a file.

Cache: $SLIPSTREAM_CACHE, else $XDG_CACHE_HOME/slipstream, else ~/.cache/slipstream; where that cannot be written, as in some containers,
a private folder among the temporary files. Compiler: $CC, else `cc`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import StateError

KERNELS = Path(__file__).with_name("kernels")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-std=gnu11")
LANES = 8
"""Feature counts must be multiples of it: half of the widest vectors, all of the others."""

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "large_pages": (None, [_P, _I]),
    "rms_norm": (None, [_P] * 3 + [_I] * 4 + [_F]),
    "rope": (None, [_P] * 6 + [_I] * 7),
    "rms_norm_backward": (ctypes.c_int, [_P] * 5 + [_I] * 4 + [_F]),
    "rope_backward": (None, [_P] * 6 + [_I] * 5),
    "write_kv": (ctypes.c_int, [_P] * 5 + [_I] * 5),
    "paged_attention": (ctypes.c_int, [_P] * 7 + [_I] * 9 + [_F]),
    "paged_attention_bf16": (ctypes.c_int, [_P] * 7 + [_I] * 9 + [_F]),
    "lookup": (None, [_P] * 6 + [_I] * 3 + [_P] + [_I] * 2 + [_P]),
    "logit_statistics": (ctypes.c_int, [_P] * 6 + [_I] * 2),
    "logit_slopes": (None, [_P] * 5 + [_I] * 2),
    "experts": (ctypes.c_int, [_P] * 8 + [_I] * 5),
    "combine_experts": (ctypes.c_int, [_P] * 4 + [_I] * 4),
    "experts_backward": (ctypes.c_int, [_P] * 11 + [_I] * 5),
    "doc_attention": (ctypes.c_int, [_P] * 6 + [_I] * 8 + [_F]),
    "doc_attention_backward": (ctypes.c_int, [_P] * 10 + [_I] * 8 + [_F]),
}
_ERRORS = {-1: "out of memory", -2: "an index lies outside its array (expert id, slot, block, query range or target)"}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, compiled at first use; None (with one warning) when this machine cannot compile them."""
    try:
        path = _compiled(_cache_folder())
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        warnings.warn(
            f"slipstream: the native CPU kernels could not be compiled, so the much slower torch reference serves instead. "
            f"Install a C compiler (cc, or name one in CC), or name a folder that can be written in SLIPSTREAM_CACHE. Reason: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def native_for(*tensors: Tensor, training: bool = False) -> ctypes.CDLL | None:
    """The kernels if they can serve these inputs: fp32 on the CPU, and no gradient wanted unless the op has a native one (`training`).

    None: take the torch reference.
    """
    grad = not training and torch.is_grad_enabled()
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or not tensor.is_cpu or (grad and tensor.requires_grad):
            return None
    return library()


def loaded() -> ctypes.CDLL:
    """The kernels, where an earlier call has already chosen them."""
    kernels = library()
    if kernels is None:
        raise StateError("the native kernels were chosen but are not loaded")
    return kernels


def check(code: int, op: str) -> None:
    """Raise StateError when a kernel refused its input."""
    if code:
        raise StateError(f"{op}: {_ERRORS.get(code, f'error {code}')}")


def in_large_pages(x: Tensor) -> Tensor:
    """`x`, with its memory on the CPU in pages of 2 MiB where the system has them: for what is read from end to end again and again.

    Cheapest before anything is written; afterwards the system copies what is there, once.
    """
    kernels = library() if x.is_cpu else None
    if kernels is not None:
        kernels.large_pages(x.data_ptr(), x.nbytes)
    return x


def dense_tokens(x: Tensor) -> Tensor:
    """`x` [T, d] or [T, H, d] itself if each token's features lie dense in memory (tokens may be strided: a slice of a fused qkv),
    else a copy.
    """
    stride, shape = x.stride(), x.shape
    dense = stride[-1] == 1 and (len(shape) == 2 or shape[1] == 1 or stride[1] == shape[2])
    return x if dense else x.contiguous()


def _cache_folder() -> Path:
    named = os.environ.get("SLIPSTREAM_CACHE")
    if named:
        return Path(named)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _temporary_folder()
    return folder if os.access(folder, os.W_OK) else _temporary_folder()


def _temporary_folder() -> Path:
    """One that nobody else can write: what lies in it is loaded as code. Raises OSError when somebody else has made it."""
    folder = Path(tempfile.gettempdir()) / f"slipstream-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} is not this user's own, private folder: delete it, or name another one in SLIPSTREAM_CACHE")
    return folder


def _compiled(folder: Path) -> Path:
    compiler = os.environ.get("CC", "cc")
    sources = sorted(KERNELS.glob("*.[ch]"))
    identity = "\n".join((*(source.read_text() for source in sources), compiler, *FLAGS, platform.machine(), _cpu_flags()))
    path = folder / f"native-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / path.name
        command = [compiler, *FLAGS, *(str(source) for source in sources if source.suffix == ".c"), "-o", str(fresh), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        fresh.replace(path)
    return path


def _cpu_flags() -> str:
    """What -march=native depends on: a home folder may be shared by different machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    return next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
