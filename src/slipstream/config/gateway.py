"""[gateway]: where agents call the policy over HTTP."""

from __future__ import annotations

from pydantic import Field

from slipstream.config.base import Section


class GatewayConfig(Section):
    """The gateway of a run whose environments let agents play (it runs in the orchestrator's process), or of `slipstream gateway`."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback is your decision: whoever has a session's key can sample in its name."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: a free port."""
    max_sessions: int = Field(default=4096, ge=1)
    """Sessions open at once; further ones that a client opens are refused (HTTP 429)."""
    idle_s: float = Field(default=3600.0, gt=0)
    """A session that a client opened and that has made no call for this long is ended. Those of a run's own rollouts have its deadlines."""
    turn_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one engine call in a session that a client opened; the others have their environment's."""
