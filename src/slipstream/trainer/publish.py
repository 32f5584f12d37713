"""Publishing a policy version: HF-named tensors into weights/vN, whole or not at all.

Knows nothing of training, nor of when a version is old: the orchestrator knows what engines read, and retires the rest.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from slipstream.models.hf import write_stream
from slipstream.models.tensor_file import TensorStream
from slipstream.transport.files import naming
from slipstream.transport.weights import TENSORS_FILE, seal
from slipstream.types import PolicyVersion


def publish(weights: Path, number: int, tensors: TensorStream, parent: int | None) -> PolicyVersion:
    """Write `tensors` (HF names), one at a time, as version `number` into the folder `weights`. Readers see the whole version or none.

    Raises OSError, naming the file, when it cannot be written (a full disk among others).
    """
    temp = weights / f".tmp-v{number:06d}"
    if temp.exists():
        shutil.rmtree(temp)
    temp.mkdir(parents=True)
    with naming(temp / TENSORS_FILE):
        write_stream(temp, tensors)
    return seal(temp, weights, number, parent)
