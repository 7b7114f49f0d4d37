"""Tagging: the loss by a loop over words, long sentences, entities, and tags that
break the rules.
"""

import functools
import itertools
import json

import jax
import numpy as np
import pytest

import transformer_jax
from helpers.runs import parameters, rows, run, small
from transformer_jax import spans
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.data import sources
from transformer_jax.data.annotated import conll_file
from transformer_jax.data.sources import DataError
from transformer_jax.data.words import TaggingData
from transformer_jax.tasks.tagging import read_tags
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh

SENTENCES = [
    ("Anna Bukowska wohnt in Łódź", "B-PER I-PER O O B-LOC"),
    ("Łódź liegt nicht in Bukow", "B-LOC O O O B-LOC"),
    ("nicht Anna", "O B-PER"),
]

LONG = (
    " ".join(words for words, _ in SENTENCES * 2),
    " ".join(tags for _, tags in SENTENCES * 2),
)


def write(path, sentences):
    blocks = (
        zip(words.split(), tags.split(), strict=True) for words, tags in sentences
    )
    path.write_text(
        "\n".join(
            "".join(f"{word}\t{tag}\n" for word, tag in block) for block in blocks
        )
    )


@pytest.fixture
def config(corpus):
    for split in ("val", "test"):
        write(corpus / f"{split}.conll", SENTENCES)
    # so that words have many pieces
    write(corpus / "train.conll", [(words[::-1], tags) for words, tags in SENTENCES])
    config = small("tagging", corpus)
    config.data.tokenizer, config.data.types = "bert", ("PER", "LOC")
    config.model.num_layers = 1
    return config


@pytest.fixture
def task(config, tmp_path):
    return make_task(parse(config), tmp_path / "run")


def laid_out(task, words):
    """Return the ids of a sentence, and the place of the first subword of each word,
    whose words are encoded alone.
    """
    tokenizer = task.corpus.tokenizers["text"]
    pieces = tokenizer.encode_batch(words)
    places = np.cumsum([1, *map(len, pieces)])[:-1]
    return [tokenizer.bos_id, *itertools.chain(*pieces), tokenizer.eos_id], places


@functools.cache
def compiled(task):
    return jax.jit(task.network.model.apply)


def logits_of(task, params, words):
    """Return the logits (words, tags) of a sentence that is alone in its batch."""
    ids, places = laid_out(task, words)
    padded = np.array([ids + [0] * (31 - len(ids))])
    return np.asarray(
        compiled(task)({"params": params}, padded, np.arange(31)[None] < len(ids))[
            0, places
        ],
        np.float64,
    )


def loaded(batches):
    """Return the arrays of all batches."""
    return [batches.load(batches.plan.batch(i)) for i in range(len(batches.plan))]


def by_row(batches):
    """Return the arrays of each row."""
    rows = {
        int(i): {n: x[k] for n, x in a.items()}
        for a in loaded(batches)
        for k, i in enumerate(a["index"])
    }
    return [rows[i] for i in sorted(rows) if i >= 0]


def test_the_loss_is_that_of_a_loop_over_words(task):
    params = parameters(task, 1)
    evaluate = jax.jit(task.evaluate, static_argnums=2)
    means = [
        evaluate(params, arrays, True)[0]
        for arrays in loaded(task.batches("val", None))
    ]
    losses, right = [], []
    for words, tags in SENTENCES:
        for logits, tag in zip(
            logits_of(task, params, words.split()), tags.split(), strict=True
        ):
            number = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"].index(tag)
            losses.append(np.log(np.exp(logits).sum()) - logits[number])
            right.append(logits.argmax() == number)
    for name, values in (("cross_entropy", losses), ("accuracy", right)):
        assert sum(float(mean[name].weight) for mean in means) == len(values) == 12
        assert sum(float(mean[name].sum) for mean in means) == pytest.approx(
            sum(values), rel=1e-5
        )


def test_the_label_is_at_the_first_subword(task):
    batches = task.batches("val", None)
    for row, (words, tags) in zip(by_row(batches), SENTENCES, strict=True):
        ids, places = laid_out(task, words.split())
        assert len(ids) > 2 * len(words.split())
        assert row["text"][: row["text_length"]].tolist() == ids
        assert np.flatnonzero(row["first"]).tolist() == places.tolist()
        assert [task.tags[i] for i in row["label"][places]] == tags.split()
        assert not row["label"][row["first"] == 0].any()
    filler = [arrays["first"][arrays["index"] < 0] for arrays in loaded(batches)]
    assert sum(map(len, filler)) > 0
    assert not any(first.any() for first in filler)


