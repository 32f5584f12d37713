"""What every metric, span and event means: definition, unit, healthy range, what to do when it leaves that range.

The entries are in keys.py. A key is 'role/noun/stat'; '<name>' stands for one part that varies. MetricsWriter refuses keys that
are not there, a test compares the table with what the code emits, and docs/metrics.md is printed from it:

    python -m slipstream.observe.registry > docs/metrics.md
"""

from __future__ import annotations

import functools
import re

from slipstream.observe.keys import ENGINE, EVENTS, GATEWAY, METRICS, ORCHESTRATOR, ROUTER, SPANS, TRAINER, Metric


def find(key: str) -> Metric | None:
    """The entry that defines `key`, or None."""
    return _find(key)


@functools.cache
def _find(key: str) -> Metric | None:
    return next((metric for metric, pattern in _PATTERNS if pattern.fullmatch(key)), None)


_PATTERNS = [(metric, re.compile(re.sub(r"<\w+>", "[^/]+", metric.key))) for metric in METRICS]


def to_markdown() -> str:
    """docs/metrics.md."""
    parts = [_INTRODUCTION]
    tables = (("Trainer", TRAINER), ("Orchestrator", ORCHESTRATOR), ("Router", ROUTER), ("Engine", ENGINE), ("Gateway", GATEWAY))
    for title, metrics in tables:
        parts.append(f"## {title}\n\n| Key | Definition | Unit | Healthy | If not |\n|---|---|---|---|---|\n")
        parts.append("".join(f"| `{m.key}` | {m.definition} | {m.unit} | {m.healthy} | {m.action} |\n" for m in metrics) + "\n")
    for title, lines in (("Spans", SPANS), ("Events", EVENTS)):
        parts.append(f"## {title}\n\n| Name | Role | Definition |\n|---|---|---|\n")
        parts.append("".join(f"| `{line.name}` | {line.role} | {line.definition} |\n" for line in lines) + "\n")
    return "".join(parts).rstrip("\n") + "\n"


_INTRODUCTION = """# Metrics

Printed by `python -m slipstream.observe.registry > docs/metrics.md`; a test compares it with what the code emits.

Every role appends lines to `metrics.jsonl` in the run folder: `metrics` (values of one step), `span` (something that took time) and
`event` (something that happened). A key is `role/noun/stat`; `<name>` stands for a part that varies. Work and waiting are different
metrics: each place where a main loop waits has a `wait_` metric of its own.

"""

if __name__ == "__main__":
    print(to_markdown(), end="")
