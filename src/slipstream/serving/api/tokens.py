"""Token-in token-out over any engine that streams.

    POST /slipstream/generate     wire-format request in, wire-format completion out; disconnecting aborts it
    POST /slipstream/stream       the same with the tokens on the way: slipstream.serving.frames

The generate route has no JSON, no log line and no middleware work.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from slipstream.errors import EngineError, RequestError, WireError
from slipstream.ports import StreamingEngine
from slipstream.serving.api.http import WIRE, note_error
from slipstream.serving.bodies import send_body, write_pieces
from slipstream.serving.frames import completion_frame, error_frame, piece_frame
from slipstream.transport.codec import decode_request, encode_completion
from slipstream.transport.threads import off_loop
from slipstream.transport.wire import Pieces
from slipstream.types import Completion, GenerateRequest, TokenPiece


def token_routes(engine: StreamingEngine) -> list[web.RouteDef]:
    async def generate(request: web.Request) -> web.StreamResponse:
        completion = await engine.generate(_decode(await request.read()))
        return await send_body(request, await off_loop(_size(completion), lambda: encode_completion(completion)), WIRE)

    async def stream(request: web.Request) -> web.StreamResponse:
        return await _stream(request, engine, _decode(await request.read()))

    return [web.post("/slipstream/generate", generate), web.post("/slipstream/stream", stream)]


async def _stream(request: web.Request, engine: StreamingEngine, call: GenerateRequest) -> web.StreamResponse:
    """Frames while the engine samples. An error before the first token has a status of its own; a later one is a frame."""
    heard: asyncio.Queue[TokenPiece | None] = asyncio.Queue()
    answer = asyncio.create_task(engine.stream(call, heard.put_nowait))
    answer.add_done_callback(lambda _: heard.put_nowait(None))
    response = web.StreamResponse(headers={"Content-Type": WIRE})
    try:
        piece = await heard.get()
        if piece is None:
            answer.result()  # raises what went wrong before anything was sampled
        await response.prepare(request)
        while piece is not None:
            await response.write(piece_frame(piece))
            piece = await heard.get()
        await write_pieces(response, await _last_frame(request, answer))
    finally:
        answer.cancel()
        await asyncio.wait([answer])
    return response


async def _last_frame(request: web.Request, answer: asyncio.Task[Completion]) -> Pieces:
    error = answer.exception()
    if error is None:
        completion = answer.result()
        return await off_loop(_size(completion), lambda: completion_frame(completion))
    if not isinstance(error, EngineError):
        raise error
    return [error_frame(note_error(request, error), str(error))]


def _size(completion: Completion) -> int:
    """Bytes of what may be many."""
    return completion.routing.ids_TLK.nbytes if completion.routing is not None else 0


def _decode(body: bytes) -> GenerateRequest:
    """Raises WireError or RequestError; what a newer or broken client leaves out or adds is named, not guessed."""
    try:
        call = decode_request(body)
    except (KeyError, TypeError, AttributeError) as error:
        raise WireError(f"generate_request: field {error} does not fit; use the same slipstream version on both sides") from None
    _check(call)
    return call


def _check(call: GenerateRequest) -> None:
    sampling = call.sampling
    for name, value in (("temperature", sampling.temperature), ("top_p", sampling.top_p), ("min_p", sampling.min_p)):
        if not isinstance(value, (int, float)):
            raise RequestError(f"sampling.{name} = {value!r}: expected a number")
    for name, value in (
        ("top_k", sampling.top_k),
        ("max_tokens", sampling.max_tokens),
        ("salt", call.salt),
        ("routing_from", call.routing_from),
    ):
        if not isinstance(value, int):
            raise RequestError(f"{name} = {value!r}: expected an integer")
    if not isinstance(sampling.seed, int | None):
        raise RequestError(f"sampling.seed = {sampling.seed!r}: expected an integer or nothing")
    if not all(isinstance(text, str) for text in sampling.stop) or not all(isinstance(i, int) for i in sampling.stop_token_ids):
        raise RequestError(f"sampling.stop = {sampling.stop!r}, stop_token_ids = {sampling.stop_token_ids!r}: expected texts, and integers")
    if not isinstance(call.prefill_at, str):
        raise RequestError(f"prefill_at = {call.prefill_at!r}: expected an address like 127.0.0.1:4711, or an empty string")
    if not isinstance(call.id, str) or not call.id:
        raise RequestError(f"id = {call.id!r}: expected a non-empty string")
    if call.prompt_T.ndim != 1 or call.prompt_T.dtype.name != "int32":
        raise RequestError(f"prompt: {call.prompt_T.dtype} array of shape {call.prompt_T.shape}; expected int32 token ids in one dimension")
