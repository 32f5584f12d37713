"""A completion on its way, as frames in one HTTP body: pieces while tokens are sampled, then the completion or an error.

    offset  size  field
    0       1     b"T" token piece, b"C" completion, b"E" error
    1       4     length N (little endian)
    5       N     one message of transport.wire

Both ends of POST /slipstream/stream. Knows no HTTP.
"""

from __future__ import annotations

import struct

from slipstream.errors import EngineBusy, EngineError, EngineUnavailable, RequestError
from slipstream.transport.codec import encode_completion
from slipstream.transport.wire import Pieces, decode, encode
from slipstream.types import Completion, TokenPiece

HEAD = struct.Struct("<cI")
PIECE, COMPLETION, ERROR = b"T", b"C", b"E"
MAX_FRAME_BYTES = 1 << 31


def piece_frame(piece: TokenPiece) -> bytes:
    arrays = {"tokens": piece.tokens_N, "logprobs": piece.logprobs_N}
    return b"".join(_frame(PIECE, encode("token_piece", {"version": piece.version}, arrays)))


def completion_frame(completion: Completion) -> Pieces:
    """In pieces: it may be large."""
    return _frame(COMPLETION, encode_completion(completion))


def error_frame(status: int, message: str) -> bytes:
    return b"".join(_frame(ERROR, encode("error", {"status": status, "message": message}, {})))


def read_piece(body: bytes | memoryview) -> TokenPiece:
    """Raises WireError."""
    meta, arrays = decode(body, "token_piece")
    return TokenPiece(arrays["tokens"], arrays["logprobs"], meta["version"])


def read_error(body: bytes | memoryview, where: str) -> EngineError:
    """The exception that the frame stands for. Raises WireError."""
    meta, _ = decode(body, "error")
    return error_of(meta["status"], f"{where}: {meta['message']}")


def error_of(status: int, text: str) -> EngineError:
    """The exception that a status of an engine's server stands for (slipstream.serving.api.http has the table)."""
    if status == 429:
        return EngineBusy(text)
    if status >= 500:
        return EngineUnavailable(text)
    return EngineError(text) if status == 409 else RequestError(text)


def _frame(kind: bytes, body: Pieces) -> Pieces:
    return [HEAD.pack(kind, sum(map(len, body))), *body]
