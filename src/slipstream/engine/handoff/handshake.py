"""How the two sides of a handoff show each other that they have the run's token, before either says anything of worth."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from slipstream.engine.handoff.messages import HELLO_BYTES, NONCE_BYTES, Challenge, HandoffError, Hello, Line, Welcome


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, as `messages.Hello` says it."""

    token: str
    layout: str
    version: int
    fingerprint: str


def introduce(line: Line, asker: Asker) -> None:
    """The decode side. Raises HandoffError: refused, or somebody else listens there."""
    challenge, _ = line.receive(HELLO_BYTES, Challenge)
    nonce = secrets.token_bytes(NONCE_BYTES)
    shown = proof(asker.token, "decode", challenge.nonce, nonce)
    line.send(Hello(shown, nonce, asker.layout, asker.version, asker.fingerprint))
    welcome, _ = line.receive(HELLO_BYTES, Welcome)
    if not secrets.compare_digest(welcome.proof, proof(asker.token, "prefill", nonce, challenge.nonce)):
        raise HandoffError("token", "who listens there does not have the token of this run")


def challenge(line: Line, token: str) -> tuple[Hello, Welcome | None]:
    """The prefill side: who asks, and what to answer if they may; None: they do not have the token."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    line.send(Challenge(nonce))
    hello, _ = line.receive(HELLO_BYTES, Hello)
    if not secrets.compare_digest(hello.proof, proof(token, "decode", nonce, hello.nonce)):
        return hello, None
    return hello, Welcome(proof(token, "prefill", hello.nonce, nonce))


def proof(token: str, side: str, nonce: bytes, own_nonce: bytes) -> bytes:
    """That `side` ('decode' or 'prefill') has the token, to who sent `nonce`."""
    return hmac.digest(token.encode(), b"slipstream handoff %s %s%s" % (side.encode(), nonce, own_nonce), hashlib.sha256)
