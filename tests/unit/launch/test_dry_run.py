"""A dry run says everything that a start would refuse, in the words of the start, and leaves nothing behind."""

import json
import socket
import sys
from pathlib import Path

import pytest
import torch

from slipstream import cli
from slipstream.config import RunConfig, load
from slipstream.envs.agent import AgentEnv
from slipstream.envs.calculator import Calculator
from slipstream.errors import SlipstreamError
from slipstream.launch import checks, run_folder
from slipstream.launch.dry_run import print_plan
from slipstream.models.hf import read_tensors, write_tensors
from slipstream.models.load import load_model
from slipstream.models.lora import Adapters
from slipstream.models.maker import make_model
from slipstream.models.peft import write_adapter
from slipstream.parallel.fp8_gather import check_edges
from slipstream.trainer.step import learner_of


class Agent(AgentEnv, Calculator):
    """Played over the gateway."""


@pytest.fixture
def model(tmp_path) -> Path:
    make_model(tmp_path / "m", "tiny-moe", ["a b c"] * 9, vocab_size=300)
    return tmp_path / "m"


def run_of(model: Path, *sets: str) -> RunConfig:
    base = [f"model.path={model}", "envs=[{id='calculator'}]", f"runs_dir={model.parent}/runs", "name=first"]
    return load(RunConfig, (), [*base, *sets])


def said(config: RunConfig, **how: bool) -> str:
    return "\n".join(map(str, print_plan(config, **{"resume": False, "clean": False, **how})))


def test_a_run_that_can_start_is_planned_and_nothing_is_written(model, capsys):
    sets = ["engine.replicas=3", "engine.disaggregation.prefill_replicas=1", "trainer.parallel.processes=2"]
    assert said(run_of(model, *sets)) == ""
    shown = capsys.readouterr().out
    again = model.parent / "again.toml"
    again.write_text(shown)
    assert load(RunConfig, [again]) == run_of(model, *sets), "what is printed is a run file"
    assert "qwen3_moe" in shown and "16 experts" in shown and "2 decode, 1 prefill" in shown
    assert all(f"# {name}: " in shown for name in ("trainer", "trainer-1", "engine-2", "orchestrator")) and "REFUSED" not in shown
    assert "dp_shard 2" in shown and "sequences of model.seq_len = 1024" in shown and "may be filled" in shown
    assert sorted(path.name for path in model.parent.iterdir()) == ["again.toml", "m"]


@pytest.mark.parametrize(
    ("sets", "named"),
    [
        (["trainer.parallel.processes=6", "trainer.parallel.ep=3"], ["trainer.parallel: ep = 3", "16 experts", "nearest that fits"]),
        (["engine.kv_memory_mib=1"], ["engine.kv_memory_mib = 1", "model.seq_len = 1024", "or more"]),
        (["engine.block_tokens=4000", "engine.tiers.ram_mib=1"], ["engine.tiers.ram_mib = 1 holds no block", "raise it"]),
        (["engine.replicas=17", "engine.ep.ranks=17"], ["engine.ep.ranks = 17 and the 16 experts", "16 or less"]),
        (["model.seq_len=5000", "trainer.row_tokens=5000", "engine.kv_memory_mib=512"], ["max_position_embeddings = 4096", "lower"]),
        (["trainer.loss={type='custom', path='no_such:f'}"], ["trainer.loss.path", "no_such"]),
        (["engine={type='vllm', python='/no/python'}"], ["engine.python = '/no/python'", "interpreter"]),
        (["router.urls=['http://127.0.0.1:1']"], ["SLIPSTREAM_ENGINE_TOKEN", "router.token_env", "export it"]),
        (["cluster.nodes=2", "trainer.parallel.processes=2"], ["cluster.nodes = 2", "Leave out [cluster]"]),
    ],
)
def test_what_a_start_refuses_a_dry_run_refuses_in_the_same_words(model, sets, named, monkeypatch, capsys):
    monkeypatch.delenv("SLIPSTREAM_ENGINE_TOKEN", raising=False)
    config = run_of(model, *sets)
    with pytest.raises(SlipstreamError) as refusal:
        checks.check_inputs(config)
    found = said(config)
    assert found == str(refusal.value) and all(part in found for part in named)
    assert capsys.readouterr().out.count("REFUSED") == 1


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", None, "m has no config.json"),
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", '{"model_type": "gpt2"}', "gpt2"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("chat_template.jinja", None, "has no chat template"),
    ],
)
def test_a_broken_model_folder_is_named_and_what_it_hides_is_not_guessed(model, file, content, named):
    for path in model.glob(file if file != "chat_template.jinja" else "*template*"):
        path.unlink()
    if content is not None:
        (model / file).write_text(content)
    if file == "chat_template.jinja" and (settings := model / "tokenizer_config.json").exists():
        settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}))
    config = run_of(model)
    with pytest.raises(SlipstreamError) as refusal:
        checks.check_inputs(config)
    assert named in said(config) and str(refusal.value) in said(config)


