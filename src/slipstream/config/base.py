"""How a run file becomes a checked, frozen object.

Values are layered: defaults < files from left to right < `--set key=value`. Tables merge key by key; lists replace.
A mistake becomes one `ConfigError` that lists every problem with its key, its value and what to write instead.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import pydantic
import xxhash

from slipstream.errors import ConfigError


class Section(pydantic.BaseModel):
    """A frozen table of the run file. The string under each field is its documentation and its `--help`."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def fingerprint(self) -> str:
        """16 hex digits over the canonical JSON form: equal configurations, equal fingerprint."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return xxhash.xxh3_64_hexdigest(text.encode())

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again (pydantic's model_copy does not check). Raises ConfigError."""
        return validate(type(self), {**self.model_dump(), **changes})


T = TypeVar("T", bound="Section")


def load(cls: type[T], files: Sequence[Path] = (), sets: Sequence[str] = ()) -> T:
    """Layer `files` and `key=value` assignments over the defaults of `cls`.

    Raises ConfigError: a file is missing or not TOML, a key is unknown, a value does not fit, settings contradict.
    """
    values: dict[str, Any] = {}
    for file in files:
        values = merge(values, _read(Path(file)))
    for assignment in sets:
        values = merge(values, _assignment(assignment))
    return validate(cls, values)


def validate(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build `cls` from plain values, or raise one ConfigError with a line for each problem."""
    try:
        return cls.model_validate(values)
    except pydantic.ValidationError as error:
        lines = [_explain(cls, problem) for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`: tables merge, everything else (lists too) replaces. A table that names another `type` replaces."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        same_kind = isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("type", old.get("type")) == old.get("type")
        result[key] = merge(old, value) if same_kind else value  # type: ignore[arg-type]
    return result


def to_toml(section: Section) -> str:
    """The resolved configuration as TOML, with None left out: what `config.toml` in a run folder holds."""
    return _toml_table(section.model_dump(mode="json", exclude_none=True), prefix=())


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"run file {file} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"run file {file} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"run file {file} cannot be read: {error.strerror}") from None


def _assignment(text: str) -> dict[str, Any]:
    """'a.b-c=1' -> {'a': {'b_c': 1}}. The value is TOML or JSON; anything else is taken as a string; None as null."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: expected key=value, such as --set trainer.optim.lr=1e-4")
    value: Any = _scalar(raw.strip())
    for part in reversed(key.strip().replace("-", "_").split(".")):
        value = {part: value}
    return value


def _scalar(raw: str) -> Any:
    if raw in ("None", "null"):
        return None
    for parse in (json.loads, lambda text: tomllib.loads(f"v = {text}")["v"]):
        try:
            return parse(raw)
        except ValueError:
            continue
    return raw


def _explain(cls: type[Section], problem: Any) -> str:
    """One line for one pydantic problem: key, value, what was expected, the nearest right key."""
    location = _as_written(cls, problem["loc"])
    key = ".".join(location) or "(whole file)"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        if owners := [kind for kind in _kinds(cls, location[:-1]) if location[-1] in kind.model_fields]:
            types = " or ".join(f'"{kind.model_fields["type"].default}"' for kind in owners)
            return f"{key}: a key of {'.'.join([*location[:-1], 'type'])} = {types} only; leave it out, or choose that type"
        hint = _near(location, _all_fields(cls))
        return f"{key}: unknown key{hint}"
    if problem["type"] == "missing":
        return f"{key}: this key is required"
    if problem["type"] == "value_error" and (not location or isinstance(problem["input"], Mapping)):
        return message  # it names the keys and their values
    if problem["type"].startswith("union_tag"):
        expected = problem["ctx"].get("expected_tags") or _types(cls, location)
        has = f"type = {problem['ctx']['tag']!r}" if "tag" in problem["ctx"] else "`type` is missing"
        return f"{key}: {has}; expected one of {expected}"
    if problem["type"] == "model_attributes_type":
        return f"{key} = {problem['input']!r}: expected a table, such as {location[-1]}.type = ..."
    return f"{key} = {problem['input']!r}: {message}"


def _as_written(cls: type[pydantic.BaseModel], location: Sequence[str | int]) -> list[str]:
    """Without the names of types that pydantic puts between a key and what is wrong in its table."""
    parts: list[str] = []
    kinds: list[type[pydantic.BaseModel]] = [cls]
    for part in location:
        named = [kind for kind in kinds if len(kinds) > 1 and kind.model_fields["type"].default == part]
        if named:
            kinds = named
            continue
        parts.append(str(part))
        if isinstance(part, str):
            kinds = [inner for kind in kinds if part in kind.model_fields for inner in _sections_in(kind.model_fields[part].annotation)]
    return parts


def _types(cls: type[pydantic.BaseModel], location: Sequence[str]) -> str:
    """Values that `type` of the table at `location` may have."""
    return ", ".join(repr(kind.model_fields["type"].default) for kind in _kinds(cls, location))


def _kinds(cls: type[pydantic.BaseModel], location: Sequence[str]) -> list[type[pydantic.BaseModel]]:
    """What the table at `location` may be."""
    kinds: list[type[pydantic.BaseModel]] = [cls]
    for part in location:
        if not part.isdigit():
            kinds = [inner for kind in kinds if part in kind.model_fields for inner in _sections_in(kind.model_fields[part].annotation)]
    return kinds


def _near(location: Sequence[str], paths: Iterable[str]) -> str:
    """The key that may have been meant: a similar one of the same table, or else of those with the most similar name the one with the
    most similar path."""
    table = "".join(f"{part}." for part in location[:-1])
    paths = list(paths)
    beside = [path.removeprefix(table) for path in paths if path.rpartition(".")[0] == table.rstrip(".")]
    if near := difflib.get_close_matches(location[-1], sorted(beside), n=1, cutoff=0.6):
        return f"; did you mean {table + near[0]!r}?"
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    near = difflib.get_close_matches(location[-1], sorted(by_name), n=1, cutoff=0.5)
    if not near:
        return "; `slipstream config` lists every key"
    written = ".".join(location)
    return f"; did you mean {max(sorted(by_name[near[0]]), key=lambda path: difflib.SequenceMatcher(None, written, path).ratio())!r}?"


def _all_fields(cls: type[pydantic.BaseModel], prefix: str = "") -> set[str]:
    """Dotted paths."""
    paths: set[str] = set()
    for name, info in cls.model_fields.items():
        paths.add(prefix + name)
        for inner in _sections_in(info.annotation):
            paths |= _all_fields(inner, f"{prefix}{name}.")
    return paths


def _sections_in(annotation: Any) -> Iterable[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _sections_in(part)


def _toml_table(table: Mapping[str, Any], prefix: tuple[str, ...]) -> str:
    scalars = {k: v for k, v in table.items() if not isinstance(v, Mapping) and not _is_table_list(v)}
    lines = [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in scalars.items()]
    text = "\n".join(lines) + ("\n" if lines else "")
    for key, value in table.items():
        if isinstance(value, Mapping):
            path = (*prefix, _toml_key(key))
            text += f"\n[{'.'.join(path)}]\n" + _toml_table(value, path)
        elif _is_table_list(value):
            for item in value:
                path = (*prefix, _toml_key(key))
                text += f"\n[[{'.'.join(path)}]]\n" + _toml_table(item, path)
    return text


def _is_table_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
