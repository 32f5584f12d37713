import tomllib

import pytest

from slipstream.config import RunConfig, load, to_toml
from slipstream.config.base import merge
from slipstream.config.reference import reference
from slipstream.errors import ConfigError

MINIMAL = ['model.path="m"', 'envs=[{"id": "calculator"}]']


def refused(*sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, (), [*MINIMAL, *sets])
    return str(caught.value)


def test_later_files_win_and_flags_win_over_files(tmp_path):
    (tmp_path / "a.toml").write_text('max_steps = 3\nseed = 1\n[model]\npath = "m"\n[[envs]]\nid = "calculator"\n')
    (tmp_path / "b.toml").write_text("max_steps = 5\n")
    config = load(RunConfig, [tmp_path / "a.toml", tmp_path / "b.toml"], ["trainer.optim.lr=0.5"])
    assert (config.max_steps, config.seed, config.trainer.optim.lr) == (5, 1, 0.5)


def test_tables_merge_and_lists_replace():
    assert merge({"a": {"x": 1, "y": 2}, "l": [1, 2]}, {"a": {"y": 3}, "l": [9]}) == {"a": {"x": 1, "y": 3}, "l": [9]}


def test_a_table_of_another_type_replaces_the_whole_table():
    merged = merge({"loss": {"type": "dppo", "tv_threshold": 0.1}}, {"loss": {"type": "ppo", "clip_low": 0.3}})
    assert merged == {"loss": {"type": "ppo", "clip_low": 0.3}}


def test_the_written_configuration_reads_back_as_itself():
    config = load(RunConfig, (), [*MINIMAL, 'trainer.loss={"type": "cispo"}', "seed=7"])
    assert RunConfig.model_validate(tomllib.loads(to_toml(config))) == config


def test_an_unknown_key_names_the_nearest_right_one():
    assert "trainer.optim.lrr: unknown key; did you mean 'trainer.optim.lr'?" in refused("trainer.optim.lrr=1")
    assert "did you mean 'max_steps'" in refused("max_step=1")
    assert "engine.ep.rank: unknown key; did you mean 'engine.ep.ranks'?" in refused("engine.ep.rank=2"), "beside it, not trainer.lora.rank"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("engine=vllm", "engine = 'vllm': engine.type: expected"),
        ("engine.speculation=on", "engine.speculation = 'on': expected a table, such as speculation.type = ..."),
        ("engine.speculation.max_draft_tokens=3", "engine.speculation: `type` is missing; expected one of 'off', 'prompt_lookup'"),
        ("engine.speculation.type=x", "engine.speculation: type = 'x'; expected one of 'off', 'prompt_lookup'"),
    ],
)
def test_a_table_with_types_says_which_there_are(setting, said):
    assert said in refused(setting)


def test_a_contradiction_is_said_without_the_table_that_it_is_in():
    assert refused("engine.tiers.disk_mib=4").startswith("engine.tiers.disk_path = None and engine.tiers.disk_mib = 4: set both")


def test_every_problem_is_listed_at_once_with_its_value():
    message = refused("engine.port=hello", "max_steps=0")
    assert "engine.port = 'hello'" in message and "max_steps = 0" in message


