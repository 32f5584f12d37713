"""`slipstream drain`: tell one replica of a run that it should get no new requests, and say when it is empty."""

from __future__ import annotations

import asyncio
from pathlib import Path

from slipstream.errors import ConfigError, EngineUnavailable
from slipstream.serving.client import HttpEngine
from slipstream.serving.members import read_endpoint

POLL_S = 0.5


def drain(run_folder: Path, replica: str, undo: bool) -> str:
    """Returns what was done, once nothing runs there any more. Raises ConfigError when there is no such replica now."""
    file = run_folder / "endpoints" / f"{replica}.json"
    try:
        endpoint = read_endpoint(file)
    except EngineUnavailable as error:
        there = ", ".join(sorted(other.stem for other in file.parent.glob("*.json"))) or "none"
        raise ConfigError(f"no replica {replica!r} of {run_folder} is up (there: {there}): {error}") from None
    return asyncio.run(_drain(HttpEngine(endpoint.url, endpoint.token), replica, undo))


async def _drain(engine: HttpEngine, replica: str, undo: bool) -> str:
    async with engine:
        await engine.drain(on=not undo)
        if undo:
            return f"{replica} takes requests again"
        while (state := await engine.state()).running + state.waiting:  # noqa: ASYNC110 (another process: there is no event)
            await asyncio.sleep(POLL_S)
        return f"{replica} is drained: no request runs there; take it back with --undo"
