"""The rollout store: nothing is lost on the way through parquet, filters select, transcripts are safe to print."""

import numpy as np
import pytest

from slipstream.errors import WireError
from slipstream.observe.rollouts import RolloutWriter, format_rollout, read_rollouts
from slipstream.types import Completion, Outcome, Rollout, Sampling, Task, Turn

from .synthetic import ENV, rollout, write_rollouts


def ids(folder, **filters):
    return [record["id"] for record in read_rollouts(folder, **filters)]


def test_every_field_comes_back(tmp_path):
    original = rollout("r1", 1.0, "49", version=3)
    RolloutWriter(tmp_path).write(4, [original], advantages={"r1": 0.75})
    (record,) = read_rollouts(tmp_path)
    for name in ("id", "group_id", "outcome", "reward", "error", "version_start", "version_min", "started_s", "duration_s"):
        assert record[name] == getattr(original, name)
    assert (record["step"], record["advantage"], record["dropped"], record["version_max"]) == (4, 0.75, "", 4)
    assert (record["env"], record["task_id"], record["task_index"]) == (ENV, original.task.id, 3)
    assert record["payload"] == dict(original.task.payload)
    assert record["reward_parts"] == {"correct": 1.0}
    assert record["messages"] == list(original.messages)
    for index, turn in enumerate(original.turns):
        assert record["prompt"][index] == turn.prompt_T.tolist()
        assert record["tokens"][index] == turn.completion.tokens_N.tolist()
        assert np.array_equal(np.float32(record["logprobs"][index]), turn.completion.logprobs_N)
        assert record["versions"][index] == [list(segment) for segment in turn.completion.versions]
        assert record["temperature"][index] == 0.9
        assert (record["queued_s"][index], record["prefill_s"][index], record["decode_s"][index]) == (0.1, 0.2, 0.3)
        assert (record["finish_reason"][index], record["cached_tokens"][index], record["kv_age"][index]) == ("stop", 2, 1)


def test_rollouts_without_turns_sit_beside_rollouts_with_turns(tmp_path):
    empty = Rollout("none", Task("t", ENV, 0), "g", Outcome.infra_error, error="EngineUnavailable: nobody answered")
    RolloutWriter(tmp_path).write(1, [empty, rollout("r", 1.0, "x", 0), empty])
    records = list(read_rollouts(tmp_path))
    assert [len(record["tokens"]) for record in records] == [0, 2, 0]
    assert records[0]["reward"] is None and records[0]["messages"] == []
    assert "nobody answered" in format_rollout(records[0])


def played(prompts, sampled):
    turns = tuple(
        Turn(
            np.array(prompt, np.int32),
            Completion(f"r/{i}", np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), (), "stop"),
            Sampling(),
        )
        for i, (prompt, tokens) in enumerate(zip(prompts, sampled, strict=True))
    )
    return Rollout("r", Task("t", ENV, 0), "g", Outcome.completed, turns, (), 1.0)


@pytest.mark.parametrize(
    ("prompts", "sampled"),
    [
        ([[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]], [[3], [5], [7]]),
        ([[1, 2], [9, 9], [9, 9, 8, 7]], [[3], [8], [6]]),
        ([[1, 2], [1, 2], [1]], [[3], [], [4]]),
        ([[], [5]], [[5], []]),
    ],
    ids=["each turn extends the one before", "context was rewritten once", "context was cut back", "empty prompt"],
)
def test_prompts_come_back_whole_whether_or_not_they_extend_the_turn_before(tmp_path, prompts, sampled):
    RolloutWriter(tmp_path).write(1, [played(prompts, sampled), played(prompts[::-1], sampled)])
    first, second = read_rollouts(tmp_path)
    assert first["prompt"] == prompts and first["tokens"] == sampled
    assert second["prompt"] == prompts[::-1]


def test_a_rollout_of_many_turns_takes_space_in_proportion_to_its_length(tmp_path):
    random = np.random.default_rng(0)
    prompts, sampled, prompt = [], [], random.integers(0, 60_000, 50)
    for _ in range(40):
        tokens = random.integers(0, 60_000, 50)
        prompts.append(prompt)
        sampled.append(tokens)
        prompt = np.concatenate([prompt, tokens])
    path = RolloutWriter(tmp_path).write(1, [played(prompts, sampled)])
    assert path.stat().st_size < 8 * 41 * 50 + 20_000


