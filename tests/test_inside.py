"""Looking inside the models of runs: what is captured and replaced, the logit lens,
gradient × input, and what users may get wrong.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax
from helpers.corpus import write_corpus
from helpers.runs import parameters, small
from transformer_jax import inside
from transformer_jax.config import make_task, parse
from transformer_jax.models.masks import CAUSAL, padding
from transformer_jax.predictor import Predictor

# task → architecture, changed keys
RUNS = {
    "language_modeling": (None, {"model.num_layers": 3, "model.norm": "pre"}),
    "sequence_to_sequence": (  # T5
        None,
        {
            "model.norm": "pre",
            "model.norm_type": "rms_norm",
            "model.positions": "relative_bias",
            "model.output_scale": True,
        },
    ),
    "bert_pretraining": (None, {}),
    "classification": (None, {}),
    "recurrent": ("recurrent", {}),
}
RECORDS = {
    "sequence_to_sequence": [{"en": "ek at", "de": "dk"}, {"en": "ek", "de": "at ek"}],
    "recurrent": [{"en": "ek at", "de": "dk"}, {"en": "ek", "de": "at ek"}],
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function from the name of a run to the run, with random parameters, and
    two records.
    """
    folder = tmp_path_factory.mktemp("inside")
    write_corpus(folder / "corpus")

    @functools.cache
    def loaded(name):
        architecture, changes = RUNS[name]
        task = name if name in RUNS and architecture is None else "sequence_to_sequence"
        config = small(task, folder / "corpus", architecture)
        config.update_from_flattened_dict(changes)
        run = object.__new__(Predictor)
        run.config = parse(config)
        run.task = make_task(run.config, folder / name)
        run.params = parameters(run.task)
        return run, RECORDS.get(name, ["ek at ek", "at"])

    return loaded


@pytest.mark.parametrize("name", ["language_modeling", "recurrent"])
def test_the_output_is_that_of_the_task(load, name):
    """Up to rounding, because the task is compiled as a whole."""
    run, records = load(name)
    batch = inside._of(run).batch(records)
    expected = jax.jit(run.task.forward)(run.params, batch).logits
    logits = transformer_jax.patch(run, records, {})
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sequence_to_sequence", "recurrent"])
def test_the_captured_values_change_nothing(load, name):
    run, records = load(name)
    known = transformer_jax.activations(run, records)
    chosen = [n for n in known if not n.endswith("/input")]
    own = transformer_jax.capture(run, records, chosen)
    assert [known[name] for name in chosen] == [x.shape for x in own.values()]
    expected = transformer_jax.patch(run, records, {})
    np.testing.assert_array_equal(transformer_jax.patch(run, records, own), expected)


def test_shared_modules_have_a_name_for_each_call(load):
    """One table embeds source and target."""
    run, records = load("sequence_to_sequence")
    names = ["target_embedding", "target_embedding#2", "source", "target"]
    found = [*transformer_jax.capture(run, records, names).values()]
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[3])


def test_a_layer_of_another_record_gives_its_output(load):
    run, records = load("language_modeling")
    last = "decoder/layers/2"
    captured = transformer_jax.capture(run, records, "decoder/layers/*")
    assert [*captured] == ["decoder/layers/0", "decoder/layers/1", last]
    logits = transformer_jax.patch(run, records, {last: captured[last][::-1]})
    expected = transformer_jax.patch(run, records, {})
    np.testing.assert_array_equal(logits, expected[::-1])


def test_a_function_changes_one_layer_only(load):
    run, records = load("language_modeling")
    zero = {"decoder/layers/1/feed_forward": jnp.zeros_like}
    names = [f"decoder/layers/{i}" for i in range(2)]
    names.append("decoder/layers/1/self_attention_residual/after")
    before = transformer_jax.capture(run, records, names)
    after = transformer_jax.capture(run, records, names, zero)
    np.testing.assert_array_equal(after[names[0]], before[names[0]])
    np.testing.assert_array_equal(after[names[1]], before[names[2]])
    assert abs(after[names[1]] - before[names[1]]).max() > 0.01


def direct(model, vectors, batch):
    """Return the logits of a GPT that reads vectors (B, T, D)."""
    valid = jnp.arange(vectors.shape[1])[None] < batch["text_length"][:, None]
    x = vectors + model.positions(vectors.shape[1], 0)
    return model.head()(model.decoder(x, CAUSAL & padding(valid)))


def of_stream(model, x):
    return model.head()(model.decoder.final_norm(x))