def test_a_long_sentence_is_divided_and_every_word_gets_a_tag(
    config, corpus, tmp_path, caplog
):
    """Its rows give the tags that they give alone. All its words count in the
    scores.
    """
    config.data.max_length, config.evaluation.batch_size = 27, 3
    sentences = [SENTENCES[2], LONG, SENTENCES[0]]
    write(corpus / "val.conll", sentences)
    task = make_task(parse(config), tmp_path / "run")
    params = parameters(task, 2)
    evaluator, lines = (
        Evaluator(task, make_mesh(task.config.mesh)),
        [words for words, _ in sentences],
    )
    found = evaluator.predict(params, lines)
    divided = (
        "1 of 3 sentences divided into rows of data.max_length = 27 tokens, "
        "the first is sentence 2"
    )
    assert f"input: {divided}" in caplog.text
    batches = task.batches_of(lines)
    count = batches.owners.tolist().count(1)
    assert batches.owners.tolist() == [0, *[1] * count, 2]
    assert count > 2
    words, tags = LONG[0].split(), []
    for row in by_row(batches)[1:-1]:
        logits = logits_of(
            task, params, words[len(tags) : len(tags) + row["first"].sum()]
        )
        tags += [task.tags[i] for i in logits.argmax(axis=-1)]
    assert found[1]["tags"] == tags
    assert [prediction["words"] for prediction in found] == [
        line.split() for line in lines
    ]
    scores = evaluator.evaluate(params, "val", greedy=True)
    assert f"val.conll, split val: {divided}" in caplog.text
    pairs = [
        pair
        for prediction, (_, right) in zip(found, sentences, strict=True)
        for pair in zip(prediction["tags"], right.split(), strict=True)
    ]
    assert scores["accuracy"] == pytest.approx(np.mean([a == b for a, b in pairs]))
    assert scores["examples"] == 3


def test_scores_by_hand(task):
    """Of 4 entities 2 are found, among 3; 10 of 12 tags are right."""
    predictions = ["B-PER I-PER O O O", "B-LOC O O O B-LOC", "O O"]
    references = [tags.split() for _, tags in SENTENCES]
    scores = task.score(
        {"cross_entropy": 0.5},
        [{"tags": tags.split()} for tags in predictions],
        references,
    )
    assert scores == pytest.approx(
        {
            "loss": 0.5,
            "accuracy": 10 / 12,
            "precision": 3 / 3,
            "recall": 3 / 5,
            "f1": 6 / 8,
        }
    )
    assert "loss" not in task.score(
        {}, [{"tags": tags} for tags in references], references
    )


def test_a_model_learns_a_dozen_sentences(config, corpus, tmp_path):
    """The tag of a word depends on the words beside it."""
    names = ["Ada", "Bea", "Cem", "Dia", "Eva", "Fee"]
    sentences = [
        example
        for name in names
        for example in (
            (f"{name} Rot wohnt hier", "B-PER I-PER O O"),
            (f"in {name} regnet es", "O B-LOC O O"),
        )
    ]
    for split in ("train", "val", "test"):
        write(corpus / f"{split}.conll", sentences)
    config.model.dropout_rate = config.model.attention_dropout_rate = 0.0
    (
        config.optimizer.schedule,
        config.optimizer.learning_rate,
        config.optimizer.warmup_steps,
    ) = (
        "constant",
        3e-3,
        10,
    )
    config.training.steps = config.training.evaluate_every = (
        config.training.log_every
    ) = config.checkpoint.every = 60
    run(config, tmp_path / "run")
    assert rows(tmp_path / "run")[-1]["f1"] == 1
    predictor = transformer_jax.load(tmp_path / "run")
    assert predictor.evaluate()["f1"] == 1
    found = predictor.predict(
        ["  in Ada\tregnet es", "", {"words": "Bea Rot wohnt hier", "tags": "O O O O"}]
    )
    assert found == [
        {
            "words": ["in", "Ada", "regnet", "es"],
            "tags": ["O", "B-LOC", "O", "O"],
            "entities": [{"type": "LOC", "text": "Ada", "start": 1, "end": 2}],
        },
        {"words": [], "tags": [], "entities": []},
        {
            "words": ["Bea", "Rot", "wohnt", "hier"],
            "tags": ["B-PER", "I-PER", "O", "O"],
            "entities": [{"type": "PER", "text": "Bea Rot", "start": 0, "end": 2}],
        },
    ]
    assert json.loads(json.dumps(found)) == found
    assert predictor.predict([""]) == [{"words": [], "tags": [], "entities": []}]


def test_a_preview_shows_the_tags(task):
    batches = task.batches("train", None)
    title, line = task.preview(batches.load(batches.plan.batch(0)))
    assert title == "the first sentence of the first batch:"
    assert line.split()[0] == "[CLS]"
    assert (
        sum(
            part.endswith(("/O", "/B-PER", "/I-PER", "/B-LOC")) for part in line.split()
        )
        == 5
    )


def place(sentence, word):
    return f"here:{sentence}:{word}"


