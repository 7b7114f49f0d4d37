"""The translation task, from text to scores, on a corpus of made-up words."""

import gzip
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from transformer_jax.config import parse
from transformer_jax.data.tokenizers import BOS_ID, EOS_ID, PAD_ID, TokenizerError
from transformer_jax.models.transformer import shift_right
from transformer_jax.training.evaluation import Evaluator, every_batch
from transformer_jax.training.sharding import make_mesh


@pytest.fixture
def task(tiny, tmp_path):
    return parse(tiny).make_task(tmp_path / "run")


@pytest.fixture
def params(task):
    return nn.unbox(task.init(jax.random.key(0)))


def test_batches_hold_every_pair_once_an_epoch(task, corpus):
    batches = task.batches("train", seed=3)
    seen = []
    for indices, arrays in every_batch(batches):
        seen += [i for i in indices if i >= 0]
        assert arrays["source"].shape[0] % 8 == 0
        for row in (*arrays["source"][indices >= 0], *arrays["target"][indices >= 0]):
            tokens = row[row != PAD_ID]
            assert tokens[-1] == EOS_ID
            assert (tokens[:-1] > EOS_ID).all()
    assert sorted(seen) == list(range(60))


def test_empty_and_over_long_pairs_are_counted(task, corpus, caplog):
    lines = (corpus / "train.en").read_text().splitlines()
    lines[4], lines[9] = "", "ek " * 40
    (corpus / "train.en").write_text("\n".join(lines) + "\n")
    plan = task.batches("train", seed=0).plan
    assert sorted(set(range(60)) - set(plan.kept)) == [4, 9]
    assert (
        "left out: 1 longer than data.max_length = 32, 1 with an empty side, 0 beyond data.max_ratio = 0" in caplog.text
    )


def test_uneven_pairs_are_counted(tiny, tmp_path, corpus, caplog):
    for language, lines in {"en": ["ek"] * 4 + [""], "de": ["dk", "dk " * 5, "dk " * 6, "dk " * 50, "dk"]}.items():
        (corpus / f"train.{language}").write_text("\n".join(lines) + "\n")
    tiny.data.tokenizer, tiny.data.max_ratio = "words", 5.0
    plan = parse(tiny).make_task(tmp_path / "run").batches("train", seed=0).plan
    assert plan.kept.tolist() == [0, 1]
    assert (
        "left out: 1 longer than data.max_length = 32, 1 with an empty side, 1 beyond data.max_ratio = 5" in caplog.text
    )


def test_a_corpus_of_no_usable_pair_is_refused_for_the_reason(tiny, tmp_path, corpus):
    (corpus / "train.de").write_text("\n" * 60)
    with pytest.raises(ValueError, match=r"train: none of 60 pairs is left: 60 have an empty side, 0 are beyond"):
        parse(tiny).make_task(tmp_path / "run").batches("train", seed=0)


@pytest.mark.parametrize(("count", "learned"), [(0, "0123456789abcdefghij"), (8, "0257acfh"), (1, "0a")])
def test_the_tokenizer_learns_from_lines_spread_evenly(count, learned, tiny, tmp_path, corpus):
    (corpus / "train.en").write_text("\n".join("0123456789") + "\n")
    (corpus / "train.de").write_text("\n".join("abcdefghij") + "\n")
    tiny.data.tokenizer, tiny.data.tokenizer_lines = "words", count
    task = parse(tiny).make_task(tmp_path / "run")
    task.identity(training=False)
    assert set(task.text.tokenizers[0].tokens(range(4, 90))) - {""} == set(learned)


def test_evaluation_keeps_every_pair(task, corpus, caplog):
    lines = (corpus / "val.de").read_text().splitlines()
    lines[0], lines[1] = "", "dk " * 40
    (corpus / "val.de").write_text("\n".join(lines) + "\n")
    indices = np.concatenate([i for i, _ in every_batch(task.batches("val", seed=None))])
    assert sorted(indices[indices >= 0]) == list(range(11))
    assert "val, line 2" in caplog.text
    assert "cut to model.max_length = 32" in caplog.text


def test_loss_sees_no_padding(task, params):
    """More padding, in rows or columns, changes neither sum nor weight."""
    _, arrays = next(every_batch(task.batches("val", seed=None)))
    key = jax.random.key(0)
    wider = {name: np.pad(a, ((0, 3), (0, 2)), constant_values=PAD_ID) for name, a in arrays.items()}
    apply = {"small": task.measure(params, arrays), "large": task.measure(params, wider)}
    np.testing.assert_allclose(apply["small"]["loss"], apply["large"]["loss"], rtol=1e-5)
    assert apply["small"]["tokens"] == apply["large"]["tokens"] == (arrays["target"] != PAD_ID).sum()
    assert apply["small"]["examples"] == apply["large"]["examples"] == 11
    assert task.loss(params, arrays, key, 0)[1] == apply["small"]["tokens"]


