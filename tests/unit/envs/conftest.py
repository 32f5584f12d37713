import threading

import numpy as np
import pytest

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.envs.calculator import Calculator
from tests.unit.envs.made import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    """Trained on the text of a few hundred calculator conversations, as a made model's tokenizer is."""
    folder = tmp_path_factory.mktemp("tokenizer")
    plain = write_tokenizer(folder / "plain")
    env, rng = Calculator(), np.random.default_rng(0)
    corpus = [plain.render(env.demonstration(env.task("train", i), rng), add_generation_prompt=False) for i in range(200)]
    return write_tokenizer(folder / "trained", corpus)


@pytest.fixture
def release():
    """An event on which a hook may hang; set at the end so that no thread outlives the test."""
    event = threading.Event()
    yield event
    event.set()
