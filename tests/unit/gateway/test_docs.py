"""The example in docs/gateway.md is what a reader copies: it must run."""

import re
import sys
import tomllib
from pathlib import Path

from slipstream.config import validate
from slipstream.config.envs import EnvConfig
from slipstream.envs.base import load_env
from slipstream.envs.play import EnvPlayer
from slipstream.types import Outcome

PAGE = (Path(__file__).parents[3] / "docs/gateway.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found.group(1)


async def test_the_example_plays_and_is_scored(start, tmp_path, monkeypatch):
    (tmp_path / "capitals.py").write_text(block("python"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "capitals", raising=False)
    config = validate(EnvConfig, tomllib.loads(block("toml"))["envs"][0])
    env = load_env(config, seed=0)
    gate = await start("It is Paris.", "Kyoto?")
    player = EnvPlayer(env, gate.driver, gate.tokenizer, config, 512, gateway=gate.gateway)
    rollouts = [await player(env.task("train", i), f"r{i}", "g", 0) for i in range(2)]
    assert [(rollout.outcome, rollout.reward) for rollout in rollouts] == [(Outcome.completed, 1.0), (Outcome.completed, 0.0)]
