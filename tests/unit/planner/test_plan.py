"""A plan by hand, the plan of GLM-5, and the groups of ranks against those that the trainer makes."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.config import RunConfig, load, validate
from slipstream.models.spec import ModelSpec
from slipstream.parallel.mesh import spread
from slipstream.planner.layout import Layout, ranks_text
from slipstream.planner.plan import Plan, plan

TINY = {
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
"""A layer: attention 16·(16 + 2·8) + 16·16 + 2·8 = 784, norms 32, router 64, experts 4·768 = 3,072. Ends: 2·1,600 + 16 = 3,216.
P = 2·3,952 + 3,216 = 11,120."""
RUN = {
    "model": {"seq_len": 64},
    "trainer": {
        "dtype": "bfloat16",
        "recompute": "layer",
        "row_tokens": 128,
        "parallel": {"processes": 4, "cp": 2, "ep": 2},
    },
    "orchestrator": {"batch": {"type": "samples", "samples": 8}},
    "envs": [{"id": "any", "group_size": 4, "sampling": {"max_tokens": 32}}],
    "cluster": {"gpus_per_node": 4, "gpu_memory_gb": 1, "host_memory_gb": 1, "engines": "elsewhere"},
}
"""4 processes share the weights; 2 of them the tokens of a row of 128 (t = 64), and 2 the experts."""
ROOT = Path(__file__).parents[3]


def planned(folder: Path, run: dict, **trainer) -> Plan:
    (folder / "config.json").write_text(json.dumps(TINY))
    run = {**run, "model": {**run["model"], "path": str(folder)}, "trainer": {**run["trainer"], **trainer}}
    return plan(validate(RunConfig, run))


def values(figures) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}


def test_the_memory_of_a_tiny_run_is_what_one_computes_by_hand(tmp_path):
    found = planned(tmp_path, RUN)
    assert values(found.memory.process) == {
        "master weights": 4 * 11_120 / 4,
        "gradients": 4 * 11_120 / 4,
        "moments (adamw, float32)": 8 * 11_120 / 4,
        "gathered layer": 2 * (880 + 3_072 / 2),
        "gathered layer, next one": 2 * (880 + 3_072 / 2),
        "gathered embedding, head": 2 * 3_216,
        "gradients of embedding, head": 2 * 3_216,
        "gradients of a layer": 6 * (880 + 3_072 / 2),
        "inputs of the layers": 2 * 16 * 64 * 2,
        # norms 2·16·(2 + 2); attention 2·(32 + 24 + 16) + 4·2; router 4·2·4; experts 2·2·2·16
        "activations of a layer, again": (128 + 152 + 32 + 128) * 64,
        "keys, values of the row (cp)": 2 * (2 * 8) * 128,
        "MoE dispatch buffers": 4 * (64 * 2 * 16 * 2),
        "logits": 4 * 100 * 64,
    }
    assert values(found.memory.node) == {"batch": 4 * 8 * 64 * (30 + 2 * 2)}
    assert found.problems == ()


def test_the_batch_of_a_tiny_run_is_what_one_computes_by_hand(tmp_path):
    batch = values(planned(tmp_path, RUN).batch)
    assert batch["tokens a step"] == 8 * 64 and batch["row"] == 128 and batch["row, of each process"] == 64
    assert batch["rows a step"] == 4 and batch["data ranks"] == 2 and batch["micro-batches a step"] == 2
    assert batch["places without a row"] == 0
    assert batch["tokens an expert, each pass and layer"] == 64 * 2 * 2 / 4
    assert batch["samples issued, not yet trained, most"] == 3 * 8


def test_a_known_mean_changes_batch_and_communication_and_not_the_memory(tmp_path):
    full = planned(tmp_path, RUN)
    half = plan(full.config, mean_tokens=32)
    assert values(half.batch)["tokens a step"] == 8 * 32 and values(half.batch)["rows a step"] == 2
    assert values(half.communication)["ep: dispatch and combine"] == values(full.communication)["ep: dispatch and combine"] / 2
    assert values(half.memory.process) == values(full.memory.process)


def test_the_communication_of_a_tiny_run_is_what_one_computes_by_hand(tmp_path):
    assert values(planned(tmp_path, RUN).communication) == {
        "ep: dispatch, or combine, of a token in a layer": 2 * 16 * 2,
        "ep: dispatch and combine": 2 * 2 * 3 * 2 * 64 * 64 / 2,  # passes, layers, forward + again + backward, there and back
        "fsdp: weights outside the experts": 2 * 2 * (2 * 1_760 + 3_216) * 3 / 4,
        "fsdp: weights of experts": 2 * 2 * 2 * 3_072 / 2,
        "fsdp: gradients": 2 * 4 * ((1_760 + 3_216) * 3 / 4 + 3_072 / 2),
        "cp: keys and values": 2 * 2 * 4 * 2 * 16 * 128 / 2,  # forward, again, backward, gradients
        "published weights": 2 * 11_120,
        "expert ids of the batch (replay)": 8 * 64 * 2 * 2,
    }


def test_an_fp8_engine_holds_and_gets_a_byte_for_each_value_of_a_matrix(tmp_path):
    both = {**RUN, "engine": {"dtype": "float8"}, "cluster": {"host_memory_gb": 1}}
    matrices = 11_120 - 3_216 - 2 * 64  # all but embedding, head, routers
    plan = planned(tmp_path, both, publish="float8")
    assert values(plan.communication)["published weights"] == 2 * 11_120 - matrices
    assert values(plan.memory.node)["engine weights"] == 2 * (2 * 11_120 - matrices)
    shared = planned(tmp_path, {**both, "engine": {"dtype": "float8", "replicas": 2, "ep": {"ranks": 2}}}, publish="float8")
    elsewhere = 2 * 3_072 // 2  # half of the experts of two layers
    assert values(shared.memory.node)["engine weights"] == 2 * 2 * (2 * (11_120 - elsewhere) - (matrices - elsewhere))


def test_settings_change_the_part_that_they_are_about(tmp_path):
    base = values(planned(tmp_path, RUN).memory.process)
    muon = values(planned(tmp_path, RUN, optim={"type": "muon", "moments": "bfloat16"}).memory.process)
    assert muon["moments (muon, bfloat16)"] == 2 * (11_120 + 3_216 + 2 * 64) / 4  # two moments outside of matrices
    assert "moments (sgd, float32)" not in values(planned(tmp_path, RUN, optim={"type": "sgd", "momentum": 0}).memory.process)
    kept = values(planned(tmp_path, RUN, recompute="none").memory.process)
    assert kept["activations"] == 2 * base["activations of a layer, again"]
    assert kept["MoE dispatch buffers"] == (2 * 2 + 2) * 64 * 2 * 16 * 2
    frozen = values(planned(tmp_path, RUN, freeze_router=True).memory.process)
    assert frozen["gradients"] == 4 * (11_120 - 2 * 64) / 4
    copies = planned(tmp_path, RUN, parallel={"processes": 4, "dp_replicate": 2, "ep": 2})
    assert values(copies.memory.process)["master weights"] == 4 * 11_120 / 2
    assert values(copies.communication)["dp_replicate: gradients"] == 4 * 11_120 / 2 * 2 * 1 / 2  # one pass, r = 2


def test_one_process_has_a_copy_to_compute_with_and_gathers_nothing(tmp_path):
    alone = planned(tmp_path, {**RUN, "cluster": {"host_memory_gb": 1}}, parallel={})
    process = values(alone.memory.process)
    assert process["compute copy"] == 2 * 11_120 and process["master weights"] == 4 * 11_120
    assert not [name for name in process if "gathered" in name or "cp" in name or "dispatch" in name]
    node = values(alone.memory.node)
    assert node["trainer processes"] == sum(process.values())
    assert node["engine weights"] == 2 * 4 * 11_120 and node["engine KV cache"] == 128 * 2**20
    assert "KV beyond the device" not in node
    tiers = {"ram_mib": 5, "disk_path": "d", "disk_mib": 100, "queue_mib": 7}
    offloading = planned(tmp_path, {**RUN, "cluster": {"host_memory_gb": 1}, "engine": {"replicas": 2, "tiers": tiers}}, parallel={})
    assert values(offloading.memory.node)["KV beyond the device"] == 2 * 12 * 2**20


@pytest.fixture(scope="module")
def glm5() -> RunConfig:
    config = load(RunConfig, [ROOT / "configs/glm5.toml"])
    return config.replace(model=config.model.replace(path=ROOT / config.model.path))


def test_glm5_fits_on_96_gpus_with_moments_and_activations_off_the_gpu(glm5):
    """Figures: 8 bytes a parameter on 96 GPUs, of 131,072 tokens a quarter a GPU, EP 8."""
    found = plan(glm5)
    gpu, node, limit = values(found.memory.process), values(found.memory.node), found.memory.process_limit
    assert found.memory.excess <= 0 and limit == pytest.approx(0.9 * 141e9)
    assert gpu["master weights"] + gpu["gradients"] == pytest.approx(62e9, rel=0.005)
    assert gpu["logits"] == pytest.approx(0.634e9, rel=0.005)
    assert gpu["inputs of the layers"] == pytest.approx(2 * 31.4e9 / 78, rel=0.005)
    assert gpu["MoE dispatch buffers"] == pytest.approx(4 * 3.22e9, rel=0.005)
    assert node["moments, off the GPU"] == pytest.approx(496e9, rel=0.005)
    assert node["inputs of layers, off the GPU"] == pytest.approx(8 * 31.4e9, rel=0.005)
    assert sum(gpu.values()) == pytest.approx(109e9, rel=0.02)


def test_glm5_without_offload_is_refused_with_what_would_make_it_fit(glm5):
    found = plan(glm5.replace(trainer=glm5.trainer.replace(offload={})))
    gpu = values(found.memory.process)
    assert gpu["moments (adamw, float32)"] == pytest.approx(62e9, rel=0.005)
    assert gpu["inputs of the layers"] == pytest.approx(31.4e9, rel=0.005)
    said = "\n".join(map(str, found.problems))
    assert "are needed on each GPU (cluster.gpu_memory_gb = 141)" in said and "moments (adamw, float32) 61.9 GB" in said
    assert "trainer.offload.moments = true" in said and said.endswith("fits")


def test_the_gathered_layer_and_the_traffic_of_glm5(glm5):
    found = plan(glm5)
    rest = 2 * 213.7e6  # attention, indexer, shared expert, router, in bfloat16
    assert values(found.memory.process)["gathered layer"] - rest == pytest.approx(32 * 37.75e6 * 2, rel=0.005)
    whole = plan(glm5.replace(trainer=glm5.trainer.replace(parallel={"processes": 96, "cp": 4})))
    assert values(whole.memory.process)["gathered layer"] - rest == pytest.approx(19.3e9, rel=0.005)
    moved, passes = values(found.communication), 11
    assert moved["fsdp: weights of experts"] / passes / 2 * 12 / 11 == pytest.approx(181e9, rel=0.005)
    ends = 2 * 1.903e9
    assert (moved["fsdp: weights outside the experts"] / passes * 96 / 95 - ends) / 2 == pytest.approx(34.4e9, rel=0.005)
    assert moved["ep: dispatch, or combine, of a token in a layer"] == 96 * 1024
    assert moved["cp: keys and values"] / passes / 4 * 4 / 3 == pytest.approx(14.4e9, rel=0.005)
    assert moved["published weights"] == pytest.approx(1.49e12, rel=0.005)
    assert moved["expert ids of the batch (replay)"] == 256 * 131_072 * 600
    assert values(found.batch)["tokens an expert, each pass and layer"] == 8192


def test_glm5_passes_explain(glm5):
    assert plan(glm5).problems == ()


@pytest.mark.parametrize(
    "sizes",
    [
        {"processes": 8, "cp": 2, "ep": 4},
        {"processes": 8, "dp_replicate": 2, "cp": 2, "ep": 2},
        {"processes": 8, "dp_replicate": 2, "ep": 4},
    ],
)
def test_groups_are_those_of_the_trainers_mesh(sizes):
    run = {**RUN, "model": {"path": "m", "seq_len": 64}, "trainer": {**RUN["trainer"], "parallel": sizes}, "cluster": {}}
    config = validate(RunConfig, run)
    layout = Layout.of(config, ModelSpec.from_config(TINY))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = spread(config.trainer.parallel)
    finally:
        dist.destroy_process_group()
    groups = {name.split()[0]: set(found) for name, found in layout.groups().items()}
    assert mesh.rows is not None and mesh.dense is not None and mesh.expert is not None
    expert = mesh.expert.mesh
    by_mesh = {
        "cp": mesh.rows.mesh,
        "fsdp": mesh.dense.mesh,
        "ep": expert.flatten(0, 1),
        "expert_fsdp": expert.transpose(1, 2).flatten(0, 1),
        "dp_replicate": mesh.dense.mesh.T,
    }
    wanted = {name: {tuple(row) for row in ranks.tolist()} for name, ranks in by_mesh.items()}
    assert groups == {name: found for name, found in wanted.items() if len(next(iter(found))) > 1}
    assert layout.experts_of(layout.ep - 1)[1] == 3


def test_ranks_are_written_short():
    assert ranks_text(range(8)) == "0-7" and ranks_text((0, 8, 16, 24)) == "0 8 ... 24" and ranks_text((0, 4)) == "0 4"
