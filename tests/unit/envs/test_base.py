import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from slipstream.config.envs import EnvConfig
from slipstream.envs.base import BUILT_IN, Env, count_tasks, draw_task, load_env
from slipstream.errors import ConfigError, EnvError, StateError
from tests.waiting import HUNG_S

HERE = [id_ for id_ in BUILT_IN if id_ != "calculator-agent" or find_spec("agents")]
"""Those whose optional package is installed."""


class Mine(Env):
    def __init__(self, seed=0, size: int = 3):
        super().__init__(seed)
        if size < 1:
            raise ValueError(f"size = {size}: at least 1")
        self.size = size


class NotAnEnv:
    pass


def config(id_, **fields):
    return EnvConfig(id=id_, **fields)


@pytest.mark.parametrize("id_", HERE)
def test_every_built_in_environment_loads_by_name(id_):
    env = load_env(config(id_, name="label", turn_timeout_s=7), seed=5)
    assert (env.name, env.seed, env.hook_timeout_s) == ("label", 5, 7)


@pytest.mark.parametrize(
    ("id_", "args", "said"),
    [
        ("constraints", {"min_words": "8"}, "expected int"),
        ("calculator", {"num_steps": True}, "expected int"),
        (f"{__name__}:Mine", {"size": 2.5}, "expected int"),
        ("reverse-text", {"partial_credit": 1}, "expected bool"),
    ],
)
def test_an_argument_of_the_wrong_type_is_named_before_the_class_sees_it(id_, args, said):
    [(name, value)] = args.items()
    with pytest.raises(ConfigError, match=rf"args\.{name} = {value!r}: {said}"):
        load_env(config(id_, args=args), seed=0)


@pytest.mark.parametrize("id_", HERE)
def test_tasks_are_deterministic_in_seed_split_and_index(id_):
    one, same, other = (load_env(config(id_), seed) for seed in (1, 1, 2))
    tasks = [one.task("train", i) for i in range(30)]
    assert tasks == [same.task("train", i) for i in range(30)]
    assert tasks != [other.task("train", i) for i in range(30)]
    assert [task.id for task in tasks[:2]] == [f"{id_}/train/0", f"{id_}/train/1"]
    assert [task.index for task in tasks] == list(range(30))


@pytest.mark.parametrize("id_", HERE)
def test_no_held_out_task_of_any_seed_is_ever_a_training_task(id_):
    for args in {"calculator": ({"max_operand": 4}, {}), "reverse-text": ({"num_words": 1, "word_len": 2}, {})}.get(id_, ({},)):
        env, held_out_env = (load_env(config(id_, args=args), seed) for seed in (3, 4))
        train = {repr(env.task("train", i).payload) for i in range(1500)}
        held_out = {repr(e.task("eval", i).payload) for e in (env, held_out_env) for i in range(env.num_tasks("eval"))}
        assert not train & held_out
        assert len(held_out) > 4


@pytest.mark.parametrize("id_", HERE)
async def test_every_demonstration_earns_the_full_reward_and_every_noisy_one_mostly_less(id_):
    env, rng = load_env(config(id_), seed=1), np.random.default_rng(0)
    rewards = {0.0: [], 1.0: []}
    for index in range(150):
        task = env.task("train", index)
        for noise, found in rewards.items():
            messages = env.demonstration(task, rng, noise)
            assert messages[:1] == list(await env.hook(env.prompt, task))
            found.append((await env.graded(task, messages)).reward)
    assert set(rewards[0.0]) == {1.0}
    assert np.mean(np.array(rewards[1.0]) < 1.0) > 0.8


def test_an_environment_of_your_own_loads_by_import_path():
    env = load_env(config(f"{__name__}:Mine", args={"size": 5}), seed=0)
    assert isinstance(env, Mine)
    assert env.size == 5


@pytest.mark.parametrize(
    ("id_", "args", "message"),
    [
        ("calculater", {}, "did you mean 'calculator'"),
        ("nothing-like-it", {}, "package.module:Class"),
        ("no_such_module_xyz:Env", {}, "PYTHONPATH"),
        (f"{__name__}:Missing", {}, "has no class 'Missing'"),
        (f"{__name__}:NotAnEnv", {}, r"is not an environment; write `class NotAnEnv\(slipstream.envs.base.Env\)`"),
        (f"{__name__}:np", {}, "is not an environment"),
        (f"{__name__}:Mine", {"sice": 1}, "takes: size"),
        (f"{__name__}:Mine", {"size": 0}, "size = 0: at least 1"),
        ("calculator", {"num_steps": 1}, "num_steps = 1"),
        ("calculator", {"operations": "/"}, "operations = '/'"),
        ("calculator", {"mistakes": ["typo"]}, "mistakes"),
        ("constraints", {"kinds": ["rhyme"]}, "rhyme"),
        ("constraints", {"max_instructions": 9}, "max_instructions = 9"),
        ("reverse-text", {"num_words": 0}, "num_words = 0"),
    ],
)
def test_a_mistake_in_the_run_file_is_named_with_its_fix(id_, args, message):
    with pytest.raises(ConfigError, match=message):
        load_env(config(id_, args=args), seed=0)


def test_too_few_different_tasks_for_two_splits_is_a_config_error():
    with pytest.raises(ConfigError, match="too few different tasks"):
        [draw_task(0, split, 0, make=lambda rng: "always the same", key=str) for split in ("train", "eval")]


def test_an_unknown_split_is_a_bug():
    with pytest.raises(StateError, match="'test'"):
        load_env(config("calculator"), 0).task("test", 0)


def test_a_missing_method_is_named_with_its_signature():
    with pytest.raises(NotImplementedError, match=r"Mine needs a method task\(self, split, index\) -> Task"):
        Mine().task("train", 0)
    with pytest.raises(ConfigError, match="has no demonstrations"):
        Mine().demonstration(None, np.random.default_rng(0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="plays its own tasks only"):
        Mine().task_from_prompt("hello")


def test_environments_and_the_player_import_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import slipstream.envs.play, slipstream.envs.demonstrations, slipstream.envs.calculator, slipstream.envs.constraints\n"
        "import slipstream.envs.reverse_text, slipstream.orchestrator.samples, slipstream.orchestrator.pack\n"
        "import slipstream.orchestrator.filters, slipstream.orchestrator.curriculum\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HUNG_S)


@pytest.mark.parametrize(("count", "reason"), [("none", "is 0; expected at least 1"), ("raises", "raised FileNotFoundError: tasks.json")])
def test_without_tasks_there_is_no_run(count, reason):
    class Empty(Env):
        name = "empty"

        def num_tasks(self, split):
            if count == "raises":
                raise FileNotFoundError("tasks.json")
            return 0

    with pytest.raises(EnvError, match=reason):
        count_tasks(Empty(), "eval")
