"""The training step: microbatches are the whole batch, keys are folded, and one step has stored values."""

import dataclasses
import functools
import json
import os
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.losses import cross_entropy
from transformer_jax.models import Transformer, TransformerConfig
from transformer_jax.models.layers import Embedding
from transformer_jax.models.transformer import shift_right
from transformer_jax.training.engine import TrainState, make_train_step
from transformer_jax.training.optimizer import OptimizerConfig, make_optimizer

GOLDEN = Path(__file__).parents[1] / "golden" / "step.json"
PAD, BOS, EOS, VOCAB = 0, 1, 2, 11
CONFIG = TransformerConfig(
    source_vocab_size=VOCAB,
    target_vocab_size=VOCAB,
    num_encoder_layers=1,
    num_decoder_layers=2,
    d_model=6,
    d_ff=10,
    num_heads=2,
    head_dim=3,
    value_dim=5,
    max_length=7,
    dropout_rate=0.0,
    vocab_multiple=8,
)
# rows of 5, 1, 3, 2, 4 and 4 target tokens, so that a mean of means is not the mean
BATCH = {
    "source": np.array(
        [[3, 4, 5, 6, 2], [7, 2, 0, 0, 0], [8, 9, 2, 0, 0], [10, 3, 7, 2, 0], [5, 5, 5, 5, 2], [4, 10, 2, 0, 0]]
    ),
    "target": np.array(
        [[6, 5, 4, 3, 2], [2, 0, 0, 0, 0], [9, 8, 2, 0, 0], [7, 2, 0, 0, 0], [5, 9, 10, 2, 0], [10, 4, 3, 2, 0]]
    ),
}


class Copying:
    """What the step needs of a task."""

    d_model = CONFIG.d_model

    def __init__(self, config=CONFIG):
        self.model = Transformer(config)

    def init(self, key):
        token = jnp.zeros((1, 1), jnp.int32)
        return self.model.init(key, token, token)["params"]

    def loss(self, params, batch, key, step):
        source, target = batch["source"], batch["target"]
        weights = target != PAD
        logits = self.model.apply(
            {"params": params},
            source,
            shift_right(target, BOS),
            source_valid=source != PAD,
            target_valid=weights,
            rngs={"dropout": key},
        )
        total, weight = cross_entropy(logits, target, weights, vocab_size=VOCAB, label_smoothing=0.1)
        return total, weight, {"ends": (target == EOS).sum().astype(jnp.float32)}


class Drawing:
    """A loss that shows the key."""

    def init(self, key):
        return {"kernel": jnp.ones(())}

    def loss(self, params, batch, key, step):
        return params["kernel"] * jax.random.uniform(key), jnp.ones(()), {}


class Scheduled:
    """A loss that shows the step."""

    def init(self, key):
        return {"kernel": jnp.ones(())}

    def loss(self, params, batch, key, step):
        weight = jnp.float32(len(batch["source"]))
        return params["kernel"] * weight * step, weight, {}


# Its state is the gradient.
recorder = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), lambda g, *_: (g, g))


@functools.cache
def parameters(task_class=Copying):
    return nn.unbox(jax.jit(task_class().init)(jax.random.key(0)))


def start(optimizer, params=None):
    params = parameters() if params is None else params
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


@pytest.fixture(scope="module")
def recorded():
    """A state, and that and the metrics after one step with the whole batch."""
    state = start(recorder)
    return state, *jax.jit(make_train_step(Copying(), recorder, seed=0, microbatches=1))(state, BATCH)


def leaves(tree):
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in found}


@pytest.mark.parametrize("microbatches", [2, 3, 6])
def test_microbatches_give_the_loss_and_the_gradient_of_the_whole_batch(recorded, microbatches):
    counts = (BATCH["target"] != PAD).sum(axis=1).reshape(-1, microbatches).sum(axis=0)
    assert len(set(counts)) > 1
    state, whole, metrics = recorded
    parts, summed = jax.jit(make_train_step(Copying(), recorder, seed=0, microbatches=microbatches))(state, BATCH)
    assert int(whole.step) == int(parts.step) == 1
    assert metrics["weight"] == summed["weight"] == (BATCH["target"] != PAD).sum()
    assert set(metrics) == set(summed) == {"loss", "weight", "gradient_norm", "skipped", "ends"}
    for name, value in metrics.items():
        np.testing.assert_allclose(summed[name], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["ends"], 6 / metrics["weight"], rtol=1e-6)
    expected, found = leaves(whole.opt_state), leaves(parts.opt_state)
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        if name.endswith("key/bias"):  # softmax does not see it: its gradient is zero but for rounding
            assert np.abs(gradient).max() <= 1e-6 * largest
        else:
            assert np.abs(found[name] - gradient).max() <= 1e-5 * np.abs(gradient).max(), name


