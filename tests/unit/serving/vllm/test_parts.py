"""The pure parts of the vLLM adapter."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.config import RunConfig, load, to_toml, validate
from slipstream.config.vllm import INTERNAL, OWNED, VllmConfig
from slipstream.errors import ConfigError, EngineError
from slipstream.launch.run_folder import absolute
from slipstream.serving.vllm.args import SPANS, arguments
from slipstream.serving.vllm.canary import canary_prompts, compare
from slipstream.serving.vllm.child import environment, plugin_folder
from slipstream.serving.vllm.published import shapes_of, verify_fits
from slipstream.serving.vllm.rows import cut
from slipstream.serving.vllm.scrape import kv_cache, values
from slipstream.serving.vllm.support import TESTED, check_python, untested
from slipstream.transport.weights import fingerprint_file
from slipstream.types import PolicyVersion, Routing
from tests.unit.engine.helpers import write_model


def config(**engine) -> VllmConfig:
    values = {"type": "vllm", "python": "/v/bin/python", **engine}
    run = {"model": {"path": "m"}, "envs": [{"id": "calculator"}], "trainer": {"router_replay": False}, "engine": values}
    found = validate(RunConfig, run).engine
    assert isinstance(found, VllmConfig)
    return found


def words(cpu: bool = False, **engine) -> list[str]:
    return arguments(config(**engine), Path("/m"), 1000, 3, Path("/s"), cpu)


def value(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_our_configuration_becomes_vllms_arguments():
    argv = words(max_running=8, kv_memory_mib=2, tensor_parallel=2, expert_parallel=True, prefix_cache=False, kv_cache_dtype="fp8_e4m3")
    wanted = {
        "--model": "/m",
        "--uds": "/s",
        "--max-model-len": "1000",
        "--seed": "3",
        "--max-num-seqs": "12",  # and the canary
        "--kv-cache-memory-bytes": "2097152",
        "--tensor-parallel-size": "2",
        "--kv-cache-dtype": "fp8_e4m3",
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": '{"backend": "slipstream"}',
        "--dtype": "bfloat16",
    }
    assert {name: value(argv, name) for name in wanted} == wanted
    assert {"--enable-expert-parallel", "--no-enable-prefix-caching", "--enforce-eager", "--enable-scale-out"} <= set(argv)
    assert "--quantization" not in argv and "--block-size" not in argv


def test_the_cpu_build_prefills_prompts_whole():
    assert value(words(), "--max-num-batched-tokens") == "516" and "--no-enable-chunked-prefill" not in words()
    argv = words(cpu=True)
    assert value(argv, "--max-num-batched-tokens") == "1004" and "--no-enable-chunked-prefill" in argv


def test_every_other_argument_is_passed_through():
    table, names = {"window_size": 2}, ["a", "b"]
    argv = words(args={"enable_dbo": True, "max_logprobs": 5, "eplb_config": table, "served_model_name": names, "middleware": "x.Y"})
    assert "--enable-dbo" in argv and "--no-log-stats" in words(args={"log_stats": False})
    assert value(argv, "--max-logprobs") == "5" and value(argv, "--eplb-config") == '{"window_size": 2}'
    assert argv[argv.index("--served-model-name") :][:3] == ["--served-model-name", "a", "b"]
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--middleware"] == ["x.Y", SPANS], "the user's and the adapter's own"


def test_offload_and_connectors_are_passed_on_and_exclude_routing_capture():
    argv = words(capture_routing=False, kv_offload_mib=512, kv_transfer={"kv_connector": "NixlConnector"})
    assert value(argv, "--kv-offloading-size") == "0.5" and value(argv, "--kv-transfer-config") == '{"kv_connector": "NixlConnector"}'
    assert "--worker-extension-cls" not in argv
    with pytest.raises(ConfigError, match=r"engine\.capture_routing = true, engine\.kv_transfer"):
        config(kv_transfer={"kv_connector": "NixlConnector"})


@pytest.mark.parametrize("name", [*OWNED, "max-model-len", "--seed", "no_enable_prefix_caching"])
def test_an_argument_that_another_key_decides_is_refused_by_that_name(name):
    plain = name.strip("-").replace("-", "_").removeprefix("no_")
    with pytest.raises(ConfigError, match=OWNED[plain].replace(".", r"\.")):
        config(args={name: 1})


@pytest.mark.parametrize("name", sorted(INTERNAL))
def test_an_argument_of_the_adapter_itself_is_refused(name):
    with pytest.raises(ConfigError, match="leave it out"):
        config(args={name: "x"})


def test_capture_needs_eager_execution():
    with pytest.raises(ConfigError, match="enforce_eager = false"):
        config(enforce_eager=False)
    assert "--enforce-eager" not in words(enforce_eager=False, capture_routing=False)


def test_a_run_file_without_a_type_is_of_the_embedded_engine_and_both_survive_a_round_trip(tmp_path):
    for engine in ({"kv_memory_mib": 3}, {"type": "vllm", "python": "/p", "args": {"x": {"y": 1}}, "env": {"A": "b"}}):
        run = validate(RunConfig, {"model": {"path": "m"}, "envs": [{"id": "calculator"}], "engine": engine})
        (tmp_path / "run.toml").write_text(to_toml(run))
        assert load(RunConfig, [tmp_path / "run.toml"]) == run and run.engine.type == engine.get("type", "embedded")


def test_mistakes_in_either_kind_of_engine_name_the_key_as_it_is_written():
    base = {"model": {"path": "m"}, "envs": [{"id": "calculator"}]}
    for engine, message in (
        ({"kv_memory_mibb": 3}, r"engine\.kv_memory_mibb: unknown key; did you mean 'engine\.kv_memory_mib'"),
        ({"type": "vllm"}, r"engine\.python: this key is required"),
        ({"type": "vllm", "python": "p", "fp8_scales": "float32"}, r"engine\.fp8_scales: a key of engine\.type = \"embedded\" only"),
        ({"type": "sglang"}, r'expected "embedded" \(the default\) or "vllm"'),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(RunConfig, {**base, "engine": engine})


def test_the_canary_compares_means_and_never_passes_what_is_not_a_number():
    a = [np.array([-1.0, -2.0]), np.array([-3.0])]
    assert compare(a, a, 0.01).ok
    verdict = compare([np.array([-1.0, -2.3]), np.array([-3.0])], a, 0.01)
    assert not verdict.ok and verdict.gap == pytest.approx(0.1)
    assert not compare([np.array([-1.0, np.nan]), np.array([-3.0])], a, 1e9).ok


def test_canary_prompts_are_always_the_same_and_lie_in_the_vocabulary():
    first, again = canary_prompts(3, 20, 64), canary_prompts(3, 20, 64)
    assert all((x == y).all() for x, y in zip(first, again, strict=True)) and not (first[0] == first[1]).all()
    assert all(prompt.min() >= 0 and prompt.max() < 64 and len(prompt) == 20 for prompt in first)


def test_a_version_that_does_not_fit_the_model_is_refused(tmp_path):
    model, wide = write_model(tmp_path / "m", moe=True), write_model(tmp_path / "w", moe=True, moe_intermediate_size=32)
    shapes = shapes_of(model)
    version = PolicyVersion(1, fingerprint_file(model / "model.safetensors")[0], None, str(model))
    verify_fits(version, shapes)
    other = PolicyVersion(2, fingerprint_file(wide / "model.safetensors")[0], None, str(wide))
    with pytest.raises(EngineError, match=r"tensors do not fit, such as model\.layers"):
        verify_fits(other, shapes)
    with pytest.raises(EngineError, match="fingerprint"):
        verify_fits(replace(version, fingerprint="0" * 32), shapes)
    with pytest.raises(EngineError, match="cannot be read"):
        verify_fits(replace(version, path=str(tmp_path)), shapes)


def test_rows_are_cut_to_what_was_delivered_and_what_is_missing_is_unknown():
    ids_TLK = np.arange(12, dtype=np.uint8).reshape(6, 2, 1)
    rows = Routing(2, ids_TLK, np.ones(6, np.bool_))
    same = cut(rows, 2, 6)
    assert same.ids_TLK.tolist() == ids_TLK[:4].tolist() and same.valid_T.all()
    longer = cut(rows, 2, 10)
    assert longer.ids_TLK.shape == (8, 2, 1) and longer.valid_T.tolist() == [True] * 6 + [False] * 2


def test_what_vllm_says_of_its_kv_cache_is_what_the_router_counts_with():
    rank = 'vllm:cache_config_info{{block_size="128",engine="{}",hash_block_size="None",mamba_block_size="16",num_gpu_blocks="{}"}} 1.0\n'
    assert kv_cache(rank.format(0, 512)) == (128, 65536) and kv_cache(rank.format(0, 512) + rank.format(1, 256)) == (128, 98304)
    assert kv_cache("") == (0, 0) and kv_cache(rank.format(0, "None")) == (0, 0)


def test_vllms_metrics_are_found_and_summed_over_its_engines():
    text = """# HELP
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 10.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 128.0
vllm:generation_tokens_total{engine="0"} 1e+03
"""
    assert values(text) == {
        "engine/tokens/generated": 1000.0,
        "engine/tokens/prefilled": 10.0,
        "engine/tokens/cached": 128.0,
        "engine/requests/running": 5.0,
        "engine/requests/waiting": 0.0,
        "engine/kv/used_frac": 0.5,
        "engine/preemptions/count": 0.0,
    }


def test_the_plugin_folder_brings_the_entry_point_and_nothing_else_of_our_environment(tmp_path):
    folder = plugin_folder(tmp_path / "plugin")
    assert sorted(path.name for path in folder.iterdir())[0] == "slipstream" and (folder / "slipstream" / "types.py").exists()
    (entry,) = (file for file in folder.glob("*.dist-info/entry_points.txt"))
    assert "slipstream.serving.vllm.plugin:register" in entry.read_text()
    env = environment(folder, {"PYTHONPATH": "/mine", "VLLM_PLUGINS": "other"})
    assert env["PYTHONPATH"] == f"{folder}:/mine" and env["VLLM_PLUGINS"] == "other,slipstream" and env["VLLM_SERVER_DEV_MODE"] == "1"
    shutil.rmtree(folder)
    import slipstream

    assert Path(slipstream.__file__).exists(), "removing the folder removes the link, not what it points to"


def test_an_interpreter_without_vllm_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.python = .*has no vLLM"):
        check_python(Path(sys.executable))
    with pytest.raises(ConfigError, match="cannot be run"):
        check_python(tmp_path / "python")


def test_an_untested_version_is_warned_about_with_the_page_of_results():
    assert untested(TESTED[-1]) is None and untested(f"{TESTED[-1]}+cpu") is None
    assert "docs/conformance.md" in (untested("9.9.9") or "")


def test_a_relative_interpreter_is_found_from_anywhere_and_a_link_stays_a_link(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    run = {"model": {"path": "m"}, "envs": [{"id": "calculator"}], "engine": {"type": "vllm", "python": "bin/python"}}
    found = absolute(validate(RunConfig, run)).engine
    assert isinstance(found, VllmConfig) and found.python == tmp_path / "bin" / "python"
