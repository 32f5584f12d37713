"""The secret that the engines of one run share, in the run folder: who can read that may ask for blocks."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from slipstream.transport.files import write_private


def run_token(run_folder: Path) -> str:
    """The run's token, made by whichever engine comes first; readable by its user only."""
    file = run_folder / "endpoints" / "handoff-token"
    fresh = write_private(file, secrets.token_urlsafe(32))
    try:
        os.link(fresh, file)  # never half-written, and the first one wins
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
    return file.read_text()
