"""Workdirs that are renamed or removed."""

import shutil

import pytest

from helpers.runs import run
from transformer_jax.training import reporting
from transformer_jax.training.location import Location, Moved


@pytest.mark.usefixtures("without_search")
@pytest.mark.parametrize("removed", [False, True])
def test_a_workdir_that_is_moved_while_it_trains(tiny, tmp_path, monkeypatch, removed):
    """A renamed one gets the last step; a removed one cannot."""
    add = reporting.Report.add

    def move(report, step, metrics, work):
        add(report, step, metrics, work)
        if step == 3:
            (tmp_path / "run").rename(tmp_path / "renamed")
            if removed:
                shutil.rmtree(tmp_path / "renamed")

    message = (
        "was removed while the run trained, so step 4 is not saved"
        if removed
        else "renamed to .*Step 4 is saved"
    )
    with monkeypatch.context() as patch:
        patch.setattr(reporting.Report, "add", move)
        with pytest.raises(Moved, match=message):
            run(tiny, tmp_path / "run", training__steps=8)
    assert not (tmp_path / "run").exists()
    if not removed:
        assert int(run(tiny, tmp_path / "renamed", training__steps=4).step) == 4


def test_a_folder_is_followed_to_its_new_name(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    location = Location(folder)
    assert location.moved() is None
    folder.rename(tmp_path / "renamed")
    assert location.moved() == str(tmp_path / "renamed")
    (tmp_path / "renamed").rmdir()
    assert location.moved() == ""
    location.close()


def test_a_copy_in_the_place_of_a_folder_is_not_the_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    location = Location(folder)
    folder.rename(tmp_path / "renamed")
    folder.mkdir()
    assert location.moved() == str(tmp_path / "renamed")
    location.close()


def test_a_bucket_stays_in_place():
    assert Location("gs://bucket/run").moved() is None
