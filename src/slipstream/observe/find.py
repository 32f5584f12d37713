"""`slipstream rollouts`: the transcripts that fit every filter, and which filters make sense for this run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.observe.rollouts import file_number, format_rollout, read_rollouts, rollout_files
from slipstream.observe.summary import read_config
from slipstream.types import Outcome

MEANINGS = {
    Outcome.completed: "played to its end; has a reward",
    Outcome.truncated: "ran out of tokens, context or turns; has a reward",
    Outcome.stale: "cancelled: it would have been too old to be trained",
    Outcome.cut: "past its deadline, or its group closed without it",
    Outcome.infra_error: "the engine failed",
    Outcome.env_error: "the environment raised or hung",
    Outcome.reward_error: "the score raised, hung or was not a finite number",
}


def find_transcripts(
    run_folder: Path,
    *,
    env: str | None = None,
    outcome: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    version: int | None = None,
    step: int | None = None,
    evals: bool = False,
    newest: bool = False,
    grep: str | None = None,
    limit: int = 5,
) -> Iterator[str]:
    """At most `limit` transcripts that fit every filter, see `read_rollouts`. `grep`: a regular expression found in the transcript.

    Raises ConfigError: a filter that nothing can fit. WireError: see `read_rollouts`.
    """
    _check_env(run_folder, env)
    kind = _outcome(outcome)
    if kind is not None and not kind.gradable and (min_reward is not None or max_reward is not None):
        raise ConfigError(f"--outcome {kind} and a bound on the reward: rollouts that end as {kind} have no reward; drop one of the two")
    if min_reward is not None and max_reward is not None and min_reward > max_reward:
        raise ConfigError(f"--min-reward {min_reward:g} is above --max-reward {max_reward:g}: no reward is within")
    pattern = _pattern(grep)
    records = read_rollouts(
        run_folder,
        env=env,
        outcome=kind,
        min_reward=min_reward,
        max_reward=max_reward,
        version=version,
        step=step,
        evals=evals,
        newest=newest,
    )
    return islice((text for text in map(format_rollout, records) if pattern.search(text)), limit)


def stored(run_folder: Path) -> str:
    """What a run has stored, in words: for those who found nothing."""
    steps = [file_number(path) for path in rollout_files(run_folder)]
    versions = [file_number(path) for path in rollout_files(run_folder, evals=True)]
    if not steps and not versions:
        return "this run has stored no rollouts yet"
    parts = [f"the rollouts of steps {steps[0]} to {steps[-1]}"] if steps else []
    if versions:
        parts.append(f"the evaluations (--eval) of versions {', '.join(map(str, versions))}")
    return "stored are " + " and ".join(parts)


def _check_env(run_folder: Path, env: str | None) -> None:
    config = read_config(run_folder)
    labels = [known.label for known in config.envs] if config else []
    if env is not None and labels and env not in labels:
        raise ConfigError(f"--env {env!r}: this run has no such environment; it has {', '.join(labels)}")


def _outcome(name: str | None) -> Outcome | None:
    if name is None:
        return None
    try:
        return Outcome(name)
    except ValueError:
        near = difflib.get_close_matches(name, map(str, MEANINGS), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        lines = "\n".join(f"  {known:<13} {meaning}" for known, meaning in MEANINGS.items())
        raise ConfigError(f"--outcome {name!r} is no outcome{hint}\n{lines}") from None


def _pattern(text: str | None) -> re.Pattern[str]:
    try:
        return re.compile(text or "")
    except re.error as error:
        raise ConfigError(f"--grep {text!r} is not a regular expression: {error}; escape special characters with a backslash") from None
