"""The route that the adapter adds to vLLM's server, over objects with the fields of vLLM 0.32's output processor."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

from slipstream.serving.vllm.middleware import ROUTE, Spans


async def ask(path: str, **query: str) -> list[dict[str, Any]]:
    """What is sent for a request. One that passes through is answered with 418."""
    state = SimpleNamespace(weight_version_starts=[("1", 0), ("2", 7)])
    known = SimpleNamespace(external_req_ids={"generate-tokens-a/1 é": ["a-x"]}, request_states={"a-x": state})
    app = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(output_processor=known)))
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def through(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418})

    scope = {"type": "http", "path": path, "query_string": urlencode(query).encode(), "app": app}
    await Spans(through)(scope, None, send)  # type: ignore[arg-type]
    return sent


async def test_it_says_which_version_sampled_which_tokens_of_a_request_that_runs():
    start, body = await ask(ROUTE, id="generate-tokens-a/1 é")
    assert start["status"] == 200 and json.loads(body["body"]) == {"spans": [["1", 0], ["2", 7]]}
    assert json.loads((await ask(ROUTE, id="generate-tokens-b"))[1]["body"]) == {"spans": []}


async def test_every_other_route_is_vllms():
    assert [message["status"] for message in await ask("/health")] == [418]
