"""One suite for every adapter of the Engine port: `pytest tests/conformance --engine=fake --engine=embedded --engine=vllm`.

Without --engine: fake and embedded. vLLM needs the interpreter of an environment that has it (--vllm-python, or SLIPSTREAM_VLLM_PYTHON).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.ports import Engine
from slipstream.types import Completion, GenerateRequest, PolicyVersion, Sampling
from tests.conformance.material import A, Material, prompt
from tests.conformance.subjects import Embedded, Fake, Subject
from tests.conformance.vllm_subject import Vllm

SUBJECTS = {"fake": Fake, "embedded": Embedded, "vllm": Vllm}
DEFAULT = ["fake", "embedded"]
HUNG_S = 300.0
"""An answer that takes longer will not come: nobody measures speed here."""
RESULTS = pytest.StashKey[dict[str, dict[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", action="append", choices=sorted(SUBJECTS), help="adapter to try; may be repeated")
    parser.addoption("--vllm-python", default=os.environ.get("SLIPSTREAM_VLLM_PYTHON"), help="interpreter that has vLLM")
    parser.addoption("--conformance-json", help="write who passed what to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*what): left out for adapters that do not offer this")
    config.stash[RESULTS] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        names = metafunc.config.getoption("--engine", default=None) or DEFAULT
        metafunc.parametrize("subject", names, indirect=True, scope="session")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Remember the outcome of each case."""
    report = (yield).get_result()
    if "subject" in getattr(item, "fixturenames", ()) and (report.when == "call" or report.outcome != "passed"):
        engine = item.callspec.params["subject"]  # type: ignore[attr-defined]
        case = f"{Path(item.fspath).stem}::{item.originalname}"  # type: ignore[attr-defined]
        seen = item.config.stash[RESULTS].setdefault(engine, {})
        seen[case] = "failed" if "failed" in (report.outcome, seen.get(case)) else report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--conformance-json", default=None)
    if path:
        versions = {name: getattr(SUBJECTS[name], "version", "") for name in session.config.stash[RESULTS]}
        Path(path).write_text(json.dumps({"versions": versions, "results": session.config.stash[RESULTS]}, indent=1))


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material.make(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest, material: Material, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    if request.param == "vllm":
        python = request.config.getoption("--vllm-python")
        if not python or not Path(python).exists():
            pytest.skip(f"vLLM is not tried: --vllm-python / SLIPSTREAM_VLLM_PYTHON = {python!r} is not an interpreter that has it")
        subject: Subject = Vllm(material, Path(python), tmp_path_factory.mktemp("vllm"))
    else:
        subject = SUBJECTS[request.param](material)
    yield subject
    subject.close()


@pytest.fixture(autouse=True)
def _offered(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("needs")
    if marker is not None:
        offers = request.getfixturevalue("subject").offers
        if missing := set(marker.args) - offers:
            pytest.skip(f"not offered: {', '.join(sorted(missing))}")


@dataclass
class Live:
    """An engine with version A live, and short forms."""

    engine: Engine
    subject: Subject
    material: Material
    _count: int = field(default=0)

    def request(self, prompt_T: np.ndarray | int, **values) -> GenerateRequest:
        """`prompt_T`: tokens, or the seed of a prompt of 9. `salt` is A unless told otherwise; the rest is sampling."""
        self._count += 1
        prompt_T = prompt(prompt_T, 9) if isinstance(prompt_T, int) else prompt_T
        fields = {name: values.pop(name) for name in ("salt", "routing_from") if name in values}
        fields.setdefault("salt", A)
        return GenerateRequest(f"case-{id(self)}/{self._count}", prompt_T, Sampling(**values), **fields)

    async def ask(self, prompt_T: np.ndarray | int, **values) -> Completion:
        return (await self.answer(self.request(prompt_T, **values)))[1]

    async def answer(self, request: GenerateRequest) -> tuple[GenerateRequest, Completion]:
        """The completion, after its accounts were checked."""
        async with asyncio.timeout(HUNG_S):
            completion = await self.engine.generate(request)
        check_accounts(self.material, self.subject, request, completion)
        return request, completion

    async def together(self, requests: list[GenerateRequest]) -> list[tuple[GenerateRequest, Completion]]:
        return list(await asyncio.gather(*(self.answer(request) for request in requests)))

    def check(self, version: int, request: GenerateRequest, completion: Completion) -> None:
        """Its logprobs are those of `version`."""
        assert completion.versions[0][0] == version
        self.material.check_logprobs(version, request, completion, self.subject.atol)

    async def swap(self, version: PolicyVersion) -> None:
        await self.engine.prepare(version)
        await self.engine.commit(version.number)

    async def until(self, holds, every_s: float = 0.01) -> None:
        """Wait for a state of the engine."""
        async with asyncio.timeout(HUNG_S):
            while not holds(await self.engine.state()):  # noqa: ASYNC110  the engine is somewhere else
                await asyncio.sleep(every_s)


def check_accounts(material: Material, subject: Subject, request: GenerateRequest, completion: Completion) -> None:
    """What holds for every completion of every engine."""
    tokens_N, count = completion.tokens_N, len(completion.tokens_N)
    assert completion.id == request.id
    assert len(completion.logprobs_N) == count <= request.sampling.max_tokens
    assert np.isfinite(completion.logprobs_N).all() and (completion.logprobs_N <= 1e-5).all()
    assert sum(n for _, n in completion.versions) == count and all(n > 0 for _, n in completion.versions)
    numbers = [version for version, _ in completion.versions]
    assert all(a != b for a, b in itertools.pairwise(numbers)), "neighbouring segments have different versions"
    assert 0 <= completion.cached_tokens < len(request.prompt_T) and completion.kv_age >= 0
    if "model" not in subject.offers:
        return
    assert ((tokens_N >= 0) & (tokens_N < material.spec.vocab_size)).all()
    stops = material.stop_ids | set(request.sampling.stop_token_ids)
    assert not set(tokens_N[:-1].tolist()) & stops, "nothing follows a token that ends the reply"
    if completion.finish_reason == "length":
        assert count == min(request.sampling.max_tokens, 512 - len(request.prompt_T)) and (not count or tokens_N[-1] not in stops)
    elif completion.finish_reason == "stop" and not request.sampling.stop:
        assert tokens_N[-1] in stops


@pytest.fixture
async def live(subject: Subject, material: Material) -> AsyncIterator[Live]:
    async with subject.engine() as engine:
        found = Live(engine, subject, material)
        await found.swap(replace(material.versions[A]))
        yield found


@pytest.fixture
async def fresh(subject: Subject, material: Material) -> AsyncIterator[Live]:
    async with subject.fresh() as engine:
        yield Live(engine, subject, material)
