"""What cannot run is refused before it starts, with the reason and the nearest that fits."""

import json

import pytest

from slipstream import cli
from slipstream.config import RunConfig, load, validate
from slipstream.errors import ConfigError
from slipstream.launch.checks import check_inputs
from slipstream.models.maker import PRESETS
from slipstream.models.spec import ModelSpec
from slipstream.planner.checks import problems
from slipstream.planner.support import EMBEDDED, SIDES, TRAINER, VLLM, obstacle, page
from tests.unit.planner.published import GLM5
from tests.unit.planner.test_plan import ROOT

GPUS = {"nodes": 12, "gpus_per_node": 8, "gpu_memory_gb": 141, "engines": "elsewhere"}
TINY_MOE = ModelSpec.from_config(PRESETS["tiny-moe"])


def config(**sections) -> RunConfig:
    return validate(RunConfig, {"model": {"path": "m"}, "envs": [{"id": "any"}], **sections})


def refused(spec: ModelSpec = TINY_MOE, **sections) -> str:
    return "\n".join(map(str, problems(config(**sections), spec)))


@pytest.mark.parametrize(
    ("sections", "reason", "nearest"),
    [
        ({"trainer": {"parallel": {"processes": 6, "cp": 4}}}, "no multiple of dp_replicate x cp x pp = 1 x 4 x 1", "cp = 3"),
        ({"trainer": {"parallel": {"processes": 8, "ep": 3}}}, "ep = 3 does not divide dp_shard x cp", "ep = 4"),
        (
            {"trainer": {"parallel": {"processes": 100}}, "cluster": GPUS},
            "cannot be spread evenly over cluster.nodes = 12",
            "processes = 96",
        ),
        ({"trainer": {"parallel": {"processes": 108}}, "cluster": GPUS}, "12 x 8 = 96 GPUs", "processes = 96, or nodes = 14"),
        ({"cluster": {"gpus_per_node": 8}}, "gpus_per_node = 8 and cluster.gpu_memory_gb = None", "set both, or neither"),
        ({"cluster": {"gpu_memory_gb": 80}}, "gpus_per_node = 0 and cluster.gpu_memory_gb = 80", "set both, or neither"),
    ],
)
def test_sizes_that_do_not_go_together_are_no_configuration(sections, reason, nearest):
    with pytest.raises(ConfigError) as error:
        config(**sections)
    assert reason in str(error.value) and nearest in str(error.value)


@pytest.mark.parametrize(
    ("preset", "sections", "reason", "nearest"),
    [
        ("tiny-moe", {"trainer": {"parallel": {"processes": 6, "ep": 3}}}, "ep = 3 does not divide the 16 experts", "ep = 2"),
        ("tiny-dense", {"trainer": {"parallel": {"processes": 2, "ep": 2}}}, "has none", "ep = 1"),
        ("tiny-moe", {"trainer": {"parallel": {"processes": 8, "cp": 8, "cp_method": "ulysses"}}}, "does not divide the 4 query", "cp = 4"),
        ("tiny-moe", {"trainer": {"balance_rate": 0.1}}, "moves a routing bias", "set trainer.balance_rate = 0"),
        ("tiny-moe", {"model": {"path": "m", "seq_len": 8192}, "trainer": {"row_tokens": 8192}}, "max_position_embeddings = 4096", "lower"),
        ("tiny-moe", {"engine": {"kv_memory_mib": 1}}, "engine.kv_memory_mib = 1 and model.seq_len = 1024", "or more"),
        (
            "tiny-moe",
            {"engine": {"block_tokens": 4000, "tiers": {"ram_mib": 1}}},
            "engine.tiers.ram_mib = 1 holds no block of ",
            "raise it",
        ),
        ("tiny-dense", {"engine": {"replicas": 2, "ep": {"ranks": 2}}}, "engine.ep.ranks = 2 shares out experts", "leave out [engine.ep]"),
        (
            "tiny-dense",
            {"model": {"path": "m", "impl": "hf"}, "engine": {"dtype": "float8"}},
            'engine.dtype = "float8" and model.impl = "hf"',
            'set engine.dtype = "bfloat16"',
        ),
        (
            "tiny-moe",
            {"trainer": {"parallel": {"processes": 8, "cp": 2}}, "orchestrator": {"batch": {"type": "samples", "samples": 3}}},
            "fewer samples than there are data ranks",
            "samples = 4, or processes = 8, dp_replicate = 1, cp = 4, ep = 1",
        ),
    ],
)
def test_what_the_model_or_the_batch_cannot_do_is_refused(preset, sections, reason, nearest):
    said = refused(ModelSpec.from_config(PRESETS[preset]), **sections)
    assert reason in said and nearest in said and said.count("\n") == 0


def test_all_that_is_wrong_is_said_at_once():
    said = refused(trainer={"balance_rate": 0.1, "parallel": {"processes": 6, "ep": 3}}, engine={"kv_memory_mib": 1})
    assert [part in said for part in ("16 experts", "routing bias", "kv_memory_mib")] == [True] * 3


