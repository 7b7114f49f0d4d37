"""Language model: losses of packed documents, continuations of prompts, and scores."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax
from helpers.processes import on_devices
from helpers.runs import run, shrink, small
from transformer_jax.config import ConfigError, defaults, make_task, parse
from transformer_jax.data.sources import DataError
from transformer_jax.tasks import language_modeling
from transformer_jax.tasks.continuations import ContinuedTexts
from transformer_jax.tasks.language_modeling import LanguageModeling
from transformer_jax.training import evaluation
from transformer_jax.training.checkpoint import CheckpointError
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh


@pytest.fixture
def config(corpus):
    config = small("language_modeling", corpus)
    config.data.tokenizer = "characters"
    return config


def untrained(config, workdir, greedy=True):
    """Return a task, random parameters, and a function that predicts with them."""
    task = make_task(parse(config), workdir)
    params = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    return task, params, lambda prompts: evaluator.predict(params, prompts, greedy)


def predict(config, workdir, prompts):
    return untrained(config, workdir)[2](prompts)


@pytest.mark.parametrize("architecture", ["gpt", "recurrent_lm"])
def test_a_continuation_is_what_the_model_finds_most_probable_after_the_prompt(
    corpus, tmp_path, architecture
):
    """Compare with a loop over positions without a cache.

    Padding, begin and end are not part of a text.
    """
    prompts, config = (
        ["ek", "ak ek it ak", "e"],
        shrink(defaults("language_modeling", architecture), corpus),
    )
    config.data.tokenizer = "characters"
    task, params, continued = untrained(config, tmp_path / "run")
    found = continued(prompts)
    tokenizer, apply = task.corpus.tokenizers["text"], jax.jit(task.model.apply)
    for prompt, prediction in zip(prompts, found, strict=True):
        (ids,) = tokenizer.encode_batch([prompt])
        start = len(ids)
        for _ in range(config.decoding.max_extra):
            read = np.array([ids + [0] * (32 - len(ids))])
            logits = np.array(
                apply({"params": params}, read)[0, len(ids) - 1, : tokenizer.size]
            )
            logits[[tokenizer.pad_id, tokenizer.bos_id]] = -np.inf
            ids.append(int(logits.argmax()))
        assert prediction == {"continuation": tokenizer.decode(ids[start:])}


def test_of_a_long_prompt_the_last_tokens_are_continued(config, tmp_path, caplog):
    room = config.model.max_length - config.decoding.max_extra
    long = "ak ek it " * 9 + "em is ot"
    found, same = predict(config, tmp_path / "run", [long, long[-room:]])
    assert found == same
    assert (
        f"input, line 1: {len(long)} tokens, "
        f"cut to model.max_length - decoding.max_extra = {room}" in caplog.text
    )


def test_drawn_continuations_are_several_and_repeatable(config, tmp_path):
    """A prompt is continued in the same way alone, together and in a longer batch."""
    config.decoding.temperature, config.decoding.n_best, config.decoding.seed = (
        1.0,
        3,
        2,
    )
    _, _, drawn = untrained(config, tmp_path / "run", greedy=False)
    first, second = drawn(["ek", "ek"])
    assert len(first["continuations"]) == 3
    assert first != second  # every record has its own draws
    assert drawn(["ek", "ek", "ak ek it ak"])[:2] == [first, second]
    assert drawn(["ek"]) == [first]


def test_the_best_continuation_comes_first(config, tmp_path):
    """A score is the sum up to the stop string, or up to the end.

    It is -3.5, -4 and -1 here.
    """
    (
        config.decoding.temperature,
        config.decoding.n_best,
        config.decoding.stop_strings,
    ) = (
        1.0,
        3,
        ("mi",),
    )
    task = make_task(parse(config), tmp_path / "run")
    tokenizer = task.corpus.tokenizers["text"]
    ids = [
        [*row, tokenizer.eos_id, tokenizer.pad_id]
        for row in tokenizer.encode_batch(["kemit", "kes", "km"])
    ]
    outputs = {
        "tokens": np.array([[(row + [tokenizer.pad_id] * 5)[:5] for row in ids]]),
        "log_probabilities": np.array(
            [[[-1, -1, -1, -0.5, -9], [-1, -1, -1, -1, 0], [-0.5, -0.25, -0.25, 0, 0]]]
        ),
        "finished": np.ones((1, 3), bool),
        "written": np.full((1, 3), 5),
    }
    batch = {
        "text": np.array([tokenizer.encode_batch(["it"])[0]]),
        "text_length": np.array([2]),
    }
    assert task.decode(outputs, batch) == [{"continuations": ["km", "ke", "kes"]}]


def test_the_begin_id_may_precede_prompts_and_texts_to_score(config, tmp_path):
    """An empty prompt or context is the begin id alone."""
    config.decoding.prepend_begin = True
    task = make_task(parse(config), tmp_path / "run")
    tokenizer = task.corpus.tokenizers["text"]
    (e, k), begin = tokenizer.encode_batch(["ek"])[0], tokenizer.bos_id

    def rows(batches):
        """Return the tokens of both rows, and the number of those that count."""
        found = {}
        for i in range(len(batches.plan)):
            batch = batches.load(batches.plan.batch(i))
            counts = batch.get("counted", batch["text"]).sum(axis=1).tolist()
            for row, (number, length) in enumerate(
                zip(batch["index"], batch["text_length"], strict=True)
            ):
                if length:
                    found[int(number)] = (
                        batch["text"][row, :length].tolist(),
                        counts[row],
                    )
        return [found[0], found[1]]

    assert [row for row, _ in rows(task.batches_of(["ek", ""]))] == [
        [begin, e, k],
        [begin],
    ]
    limit = config.model.max_length - config.decoding.max_extra
    (long, _), _ = rows(task.batches_of(["at" + "ek" * limit, ""]))
    assert long == [begin, *([e, k] * limit)[1 - limit :]]
    assert rows(task.scorer().batches_of(["ek", {"context": "ek", "text": "k"}])) == [
        ([begin, e], 2),
        ([begin, e, k], 1),
    ]


def test_several_turns_are_one_prompt(config, tmp_path):
    config.decoding.turn_separator = "\n"
    records = [
        "ek\nat\n",
        {"turns": ["ek", "at"]},
        '{"turns": ["ek", "at"]}',
        {"text": "ek\nat\n"},
        '{"turn": ["ek"]}',
    ]
    text, *same, other, line = predict(
        config, tmp_path / "run", [*records, {"text": records[-1]}]
    )
    assert same == [text] * 3
    assert other == line  # a line that is no such object is a text


@pytest.mark.parametrize(
    "record",
    [
        {"turns": []},
        {"turns": "ek"},
        {"turns": ["ek", 3]},
        {"turns": ["ek"], "text": "ek"},
        {"text": 3},
        {},
    ],
)
def test_what_is_no_prompt(config, tmp_path, record):
    with pytest.raises(
        DataError,
        match=r"^record 2 is .*: a prompt is a line of text, .*with at least one turn",
    ):
        make_task(parse(config), tmp_path / "run").batches_of(["ek", record])


def test_a_continuation_ends_before_a_stop_string(config, tmp_path):
    """Wherever a piece ends, the text is the part before the first stop string of
    the text without one.
    """
    config.decoding.max_extra = 20
    prompts = ["ek", "ak ek it ak", "e", "at"]
    task, _, continued = untrained(config, tmp_path / "run")
    whole = [found["continuation"] for found in continued(prompts)]
    assert task.piece == 20
    stop = (whole[0][3:6], whole[1][9:11], "never")
    expected = [min((text.partition(s)[0] for s in stop), key=len) for text in whole]
    assert len(expected[0]) <= 3
    assert expected != whole
    config.decoding.stop_strings = stop
    assert make_task(parse(config), tmp_path / "run").piece == language_modeling.PIECE
    task.texts = ContinuedTexts(task.corpus, parse(config).decoding)
    for task.piece in (3, 32):
        assert [found["continuation"] for found in continued(prompts)] == expected


def test_a_stop_string_may_begin_with_the_space_after_the_prompt(config, tmp_path):
    """Decoded alone, a continuation in tokens with "▁" lacks its first space."""
    config.data.tokenizer, config.decoding.max_extra = "bpe_metaspace", 20
    config.decoding.stop_strings = (" ek",)
    task = make_task(parse(config), tmp_path / "run")
    prompt, whole = task.corpus.tokenizers["text"].encode_batch(["ak", "ak ek it"])
    assert whole[: len(prompt)] == prompt
    added = np.array([[whole[len(prompt) :]]])
    outputs = {
        "tokens": added,
        "log_probabilities": np.zeros(added.shape),
        "finished": np.zeros((1, 1), bool),
        "written": np.full((1, 1), added.size),
    }
    batch = {"text": np.array([prompt]), "text_length": np.array([len(prompt)])}
    assert not task.unfinished(outputs, batch).any()
    assert task.decode(outputs, batch) == [{"continuation": ""}]


def test_continuations_are_shown_while_they_are_written(config, tmp_path, monkeypatch):
    """With bytes as tokens, no character is split.

    Pieces are those of `predict` at the same place.
    """
    config.data.tokenizer, config.decoding.max_extra, config.decoding.temperature = (
        "bpe_bytes",
        24,
        2.0,
    )
    config.decoding.stop_strings = ("e",)
    run(config, tmp_path / "run", training__steps=2)
    monkeypatch.setattr(evaluation, "STREAMED", 1)
    prompts = ["ek é", "ek", "ek"]
    predictor = transformer_jax.load(tmp_path / "run", {"decoding.seed": 3})
    whole = [found["continuation"] for found in predictor.predict(prompts)]
    assert whole[1] != whole[2]
    for number, (prompt, text) in enumerate(zip(prompts, whole, strict=True)):
        pieces = list(predictor.stream(prompt, number))
        assert "".join(pieces) == text
        assert len(list(filter(None, pieces))) > 3
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])
    with pytest.raises(ValueError, match=r"record 1 is None"):
        next(predictor.stream(None))
    several = transformer_jax.load(tmp_path / "run", {"decoding.n_best": 2})
    with pytest.raises(
        ValueError,
        match=r"single texts that grow in pieces: use predict, .*decoding.n_best = 1",
    ):
        next(several.stream("ek"))


@pytest.mark.parametrize("prompts", [["", "ek", "  "], ["", " "]])
def test_a_prompt_without_a_token_is_continued_by_nothing(
    config, tmp_path, caplog, prompts
):
    config.data.tokenizer = "words"
    found = predict(config, tmp_path / "run", prompts)
    assert [prediction["continuation"] == "" for prediction in found] == [
        not prompt.strip() for prompt in prompts
    ]
    assert f"input: 2 lines are empty: lines 1, {len(prompts)}" in caplog.text


def test_bits_per_byte_are_nats_per_token_in_another_unit(config, tmp_path, corpus):
    task = make_task(parse(config), tmp_path / "run")
    text = "éa" * 50
    (corpus / "val.txt").write_text(text)
    batches = task.batches("val", None)
    scores = task.score({"loss": 2.0}, [], batches.references)
    assert scores["bits_per_byte"] == pytest.approx(2.0 * 99 / (150 - 2) / np.log(2))
    assert task.score({}, [], batches.references) == {}
    # only ends are predicted
    assert task.score({"loss": 2.0}, [], [(3, 0, "hash")]).keys() == {
        "loss",
        "perplexity",
    }


@pytest.fixture
def packed(config):
    """A config of packed documents, with one layer and no dropout."""
    config.data.layout, config.model.num_layers = "documents", 1
    config.model.dropout_rate = config.model.attention_dropout_rate = 0.0
    return config


def separate(task, split):
    """Return one batch of all documents of a split, cut at data.max_length, each in
    a row of its own.
    """
    tokenizer, length, inputs, targets = (
        task.corpus.tokenizers["text"],
        task.config.data.max_length,
        [],
        [],
    )
    text = "".join(task.corpus.open(split).column("text"))
    for document in text.removesuffix("\n").split("\n\n"):
        ids = [*tokenizer.encode_batch([document + "\n"])[0], tokenizer.eos_id]
        for start in range(0, len(ids) - 1, length):
            inputs.append(ids[start : min(start + length, len(ids) - 1)])
            targets.append(ids[start + 1 : start + length + 1])

    def padded(rows):
        return np.array([row + [0] * (length - len(row)) for row in rows], np.int32)

    lengths = np.array([len(row) for row in inputs], np.int32)
    return {
        "text": padded(inputs),
        "target": padded(targets),
        "text_length": lengths,
        "index": np.arange(len(lengths), dtype=np.int32),
    }


def test_losses_and_gradients_of_packed_documents_are_those_of_separate_ones(
    packed, tmp_path
):
    task = make_task(parse(packed), tmp_path / "run")
    params = nn.unbox(jax.jit(task.init)(jax.random.key(0)))

    @jax.jit
    def run(params, batch):
        def total(params):
            mean = task.loss(params, batch, jax.random.key(0), 0)["loss"]
            return mean.sum, mean.weight

        (value, weight), gradient = jax.value_and_grad(total, has_aux=True)(params)
        return (
            value,
            weight,
            jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient)]),
        )

    batches, alone = task.batches("train", 3), separate(task, "train")
    arrays = [batches.load(batches.plan.batch(i)) for i in range(len(batches.plan))]
    assert max(x["segment"].max() for x in arrays) > 1
    found = [
        sum(parts) for parts in zip(*(run(params, x) for x in arrays), strict=True)
    ]
    for one, other in zip(found, run(params, alone), strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()
    assert found[1] == alone["text_length"].sum()
    assert sum(task.work(x).tokens for x in arrays) == task.work(alone).tokens
    row = arrays[0]["segment"].max(axis=1).argmax()
    shown = task.preview({name: x[row:] for name, x in arrays[0].items()})[1].split()
    assert (
        len(shown)
        == (arrays[0]["segment"][row] == 1).sum()
        < arrays[0]["text_length"][row]
    )


EVALUATE = """
import json
import flax.linen as nn
import jax
from ml_collections import ConfigDict
from transformer_jax.config import make_task, parse
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh

