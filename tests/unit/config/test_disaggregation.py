"""Which engine plays which role, and what cannot be."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from slipstream.config import RunConfig, load
from slipstream.config.serve import EngineConfig
from slipstream.errors import ConfigError


def test_the_last_replicas_prefill_and_the_others_decode():
    config = EngineConfig(replicas=3, disaggregation={"prefill_replicas": 1})
    assert [config.role(i) for i in range(3)] == ["decode", "decode", "prefill"]
    assert [EngineConfig(replicas=2).role(i) for i in range(2)] == ["mixed", "mixed"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicas": 2, "disaggregation": {"prefill_replicas": 2}}, "at least one replica must decode"),
        ({"replicas": 2, "prefix_cache": False, "disaggregation": {"prefill_replicas": 1}}, "engine.prefix_cache = false"),
        ({"replicas": 3, "disaggregation": {"prefill_replicas": 2, "port": 65535}}, "engine.disaggregation.port = 65535"),
        ({"replicas": 4, "ep": {"ranks": 2}, "disaggregation": {"prefill_replicas": 2}}, "engine.ep.ranks = 2"),
        ({"replicas": 3, "port": 8000, "disaggregation": {"prefill_replicas": 1, "port": 8002}}, "keep them apart"),
    ],
)
def test_a_split_that_cannot_work_is_refused_with_keys_and_values(values, named):
    with pytest.raises(ValidationError, match=named):
        EngineConfig(**values)


def test_engines_of_somebody_else_have_no_roles():
    sets = ["engine.replicas=2", "engine.disaggregation.prefill_replicas=1", 'router.urls=["http://a:1"]']
    with pytest.raises(ConfigError, match=r"prefill_replicas = 1 and router.urls = \['http://a:1'\]"):
        load(RunConfig, (), ["model.path=m", 'envs=[{"id":"calculator"}]', *sets])