def test_i_that_continues_nothing_is_read_as_b(caplog):
    data = TaggingData(types=("PER", "LOC"))
    found = read_tags(
        ["O I-PER I-PER I-LOC", "B-PER I-PER", "I-LOC"], [4, 2, 1], data, place
    )
    assert found == [["O", "B-PER", "I-PER", "B-LOC"], ["B-PER", "I-PER"], ["B-LOC"]]
    assert (
        "3 tags I that continue no entity are read as B, "
        "e.g. here:0:1, here:0:3, here:2:0" in caplog.text
    )


def test_reading_tags_keeps_the_entities():
    """All sequences of up to 4 tags with two types."""
    data = TaggingData(types=("X", "Y"))
    for length in range(5):
        for tags in itertools.product(data.tags, repeat=length):
            (found,) = read_tags([" ".join(tags)], [length], data, place)
            assert spans.entities(found, "iob2") == spans.entities(tags, "iob2")
            assert not spans.malformed(found, "iob2")


@pytest.mark.parametrize(
    ("scheme", "tags", "message"),
    [
        (
            "iob2",
            "O B-ORG O",
            (
                r"here:0:1: the tag 'B-ORG' is not one of O, B-PER, I-PER: correct it,"
                r" or change data\.types"
            ),
        ),
        ("iob2", "S-PER O O", "here:0:0: the tag 'S-PER' is not one of"),
        (
            "iob2",
            "O O",
            "here:0:0: the sentence has 3 words and 2 tags: give one per word",
        ),
        (
            "bioes",
            "S-PER B-PER O",
            (
                "here:0:1: "
                "the tag B-PER does not fit .* in bioes, in S-PER B-PER O: correct it"
            ),
        ),
        ("bioes", "I-PER E-PER O", "here:0:0: the tag I-PER does not fit"),
    ],
)
def test_tags_that_cannot_be_read(scheme, tags, message):
    with pytest.raises(DataError, match=message):
        read_tags([tags], [3], TaggingData(types=("PER",), scheme=scheme), place)


def test_an_unknown_tag_in_a_file_is_found_by_its_line(config, corpus, tmp_path):
    """A tag that only the test split has is reported when that is scored."""
    write(corpus / "test.conll", [SENTENCES[1], ("Anna wohnt", "B-ORG O")])
    run(config, tmp_path / "run", training__steps=2)
    with pytest.raises(
        DataError,
        match=(
            r"test\.conll:7: the tag 'B-ORG' is not one of O, B-PER, I-PER, B-LOC,"
            r" I-LOC"
        ),
    ):
        transformer_jax.load(tmp_path / "run").evaluate()


def test_an_unknown_tag_in_tfds_is_found_by_its_sentence(
    config, corpus, tmp_path, monkeypatch
):
    """The stand-in for tfds has no column of line numbers, like tfds."""
    write(corpus / "val.conll", [*SENTENCES, ("Anna wohnt", "O B-ORG")])

    def tfds_source(name, directory, split, columns):
        assert columns == ["words", "tags"]
        return conll_file(directory, split, columns)

    monkeypatch.setattr(sources, "tfds_source", tfds_source)
    config.data.source, config.data.name = "tfds", "conll2003"
    task = make_task(parse(config), tmp_path / "run")
    with pytest.raises(
        DataError, match="split val, sentence 4, word 2: the tag 'B-ORG' is not one of"
    ):
        task.batches("val", None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("Anna O\nwohnt\n", r"val\.conll:2 has no tag after the word 'wohnt'"),
        ("", r"val\.conll has no sentences: it needs at least one"),
        ("Anna B-PER\n\nwohnt X\n", r"val\.conll:3: the tag 'X' is not one of"),
    ],
)
def test_files_that_cannot_be_read(task, corpus, content, message):
    (corpus / "val.conll").write_text(content)
    with pytest.raises(DataError, match=message):
        task.batches("val", None)


def test_records_that_cannot_be_read(task):
    with pytest.raises(
        DataError,
        match="input, sentence 2, word 1: the sentence has 2 words and 3 tags",
    ):
        task.batches_of(
            [{"words": "a b", "tags": "O O"}, {"words": "a b", "tags": "O O O"}]
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data.scheme": "iob"},
            r"config\.data\.scheme = 'iob': must be one of iob2, bioes",
        ),
        (
            {"data.types": ()},
            r"config\.data\.types = \(\): must be one or more different types",
        ),
        (
            {"data.types": ("PER", "PER")},
            r"config\.data\.types = .*: must be one or more different types",
        ),
        (
            {"data.types": ("PER", "")},
            r"config\.data\.types = .*: must be one or more different types",
        ),
        ({"data.max_length": 2}, r"config\.data\.max_length = 2: must be at least 3"),
    ],
)
def test_invalid_configs(config, change, message):
    config.update_from_flattened_dict(change)
    with pytest.raises(ConfigError, match=message):
        parse(config)