def test_memory_that_does_not_fit_names_each_lever_that_would_make_it():
    spec = ModelSpec.from_config(PRESETS["tiny-moe"])
    run = {"trainer": {"row_tokens": 4096}, "engine": {"kv_memory_mib": 8}}
    assert refused(spec, **run, cluster={"host_memory_gb": 0.2}) == ""
    said = refused(spec, **run, cluster={"host_memory_gb": 0.06})
    assert "memory: " in said and "54.0 MB may be filled" in said and "largest parts: trainer processes" in said
    assert "What would fit: " in said and 'trainer.recompute = "layer"' in said and "trainer.optim.moments" not in said
    for text in said.split("What would fit: ")[1].split("; or "):  # each of them does
        key, _, value = text.partition(" = ")
        changed = load(
            RunConfig,
            (),
            ["model.path=m", 'envs=[{"id": "any"}]', "engine.kv_memory_mib=8", "cluster.host_memory_gb=0.06", f"{key}={value}"],
        )
        assert problems(changed, spec) == []


def test_a_model_far_too_large_is_refused_with_what_is_still_missing():
    cluster = {**GPUS, "nodes": 1}
    said = refused(ModelSpec.from_config(GLM5), trainer={"dtype": "bfloat16", "parallel": {"processes": 8, "ep": 8}}, cluster=cluster)
    assert "No single change fits; after " in said and "are still missing: more processes or a smaller model" in said


def test_memory_of_the_node_counts_when_it_is_what_is_short():
    """Batches of all processes of a node: 8 x 33.5M tokens x 630 bytes."""
    glm5 = load(RunConfig, [ROOT / "configs/glm5.toml"], ["cluster.host_memory_gb=100", "cluster.gpu_memory_gb=1000"])
    said = "\n".join(map(str, problems(glm5, ModelSpec.from_config(GLM5))))
    assert "916 GB are needed on each node, and 90.0 GB may be filled" in said and "batch 169 GB" in said


def test_the_main_job_refuses_what_explain_refuses(tmp_path):
    """And a run of several nodes, which it cannot start."""
    run = config(trainer={"parallel": {"processes": 6, "ep": 3}})
    assert "16 experts" in str(problems(run, TINY_MOE)[0])
    with pytest.raises(ConfigError, match=r"cluster\.nodes = 12, gpus_per_node = 8.*slipstream explain"):
        check_inputs(config(trainer={"parallel": {"processes": 96}}, cluster=GPUS))


def test_the_support_matrix_is_current():
    """docs/support.md is made by `make docs`, for the trainer and both engines. A pair of features is asked of the same checks as a run."""
    made = page()
    assert (ROOT / "docs/support.md").read_text() == made + "\n"
    assert obstacle(["balance_rate", "freeze_router"], TINY_MOE) and obstacle(["recompute", "processes"], TINY_MOE) == ""
    assert "The nearest that fits: processes = 8" in made and all(f"| {feature} |" in made for feature in TRAINER.features)
    for side in SIDES:
        part = made.partition(f"## {side.title.partition('. ')[0]}\n")[2].partition("\n## ")[0]
        assert all(part.count(f"\n| {feature} |") == 1 for feature in side.features)


DENSE = ModelSpec.from_config(PRESETS["tiny-dense"])


@pytest.mark.parametrize(
    ("side", "features", "spec", "reason"),
    [
        (EMBEDDED, ["FP8 weights", "wide EP", "RAM tier", "speculation", "FP8 KV", "routing capture"], TINY_MOE, ""),
        (EMBEDDED, ["wide EP"], DENSE, "engine.ep.ranks = 2 shares out experts"),
        (EMBEDDED, ["wide EP", "P/D"], TINY_MOE, "processes that share experts do not hand blocks over yet"),
        (EMBEDDED, ["disk tier", "no prefix cache"], TINY_MOE, "engine.prefix_cache = false and engine.tiers is set"),
        (VLLM, ["FP8 weights", "FP8 KV", "expert parallel"], TINY_MOE, ""),
        (VLLM, ["routing capture", "KV offload"], TINY_MOE, "routing rows do not travel with the KV blocks of vLLM"),
        (VLLM, ["routing capture", "compiled"], TINY_MOE, "compiled models do not say which experts they use"),
        (VLLM, ["speculation"], TINY_MOE, 'engine.speculation: a key of engine.type = "embedded" only'),
        (VLLM, ["published in FP8"], TINY_MOE, 'that it does not multiply in FP8; set trainer.publish = "compute"'),
    ],
)
def test_what_an_engine_can_do_is_asked_of_what_refuses_a_run(side, features, spec, reason):
    said = obstacle(features, spec, side)
    assert reason in said and bool(reason) == bool(said)


def explained(monkeypatch, capsys, *args) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["slipstream", "explain", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    return ended.value.code or 0, shown.out, shown.err


def test_explain_prints_tables_or_json_and_exits_by_whether_the_run_can_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["tiny-moe"]))
    (tmp_path / "run.toml").write_text(f'[model]\npath = "{tmp_path}"\n[[envs]]\nid = "calculator"\n')
    run = str(tmp_path / "run.toml")
    code, shown, said = explained(monkeypatch, capsys, run)
    assert code == 0 and said == "" and "memory of each trainer process" in shown and "4 P / n" not in shown
    code, shown, said = explained(monkeypatch, capsys, run, "--verbose", "--set", "trainer.parallel.processes=2")
    assert code == 0 and "4 P / n" in shown and "fsdp" in shown
    code, shown, said = explained(monkeypatch, capsys, run, "--json", "--mean-tokens", "100")
    assert code == 0 and json.loads(shown)["problems"] == [] and json.loads(shown)["batch"][2]["value"] == 100
    code, shown, said = explained(monkeypatch, capsys, run, "--json", "--set", "trainer.balance_rate=0.1")
    assert (
        code == 2
        and said.startswith("error: trainer.balance_rate")
        and json.loads(shown)["problems"] == [said.removeprefix("error: ").strip()]
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "run.toml"]
