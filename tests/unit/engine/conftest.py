"""Model folders that all engine tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.engine.helpers import write_model


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engine") / "moe", moe=True)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture as `moe_folder` with other weights."""
    return write_model(tmp_path_factory.mktemp("engine") / "other", moe=True, seed=2)


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engine") / "dense", moe=False)
