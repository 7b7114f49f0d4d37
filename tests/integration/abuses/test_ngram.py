"""Invalid uses of ngram.py and minimal_pairs.py.

Each ends with one error message and leaves all files unchanged.
"""

import pytest

from helpers.abusing import refused, unharmed
from helpers.corpus import write_corpus
from helpers.forked import script
from transformer_jax.baselines import counted

RECIPE = "--config=configs/lm.py:ngram,sentences"
RUN = "--workdir=@/run"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_corpus(folder / "corpus")
    config = counted.defaults()
    config.data.directory = str(folder / "corpus")
    config.data.sentences = True
    config.model.order = 2
    counted.count(config, folder / "run")
    (folder / "pairs.tsv").write_text("field\tphenomenon\nsyntax\tislands\n")
    return folder


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("ngram", (), ("--workdir is missing", "--help")),
        ("ngram", ("--workdir=@/none",), ("@/none is not the folder of an n-gram",)),
        (
            "ngram",
            (RUN, "--config.model.order=3"),
            ("--config.model.order=3 changes a key of a recipe", "--config=FILE"),
        ),
        (
            "ngram",
            (RUN, RECIPE, "--config.data.directory=@/corpus"),
            ("@/run holds another n-gram model", "choose another"),
        ),
        (
            "ngram",
            ("--workdir=@/new", "--config=configs/gpt.py"),
            ("config.task = 'language_modeling': must be 'ngram'", "train.py"),
        ),
        ("ngram", (RUN, "--split=x", "--input=@/pairs.tsv"), ("give one of them",)),
        ("train", (RUN, RECIPE), ("config.task = 'ngram'", "use scripts/ngram.py")),
        ("evaluate", (RUN,), ("config.task = 'ngram'", "use scripts/ngram.py")),
        (
            "minimal_pairs",
            (RUN, "--input=@/pairs.tsv"),
            ("@/pairs.tsv:1 must name", "paradigm, sentence_good, sentence_bad"),
        ),
        ("minimal_pairs", (RUN, "--input=@/no.tsv"), ("there is no such file",)),
        ("minimal_pairs", ("--workdir=@/corpus", "--input=@/a.tsv"), ("@/corpus",)),
    ],
)
def test_misuse(place, tmp_path, name, arguments, words):
    def at_place(text):
        return text.replace("@", str(place))

    with unharmed(place):
        done = script(name, *map(at_place, arguments))
    refused(done, *map(at_place, words))
