"""Prefill engines as a source of blocks, beside the tiers: see `engine.fetch`.

A request that names a prefill engine (`prefill_at`) waits for the blocks of its prompt that are not here, if that engine is thought to
answer; what does not come is computed. The last token is always computed here: somebody must sample from it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile

import numpy as np

from slipstream.config.disaggregation import DisaggregationConfig
from slipstream.engine.blocks import Blocks
from slipstream.engine.handoff.client import Reception
from slipstream.engine.handoff.handshake import Asker
from slipstream.engine.handoff.listener import Form
from slipstream.engine.handoff.messages import Fetch, HandoffError
from slipstream.engine.handoff.peers import Peers
from slipstream.serving.keys import extend_keys, tail_key
from slipstream.types import GenerateRequest

MOST_AT_ONCE = 64
"""Handoffs under way; one more is computed here."""

OWN_SHARE = 0.9
"""Of the time that a request waits, after which a handoff ends by itself: before the scheduler gives it up without a word on why."""


class HandoffSource:
    """A `fetch.BlockSource`."""

    def __init__(
        self,
        blocks: Blocks,
        form: Form,
        token: str,
        weights: Callable[[], tuple[int, str]],
        config: DisaggregationConfig,
        counts: Counter[str],
    ) -> None:
        """`weights`: the live version and its fingerprint. `token`: of the run.

        Adds to `counts`: fetches, blocks, tokens, bytes and shared_bytes that came, failures, milliseconds.
        """
        self.timeout_s, self.brings_tails = config.timeout_s, True
        self.peers = Peers()
        self._blocks, self._form, self._token, self._weights, self._config, self._counts = blocks, form, token, weights, config, counts
        self._open: set[Reception] = set()
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, "handoff")

    def find(self, request: GenerateRequest, keys: Sequence[bytes]) -> int:
        if not request.prefill_at or len(self._open) >= MOST_AT_ONCE or not self.peers.may_ask(request.prefill_at):
            return 0
        return self._span(request, keys)[1]

    def start(self, request: GenerateRequest, keys: Sequence[bytes], wake: Callable[[], None]) -> HandoffFetch:
        first, _ = self._span(request, keys)
        fetch = Fetch(request.id, request.salt, first, len(keys))
        asker = Asker(self._token, self._form.layout, *self._weights())
        deadline = time.monotonic() + OWN_SHARE * self.timeout_s
        reception = Reception(fetch, self._form.block_bytes, self._config.transport, deadline, lambda: self._weights()[0], wake)
        tokens_T = np.ascontiguousarray(request.prompt_T[: (first + len(keys)) * self._form.block_tokens + 1], np.int32)
        tokens = len(tokens_T) - 1 - first * self._form.block_tokens
        self._open.add(reception)
        self._threads.submit(reception.run, request.prefill_at, asker, tokens_T)
        return HandoffFetch(self, request.prefill_at, reception, self._blocks, tokens)

    def close(self) -> None:
        """End what is under way: a process does not end before its threads have."""
        for reception in self._open:
            reception.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ended(self, address: str, reception: Reception, tokens: int, error: HandoffError | None, seconds: float) -> None:
        """Books of one fetch, of `tokens` if all comes: called once, by the engine's thread, possibly while the reception is still being
        told to stop."""
        self._open.discard(reception)
        complete, moved = reception.complete, reception.complete * self._form.block_bytes
        self._counts.update(fetches=1, blocks=complete, tokens=min(tokens, complete * self._form.block_tokens), bytes=moved)
        self._counts.update(shared_bytes=moved if reception.shared else 0, milliseconds=round(1000 * seconds))
        if 0 < complete == len(reception.rows):
            self.peers.succeeded(address)
        elif error is not None or seconds >= OWN_SHARE * self.timeout_s:
            self._counts["failures"] += 1
            self.peers.failed(address, error or HandoffError("deadline", f"not done within {self.timeout_s:g} s"))

    def _span(self, request: GenerateRequest, keys: Sequence[bytes]) -> tuple[int, int]:
        """(index of the first key among the blocks of the prompt, how many of `keys` lie in the prompt before its last token)."""
        chain, size = list[bytes](), self._form.block_tokens
        extend_keys(chain, request.prompt_T[:-1], request.salt, size)
        if not keys or keys[0] not in chain:
            return 0, 0
        first = chain.index(keys[0])
        names = [*chain[first:], tail_key(chain, request.prompt_T[:-1], request.salt, size)]
        return first, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(keys, names, strict=False)))


class HandoffFetch:
    """A `fetch.Fetch` over one handoff."""

    def __init__(self, source: HandoffSource, address: str, reception: Reception, blocks: Blocks, tokens: int) -> None:
        self._source, self._address, self._reception, self._blocks, self._tokens = source, address, reception, blocks, tokens
        self._began_s = time.monotonic()
        self._written = 0
        self._open = True

    @property
    def ready(self) -> bool:
        return self._reception.complete > self._written or self._reception.done

    @property
    def done(self) -> bool:
        return self._reception.done and self._written == self._reception.complete

    def write(self, blocks: Sequence[int], most: int) -> int:
        new = slice(self._written, min(self._reception.complete, self._written + most))
        self._blocks.write_many(blocks[new], self._reception.rows[new])
        self._written = new.stop
        return new.stop

    def tier(self, index: int) -> str:
        return "peer"

    def cancel(self, late: bool) -> None:
        if not self._open:
            return
        self._open = False
        error = self._reception.error  # before `cancel`, which makes one of its own
        if not self._reception.done:
            self._reception.cancel()
        self._source.ended(self._address, self._reception, self._tokens, error, time.monotonic() - self._began_s)