def test_an_unknown_loss_type_lists_the_known_ones():
    message = refused('trainer.loss={"type": "grpoo"}')
    assert "grpoo" in message and "'dppo'" in message and "'ppo'" in message


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("trainer.row_tokens=100", ("row_tokens = 100", "seq_len = 1024")),
        ("engine.capture_routing=false", ("router_replay = true", "capture_routing = false")),
        ('engine={type = "vllm", python = "p", tiers = {ram_mib = 1}}', ("engine.tiers", 'engine.type = "embedded" only')),
        ("trainer.publish=float8", ('trainer.publish = "float8"', "engine.dtype = 'float32'")),
        ("engine.max_step_tokens=8", ("max_step_tokens = 8", "max_running = 64")),
        ('envs=[{"id": "calculator"}, {"id": "calculator"}]', ("two environments are named 'calculator'",)),
        ('envs=[{"id": "calculator", "group_size": 1}]', ("group_size = 1", "min_group = 2")),
        ('envs=[{"id": "calculator", "sampling": {"temperature": 0}}]', ("temperature = 0",)),
        ('envs=[{"id": "calculator", "sampling": {"max_tokens": 5000}}]', ("max_tokens = 5000", "seq_len = 1024")),
        ('trainer.loss={"type": "icepop", "low": 6}', ("low = 6.0", "high = 5.0")),
        ('trainer.loss={"type": "policy_gradient", "mis_low": 3}', ("mis_low = 3.0", "mis_high = 2.0")),
        ("engine.ep.ranks=2", ("engine.replicas = 1", "engine.ep.ranks = 2", "multiple of 2")),
        ("engine.ep.redundant_experts=1", ("redundant_experts = 1", "ranks = 1")),
        ("orchestrator.concurrency.min=100", ("min = 100", "initial = 64")),
        ('envs=[{"id": "calculator", "advantage": {"type": "custom"}}]', ("'custom'", "path = None")),
    ],
)
def test_contradictions_name_both_keys_and_both_values(setting, named):
    message = refused(*setting.split(";"))
    assert all(part in message for part in named), message


@pytest.mark.parametrize("trainer", ["trainer.dtype=float8", "trainer.publish=float8"])
def test_trainer_and_engine_have_the_same_kind_of_scales(trainer):
    message = refused(trainer, "engine.dtype=float8", "engine.fp8_scales=power_of_two")
    assert "trainer.fp8_scales = 'float32'" in message and "engine.fp8_scales = 'power_of_two'" in message
    load(RunConfig, (), [*MINIMAL, trainer, "engine.dtype=float8", "engine.fp8_scales=power_of_two", "trainer.fp8_scales=power_of_two"])


def test_trainer_and_engine_round_logits_both_or_neither():
    settings = ("engine.dtype=bfloat16", "trainer.dtype=float8", "trainer.head_dtype=float32")
    message = refused(*settings)
    assert "trainer.head_dtype = 'float32'" in message and "engine.head_dtype = 'auto'" in message
    load(RunConfig, (), [*MINIMAL, *settings, "engine.head_dtype=float32"])
    load(RunConfig, (), [*MINIMAL, "engine.dtype=bfloat16", "engine.head_dtype=float32"])


def test_a_target_that_no_evaluation_can_reach_is_refused():
    message = refused("stop_at_eval=0.9", "eval.tasks=0")
    assert "stop_at_eval = 0.9" in message and "eval.tasks = 0" in message


def test_a_missing_file_and_a_broken_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load(RunConfig, [tmp_path / "nowhere.toml"])
    (tmp_path / "broken.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load(RunConfig, [tmp_path / "broken.toml"])


def test_a_set_without_equals_sign_is_explained():
    with pytest.raises(ConfigError, match="expected key=value"):
        load(RunConfig, (), ["seed"])


def test_configurations_are_frozen_and_equal_ones_share_a_fingerprint():
    one, two = load(RunConfig, (), MINIMAL), load(RunConfig, (), [*MINIMAL, "seed=0"])
    assert one.fingerprint() == two.fingerprint() != load(RunConfig, (), [*MINIMAL, "seed=1"]).fingerprint()
    with pytest.raises(Exception, match="frozen"):
        one.seed = 3  # type: ignore[misc]


def test_the_reference_documents_every_leaf_key():
    text = reference(RunConfig)
    for key in ("max_off_policy_steps", "tv_threshold", "block_tokens", "keep_last", "turn_timeout_s"):
        assert f"`{key}`" in text
    with pytest.raises(ConfigError, match="no section 'trainr'"):
        reference(RunConfig, "trainr")


def test_a_section_with_types_is_found_by_its_plain_name():
    text = reference(RunConfig, "trainer.loss")
    assert '[trainer.loss (type = "ppo")]' in text and '[trainer.loss (type = "gspo")]' in text and "[trainer.optim]" not in text
    assert reference(RunConfig, 'trainer.loss (type = "ppo")') == text


def test_a_changed_copy_is_checked_like_a_run_file():
    config = load(RunConfig, (), MINIMAL)
    with pytest.raises(ConfigError, match=r"seq_len = 1: "):
        config.model.replace(seq_len=1)