def test_loss_does_not_leak_its_label(task, params):
    """The prediction of token t must not see token t: logits up to it do not move when it does, those behind it do."""
    _, arrays = next(every_batch(task.batches("val", seed=None)))
    row = int((arrays["target"] != PAD_ID).sum(axis=1).argmax())
    pair = {name: jnp.asarray(a[row : row + 1]) for name, a in arrays.items()}
    t = int((pair["target"] != PAD_ID).sum()) // 2
    other = jnp.where(pair["target"][0, t] == 7, 8, 7)
    changed = {**pair, "target": pair["target"].at[0, t].set(other)}

    def predicted(batch):
        hidden, project = task.model.apply(
            {"params": params}, batch["source"], shift_right(batch["target"], BOS_ID), method="hidden"
        )
        return np.asarray(project(hidden, task.config.model.target_vocab_size))[0]

    np.testing.assert_array_equal(predicted(pair)[: t + 1], predicted(changed)[: t + 1])
    assert not np.array_equal(predicted(pair)[t + 1], predicted(changed)[t + 1])
    assert task.measure(params, pair)["loss"] != task.measure(params, changed)["loss"]


def test_the_loss_is_the_cross_entropy_of_each_next_token(tiny, tmp_path):
    """What the decoder reads is the target moved on by one; smoothing counts in training alone."""
    tiny.model.dropout_rate = 0.0
    task = parse(tiny).make_task(tmp_path / "run")
    params = nn.unbox(task.init(jax.random.key(0)))
    _, arrays = next(every_batch(task.batches("val", seed=None)))
    source, target = arrays["source"], arrays["target"]
    read = np.concatenate([np.full_like(target[:, :1], BOS_ID), target[:, :-1]], axis=1)
    logits = task.model.apply({"params": params}, source, read, source != PAD_ID, target != PAD_ID)
    for found, smoothing in (
        (task.measure(params, arrays)["loss"], 0.0),
        (task.loss(params, arrays, jax.random.key(0), 0)[0], 0.1),
    ):
        expected, _ = oracle.cross_entropy(np.asarray(logits), target, target != PAD_ID, smoothing)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("fast", [True, False], ids=["greedy", "beam"])
def test_predictions_come_in_order_one_for_one(task, params, fast, caplog):
    lines = ["ek", "", "ak ek it", "ek " * 50, "ak", " \t ", "em is ot uk"]
    mesh = make_mesh(task.config.mesh)
    together = Evaluator(task, mesh, rows=8).predict(params, lines, fast)
    alone = Evaluator(task, mesh, rows=1).predict(params, lines, fast)
    assert together == alone
    assert len(together) == len(lines)
    assert together[1] == together[5] == ""
    assert "2 empty lines stay empty: 2, 6" in caplog.text
    assert "input, line 4" in caplog.text
    assert Evaluator(task, mesh, rows=8).predict(params, [], fast) == []


def test_scored_predictions_are_json(task, params):
    evaluator = Evaluator(task, make_mesh(task.config.mesh), rows=4)
    plain = evaluator.predict(params, ["ek at", "", "ut"])
    scored = [json.loads(line) for line in evaluator.predict(params, ["ek at", "", "ut"], write=task.write_scored)]
    assert [row["text"] for row in scored] == plain
    assert all(row["score"] <= 0 for row in scored)


def test_weights_that_the_library_keeps_cannot_be_shown(tiny, params):
    tiny.model.attention_implementation = "xla"
    task = parse(tiny).make_task("(none)")
    with pytest.raises(ValueError, match=r"config.model.attention_implementation = 'xla' keeps .* set it to 'einsum'"):
        task.attention(params, task.made_up(2, 4, seed=0))


def test_score(task):
    values = task.score({"loss": 6.0, "tokens": 3.0, "examples": 2.0}, ["a b c d", "x"], ["a b c d", "y"])
    of_two_lines = task.score({"loss": 6.0, "tokens": 3.0, "examples": 1.0}, ["a b c d"], ["a b\nc d"])
    assert of_two_lines["exact_match"] == 1
    assert values["loss"] == 2.0
    assert values["perplexity"] == pytest.approx(7.389056)
    assert values["exact_match"] == 0.5
    assert values["examples"] == 2
    assert values["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")


