"""All sessions of a gateway, and whose call a request is. Knows headers and paths, not routes.

    key of a session                       that session
    the gateway's token + a session's id   that session; it is opened when there is none of this id
    the gateway's token alone              a call that nobody records

The key comes as `Authorization: Bearer KEY` or `X-Api-Key: KEY` (what OpenAI's and Anthropic's clients send as their API key), the id as
the path's `/sessions/ID` or as `X-Session-Id: ID`. An id is used once: a session that has ended stays ended.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import OrderedDict
from typing import Protocol
from urllib.parse import quote

from aiohttp import web

from slipstream.chat.prefix import TurnTokens
from slipstream.chat.recording import Limits
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config.gateway import GatewayConfig
from slipstream.errors import EngineBusy, StateError
from slipstream.ports import StreamingEngine
from slipstream.serving.api.http import ApiError
from slipstream.serving.api.port import Caller, EnginePort
from slipstream.serving.gateway.counts import Counts
from slipstream.serving.gateway.session import Session, session_ended
from slipstream.types import EngineState, Sampling

REMEMBERED_SESSIONS = 65536
"""Ended ones whose ids and keys are still known for what they are."""
ID = re.compile(r"[\x21-\x7e]{1,200}")


class GatewayEngine(StreamingEngine, Protocol):
    """The pool of a run, or one engine."""

    async def state(self) -> EngineState: ...


class Gateway:
    """Implements ports.Gateway, and api.port.Port for the routes."""

    def __init__(self, engine: GatewayEngine, tokenizer: ChatTokenizer, model: str, seq_len: int, token: str, config: GatewayConfig):
        """`model`: the one name that requests may use. `token`: opens, reads and ends sessions."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = model
        self.seq_len = seq_len
        self.url = ""
        """Where it listens, once it does."""
        self.counts = Counts()
        self.sessions: dict[str, Session] = {}
        self._config = config
        self._token = token
        self._turn_tokens = TurnTokens(tokenizer)
        self._plain = EnginePort(engine, tokenizer, model, seq_len)
        self._by_key: dict[str, Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Id -> key."""
        self._ended_keys: dict[str, str] = {}
        self._ad_hoc: set[str] = set()

    # ---- for the run ----

    def open(self, session_id: str, salt: int, sampling: Sampling | None, limits: Limits) -> Session:
        """A session with a key of its own. `sampling` None: as each call asks. Raises StateError: the id was used before."""
        if session_id in self.sessions or session_id in self._ended:
            raise StateError(f"session {session_id!r} was opened before; give each rollout an id of its own")
        session = Session(self.engine, self._turn_tokens, sampling, limits, session_id, salt, self.counts)
        session.api_key, session.model = f"sk-{secrets.token_urlsafe(24)}", self.model
        session.base_url = f"{self.url}/sessions/{quote(session_id, safe='')}/v1"
        session.last_call_s = asyncio.get_running_loop().time()
        self.sessions[session_id] = self._by_key[session.api_key] = session
        self.counts.opened += 1
        return session

    def end(self, session_id: str) -> None:
        """Abort what is on its way and refuse what comes. Idempotent; unknown ids are ignored."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        session.end()
        self._ad_hoc.discard(session_id)
        del self._by_key[session.api_key]
        self._ended[session_id], self._ended_keys[session.api_key] = session.api_key, session_id
        if len(self._ended) > REMEMBERED_SESSIONS:
            _, key = self._ended.popitem(last=False)
            del self._ended_keys[key]

    def metrics(self) -> dict[str, float]:
        return self.counts.metrics(len(self.sessions))

    # ---- for the routes ----

    def caller(self, request: web.Request, model: str | None) -> Caller:
        """See api.port.Port."""
        found = self._caller(request)
        if model is not None and model != self.model:
            raise ApiError(
                404,
                f"model {model!r} is not here; this gateway serves {self.model!r} (GET /v1/models)",
                param="model",
                code="model_not_found",
            )
        return found

    def listed(self, request: web.Request) -> None:
        self._caller(request)

    def admit(self, request: web.Request) -> None:
        """Only for the gateway's token. Raises ApiError."""
        if not self._is_token(_key(request)):
            raise _wrong_key("this route needs the gateway's token")

    def named(self, session_id: str) -> Session:
        """Raises ApiError: it has ended, or there is none."""
        if session_id in self._ended:
            raise session_ended(session_id)
        if session_id not in self.sessions:
            raise ApiError(404, f"session {session_id!r} is not open", code="no_session")
        return self.sessions[session_id]

    def open_ad_hoc(self, session_id: str, salt: int, sampling: Sampling | None, limits: Limits | None = None) -> Session:
        """For a client with the token. Raises ApiError (a bad or used id), EngineBusy (too many are open)."""
        if not ID.fullmatch(session_id):
            raise ApiError(400, f"session id {session_id[:40]!r}: expected 1 to 200 printable ASCII characters without spaces")
        if session_id in self._ended:
            raise session_ended(session_id)
        if session_id in self.sessions:
            raise ApiError(409, f"session {session_id!r} is open already; choose another id", code="session_exists")
        self._expire()
        if len(self.sessions) >= self._config.max_sessions:
            raise EngineBusy(f"{len(self.sessions)} sessions are open (gateway.max_sessions); end some first")
        session = self.open(session_id, salt, sampling, limits or Limits(self.seq_len, self._config.turn_timeout_s))
        self._ad_hoc.add(session_id)
        return session

    def _caller(self, request: web.Request) -> Caller:
        key = _key(request)
        named = request.match_info.get("session") or request.headers.get("X-Session-Id")
        if (session := self._by_key.get(key)) is not None:
            if named not in (None, session.id):
                raise ApiError(403, f"this key is of session {session.id!r}, and the request names {named!r}", "permission_error")
            return session
        if key in self._ended_keys:
            raise session_ended(self._ended_keys[key])
        if not self._is_token(key):
            raise _wrong_key("give the session's key, or the gateway's token,")
        if named is None:
            return self._plain
        return self.sessions.get(named) or self.open_ad_hoc(named, salt=0, sampling=None)

    def _is_token(self, key: str) -> bool:
        return secrets.compare_digest(key.encode("utf-8", "surrogateescape"), self._token.encode())

    def _expire(self) -> None:
        """End what clients opened and forgot."""
        oldest = asyncio.get_running_loop().time() - self._config.idle_s
        for session_id in [i for i in self._ad_hoc if self.sessions[i].last_call_s < oldest and not self.sessions[i].running]:
            self.end(session_id)


def _key(request: web.Request) -> str:
    return request.headers.get("X-Api-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")


def _wrong_key(what: str) -> ApiError:
    return ApiError(
        401, f"{what} as the API key ('Authorization: Bearer KEY' or 'X-Api-Key: KEY')", "authentication_error", code="invalid_api_key"
    )
