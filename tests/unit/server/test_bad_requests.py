"""Malformed requests get a 4xx that names the field and the value, and the server lives."""

from __future__ import annotations

import io
import json

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.serving.api.http import MAX_BODY_BYTES
from slipstream.transport.codec import encode_request
from slipstream.transport.wire import encode
from slipstream.types import GenerateRequest, Sampling

ASK = [{"role": "user", "content": "Hello"}]
BAD_CHATS = [
    ({}, "messages", "missing"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hi"}, "messages", "'hi'"),
    ({"messages": ["hi"]}, "messages[0]", "'hi'"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "None"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "3"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "no images"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls", "list"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, None, "role narrator is unknown"),
    ({"messages": ASK, "temperature": "hot"}, "temperature", "'hot'"),
    ({"messages": ASK, "temperature": -1}, "temperature", "-1"),
    ({"messages": ASK, "top_p": 0}, "top_p", "0"),
    ({"messages": ASK, "n": 1000}, "n", "1000"),
    ({"messages": ASK, "max_tokens": 0}, "max_tokens", "0"),
    ({"messages": ASK, "seed": 1.5}, "seed", "1.5"),
    ({"messages": ASK, "stop": ["a", 3]}, "stop[1]", "3"),
    ({"messages": ASK, "stop": ""}, "stop", "empty"),
    ({"messages": ASK, "tool_choice": "required"}, "tool_choice", "'required'"),
    ({"messages": ASK, "tools": [{"name": "x"}]}, "tools[0]", "function"),
    ({"messages": ASK, "top_logprobs": 5}, "top_logprobs", "5"),
    ({"messages": ASK, "presence_penalty": 1.0}, "presence_penalty", "1.0"),
    ({"messages": ASK, "response_format": {"type": "json_object"}}, "response_format", "json_object"),
]
BAD_COMPLETIONS = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": [1, 10**9]}, "prompt", "1000000000"),
    ({"prompt": [1, -1]}, "prompt", "-1"),
    ({"prompt": [1, 10**30]}, "prompt", "1000000000000000000000000000000"),
    ({"prompt": [[1], [99999]]}, "prompt[1]", "99999"),
    ({"prompt": {"x": 1}}, "prompt", "{'x': 1}"),
    ({"prompt": [1.5]}, "prompt[0]", "1.5"),
    ({"prompt": "a", "echo": True}, "echo", "not supported"),
    ({"prompt": "a", "logprobs": 5}, "logprobs", "5"),
]


@pytest.fixture
async def served(serve):
    return await serve("x")


async def error_of(served, route, body: bytes | io.BytesIO, status=400) -> dict:
    async with served.http.post(route, data=body) as response:
        answer = await response.json()
        assert response.status == status, answer
    return answer["error"]


async def lives(served) -> bool:
    async with served.http.post("/v1/chat/completions", json={"messages": ASK, "user": "u", "unknown_field": 1}) as response:
        return response.status == 200


@pytest.mark.parametrize(("body", "param", "part"), BAD_CHATS)
async def test_a_bad_chat_request_names_its_field(served, body, param, part):
    error = await error_of(served, "/v1/chat/completions", json.dumps(body).encode())
    assert error["param"] in (param, "body" if param == "messages" else param) and part in error["message"], error
    assert error["type"] == "invalid_request_error" and await lives(served)


@pytest.mark.parametrize(("body", "param", "part"), BAD_COMPLETIONS)
async def test_a_bad_completion_request_names_its_field(served, body, param, part):
    error = await error_of(served, "/v1/completions", json.dumps(body).encode())
    assert error["param"] == param and part in error["message"], error
    assert await lives(served)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'"text"', b"[" * 100_000, b'{"messages": [{"role": "\\ud800"}]}']
)
async def test_what_is_not_a_json_object_is_a_400(served, body):
    await error_of(served, "/v1/chat/completions", body)
    assert await lives(served)


def encoded(*args) -> bytes:
    return b"".join(encode(*args))


def bad_wire_messages() -> dict[str, bytes]:
    good = encode_request(GenerateRequest("a", np.array([1], np.int32), Sampling()))
    sampling = msgspec.to_builtins(Sampling())
    meta = {"id": "a", "salt": 0, "routing_from": 0, "sampling": sampling}
    prompt = {"prompt": np.array([1], np.int32)}
    return {
        "empty": b"",
        "text": b"hello",
        "truncated": good[:-1],
        "flipped": good[:-20] + bytes([good[-20] ^ 1]) + good[-19:],
        "another kind": encoded("completion", meta, prompt),
        "no prompt": encoded("generate_request", meta, {}),
        "no meta": encoded("generate_request", {}, prompt),
        "unknown sampling field": encoded("generate_request", {**meta, "sampling": {**sampling, "tepid": 1}}, prompt),
        "sampling is text": encoded("generate_request", {**meta, "sampling": "hot"}, prompt),
        "temperature is text": encoded("generate_request", {**meta, "sampling": {**sampling, "temperature": "hot"}}, prompt),
        "max_tokens is a float": encoded("generate_request", {**meta, "sampling": {**sampling, "max_tokens": 1.5}}, prompt),
        "seed is text": encoded("generate_request", {**meta, "sampling": {**sampling, "seed": "x"}}, prompt),
        "stop is numbers": encoded("generate_request", {**meta, "sampling": {**sampling, "stop": [1]}}, prompt),
        "id is a number": encoded("generate_request", {**meta, "id": 5}, prompt),
        "prompt of floats": encoded("generate_request", meta, {"prompt": np.array([1.5], np.float32)}),
        "prompt of two dimensions": encoded("generate_request", meta, {"prompt": np.array([[1]], np.int32)}),
    }


@pytest.mark.parametrize("name", list(bad_wire_messages()))
async def test_a_bad_wire_message_is_a_400(served, name):
    await error_of(served, "/slipstream/generate", bad_wire_messages()[name])
    assert not served.engine.added and await lives(served)


@pytest.mark.parametrize("body", [{}, {"number": -1}, {"number": "x"}, {"number": 1, "fingerprint": 3, "path": "x"}, []])
async def test_a_bad_admin_body_is_a_400(served, body):
    async with served.http.post("/admin/prepare", json=body, headers={"Authorization": "Bearer the-token"}) as response:
        assert response.status == 400 and (await response.json())["error"]["param"]


async def test_unknown_routes_wrong_methods_and_huge_bodies_have_their_status_and_a_json_reason(served):
    assert "no such route" in (await error_of(served, "/v2/chat", b"{}", status=404))["message"]
    assert "not allowed" in (await error_of(served, "/health", b"{}", status=405))["message"]
    assert "larger" in (await error_of(served, "/v1/completions", io.BytesIO(b"x" * (MAX_BODY_BYTES + 1)), status=413))["message"]
    assert await lives(served)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["messages", "prompt", "temperature", "n", "stop", "tools", "tool_choice", "stream", "logprobs", "max_tokens", "seed"]
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies=st.lists(st.dictionaries(FIELDS, VALUES, max_size=4), min_size=5, max_size=10))
async def test_no_body_makes_the_server_fail(served, bodies):
    for body in bodies:
        for route, default in (("/v1/chat/completions", {"messages": ASK}), ("/v1/completions", {"prompt": "a"})):
            async with served.http.post(route, json={**default, **body}) as response:
                assert response.status in (200, 400), await response.text()
                await response.read()


async def test_a_number_that_no_float_holds_is_the_clients_mistake(served):
    error = await error_of(served, "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e400}')
    assert "out of range" in error["message"] and await lives(served)
