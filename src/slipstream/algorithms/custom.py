"""Functions of the user's own, named in the run file as 'package.module:function'. Knows nothing about what they compute."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from slipstream.errors import ConfigError


def import_function(path: str, key: str) -> Callable[..., Any]:
    """The callable behind `path`; `key` is the run file's key, for the message.

    Raises ConfigError: the path is malformed, the module does not import, or it has no such callable.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{key} = {path!r}: expected 'package.module:function'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{key} = {path!r}: module {module_name!r} does not import ({error}); is it on PYTHONPATH?") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key} = {path!r}: module {module_name!r} has no function {name!r}")
    return function