def test_an_empty_step_is_a_file_without_rows(tmp_path):
    RolloutWriter(tmp_path).write(1, [])
    assert ids(tmp_path) == []


def test_filters_select(tmp_path):
    write_rollouts(tmp_path, 3)
    assert ids(tmp_path) == ["r1-0", "r1-1", "c1", "r2-0", "r2-1", "c2", "r3-0", "r3-1", "c3"]
    assert ids(tmp_path, step=2) == ["r2-0", "r2-1", "c2"]
    assert ids(tmp_path, outcome="cut") == ["c1", "c2", "c3"]
    assert ids(tmp_path, max_reward=0.5) == ["r1-1", "r2-1", "r3-1"]
    assert ids(tmp_path, min_reward=0.5) == ["r1-0", "r2-0", "r3-0"]
    assert ids(tmp_path, version=1) == ["r2-0", "r2-1", "c2"]
    assert ids(tmp_path, env="another") == []
    assert ids(tmp_path, min_reward=0, newest=True) == ["r3-0", "r3-1", "r2-0", "r2-1", "r1-0", "r1-1"]
    assert ids(tmp_path, evals=True) == ["e0", "e1"]
    assert ids(tmp_path, evals=True, step=3) == ["e1"]


def test_writing_a_step_again_replaces_it(tmp_path):
    writer = RolloutWriter(tmp_path)
    writer.write(1, [rollout("old", 1.0, "x", 0)])
    writer.write(1, [rollout("new", 1.0, "x", 0)])
    assert ids(tmp_path) == ["new"]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_000001.parquet"]


def test_a_damaged_file_is_an_error_that_names_it(tmp_path):
    path = RolloutWriter(tmp_path).write(1, [rollout("r", 1.0, "x", 0)])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(WireError, match=r"step_000001\.parquet"):
        ids(tmp_path)


def test_a_transcript_says_who_said_what_and_under_which_version(tmp_path):
    RolloutWriter(tmp_path).write(4, [rollout("r1", 1.0, "The answer is 49", version=3)], advantages={"r1": 0.75})
    (record,) = read_rollouts(tmp_path)
    assert format_rollout(record) == (
        "=== calculator/train/3   rollout r1   group g1   step 4\n"
        "outcome completed · reward 1.000 (correct 1) · advantage +0.750\n"
        "policy versions 3 to 4 (dispatched at 3) · 2 turns · 5 tokens · 1.50 s\n"
        "\n"
        "--- user\n"
        "What is 7 times 7? <b>&</b>\n"
        "\n"
        "--- assistant [turn 1: 5 prompt tokens (2 cached), v3 x3, ended by stop, queued 0.100 s prefill 0.200 s decode 0.300 s]\n"
        '[calls calc({"a": 7})]\n'
        "\n"
        "--- tool call_1\n"
        "49\n"
        "\n"
        "--- assistant [turn 2: 10 prompt tokens (2 cached), v3 x1, v4 x1, ended by stop, queued 0.100 s prefill 0.200 s decode 0.300 s]\n"
        "The answer is 49"
    )


def test_a_transcript_cannot_move_the_cursor(tmp_path):
    RolloutWriter(tmp_path).write(1, [rollout("r", 1.0, "red \x1b[31m bell \x07 c1 \x9b line\nnext", version=0)])
    text = format_rollout(next(read_rollouts(tmp_path)))
    assert "\x1b" not in text and "\x07" not in text and "\x9b" not in text
    assert "red \\x1b[31m bell \\x07 c1 \\x9b line\nnext" in text


def test_examples_in_the_prompt_are_not_taken_for_turns(tmp_path):
    original = rollout("r", 1.0, "49", version=0)
    messages = ({"role": "user", "content": "1*1"}, {"role": "assistant", "content": "example"}, *original.messages)
    shown = Rollout("r", original.task, "g", Outcome.completed, original.turns, messages, 1.0)
    RolloutWriter(tmp_path).write(1, [shown])
    text = format_rollout(next(read_rollouts(tmp_path)))
    assert "--- assistant\nexample" in text
    assert text.count("[turn ") == 2
