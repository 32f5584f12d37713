"""A route more in vLLM's server (--middleware): which policy version sampled which tokens of a request that runs.

vLLM's own streams say so with their last piece only. Runs in vLLM's process and imports none of it; what it reads of the output processor
(0.32) is what the last piece is made of.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

ROUTE = "/slipstream/spans"
"""GET with ?id=, the id that vLLM knows. Answers {"spans": [[version, first token], ...]}; none when it has ended."""
_JSON = [(b"content-type", b"application/json")]

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Spans:
    """ASGI; everything but the route passes through."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
            return
        known = scope["app"].state.engine_client.output_processor
        name = parse_qs(scope["query_string"].decode())["id"][0]
        spans = [span for internal in known.external_req_ids.get(name, ()) for span in known.request_states[internal].weight_version_starts]
        await send({"type": "http.response.start", "status": 200, "headers": _JSON})
        await send({"type": "http.response.body", "body": json.dumps({"spans": spans}).encode()})
