"""Run files: frozen sections, layered values, errors that name the key."""

from slipstream.config.base import Section, load, to_toml, validate
from slipstream.config.run import RunConfig

__all__ = ["RunConfig", "Section", "load", "to_toml", "validate"]