def test_the_lens_is_the_final_norm_and_the_head(load):
    run, records = load("language_modeling")
    lens = transformer_jax.logit_lens(run, records)
    names = ["decoder/layers/0/input", *(f"decoder/layers/{i}" for i in range(3))]
    assert [*lens] == names
    logits = transformer_jax.patch(run, records, {})
    np.testing.assert_array_equal(lens[names[-1]], logits)
    streams = transformer_jax.capture(run, records, names)
    for name in names:
        expected = run.task.model.apply(
            {"params": run.params}, streams[name], method=of_stream
        )
        np.testing.assert_allclose(lens[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sequence_to_sequence", "bert_pretraining"])
def test_the_lens_of_the_last_layer_is_the_model(load, name):
    run, records = load(name)
    lens = transformer_jax.logit_lens(run, records)
    last = [*lens][-1]
    assert last.endswith("layers/1")
    logits = transformer_jax.patch(run, records, {})
    np.testing.assert_array_equal(lens[last], logits)
    assert all(value.shape == logits.shape for value in lens.values())


def test_gradient_times_input_is_the_derivative_of_the_logit(load):
    """By `jax.grad` of the model without names."""
    run, records = load("language_modeling")
    batch = inside._of(run).batch(records)
    vectors = transformer_jax.capture(run, records, "embedding")["embedding"]
    logits = transformer_jax.patch(run, records, {})
    chosen = jnp.asarray(logits.argmax(axis=-1))

    def logit(vectors, row, position):
        variables = {"params": run.params}
        out = run.task.model.apply(variables, vectors, batch, method=direct)
        return out[row, position, chosen[row, position]]

    gradient = jax.jit(jax.grad(logit))
    found = transformer_jax.gradient_times_input(run, records)["embedding"]
    for row, position in ((0, 2), (1, 0)):
        of_row = (gradient(vectors, row, position) * vectors).sum(axis=-1)
        np.testing.assert_allclose(
            found[row, position], of_row[row], rtol=1e-4, atol=1e-5
        )
    assert (found[:, 0, 1:] == 0).all()  # no position sees a later one


def test_what_the_report_shows(load):
    run, records = load("sequence_to_sequence")
    maps, lens = inside.described(run, records[0])
    source, target = maps
    assert source.name == "gradient × input: source"
    assert "".join(source.keys) == "ek▁at</s>"
    assert len(target.keys) == len(source.queries) == 3  # d, k, </s>
    assert source.signed
    np.testing.assert_allclose(abs(source.weights).sum(axis=-1), 1, rtol=1e-5)
    assert lens.layers == ["input", "layer 1", "layer 2"]
    assert lens.positions == target.keys
    assert lens.probabilities.shape == (3, 3, 5)
    assert [row[0] for row in lens.outcomes[-1]] == list(source.queries)


def test_a_prediction_for_a_whole_text(load):
    run, records = load("classification")
    maps, lens = inside.described(run, records[0])
    assert lens is None
    assert maps[0].name == "gradient × input: bert/embedding"
    assert maps[0].queries in (["even"], ["odd"])
    assert maps[0].weights.shape == (1, 1, 1, len(maps[0].keys))
    with pytest.raises(ValueError, match="no head for the lens: it predicts one of 2"):
        transformer_jax.logit_lens(run, records)


@pytest.mark.parametrize(
    ("name", "replacements", "words"),
    [
        (
            "language_modeling",
            {"decoder/layers/1/feedforward": 0},
            "is no activation of this model. Near names are decoder/layers/1/feed_forw",
        ),
        (
            "language_modeling",
            {"decoder/layers/3/feed_forward": 0},
            "there is no such layer; layers are counted from 0 to 2",
        ),
        (
            "language_modeling",
            {"decoder/layers/1": np.zeros((2, 3))},
            r"an array of float64 of shape \(2, 3\), but the activation has shape \(2,",
        ),
        ("language_modeling", {"decoder/layers/1": "x"}, "an array of <U1"),
        (
            "language_modeling",
            {"decoder/layers/1": lambda x, step: x},
            "the function must take the activation",
        ),
        (
            "recurrent",
            {"decoder/recur": lambda x: x},
            "must take the activation at one position, and the number of the position",
        ),
    ],
)
def test_bad_replacements(load, name, replacements, words):
    run, records = load(name)
    with pytest.raises(ValueError, match=words):
        transformer_jax.patch(run, records, replacements)


def test_other_bad_input(load):
    run, records = load("recurrent")
    with pytest.raises(ValueError, match="no residual stream for the lens"):
        transformer_jax.logit_lens(run, records)
    with pytest.raises(ValueError, match="'encoder/layers/0' is no activation"):
        transformer_jax.capture(run, records, ["encoder/layers/0"])
    with pytest.raises(ValueError, match="there are no records"):
        transformer_jax.capture(run, [], "source")
    with pytest.raises(ValueError, match="is one record, not a list"):
        transformer_jax.capture(run, "ek", "source")
    with pytest.raises(ValueError, match="'runs/x' is no loaded run: give transformer"):
        transformer_jax.activations("runs/x")
    with pytest.raises(AttributeError, match="has no attribute 'captured'"):
        transformer_jax.captured  # noqa: B018
