"""Runs that start from another run: what is loaded, what is refused, and what a
resumed run still needs.
"""

import contextlib
import shutil
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from ml_collections import ConfigDict

import transformer_jax
from helpers.corpus import write_corpus
from helpers.runs import small
from transformer_jax import experiment, transfer
from transformer_jax import workdir as workdirs
from transformer_jax.config import ConfigError, load_recipe, make_task, parse
from transformer_jax.training import loop
from transformer_jax.training.checkpoint import (
    CheckpointError,
    Checkpoints,
    parameters_sha256,
)
from transformer_jax.training.engine import Engine
from transformer_jax.training.sharding import make_mesh
from transformer_jax.workdir import read, store


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    write_corpus(tmp_path_factory.mktemp("data") / "corpus")
    return tmp_path_factory.getbasetemp() / "data0" / "corpus"


def bert(task, data, start="", **changes):
    config = small(task, data)
    config.data.tokenizer, config.training.steps, config.init_from = (
        "bert",
        2,
        str(start),
    )
    config.model.vocab_size = 304
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return config


def flat(tree):
    return {
        key: np.asarray(leaf)
        for key, leaf in traverse_util.flatten_dict(tree, sep="/").items()
    }


class Stopped(Exception):
    """Raised in place of the first step."""


def done(*_):
    """Stand in for a compilation ahead of time, which takes most of the time of a
    short run.
    """
    future = Future()
    future.set_result(None)
    return future


def first_state(config, workdir):
    """Return the state that a run begins with."""
    found, restore = [], Engine.restore_or_init

    def begin(engine, *arguments):
        found.append(restore(engine, *arguments))
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "restore_or_init", begin)
        patch.setattr(loop, "compiling_ahead", lambda: contextlib.nullcontext(done))
        with contextlib.suppress(Stopped):
            experiment.run(config, workdir)
    return found[0]


def saved(config, workdir):
    """Make a workdir with a checkpoint at step 2, without training.

    Its moving average is one larger.
    """
    state = first_state(config, workdir)
    state = state._replace(
        step=jnp.asarray(2), ema=jax.tree.map(lambda x: x + 1, state.params)
    )
    fingerprint = make_task(parse(config), workdir).fingerprint(training=True)
    checkpoints = Checkpoints(workdir / "checkpoints", parse(config).checkpoint, {})
    checkpoints.save(
        2, state, {"fingerprint": fingerprint, "position": 2, "scored": "params"}
    )
    checkpoints.close()
    return workdir, flat(state.params)


@pytest.fixture(scope="module")
def pretrained(data, tmp_path_factory):
    """Workdir of a pre-trained model, and its parameters."""
    return saved(
        bert("bert_pretraining", data, training__seed=1),
        tmp_path_factory.mktemp("pretrained") / "run",
    )


def test_it_begins_with_the_values_of_the_other_run(data, pretrained, tmp_path, caplog):
    source, old = pretrained
    state = first_state(bert("classification", data, source), tmp_path / "run")
    new = flat(state.params)
    assert {key.split("/")[0] for key in new} == {"bert", "head"}
    assert {key.split("/")[0] for key in old} == {"bert", "masked_lm", "next_sentence"}
    for key in new.keys() & old.keys():
        np.testing.assert_array_equal(new[key], old[key])
    assert int(state.step) == 0
    assert new["head/kernel"].std() > 0.01
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()
    sizes = {
        part: sum(x.size for key, x in (old | new).items() if key.startswith(part))
        for part in ("bert", "masked")
    }
    said = f"initialized from {source}, step 2: bert ({sizes['bert']:,})\n"
    said += "  new, not there: head (34)\n"
    said += (
        "  left out, not in this model: "
        f"masked_lm ({sizes['masked']:,}), next_sentence (34)"
    )
    assert said in "\n".join(record.message for record in caplog.records)


def test_the_source_chooses_its_checkpoint_and_the_average_begins_there(
    data, pretrained, tmp_path
):
    source, old = pretrained
    shutil.copytree(source, tmp_path / "source")
    theirs = read(source)
    theirs.training.ema_decay, theirs.evaluation.checkpoint = 0.9, "ema"
    store(tmp_path / "source", theirs)
    config = bert("classification", data, tmp_path / "source", training__ema_decay=0.9)
    state = first_state(config, tmp_path / "run")
    params, ema = flat(state.params), flat(state.ema)
    assert params.keys() == ema.keys()
    for key in params:
        np.testing.assert_array_equal(ema[key], params[key])
    for key in params.keys() & old.keys():
        np.testing.assert_array_equal(params[key], old[key] + 1)
    assert all(
        a is not b
        for a, b in zip(
            jax.tree.leaves(state.ema), jax.tree.leaves(state.params), strict=True
        )
    )


