"""Tests of `transformer_jax.shipped` and of `python -m transformer_jax`."""

import shutil
import subprocess
import sys

import pytest

from helpers import ROOT
from transformer_jax import __main__, shipped
from transformer_jax.config import ConfigError, load_recipe


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Pretend that the package was installed from a wheel, with one recipe."""
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / "configs" / "dates.py", tmp_path / "configs")
    monkeypatch.setattr(shipped, "_COPIES", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_clone_has_its_own_folders():
    assert shipped.folder() == ROOT
    assert shipped.is_clone()
    assert shipped.script("train") == "python scripts/train.py"
    assert shipped.recipe("dates") == ROOT / "configs" / "dates.py"


def test_an_installed_package_has_copies(installed):
    assert shipped.folder() == installed
    assert not shipped.is_clone()
    assert shipped.script("train") == "python -m transformer_jax train"
    assert shipped.recipe("dates") == installed / "configs" / "dates.py"


@pytest.mark.parametrize("name", ["", "nothing", "../configs/dates", "dates.py"])
def test_other_names_are_no_recipe(name):
    assert shipped.recipe(name) is None


def test_a_recipe_is_loaded_by_its_name_in_any_folder(installed):
    by_path = load_recipe(str(ROOT / "configs" / "dates.py") + ":attention=none")
    assert load_recipe("dates:attention=none").to_dict() == by_path.to_dict()


def test_a_file_of_the_user_comes_before_a_recipe(installed):
    (installed / "dates").write_text(
        "from transformer_jax.config import defaults\n"
        "def get_config():\n"
        "    config = defaults('sequence_to_sequence')\n"
        "    config.training.steps = 7\n"
        "    return config\n"
    )
    assert load_recipe("dates").training.steps == 7


def test_the_error_about_a_path_says_how_to_name_the_recipe(installed):
    shutil.move(installed / "configs", installed / "other")
    (installed / "configs").mkdir()
    shutil.copy(installed / "other" / "dates.py", installed / "configs" / "scan.py")
    with pytest.raises(ConfigError, match="write --config=scan for the recipe"):
        load_recipe("recipes/scan.py")


def test_without_a_name_the_scripts_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["transformer-jax"])
    __main__.main()
    printed = capsys.readouterr().out
    assert "python -m transformer_jax train --config=dates" in printed
    for path in (ROOT / "scripts").glob("*.py"):
        assert f"  {path.stem}: " in printed


def test_an_unknown_script_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["transformer-jax", "trian"])
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: 'trian' is no script: choose one of attention")
    assert "sweep, train, verify" in message


def test_a_script_is_run_with_its_options(tmp_path):
    command = [sys.executable, "-m", "transformer_jax", "documents", "--inputs=none.en"]
    ran = subprocess.run(
        [*command, f"--output={tmp_path / 'train.txt'}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert "error: there is no file none.en" in ran.stderr
