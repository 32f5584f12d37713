"""Chat templates: the Jinja program in a model folder that turns messages into the text that the model was trained on.

Rendered as transformers does it (same sandbox, options, filters and globals), without importing transformers, which costs a second.
Knows no tokens. Templates come with models and are not trusted: they run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from slipstream.errors import ModelError, RequestError


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Templates of a model folder by name: 'default', and 'tool_use' where the model has its own one for tools. Empty: none."""
    file = folder / "chat_template.jinja"
    if file.exists():
        extra = {path.stem: path.read_text() for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        return {**extra, "default": file.read_text()}
    found = tokenizer_config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    return {entry["name"]: entry["template"] for entry in found or ()}


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Raises ModelError: the template is not Jinja. RequestError: it refuses these messages, or fails on them."""
    try:
        return _compile(template).render(variables)
    except jinja2.TemplateError as error:
        raise RequestError(f"messages: the model's chat template refused them: {error.message or type(error).__name__}") from None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise RequestError(f"messages: the model's chat template failed on them: {type(error).__name__}: {error}") from None


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates want them: no keys that are None, and arguments of tool calls as objects (OpenAI sends JSON text)."""
    return [{key: _plain_calls(value) if key == "tool_calls" else value for key, value in m.items() if value is not None} for m in messages]


def _plain_calls(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**call, "function": _plain_function(call["function"])} if "function" in call else dict(call) for call in calls]


def _plain_function(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(function)
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return dict(function)  # a call that the model got wrong is shown to it as it wrote it
    return {**function, "arguments": parsed} if isinstance(parsed, dict) else dict(function)


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template is not valid Jinja, line {error.lineno}: {error.message}") from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own tojson escapes <, > and & for HTML; models were trained without that
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
