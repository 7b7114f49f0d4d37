"""A run of 8 steps that several modules start from."""

import pathlib
import shutil

import pytest

from helpers.corpus import write_corpus
from helpers.once import once
from helpers.runs import run, small
from transformer_jax.training.checkpoint import parameters_sha256


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Config and workdir of a run of 8 steps, and hashes of its last state: of the
    whole, and of the parameters.

    Copy the workdir before changing it.
    """

    def make(folder):
        write_corpus(folder / "corpus")
        state = run(config_in(folder), folder / "run")
        (folder / "state").write_text(parameters_sha256(state))
        (folder / "params").write_text(parameters_sha256(state.params))

    folder = once(tmp_path_factory, "finished", make)
    hashes = {name: (folder / name).read_text() for name in ("state", "params")}
    return config_in(folder), folder / "run", hashes


def config_in(folder):
    config = small("sequence_to_sequence", folder / "corpus")
    config.training.steps, config.training.microbatches = 8, 2
    return config


@pytest.fixture
def copied(finished, tmp_path):
    """Copy of the finished workdir."""
    return pathlib.Path(shutil.copytree(finished[1], tmp_path / "run"))
