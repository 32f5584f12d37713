"""What import-linter cannot say: it knows packages of others only as a whole."""

from __future__ import annotations

from pathlib import Path

import slipstream

SEVERAL = {"parallel", "trainer", "transport"}


def test_only_what_is_made_of_several_processes_touches_torch_distributed():
    root = Path(slipstream.__file__).parent
    users = {file.relative_to(root).parts[0] for file in root.rglob("*.py") if "torch.distributed" in file.read_text()}
    assert "parallel" in users and users <= SEVERAL
