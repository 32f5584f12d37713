import asyncio
import io
import json
from collections import Counter
from typing import ClassVar

import pytest
from rich.console import Console
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.config import RunConfig, load, validate
from slipstream.envs.base import Env, Played
from slipstream.errors import ConfigError
from slipstream.jobs.evaluate import evaluate, print_scores
from slipstream.jobs.generate import chat
from slipstream.jobs.make_model import make
from slipstream.jobs.sft import warm_up
from slipstream.types import Task


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs") / "model"
    make(folder, "tiny-moe", ["reverse-text"], seed=0)
    return folder


@pytest.mark.parametrize(
    ("setting", "named"), [({"max_tokens": 0}, "max_tokens = 0"), ({"temperature": -1.0}, r"temperature = -1\.0"), ({"env": "x"}, "'x'")]
)
def test_generate_names_a_setting_that_it_cannot_use(model, setting, named):
    with pytest.raises(ConfigError, match=named):
        chat(model, "hello", **{"env": None, "max_tokens": 4, "temperature": 0.0, "seed": 0, **setting})


def test_sft_refuses_a_place_that_is_not_its_own_before_it_trains(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    config = load(RunConfig, (), ['model.path="no such model"', 'envs=[{"id": "reverse-text"}]', "sft={}"])
    with pytest.raises(ConfigError, match="not a model folder"):
        warm_up(config, tmp_path)


class Scheduled(Env):
    """Plays without the policy: task 0 succeeds always, 1 every second time, 2 hangs, 3 raises."""

    cut: ClassVar[list[bool]] = []
    """Whether each play of task 2 was cancelled."""

    def __init__(self, seed=0, tasks=4):
        super().__init__(seed)
        self.tasks, self.plays = tasks, Counter()
        Scheduled.cut = []

    def num_tasks(self, split):
        return self.tasks

    def task(self, split, index):
        return Task(f"{self.name}/{split}/{index}", self.name, index)

    async def play(self, task, policy):
        self.plays[task.index] += 1
        if task.index == 2:
            try:
                await asyncio.sleep(600)
                self.cut.append(False)
            except asyncio.CancelledError:
                self.cut.append(True)
                raise
        if task.index == 3:
            raise RuntimeError("no such table")
        return Played([], float(task.index == 0 or self.plays[task.index] % 2))


class Broken(Scheduled):
    async def play(self, task, policy):
        raise RuntimeError("no such table")


def scheduled(model, env="Scheduled", **settings):
    envs = [{"id": f"{__name__}:{env}", "name": "own", "rollout_timeout_s": 3}]
    values = {"model": {"path": str(model), "seq_len": 192}, "envs": envs, "eval": {"samples": 2, **settings}}
    return validate(RunConfig, values)


def test_eval_counts_like_an_evaluation_in_a_run_and_a_rollout_past_its_deadline_is_cut(model):
    row = evaluate(scheduled(model, tasks=3))["own"]
    assert (row["tasks"], row["k"], row["graded"], row["ungraded"]) == (3, 2, 4, 2)
    assert (row["avg_at_k"], row["pass_at_k"], row["reward_mean"]) == (0.75, 1.0, 0.75)
    assert row["outcomes"] == {"completed": 4, "cut": 2}
    assert Scheduled.cut == [True, True]


def test_eval_says_why_rollouts_have_no_grade(model):
    scores = evaluate(scheduled(model, tasks=4))
    printed = io.StringIO()
    print_scores(scores, Console(file=printed, width=120))
    text = printed.getvalue()
    assert "avg@2" in text and "pass@2" in text and "completed 4, cut 2, env_error 2" in text
    assert "own: 2 cut, in no average. One of them: past its deadline (rollout_timeout_s)" in text
    assert "own: 2 env_error, in no average. One of them: environment 'own', task own/eval/3: RuntimeError: no such table" in text


@pytest.mark.parametrize(("env", "code", "avg"), [("Scheduled", 0, 1.0), ("Broken", 1, None)])
def test_eval_prints_json_and_fails_where_an_environment_has_no_grade(model, tmp_path, env, code, avg):
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npath = "{model}"\nseq_len = 192\n[[envs]]\nid = "{__name__}:{env}"\nname = "own"\n')
    result = CliRunner().invoke(app, ["eval", str(file), "--json", "--set", "eval.tasks=1"])
    assert result.exit_code == code
    assert json.loads(result.stdout)["own"]["avg_at_k"] == avg


def test_eval_without_tasks_is_refused(model):
    with pytest.raises(ConfigError, match=r"eval\.tasks = 0"):
        evaluate(scheduled(model, tasks=0))