def test_identity_names_tokenizer_and_data(task, tiny, corpus, tmp_path):
    before = task.identity(training=True)
    assert before["source tokenizer"] == before["target tokenizer"]
    assert task.identity(training=False).keys() == {"source tokenizer", "target tokenizer"}
    text = (corpus / "train.de").read_text()
    (corpus / "train.de").write_text(text[:-2] + "t\n")
    after = parse(tiny).make_task(tmp_path / "run").identity(training=True)
    assert after["source tokenizer"] == before["source tokenizer"]  # trained once, kept
    assert after["training data"] != before["training data"]


def test_identity_is_of_the_text_not_its_packing(task, tiny, corpus, tmp_path):
    before = task.identity(training=True)
    (corpus / "train.de.gz").write_bytes(gzip.compress((corpus / "train.de").read_bytes()))
    (corpus / "train.de").unlink()
    (corpus / "train.en").write_bytes((corpus / "train.en").read_bytes().replace(b"\n", b"\r\n"))
    assert parse(tiny).make_task(tmp_path / "run").identity(training=True) == before


def test_separate_tokenizers(tiny, tmp_path):
    tiny.data.joint_tokenizer, tiny.model.tie_embeddings = False, "decoder"
    task = parse(tiny).make_task(tmp_path / "run")
    hashes = task.identity(training=False)
    assert hashes["source tokenizer"] != hashes["target tokenizer"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "tokenizer.source.json",
        "tokenizer.target.json",
    ]


def test_vocabulary_must_fit(task, tiny, tmp_path):
    task.identity(training=False)
    tiny.model.source_vocab_size = tiny.model.target_vocab_size = 280
    with pytest.raises(ValueError, match=r"tokenizer.json has 300 ids, but .* = 280: the vocabulary does not fit"):
        parse(tiny).make_task(tmp_path / "run").identity(training=False)


def test_lost_or_broken_tokenizer(task, tiny, tmp_path):
    task.identity(training=False)
    path = tmp_path / "run" / "tokenizer.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(TokenizerError, match="Cannot load the tokenizer"):
        parse(tiny).make_task(tmp_path / "run").identity(training=False)
    path.unlink()
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"tokenizer.json is missing, and the checkpoints beside it belong to it"):
        parse(tiny).make_task(tmp_path / "run").identity(training=False)


LINES = ["ek at", "", "ut", "at ek ut", "ek at", "im"] * 3


def predictions(tiny, tmp_path, params, lines=LINES, rows=8, **options):
    tiny.decoding.update(options)
    task = parse(tiny).make_task(tmp_path / "run")
    evaluator = Evaluator(task, make_mesh(task.config.mesh), rows=rows)
    several = tiny.decoding.n_best > 1
    found = evaluator.predict(params, lines, write=task.write_scored if several else task.write)
    return [json.loads(line)["hypotheses"] for line in found] if several else found


def test_n_best_of_a_beam(tiny, tmp_path, params):
    plain = predictions(tiny, tmp_path, params, beam_size=5)
    found = predictions(tiny, tmp_path, params, n_best=3)
    assert [row[0]["text"] for row in found] == plain
    task = parse(tiny).make_task(tmp_path / "run")
    _, arrays = next(every_batch(task.read(["ek at"], 1)))
    best = task.predict(params, arrays, fast=False)
    assert {name: value.shape[:2] for name, value in best.items()} == dict.fromkeys(best, (1, 3))
    np.testing.assert_allclose([row["score"] for row in found[0]], best["scores"][0], rtol=1e-5)
    assert [row["score"] for row in found[0]] == sorted((row["score"] for row in found[0]), reverse=True)
    assert all(row["log_probability"] < row["score"] < 0 for row in found[0])
    assert found[1] == [{"text": "", "score": 0.0, "log_probability": 0.0}]
    assert len({row["text"] for row in found[3]}) > 1
    assert task.predict(params, arrays, fast=True)["tokens"].shape[:2] == (1, 1)


def test_drawn_translations_depend_on_seed_and_line_not_on_the_batch(tiny, tmp_path, params):
    options = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "n_best": 2, "seed": 3}
    found = predictions(tiny, tmp_path, params, **options)
    texts, scores = ([[row[name] for row in rows] for rows in found] for name in ("text", "score"))
    alone = predictions(tiny, tmp_path, params, rows=1)
    assert [[row["text"] for row in rows] for rows in alone] == texts
    np.testing.assert_allclose([[row["score"] for row in rows] for rows in alone], scores, rtol=1e-5)
    assert (texts[1], scores[1]) == (["", ""], [0.0, 0.0])
    assert len(set(map(tuple, texts[::6] + texts[4::6]))) == 6, "the same line in another place is drawn anew"
    others = predictions(tiny, tmp_path, params, seed=4)
    assert all(a != b for a, b in zip(found[::6], others[::6], strict=True))
