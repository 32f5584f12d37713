"""Nouns: every value that crosses a process or package boundary, in order of life.

    Task -> Turn -> Rollout -> Group -> Sample -> MicroBatch -> Batch -> PolicyVersion

Arrays are numpy, on the host, and never mutated after construction. Shape suffixes: T tokens, N sampled tokens,
L MoE layers, K experts per token, D documents (samples) in a packed row, S samples.

Routing convention: row i is the routing that was used when token i was *processed*. The last sampled token of a
completion has not been processed, so it has no row until a later turn feeds it.

Nothing here imports torch: a login node, the orchestrator and the dashboard use these types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
ChatMessage = Mapping[str, Any]
"""One message in OpenAI's chat format: role, content, and where they apply tool_calls, tool_call_id, name."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem of an environment. `id` is unique within a run: '<env>/<split>/<index>'."""

    id: str
    env: str
    index: int
    """Row in the environment's split; the curriculum and the data cursor count in it."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the environment needs to play and score it (question, answer, seed): plain JSON values."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. The logprob contract: the same values travel with the tokens, and the trainer replays them."""

    temperature: float = 1.0
    """0 is greedy; logprobs are then those of the untempered distribution."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    """Stop strings, compared with the detokenised completion; the tokens that made the string are kept."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end-of-sequence ids."""
    seed: int | None = None
    """None: drawn by the engine. The same seed and prompt give the same tokens whatever else is in the batch."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One engine call: token ids in, token ids out."""

    id: str
    prompt_T: IntArray
    sampling: Sampling
    salt: int = 0
    """Policy version at the start of the rollout: prefix-cache keys are salted with it, so a new rollout never reads
    KV of an older policy, while the later turns of a running rollout keep theirs."""
    routing_from: int = 0
    """Return routing rows from this token position on (the caller already holds the earlier ones)."""
    prefill_at: str = ""
    """Handoff address of the engine that prefills the prompt, 'host:port', chosen by the pool; empty: where it is decoded."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Expert choices of consecutive tokens: `ids_TLK[i]` was used when token `start + i` was processed."""

    start: int
    ids_TLK: NDArray[np.uint8] | NDArray[np.uint16]
    valid_T: BoolArray
    """False where the row is unknown: the trainer then routes that token natively."""


Versions = tuple[tuple[int, int], ...]
"""Run-length segments [(policy version, number of tokens), ...]: weights may change in the middle of a sequence."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a request spent in each phase, measured by the engine."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What one engine call returned."""

    id: str
    tokens_N: IntArray
    logprobs_N: FloatArray
    """Under the weights that sampled each token and the distribution that it was sampled from."""
    versions: Versions
    finish_reason: FinishReason
    routing: Routing | None = None
    """Rows `routing_from .. prompt + completion - 2`; None for dense models or when capture is off."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was not computed for this request."""
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    """The same by where they came from: device (found in the prefix cache), ram, disk, shared, peer."""
    kv_age: int = 0
    """Policy version at sampling minus the oldest version that wrote a KV block used here."""
    timings: Timings = Timings()


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """Tokens of a completion that is still being sampled."""

    tokens_N: IntArray
    logprobs_N: FloatArray
    version: int
    """Policy version that sampled them."""