found = []
for rows in SIZES:
    config = ConfigDict(CONFIG)
    config.evaluation.batch_size = rows
    task = make_task(parse(config), WORKDIR)
    params = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    found.append(evaluator.evaluate(params, "val", True))
print(json.dumps(found))
"""


def test_scores_are_the_same_on_any_number_of_devices_and_for_any_batch_size(
    packed, tmp_path, capsys
):
    packed.data.validation_stride = 20
    make_task(parse(packed), tmp_path / "run").fingerprint(training=False)
    program = EVALUATE.replace("CONFIG", repr(packed.to_dict())).replace(
        "WORKDIR", repr(str(tmp_path / "run"))
    )
    exec(program.replace("SIZES", "(3, 7)"), {})
    one, other = json.loads(capsys.readouterr().out)
    assert one == pytest.approx(other, rel=1e-5)
    assert json.loads(on_devices(8, program.replace("SIZES", "(3,)"))) == [
        pytest.approx(one, rel=1e-5)
    ]


def test_overlapping_windows_are_scored_with_more_context(packed, tmp_path):
    """Compare with the model run on the tokens before each one, from the start of
    the first window that has it.
    """
    packed.data.layout, packed.data.validation_stride = "windows", 20
    task, length = make_task(parse(packed), tmp_path / "run"), packed.data.max_length
    params = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
    ids = task.corpus.encode(
        "text", task.corpus.open("val").column("text"), end=False
    ).values.astype(int)
    ends = np.arange(1, len(ids))
    starts = np.where(ends <= length, 0, 20 * -(-(ends - length) // 20))
    rows = np.array(
        [
            np.pad(ids[a:b], (0, length - (b - a)))
            for a, b in zip(starts, ends, strict=True)
        ]
    )
    logits = jax.jit(task.model.apply)({"params": params}, rows)[
        np.arange(len(rows)), ends - starts - 1
    ]
    expected = -np.asarray(jax.nn.log_softmax(logits))[
        np.arange(len(rows)), ids[1:]
    ].mean()
    scores = Evaluator(task, make_mesh(task.config.mesh)).evaluate(params, "val", True)
    assert scores["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("layout", ["windows", "documents"])
def test_a_tfds_data_set_is_documents(layout, packed, tmp_path):
    packed.data.update(
        source="tfds",
        name="dates",
        directory=str(tmp_path),
        text_column="written",
        layout=layout,
    )
    packed.data.train_split = "train[:30]"
    task = make_task(parse(packed), tmp_path / "run")
    batches = task.batches("validation[:7]", None)
    arrays = batches.load(batches.plan.batch(0))
    assert ("segment" in arrays) == (layout == "documents")
    assert (arrays["target"] == task.corpus.tokenizers["text"].eos_id).sum() == 7
    dates = task.corpus.open("validation[:7]").column("written")
    firsts = 1 if layout == "windows" else 7
    assert batches.references[0][0] == sum(map(len, dates)) + 7 - firsts
    assert (
        batches.references[0][1] == sum(len(date.encode()) for date in dates) - firsts
    )


def test_a_dummy_batch_of_packed_documents_is_like_a_real_one(packed, tmp_path):
    task = make_task(parse(packed), tmp_path / "run")
    batches, dummy = task.batches("train", 0), task.dummy_batch(7, 11, seed=3)
    real = batches.load(batches.plan.batch(0))
    assert {name: (x.dtype, x.ndim) for name, x in dummy.items()} == {
        n: (x.dtype, x.ndim) for n, x in real.items()
    }
    for segment, position, length in zip(
        *(dummy[k] for k in ("segment", "position", "text_length")), strict=True
    ):
        first, second = ((segment == number).sum() for number in (1, 2))
        assert segment.tolist() == [1] * first + [2] * second + [0] * (11 - length)
        assert position.tolist() == [
            *range(first),
            *range(second),
            *[0] * (11 - length),
        ]
    assert (dummy["segment"] == 2).any()


def test_continuations_that_do_not_fit_the_model_are_shorter(config, tmp_path, caplog):
    """A default must not refuse a small model."""
    config.decoding.max_extra = 32
    task = make_task(parse(config), tmp_path)
    assert (
        "max_extra = 32: continuations have at most 16 tokens, "
        "half of model.max_length = 32" in caplog.text
    )
    assert task.config.decoding.max_extra == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.max_length": 1}, r"model.max_length = 1: must be at least 2"),
        (
            {"data.max_length": 64, "data.batch_tokens": 1024},
            r"data.max_length = 64: must not exceed model.max_length",
        ),
    ],
)
def test_what_does_not_go_together(config, change, message):
    config.update_from_flattened_dict(change)
    with pytest.raises(ConfigError, match=message):
        parse(config)


@pytest.mark.parametrize(
    "changes",
    [{"architecture": "recurrent_lm"}, {"num_kv_heads": 2, "positions": "rotary"}],
)
def test_cached_is_whole_and_no_token_is_seen_before_its_place(changes, corpus):
    config = shrink(defaults("language_modeling", changes.get("architecture")), corpus)
    config.model.update(changes)
    task = make_task(parse(config), None)
    params, batch = (
        nn.unbox(jax.jit(task.init)(jax.random.key(0))),
        task.dummy_batch(3, 5, seed=1),
    )
    differences = task.checks(params, jax.device_put(batch))
    assert set(differences) == {
        "cached = uncached decoding",
        "no token is seen before its place",
    }
    assert max(differences.values()) < 1e-5


def test_a_recurrent_model_has_no_attention_to_show(corpus, tmp_path):
    config = shrink(defaults("language_modeling", "recurrent_lm"), corpus)
    task = make_task(parse(config), tmp_path / "run")
    params = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
    assert Evaluator(task, make_mesh(task.config.mesh)).attention(
        params, ["ek it"]
    ) == [[]]


@pytest.mark.parametrize(
    ("kind", "refused"), [("characters", False), ("unigram", True)]
)
def test_a_run_on_text_that_was_encoded_line_by_line_goes_on_if_the_ids_are_the_same(
    config, tmp_path, monkeypatch, kind, refused
):
    """Its checkpoints do not have the hash of the ids."""
    config.data.tokenizer = kind
    monkeypatch.setattr(
        LanguageModeling,
        "fingerprint",
        lambda self, training, stored=None: self.corpus.fingerprint(training),
    )
    run(config, tmp_path / "run", training__steps=2)
    monkeypatch.undo()
    if refused:
        with pytest.raises(
            CheckpointError,
            match=r"^tokens of the training data: .* encoded the data in another way",
        ):
            run(config, tmp_path / "run", training__steps=4)
    else:
        assert int(run(config, tmp_path / "run", training__steps=4).step) == 4


def test_a_run_whose_texts_get_another_beginning_is_not_continued(config, tmp_path):
    run(config, tmp_path / "run", training__steps=2)
    with pytest.raises(
        CheckpointError, match=r"^tokens of the training data: .* they do not match"
    ):
        run(config, tmp_path / "run", training__steps=4, decoding__prepend_begin=True)
