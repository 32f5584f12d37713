"""The registry against the code: what is emitted is defined, what is defined is emitted, and docs/metrics.md is current."""

import re
from pathlib import Path

import pytest

from slipstream.observe import registry
from slipstream.observe.keys import EVENTS, METRICS, SPANS
from slipstream.orchestrator.concurrency import Hold

ROOT = Path(__file__).parents[3]
ROLES = ("trainer", "orchestrator", "router", "engine", "gateway")
FOLDERS = ("trainer", "orchestrator", "serving", "engine")
LITERAL = re.compile(rf"""["'](?P<text>(?:{"|".join(ROLES)})/[^"'\s]*)["']""")


def sources() -> dict[Path, str]:
    """The code of the roles, without fakes and without observe itself."""
    return {path: path.read_text() for folder in FOLDERS for path in sorted((ROOT / "src/slipstream" / folder).rglob("*.py"))}


def emitted() -> set[str]:
    """Key patterns in string literals; the varying parts of f-strings are '{}'. 'role/noun' alone is the prefix of a family.

    The trainer's step writes some keys without 'trainer/' and adds it: those are found beside that f-string.
    """
    found = set()
    for text in sources().values():
        keys = {re.sub(r"\{[^}]*\}|<\w+>", "{}", match["text"]) for match in LITERAL.finditer(text)}
        if "trainer/{}" in keys:
            keys |= {f"trainer/{key}" for key in re.findall(r'"([a-z]+/[a-z_]+)":', text)}
        found |= {key + "/{}" if key.count("/") == 1 else key for key in keys - {"trainer/{}"}}
    return found


def matches(emitted_key: str, registered_key: str) -> bool:
    """Whether the two patterns have a key in common: each is tried against an example of the other."""
    example = re.sub(r"<\w+>", "x", registered_key)
    pattern = re.escape(emitted_key).replace(r"\{\}", "[^/]+")
    return bool(re.fullmatch(pattern, example))


def test_every_emitted_key_is_registered():
    unknown = {key for key in emitted() if not any(matches(key, metric.key) for metric in METRICS)}
    assert unknown == set()


def test_every_registered_key_is_emitted():
    keys = emitted()
    unused = {metric.key for metric in METRICS if not any(matches(key, metric.key) for key in keys)}
    assert unused == set()


@pytest.mark.parametrize("what", ["ready", "update", *Hold])
def test_every_wait_of_the_orchestrator_has_an_entry_of_its_own(what):
    assert registry.find(f"orchestrator/time/wait_{what}_s") is not None


@pytest.mark.parametrize(("lines", "call"), [(SPANS, "span"), (EVENTS, "event")])
def test_every_event_and_span_of_the_code_is_described(lines, call):
    names = {line.name for line in lines}
    used = {name for text in sources().values() for name in re.findall(rf'\.{call}\("(\w+)"', text)}
    assert used <= names


def test_every_described_event_and_span_is_in_the_code():
    text = "\n".join(sources().values())
    assert {line.name for line in (*SPANS, *EVENTS) if f'"{line.name}"' not in text} == set()


def test_the_page_of_metrics_is_current():
    """Otherwise: python -m slipstream.observe.registry > docs/metrics.md"""
    assert (ROOT / "docs/metrics.md").read_text() == registry.to_markdown()


def test_every_entry_says_what_it_is_what_is_healthy_and_what_to_do():
    for metric in METRICS:
        assert all(text.strip() for text in metric), metric.key
        assert metric.key.split("/")[0] in ROLES and 3 <= len(metric.key.split("/")) <= 4
        assert "|" not in "".join(metric), f"{metric.key}: a pipe breaks the table"
    assert len({metric.key for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("trainer/loss/mean", "trainer/loss/mean"),
        ("orchestrator/reward/calculator/mean", "orchestrator/reward/<env>/mean"),
        ("orchestrator/reward/my env:x.y-z/mean", "orchestrator/reward/<env>/mean"),
        ("orchestrator/reward/mean", "orchestrator/reward/mean"),
        ("orchestrator/dropped/stale", "orchestrator/dropped/<reason>"),
        ("orchestrator/dropped/a/b", None),
        ("orchestrator/dropped/", None),
        ("trainer/loss", None),
        ("", None),
    ],
)
def test_a_key_finds_its_entry(key, entry):
    found = registry.find(key)
    assert (found.key if found else None) == entry
