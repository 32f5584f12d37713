"""The configuration reference, read from the sections themselves: `slipstream config`, and docs/configuration.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import pydantic

from slipstream.config.base import Section
from slipstream.errors import ConfigError


def reference(cls: type[Section], section: str = "") -> str:
    """Markdown: one heading a table of the run file, one line a key. `section` is a dotted prefix.

    Raises ConfigError when there is no such section.
    """
    tables = [(path, table) for path, table in _tables(cls, ()) if not section or f"{_plain(path)}.".startswith(f"{_plain(section)}.")]
    if not tables:
        known = ", ".join(dict.fromkeys(_plain(path) for path, _ in _tables(cls, ()) if path))
        raise ConfigError(f"no section {section!r}; sections: {known}")
    return "\n\n".join(_render(path, table) for path, table in tables) + "\n"


def _tables(cls: type[Section], path: tuple[str, ...]) -> Iterator[tuple[str, type[Section]]]:
    yield ".".join(path), cls
    for name, info in cls.model_fields.items():
        for inner in _sections(info.annotation):
            kind = inner.model_fields.get("type")
            label = (
                f"{name} (type = {json.dumps(kind.default)})" if kind is not None and len(list(_sections(info.annotation))) > 1 else name
            )
            yield from _tables(inner, (*path, label))


def _plain(path: str) -> str:
    """The path as one writes it, without '(type = ...)': a section with types is all of them."""
    return re.sub(r" \(type = [^)]*\)", "", path)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def _render(path: str, cls: type[Section]) -> str:
    lines = [f"### `[{path}]`" if path else "### top level", "", " ".join((cls.__doc__ or "").split()), ""]
    for name, info in cls.model_fields.items():
        if next(_sections(info.annotation), None) is None:
            lines.append(f"- `{name}` = {_default(info)}. {' '.join((info.description or '').split())}".rstrip())
    return "\n".join(lines)


def _default(info: pydantic.fields.FieldInfo) -> str:
    if info.is_required():
        return "(required)"
    value = info.get_default(call_default_factory=True)
    return "`none`" if value is None else f"`{json.dumps(value, default=str)}`"


if __name__ == "__main__":
    from slipstream.config import RunConfig

    print("# Configuration\n")
    print("Generated from the sections in `src/slipstream/config` by `make docs`; `slipstream config [SECTION]` prints the same.")
    print("Values are layered: defaults, then files from left to right, then `--set key=value`. Tables merge, lists replace.\n")
    print(reference(RunConfig), end="")
