"""Wrong keys, models, ids and bodies, and clients that go away: a typed error each, counted, and the gateway lives."""

from __future__ import annotations

import asyncio
import io
import json
import re

import aiohttp
import openai
import pytest

from slipstream.config.gateway import GatewayConfig
from slipstream.observe import registry
from slipstream.serving.api.http import MAX_BODY_BYTES
from slipstream.serving.gateway.wire import decode_turns
from slipstream.types import Sampling
from tests.unit.gateway.conftest import TOKEN, Gate
from tests.unit.server.scripted import ScriptedEngine
from tests.waiting import until

ASK = [{"role": "user", "content": "Hello"}]
CHAT = {"model": "policy", "messages": ASK}
MESSAGE = {**CHAT, "max_tokens": 50}


def errors(gate: Gate) -> dict[str, int]:
    return dict(gate.gateway.counts.errors)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/sessions/r/v1/chat/completions"])
@pytest.mark.parametrize("key", ["", "wrong", "té"])
async def test_a_wrong_or_missing_key_is_a_401(start, path, key):
    gate = await start("a")
    answer = await gate.post(path, MESSAGE, 401, key)
    assert answer["error"]["type"] == "authentication_error" and errors(gate) == {"invalid_api_key": 1}
    assert not gate.engine.added and not gate.gateway.sessions


@pytest.mark.parametrize(("method", "path"), [("post", "/sessions"), ("get", "/sessions/r"), ("delete", "/sessions/r")])
async def test_routes_on_sessions_take_the_gateways_token_and_not_a_sessions_key(start, method, path):
    gate = await start()
    session = gate.open()
    async with gate.http.request(method, path, headers={"Authorization": f"Bearer {session.api_key}"}, json={}) as response:
        assert response.status == 401
    async with gate.http.get("/v1/models") as response:
        assert response.status == 401


async def test_the_models_are_the_policy_and_another_name_is_a_404_in_each_apis_shape(start):
    gate = await start("a", "b")
    client = await gate.openai()
    assert [model.id async for model in client.models.list()] == ["policy"]
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not here; this gateway serves 'policy'") as caught:
        await client.chat.completions.create(model="gpt-9", messages=ASK)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    answer = await gate.post("/v1/messages", {**MESSAGE, "model": "claude-9"}, 404)
    assert (answer["type"], answer["error"]["type"]) == ("error", "not_found_error") and "'policy'" in answer["error"]["message"]
    assert errors(gate) == {"model_not_found": 2}


async def test_a_key_of_one_session_does_not_open_another(start):
    gate = await start("a")
    one, other = gate.open("one"), gate.open("other")
    answer = await gate.post("/sessions/other/v1/chat/completions", CHAT, 403, one.api_key)
    assert "session 'one'" in answer["error"]["message"]
    await gate.post("/v1/chat/completions", CHAT, 403, one.api_key, **{"X-Session-Id": "other"})
    assert not other.turns


async def test_the_sessions_key_alone_or_with_its_name_finds_it(start):
    gate = await start("a", "b", "c")
    session = gate.open("run 1/group 2")
    await gate.post("/v1/chat/completions", CHAT, key=session.api_key)
    await gate.post("/v1/chat/completions", CHAT, key=session.api_key, **{"X-Session-Id": "run 1/group 2"})
    client = await gate.openai(session)
    await client.chat.completions.create(**CHAT)
    assert len(session.turns) == 3 and "%2F" in session.base_url


@pytest.mark.parametrize("path", ["/sessions/mine/v1/chat/completions", "/v1/chat/completions"])
async def test_with_the_token_a_new_name_opens_a_session_that_samples_as_it_is_asked(start, path):
    gate = await start("a", "b")
    headers = {"X-Session-Id": "mine"} if path.startswith("/v1") else {}
    for temperature in (0.0, 0.5):
        await gate.post(path, {**CHAT, "temperature": temperature}, **headers)
    assert len(gate.gateway.sessions["mine"].turns) == 2
    assert [request.sampling.temperature for request in gate.engine.added] == [0.0, 0.5]


async def test_without_a_name_the_token_gets_answers_that_nobody_records(start):
    gate = await start("a")
    assert (await gate.post("/v1/chat/completions", CHAT))["choices"][0]["message"]["content"] == "a"
    assert not gate.gateway.sessions and gate.gateway.counts.turns == 0


async def test_a_session_is_opened_looked_at_and_ended_over_http_and_gives_its_turns_as_tokens(start):
    gate = await start("a", "b")
    opened = await gate.post("/sessions", {"id": "x", "salt": 4, "sampling": {"temperature": 0.5}, "max_turns": 2})
    assert opened["base_url"] == f"{gate.gateway.url}/sessions/x/v1" and opened["model"] == "policy"
    await gate.post("/sessions/x/v1/chat/completions", {**CHAT, "temperature": 0.1}, key=opened["api_key"])
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with gate.http.get("/sessions/x", headers=headers) as response:
        seen = await response.json()
    assert (seen["turns"], seen["sampled_tokens"], seen["truncated"]) == (1, 2, False)
    async with gate.http.delete("/sessions/x", headers=headers) as response:
        [turn] = decode_turns(await response.read())
    assert turn.completion.tokens_N.tolist() == gate.tokenizer.encode("a<|im_end|>").tolist()
    assert turn.sampling.temperature == 0.5 and gate.engine.added[0].salt == 4
    for method in ("get", "delete"):
        async with gate.http.request(method, "/sessions/x", headers=headers) as response:
            assert response.status == 410
    assert (await gate.post("/sessions", {"id": "x"}, 410))["error"]["code"] == "session_ended"
    await gate.post("/sessions/x/v1/chat/completions", CHAT, 410)
    await gate.post("/sessions/x/v1/chat/completions", CHAT, 410, opened["api_key"])


