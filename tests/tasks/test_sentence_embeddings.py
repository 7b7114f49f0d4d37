"""Sentence embeddings against a mean of the encoder's outputs, text by text."""

import json

import jax
import numpy as np
import pytest

import transformer_jax
from helpers import bert_folders, encoder_folders
from helpers.abusing import refused
from helpers.forked import script
from helpers.oracle import relative
from helpers.processes import on_devices
from helpers.runs import small
from transformer_jax import conversion
from transformer_jax.config import make_task, parse
from transformer_jax.errors import UserError

LINES = ["ab cd", "", "ab cd ef gh ab cd ef gh", "x"]


def bert(folder):
    return bert_folders.save(folder, bert_folders.drawn(bert_folders.PRETRAINING))


def electra(folder):
    tensors = encoder_folders.discriminator()
    return encoder_folders.save(folder, "Electra", "ForPreTraining", tensors)


@pytest.fixture(
    scope="module", params=[bert, pytest.param(electra, marks=pytest.mark.slow)]
)
def workdir(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("embeddings")
    config = conversion.config_for(str(request.param(folder / "theirs")))
    config.evaluation.batch_size = 8
    conversion.to_workdir(config, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def predictor(workdir):
    return transformer_jax.load(workdir)


def test_vectors_are_pooled_outputs_without_padding(predictor):
    task = predictor.task
    tokenizer = task.corpus.tokenizers["text"]

    @jax.jit
    def outputs(ids):
        def encoded(model):
            return model.bert.encode(ids, ids >= 0)

        return task.network.model.apply({"params": predictor.params}, method=encoded)

    mean = predictor.embed(LINES)
    cls = predictor.embed([{"text": line} for line in LINES], "cls")
    assert mean.dtype == np.float32
    assert mean.shape == (4, task.config.model.d_model)
    for line, in_mean, at_cls in zip(LINES, mean, cls, strict=True):
        (ids,) = tokenizer.encode_batch([line])
        ids = np.array([[tokenizer.bos_id, *ids, tokenizer.eos_id]], np.int32)
        x = np.asarray(outputs(ids), np.float64)[0]
        assert relative(in_mean, x.mean(axis=0)) < 1e-5
        assert relative(at_cls, x[0]) < 1e-5
    # the rows of a batch, and its length, are the same without the others
    np.testing.assert_array_equal(predictor.embed(LINES[:1]), mean[:1])
    assert predictor.embed([]).shape == (0, task.config.model.d_model)


def test_the_script_writes_the_vectors(predictor, workdir, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(LINES) + "\n")
    arguments = [f"--workdir={workdir}", f"--input={lines}", "--embeddings=cls"]
    done = script("predict", *arguments)
    assert done.returncode == 0, done.stderr.decode()
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(row) for row in rows] == [["embedding"]] * 4
    found = np.array([row["embedding"] for row in rows])
    assert relative(found, predictor.embed(LINES, "cls")) < 1e-5
    assert "leave out --score or --embed" in refused(
        script("predict", *arguments, "--score")
    )
    assert "leave out --score, --embed" in refused(
        script("predict", *arguments, "--stream")
    )
    assert "leave out --score or --embed" in refused(
        script("export", *arguments[::2], "--score", f"--output={tmp_path / 'x.npz'}")
    )


@pytest.mark.slow
def test_eight_devices_give_the_vectors_of_one(predictor, workdir):
    program = f"""
import json
import transformer_jax
predictor = transformer_jax.load({str(workdir)!r}, {{"mesh.data": -1}})
print(json.dumps(predictor.embed({LINES!r}).tolist()))
"""
    assert relative(json.loads(on_devices(8, program)), predictor.embed(LINES)) < 1e-5


def test_another_pooling_is_refused(predictor, corpus, tmp_path):
    with pytest.raises(UserError, match="'max' is no pooling: must be one of mean, cl"):
        predictor.embed(LINES, "max")
    config = small("bert_pretraining", corpus)
    config.model.causal = True
    config.masking.next_sentence = False
    task = make_task(parse(config), tmp_path / "run")
    with pytest.raises(UserError, match=r"model.causal.*use 'mean'"):
        task.embedder("cls")
