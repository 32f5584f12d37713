import pytest

from slipstream.errors import ConfigError
from slipstream.models.folders import atomic_folder


def write(folder):
    with atomic_folder(folder) as fresh:
        (fresh / "config.json").write_text("{}")


def test_it_replaces_a_model_folder_and_fills_an_empty_one(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder)
    (folder / "old").write_text("")
    write(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_it_never_takes_the_place_of_something_else(tmp_path):
    file, home = tmp_path / "run.toml", tmp_path / "home"
    file.write_text("precious")
    (home / "photos").mkdir(parents=True)
    (home / "config.json").write_text("{}")
    for target in (file, home, tmp_path):
        with pytest.raises(ConfigError, match=r"existing (file|folder that is not a model folder).*name another folder"):
            write(target)
    assert file.read_text() == "precious" and (home / "photos").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "run.toml"]
