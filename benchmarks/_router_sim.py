"""A pool of many modelled replicas in virtual time: a heap of events, the real router, the real scheduler in every replica.

An event is a turn that arrives at the router, or the end of a replica's step. No sockets, no event loop, no clock of this machine: a run
is a function of the trace, the costs and the policy.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks._router_engine import Costs, ModelledEngine
from benchmarks._router_trace import Session
from slipstream.config.router import RouterConfig
from slipstream.serving.routing.router import Router, Sent
from slipstream.types import Completion, GenerateRequest, Sampling

OBSERVE_S = 1.0
"""Between two looks at the replicas' states, as the pool's health checks do."""


class Simulation:
    """`run` plays every session to its end."""

    def __init__(self, sessions: Sequence[Session], replicas: int, costs: Costs, config: RouterConfig):
        self.now = 0.0
        self.router = Router(config)
        self.engines = {f"engine-{i}": ModelledEngine(costs, pause=lambda seconds: None, clock=lambda: self.now) for i in range(replicas)}
        self._names = list(self.engines)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._stepping: set[str] = set()
        self._sent: dict[str, tuple[Session, int, Sent]] = {}
        self.ttft_s: list[float] = []
        self.left = len(sessions)
        self._observe()
        for session in sessions:
            self._at(session.start_s, lambda session=session: self._ask(session, 0, session.first_T))

    def run(self) -> dict[str, Any]:
        while self._events and self.left:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return figures(self.ttft_s, self.router, [engine.busy_s for engine in self.engines.values()])

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _observe(self) -> None:
        for name, engine in self.engines.items():
            self.router.observe(name, engine.state())
        self._at(self.now + OBSERVE_S, self._observe)

    def _ask(self, session: Session, turn: int, prompt_T: np.ndarray) -> None:
        request = GenerateRequest(f"{session.name}/{turn}", prompt_T, Sampling(max_tokens=session.outputs[turn]))
        sent = self.router.choose(self.router.ask(request), self._names, lambda name: "", self.now)
        self._sent[request.id] = session, turn, sent
        self.engines[sent.replica].add(request)
        self._step(sent.replica)

    def _step(self, name: str) -> None:
        engine = self.engines[name]
        if name in self._stepping or not engine.has_work:
            return
        self._stepping.add(name)
        finished = engine.step().finished
        self._at(self.now + engine.step_s, lambda: self._stepped(name, finished))

    def _stepped(self, name: str, finished: Sequence[Completion]) -> None:
        self._stepping.remove(name)
        for completion in finished:
            session, turn, sent = self._sent.pop(completion.id)
            self.router.answered(sent, completion, self.now)
            self.router.ended(sent)
            self.ttft_s.append(completion.timings.queued_s + completion.timings.prefill_s)
            self._after(session, turn, sent.ask.prompt_T, completion)
        self._step(name)

    def _after(self, session: Session, turn: int, prompt_T: np.ndarray, completion: Completion) -> None:
        if turn + 1 == session.turns:
            self.left -= 1
            return
        longer_T = np.concatenate([prompt_T, completion.tokens_N, session.tools[turn]])
        self._at(self.now + session.thinks_s[turn], lambda: self._ask(session, turn + 1, longer_T))


def figures(ttft_s: Sequence[float], router: Router, busy_s: Sequence[float]) -> dict[str, Any]:
    """What is reported of a run, simulated or not."""
    return {
        "requests": len(ttft_s),
        "hit_rate": router.tokens["cached"] / max(1, router.tokens["prompt"]),
        "predicted": router.tokens["predicted"] / max(1, router.tokens["prompt"]),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "spread": max(busy_s) / (sum(busy_s) / len(busy_s)),
        "moves": sum(router.moves.values()),
        "decision_us": 1e6 * router.decision_s / max(1, sum(router.decisions.values())),
    }
