"""[router]: what contradicts itself is refused by name."""

from __future__ import annotations

import pytest

from slipstream.config import RunConfig, validate
from slipstream.errors import ConfigError

RUN = {
    "model": {"path": "m", "seq_len": 96},
    "trainer": {"row_tokens": 256},
    "envs": [{"id": "reverse-text", "sampling": {"max_tokens": 8}}],
}


@pytest.mark.parametrize(
    ("router", "named"),
    [
        ({"policy": "random"}, "router.policy"),
        ({"urls": ["10.0.0.5:8000"]}, "'10.0.0.5:8000' is not an address"),
        ({"resolve": True}, "router.resolve = true and router.urls = "),
        ({"breaker_open_s": 9, "breaker_most_s": 3}, "router.breaker_open_s = 9.0 and router.breaker_most_s = 3.0"),
        ({"weights": {"prefx": 1}}, "prefix"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_named(router, named):
    with pytest.raises(ConfigError, match=named):
        validate(RunConfig, {**RUN, "router": router})


def test_by_default_requests_go_by_what_caches_hold_and_sessions_stay():
    config = validate(RunConfig, RUN).router
    assert (config.policy, config.sticky) == ("kv_aware", True)
