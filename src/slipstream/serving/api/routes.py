"""All API routes over one port, at the server's root or under a prefix."""

from __future__ import annotations

from aiohttp import web

from slipstream.serving.api.anthropic_api import anthropic_routes
from slipstream.serving.api.openai_api import openai_routes
from slipstream.serving.api.port import Port


def api_routes(port: Port, prefix: str = "") -> list[web.RouteDef]:
    """`prefix` may have path parameters; the port finds them in the request."""
    return [web.route(method, prefix + path, handler) for method, path, handler in (*openai_routes(port), *anthropic_routes(port))]
