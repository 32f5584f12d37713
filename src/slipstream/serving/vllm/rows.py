"""Routing rows of finished requests, from vLLM's workers.

One call to the workers brings the rows of every request that has finished meanwhile: while one is under way, the next ones gather.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from slipstream.errors import EngineUnavailable
from slipstream.serving.vllm.api import Api
from slipstream.transport.threads import off_loop
from slipstream.types import GenerateRequest, Routing


class RowFetcher:
    """`await fetch(request, sampled)` for each finished request."""

    def __init__(self, api: Api):
        self._api = api
        self._waiting: dict[str, asyncio.Future[Routing | None]] = {}
        self._wanted: dict[str, int] = {}
        self._fetching: asyncio.Task[None] | None = None

    async def fetch(self, request: GenerateRequest, sampled: int) -> Routing | None:
        """Rows `routing_from .. prompt + sampled - 2`; those that no worker has are marked as unknown. Raises EngineUnavailable."""
        start, total = request.routing_from, len(request.prompt_T) + sampled - 1
        future = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        self._wanted[request.id] = start
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._drain())
        found = await future
        return None if found is None else cut(found, start, max(start, total))

    async def _drain(self) -> None:
        while self._waiting:
            waiting, wanted = self._waiting, self._wanted
            self._waiting, self._wanted = {}, {}
            try:
                answers = await self._api.call_workers("slipstream_rows", json.dumps(wanted))
                for name, future in waiting.items():
                    found = _find(answers, name)
                    rows = None if found is None else await off_loop(len(found["ids"]), partial(_unpacked, found))
                    if not future.done():
                        future.set_result(rows)
            except Exception as error:
                for future in waiting.values():
                    if not future.done():
                        future.set_exception(EngineUnavailable(f"vLLM has the tokens and not their routing: {error}"))


def _find(answers: list[Any], name: str) -> Mapping[str, Any] | None:
    """What the first worker that has the request says (tensor-parallel workers say the same)."""
    return next((answer[name] for answer in answers if answer and name in answer), None)


def _unpacked(found: Mapping[str, Any]) -> Routing:
    kind = np.uint8 if found["dtype"] == "uint8" else np.uint16
    ids_TLK: Any = np.frombuffer(base64.b64decode(found["ids"]), kind).reshape(found["shape"])
    valid_T = np.frombuffer(base64.b64decode(found["valid"]), np.bool_)
    return Routing(found["start"], ids_TLK, valid_T)


def cut(rows: Routing, start: int, end: int) -> Routing:
    """Rows start .. end - 1: those beyond are of tokens that were computed and not delivered; those that are missing are unknown."""
    ids_TLK: Any = rows.ids_TLK[start - rows.start : end - rows.start]
    valid_T = rows.valid_T[start - rows.start : end - rows.start]
    missing = end - start - len(ids_TLK)
    if missing:
        ids_TLK = np.concatenate([ids_TLK, np.zeros((missing, *ids_TLK.shape[1:]), ids_TLK.dtype)])
        valid_T = np.concatenate([valid_T, np.zeros(missing, np.bool_)])
    return Routing(start, ids_TLK, valid_T)
