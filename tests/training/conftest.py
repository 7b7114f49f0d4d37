"""A run of 8 steps that several modules start from."""

import pathlib
import shutil

import pytest

from helpers.corpus import write_corpus
from helpers.runs import run, small


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Config, workdir and last state of a run of 8 steps.

    Copy the workdir before changing it.
    """
    folder = tmp_path_factory.mktemp("finished")
    write_corpus(folder / "corpus")
    config = small("sequence_to_sequence", folder / "corpus")
    config.training.steps, config.training.microbatches = 8, 2
    return config, folder / "run", run(config, folder / "run")


@pytest.fixture
def copied(finished, tmp_path):
    """Copy of the finished workdir."""
    return pathlib.Path(shutil.copytree(finished[1], tmp_path / "run"))
