"""What an engine process says about itself: Prometheus text on request, and lines in the run's metrics.jsonl once a second.

Reads the engine's state and counters; changes nothing. What each key means: slipstream.observe.registry and docs/metrics.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.engine.driver import EngineDriver
from slipstream.observe import registry
from slipstream.observe.metrics import MetricsWriter

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
COUNTERS = frozenset(
    {
        "engine/tokens/generated",
        "engine/tokens/prefilled",
        "engine/tokens/cached",
        "engine/time/busy_s",
        "engine/preemptions/count",
        "engine/steps/failed",
        "engine/ep/vote_s",
        "engine/ep/idle_steps",
        "engine/ep/served_pairs",
        "engine/ep/rebalances",
        "engine/ep/moved_experts",
        "engine/ep/dispatch_s/<layer>",
        "engine/ep/compute_s/<layer>",
        "engine/ep/combine_s/<layer>",
        "engine/time/fetch_s",
        "engine/fetches/<how>",
        "engine/tiers/dropped",
        "engine/tiers/<tier>/hit_tokens",
        "engine/tiers/<tier>/miss_tokens",
        "engine/tiers/<tier>/read_mib",
        "engine/tiers/<tier>/written_mib",
        "engine/tiers/<tier>/evicted",
        "engine/tiers/<tier>/damaged",
        "engine/speculation/drafted",
        "engine/speculation/accepted",
        "engine/handoff/fetches",
        "engine/handoff/failures",
        "engine/handoff/blocks",
        "engine/handoff/tokens",
        "engine/handoff/bytes",
        "engine/handoff/shared_bytes",
        "engine/handoff/served",
        "engine/handoff/refused",
        "engine/handoff/dropped",
        "engine/handoff/sent_bytes",
        "engine/time/handoff_s",
    }
)
"""Keys and families of keys that only grow while the process lives; the others are gauges."""
HANDOFFS = ("fetches", "failures", "blocks", "tokens", "bytes", "shared_bytes", "served", "refused", "dropped", "sent_bytes")


def engine_values(driver: EngineDriver) -> dict[str, float]:
    """Every engine metric, now."""
    engine = driver.engine
    state = engine.state()
    return {
        "engine/tokens/generated": state.generated_tokens,
        "engine/tokens/prefilled": engine.tokens_prefilled,
        "engine/tokens/cached": engine.tokens_cached,
        "engine/time/busy_s": state.busy_s,
        "engine/time/uptime_s": state.uptime_s,
        "engine/time/prepare_s": driver.prepare_s,
        "engine/time/commit_s": driver.commit_s,
        "engine/requests/running": state.running,
        "engine/requests/waiting": state.waiting,
        "engine/kv/used_frac": state.kv_used_frac,
        "engine/kv/age_max": engine.kv_age_max,
        "engine/version/live": state.live_version,
        "engine/preemptions/count": engine.preemptions,
        "engine/steps/failed": driver.failed_steps,
        "engine/speculation/drafted": engine.speculation.drafted,
        "engine/speculation/accepted": engine.speculation.accepted,
        "engine/speculation/acceptance_frac": engine.speculation.acceptance,
        "engine/speculation/tokens_per_step": engine.speculation.tokens_per_step,
        "engine/memory/weight_mib": engine.weight_bytes / 2**20,
        "engine/memory/kv_mib": engine.kv_bytes / 2**20,
        **{f"engine/handoff/{name}": driver.handoffs[name] for name in HANDOFFS},
        "engine/time/handoff_s": driver.handoffs["milliseconds"] / 1000,
        "engine/memory/rss_mib": psutil.Process().memory_info().rss / 2**20,
        **engine.block_values(),
        **driver.more_values(),
    }


class _EngineCollector(Collector):
    """Reads the values when they are scraped: nothing is counted twice and no request pays for metrics."""

    def __init__(self, driver: EngineDriver):
        self._driver = driver

    def collect(self) -> Iterator[Metric]:
        for key, value in engine_values(self._driver).items():
            found = registry.find(key)
            kind = CounterMetricFamily if found and found.key in COUNTERS else GaugeMetricFamily
            yield kind("slipstream_" + key.replace("/", "_"), found.definition if found else key, value=value)


def prometheus_text(driver: EngineDriver) -> bytes:
    """All engine metrics in Prometheus' text format, from a registry of this call's own."""
    own = CollectorRegistry()
    own.register(_EngineCollector(driver))
    return generate_latest(own)


async def report(driver: EngineDriver, writer: MetricsWriter) -> None:
    """Every second: values, busy spans, and how the experts were used since the last time. Runs until cancelled.

    A full disk costs lines, not the engine: who has something to lose ends the run.
    """
    seen = driver.engine.expert_load.copy()
    while True:
        await asyncio.sleep(INTERVAL_S)
        try:
            write_once(driver, writer)
        except OSError as error:
            log.error("metrics are lost: %s", error)
            continue
        load_LE = driver.engine.expert_load
        if (load_LE != seen).any():
            recent_LE = load_LE - seen
            writer.event("expert_load", load=recent_LE / recent_LE.sum(axis=1, keepdims=True).clip(1))
            seen = load_LE.copy()


def write_once(driver: EngineDriver, writer: MetricsWriter) -> None:
    """One line of values at the live version as the step, and a span a busy period."""
    values = engine_values(driver)
    writer.log(int(values["engine/version/live"]), values)
    for start, end in driver.take_spans():
        writer.span("busy", start, end, step=int(values["engine/version/live"]))