async def test_an_id_in_use_and_one_that_is_no_id_are_refused(start):
    gate = await start()
    await gate.post("/sessions", {"id": "x"})
    assert (await gate.post("/sessions", {"id": "x"}, 409))["error"]["code"] == "session_exists"
    for bad in ("", " ", "a b", "é", "x" * 201):
        await gate.post("/v1/chat/completions" if not bad.strip() else "/sessions", {"id": bad} if bad.strip() else b"{", 400)
    assert (await gate.post("/sessions", {"id": "y", "sampling": {"tepid": 1}}, 400))["error"]["param"] is not None


async def test_too_many_sessions_are_a_429_and_forgotten_ones_make_room(start, monkeypatch):
    gate = await start("a", "b", config=GatewayConfig(max_sessions=2, idle_s=100))
    for name in ("a", "b"):
        await gate.post("/sessions", {"id": name})
    await gate.post("/sessions", {"id": "c"}, 429)
    gate.gateway.sessions["a"].last_call_s -= 1000
    await gate.post("/sessions", {"id": "c"})
    assert sorted(gate.gateway.sessions) == ["b", "c"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/sessions/r/v1/messages", "/sessions"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"messages": [{"role": "\\ud800"}]}', b"null"])
async def test_garbage_is_a_400_in_the_apis_shape(start, path, body):
    gate = await start("a")
    answer = await gate.post(path, body, 400)
    assert ("type" in answer) == path.endswith("messages") and answer["error"]["message"]
    await gate.post("/v1/chat/completions", CHAT)


async def test_a_body_beyond_the_limit_is_a_413(start):
    gate = await start("a")
    answer = await gate.post("/v1/messages", io.BytesIO(b" " * (MAX_BODY_BYTES + 1)), 413)
    assert answer["error"]["type"] == "request_too_large" and errors(gate) == {"too_large": 1}


async def test_no_such_route_and_a_wrong_method_are_404_and_405(start):
    gate = await start()
    await gate.post("/v1/embeddings", {}, 404)
    async with gate.http.get("/v1/messages") as response:
        assert response.status == 405 and (await response.json())["type"] == "error"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_client_that_goes_away_in_the_middle_of_a_stream_aborts_its_call_and_leaves_the_session_usable(start, path):
    gate = await start(engine=ScriptedEngine(lambda request: [5] * 400 if len(gate.engine.added) == 1 else [6], seq_len=512))
    session = gate.open("r")
    async with aiohttp.ClientSession(gate.gateway.url) as http:
        sent = {**MESSAGE, "max_tokens": 400, "stream": True}
        response = await http.post(path, json=sent, headers={"X-Api-Key": session.api_key})
        await response.content.readline()
        response.close()
    await until(lambda: gate.engine.aborted)
    await until(lambda: errors(gate) == {"disconnected": 1})
    assert gate.engine.aborted == ["r/0"] and not session.turns and gate.gateway.counts.lost_tokens > 0
    assert gate.gateway.metrics()["gateway/streams/open"] == 0 and session.failure is None
    await gate.post("/v1/chat/completions", CHAT, key=session.api_key)
    assert len(session.turns) == 1 and not session.running


async def test_a_client_that_goes_away_before_its_answer_aborts_its_call(start):
    gate = await start("a", "b")
    session = gate.open("r", sampling=Sampling())
    gate.driver.pause()
    asking = asyncio.create_task(gate.post("/v1/chat/completions", CHAT, key=session.api_key))
    await until(lambda: gate.engine.running)
    asking.cancel()
    await until(lambda: gate.engine.aborted == ["r/0"])
    gate.driver.resume()
    await gate.post("/v1/chat/completions", CHAT, key=session.api_key)
    assert session.failure is None and len(session.turns) == 1


async def test_a_step_that_fails_in_the_middle_of_a_stream_is_an_error_event(start):
    for path, mark in (("/v1/chat/completions", "data: "), ("/v1/messages", "event: error")):
        gate = await start(engine=ScriptedEngine(lambda request: [5] * 100, seq_len=512))
        session = gate.open("r")
        said = b""
        async with gate.http.post(path, json={**MESSAGE, "stream": True}, headers={"X-Api-Key": session.api_key}) as response:
            async for line in response.content:
                said += line
                gate.engine.failures = gate.engine.failures or ([FloatingPointError("overflow")] if b"delta" in line else [])
        assert response.status == 200 and mark in said.decode() and "overflow" in said.decode()
        assert errors(gate) == {"unavailable": 1} and session.failure is not None


async def test_health_and_metrics_need_no_key_and_every_key_is_registered(start):
    gate = await start("a")
    await gate.post("/v1/chat/completions", {**CHAT, "model": "x"}, 404)
    async with gate.http.get("/health") as response:
        assert response.status == 200 and (await response.json())["engine"]["live_version"] == 0
    async with gate.http.get("/metrics") as response:
        text = await response.text()
    for key in gate.gateway.metrics():
        assert registry.find(key) is not None, key
        assert re.search(rf"^slipstream_{key.replace('/', '_')} ", text, re.M), key


async def test_health_says_when_there_is_no_live_version(start):
    gate = await start(engine=ScriptedEngine(lambda _: [1], version=-1))
    async with gate.http.get("/health") as response:
        assert response.status == 503
    assert "no policy version" in json.dumps(await gate.post("/v1/chat/completions", CHAT, 503))
