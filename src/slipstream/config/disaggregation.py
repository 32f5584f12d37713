"""[engine.disaggregation]: some engines prefill, the others decode."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipstream.config.base import Section

Role = Literal["mixed", "prefill", "decode"]
Transport = Literal["auto", "shared_memory", "socket"]


class DisaggregationConfig(Section):
    """Prefill in processes of its own, so that long prompts do not hold up those who decode. See docs/disaggregation.md."""

    prefill_replicas: int = Field(default=0, ge=0)
    """How many of engine.replicas only prefill: the last ones. The others decode. 0: every replica does both."""
    transport: Transport = "auto"
    """How blocks travel. auto: by shared memory where both engines are on one host, else by the socket."""
    port: int = Field(default=0, ge=0, le=65535)
    """Where prefill engines hand blocks over, on engine.host. 0: a free port; else the i-th prefill engine listens on port + i."""
    decode_prompt_tokens: int = Field(default=16, ge=1)
    """Prompt tokens that a decode engine computes in a step in which others decode: short prompts, and what no prefill engine brought.
    More, doubling every 8 steps, while that leaves some undone. engine.max_step_tokens bounds it as ever."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long a request waits for the blocks of its prompt; then the decode engine computes what is missing."""
