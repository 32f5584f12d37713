"""Whether a tier's store works: after an error it is left alone for a while, and tried again, so that a full disk costs one log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

RETRY_S = 30.0


class Health:
    """Of one store."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.ok = True
        self._name, self._clock = name, clock
        self._retry_at = 0.0

    def may_try(self) -> bool:
        return self.ok or self._clock() >= self._retry_at

    def failed(self, error: Exception) -> None:
        if self.ok:
            log.error("the %s tier of the KV cache is switched off, generation goes on without it: %s", self._name, error)
        self.ok = False
        self._retry_at = self._clock() + RETRY_S

    def worked(self) -> None:
        if not self.ok:
            log.warning("the %s tier of the KV cache works again", self._name)
        self.ok = True
