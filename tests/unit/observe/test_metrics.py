"""Writing and tailing metrics.jsonl: torn lines, several writers, values that are not finite."""

import math
import multiprocessing

import numpy as np
import pytest

from slipstream.errors import StateError
from slipstream.observe.metrics import FILE, MetricsTail, MetricsWriter, read_metrics


def test_what_is_logged_comes_back(tmp_path):
    with MetricsWriter(tmp_path, "trainer") as writer:
        writer.log(3, {"trainer/loss/mean": 0.5, "trainer/lag/max": np.int64(2)})
        writer.span("step", 1.0, 2.5, 3)
        writer.event("expert_load", load=np.eye(2), share=np.float32(0.5))
    values, span, event = read_metrics(tmp_path)
    assert values["values"] == {"trainer/loss/mean": 0.5, "trainer/lag/max": 2.0}
    assert (values["kind"], values["role"], values["step"]) == ("metrics", "trainer", 3)
    assert (span["name"], span["start"], span["end"], span["step"]) == ("step", 1.0, 2.5, 3)
    assert (event["name"], event["load"], event["share"]) == ("expert_load", [[1, 0], [0, 1]], 0.5)


def test_an_unregistered_key_is_an_error_and_writes_nothing(tmp_path):
    writer = MetricsWriter(tmp_path, "trainer")
    with pytest.raises(StateError, match="trainer/loss/meen"):
        writer.log(1, {"trainer/loss/mean": 0.0, "trainer/loss/meen": 1.0})
    assert read_metrics(tmp_path) == []


def test_values_that_are_not_finite_are_null_in_the_file_and_nan_in_the_reader(tmp_path):
    MetricsWriter(tmp_path, "trainer").log(1, {"trainer/loss/mean": float("inf"), "trainer/grad/norm": float("nan")})
    text = (tmp_path / FILE).read_text()
    assert "null" in text and "NaN" not in text and "Infinity" not in text
    assert all(math.isnan(value) for value in read_metrics(tmp_path)[0]["values"].values())


def test_a_line_is_read_once_it_is_complete(tmp_path):
    writer, tail = MetricsWriter(tmp_path, "trainer"), MetricsTail(tmp_path)
    writer.log(1, {"trainer/loss/mean": 1})
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"kind":"event","role":"x"')
        file.flush()
        assert [record["step"] for record in tail.poll()] == [1]
        assert tail.poll() == []
        file.write(b',"name":"late"}\n')
    assert [record["name"] for record in tail.poll()] == ["late"]
    assert tail.unreadable == 0


def test_a_torn_line_of_a_killed_process_costs_only_itself(tmp_path):
    MetricsWriter(tmp_path, "trainer").log(1, {"trainer/loss/mean": 1})
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"kind":"metrics","role":"trainer","st')
    MetricsWriter(tmp_path, "trainer").log(2, {"trainer/loss/mean": 2})
    tail = MetricsTail(tmp_path)
    assert [record["step"] for record in tail.poll()] == [1, 2]
    assert tail.unreadable == 1


@pytest.mark.parametrize(
    "line", [b"[1, 2]\n", b"{}\n", b'{"kind":"metrics","role":"trainer"}\n', b'{"kind":"span"}\n', b"\xff\xfe{}\n", b"nonsense\n"]
)
def test_lines_that_are_no_record_are_counted_and_skipped(tmp_path, line):
    (tmp_path / FILE).write_bytes(line + b'{"kind":"event","name":"x"}\n')
    tail = MetricsTail(tmp_path)
    assert [record["name"] for record in tail.poll()] == ["x"]
    assert tail.unreadable == 1


def test_a_run_without_metrics_has_no_records(tmp_path):
    assert MetricsTail(tmp_path).poll() == []


def write_many(folder, role, count):
    writer = MetricsWriter(folder, role)
    for step in range(count):
        writer.event("eval", step=step, text="x" * 5000)


def test_lines_of_several_processes_never_interleave(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write_many, args=(tmp_path, f"engine-{i}", 200)) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    tail = MetricsTail(tmp_path)
    records = tail.poll()
    assert tail.unreadable == 0
    for role in ("engine-0", "engine-1"):
        assert [record["step"] for record in records if record["role"] == role] == list(range(200))


def test_a_value_that_json_cannot_hold_is_an_error(tmp_path):
    with pytest.raises(TypeError, match="does not fit a JSON line"):
        MetricsWriter(tmp_path, "trainer").event("x", value={1, 2}.__iter__())
