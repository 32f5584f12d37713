"""The one place where a replica is chosen for a request: memory of sessions, prefixes and loads, and a policy over a snapshot of them.

    ask = router.ask(request)                      # once a request: its session, its block keys
    sent = router.choose(ask, usable, away, now)   # each time that it is sent
    router.answered(sent, completion, now)         # if it was
    router.ended(sent)                             # always

Pure and synchronous, so that a simulation drives the same code as the pool; costs O(blocks of the prompt + replicas). Knows nothing of
connections or retries. Replicas go by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import numpy as np

from slipstream.config.router import RouterConfig
from slipstream.serving.keys import extend_keys
from slipstream.serving.routing.disaggregate import Elsewhere, Prefills, Side
from slipstream.serving.routing.load import ENOUGH_ANSWERS, Load
from slipstream.serving.routing.policies import View, make_policy
from slipstream.serving.routing.prefixes import PrefixIndex
from slipstream.serving.routing.sessions import Sessions
from slipstream.types import Completion, EngineState, GenerateRequest

BLOCK_TOKENS = 16
"""Until an engine says how large its blocks are."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be routed."""

    session: str
    keys: Sequence[bytes]
    """Of the full blocks of the prompt."""
    prompt_T: np.ndarray
    salt: int

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_T)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request on its way to a replica."""

    replica: str
    ask: Ask
    held: int
    """Prompt tokens that were presumably there."""
    last_uses: Sequence[int]
    place: int
    sent_s: float


@dataclass(slots=True)
class _Known:
    """What is known of one replica."""

    capacity: int
    """Blocks."""
    load: Load = field(default_factory=Load)
    state: EngineState | None = None


def session_of(request_id: str) -> str:
    """Of 'rollout/turn', the rollout."""
    return request_id.rpartition("/")[0] or request_id


class Router:
    """`counts` are since the start: decisions by reason, moves by reason, requests by replica, prompt tokens."""

    def __init__(self, config: RouterConfig):
        self._config = config
        self._policy = make_policy(config)
        self._index = PrefixIndex()
        self._sessions = Sessions()
        self._known: dict[str, _Known] = {}
        self._block_tokens = BLOCK_TOKENS
        self.prefills = Prefills(config.prefill)
        self.decisions: Counter[str] = Counter()
        self.moves: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        """prompt: of answered requests; predicted, cached: of these, presumed and found in the KV cache."""
        self.decision_s = 0.0
        """Of all decisions together."""

    # ---- one request ----

    def ask(self, request: GenerateRequest) -> Ask:
        """Hash the prompt: half a microsecond a block."""
        started = perf_counter()
        keys: list[bytes] = []
        extend_keys(keys, request.prompt_T, request.salt, self._block_tokens)
        self.decision_s += perf_counter() - started
        return Ask(session_of(request.id), keys, request.prompt_T, request.salt)

    def choose(self, ask: Ask, usable: Sequence[str], away: Callable[[str], str], now: float) -> Sent:
        """Decide among `usable` (not empty) and book it. `away(name)`: why a replica is not usable, for the count of moves."""
        started = perf_counter()
        held = self._index.match(ask.keys[: (ask.prompt_tokens - 1) // self._block_tokens])
        home = self._sessions.home(ask.session)
        if home is not None and home in usable and self._config.sticky and self._config.policy != "kv_aware":
            name, reason = home, "home"
        else:
            choice = self._policy.choose(ask.session, ask.prompt_tokens, self._views(ask.session, usable, held, now))
            name, reason = usable[choice.index], choice.reason
        self.decisions[reason] += 1
        self.requests[name] += 1
        if home is not None and name != home:
            self.moves[reason if home in usable else away(home)] += 1
        sent = self._book(ask, name, held.get(name, 0), now)
        self.decision_s += perf_counter() - started
        return sent

    def elsewhere(self, sent: Sent, peers: Mapping[str, str], now: float) -> Elsewhere | None:
        """The prefill engine for a request that has just been booked, if one is worth it. `peers`: those that serve, name -> address."""
        if not peers:
            return None
        load, uncached = self._at(sent.replica).load, sent.ask.prompt_tokens - sent.held
        here = Side(max(0.0, load.look(now) - uncached), load.rate, load.requests - 1)
        whole = (sent.ask.prompt_tokens - 1) // self._block_tokens * self._block_tokens
        away = self.prefills.choose(whole - sent.held, here, peers, now)
        if away is not None:
            load.pending = here.pending
        return away

    def answered(self, sent: Sent, completion: Completion, now: float) -> None:
        """Learn from an answer: what was really cached, how fast it was, and that prompt and completion are in the cache now."""
        ask, size = sent.ask, self._block_tokens
        self.tokens.update(prompt=ask.prompt_tokens, predicted=sent.held, cached=completion.cached_tokens)
        computed = ask.prompt_tokens - completion.cached_tokens
        self._load(sent.replica).answered(
            sent.place, computed, completion.timings.prefill_s, len(completion.tokens_N), now - sent.sent_s, now
        )
        missing = completion.cached_tokens // size
        if completion.cached_tokens < sent.held and missing < len(sent.last_uses) and (last := sent.last_uses[missing]) > 0:
            self._index.reclaimed(sent.replica, last)
        self._index.use(sent.replica, self._keys_after(ask, completion), self._at(sent.replica).capacity, certain=True)

    def ended(self, sent: Sent) -> None:
        """It is no longer in flight, however it ended."""
        self._load(sent.replica).ended()

    # ---- replicas ----

    def observe(self, name: str, state: EngineState) -> None:
        """What a replica says about itself."""
        known = self._at(name)
        if known.state is not None and state.uptime_s < known.state.uptime_s:
            self.restarted(name)
        known.state = state
        if state.block_tokens and state.block_tokens != self._block_tokens:
            self._block_tokens = state.block_tokens
            for other in self._known:
                self._index.forget(other)
        known.capacity = self._capacity(state.kv_tokens)

    def restarted(self, name: str) -> None:
        """Its cache is empty and its speed unknown."""
        self._index.forget(name)
        self._sessions.forget(name)
        known = self._at(name)
        known.state = None
        known.load.reset()
        self.prefills.restarted(name)

    def removed(self, name: str) -> None:
        """It is no longer part of the pool."""
        self.restarted(name)
        self._known.pop(name, None)

    def slow(self, usable: Sequence[str]) -> str | None:
        """A replica that takes `slow_factor` times the median time for a token; None when there is none, or too little is known."""
        times = {name: self._load(name).token_s for name in usable if self._load(name).answers >= ENOUGH_ANSWERS}
        if len(times) < 2 or 2 * len(times) < len(usable):
            return None
        worst = max(times, key=times.__getitem__)
        others = median(seconds for name, seconds in times.items() if name != worst)
        return worst if times[worst] > self._config.slow_factor * others else None

    def forgive(self, name: str) -> None:
        """Judge its speed afresh."""
        self._load(name).answers = 0

    def in_flight(self, name: str) -> int:
        return self._load(name).requests

    def pending(self, now: float) -> float:
        """Prompt tokens, over all replicas, that were sent and are presumably not computed yet."""
        return sum(known.load.look(now) for known in self._known.values())

    # ---- inside ----

    def _views(self, session: str, usable: Sequence[str], held: Mapping[str, int], now: float) -> list[View]:
        home = self._sessions.home(session) if self._config.sticky else None
        residents, size, views = self._sessions.residents(session), self._block_tokens, []
        newest = max((known.state.live_version for known in self._known.values() if known.state is not None), default=0)
        for name in usable:
            known = self._at(name)
            load, state = known.load, known.state or _UNKNOWN
            views.append(
                View(
                    name,
                    load.requests,
                    load.look(now),
                    held.get(name, 0) * size,
                    state.waiting,
                    residents.get(name, 0) / (known.capacity * size),
                    state.kv_used_frac,
                    newest - state.live_version if known.state else 0,
                    name == home,
                )
            )
        return views

    def _book(self, ask: Ask, name: str, held_blocks: int, now: float) -> Sent:
        held = held_blocks * self._block_tokens
        last_uses = self._index.use(name, ask.keys, self._at(name).capacity, certain=False)[:held_blocks]
        self._sessions.placed(ask.session, name, ask.prompt_tokens, held, now)
        place = self._load(name).sent(ask.prompt_tokens - held, now)
        return Sent(name, ask, held, last_uses, place, now)

    def _keys_after(self, ask: Ask, completion: Completion) -> list[bytes]:
        """Of the full blocks that the engine has processed: all but the last sampled token."""
        keys = list(ask.keys)
        extend_keys(keys, np.concatenate([ask.prompt_T, completion.tokens_N[:-1]]), ask.salt, self._block_tokens)
        return keys

    def _capacity(self, told: int) -> int:
        """Blocks to remember of a replica that says it holds so many tokens (0: it does not say)."""
        tokens = min(told, self._config.index_tokens) if told else self._config.index_tokens
        return max(1, tokens // self._block_tokens)

    def _at(self, name: str) -> _Known:
        if (known := self._known.get(name)) is None:
            known = self._known[name] = _Known(self._capacity(0))
        return known

    def _load(self, name: str) -> Load:
        return self._at(name).load


_UNKNOWN = EngineState(-1, "")
