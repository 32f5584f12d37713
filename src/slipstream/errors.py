"""One exception tree. The class says which boundary broke, so that a log line is enough to know whom to ask.

    SlipstreamError
    ├── ConfigError        the user's run file, flags or folder: shown without a traceback
    ├── ModelError         a model folder or checkpoint that cannot be read: missing, truncated, wrong hash, wrong shape
    ├── WireError          a message or file that does not decode: wrong magic, version, size or checksum
    ├── EngineError        the engine refused or failed a request (an infrastructure failure, never a reward of 0)
    │   ├── RequestError   the request itself is wrong (HTTP 4xx): repeating it cannot help
    │   └── EngineUnavailable  nobody answered, or the engine is going down: repeating it may help
    │       └── EngineBusy     it is alive and has no room now
    ├── EnvError           an environment raised, or broke its contract
    │   └── RewardError    its reward function raised, hung, or returned something that is not a finite number
    ├── TrainerError       training cannot go on (non-finite loss too often, no batch within the deadline)
    └── StateError         an invariant of ours is broken: always a bug in slipstream

Add a class only for a boundary that has none. Every message names the thing, the value, what was expected and what to do.
"""

NO_SPACE = 3
"""Exit code of a process that could not write because the disk is full: its log may not say so."""


class SlipstreamError(Exception):
    """Base of all errors that slipstream raises on purpose."""


class ConfigError(SlipstreamError):
    """A mistake in a run file, a flag or a folder that the user can mend. The CLI prints it without a traceback."""


class ModelError(SlipstreamError):
    """A model folder or checkpoint cannot be used: missing or truncated file, wrong hash, wrong architecture or shape."""


class WireError(SlipstreamError):
    """A message or file does not decode: wrong magic, schema version, size or checksum."""


class EngineError(SlipstreamError):
    """The engine failed a request. The rollout becomes `infra_error`; it never becomes a reward of 0."""


class RequestError(EngineError):
    """The request is malformed or impossible (prompt longer than the context, unknown field): do not repeat it."""


class EngineUnavailable(EngineError):
    """Nobody answered, or the engine is shutting down: another replica or a later try may succeed."""


class EngineBusy(EngineUnavailable):
    """The engine is alive and its queue is full, or a request with this id is still running (HTTP 429)."""


class EnvError(SlipstreamError):
    """An environment raised or broke its contract. The rollout becomes `env_error`."""


class RewardError(EnvError):
    """A reward function raised, hung or returned a non-finite value. The rollout becomes `reward_error`."""


class TrainerError(SlipstreamError):
    """Training cannot go on: too many non-finite steps, or no batch within the deadline."""


class StateError(SlipstreamError):
    """An internal invariant does not hold. Always a bug in slipstream: please report it with the run folder."""
