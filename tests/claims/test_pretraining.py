"""The text of the small pre-trainings, and their configs."""

import json

import pytest

from helpers import ROOT
from transformer_jax.claims.claim import Setting
from transformer_jax.claims.pretraining import (
    documents,
    fine_tuned,
    picture_documents,
    pretrained,
)

CAPTIONS = """image	split	caption
a.jpg	train	A dog runs .
b.jpg	val	A "red" bird
a.jpg	train	the dog is wet
b.jpg	val	It sings !
c.jpg	test	A cat .
a.jpg	train	.
"""


@pytest.fixture
def setting(tmp_path):
    (tmp_path / "data" / "flickr8k").mkdir(parents=True)
    (tmp_path / "data" / "flickr8k" / "captions.tsv").write_text(CAPTIONS)
    (tmp_path / "data" / "squad").mkdir()
    for split in ("train", "dev"):
        paragraph = {"context": f"It was in {split}. It ended.", "qas": []}
        article = {"title": "An article", "paragraphs": [paragraph]}
        path = tmp_path / "data" / "squad" / f"{split}.json"
        path.write_text(json.dumps({"version": "1.1", "data": [article]}))
    return Setting(
        seed=0,
        workdir=tmp_path / "work",
        runs=tmp_path / "runs",
        data=tmp_path / "data",
        recipes=ROOT / "configs",
    )


def test_the_captions_of_a_picture_are_a_document(setting):
    path = setting.data / "flickr8k" / "captions.tsv"
    assert picture_documents(path, "train") == "A dog runs . The dog is wet .\n"
    assert picture_documents(path, "val") == 'A "red" bird . It sings .\n'


def test_documents_are_written_once(setting):
    folder = documents(setting)
    train = folder / "train.txt"
    assert train.read_text().split("\n\n") == [
        "A dog runs .\nThe dog is wet .",
        "It was in train.\nIt ended.\n",
    ]
    assert "It was in dev." in (folder / "val.txt").read_text()
    train.write_text("kept")
    assert documents(setting) == folder
    assert train.read_text() == "kept"


def test_fine_tuning_has_the_model_of_the_pre_training(setting):
    start = pretrained({})
    tuned = fine_tuned(start, "sick", {"fine_tuning.transferred_layers": 1})
    assert tuned.start is start
    ours, theirs = tuned.config(setting).model, start.config(setting).model
    assert ours.to_dict() == theirs.to_dict()


def test_a_pre_training_of_one_step_saves_it(setting):
    config = pretrained({}, steps=1).config(setting)
    assert (config.training.steps, config.checkpoint.every) == (1, 1)
