"""The way up: one thread that loads what fetches want from disk and from the shared folder."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from slipstream.engine.blocks import version_of
from slipstream.engine.tiers.contents import RAM, Contents
from slipstream.engine.tiers.fetch import Work
from slipstream.engine.tiers.index import Place
from slipstream.errors import WireError


class Reader:
    """`run` in a thread of its own; the engine's thread calls `push` and `close`."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._wanted: deque[Work] = deque()
        self._work = threading.Condition(contents.lock)
        self._closing = False

    def push(self, work: Work) -> None:
        """Under the lock."""
        self._wanted.append(work)
        self._work.notify()

    def close(self) -> None:
        """`run` ends after the fetch that it is at."""
        with self._contents.lock:
            self._closing = True
            self._work.notify()

    def run(self) -> None:
        while True:
            with self._contents.lock:
                while not self._wanted and not self._closing:
                    self._work.wait()
                if self._closing:
                    return
                work = self._wanted.popleft()
            self._read(work)

    def _read(self, work: Work) -> None:
        """In order, up to the first that is not there: what follows it would be of no use."""
        for i, key, name, place in work.items:
            if work.fetch.cancelled:
                break
            payload = self._load(name, key, place)
            if payload is None:
                payload, name = self._find_again(key)
            if payload is None:
                work.fetch.limit = i
                break
            work.fetch.deliver(i, payload, name)
        work.fetch.finish()

    def _find_again(self, key: bytes) -> tuple[np.ndarray | None, str]:
        """A block that was not where it should be: it may have moved to another tier since."""
        contents = self._contents
        with contents.lock:
            name = contents.where(key)
            if name == RAM:
                return contents.in_ram(key), RAM
            place = contents.tiers[name].get(key) if name is not None else None
        return (self._load(name, key, place), name) if name is not None and place is not None else (None, "")

    def _load(self, name: str, key: bytes, place: Place) -> np.ndarray | None:
        try:
            payload = self._contents.stores[name].read(key, place)
            if version_of(payload) != place.version:
                raise WireError(f"KV block {key.hex()} was written by version {version_of(payload)}; its name says {place.version}")
        except (OSError, WireError) as error:
            self._contents.note_bad(name, key, place, error)
            return None
        self._contents.health[name].worked()
        return payload