def test_a_run_without_scores_has_no_best_step(pretrained):
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint.best_metric = 'loss' \(step 2 has: none\)",
    ):
        transformer_jax.load(str(pretrained[0]), {"evaluation.checkpoint": "best"})


def test_a_resumed_run_needs_the_source_no_more(data, pretrained, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(pretrained[0], source)
    config = bert("classification", data, source, training__steps=4)
    whole = experiment.run(config, tmp_path / "whole").state
    experiment.run(bert("classification", data, source), tmp_path / "parts")
    shutil.rmtree(source)
    parts = experiment.run(config, tmp_path / "parts").state
    assert parameters_sha256(parts.params) == parameters_sha256(whole.params)
    assert transformer_jax.load(str(tmp_path / "parts")).step == 4
    with pytest.raises(
        ConfigError,
        match=(
            r"another --workdir:\n  config.init_from: '.*/source' in the workdir,"
            r" '' now"
        ),
    ):
        experiment.run(bert("classification", data), tmp_path / "parts")


def test_a_chain_of_runs(data, pretrained, tmp_path):
    """Pre-train again, e.g. on longer sequences, and fine-tune that.

    Everything is loaded, then only the encoder.
    """
    workdir, second = saved(
        bert("bert_pretraining", data, pretrained[0], masking__rate=0.3),
        tmp_path / "second",
    )
    assert second.keys() == pretrained[1].keys()
    for key, value in second.items():
        np.testing.assert_array_equal(value, pretrained[1][key])
    third = flat(
        first_state(bert("regression", data, workdir), tmp_path / "third").params
    )
    np.testing.assert_array_equal(
        third["bert/embedding/table"], second["bert/embedding/table"]
    )
    for folder in (workdir, tmp_path / "third"):
        assert (folder / "tokenizer.json").read_bytes() == (
            pretrained[0] / "tokenizer.json"
        ).read_bytes()


@pytest.mark.parametrize("task", ["language_modeling", "sequence_to_sequence"])
def test_every_task_takes_the_tokenizers_and_all_parameters(data, tmp_path, task):
    config = small(task, data)
    source, old = saved(
        ConfigDict(
            config.to_dict() | {"training": config.training.to_dict() | {"seed": 1}}
        ),
        tmp_path,
    )
    config.init_from, config.data.train_split = str(source), "val"
    new = flat(first_state(config, tmp_path / "run").params)
    assert new.keys() == old.keys()
    for key, value in new.items():
        np.testing.assert_array_equal(value, old[key])
    for path in source.glob("tokenizer*.json"):
        assert (tmp_path / "run" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__activation": "relu"},
            "config.model.activation: 'gelu' there, 'relu' here",
        ),
        ({"model__norm": "pre"}, "config.model.norm: 'post' there, 'pre' here"),
        ({"model__d_ff": 23}, "config.model.d_ff: 24 there, 23 here"),
        ({"model__causal": True}, "config.model.causal: False there, True here"),
    ],
)
def test_another_model_is_refused_by_its_keys(
    data, pretrained, tmp_path, changes, message
):
    config = bert("classification", data, pretrained[0], **changes)
    with pytest.raises(ConfigError) as error:
        experiment.run(config, tmp_path / "run")
    said = (
        f"config.init_from = {str(pretrained[0])!r} holds another model; "
        f"set these keys to its values:\n  {message}"
    )
    assert str(error.value) == said


def test_keys_of_another_tokenizer_are_refused(data, pretrained, tmp_path):
    changes = {
        "data__lowercase": True,
        "data__tokenizer": "bert",
        "data__vocabulary": "vocab.txt",
    }
    with pytest.raises(ConfigError) as error:
        experiment.run(
            bert("classification", data, pretrained[0], **changes), tmp_path / "run"
        )
    assert "config.data.lowercase: False there, True here" in str(error.value)
    assert "/vocab.txt': must be empty" in str(error.value)


