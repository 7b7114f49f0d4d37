"""Language model: losses of packed documents, windows, and scores."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.processes import on_devices
from helpers.runs import parameters, run, shrink, small
from transformer_jax.config import ConfigError, defaults, make_task, parse
from transformer_jax.tasks.language_modeling import LanguageModeling
from transformer_jax.training.checkpoint import CheckpointError
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh


@pytest.fixture
def config(corpus):
    config = small("language_modeling", corpus)
    config.data.tokenizer = "characters"
    return config


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
    params = parameters(task)

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
    params = parameters(task)
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
        parameters(task),
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
    params = parameters(task)
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
