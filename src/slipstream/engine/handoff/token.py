"""The secret that the engines of one run share, in the run folder: who can read that may ask for blocks."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def run_token(run_folder: Path) -> str:
    """The run's token, made by whichever engine comes first; readable by its user only."""
    file = run_folder / "endpoints" / "handoff-token"
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(f".{os.getpid()}.tmp")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(secrets.token_urlsafe(32))
    try:
        os.link(fresh, file)  # never half-written, and the first one wins
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
    return file.read_text()
