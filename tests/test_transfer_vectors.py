"""Runs whose embeddings start with word vectors: where the vectors land, what frozen
ones do, and what a resumed run still needs.
"""

import json
import logging
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import traverse_util

import transformer_jax
from helpers.corpus import write_corpus
from helpers.processes import on_devices
from helpers.runs import run
from helpers.vectors import TABLES, reading_words, width_of, write_vectors
from transformer_jax import experiment, transfer
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.data.files import DataError
from transformer_jax.errors import UserError
from transformer_jax.models.layers import Embedding
from transformer_jax.training.checkpoint import parameters_sha256
from transformer_jax.training.engine import Engine
from transformer_jax.training.initialization import initial_parameters
from transformer_jax.training.sharding import make_mesh

# words of the corpus in all languages, not all of them, and one that it lacks
WORDS = [f"{language}{vowel}k" for language in "edf" for vowel in "aeiou"] + ["zebra"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "corpus"
    write_corpus(directory)
    return directory


def flat(tree):
    return {
        key: np.asarray(leaf)
        for key, leaf in traverse_util.flatten_dict(tree, sep="/").items()
    }


def given(config, tmp_path, sections=("vectors",), **options):
    """Name a file of vectors in each section. Return the vectors of its words."""
    vectors = {}
    for seed, section in enumerate(sections):
        path = tmp_path / f"{section}.txt"
        vectors[section] = write_vectors(path, WORDS, width_of(config), seed)
        config[section].update({"file": str(path), **options})
    return vectors


def begun(task):
    """Return the parameters that the model draws, and those that a run begins with."""
    mesh = make_mesh(task.config.mesh, jax.devices()[:1])
    drawn = initial_parameters(task, mesh)
    return flat(drawn), flat(transfer.with_files(task, drawn))


@pytest.mark.parametrize(("task", "architecture"), TABLES)
def test_each_vector_is_what_the_model_reads_for_its_word(
    data, tmp_path, task, architecture
):
    """All other parameters, and rows, have the values that they have without a file."""
    tables = TABLES[task, architecture]
    config = reading_words(task, data, architecture)
    vectors = given(config, tmp_path, tables)
    parsed = parse(config)
    task = make_task(parsed, tmp_path / "run")
    drawn, params = begun(task)
    changed = {path for path in params if (params[path] != drawn[path]).any()}
    assert changed == set(tables.values())
    paths = {table.section: table.path for table in parsed.given_tables}
    assert paths == tables
    for table in parsed.given_tables:
        tokenizer = task.corpus.tokenizers[table.stream]
        vectors_of = vectors[table.section]
        values = params[table.path]
        found = 0
        for i in range(len(values)):
            (word,) = tokenizer.tokens([i])
            if i < tokenizer.size and word in vectors_of:
                found += 1
                read = looked_up(values, i, scale=table.vectors.factor != 1)
                np.testing.assert_allclose(read, vectors_of[word], rtol=1e-6)
            else:
                np.testing.assert_array_equal(values[i], drawn[table.path][i])
        assert found == 5


def looked_up(values, i, scale):
    """Return the vector of the id `i` in an embedding with the table `values`."""
    embedding = Embedding(*values.shape, scale=scale)
    ids = np.array([[i]])
    return embedding.apply({"params": {"table": values}}, ids)[0, 0]


@pytest.mark.parametrize(("task", "architecture"), TABLES)
def test_the_factor_is_that_of_the_model(data, tmp_path, task, architecture):
    """It is that of `Embedding.scale`, read from the modules that `init` makes."""
    config = reading_words(task, data, architecture)
    scales = []

    def note(next_function, arguments, options, context):
        if isinstance(context.module, Embedding):
            scales.append(context.module.scale)
        return next_function(*arguments, **options)

    made = make_task(parse(config), None)
    with nn.intercept_methods(note):
        jax.eval_shape(made.init, jax.random.key(0))
    factor = parse(config).model.token_vectors.factor
    assert scales
    assert {width_of(config) ** 0.5 if scale else 1.0 for scale in scales} == {factor}


def test_what_is_missing_may_start_with_the_mean(data, tmp_path):
    """Rows beyond the vocabulary of the tokenizer stay as they are drawn."""
    config = reading_words("classification", data)
    vectors = given(config, tmp_path, missing="mean")["vectors"]
    task = make_task(parse(config), tmp_path / "run")
    drawn, params = begun(task)
    path = "bert/embedding/table"
    size = task.corpus.tokenizers["text"].size
    mean = np.mean([vectors[f"f{vowel}k"] for vowel in "aeiou"], axis=0)
    for special in range(4):
        np.testing.assert_allclose(params[path][special], mean, rtol=1e-5, atol=1e-7)
    assert size < len(params[path])
    np.testing.assert_array_equal(params[path][size:], drawn[path][size:])


PROGRAM = """
import json, jax, numpy as np
from ml_collections import ConfigDict
from transformer_jax import transfer
from transformer_jax.config import make_task, parse
from transformer_jax.training.initialization import initial_parameters
from transformer_jax.training.sharding import make_mesh

tables = []
for fsdp in (1, 2):
    raw = ConfigDict(CONFIG)
    raw.mesh.fsdp = fsdp
    task = make_task(parse(raw), WORKDIR)
    mesh = make_mesh(task.config.mesh, jax.devices()[:fsdp])
    params = initial_parameters(task, mesh)
    before = params["bert"]["embedding"]["table"]
    table = transfer.with_files(task, params)["bert"]["embedding"]["table"]
    assert table.sharding == before.sharding
    tables.append(table)
assert not tables[1].is_fully_replicated
print(json.dumps([np.asarray(table).tolist() for table in tables]))
"""


def test_a_table_on_two_devices(data, tmp_path):
    config = reading_words("classification", data)
    given(config, tmp_path)
    program = PROGRAM.replace("CONFIG", repr(config.to_dict()))
    program = program.replace("WORKDIR", repr(str(tmp_path / "run")))
    on_one, on_two = json.loads(on_devices(2, program))
    assert on_two == on_one


FAST = {
    "optimizer__schedule": "constant",
    "optimizer__warmup_steps": 0,
    "optimizer__weight_decay": 0.1,
    "optimizer__learning_rate": 0.01,
}


@pytest.mark.parametrize(
    ("task", "architecture", "frozen"),
    [
        ("classification", "bert", True),
        ("classification", "gpt", True),
        ("language_modeling", "recurrent_lm", False),
        ("sequence_to_sequence", "recurrent", True),
    ],
)
def test_only_frozen_vectors_keep_their_values(
    data, tmp_path, task, architecture, frozen
):
    """Weight decay would move them without a gradient. With two files, only the second
    is frozen. GPT's three special tokens follow the vocabulary, and are trained.
    """
    tables = TABLES[task, architecture]
    config = reading_words(task, data, architecture, **FAST)
    *_, section = tables
    given(config, tmp_path, tables)
    config[section].frozen = frozen
    task = make_task(parse(config), tmp_path / "run")
    engine = Engine(task, jax.devices()[:1])
    params = transfer.with_files(task, initial_parameters(task, engine.mesh))
    before = flat(params)
    state = engine.begin(params)
    for number in range(3):
        state, metrics = engine.step(state, task.dummy_batch(8, 6, seed=number))
        assert metrics["skipped"] == 0
    size = config.model.get("vocab_size", config.model.get("target_vocab_size"))
    for path, value in flat(state.params).items():
        held = size if frozen and path == tables[section] else 0
        assert (value[:held] == before[path][:held]).all()
        if held:
            assert len(value) - held == 3 * (architecture == "gpt")
            assert (value[held:] != before[path][held:]).all()
        else:
            assert (value != before[path]).any(), path


def test_a_workdir_needs_the_file_no_more(data, tmp_path, caplog):
    """The run that is continued ends as the whole run does, and it can be evaluated.

    The log counts words, when the file is read, and frozen parameters.
    """
    caplog.set_level(logging.INFO)
    config = reading_words("classification", data, training__steps=4)
    given(config, tmp_path, frozen=True)
    whole = run(config, tmp_path / "whole")
    log = "\n".join(caplog.messages)
    total = sum(x.size for x in jax.tree.leaves(whole.params))
    held = config.model.vocab_size * config.model.d_model
    assert f"{total:,} parameters, of which {held:,} are frozen on " in log
    file = config.vectors.file
    assert f"vectors: {file} has 5 of the 24 tokens of the vocabulary; the other" in log
    run(config, tmp_path / "parts", training__steps=2)
    (tmp_path / "vectors.txt").unlink()
    parts = run(config, tmp_path / "parts")
    assert parameters_sha256(parts.params) == parameters_sha256(whole.params)
    predictor = transformer_jax.load(str(tmp_path / "parts"))
    assert predictor.evaluate()["step"] == 4
    assert len(predictor.predict(["fak fek"])) == 1
    shutil.rmtree(tmp_path / "parts" / "checkpoints")
    with pytest.raises(DataError, match=r"vectors.txt cannot be read: No such file"):
        run(config, tmp_path / "parts")


def test_a_run_keeps_its_file_and_its_options(data, tmp_path, monkeypatch):
    """A relative path stands for the same file in every working directory."""
    config = reading_words("classification", data)
    given(config, tmp_path)
    config.vectors.file = "vectors.txt"
    monkeypatch.chdir(tmp_path)
    run(config, tmp_path / "run")
    config.vectors.file = str(tmp_path / "vectors.txt")
    run(config, tmp_path / "run")
    for key, value, shown in (
        ("file", "other.txt", f"'{tmp_path}/vectors.txt' in the workdir, '"),
        ("frozen", True, "False in the workdir, True now"),
        ("missing", "zero", "'random' in the workdir, 'zero' now"),
    ):
        with pytest.raises(ConfigError) as error:
            run(config, tmp_path / "run", **{f"vectors__{key}": value})
        assert "holds another experiment; choose another --workdir:" in str(error.value)
        assert f"config.vectors.{key}: {shown}" in str(error.value)


def test_an_unusable_file_is_refused_before_a_tokenizer_is_trained(data, tmp_path):
    config = reading_words("classification", data)
    given(config, tmp_path)
    config.model.d_model = 24
    with pytest.raises(
        UserError, match=r"have 16 numbers, but config.model.d_model = 24"
    ):
        experiment.run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "tokenizer.json").exists()


def test_a_model_without_the_embedding_is_refused(data, tmp_path, monkeypatch):
    config = reading_words("language_modeling", data)
    given(config, tmp_path)
    task = make_task(parse(config), tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        transfer.with_files(task, {"decoder": {}})
    assert str(error.value) == (
        "the model has no embedding embedding/table for the text: "
        "leave out the file of its vectors"
    )
