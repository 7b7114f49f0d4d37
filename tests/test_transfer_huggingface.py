"""Runs that start from a Hugging Face folder."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax
from helpers.bert_folders import PRETRAINING, D, L, V, drawn, numbered, save, shapes
from helpers.corpus import write_corpus
from helpers.parity import flat
from helpers.runs import small
from transformer_jax import experiment, transfer
from transformer_jax.config import ConfigError, load_recipe, make_task, parse
from transformer_jax.interop import huggingface
from transformer_jax.training.initialization import abstract_parameters
from transformer_jax.training.sharding import make_mesh
from transformer_jax.workdir import store


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starting") / "corpus"
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("starting") / "theirs", drawn(PRETRAINING))


def starting(task, data, folder, **changes):
    config = small(task, data)
    config.update_from_flattened_dict(transfer.keys_for(str(folder)))
    config.training.steps = 2
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return config


def first_parameters(config, workdir):
    """Return the parameters that a run begins with, and those that it would have
    begun with otherwise: all 7.
    """
    workdir.mkdir()
    task = make_task(parse(config), workdir)
    mesh = make_mesh(task.config.mesh)
    fresh = jax.tree.map(
        lambda x: jnp.full(x.shape, 7.0), abstract_parameters(task, mesh)
    )
    source = transfer.source_of(task, mesh)
    return flat(transfer.merge(task, source, fresh)), flat(fresh)


def test_a_run_starts_with_the_encoder_and_the_tokenizer(
    data, folder, tmp_path, caplog
):
    config = starting("classification", data, folder)
    new, fresh = first_parameters(config, tmp_path / "run")
    theirs = flat(huggingface.read(folder).params())
    for path, value in new.items():
        np.testing.assert_array_equal(
            value,
            fresh[path] if path.startswith("head/") else theirs[path],
            err_msg=path,
        )
    said = "\n".join(record.message for record in caplog.records)
    count = sum(
        value.size for path, value in theirs.items() if path.startswith("bert/")
    )
    assert f"initialized from {folder}, BertForPreTraining: bert ({count:,})\n" in said
    assert f"  new, not there: head ({2 * D + 2})\n" in said
    assert re.search(
        r"  left out, not in this model: masked_lm \([\d,]+\), next_sentence \(44\)",
        said,
    )
    assert f"tokenizer.json taken from {folder}" in said
    tokenizer = make_task(parse(config), tmp_path / "run").corpus.tokenizers["text"]
    assert tokenizer.encode_batch(["Abc"]) == [[5, 32, 33]]  # a ##b ##c, in lower case


def test_train_and_predict(data, folder, tmp_path):
    config = starting("tagging", data, folder)
    run = experiment.run(config, tmp_path / "run")
    assert int(run.state.step) == 2
    predictor = transformer_jax.load(str(tmp_path / "run"))
    assert predictor.predict([{"words": "ek at"}])[0]["words"] == ["ek", "at"]


@pytest.mark.parametrize("count", [0, 1])
def test_only_the_first_layers(data, folder, tmp_path, count):
    config = starting(
        "classification", data, folder, fine_tuning__transferred_layers=count
    )
    new, fresh = first_parameters(config, tmp_path / "run")
    theirs, path = (
        flat(huggingface.read(folder).params()),
        "bert/encoder/layers/self_attention/query/kernel",
    )
    np.testing.assert_array_equal(new[path][:count], theirs[path][:count])
    np.testing.assert_array_equal(new[path][count:], fresh[path][count:])
    assert count < L
    np.testing.assert_array_equal(
        new["bert/embedding/table"], theirs["bert/embedding/table"]
    )
    np.testing.assert_array_equal(
        new["bert/pooler/kernel"], fresh["bert/pooler/kernel"]
    )


def test_tables_may_be_padded_here(data, folder, tmp_path):
    new, _ = first_parameters(
        starting("classification", data, folder, model__vocab_multiple=8),
        tmp_path / "run",
    )
    table = new["bert/embedding/table"]
    assert table.shape == (64, D)
    np.testing.assert_array_equal(
        table[:V], drawn(PRETRAINING)["bert.embeddings.word_embeddings.weight"]
    )
    assert not table[V:].any()


def test_a_masked_language_model_lacks_parts(data, tmp_path, caplog):
    tensors = {
        name: x
        for name, x in drawn(PRETRAINING).items()
        if "pooler" not in name and "seq_rel" not in name
    }
    folder = save(tmp_path / "theirs", tensors, architectures=["BertForMaskedLM"])
    new, fresh = first_parameters(
        starting("bert_pretraining", data, folder), tmp_path / "run"
    )
    np.testing.assert_array_equal(
        new["masked_lm/bias"], tensors["cls.predictions.bias"]
    )
    np.testing.assert_array_equal(
        new["bert/pooler/kernel"], fresh["bert/pooler/kernel"]
    )
    assert (
        f"  new, not there: bert ({D * D + D}), next_sentence ({2 * D + 2})"
        in caplog.messages
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__d_ff": 29},
            (
                r"holds another model; set these keys to its values:\n "
                r" config.model.d_ff: 23 there, 29 her"
            ),
        ),
        (
            {"data__vocabulary": "vocab.txt"},
            "config.data.vocabulary = 'vocab.txt': must be empty",
        ),
        ({"model__norm": "pre"}, "config.model.norm: 'post' there, 'pre' here"),
    ],
)
def test_other_keys_are_refused(data, folder, tmp_path, changes, message):
    config = parse(starting("classification", data, folder, **changes))
    with pytest.raises(ConfigError, match=message) as error:
        transfer.source_of(make_task(config, tmp_path), make_mesh(config.mesh))
    assert f"config.init_from = {str(folder)!r}" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory; copy it again"),
        ("{", r"is not a JSON object \(Expecting .*\): copy it again"),
        ("3", r"is not a JSON object \(int\): copy it again"),
        ('{"vocab_size": 3}', "has neither a task nor a model_type"),
    ],
)
def test_what_is_neither_a_run_nor_a_hugging_face_folder(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    remedy = (
        "; name the workdir of a run, or a Hugging Face folder, "
        "which has config.json, model.safetensors and a"
    )
    with pytest.raises(
        ConfigError,
        match=rf"from={tmp_path}: {tmp_path}/config.json {message}{remedy}",
    ):
        transfer.keys_for(str(tmp_path))


def test_the_head_of_a_folder_follows_the_names_of_its_labels(data, tmp_path):
    tensors, labels = drawn(shapes(("classifier", (3, D)))), numbered(["a", "b", "c"])
    folder = save(
        tmp_path / "theirs",
        tensors,
        architectures=["BertForSequenceClassification"],
        **labels,
    )
    config = starting("classification", data, folder, data__labels=("c", "a", "b"))
    new, _ = first_parameters(config, tmp_path / "run")
    np.testing.assert_array_equal(
        new["head/kernel"], tensors["classifier.weight"][[2, 0, 1]].T
    )
    np.testing.assert_array_equal(
        new["head/bias"], tensors["classifier.bias"][[2, 0, 1]]
    )


def test_the_head_is_new_if_a_folder_has_other_labels(data, tmp_path, caplog):
    tensors, labels = drawn(shapes(("classifier", (2, D)))), numbered(["a", "b"])
    folder = save(
        tmp_path / "theirs",
        tensors,
        architectures=["BertForSequenceClassification"],
        **labels,
    )
    new, fresh = first_parameters(
        starting("classification", data, folder), tmp_path / "run"
    )
    np.testing.assert_array_equal(new["head/kernel"], fresh["head/kernel"])
    assert (
        "head is new, because its outputs are others: a, b there, even, odd here"
        in caplog.text
    )


def test_a_damaged_folder_is_named(data, folder, tmp_path):
    theirs = save(tmp_path / "theirs", drawn(PRETRAINING))
    config = starting("classification", data, theirs)
    (theirs / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(
        ConfigError,
        match=(
            r"config.init_from = '.*theirs': .*model.safetensors is damaged or"
            r" incomplete"
        ),
    ):
        first_parameters(config, tmp_path / "run")


def test_a_tokenizer_that_is_larger_than_the_embedding(data, folder, tmp_path):
    theirs = save(tmp_path / "theirs", drawn(PRETRAINING))
    with (theirs / "vocab.txt").open("a") as file:
        file.write("\n".join(f"word{i}" for i in range(7)))
    with pytest.raises(
        ValueError,
        match=r"vocab.txt has 64 ids, but .*config.json says vocab_size = 61",
    ):
        transfer.keys_for(str(theirs))


def test_the_home_directory_in_the_name_of_a_folder(data, folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert transfer.keys_for("~/theirs")["init_from"] == str(folder)
    config = starting("classification", data, folder, init_from="~/theirs")
    assert parse(config).init_from == str(folder)


def test_the_recipe_takes_everything_from_the_folder(data, folder, tmp_path):
    config = load_recipe(f"configs/finetune.py:task=sst2,from={folder}")
    assert (config.init_from, config.model.vocab_size, config.model.num_segments) == (
        str(folder),
        V,
        3,
    )
    assert (config.data.tokenizer, config.data.lowercase, config.data.max_length) == (
        "bert",
        True,
        37,
    )
    assert config.optimizer.learning_rate == 3e-5
    config.data.directory = str(data)
    parse(config)


def test_the_recipe_takes_everything_from_a_run(data, folder, tmp_path):
    source = small("bert_pretraining", data)
    source.data.tokenizer, source.model.activation, source.model.dtype = (
        "bert",
        "relu",
        "bfloat16",
    )
    source.model.num_layers, source.model.d_model = 4, 256
    store(tmp_path, source)
    config = load_recipe(f"configs/finetune.py:task=squad,from={tmp_path}")
    assert (config.init_from, config.model.activation, config.model.dtype) == (
        str(tmp_path),
        "relu",
        "float32",
    )
    assert config.optimizer.learning_rate == 3e-4  # that of mini


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "size=base,from={}",
            "from=… determines the model: leave out size, model and cased",
        ),
        (
            "cased,from={}",
            "from=… determines the model: leave out size, model and cased",
        ),
        (
            "from=nowhere",
            (
                "from=nowhere: nowhere/config.json cannot be read: "
                "No such file or directory; .* name the workdir of a run,"
            ),
        ),
    ],
)
def test_words_that_do_not_go_together(folder, words, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(f"configs/finetune.py:{words.format(folder)}")
