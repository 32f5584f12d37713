"""What the router says about itself: every `router/...` key that follows from its own books. See docs/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.observe.metrics import counted
from slipstream.serving.replica import Replica
from slipstream.serving.routing.router import Router

_STATES = {"closed": 0, "half_open": 1, "open": 2}


def values(router: Router, replicas: Sequence[Replica], now: float) -> dict[str, float]:
    """Counts since the start, and gauges at `now`."""
    decided = sum(router.decisions.values())
    return {
        "router/replicas/ready": sum(replica.takes(now) for replica in replicas),
        "router/replicas/draining": sum(replica.draining for replica in replicas),
        "router/requests/in_flight": sum(router.in_flight(replica.name) for replica in replicas),
        "router/tokens/pending": router.pending(now),
        "router/tokens/prompt": router.tokens["prompt"],
        "router/tokens/predicted": router.tokens["predicted"],
        "router/tokens/cached": router.tokens["cached"],
        "router/time/decision_us": 1e6 * router.decision_s / decided if decided else 0.0,
        **{f"router/breaker/{replica.name}": _STATES[replica.breaker.state(now)] for replica in replicas},
        **counted("router/served", router.requests),
        **counted("router/decisions", router.decisions),
        **counted("router/moves", router.moves),
    }