class Outcome(StrEnum):
    """How a rollout ended. Only `completed` and `truncated` carry a reward."""

    completed = "completed"
    truncated = "truncated"
    """The policy ran out of tokens, context or turns; gradable."""
    stale = "stale"
    """Cancelled because its oldest token could no longer be trained within `max_off_policy_steps`."""
    cut = "cut"
    """A straggler: past its deadline."""
    infra_error = "infra_error"
    env_error = "env_error"
    reward_error = "reward_error"

    @property
    def gradable(self) -> bool:
        return self in (Outcome.completed, Outcome.truncated)


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine call within a rollout: what was fed and what came back."""

    prompt_T: IntArray
    completion: Completion
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Rollout:
    """One trajectory. `reward` is None exactly when the outcome is not gradable."""

    id: str
    task: Task
    group_id: str
    outcome: Outcome
    turns: tuple[Turn, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    """The conversation as text, for people and for reward functions."""
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Named components and metrics of the reward; not trained on."""
    error: str = ""
    """For the error outcomes: class and message, one line."""
    version_start: int = 0
    """Live policy version when it was dispatched."""
    started_s: float = 0.0
    """Seconds since the epoch."""
    duration_s: float = 0.0

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.completion.tokens_N) for turn in self.turns)

    @property
    def version_min(self) -> int:
        """Oldest policy version that sampled one of its tokens; `version_start` when it has none."""
        sampled = [v for turn in self.turns for v, n in turn.completion.versions if n]
        return min(sampled, default=self.version_start)


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one task that were issued together, once the group has closed."""

    id: str
    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def gradable(self) -> tuple[Rollout, ...]:
        return tuple(r for r in self.rollouts if r.outcome.gradable)


@dataclass(frozen=True, slots=True)
class Sample:
    """One trainable token sequence of a rollout (turns merged while each prompt extends the one before)."""

    rollout_id: str
    group_id: str
    env: str
    tokens_T: IntArray
    loss_mask_T: BoolArray
    """True for tokens that the policy sampled and that may be trained; never True at position 0."""
    logprobs_T: FloatArray
    """Engine logprobs; 0 where the token was not sampled."""
    versions_T: IntArray
    """Version that sampled the token; -1 where it was not sampled."""
    advantage: float
    reward: float
    temperature: float = 1.0
    routing: tuple[Routing, ...] = ()
    """The rows as the turns brought them, in order: of several for one token, the first valid one counts. () for none."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row: documents laid end to end, attention within documents only."""

    tokens_T: IntArray
    positions_T: IntArray
    """Position within the document: restarts at 0 at each boundary."""
    doc_starts_D: IntArray
    """First token of each document, plus the row length at the end: D + 1 values (cu_seqlens)."""
    loss_mask_T: BoolArray
    logprobs_T: FloatArray
    versions_T: IntArray
    advantages_T: FloatArray
    temperature_T: FloatArray
    sample_T: IntArray
    """Index of the token's sample in the batch."""
    routing_TLK: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    routing_valid_T: BoolArray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step trains on."""

    step: int
    """1 for the first step. Step n trains from version n - 1 and makes version n."""
    micro_batches: tuple[MicroBatch, ...]
    loss_tokens: int
    """Number of True loss-mask entries over the whole batch: the divisor of the loss."""
    rollout_ids: tuple[str, ...]
    """Rollout of each sample, in sample order (a rollout with several samples appears several times)."""
    rewards_S: FloatArray
    advantages_S: FloatArray
    orchestrator_state: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: data cursor, curriculum, RNG, ledger position as of this batch. Stored in the checkpoint manifest."""

    @property
    def version(self) -> int:
        """The policy version that this batch trains from; a token's lag is this minus the version that sampled it."""
        return self.step - 1

    @property
    def num_tokens(self) -> int:
        return sum(m.num_tokens for m in self.micro_batches)


class VersionState(StrEnum):
    """Life of a policy version: the trainer publishes it, engines prepare it, commit makes it live, a newer one retires it."""

    published = "published"
    prepared = "prepared"
    live = "live"
    retired = "retired"


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A set of weights with an identity. Version 0 is the initial policy; every optimizer step makes one."""

    number: int
    fingerprint: str
    """Hash over the sorted (tensor name, dtype, shape, tensor hash) list: equal weights, equal fingerprint."""
    parent: int | None
    path: str
    """Folder with model.safetensors under HF checkpoint names, and version.json."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine says about itself."""

    live_version: int
    fingerprint: str
    prepared_version: int | None = None
    running: int = 0
    waiting: int = 0
    kv_used_frac: float = 0.0
    paused: bool = False
    generated_tokens: int = 0
    """Since the start of the process."""
    busy_s: float = 0.0
    """Seconds spent computing since the start of the process (the rest is idle)."""
    uptime_s: float = 0.0
    kv_tokens: int = 0
    """Tokens that its KV cache holds; 0: it does not say."""
    block_tokens: int = 0
    """Tokens in a block of it; 0: it does not say."""
    draining: bool = False
    """Its operator wants it to get no new requests."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the trainer says after a step; also a line in metrics.jsonl."""

    step: int
    metrics: Mapping[str, float]