def test_how_a_model_is_computed_may_differ(data, pretrained, tmp_path):
    changes = {
        "model__unroll": 2,
        "model__remat": "full",
        "model__dropout_rate": 0.0,
        "model__dtype": "bfloat16",
    }
    config = bert("classification", data, pretrained[0], **changes)
    state = first_state(config, tmp_path / "run")
    np.testing.assert_array_equal(
        flat(state.params)["bert/norm/scale"], pretrained[1]["bert/norm/scale"]
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            shutil.rmtree,
            (
                r"config.init_from=\S+: \S+/config.json cannot be read: No such file .*"
                r"; name the workdir of a run, or a Hugging F"
            ),
        ),
        (
            lambda source: shutil.rmtree(source / "checkpoints"),
            r"config.init_from = '\S+': \S+ has no valid checkpoint",
        ),
        (
            lambda source: store(source, small("language_modeling", source)),
            r"config.init_from = '\S+' holds another kind of model; name another run:\n"
            r"  config.model.architecture: 'gpt' there, 'bert' here",
        ),
        (
            lambda source: next(
                (source / "checkpoints" / "2").rglob("d/*")
            ).write_bytes(b""),
            r"config.init_from = '\S+': \S+ has no valid checkpoint",
        ),
        (
            lambda source: (source / "config.json").write_text("{"),
            (
                r"config.init_from=\S+: \S+/config.json is not a JSON object"
                r" \(Expecting .*\): copy it again; name the"
            ),
        ),
        (
            lambda source: store(
                source, bert("bert_pretraining", source, optimizer__b1=2.0)
            ),
            (
                r"config.init_from = '\S+', config.json: config.optimizer.b1 = 2.0:"
                r" must be in"
            ),
        ),
        (
            lambda source: (source / "tokenizer.json").unlink(),
            (
                r"config.init_from = '\S+': \S+tokenizer.json is missing, but the"
                r" checkpoints in this workdir depend on it"
            ),
        ),
    ],
    ids=[
        "missing",
        "no checkpoint",
        "gpt",
        "damaged",
        "config.json",
        "key",
        "tokenizer",
    ],
)
def test_a_source_that_cannot_be_used(data, pretrained, tmp_path, spoil, message):
    """The error comes before the data are read, and the workdir is free for another
    attempt.
    """
    shutil.copytree(pretrained[0], tmp_path / "source")
    spoil(tmp_path / "source")
    config = bert(
        "classification", data, tmp_path / "source", data__directory="nowhere"
    )
    with pytest.raises(ValueError, match=message):
        experiment.run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "tokenizer.json").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_name_that_is_no_folder(data, tmp_path):
    with pytest.raises(
        ConfigError,
        match=(
            r"config.init_from=~no-such-user/run refers to the home of an unknown user"
        ),
    ):
        experiment.run(bert("classification", data, "~no-such-user/run"), tmp_path)


def test_other_tokens_and_other_parameters_are_refused(data, pretrained, tmp_path):
    """This takes a task of one's own: ours copy the tokenizer, and name the encoder
    "bert".
    """
    config = parse(bert("classification", data, pretrained[0]))
    task = make_task(config, pretrained[0])
    source = transfer.source_of(task, make_mesh(config.mesh))
    message = (
        r"it has bert \([\d,]+\), masked_lm \(\d+\), next_sentence \(34\), and this"
        r" model has encoder \(3\): they "
    )
    with pytest.raises(
        ConfigError, match=message + "have nothing in common; name another run"
    ):
        transfer.merge(task, source, {"encoder": {"bias": np.zeros(3)}})

    other = make_task(
        parse(bert("classification", data, data__train_split="val")), tmp_path
    )
    other.fingerprint(training=False)  # trains a tokenizer
    task = make_task(config, tmp_path)
    source = transfer.source_of(task, make_mesh(config.mesh))
    with pytest.raises(
        ConfigError,
        match=(
            r"text tokenizer: sha256 \w{12}… there, \w{12}… here: the parameters"
            r" belong to"
        ),
    ):
        transfer.merge(task, source, {"bert": {"segments": jnp.zeros((2, 16))}})