def test_the_gradient_is_that_of_the_mean_over_tokens(recorded):
    state, new, metrics = recorded

    def mean(params):
        total, weight, _ = Copying().loss(params, BATCH, jax.random.key(0), 0)
        return total / weight

    loss, expected = jax.jit(jax.value_and_grad(mean))(state.params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["gradient_norm"], optax.tree.norm(expected), rtol=1e-5)
    found, expected = (
        np.concatenate([leaf.ravel() for leaf in leaves(tree).values()]) for tree in (new.opt_state, expected)
    )
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    for name, p in leaves(new.params).items():
        np.testing.assert_allclose(p, leaves(state.params)[name] + leaves(new.opt_state)[name], rtol=1e-6)


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_keys_are_folded_from_seed_step_and_microbatch(seed, microbatches):
    task = Drawing()
    step = jax.jit(make_train_step(task, recorder, seed=seed, microbatches=microbatches))
    for number in (0, 1, 1000):
        state = start(recorder, parameters(Drawing))._replace(step=jnp.asarray(number))
        new, metrics = step(state, BATCH)
        key = jax.random.fold_in(jax.random.key(seed), number)
        keys = [key] if microbatches == 1 else [jax.random.fold_in(key, part) for part in range(microbatches)]
        np.testing.assert_allclose(metrics["loss"], np.mean([jax.random.uniform(k) for k in keys]), rtol=1e-6)
        assert int(new.step) == number + 1


def test_dropout_differs_between_steps_and_repeats():
    task = Copying(dataclasses.replace(CONFIG, dropout_rate=0.5))
    state = start(recorder)
    step = jax.jit(make_train_step(task, recorder, seed=0, microbatches=2))
    first, second, again = (step(state._replace(step=jnp.asarray(n)), BATCH)[1]["loss"] for n in (0, 1, 0))
    assert first != second
    assert first == again


STORED = [
    "target_embedding/table",
    "encoder/layers/self_attention/query/kernel",
    "encoder/layers/feed_forward/inner/kernel",
    "decoder/layers/self_attention/output/kernel",
    "decoder/layers/cross_attention/value/kernel",
    "decoder/layers/feed_forward/outer/kernel",
]


@functools.cache
def adam_step():
    """A first state and a step with decay and clipping; a large ε, so that no gradient's sign decides alone."""
    task = Copying()
    config = OptimizerConfig(
        schedule="constant", learning_rate=0.01, warmup_steps=2, weight_decay=0.1, epsilon=1e-2, clip_norm=1.0
    )
    optimizer = make_optimizer(config, task.d_model)

    def fill(path, p):
        """Biases other than zero: without, norm(x + ffn(x)) with ReLU is the same for x and 1.01 x."""
        return jnp.linspace(-0.5, 0.5, p.size).reshape(p.shape) if "bias" in jax.tree_util.keystr(path) else p

    state = start(optimizer, jax.tree_util.tree_map_with_path(fill, parameters()))
    return state, jax.jit(make_train_step(task, optimizer, seed=0, microbatches=1))


def one_step(state, step):
    """Loss, gradient norm and sums of |p| after a step. No norm's scale is in it."""
    state, metrics = step(state, BATCH)
    params = leaves(state.params)
    sums = {name: np.abs(params[name]).sum(dtype=np.float64) for name in STORED}
    values = {"loss": metrics["loss"], "gradient_norm": metrics["gradient_norm"]} | sums
    return {name: float(value) for name, value in values.items()}


def differences(found):
    """What is not as stored, one line each."""
    golden = json.loads(GOLDEN.read_text())
    assert found.keys() == golden.keys()
    return [
        f"{name}: {golden[name]} stored, {value} now"
        for name, value in found.items()
        if not abs(value - golden[name]) <= 1e-5 * abs(golden[name])
    ]


def test_one_step_gives_the_stored_values():
    found = one_step(*adam_step())
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=2) + "\n")
    changed = differences(found)
    assert not changed, "\n".join(
        [
            f"one training step gives other numbers than {GOLDEN.name}:",
            *changed,
            "If nothing was meant to change, find what did: the tests of models, losses and optimizer narrow it down.",
            "If it was, say why in the commit, with the values stored anew by",
            "UPDATE_GOLDEN=1 python -m pytest tests/training/test_train_step.py",
        ]
    )


NORMS = [
    "encoder/layers/self_attention_residual",
    "encoder/layers/feed_forward_residual",
    "decoder/layers/self_attention_residual",
    "decoder/layers/cross_attention_residual",
    "decoder/layers/feed_forward_residual",
]


@pytest.mark.parametrize("norm", NORMS)
def test_the_stored_values_notice_one_percent_of_one_norm(norm):
    state, step = adam_step()

    def scale(path, p):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return p.at[0].multiply(1.01) if name == f"{norm}/layer_norm/scale" else p

    changed = differences(one_step(state._replace(params=jax.tree_util.tree_map_with_path(scale, state.params)), step))
    assert any(line.startswith(("loss", "gradient_norm")) for line in changed)


def test_the_stored_values_notice_one_percent_of_the_embeddings_scale(monkeypatch):
    call = Embedding.__call__
    monkeypatch.setattr(Embedding, "__call__", lambda self, ids: 1.01 * call(self, ids))
    changed = differences(one_step(*adam_step.__wrapped__()))
    assert any(line.startswith(("loss", "gradient_norm")) for line in changed)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_loss_is_told_the_updates_before(microbatches):
    state = start(recorder, parameters(Scheduled))
    step = jax.jit(make_train_step(Scheduled(), recorder, seed=0, microbatches=microbatches))
    for before in range(3):
        state, _ = step(state, BATCH)
        assert state.opt_state["kernel"] == before
