"""One agent's rollout at the gateway: its calls in any API become turns of one recording.

A session that the run opened samples by the run's contract, whatever the agent asks for: temperature and truncation are the trainer's
business. Knows no HTTP beyond the errors that its callers get.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from slipstream.chat.prefix import TurnTokens
from slipstream.chat.recording import Call, Limits, Recording, TruncatedError
from slipstream.ports import Hear, StreamingEngine
from slipstream.serving.api.http import ApiError
from slipstream.serving.gateway.counts import Counts
from slipstream.types import Completion, GenerateRequest, IntArray, Sampling, TokenPiece

_CONTRACT = ("temperature", "top_p", "top_k", "min_p", "seed")


class Session(Recording):
    """Implements ports.AgentSession for the environment, and api.port.Caller for the agent's calls."""

    def __init__(
        self,
        engine: StreamingEngine,
        turn_tokens: TurnTokens,
        contract: Sampling | None,
        limits: Limits,
        session_id: str,
        salt: int,
        counts: Counts,
    ):
        """`contract`: how to sample; None: as each call asks."""
        super().__init__(turn_tokens, contract or Sampling(), limits, session_id, salt)
        self.id = session_id
        self.contract = contract
        self.counts = counts
        self.engine = engine
        self.base_url = self.api_key = self.model = ""
        self.last_call_s = 0.0
        """On the loop's clock."""
        self.ended = False
        self.running: set[asyncio.Task[Completion]] = set()

    def chat(self, messages: Sequence[dict], tools: Sequence[dict], sampling: Sampling) -> SessionCall:
        """See api.port.Caller."""
        self.check_open()
        self.last_call_s = asyncio.get_running_loop().time()
        before = dict(self.forks)
        try:
            call = self.prepare(messages, tools, self._agreed(sampling))
        except TruncatedError as error:
            raise ApiError(400, str(error), code="session_budget_spent") from None
        self.counts.forks.update({kind: count - before.get(kind, 0) for kind, count in self.forks.items()})
        return SessionCall(self, call)

    def text(self, prompt_T: IntArray, sampling: Sampling) -> SessionCall:
        raise ApiError(400, f"session {self.id!r}: a session records chats; use /v1/chat/completions or /v1/messages")

    def end(self) -> None:
        """Abort what is on its way and refuse what comes. Idempotent."""
        self.ended = True
        for task in self.running:
            task.cancel()

    def check_open(self) -> None:
        """Raises ApiError when it has ended."""
        if self.ended:
            raise session_ended(self.id)

    def _agreed(self, asked: Sampling) -> Sampling:
        """The contract, with what may be the agent's own: a shorter reply and more stop strings."""
        contract, nothing = self.contract, Sampling()
        if contract is None:
            return asked
        wished = [name for name in _CONTRACT if getattr(asked, name) not in (getattr(nothing, name), getattr(contract, name))]
        self.counts.overridden += bool(wished)
        return replace(
            contract,
            max_tokens=min(contract.max_tokens, asked.max_tokens),
            stop=tuple(dict.fromkeys((*contract.stop, *asked.stop))),
            stop_token_ids=tuple(dict.fromkeys((*contract.stop_token_ids, *asked.stop_token_ids))),
        )


class SessionCall:
    """One call of a session. Implements api.port.Call."""

    def __init__(self, session: Session, call: Call):
        self._session = session
        self._call = call
        self._heard = 0
        self._begun = False

    @property
    def request(self) -> GenerateRequest:
        return self._call.request

    async def run(self, hear: Hear | None) -> Completion:
        session, engine, self._begun = self._session, self._session.engine, True

        def noting(piece: TokenPiece) -> None:
            self._heard += len(piece.tokens_N)
            assert hear is not None
            hear(piece)

        asking = engine.generate(self.request) if hear is None else engine.stream(self.request, noting)
        task = asyncio.ensure_future(asking)
        session.running.add(task)
        try:
            return await session.wait(self._call, task)
        except asyncio.CancelledError:
            session.counts.lost_tokens += self._heard
            current = asyncio.current_task()
            if session.ended and current is not None and not current.cancelling():  # not the client went away: the session was ended
                raise session_ended(session.id) from None
            raise
        finally:
            session.running.discard(task)

    def done(self, completion: Completion, reply: Callable[[], dict[str, Any]]) -> None:
        self._session.record(self._call, completion, reply())
        self._session.counts.turns += 1
        self._session.counts.tokens += len(completion.tokens_N)

    def drop(self) -> None:
        if not self._begun:
            self._begun = True
            self._session.drop(self._call)


def session_ended(session_id: str) -> ApiError:
    return ApiError(410, f"session {session_id!r} has ended: its rollout is closed. Open another one", code="session_ended")
