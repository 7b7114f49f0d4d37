"""Exported programs give what a run gives, for any number of rows and any length,
without this package.
"""

import json
import re
import shutil
import subprocess
import sys

import flax.linen as nn
import jax
import numpy as np
import pytest

import transformer_jax
from helpers import ROOT
from helpers.abusing import refused
from helpers.forked import script
from helpers.runs import small
from transformer_jax import exporting
from transformer_jax.config import make_task, parse
from transformer_jax.errors import UserError
from transformer_jax.verification import ROUNDING

pytest.importorskip("flatbuffers", reason="JAX writes programs with flatbuffers")
SLOW = pytest.mark.slow
GREEDY = {"decoding.beam_size": 1}
RULES = {
    "decoding.no_repeat_ngram": 2,
    "decoding.repetition_penalty": 1.2,
    "decoding.max_ratio": 1.5,
}
SAMPLED = {
    "decoding.temperature": 1.0,
    "decoding.n_best": 2,
    "decoding.stop_strings": ("a",),
}
ORDERS = {"data.second_column": "reversed", "fine_tuning.both_orders": True}
SCORES = {"scored": True}
# task, architecture, changed keys, options of the program
CASES = [
    ("classification", None, {}, {}),
    ("sequence_to_sequence", None, {}, {}),
    ("language_modeling", None, SAMPLED, {}),
    ("language_modeling", None, {}, SCORES),
    pytest.param("sequence_to_sequence", None, GREEDY | RULES, {}, marks=SLOW),
    pytest.param("sequence_to_sequence", "recurrent", {}, {}, marks=SLOW),
    pytest.param("sequence_to_sequence", "convs2s", {}, {}, marks=SLOW),
    pytest.param("language_modeling", "recurrent_lm", {}, {}, marks=SLOW),
    pytest.param("bert_pretraining", None, {}, {}, marks=SLOW),
    pytest.param("bert_pretraining", None, {}, SCORES, marks=SLOW),
    pytest.param("bert_pretraining", None, {}, {"pooling": "mean"}, marks=SLOW),
    pytest.param("electra_pretraining", None, {}, {}, marks=SLOW),
    pytest.param("electra_pretraining", None, {}, {"pooling": "cls"}, marks=SLOW),
    pytest.param("denoising", None, {}, {}, marks=SLOW),
    pytest.param("regression", "gpt", ORDERS, {}, marks=SLOW),
    pytest.param("multiple_choice", None, {}, {}, marks=SLOW),
    pytest.param("tagging", None, {}, {}, marks=SLOW),
    pytest.param("question_answering", None, {}, {}, marks=SLOW),
    pytest.param("several_decoders", None, {}, {}, marks=SLOW),
    pytest.param("transcription", None, {}, {}, marks=SLOW),
]


def task_and_params(name, corpus, architecture=None, changes=()):
    config = small(name, corpus, architecture)
    config.update_from_flattened_dict(dict(changes))
    task = make_task(parse(config), corpus.parent / "run")
    return task, nn.unbox(jax.jit(task.init)(jax.random.key(0)))


@pytest.mark.parametrize(("name", "architecture", "changes", "options"), CASES)
def test_the_program_gives_what_the_task_gives(
    name, architecture, changes, options, corpus
):
    task, params = task_and_params(name, corpus, architecture, changes)
    assert exporting.difference(task, params, **options) <= ROUNDING


def test_a_difference_is_noticed(corpus, monkeypatch):
    task, params = task_and_params("classification", corpus)
    original = exporting.program

    def other(task, params, *options):
        return original(task, jax.tree.map(lambda x: 1.01 * x, params), *options)

    monkeypatch.setattr(exporting, "program", other)
    assert exporting.difference(task, params) > ROUNDING


def test_it_has_what_it_reads_and_any_platform(corpus):
    task, params = task_and_params("tagging", corpus)
    program = exporting.program(task, params, ["cpu", "tpu"])
    exported, parameters, inputs, limits = program
    assert exported.platforms == ("cpu", "tpu")
    shapes = {name: str(shape.shape) for name, shape in inputs.items()}
    assert shapes == {"text": "(rows, length)", "text_length": "(rows,)"}
    assert limits == {"length": (2, task.config.model.max_length)}
    assert "bert/embedding/table" in parameters
    assert not any("pooler" in name for name in parameters)


# Follows the program of docs/export.md.
MORE = """
import sys
import numpy as np
outputs = translate(np.load("arrays.npz"))
tokens, scores = (np.asarray(outputs[name]).tolist() for name in ("tokens", "scores"))
known = {"transformer_jax", "flax", "optax", "orbax"} & set(sys.modules)
print(json.dumps([tokens, scores, translate.about, sorted(known)]))
"""


def test_a_file_is_used_without_this_package(trained, tmp_path):
    file = tmp_path / "dates.npz"
    done = script("export", f"--workdir={trained}", f"--output={file}")
    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()
    predictor = transformer_jax.load(trained)
    batches = predictor.task.batches_of(["ab ba", "b a b"])
    batch = batches.load(batches.plan.batch(0))
    arrays = {name: batch[name] for name in ("source", "source_length")}
    np.savez(tmp_path / "arrays.npz", **arrays)
    shutil.copy(ROOT / "transformer_jax" / "exported.py", tmp_path)
    page = (ROOT / "docs" / "export.md").read_text()
    (block,) = re.findall(r"```python\n(# translate.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "translate.py").write_text(block + MORE)
    alone = subprocess.run(
        [sys.executable, "translate.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    _, line = alone.stdout.splitlines()
    tokens, scores, about, known = json.loads(line)
    evaluate = jax.jit(predictor.task.evaluate, static_argnums=2)
    _, expected = evaluate(predictor.params, batch, False)
    assert tokens == np.asarray(expected["tokens"]).tolist()
    np.testing.assert_allclose(scores, expected["scores"], rtol=ROUNDING)
    assert about["inputs"]["source"] == {"dtype": "int32", "shape": ["rows", "length"]}
    assert (about["task"], about["step"]) == ("sequence_to_sequence", predictor.step)
    assert known == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output=-"], "name one, e.g. --output=run.npz"),
        (["--output=run.npz", "--platforms=gpu"], "must name one or several of cpu"),
        (["--output=run.npz", "--platforms="], "must name one or several of cpu"),
        (["--output=run.npz", "--score"], "leave out --score"),
        (["--output=run.npz", "--embeddings=cls"], "does not embed texts"),
    ],
)
def test_what_cannot_be_exported_is_refused(options, message, trained, tmp_path):
    done = script("export", f"--workdir={trained}", *options, cwd=tmp_path)
    assert message in refused(done)
    assert not list(tmp_path.glob("*.npz"))


def test_flatbuffers_must_be_installed(monkeypatch):
    monkeypatch.setattr(exporting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install flatbuffers"):
        exporting.check(["cpu"])
