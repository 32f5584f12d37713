"""Which architectures the fused step may serve: only those of which it knows every part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.engine.fused import _is_plain
from slipstream.models.maker import PRESETS
from slipstream.models.spec import ModelSpec


def spec(preset: str) -> ModelSpec:
    return ModelSpec.from_config({**PRESETS[preset], "vocab_size": 64})


@pytest.mark.parametrize("preset", ["tiny-moe", "small-moe"])
def test_softmax_mixtures_with_plain_heads_are_served(preset):
    assert _is_plain(spec(preset))


@pytest.mark.parametrize("preset", ["tiny-glm", "tiny-minimax", "tiny-gpt-oss", "tiny-deepseek", "tiny-deepseek-v32", "tiny-glm-dsa"])
def test_families_with_other_parts_are_not(preset):
    assert not _is_plain(spec(preset))


@pytest.mark.parametrize("changes", [{"gate_scale": 2.0}, {"num_groups": 2}, {"router_bias": True}, {"window": 4}])
def test_an_option_that_the_kernel_does_not_know_is_refused_by_itself(changes):
    assert not _is_plain(replace(spec("tiny-moe"), **changes))
