"""Sequence-to-sequence task, from text to scores, on a corpus of made-up words."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu
import tokenizers as hugging_face
from ml_collections import ConfigDict

import transformer_jax
from helpers import oracle
from helpers.runs import rows, run, small
from transformer_jax.config import make_task, parse
from transformer_jax.data.tokenizers import TokenizerError
from transformer_jax.models.kernels import platforms
from transformer_jax.models.transformer import shift_right
from transformer_jax.tasks.text import shown_by
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh

BOS, EOS = 1, 2  # ids of tokenizers trained by this package


@pytest.fixture
def task(tiny, tmp_path):
    return make_task(parse(tiny), tmp_path / "run")


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    """Parameters for every config in this module that has the sizes of `tiny`."""
    return new_params(
        make_task(
            parse(small("sequence_to_sequence", tmp_path_factory.getbasetemp())), None
        )
    )


@pytest.fixture
def arrays(task):
    return first_batch(task)


def first_batch(task, split="val"):
    batches = task.batches(split, seed=None)
    return batches.load(batches.plan.batch(0))


def new_params(task):
    return nn.unbox(jax.jit(task.init)(jax.random.key(0)))


def loss_of(task, params, batch):
    """Return the sum and the weight of the loss, without dropout and smoothing."""
    return jax.jit(lambda params, batch: task.evaluate(params, batch, True)[0]["loss"])(
        params, batch
    )


def training_loss_of(task, params, batch):
    return jax.jit(
        lambda params, batch: task.loss(params, batch, jax.random.key(0), 0)["loss"]
    )(params, batch)


def test_both_streams_end_in_eos_and_are_told_apart(task, corpus):
    batches = task.batches("train", seed=3)
    found = {}
    for number in range(len(batches.plan)):
        arrays = batches.load(batches.plan.batch(number))
        assert arrays.keys() == {
            "source",
            "source_length",
            "target",
            "target_length",
            "index",
        }
        for row in np.flatnonzero(arrays["index"] >= 0):
            texts = []
            for side, tokenizer in task.corpus.tokenizers.items():
                ids = arrays[side][row, : arrays[f"{side}_length"][row]]
                assert ids[-1] == EOS
                assert (ids[:-1] > EOS).all()
                texts.append(tokenizer.decode(ids))
            found[int(arrays["index"][row])] = texts
    assert [found[i][0] for i in range(60)] == (
        corpus / "train.en"
    ).read_text().splitlines()
    assert [found[i][1] for i in range(60)] == (
        corpus / "train.de"
    ).read_text().splitlines()


def test_uneven_pairs_are_left_out_of_training_alone(tiny, tmp_path, corpus):
    for split in ("train", "val"):
        (corpus / f"{split}.en").write_text("ek\nek\nek\n")
        (corpus / f"{split}.de").write_text("dk\ndk dk dk dk dk\ndk dk dk dk dk dk\n")
    tiny.data.tokenizer, tiny.data.max_ratio = "words", 5.0
    task = make_task(parse(tiny), tmp_path / "run")
    assert task.batches("train", seed=0).plan.kept.tolist() == [0, 1]
    assert task.batches("val", seed=None).plan.kept.tolist() == [0, 1, 2]


def test_a_source_of_spaces_is_empty(tiny, tmp_path):
    tiny.data.tokenizer = "characters"
    task = make_task(parse(tiny), tmp_path / "run")
    batches = task.batches_of([" \t ", " ek "])
    assert batches.load(batches.plan.batch(0))["source_length"].tolist()[:2] == [1, 5]
    assert list(batches.records) == ["", " ek "]


def test_loss_sees_no_padding(task, params, arrays):
    """More padding, in rows or columns and with any id, changes neither the sum nor
    the weight.
    """
    plain = loss_of(task, params, arrays)
    assert plain.weight == arrays["target_length"].sum()
    for filler in (0, 7):
        wider = {
            name: np.pad(x, [(0, 3), (0, 2)][: x.ndim]) for name, x in arrays.items()
        }
        for side in ("source", "target"):
            padding = (
                np.arange(wider[side].shape[1]) >= wider[f"{side}_length"][:, None]
            )
            assert padding.any()
            wider[side] = np.where(padding, filler, wider[side])
        found = loss_of(task, params, wider)
        np.testing.assert_allclose(
            [found.sum, found.weight], [plain.sum, plain.weight], rtol=1e-5
        )
    trained = training_loss_of(task, params, arrays)
    assert trained.weight == plain.weight
    assert trained.scale == 1


def test_loss_does_not_leak_its_label(task, params, arrays):
    """A change of token t must change later logits, but neither the logits for token
    t nor earlier ones.
    """
    row = int(arrays["target_length"].argmax())
    pair = {name: jnp.asarray(x[row : row + 1]) for name, x in arrays.items()}
    t = int(pair["target_length"][0]) // 2
    other = jnp.where(pair["target"][0, t] == 7, 8, 7)
    changed = {**pair, "target": pair["target"].at[0, t].set(other)}

    @jax.jit
    def predicted(batch):
        read = shift_right(batch["target"], BOS)
        logits = task.model.apply({"params": params}, batch["source"], read)
        return logits[0]

    np.testing.assert_array_equal(predicted(pair)[: t + 1], predicted(changed)[: t + 1])
    assert not np.array_equal(predicted(pair)[t + 1], predicted(changed)[t + 1])
    assert loss_of(task, params, pair).sum != loss_of(task, params, changed).sum


def next_token_logits(task, params, arrays, begin=BOS):
    """Return the logits of every target token given the tokens before it, and the
    mask of valid tokens.
    """
    source, target = arrays["source"], arrays["target"]
    read = np.concatenate([np.full_like(target[:, :1], begin), target[:, :-1]], axis=1)
    source_valid, valid = (
        np.arange(arrays[side].shape[1]) < arrays[f"{side}_length"][:, None]
        for side in ("source", "target")
    )
    return np.asarray(
        jax.jit(task.model.apply)({"params": params}, source, read, source_valid, valid)
    ), valid


def test_the_loss_is_the_cross_entropy_of_each_next_token(tiny, tmp_path, params):
    """The decoder reads the target, shifted by one. Only the training loss is
    smoothed.
    """
    tiny.model.dropout_rate = 0.0
    task = make_task(parse(tiny), tmp_path / "run")
    arrays = first_batch(task)
    logits, valid = next_token_logits(task, params, arrays)
    for found, smoothing in (
        (loss_of(task, params, arrays), 0.0),
        (training_loss_of(task, params, arrays), 0.1),
    ):
        expected, _ = oracle.cross_entropy(logits, arrays["target"], valid, smoothing)
        np.testing.assert_allclose(found.sum, expected, rtol=1e-5)


def predictions(tiny, tmp_path, params, lines, greedy=False, batch_size=8, **options):
    """Return the result of `Evaluator.predict` with these keys of decoding."""
    tiny.decoding.update(options)
    tiny.evaluation.batch_size = batch_size
    task = make_task(parse(tiny), tmp_path / "run")
    return Evaluator(task, make_mesh(task.config.mesh)).predict(params, lines, greedy)


@pytest.mark.parametrize(
    "greedy",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["greedy", "beam"],
)
def test_predictions_come_in_order_one_for_one(tiny, tmp_path, params, greedy, caplog):
    lines = ["ek", "", "ak ek it", "ek " * 50, "ak", " \t ", "em is ot uk"]
    together = predictions(tiny, tmp_path, params, lines, greedy)
    alone = predictions(tiny, tmp_path, params, lines, greedy, batch_size=1)
    assert [row["text"] for row in together] == [row["text"] for row in alone]
    np.testing.assert_allclose(
        [row["score"] for row in together],
        [row["score"] for row in alone],
        rtol=1e-5,
        atol=1e-6,
    )
    assert len(together) == len(lines)
    assert together[1] == together[5] == {"text": "", "score": 0.0}
    assert all(
        row.keys() == {"text", "score"} and row["score"] <= 0 for row in together
    )
    assert "2 lines are empty: lines 2, 6" in caplog.text
    assert "input, line 4" in caplog.text
    assert predictions(tiny, tmp_path, params, [], greedy) == []


LINES = ["ek at", "", "ut", "at ek ut", "ek at", "im"] * 3


def test_a_beam_finds_the_same_whether_its_cache_is_copied_or_masked(
    tiny, tmp_path, params, monkeypatch
):
    copied = predictions(tiny, tmp_path, params, LINES, beam_size=5, n_best=5)
    monkeypatch.setattr(platforms, "current", lambda: "tpu")
    masked = predictions(tiny, tmp_path, params, LINES, beam_size=5, n_best=5)
    for one, other in zip(copied, masked, strict=True):
        assert [best["text"] for best in one["hypotheses"]] == [
            best["text"] for best in other["hypotheses"]
        ]
        scores = ([best["score"] for best in row["hypotheses"]] for row in (one, other))
        np.testing.assert_allclose(*scores, rtol=1e-5)


def test_n_best_of_a_beam(tiny, tmp_path, params):
    plain = predictions(tiny, tmp_path, params, LINES, beam_size=5)
    found = [
        row["hypotheses"]
        for row in predictions(tiny, tmp_path, params, LINES, n_best=3)
    ]
    assert [row[0]["text"] for row in found] == [row["text"] for row in plain]
    task = make_task(parse(tiny), tmp_path / "run")
    batches = task.batches_of(["ek at"])
    arrays = batches.load(batches.plan.batch(0))
    evaluate = jax.jit(task.evaluate, static_argnums=2)
    means, best = evaluate(params, arrays, False)
    assert means == {}
    assert {name: value.shape[:2] for name, value in best.items()} == dict.fromkeys(
        best, (8, 3)
    )
    np.testing.assert_allclose(
        [row["score"] for row in found[0]], best["scores"][0], rtol=1e-5
    )
    assert [row["score"] for row in found[0]] == sorted(
        (row["score"] for row in found[0]), reverse=True
    )
    assert all(row["log_probability"] < row["score"] < 0 for row in found[0])
    assert found[1] == [{"text": "", "score": 0.0, "log_probability": 0.0}]
    assert len(set(map(tuple, best["tokens"][0].tolist()))) == 3
    greedy = jax.eval_shape(lambda p: task.evaluate(p, arrays, True)[1], params)
    assert greedy["tokens"].shape[:2] == (8, 1)


def test_drawn_outputs_depend_on_seed_and_line_not_on_the_batch(tiny, tmp_path, params):
    def drawn(**options):
        found = [
            row["hypotheses"]
            for row in predictions(tiny, tmp_path, params, LINES, **options)
        ]
        return (
            [[hypothesis[name] for hypothesis in row] for row in found]
            for name in ("text", "score")
        )

    texts, scores = drawn(temperature=1.0, top_k=20, top_p=0.95, n_best=2, seed=3)
    texts_alone, scores_alone = drawn(batch_size=1)
    assert texts_alone == texts
    np.testing.assert_allclose(scores_alone, scores, rtol=1e-5)
    assert (texts[1], scores[1]) == (["", ""], [0.0, 0.0])
    assert len(set(map(tuple, texts[::6] + texts[4::6]))) == 6, (
        "the same line has other draws in another place"
    )
    others, _ = drawn(seed=4)
    assert all(a != b for a, b in zip(texts[::6], others[::6], strict=True))


@pytest.mark.parametrize(
    "implementation", [pytest.param("einsum", marks=pytest.mark.slow), "jax"]
)
def test_attention_is_that_of_the_given_target_or_of_the_models_own(
    tiny, tmp_path, params, implementation
):
    """An implementation that returns no weights is replaced by one that does."""
    tiny.model.attention_implementation = implementation
    task = make_task(parse(tiny), tmp_path / "run")
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    # The first record has no target, the second one has.
    (own, (cross, *_)) = evaluator.attention(
        params, ["ek at", {"en": "ek at", "de": "dk"}]
    )
    assert "".join(cross.queries).replace("▁", "") == "dk</s>"
    assert "".join(cross.keys).replace("▁", "") == "ekat</s>"
    assert cross.weights.shape == (2, 8, len(cross.queries), len(cross.keys))
    batches = task.batches_of(["ek at"])
    arrays = batches.load(batches.plan.batch(0))
    ids = jax.jit(lambda batch: task.evaluate(params, batch, False)[1]["tokens"])(
        arrays
    )[0, 0].tolist()
    said, _ = shown_by(task.corpus, "target")(
        ids[: ids.index(EOS) + 1] if EOS in ids else ids
    )
    queries, keys = next(
        (found.queries, found.keys)
        for found in own
        if found.name == "decoder self-attention"
    )
    assert queries == said
    assert keys == ["<s>", *said[:-1]]


def test_attention_of_a_record_is_computed_in_one_row(
    tiny, tmp_path, params, monkeypatch
):
    """A batch of evaluation.batch_size rows would need that many times the memory."""
    task = make_task(parse(tiny), tmp_path / "run")
    evaluator, rows = Evaluator(task, make_mesh(task.config.mesh)), []
    compute = evaluator._attention
    monkeypatch.setattr(
        evaluator,
        "_attention",
        lambda params, batch: (
            rows.append(len(batch["source"])) or compute(params, batch)
        ),
    )
    both = evaluator.attention(
        params, [{"en": "ek at", "de": "dk"}, {"en": "ut", "de": "dk"}]
    )
    assert rows == [1, 1]
    assert [found[0].texts["source"] for found in both] == ["ek at", "ut"]


def test_score(task):
    values = task.score(
        {"loss": 2.0}, [{"text": "a b c d"}, {"text": "x"}], ["a b c d", "y"]
    )
    assert values["loss"] == 2.0
    assert values["perplexity"] == pytest.approx(7.389056)
    assert values["exact_match"] == 0.5
    assert values["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    of_two_lines = task.score({}, [{"text": "a b c d"}], ["a b\nc d"])
    assert of_two_lines["exact_match"] == 1
    assert "loss" not in of_two_lines
    several = [{"hypotheses": [{"text": "a b c d"}, {"text": "x"}]}]
    assert task.score({}, several, ["a b c d"])["bleu"] == pytest.approx(100)


@pytest.mark.slow
def test_bleu_is_by_the_tokenizer_of_the_config_while_training_and_after(
    tiny, tmp_path
):
    """The key may change in a workdir, even if the config.json there was written
    before the key existed.
    """
    workdir = tmp_path / "run"
    run(tiny, workdir, training__steps=2, decoding__beam_size=1)
    stored = json.loads((workdir / "config.json").read_text())
    del stored["evaluation"]["bleu_tokenizer"]
    (workdir / "config.json").write_text(json.dumps(stored))
    assert (
        "|tok:13a|" in transformer_jax.load(str(workdir)).evaluate()["bleu_signature"]
    )
    run(
        tiny,
        workdir,
        training__steps=4,
        decoding__beam_size=1,
        evaluation__bleu_tokenizer="char",
    )
    found = [row["bleu_signature"] for row in rows(workdir) if row["split"] == "val"]
    assert [signature.split("|")[3] for signature in found] == ["tok:13a", "tok:char"]

    scores = transformer_jax.load(str(workdir)).evaluate("val")
    assert "|tok:char|" in scores["bleu_signature"]
    predictor = transformer_jax.load(
        str(workdir), {"evaluation.bleu_tokenizer": "intl"}
    )
    assert "|tok:intl|" in predictor.evaluate("val")["bleu_signature"]


def test_score_is_by_the_tokenizer_of_the_config(tiny, tmp_path):
    tiny.evaluation.bleu_tokenizer = "zh"
    task = make_task(parse(tiny), tmp_path / "run")
    hypotheses, references = (
        ["我们今天去北京，天气很好。"],
        ["我们明天去北京，天气很好。"],
    )
    values = task.score({}, [{"text": line} for line in hypotheses], references)
    assert (
        values["bleu"]
        == sacrebleu.corpus_bleu(hypotheses, [references], tokenize="zh").score
        > 50
    )
    assert "|tok:zh|" in values["bleu_signature"]


def test_separate_tokenizers(tiny, tmp_path):
    tiny.data.joint_tokenizer, tiny.model.tie_embeddings = False, "decoder"
    task = make_task(parse(tiny), tmp_path / "run")
    hashes = task.fingerprint(training=False)
    assert hashes["source tokenizer"] != hashes["target tokenizer"]
    assert sorted(path.name for path in (tmp_path / "run").glob("tokenizer*")) == [
        "tokenizer.source.json",
        "tokenizer.target.json",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a: {"target_length": a["target_length"] * 0},
            "row 0 of the first batch has no position in its target",
        ),
        (
            lambda a: {"source_length": a["source_length"] - 1},
            "row 0 of the first batch does not end in EOS in its sou",
        ),
        (
            lambda a: {"source": np.where(a["source"] > EOS, 304, a["source"])},
            "has ids beyond the vocabulary of 304 in",
        ),
    ],
)
def test_the_preview_refuses_a_batch_that_must_be_wrong(task, arrays, change, message):
    source, read, target = (line.split() for line in task.preview(arrays)[1:])
    assert source[0] == "source"
    assert read[:3] == ["decoder", "input", "<s>"]
    assert read[3:] == target[1:-1]
    assert target[-1] == "</s>"
    with pytest.raises(ValueError, match=message):
        task.preview({**arrays, **change(arrays)})


WORDS = [f"{c}{v}{k}" for c in "de" for v in "aeiou" for k in "kmst"]
FOREIGN = {
    "padding 1": [WORDS[0], "[PAD]", *WORDS[1:], "[SEP]", "[CLS]"],
    "no padding": [*WORDS, "</s>", "<s>"],
    "GPT-2": [*WORDS, *(f"w{i}" for i in range(50_256 - len(WORDS))), "<|endoftext|>"],
}


def foreign_task(tiny: ConfigDict, workdir, names: list[str]):
    """Return a task whose workdir has a tokenizer of these words and special tokens,
    numbered from 0.
    """
    tokenizer = hugging_face.Tokenizer(
        hugging_face.models.WordLevel({name: i for i, name in enumerate(names)})
    )
    tokenizer.pre_tokenizer = hugging_face.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([name for name in names if not name.isalnum()])
    workdir.mkdir()
    (workdir / "tokenizer.json").write_text(tokenizer.to_str())
    tiny.model.source_vocab_size = tiny.model.target_vocab_size = len(names)
    tiny.model.num_encoder_layers = tiny.model.num_decoder_layers = 1
    return make_task(parse(tiny), workdir)


@pytest.mark.parametrize(
    ("kind", "special"),
    [
        pytest.param("padding 1", (42, 41, 1), marks=pytest.mark.slow),
        ("no padding", (41, 40, None)),
        pytest.param("GPT-2", (50_256, 50_256, None), marks=pytest.mark.slow),
    ],
)
def test_tokenizers_of_others_with_any_special_ids(
    tiny, tmp_path, corpus, kind, special
):
    """An ordinary word has the id 0, which also fills batches.

    It is never taken for padding.
    """
    for split in ("train", "val", "test"):  # every line starts or ends with id 0
        for language, word in (("en", WORDS[0]), ("de", WORDS[0])):
            path = corpus / f"{split}.{language}"
            lines = path.read_text().splitlines()
            path.write_text(
                "".join(
                    f"{word} {x}\n" if i % 2 else f"{x} {word}\n"
                    for i, x in enumerate(lines)
                )
            )
    task = foreign_task(tiny, tmp_path / "run", FOREIGN[kind])
    before = (tmp_path / "run" / "tokenizer.json").read_bytes()
    assert task.corpus.special_ids("target") == special
    params, arrays = new_params(task), first_batch(task)
    ends = np.take_along_axis(
        arrays["target"], arrays["target_length"][:, None] - 1, axis=1
    )[arrays["index"] >= 0]
    assert (ends == special[1]).all()
    logits, valid = next_token_logits(task, params, arrays, special[0])
    assert (valid & (arrays["target"] == 0)).sum() >= 11
    assert valid.sum() == sum(
        len(line.split()) + 1 for line in (corpus / "val.de").read_text().splitlines()
    )
    loss = loss_of(task, params, arrays)
    assert loss.weight == valid.sum()
    np.testing.assert_allclose(
        loss.sum,
        oracle.cross_entropy(logits, arrays["target"], valid, 0.0)[0],
        rtol=1e-5,
    )

    run(tiny, tmp_path / "run", training__steps=2, decoding__beam_size=1)
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == before
    assert [row["step"] for row in rows(tmp_path / "run") if row["split"] == "val"] == [
        2
    ]
    predictor = transformer_jax.load(str(tmp_path / "run"))
    assert predictor.evaluate()["examples"] == 7
    found = predictor.predict(["eak", "", WORDS[0]])
    assert found[1] == ""
    assert all(
        set(text.split()) <= set(FOREIGN[kind]) - {"[PAD]", "[CLS]", "<s>"}
        for text in found
    )


def test_a_tokenizer_without_an_end_is_refused(tiny, tmp_path):
    task = foreign_task(tiny, tmp_path / "run", [*WORDS, "[PAD]", "[CLS]"])
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json has no special id for the end of a"
    ):
        task.batches("train", seed=0)
