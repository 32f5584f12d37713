"""Models whose experts cannot be shared out as asked are refused with the keys, their values and what would fit."""

from __future__ import annotations

import pytest

from slipstream.config.serve import EngineConfig
from slipstream.config.wide import WideConfig
from slipstream.engine.wide.fit import check_wide, params_here
from slipstream.errors import ConfigError
from slipstream.models.spec import ModelSpec
from tests.unit.trainer.helpers import HF_CONFIG

MOE = ModelSpec.from_config(HF_CONFIG)  # 8 experts, 2 layers
DENSE = ModelSpec.from_config({**HF_CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})


def config(ranks: int, **ep) -> EngineConfig:
    return EngineConfig(replicas=ranks, ep=WideConfig(ranks=ranks, **ep))


@pytest.mark.parametrize(
    ("spec", "ranks", "ep", "impl", "parts"),
    [
        (DENSE, 2, {}, "auto", ("engine.ep.ranks = 2", "'qwen3' has none", "leave out [engine.ep]")),
        (MOE, 9, {}, "auto", ("engine.ep.ranks = 9", "8 experts", "engine.ep.ranks = 8 or less")),
        (MOE, 4, {"redundant_experts": 7}, "auto", ("redundant_experts = 7", "9 places", "8 experts", "6 or less")),
        (MOE, 2, {}, "hf", ("engine.ep.ranks = 2", 'model.impl = "hf"')),
    ],
)
def test_what_cannot_be_shared_out_is_refused(spec, ranks, ep, impl, parts):
    with pytest.raises(ConfigError) as error:
        check_wide(spec, config(ranks, **ep), impl)
    assert all(part in str(error.value) for part in parts), error.value


def test_what_can_be_is_not():
    check_wide(DENSE, config(1))
    check_wide(MOE, config(8))
    check_wide(MOE, config(3, redundant_experts=5))


def test_a_rank_holds_its_experts_and_everything_else():
    one, four = (params_here(MOE, config(ranks)) for ranks in (1, 4))
    assert one == MOE.num_params and one - four == 6 * 2 * MOE.expert_params
    assert params_here(MOE, config(4, redundant_experts=6)) == one