def test_parameters_of_another_shape_are_named(data, pretrained):
    """This takes a task of one's own: ours have the same shapes wherever the keys
    agree.
    """
    config = parse(bert("classification", data, pretrained[0]))
    task = make_task(config, pretrained[0])
    source = transfer.source_of(task, make_mesh(config.mesh))
    with pytest.raises(ConfigError) as error:
        transfer.merge(task, source, {"bert": {"segments": jnp.zeros((3, 16))}})
    assert (
        str(error.value)
        == f"config.init_from = {str(pretrained[0])!r} has parameters of other shapes;"
        " name a run with the same outputs, or the one that it was started from:\n "
        " bert/segments: (2, 16) there, (3, 16) here"
    )


LABELS = ("even", "odd", "neither")


@pytest.fixture(scope="module")
def classifier(data, pretrained, tmp_path_factory):
    """Workdir of a classifier, and its parameters."""
    config = bert(
        "classification", data, pretrained[0], data__labels=LABELS, training__seed=5
    )
    return saved(config, tmp_path_factory.mktemp("classifier") / "run")


def test_the_head_follows_the_names_of_its_labels(data, classifier, tmp_path, caplog):
    source, old = classifier
    config = bert(
        "classification", data, source, data__labels=("neither", "even", "odd")
    )
    new = flat(first_state(config, tmp_path / "run").params)
    for key in ("head/kernel", "head/bias"):
        np.testing.assert_array_equal(new[key], old[key][..., [2, 0, 1]])
    assert (
        "head is taken in another order: "
        "even, odd, neither there, neither, even, odd here" in caplog.text
    )


@pytest.mark.parametrize(
    ("task", "changes", "there"),
    [
        (
            "classification",
            {"data__labels": ("even", "odd", "other")},
            "even, odd, neither",
        ),
        ("classification", {"data__labels": ("even", "odd")}, "even, odd, neither"),
        ("tagging", {}, "even, odd, neither"),
        ("question_answering", {}, "even, odd, neither"),
        (
            "classification",
            {"data__labels": LABELS, "fine_tuning__feature_layers": 1},
            "others by fine_tuning.feature_layers",
        ),
    ],
)
def test_a_head_with_other_outputs_starts_anew(
    data, classifier, tmp_path, caplog, task, changes, there
):
    source, old = classifier
    new = flat(
        first_state(bert(task, data, source, **changes), tmp_path / "run").params
    )
    assert (
        new["head/kernel"].shape != old["head/kernel"].shape
        or (new["head/kernel"] != old["head/kernel"]).all()
    )
    np.testing.assert_array_equal(new["bert/norm/scale"], old["bert/norm/scale"])
    assert (
        f"head is new, because its outputs are others: {there} there, " in caplog.text
    )


def test_tags_follow_their_types(data, pretrained, tmp_path):
    config = bert("tagging", data, pretrained[0], data__types=("LOC", "PER"))
    source, old = saved(config, tmp_path / "source")
    new = flat(
        first_state(
            bert("tagging", data, source, data__types=("PER", "LOC")), tmp_path / "run"
        ).params
    )
    np.testing.assert_array_equal(
        new["head/kernel"], old["head/kernel"][..., [0, 3, 4, 1, 2]]
    )


def test_tags_of_another_scheme_start_anew(data, pretrained, tmp_path, caplog):
    """There are as many: O, and B and I of two types, or B, I, E and S of one."""
    config = bert("tagging", data, pretrained[0], data__types=("LOC", "PER"))
    source, old = saved(config, tmp_path / "source")
    shutil.copytree(data, tmp_path / "corpus")
    for path in (tmp_path / "corpus").glob("*.conll"):
        path.write_text(path.read_text().replace("B-LOC", "S-LOC"))
    other = {"data__scheme": "bioes", "training__seed": 1}
    config = bert("tagging", tmp_path / "corpus", source, **other)
    new = flat(first_state(config, tmp_path / "run").params)
    assert new["head/kernel"].shape == old["head/kernel"].shape
    assert (new["head/kernel"] != old["head/kernel"]).all()
    assert "head is new, because its outputs are others: O, B-LOC" in caplog.text


def test_the_score_of_a_choice_is_taken_for_other_choices(data, pretrained, tmp_path):
    source, old = saved(
        bert("multiple_choice", data, pretrained[0]), tmp_path / "source"
    )
    columns = ("label", "reversed", "value")
    config = bert("multiple_choice", data, source, data__choice_columns=columns)
    new = flat(first_state(config, tmp_path / "run").params)
    for key in ("head/kernel", "head/bias"):
        np.testing.assert_array_equal(new[key], old[key])