def damage(model: Path, how: str) -> None:
    weights, tensors = model / "model.safetensors", {name: tensor.clone() for name, tensor in read_tensors(model).items()}
    first = "model.layers.0.mlp.gate.weight"
    if how == "missing":
        weights.unlink()
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        changed = {"lost": {}, "shape": {first: tensors[first][:, 1:].contiguous()}, "dtype": {first: tensors[first].to(torch.int8)}}[how]
        write_tensors(model, {name: tensor for name, tensor in tensors.items() if name != first} | changed)


@pytest.mark.parametrize("how", ["missing", "cut", "lost", "shape", "dtype"])
def test_weights_that_the_roles_could_not_load_are_found_without_loading_them(model, how, monkeypatch):
    damage(model, how)
    config = run_of(model)
    checks.check_inputs(config)  # torch-free: the roles find it
    with pytest.raises(SlipstreamError) as refusal:
        learner_of(model, config.trainer, config.trainer.optim, 1)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("a weight was loaded"))
    assert said(config) == str(refusal.value)


def test_adapters_that_do_not_fit_are_found(model, tmp_path):
    assert said(run_of(model, "trainer.lora.targets=['attention']")) == ""
    assert "trainer.lora.targets: 'nothing' matches no matrix" in said(run_of(model, "trainer.lora.targets=['nothing']"))
    write_adapter(tmp_path / "adapter", Adapters(load_model(model), 4, 8.0, ["attention"], 0), model)  # type: ignore[arg-type]
    fits = ["trainer.lora.targets=['attention']", f"trainer.lora.path={tmp_path}/adapter", "trainer.lora.alpha=8"]
    assert said(run_of(model, *fits, "trainer.lora.rank=4")) == ""
    assert "trainer.lora.rank = 8, but the adapter" in said(run_of(model, *fits, "trainer.lora.rank=8"))


def test_shards_that_would_cut_a_block_are_found_before_anything_is_sharded(model):
    sets = ["trainer.dtype=float8", "trainer.parallel.processes=2", "trainer.parallel.fp8_all_gather=true"]
    found = said(run_of(model, *sets))
    assert "trainer.parallel.fp8_all_gather = true" in found and "sharded over 2 processes" in found
    with pytest.raises(SlipstreamError) as refusal:
        check_edges("layers.0.attention.qkv", torch.Size((64, 128)), 2)
    assert str(refusal.value).partition("(64")[0].split(":")[0] == found.split(":")[0]


@pytest.mark.parametrize("key", ["moments", "activations"])
def test_a_folder_that_is_not_there_is_found(model, key):
    sets = [f"trainer.offload.{key}=true", "trainer.offload.folder=/no/folder", "trainer.recompute=layer"]
    assert "trainer.offload.folder = /no/folder" in said(run_of(model, *sets))


def test_tiers_whose_folder_cannot_be_made_are_refused_and_made_by_nobody(model, tmp_path):
    (tmp_path / "file").write_text("")
    tier = ["engine.tiers.disk_mib=8", f"engine.tiers.disk_path={tmp_path}"]
    assert said(run_of(model, tier[0], tier[1] + "/new/deep")) == "" and not (tmp_path / "new").exists()
    assert f"engine.tiers.disk_path = '{tmp_path}/file/new' cannot be used" in said(run_of(model, tier[0], tier[1] + "/file/new"))


def test_ports_and_hosts_are_tried(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"engine.port = {port}" in said(run_of(model, f"engine.port={port}"))
        agent = f"envs=[{{id='{__name__}:Agent'}}]"
        assert f"gateway.port = {port}" not in said(run_of(model, f"gateway.port={port}")), "no agent: no gateway"
        found = said(run_of(model, agent, f"gateway.port={port}"))
        assert f"gateway.port = {port}: the gateway cannot listen on port {port}" in found
    assert "engine.host = 'no.such.host.invalid'" in said(run_of(model, "engine.host=no.such.host.invalid"))


def test_the_run_folder_is_looked_at_and_left_as_it_is(model):
    config = run_of(model)
    run_folder.create(config)
    before = {path: path.read_bytes() for path in config.folder.rglob("*") if path.is_file()}
    assert "already holds a run" in said(config)
    assert said(config, resume=True) == said(config, clean=True) == ""
    assert "trainer.optim.beta1" in said(run_of(model, "trainer.optim.beta1=0.5"), resume=True)
    assert "holds no run" in said(run_of(model, "name=other"), resume=True)
    assert {path: path.read_bytes() for path in config.folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in config.runs_dir.iterdir()] == ["first"]


def test_the_command_says_all_that_is_wrong_and_ends_with_2(model, monkeypatch, capsys):
    sets = ["model.path=" + str(model), "envs=[{id='calculator'}]", f"runs_dir={model.parent}/runs", "engine.kv_memory_mib=1"]
    sets += ["trainer.balance_rate=0.1"]
    (model.parent / "run.toml").write_text("")
    argv = ["slipstream", "rl", str(model.parent / "run.toml"), *(x for s in sets for x in ("--set", s)), "--dry-run"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    shown = capsys.readouterr()
    assert [part in shown.err for part in ("error: trainer.balance_rate", "error: engine.kv_memory_mib")] == [True] * 2
    assert "# ---- checked" in shown.out and "Traceback" not in shown.err
