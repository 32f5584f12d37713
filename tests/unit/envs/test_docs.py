"""The example in docs/environments.md is what a reader copies: it must run."""

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from slipstream.config import validate
from slipstream.config.envs import EnvConfig
from slipstream.envs.base import load_env
from slipstream.envs.demonstrations import demonstration_samples
from slipstream.envs.play import EnvPlayer
from slipstream.types import Outcome
from tests.unit.envs.made import ScriptedEngine, demonstration_script

PAGE = (Path(__file__).parents[3] / "docs/environments.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def guess(tmp_path, monkeypatch):
    """The page's environment, loaded by the page's run file."""
    (tmp_path / "guess.py").write_text(blocks("python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    config = validate(EnvConfig, tomllib.loads(blocks("toml")[1])["envs"][0])
    return config, load_env(config, seed=0)


async def test_the_example_environment_plays_its_demonstration_to_full_reward(guess, tokenizer):
    config, env = guess
    rng = np.random.default_rng(0)
    for index in range(5):
        task = env.task("train", index)
        engine = ScriptedEngine(tokenizer, *demonstration_script(env.demonstration(task, rng), tokenizer))
        rollout = await EnvPlayer(env, engine, tokenizer, config, 512)(task, "r", "g", 0)
        assert (rollout.outcome, rollout.reward, rollout.error) == (Outcome.completed, 1.0, "")
        assert rollout.reward_parts == {"questions": 6.0}


def test_the_example_environment_gives_demonstrations_and_disjoint_splits(guess, tokenizer):
    _, env = guess
    assert len(demonstration_samples(env, tokenizer, 8, seed=0, noise=0.5)) == 8
    train, held_out = ({env.task(split, i).payload["secret"] for i in range(32)} for split in ("train", "eval"))
    assert not train & held_out


def test_every_run_file_on_the_page_is_valid():
    for block in blocks("toml"):
        for values in tomllib.loads(block)["envs"]:
            config = validate(EnvConfig, values)
            if ":" not in config.id:
                load_env(config, seed=0)
