"""Anthropic's Messages API over a port: POST /v1/messages, with streaming and tools, and /v1/messages/count_tokens.

A message's content is blocks (text, tool_use) in the order in which the model wrote them; a stream opens, fills and closes them one after
the other. What the fields and events mean is Anthropic's API reference (docs.anthropic.com); what is refused is in anthropic_types.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from aiohttp import web

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.serving.api.answer import Event, Part, Tail, completions, sse, stream
from slipstream.serving.api.anthropic_types import CountBody, MessagesBody
from slipstream.serving.api.http import Handler, json_response, read_json
from slipstream.serving.api.port import Call, Port
from slipstream.serving.api.reply import Piece, Reply, without_eos
from slipstream.types import Completion


def anthropic_routes(port: Port) -> list[tuple[str, str, Handler]]:
    """(method, path, handler) of the two routes."""

    async def messages(request: web.Request) -> web.StreamResponse:
        body: MessagesBody = await read_json(request, MessagesBody)
        caller = port.caller(request, body.model)
        body.check()
        call = caller.chat(body.chat(), body.offered_tools, body.sampling)
        reply = Reply(port.tokenizer, call.request.sampling.stop, bool(body.offered_tools))
        answer = _Answer(port.tokenizer, port.model, call, reply)
        if body.stream:
            return await stream(request, [answer.part], answer.events)
        [completion] = await completions([answer.part])
        return json_response(answer.whole(completion))

    async def count_tokens(request: web.Request) -> web.Response:
        body: CountBody = await read_json(request, CountBody)
        port.caller(request, body.model)
        body.check()
        return json_response({"input_tokens": len(port.tokenizer.prompt_ids(body.chat(), body.offered_tools))})

    return [("POST", "/v1/messages", messages), ("POST", "/v1/messages/count_tokens", count_tokens)]


class _Answer:
    """One message in the making."""

    def __init__(self, tokenizer: ChatTokenizer, model: str, call: Call, reply: Reply):
        self._tokenizer = tokenizer
        self._model = model
        self._call = call
        self._reply = reply
        self._id = f"msg_{secrets.token_hex(12)}"

    @property
    def part(self) -> Part:
        return Part(self._call, self._reply.message)

    def whole(self, completion: Completion) -> dict[str, Any]:
        ids, _ = without_eos(self._tokenizer, completion.tokens_N.tolist(), completion.logprobs_N.tolist())
        content: list[dict[str, Any]] = []
        for piece in (*self._reply.push(ids), *self._reply.flush()):
            if isinstance(piece, str) and content and content[-1]["type"] == "text":
                content[-1]["text"] += piece
            else:
                content.append(_block(piece))
        return {**self._message(content), **self._end(completion), "usage": self._usage(completion)}

    async def events(self, heard: AsyncIterator[Event]) -> AsyncIterator[bytes]:
        start = {"input_tokens": len(self._call.request.prompt_T), "output_tokens": 0}
        yield _event("message_start", message={**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": start})
        tail, blocks = Tail(), _Blocks()
        async for _, event in heard:
            ids, _ = without_eos(self._tokenizer, *tail.news(event))
            for piece in self._reply.push(ids):
                for chunk in blocks.add(piece):
                    yield chunk
            if isinstance(event, Completion):
                for chunk in blocks.end(self._reply.flush()):
                    yield chunk
                yield _event("message_delta", delta=self._end(event), usage=self._usage(event))
        yield _event("message_stop")

    def _message(self, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _end(self, completion: Completion) -> dict[str, Any]:
        _, stop = self._reply.text(completion)
        if stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if completion.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        return {"stop_reason": "tool_use" if self._reply.num_calls else "end_turn", "stop_sequence": None}

    def _usage(self, completion: Completion) -> dict[str, int]:
        """input_tokens are those that the prefix cache did not have."""
        cached = completion.cached_tokens
        fresh = len(self._call.request.prompt_T) - cached
        return {
            "input_tokens": fresh,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(completion.tokens_N),
        }


class _Blocks:
    """The content blocks of a stream."""

    def __init__(self) -> None:
        self._index = -1
        self._text_is_open = False

    def add(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, str):
            if not self._text_is_open:
                yield self._start({"type": "text", "text": ""})
                self._text_is_open = True
            yield self._delta({"type": "text_delta", "text": piece})
            return
        yield from self._close_text()
        yield self._start({"type": "tool_use", "id": piece["id"], "name": piece["name"], "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": piece["arguments"]})
        yield self._stop()

    def end(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        for piece in pieces:
            yield from self.add(piece)
        yield from self._close_text()

    def _close_text(self) -> Iterator[bytes]:
        if self._text_is_open:
            self._text_is_open = False
            yield self._stop()

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self._index)


def _block(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    return {"type": "tool_use", "id": piece["id"], "name": piece["name"], "input": json.loads(piece["arguments"])}


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
