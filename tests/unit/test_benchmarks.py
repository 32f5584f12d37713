"""The benchmarks are run by hand and rarely: these hold the parts of them that call into slipstream to its present interfaces."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import (
    _gguf,
    _json_task,
    _router_engine,
    _router_sim,
    _router_trace,
    _sft_peers,
    _step_ceiling,
    engine,
    fp8_engine,
    kv_tiers,
    parity_families,
    pd_disagg,
    rl_vs_trl,
    router,
    speculation,
    trainer,
)
from benchmarks._ceilings import training_products
from benchmarks._process import PeerError
from benchmarks._runs import run_config

from slipstream.config.serve import EngineConfig
from slipstream.jobs.make_model import make
from slipstream.models import hf
from slipstream.models.maker import PRESETS
from slipstream.models.spec import ModelSpec
from slipstream.transport.weights import TENSORS_FILE

NAMES = sorted(file.stem for file in Path(rl_vs_trl.__file__).parent.glob("*.py") if not file.stem.startswith("_"))


HIDDEN = sorted(file.stem for file in Path(rl_vs_trl.__file__).parent.glob("_[a-z]*.py") if file.stem != "_trl_worker")
"""Their helpers, but for the one that runs where trl is."""


@pytest.mark.parametrize("name", HIDDEN)
def test_what_benchmarks_start_imports(name):
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_imports_and_says_what_it_does(name):
    assert importlib.import_module(f"benchmarks.{name}").__doc__


def test_the_score_of_a_snapshot_is_the_share_of_held_out_tasks_it_answers(tmp_path, monkeypatch):
    make(tmp_path / "model", "tiny-moe", ["calculator"], seed=0)
    monkeypatch.setattr(_json_task, "as_json", lambda numbers, symbols: "no such answer")
    config = run_config("bench-vs-trl", tmp_path / "model", rl_vs_trl.SETTINGS)
    assert rl_vs_trl.held_out_success(tmp_path / "model" / TENSORS_FILE, config, tasks=2) == 0.0

    async def right(self, task, messages):
        return 1.0

    monkeypatch.setattr(_json_task.JsonChain, "score", right)
    assert rl_vs_trl.held_out_success(tmp_path / "model" / TENSORS_FILE, config, tasks=2) == 1.0


def test_a_family_that_agrees_with_transformers_has_a_clean_row():
    row = parity_families.shape_row("glm4_moe-grouped", seeds=1)
    assert (row["family"], row["shape"], row["round_trip"], row["decode"]) == ("glm4_moe", "grouped", True, True)
    assert row["decoded"] > 50 and row["logit_std"] > 0.3
    assert all(0 < row[key] < 1e-5 for key in parity_families.WORST)


def test_the_parity_figures_see_one_weight_that_was_read_wrongly(monkeypatch):
    load = parity_families.load_model

    def load_wrongly(folder):
        model = load(folder)
        model.get_parameter("layers.1.attention.qkv").data[3, 5] += 0.01
        return model

    monkeypatch.setattr(parity_families, "load_model", load_wrongly)
    row = parity_families.shape_row("qwen3", seeds=1)
    assert row["logit_diff"] > 1e-4 and row["grad_diff"] > 1e-5 and row["grad_rel"] > 1e-3
    assert not row["round_trip"] and row["decode"]


def test_the_parity_figures_see_an_engine_with_other_weights(tmp_path, monkeypatch):
    make_engine = parity_families.make_engine

    def make_wrong_engine(folder):
        tensors = hf.read_tensors(folder)
        tensors["model.norm.weight"][0] += 0.5
        hf.write_tensors(folder, tensors)
        return make_engine(folder)

    monkeypatch.setattr(parity_families, "make_engine", make_wrong_engine)
    row = parity_families.shape_row("minimax_m2", seeds=1)
    assert row["decode_diff"] > 1e-3 and row["round_trip"] and row["logit_diff"] < 1e-5
    assert not parity_families.headline([{**row, "decode": False}])["decode"]


def test_the_simulated_pool_plays_every_turn_and_is_a_function_of_its_seed():
    shape = _router_trace.TraceShape(sessions=8, group=4, groups_a_burst=1, turns=(2, 4))
    costs = _router_engine.Costs(kv_tokens=32 * 1024)

    def play(policy: str):
        sessions = _router_trace.make_trace(shape, 1, costs.seq_len - 64)
        simulation = _router_sim.Simulation(sessions, 2, costs, router.POLICIES[policy])
        found = {key: value for key, value in simulation.run().items() if key != "decision_us"}
        assert found["requests"] == sum(session.turns for session in sessions) and simulation.left == 0
        return found

    assert play("kv_aware") == play("kv_aware")
    assert play("kv_aware")["hit_rate"] > play("round_robin_each")["hit_rate"] > 0


def test_the_bytes_of_an_fp8_engine_are_those_of_its_codes(tmp_path):
    folder = fp8_engine.preset(tmp_path / "model", "tiny-moe")
    found = {name: fp8_engine._measure(folder, EngineConfig(**settings)) for name, settings in fp8_engine.ENGINES.items()}
    plain, fp8 = found["bfloat16"], found[fp8_engine.BOTH]
    assert found["float32"]["weight_mib"] == 2 * plain["weight_mib"]
    assert fp8["matrices_mib"] / plain["matrices_mib"] == pytest.approx(0.5, rel=1e-3)
    assert plain["weight_mib"] - fp8["weight_mib"] == pytest.approx(plain["matrices_mib"] - fp8["matrices_mib"])
    assert fp8["kv_mib"] / plain["kv_mib"] == 17 / 32 and found["float8"]["kv_mib"] == plain["kv_mib"]
    assert all(row["kv_counted_mib"] == pytest.approx(row["kv_mib"], rel=0.01) for row in found.values())


class FakePeer:
    """Answers with every token trained, in one second of CPU time, unless told otherwise."""

    def __init__(self, name, **answer):
        self.name, self.answer, self.jobs = name, answer, []

    def ask(self, job):
        self.jobs.append(job)
        return {"tokens": sum(map(len, job["documents"])), "seconds": 2.0, "cpu_s": 1.0, "loss": 8.0, **self.answer}


class FakeTexts:
    def draw(self, count, seed):
        return [[seed, 1, 2]] * count


def test_slipstreams_side_of_the_trainer_benchmark_trains_on_every_document_once(tmp_path):
    make(tmp_path / "model", "tiny-moe", ["calculator"], seed=0)
    clock = _sft_peers.Clock()
    documents = [[(3 * i + j) % 50 for j in range(5 + i)] for i in range(7)]
    optim = {**trainer.OPTIM, "lr": 1e-9}
    job = {"documents": documents, "samples": 3, "max_tokens": 64, "optim": optim, "settings": {}}
    loss = _sft_peers.Slipstream(str(tmp_path / "model"), "float32").train(job, clock)
    assert (clock.tokens, clock.steps) == (sum(map(len, documents)), 3)
    assert clock.seconds > 0 and clock.cpu_s > 0

    scorer = parity_families.Reference(tmp_path / "model")
    steps = []
    for chosen in (documents[:3], documents[3:6], documents[6:]):
        scored = [scorer.score(np.array(ids))[0][np.arange(len(ids) - 1), ids[1:]] for ids in chosen]
        steps.append(-float(np.concatenate(scored).mean()))
    assert loss == pytest.approx(np.mean(steps), abs=1e-5)


def test_padding_carries_no_loss_and_is_no_token():
    batch = _sft_peers._pad([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]

    class Inner:
        def training_step(self, model, inputs):
            return "loss"

    inner, clock = Inner(), _sft_peers.Clock()
    _sft_peers._count_tokens(inner, clock)
    assert inner.training_step(None, batch) == "loss" and clock.tokens == 4
    inner.training_step(None, {"input_ids": torch.zeros(1, 9)})
    assert clock.tokens == 13


def test_ratios_of_the_trainer_benchmark_are_taken_round_by_round():
    answers = {
        "slipstream": [{"tokens": 100, "seconds": s, "cpu_s": 1.0, "loss": 8.0} for s in (1.0, 2.0, 4.0)],
        "hf": [{"tokens": 100, "seconds": s, "cpu_s": 3.0, "loss": 8.0} for s in (2.0, 3.0, 20.0)],
    }
    row = trainer.trainer_row("moe", "hf", answers, {"layout": "flat", "rows": 1, "experts": None})
    assert (row["ours_over_this"], row["on_cpu_time"], row["tokens_per_s"]) == (2.0, 3.0, pytest.approx(100 / 3))


def test_a_trainer_that_skips_tokens_or_has_another_loss_ends_the_benchmark():
    with pytest.raises(PeerError, match="there were 3 tokens"):
        trainer.train(FakePeer("hf", tokens=2), [[1, 2, 3]], {})
    peers = {"slipstream": FakePeer("slipstream"), "hf": FakePeer("hf", loss=7.0)}
    with pytest.raises(PeerError, match=r"hf .*: loss 7\.000 where slipstream has 8\.000"):
        trainer.measure("moe", peers, FakeTexts(), {"slipstream": {}, "hf": {}}, rounds=1, steps=1)


def test_the_others_get_the_fastest_of_their_pilots_and_the_same_documents():
    peer = FakePeer("trl")
    tried = trainer.pilot_runs("moe", peer, [[1, 2, 3]])
    assert {(settings["layout"], settings["rows"]) for settings, _ in tried} == set(trainer.LAYOUTS["trl"])
    assert {settings["experts"] for settings, _ in tried} == set(trainer.EXPERTS)
    tried[3][1]["cpu_s"] /= 2
    assert trainer.best(tried) == tried[3][0]

    peers = {name: FakePeer(name) for name in ("slipstream", "hf", "trl")}
    trainer.measure("moe", peers, FakeTexts(), {name: {} for name in peers}, rounds=2, steps=2)
    seen = [[job["documents"] for job in peer.jobs] for peer in peers.values()]
    assert seen[0] == seen[1] == seen[2] and [len(documents) for documents in seen[0]] == [4, 64, 64]
    assert seen[0][1] != seen[0][2]


@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-dense", "small-moe"])
def test_the_products_of_a_step_are_its_matrices_and_its_attention(preset):
    spec = ModelSpec.from_config(PRESETS[preset])
    matrices = spec.num_active_params - spec.hidden * (2 * spec.num_layers + 1) - 2 * spec.head_dim * spec.num_layers
    lengths, tokens = np.array([256]), 256
    attention = 2 * tokens**2 * spec.num_heads * spec.head_dim * spec.num_layers  # two products, the causal half of each
    for rows in (1, 2):
        products = training_products(spec, [lengths] * rows, tokens * rows)
        assert sum(product.flops for product in products) == rows * (2 * tokens * matrices + attention)


def test_the_ceiling_is_the_flops_of_the_step_by_its_seconds_and_the_best_rate(monkeypatch):
    monkeypatch.setattr(_step_ceiling, "LARGE_MODELS", {"large moe": ("tiny-moe", {})})
    monkeypatch.setattr(_step_ceiling, "seconds_of", lambda learner, batch: 2.0)
    monkeypatch.setattr(_step_ceiling, "peak_rate", lambda dtype: 1e9)
    monkeypatch.setattr(_step_ceiling, "matmul_rate", lambda *sizes, dtype: 0.5e9)
    step, peak = _step_ceiling.ceiling_rows("large moe", 2048, rounds=3)
    tokens = step["tokens_per_s"] * 2.0
    active = ModelSpec.from_config(PRESETS["tiny-moe"]).num_active_params
    assert 1024 < tokens <= 2048 and peak["gflops"] == 1.0 and len(peak["ceilings"]) == 8
    assert step["frac"] == pytest.approx(step["gflops"]) and step["frac_of_shapes"] == pytest.approx(2 * step["frac"])
    assert 1.0 < step["gflops"] * 2e9 / (6 * active * tokens) < 1.5  # attention comes on top


def test_every_tier_gives_what_computing_gives_and_the_whole_prefix(tmp_path):
    make(tmp_path / "model", "tiny-moe", ["calculator"], seed=0)
    runs, answers, identical = kv_tiers.measure_prefix(tmp_path, 64, rounds=1)
    assert identical and kv_tiers.coverage(answers) == 1.0
    assert {run["path"]: run["cached_tokens"] for run in runs}.items() >= dict.fromkeys(kv_tiers.PATHS, 64).items()


def test_the_gguf_of_a_checkpoint_has_every_tensor_under_its_name_there(tmp_path):
    make(tmp_path / "model", "tiny-moe", ["calculator"], seed=0)
    tensors = {name: tensor.numpy() for name, tensor in hf.read_tensors(tmp_path / "model").items()}
    config = {**PRESETS["tiny-moe"]}
    renamed = _gguf._renamed(tensors, config)
    assert sum(tensor.size for tensor in renamed.values()) == sum(tensor.size for tensor in tensors.values())
    experts = renamed["blk.1.ffn_down_exps.weight"]
    np.testing.assert_array_equal(experts[3], tensors["model.layers.1.mlp.experts.3.down_proj.weight"])
    assert renamed["output_norm.weight"].ndim == 1 and "blk.3.ffn_gate_inp.weight" in renamed


def test_requests_of_the_engine_benchmark_have_exact_prompts_and_the_same_lengths_in_every_round():
    mix = engine.Mix(100, (16, 96))
    prompts, lengths = mix.requests(64, 8, 1)
    others, again = mix.requests(64, 8, 2)
    assert {len(prompt) for prompt in prompts} == {64} and prompts != others and lengths == again
    assert [engine.requests_of(1024, c, quick=False) for c in engine.REQUESTS] == [3, 8, 32, 128]
    assert all(engine.requests_of(64, c, quick=True) >= c for c in engine.REQUESTS)
    cells = {(64, 1): 3, (64, 8): 16, (1024, 8): 8}
    assert engine.by_size(cells, dict.fromkeys(cells, 1.5)) == {"64": {"1": 1.5, "8": 1.5}, "1024": {"8": 1.5}}


def test_the_speculation_benchmark_writes_its_transcripts_with_and_without_guesses(tmp_path):
    make(tmp_path / "model", "tiny-moe", ["calculator"], seed=0)
    rows = speculation.compare(tmp_path / "model", "float32", {"type": "prompt_lookup"}, [2], rounds=1)
    by_kind = {row["text"]: row for row in rows}
    assert by_kind.keys() == set(speculation.KINDS) and all(row["speedup"] > 0 for row in rows)
    assert by_kind["repeating"]["tokens_per_step"] > 2 and by_kind["random"]["tokens_per_step"] < 1.1


def test_the_trace_of_disaggregation_has_the_same_times_in_every_round_and_other_tokens():
    trace = pd_disagg.Trace(seconds=8, chats=2, burst_every_s=4, burst=3, long_tokens=64)
    first, second = trace.requests(1), trace.requests(2)
    assert [(r["at"], len(r["prompt"])) for r in first] == [(r["at"], len(r["prompt"])) for r in second]
    assert first[0]["prompt"] != second[0]["prompt"]
    assert sum(len(r["prompt"]) == 64 for r in first) == 6 and len(first) == 22


def test_disaggregation_is_compared_with_the_better_of_the_mixed_engines_round_by_round():
    def run(setup: str, round_: int, p99: float, throughput: float) -> dict:
        return {"setup": setup, "round": round_, "itl_p50_ms": 1.0, "itl_p99_ms": p99, "itl_p999_ms": p99, "throughput": throughput}

    runs = [run("whole", 1, 100, 10), run("chunked", 1, 40, 8), run("split", 1, 20, 8)]
    runs += [run("whole", 2, 300, 10), run("chunked", 2, 80, 8), run("split", 2, 40, 8)]
    found = pd_disagg.headline(runs)
    assert (found["p99_ratio"], found["throughput_ratio"], found["against"]) == (0.5, 1.0, "chunked")
