"""[router]: which replica gets a request, and what happens when replicas fail."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slipstream.config.base import Section

TOKEN_ENV = "SLIPSTREAM_ENGINE_TOKEN"
"""Environment variable with the admin token of engines that are no part of a run: what they take, and what those before them send."""


class RouterWeights(Section):
    """What a replica costs a request, in prompt tokens to compute: the request goes where it costs least (policy kv_aware)."""

    prefix: float = Field(default=1.0, ge=0)
    """For each prompt token that the replica does not hold."""
    pending: float = Field(default=1.0, ge=0)
    """For each prompt token that was sent there and is presumably not computed yet."""
    requests: float = Field(default=64.0, ge=0)
    """For each request in flight there."""
    waiting: float = Field(default=0.0, ge=0)
    """For each request that waited in the replica's own queue when it last said so."""
    resident: float = Field(default=16000.0, ge=0)
    """For what the contexts of its sessions take of its KV cache (0: nothing, 1: all), by the router's own books."""
    kv: float = Field(default=0.0, ge=0)
    """For KV use (0 to 1) when it last said so. 0, as that is up to router.health_interval_s old: a whole burst would follow it."""
    behind: float = Field(default=4096.0, ge=0)
    """For each policy version that it is behind the newest."""
    stay: float = Field(default=1024.0, ge=0)
    """Taken off the cost of the replica that served the session last: small differences move nobody."""


class RouterConfig(Section):
    """The router in front of all replicas; see docs/routing.md."""

    policy: Literal["kv_aware", "consistent_hash", "least_loaded", "two_choices", "round_robin"] = "kv_aware"
    """kv_aware: least cost by `weights`. The others place the first turn of a session: by hash, by requests in flight, by the better of two
    drawn at random, in turn."""
    sticky: bool = True
    """Later turns stay on the replica of the first, whose KV cache holds their beginning. With kv_aware: unless another costs less by
    more than weights.stay."""
    weights: RouterWeights = RouterWeights()
    seed: int = Field(default=0, ge=0)
    """Of the draws of two_choices."""
    index_tokens: int = Field(default=1 << 20, ge=1)
    """Most tokens remembered for one replica as being in its KV cache; less where the replica says that it has less."""
    patience_s: float = Field(default=120.0, gt=0)
    """How long a request waits for a replica that may take it."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests beyond this many waiting for a replica are refused, and counted."""
    health_interval_s: float = Field(default=1.0, gt=0)
    """Every replica that is up is asked for its state this often."""
    health_deadline_s: float = Field(default=30.0, gt=0)
    """A replica that does not answer within this is down. An engine answers between two of its steps: allow for the longest."""
    update_timeout_s: float = Field(default=120.0, gt=0)
    """How long a replica may take to prepare a policy version, and how long to commit it. One that takes longer is down: the others go on,
    and it gets requests again once it has the version."""
    breaker_failures: int = Field(default=5, ge=1)
    """Failures in a row after which a replica gets no requests for a while. More than the four times that one request is sent, or one
    request could shut every replica out."""
    breaker_open_s: float = Field(default=1.0, gt=0)
    """The first such while; each further one is twice as long, up to breaker_most_s. Then one request goes there, and decides."""
    breaker_most_s: float = Field(default=30.0, gt=0)
    slow_factor: float = Field(default=8.0, gt=1)
    """A replica that takes this many times the median replica's time for a token is kept out for a while like one that fails."""
    prefill: Literal["worth_it", "always"] = "worth_it"
    """Which prompts go to prefill engines, where there are any (engine.disaggregation). worth_it: those that cost all requests together
    less time there than where they are decoded. always: each with a whole block that is presumably not cached."""
    urls: tuple[str, ...] = ()
    """Engines that somebody else runs, like 'http://10.0.0.5:8000': `slipstream rl` then starts none."""
    resolve: bool = False
    """The host names in `urls` stand for as many engines as they have addresses, which are looked up again every ten seconds."""
    token_env: str = TOKEN_ENV
    """Environment variable with the admin token of the engines in `urls`."""

    @model_validator(mode="after")
    def _cross_checks(self):
        if self.breaker_most_s < self.breaker_open_s:
            raise ValueError(
                f"router.breaker_open_s = {self.breaker_open_s} and router.breaker_most_s = {self.breaker_most_s}: the longest time cannot "
                "be shorter than the first"
            )
        if self.resolve and not self.urls:
            raise ValueError("router.resolve = true and router.urls = []: there is no host name to look up; set urls")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"router.urls: {url!r} is not an address like 'http://host:8000'")
        return self
