"""docs/algorithms.md has a place for every loss and advantage, names their keys with the right defaults, and its example runs."""

import re
from pathlib import Path
from typing import get_args

import pytest
import torch

from slipstream.algorithms.advantages import ESTIMATORS
from slipstream.algorithms.losses import LOSSES
from slipstream.config.train import LossConfig

PAGE = (Path(__file__).parents[3] / "docs/algorithms.md").read_text()
SECTIONS = get_args(get_args(LossConfig)[0])


def test_every_loss_has_a_heading_and_every_advantage_a_row():
    assert set(re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE)) == {*LOSSES, "custom"}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE.split("## Advantages")[1], re.MULTILINE)) == {"type", *ESTIMATORS, "custom"}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_key_of_a_loss_is_on_the_page_with_its_default(section):
    for name, field in section.model_fields.items():
        default = field.default
        if name in ("type", "correction", "path", "args") or default is None:
            continue
        shown = [float(value) for value in re.findall(rf"`{name}` \(([\d.e-]+)\)", PAGE)]
        assert default in shown, f"{name} = {default}"


def test_the_example_of_a_custom_loss_runs():
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def half" in block)
    names: dict = {}
    exec(code, names)
    ones = torch.ones(2)
    output = names["half"](ones, ones, ones, torch.tensor([True, False]), torch.zeros(2), scale=0.5)
    assert output.loss_T.tolist() == [-0.5, 0.0]
