"""Annotated data sets of tfds, prepared without TensorFlow from tiny files with the
layouts of the originals.
"""

import importlib.util
import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from transformer_jax.data import features
from transformer_jax.data.annotated import conll_file, squad_file
from transformer_jax.data.corpora.download import prepare
from transformer_jax.data.sources import DataError, tfds_source

pytestmark = pytest.mark.usefixtures("no_network")


def zipped(path: Path, files: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def table(header: str, *lines: str) -> str:
    return "".join(f"{line}\n" for line in (header, *lines)).replace(" | ", "\t")


def records(
    name: str, directory: Path, split: str, columns: list[str]
) -> list[tuple[str, ...]]:
    """Return the records of a tfds data set, sorted, because tfds shuffles them."""
    source = tfds_source(name, directory, split, columns)
    return sorted(zip(*(source.column(column) for column in columns), strict=True))


def test_sst2(stand_ins, tmp_path):
    head = "sentence | label"
    files = {
        "train.tsv": table(head, "a fine film | 1", 'so "dull | 0', "größer  | 1"),
        "dev.tsv": table(head, "well | 0", "good | 1"),
        "test.tsv": table("index | sentence", "0 | who knows"),
    }
    zipped(
        stand_ins / "SST-2.zip",
        {f"SST-2/{name}": content for name, content in files.items()},
    )
    prepare("glue/sst2", tmp_path / "data", stand_ins)
    expected = [
        ("a fine film", "positive", "0"),
        ("größer ", "positive", "2"),
        ('so "dull', "negative", "1"),
    ]
    assert (
        records("glue/sst2", tmp_path / "data", "train", ["sentence", "label", "idx"])
        == expected
    )
    assert records("glue/sst2", tmp_path / "data", "validation", ["label"]) == [
        ("negative",),
        ("positive",),
    ]
    assert records("glue/sst2", tmp_path / "data", "test", ["label", "sentence"]) == [
        ("-1", "who knows")
    ]
    with pytest.raises(
        DataError, match=r"tfds glue/sst2 has no text in words: choose from .*label"
    ):
        tfds_source("glue/sst2", tmp_path / "data", "train", ["words"])
    assert importlib.util.find_spec("tensorflow") is None
    assert "tensorflow" not in sys.modules


def test_imdb_reviews_are_text(stand_ins, tmp_path):
    """Reviews may contain line breaks."""
    reviews = {
        "train/pos/0_9.txt": "Good.",
        "train/neg/0_1.txt": "Bad.\n\nVery bad.",
        "train/unsup/0_0.txt": "Ähm.",
    }
    with tarfile.open(stand_ins / "aclImdb_v1.tar.gz", "w:gz") as archive:
        for name, text in (
            reviews | {"test/pos/0_8.txt": "Fine.", "test/neg/0_2.txt": "Poor."}
        ).items():
            info = tarfile.TarInfo(f"aclImdb/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    prepare("imdb_reviews", tmp_path / "data", stand_ins)
    assert records("imdb_reviews", tmp_path / "data", "train", ["text"]) == [
        ("Bad.\n\nVery bad.",),
        ("Good.",),
    ]
    assert records("imdb_reviews", tmp_path / "data", "unsupervised", ["text"]) == [
        ("Ähm.",)
    ]


def test_stsb(stand_ins, tmp_path):
    head = "index | sentence1 | sentence2"
    files = {
        "train.tsv": table(
            f"{head} | score",
            "0 | A plane. | A jet. | 3.800",
            "1 | A cat. | A car. | 0.6",
        ),
        "dev.tsv": table(f"{head} | score", "0 | One. | One. | 5"),
        "test.tsv": table(head, "0 | One. | Two."),
    }
    zipped(
        stand_ins / "STS-B.zip",
        {f"STS-B/{name}": content for name, content in files.items()},
    )
    prepare("glue/stsb", tmp_path / "data", stand_ins)
    expected = [("A cat.", "A car.", "0.6"), ("A plane.", "A jet.", "3.8")]
    assert (
        records(
            "glue/stsb", tmp_path / "data", "train", ["sentence1", "sentence2", "label"]
        )
        == expected
    )
    assert records("glue/stsb", tmp_path / "data", "validation", ["label"]) == [
        ("5.0",)
    ]


def test_mrpc(stand_ins, tmp_path):
    head = "Quality | #1 ID | #2 ID | #1 String | #2 String"
    lines = [
        "1 | 7 | 8 | He ran. | He did run.",
        "0 | 9 | 10 | She ran. | She hid.",
        "1 | 11 | 12 | It is. | It’s.",
    ]
    (stand_ins / "msr_paraphrase_train.txt").write_text("\ufeff" + table(head, *lines))
    (stand_ins / "msr_paraphrase_test.txt").write_text(
        "\ufeff" + table(head, "1 | 3 | 4 | Yes. | Yes!")
    )
    (stand_ins / "data_mrpc_dev_ids.tsv").write_text("9\t10\n")
    prepare("glue/mrpc", tmp_path / "data", stand_ins)
    columns = ["sentence1", "sentence2", "label"]
    expected = [
        ("He ran.", "He did run.", "equivalent"),
        ("It is.", "It’s.", "equivalent"),
    ]
    assert records("glue/mrpc", tmp_path / "data", "train", columns) == expected
    assert records("glue/mrpc", tmp_path / "data", "validation", columns) == [
        ("She ran.", "She hid.", "not_equivalent")
    ]
    assert records("glue/mrpc", tmp_path / "data", "test", columns) == [
        ("Yes.", "Yes!", "-1")
    ]


def squad(*questions: dict) -> str:
    paragraph = {"context": "Das 🌲 ist grün.\nAlt.", "qas": list(questions)}
    return json.dumps(
        {"version": "2.0", "data": [{"title": "Grün", "paragraphs": [paragraph]}]}
    )


@pytest.mark.parametrize(
    ("name", "version"), [("squad", "v1.1"), ("squad/v2.0", "v2.0")]
)
def test_squad(name, version, stand_ins, tmp_path):
    tree = {
        "id": "q1",
        "question": "Was?",
        "answers": [{"text": "🌲", "answer_start": 4}],
    }
    tree["answers"].append({"text": "Das 🌲", "answer_start": 0})
    none = {"id": "q2", "question": "Wo?", "answers": [], "is_impossible": True}
    questions = [
        tree | {"is_impossible": False},
        *([none] if version == "v2.0" else []),
    ]
    (stand_ins / f"train-{version}.json").write_text(squad(*questions))
    (stand_ins / f"dev-{version}.json").write_text(
        squad(tree | {"is_impossible": False, "id": "q3"})
    )
    prepare(name, tmp_path / "data", stand_ins)
    columns = ["id", "title", "question", "context", "answers"]
    source = squad_file(stand_ins, f"train-{version}", columns)
    expected = list(zip(*(source.column(column) for column in columns), strict=True))
    assert json.loads(expected[0][-1]) == [
        {"text": "🌲", "start": 4},
        {"text": "Das 🌲", "start": 0},
    ]
    assert records(name, tmp_path / "data", "train", columns) == expected
    assert records(name, tmp_path / "data", "validation", ["id", "answers"]) == [
        ("q3", expected[0][-1])
    ]
    if version == "v2.0":
        assert records(name, tmp_path / "data", "train", ["is_impossible"]) == [
            ("False",),
            ("True",),
        ]


def test_conll2003(stand_ins, tmp_path):
    start = "-DOCSTART- -X- -X- O\n\n"
    train = "EU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\nGermany NNP B-NP B-LOC\n"
    files = {
        "train.txt": start + train,
        "valid.txt": f"{start}Zürich NNP B-NP B-LOC\n",
        "test.txt": train + "\n",
    }
    zipped(stand_ins / "conll2003.zip", files)
    (stand_ins / "train.conll").write_text(files["train.txt"])
    prepare("conll2003", tmp_path / "data", stand_ins)
    source = conll_file(stand_ins, "train")
    expected = sorted(zip(source.column("words"), source.column("tags"), strict=True))
    assert expected == [("EU rejects", "B-ORG O"), ("Germany", "B-LOC")]
    assert (
        records("conll2003", tmp_path / "data", "train", ["words", "tags"]) == expected
    )
    assert records("conll2003", tmp_path / "data", "dev", ["tokens", "pos", "ner"]) == [
        ("Zürich", "NNP", "B-LOC")
    ]
    # tfds adds an empty sentence to a file that ends in a blank line.
    assert records("conll2003", tmp_path / "data", "test", ["words", "tags"]) == [
        ("", ""),
        *expected,
    ]


def test_features_that_are_not_text():
    kinds = tfds.features
    labels = {"label": kinds.ClassLabel(num_classes=3), "open": kinds.ClassLabel()}
    known = labels | {"words": kinds.Sequence(kinds.Text())}
    others = {
        "image": kinds.Image(),
        "vector": kinds.Tensor(shape=(3,), dtype=np.int32),
        "boxes": kinds.Sequence({"x": kinds.Text()}),
        "frames": kinds.Sequence(kinds.Image()),
    }
    read = features.readers(kinds.FeaturesDict(known | others))
    assert read.keys() == known.keys()
    assert read["label"]({"label": [2]}) == read["open"]({"open": [2]}) == "2"
    assert read["words"]({"words": [b"\xc3\xa4", "b"]}) == "ä b"
    for word in (b"New York", b"", b"a\xc2\xa0b"):
        with pytest.raises(
            ValueError, match=r"has empty texts or white space in \['a', "
        ):
            read["words"]({"words": [b"a", word]})
