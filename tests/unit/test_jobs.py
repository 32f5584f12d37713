import pytest

from slipstream.config import RunConfig, load
from slipstream.errors import ConfigError
from slipstream.jobs.generate import chat
from slipstream.jobs.make_model import make
from slipstream.jobs.sft import warm_up


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs") / "model"
    make(folder, "tiny-moe", ["reverse-text"], seed=0)
    return folder


@pytest.mark.parametrize(
    ("setting", "named"), [({"max_tokens": 0}, "max_tokens = 0"), ({"temperature": -1.0}, r"temperature = -1\.0"), ({"env": "x"}, "'x'")]
)
def test_generate_names_a_setting_that_it_cannot_use(model, setting, named):
    with pytest.raises(ConfigError, match=named):
        chat(model, "hello", **{"env": None, "max_tokens": 4, "temperature": 0.0, "seed": 0, **setting})


def test_sft_refuses_a_place_that_is_not_its_own_before_it_trains(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    config = load(RunConfig, (), ['model.path="no such model"', 'envs=[{"id": "reverse-text"}]', "sft={}"])
    with pytest.raises(ConfigError, match="not a model folder"):
        warm_up(config, tmp_path)
