"""The real vLLM: faults that only it can have, and a run that samples with it.

Needs SLIPSTREAM_VLLM_PYTHON, the interpreter of an environment that has vLLM and xxhash (docs/vllm.md). Minutes: vLLM starts for each test.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from slipstream.errors import EngineError, EngineUnavailable
from slipstream.models.maker import make_model
from slipstream.types import GenerateRequest, Sampling
from tests.conformance.material import A_AGAIN, A, B, Material, prompt
from tests.conformance.vllm_subject import VllmProcess
from tests.e2e.small import small

PYTHON = os.environ.get("SLIPSTREAM_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="vLLM is not tried: SLIPSTREAM_VLLM_PYTHON names no interpreter that has it"),
]
FAULT = """
import os, time
from slipstream.serving.vllm import plugin

def plant():
    plugin.FolderWeights.{what} = lambda self: {does}
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Material:
    return Material.make(tmp_path_factory.mktemp("material"))


def planted(folder: Path, what: str, does: str = "None") -> dict[str, str]:
    """A plugin of vLLM that makes ours leave something out, or do something else."""
    metadata = folder / "fault-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fault\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nfault = planted_fault:plant\n")
    (folder / "planted_fault.py").write_text(FAULT.format(what=what, does=does))
    return {"PYTHONPATH": str(folder)}


async def test_a_load_that_leaves_experts_unpacked_is_caught_by_the_canary(material, tmp_path):
    env = planted(tmp_path / "fault", "pack_experts")
    process = VllmProcess(tmp_path / "run", material.model, Path(PYTHON), env=env)
    try:
        async with process.client() as engine:
            await engine.prepare(material.versions[A])  # the weights that it was started with: A -> A is wrong already
            with pytest.raises(EngineError, match=r"does not compute what its weights say: mean logprob difference") as error:
                await engine.commit(A)
            assert not isinstance(error.value, EngineUnavailable)
            assert (await engine.state()).live_version == -1
    finally:
        process.close()


async def test_a_load_that_leaves_a_tied_head_behind_is_caught_and_the_old_version_stays(material, tmp_path):
    env = planted(tmp_path / "fault", "pack_tied_heads")
    process = VllmProcess(tmp_path / "run", material.model, Path(PYTHON), env=env)
    try:
        async with process.client() as engine:
            for number in (A, A_AGAIN):  # the head is that of the start: right for these
                await engine.prepare(material.versions[number])
                await engine.commit(number)
            await engine.prepare(material.versions[B])
            with pytest.raises(EngineError, match=f"version {B} is refused, live is {A_AGAIN}"):
                await engine.commit(B)
            state = await engine.state()
            assert (state.live_version, state.fingerprint) == (A_AGAIN, material.versions[A].fingerprint)
    finally:
        process.close()


async def test_an_engine_core_that_is_killed_in_an_update_ends_what_waits_and_leaves_nothing_behind(material, tmp_path):
    asked, hangs = tmp_path / "asked", tmp_path / "hangs"
    hang = f"os.path.exists({str(asked)!r}) and (os.mkdir({str(hangs)!r}), time.sleep(600))"
    process = VllmProcess(tmp_path / "run", material.model, Path(PYTHON), env=planted(tmp_path / "fault", "pack_tied_heads", hang))
    try:
        async with process.client() as engine:
            await engine.prepare(material.versions[A])
            await engine.commit(A)
            await engine.prepare(material.versions[B])
            asked.touch()
            request = GenerateRequest("r", prompt(1, 9), Sampling(max_tokens=480), salt=A)
            begun = asyncio.Event()
            waiting = [asyncio.create_task(engine.stream(request, lambda _: begun.set()))]
            await begun.wait()
            waiting.append(asyncio.create_task(engine.commit(B)))
            while not hangs.exists():  # noqa: ASYNC110  another process makes it
                await asyncio.sleep(0.1)
            below = process.below()
            blocks = {Path(found.path) for each in below for found in each.memory_maps() if found.path.startswith("/dev/shm/psm")}
            next(each for each in below if "EngineCore" in " ".join(each.cmdline())).kill()
            assert all(isinstance(end, EngineUnavailable) for end in await asyncio.gather(*waiting, return_exceptions=True))
        assert process.ended() == 1
        assert blocks and not [each for each in below if each.is_running()] and not [block for block in blocks if block.exists()]
    finally:
        process.close()


def test_a_run_trains_with_vllm_as_its_engine(tmp_path):
    make_model(tmp_path / "model", "tiny-moe", ["reverse the text: abc", "cba"] * 3, vocab_size=400, head_dim=32, num_hidden_layers=2)
    run = small(tmp_path, tmp_path / "model")
    sets = [f'engine={{"type": "vllm", "python": "{PYTHON}", "dtype": "float32", "kv_memory_mib": 32}}', "max_steps=3"]
    result = run.rl(*(word for each in sets for word in ("--set", each)), timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
    assert any("engine/canary/gap_nats" in line.get("values", line) for line in lines)