def gpt(task, data, start="", **changes):
    config = small(task, data, "gpt")
    config.training.steps, config.init_from, config.model.vocab_size = (
        2,
        str(start),
        300,
    )
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return config


@pytest.mark.parametrize(("multiple", "rows"), [(1, 303), (8, 304)])
def test_only_the_embeddings_of_special_tokens_are_new_to_a_language_model(
    data, tmp_path, caplog, multiple, rows
):
    """With padding, the tables of 300 and of 303 tokens have the same shape."""
    changes = {"model__vocab_multiple": multiple}
    source, old = saved(
        gpt("language_modeling", data, training__seed=1, **changes), tmp_path / "source"
    )
    fresh = flat(
        first_state(gpt("classification", data, **changes), tmp_path / "fresh").params
    )
    new = flat(
        first_state(
            gpt("classification", data, source, **changes), tmp_path / "run"
        ).params
    )
    assert new.keys() == {f"gpt/{key}" for key in old} | {"head/bias", "head/kernel"}
    for key, value in old.items():
        count = 300 if key == "embedding/table" else None
        np.testing.assert_array_equal(new[f"gpt/{key}"][:count], value[:count])
    table = new["gpt/embedding/table"]
    assert table.shape == (rows, 16)
    np.testing.assert_array_equal(table[300:], fresh["gpt/embedding/table"][300:])
    assert (table[300:303] != 0).all()
    assert "  new: 3 of 303 rows of gpt/embedding/table" in caplog.messages
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()

    second = saved(gpt("classification", data, source, **changes), tmp_path / "second")[
        0
    ]
    caplog.clear()
    third = flat(
        first_state(
            gpt("classification", data, second, **changes), tmp_path / "third"
        ).params
    )
    for key, value in third.items():  # a fine-tuned model passes on all rows
        np.testing.assert_array_equal(value, new[key])
    assert "rows of" not in caplog.text


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("make", [bert, gpt])
def test_the_embeddings_and_the_first_layers_are_taken(
    data, tmp_path, make, count, caplog
):
    before, module = (
        ("bert_pretraining", "bert") if make is bert else ("language_modeling", "gpt")
    )
    source, old = saved(make(before, data, training__seed=1), tmp_path / "source")
    if make is gpt:
        old = {f"gpt/{key}": value for key, value in old.items()}
    fresh = flat(first_state(make("classification", data), tmp_path / "fresh").params)
    config = make("classification", data, source, fine_tuning__transferred_layers=count)
    new = flat(first_state(config, tmp_path / "run").params)
    for key, value in new.items():
        rows = 0
        if "/layers/" in key:
            rows = count
        elif key.startswith(
            tuple(
                f"{module}/{name}"
                for name in ("embedding", "segments", "positions", "norm")
            )
        ):
            rows = 300 if key == "gpt/embedding/table" else len(value)
        np.testing.assert_array_equal(value[rows:], fresh[key][rows:])
        if rows:
            np.testing.assert_array_equal(value[:rows], old[key][:rows])
    assert f"the first {count} of {module}/" in caplog.text


def test_a_language_model_of_another_vocabulary_is_refused(data, tmp_path):
    source, _ = saved(gpt("language_modeling", data), tmp_path / "source")
    with pytest.raises(
        ConfigError, match=r"config.model.vocab_size: 300 there, 299 here"
    ):
        experiment.run(
            gpt("classification", data, source, model__vocab_size=299), tmp_path / "run"
        )


def test_a_run_continues_after_the_run_that_it_started_from_is_gone(
    tmp_path, monkeypatch, caplog
):
    """The recipe reads the keys of the model there, but the run that is continued
    has them too.
    """
    monkeypatch.setattr(workdirs, "_named", [])
    workdirs.claim(tmp_path / "first", load_recipe("configs/bert.py:size=mini"))
    recipe = f"configs/finetune.py:task=trec,from={tmp_path / 'first'}"
    config = load_recipe(recipe)
    workdirs.claim(tmp_path / "run", config)
    (tmp_path / "run" / "checkpoints").mkdir()
    shutil.rmtree(tmp_path / "first")
    with pytest.raises(ConfigError, match="No such file or directory"):
        load_recipe(recipe)
    workdirs.name_on_command_line(str(tmp_path / "run"))
    assert load_recipe(recipe).to_dict() == config.to_dict()
    assert "this run holds everything that it needs" in caplog.text
