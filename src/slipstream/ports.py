"""Verbs: the protocols behind which everything is swappable. Each has a fake in `slipstream.fakes`.

All methods are coroutines that the caller bounds with a deadline; cancelling one must leave the implementation usable.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from slipstream.types import (
    Batch,
    ChatMessage,
    Completion,
    EngineState,
    GenerateRequest,
    PolicyVersion,
    Rollout,
    Sampling,
    StepReport,
    Task,
    TokenPiece,
    Turn,
)

Hear = Callable[[TokenPiece], None]
"""Called with the tokens of a completion as they are sampled."""


class Engine(Protocol):
    """Samples from the policy. The embedded engine over HTTP, a router over several, a fake."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Cancelling the call aborts the request in the engine.

        Raises RequestError when the request can never succeed, EngineUnavailable when another try may.
        """
        ...

    async def prepare(self, version: PolicyVersion) -> None:
        """Load and verify new weights beside the live ones while decoding goes on. Idempotent.

        Raises EngineError when the fingerprint of what was loaded is not `version.fingerprint`.
        """
        ...

    async def commit(self, number: int) -> None:
        """Swap the prepared weights in between two decode steps. Idempotent for the live version."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with finish reason `abort`; unknown ids are ignored."""
        ...

    async def state(self) -> EngineState: ...


class StreamingEngine(Protocol):
    """An engine that lets its caller hear tokens as they are sampled."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        ...

    async def stream(self, request: GenerateRequest, hear: Hear) -> Completion:
        """As `generate`, calling `hear` on the way. The completion is whole: its first tokens are those that were heard, in order, and
        the last of them (those with which it ended) are in it alone.
        """
        ...


class Policy(Protocol):
    """What an environment sees of the engine during one rollout: chat in, message out.

    It renders the chat template, keeps the token prefix of earlier turns byte for byte, stamps salt and versions, and
    records every turn; environments never handle tokens.
    """

    async def reply(self, messages: Sequence[dict], tools: Sequence[dict] = ()) -> dict:
        """Sample the assistant's next message.

        `messages` is the whole conversation so far. The result is an assistant message in OpenAI's chat format: `content`, and
        `tool_calls` (each with id and function {name, arguments: JSON text}) where the model called tools.
        Raises TruncatedError (slipstream.envs.base) when no token or turn budget is left.
        """
        ...


class AgentSession(Protocol):
    """One rollout of an agent that calls the policy over HTTP: where it calls, and what was recorded of it."""

    base_url: str
    """For OpenAI's clients; Anthropic's add the '/v1' themselves and take it without."""
    api_key: str
    model: str
    truncated: bool
    messages: list[ChatMessage]

    @property
    def turns(self) -> Sequence[Turn]: ...
    @property
    def failure(self) -> Exception | None: ...


class Gateway(Protocol):
    """Where agents call the policy; each session is a rollout."""

    def open(self, session_id: str, salt: int, sampling: Sampling, limits: Any) -> AgentSession:
        """A session under these limits (`slipstream.chat.recording.Limits`). Raises StateError: the id was used before."""
        ...

    def end(self, session_id: str) -> None:
        """Abort what is on its way and refuse what comes. Idempotent."""
        ...


class Env(Protocol):
    """Tasks and how to play them."""

    name: str

    def num_tasks(self, split: str) -> int:
        """Size of a split ('train' or 'eval')."""
        ...

    def task(self, split: str, index: int) -> Task:
        """Deterministic in (seed of the environment, split, index)."""
        ...

    async def play(self, task: Task, policy: Policy) -> Played:
        """Play one task to its end and score it."""
        ...


class Played(Protocol):
    """What `Env.play` returns: the conversation and its score."""

    messages: Sequence[dict]
    reward: float
    reward_parts: dict[str, float]


class Trainer(Protocol):
    """Consumes batches, makes policy versions."""

    async def send(self, batch: Batch) -> None:
        """Hand over one batch; returns once it is durable, not once it is trained. At most one call per step number."""
        ...

    def updates(self, after: int) -> AsyncIterator[PolicyVersion]:
        """Versions with a number above `after`, in order, as they are published. May skip to the newest."""
        ...

    def reports(self, after: int) -> AsyncIterator[StepReport]:
        """Step reports above `after`, in order."""
        ...

    async def finish(self, reason: str) -> None:
        """No further batch will come: write the final weights and exit once everything sent has been trained."""
        ...


class Player(Protocol):
    """Plays one rollout of a task: binds an Env to an Engine. `orchestrator.dispatch` calls it under a deadline."""

    async def __call__(self, task: Task, rollout_id: str, group_id: str, version_start: int) -> Rollout: ...
