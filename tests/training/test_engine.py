"""Training step: microbatches give the result of the whole batch, keys are folded,
one step has stored values.
"""

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

from helpers.pretraining import SCALE, by_hand, make_batch, recorder, step_on
from helpers.processes import on_devices
from transformer_jax.config import make_task, parse
from transformer_jax.losses import cross_entropy
from transformer_jax.models.layers import Embedding
from transformer_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    shift_right,
)
from transformer_jax.training.engine import Engine, make_train_step
from transformer_jax.training.initialization import init_state
from transformer_jax.training.matrices import blocks
from transformer_jax.training.optimizer import OptimizerConfig, make_optimizer, schedule
from transformer_jax.training.sharding import feed
from transformer_jax.training.task import Mean

GOLDEN = Path(__file__).parents[1] / "golden" / "step.json"

BOS, EOS, VOCAB = 1, 2, 11

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

# Rows differ in their number of target tokens, so a mean of means is not the mean.
BATCH = {
    "source": np.array(
        [
            [3, 4, 5, 6, 2],
            [7, 2, 0, 0, 0],
            [8, 9, 2, 0, 0],
            [10, 3, 7, 2, 0],
            [5, 5, 5, 5, 2],
            [4, 10, 2, 0, 0],
        ]
    ),
    "target": np.array(
        [
            [6, 5, 4, 3, 2],
            [2, 0, 0, 0, 0],
            [9, 8, 2, 0, 0],
            [7, 2, 0, 0, 0],
            [5, 9, 10, 2, 0],
            [10, 4, 3, 2, 0],
        ]
    ),
    "source_length": np.array([5, 2, 3, 4, 5, 3]),
    "target_length": np.array([5, 1, 3, 2, 4, 4]),
}


class Copying:
    """Task with only the methods that a training step needs."""

    def __init__(self, config=CONFIG):
        self.model = Transformer(config)

    def init(self, key):
        token = jnp.zeros((1, 1), jnp.int32)
        return self.model.init(key, token, token)["params"]

    def loss(self, params, batch, key, step):
        source, target = batch["source"], batch["target"]
        place = jnp.arange(source.shape[1])[None]
        source_valid, target_valid = (
            place < batch[f"{side}_length"][:, None] for side in ("source", "target")
        )
        logits = self.model.apply(
            {"params": params},
            source,
            shift_right(target, BOS),
            source_valid=source_valid,
            target_valid=target_valid,
            rngs={"dropout": key},
        )
        total, weight = cross_entropy(
            logits, target, target_valid, vocab_size=VOCAB, label_smoothing=0.1
        )
        ends = (target == EOS).sum().astype(jnp.float32)
        return {"loss": Mean(total, weight), "ends": Mean(ends, weight, scale=0)}


class Simple:
    """Task of one parameter and one function of (kernel, batch, key, step)."""

    def __init__(self, loss):
        self._loss = loss

    def loss(self, params, batch, key, step):
        return self._loss(params["kernel"], batch, key, step)


@functools.cache
def parameters():
    return nn.unbox(jax.jit(Copying().init)(jax.random.key(0)))


def simple_state():
    return init_state({"kernel": jnp.ones(())}, recorder)


@pytest.fixture(scope="module")
def recorded():
    """An initial state, and the state and metrics after one step with the whole
    batch.
    """
    state = init_state(parameters(), recorder)
    return state, *jax.jit(
        make_train_step(Copying(), recorder, seed=0, microbatches=1)
    )(state, BATCH)


def leaves(tree):
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in found
    }


@pytest.mark.parametrize("microbatches", [2, 3, 6])
def test_microbatches_give_the_loss_and_the_gradient_of_the_whole_batch(
    recorded, microbatches
):
    counts = BATCH["target_length"].reshape(-1, microbatches).sum(axis=0)
    assert len(set(counts)) > 1
    state, whole, metrics = recorded
    parts, summed = jax.jit(
        make_train_step(Copying(), recorder, seed=0, microbatches=microbatches)
    )(state, BATCH)
    assert int(whole.step) == int(parts.step) == 1
    assert metrics["weight"] == summed["weight"] == BATCH["target_length"].sum()
    assert (
        set(metrics)
        == set(summed)
        == {"loss", "weight", "gradient_norm", "skipped", "ends"}
    )
    for name, value in metrics.items():
        np.testing.assert_allclose(summed[name], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["ends"], 6 / metrics["weight"], rtol=1e-6)
    expected, found = leaves(whole.opt_state), leaves(parts.opt_state)
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        # softmax is invariant to it: its gradient is only rounding
        if name.endswith("key/bias"):
            assert np.abs(gradient).max() <= 1e-6 * largest
        else:
            assert (
                np.abs(found[name] - gradient).max() <= 1e-5 * np.abs(gradient).max()
            ), name


def test_the_gradient_is_that_of_the_mean_over_tokens(recorded):
    state, new, metrics = recorded

    def mean(params):
        total, weight, _ = Copying().loss(params, BATCH, jax.random.key(0), 0)["loss"]
        return total / weight

    loss, expected = jax.jit(jax.value_and_grad(mean))(state.params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(
        metrics["gradient_norm"], optax.tree.norm(expected), rtol=1e-5
    )
    found, expected = (
        np.concatenate([leaf.ravel() for leaf in leaves(tree).values()])
        for tree in (new.opt_state, expected)
    )
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    for name, p in leaves(new.params).items():
        np.testing.assert_allclose(
            p, leaves(state.params)[name] + leaves(new.opt_state)[name], rtol=1e-6
        )


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_keys_are_folded_from_seed_step_and_microbatch(seed, microbatches):
    task = Simple(
        lambda kernel, batch, key, step: {
            "drawn": Mean(kernel * jax.random.uniform(key), jnp.ones(()))
        }
    )
    step = jax.jit(
        make_train_step(task, recorder, seed=seed, microbatches=microbatches)
    )
    for number in (0, 1, 1000):
        new, metrics = step(simple_state()._replace(step=jnp.asarray(number)), BATCH)
        keys = keys_of(seed, number, microbatches)
        np.testing.assert_allclose(
            metrics["loss"], np.mean([jax.random.uniform(k) for k in keys]), rtol=1e-6
        )
        assert int(new.step) == number + 1


def keys_of(seed, step, microbatches):
    key = jax.random.fold_in(jax.random.key(seed), step)
    return (
        [key]
        if microbatches == 1
        else [jax.random.fold_in(key, part) for part in range(microbatches)]
    )


@pytest.mark.parametrize("microbatches", [1, 3])
def test_weights_may_be_drawn(microbatches):
    """Weights may be random, e.g. in masked language modeling.

    Value and weight must see the same draw.
    """

    def loss(kernel, batch, key, step):
        drawn = jax.random.bernoulli(key, 0.5, batch["source"].shape) * 1.0
        return {"masked": Mean(kernel * (drawn * batch["source"]).sum(), drawn.sum())}

    step = jax.jit(
        make_train_step(Simple(loss), recorder, seed=3, microbatches=microbatches)
    )
    _, metrics = step(simple_state(), BATCH)
    parts = [BATCH["source"][part::microbatches] for part in range(microbatches)]
    drawn = [
        jax.random.bernoulli(key, 0.5, parts[0].shape)
        for key in keys_of(3, 0, microbatches)
    ]
    weight = sum(int(x.sum()) for x in drawn)
    assert metrics["weight"] == weight
    total = sum(float((x * part).sum()) for x, part in zip(drawn, parts, strict=True))
    np.testing.assert_allclose(metrics["masked"], total / weight, rtol=1e-6)


def test_dropout_differs_between_steps_and_repeats():
    task = Copying(dataclasses.replace(CONFIG, dropout_rate=0.5))
    state = init_state(parameters(), recorder)
    step = jax.jit(make_train_step(task, recorder, seed=0, microbatches=2))
    first, second, again = (
        step(state._replace(step=jnp.asarray(n)), BATCH)[1]["loss"] for n in (0, 1, 0)
    )
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
    """Return an initial state, and a training step with weight decay and clipping.

    ε is large, so that an update depends on the size of a gradient and not on its sign
    alone.
    """
    task = Copying()
    config = OptimizerConfig(
        schedule="constant",
        learning_rate=0.01,
        warmup_steps=2,
        weight_decay=0.1,
        epsilon=1e-2,
        clip_norm=1.0,
    )
    optimizer = make_optimizer(
        config,
        schedule(config, CONFIG.d_model, 1),
        blocks(jax.eval_shape(task.init, jax.random.key(0))),
    )

    def fill(path, p):
        """Make biases nonzero.

        With zero biases and ReLU, norm(x + ffn(x)) is the same for x and 1.01 x.
        """
        return (
            jnp.linspace(-0.5, 0.5, p.size).reshape(p.shape)
            if "bias" in jax.tree_util.keystr(path)
            else p
        )

    state = init_state(jax.tree_util.tree_map_with_path(fill, parameters()), optimizer)
    return state, jax.jit(make_train_step(task, optimizer, seed=0, microbatches=1))


def one_step(state, step):
    """Return the loss, the gradient norm and sums of |p| after a step.

    The scales of norms are not among the sums, so a changed scale shows only through
    its effects.
    """
    state, metrics = step(state, BATCH)
    params = leaves(state.params)
    sums = {name: np.abs(params[name]).sum(dtype=np.float64) for name in STORED}
    values = {"loss": metrics["loss"], "gradient_norm": metrics["gradient_norm"]} | sums
    return {name: float(value) for name, value in values.items()}


def differences(found):
    """Return one line for each value that differs from the stored one."""
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
            f"One training step gives other values than {GOLDEN.name}:",
            *changed,
            (
                "If this is not intended, find the cause: "
                "the tests of models, losses and optimizer narrow it down."
            ),
            "If it is intended, say why in the commit, and store the new values with",
            "UPDATE_GOLDEN=1 python -m pytest tests/training/test_engine.py",
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

    changed = differences(
        one_step(
            state._replace(
                params=jax.tree_util.tree_map_with_path(scale, state.params)
            ),
            step,
        )
    )
    assert any(line.startswith(("loss", "gradient_norm")) for line in changed)


def test_the_stored_values_notice_one_percent_of_the_embeddings_scale(monkeypatch):
    call = Embedding.__call__
    monkeypatch.setattr(Embedding, "__call__", lambda self, ids: 1.01 * call(self, ids))
    changed = differences(one_step(*adam_step.__wrapped__()))
    assert any(line.startswith(("loss", "gradient_norm")) for line in changed)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_loss_is_told_the_updates_before(microbatches):
    def loss(kernel, batch, key, step):
        weight = jnp.float32(len(batch["source"]))
        return {"loss": Mean(kernel * weight * step, weight)}

    state = simple_state()
    step = jax.jit(
        make_train_step(Simple(loss), recorder, seed=0, microbatches=microbatches)
    )
    for before in range(3):
        state, _ = step(state, BATCH)
        assert state.opt_state["kernel"] == before


ON_MESHES = """
import json
import jax
from helpers.pretraining import step_on
steps = [step_on(mesh, parts) for mesh in ((8, 1, 1), (2, 2, 2)) for parts in (1, 4)]
print(json.dumps(steps))
"""


def test_terms_with_different_weights_add_up_to_the_sum_of_their_means():
    """The objective is "masked" + SCALE · "follows", with 1 or 4 microbatches, on 1
    or 8 devices.
    """
    batch = make_batch()
    for weights in (batch["masked"].sum(axis=1), batch["paired"]):
        assert len({weights[part::4].sum() for part in range(4)}) > 1
        assert len({share.sum() for share in np.split(weights, 8)}) > 1
    means, gradient = by_hand()
    eight = json.loads(on_devices(8, ON_MESHES))
    for metrics, found in [step_on((1, 1, 1), parts) for parts in (1, 4)] + eight:
        assert {name: metrics[name] for name in means} == pytest.approx(means, rel=1e-5)
        assert metrics["loss"] == pytest.approx(
            means["masked"] + SCALE * means["follows"], rel=1e-5
        )
        assert metrics["weight"] == batch["masked"].sum()  # weight of the first term
        for name, expected in gradient.items():
            np.testing.assert_allclose(
                found[name], expected, atol=1e-5 * np.abs(expected).max()
            )


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("value", [7.0, np.nan])
def test_metrics_of_scale_0_are_reported_and_have_no_gradient(microbatches, value):
    """Metrics that are not finite have no gradient either."""

    def loss(kernel, batch, key, step):
        rows = jnp.float32(len(batch["source"]))
        return {
            "trained": Mean(3 * kernel * rows, rows),
            "metric": Mean(value * kernel * rows, rows, scale=0),
        }

    step = jax.jit(
        make_train_step(Simple(loss), recorder, seed=0, microbatches=microbatches)
    )
    state, metrics = step(simple_state(), BATCH)
    np.testing.assert_allclose(metrics["metric"], value, rtol=1e-6)
    assert (
        metrics["loss"]
        == metrics["trained"]
        == metrics["gradient_norm"]
        == state.opt_state["kernel"]
        == 3
    )
    assert metrics["skipped"] == 0


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_mean_over_nothing_is_0(microbatches):
    def loss(kernel, batch, key, step):
        rows = jnp.float32(len(batch["source"]))
        return {
            "some": Mean(kernel * rows, rows),
            "none": Mean(kernel * 0, jnp.zeros(())),
        }

    step = jax.jit(
        make_train_step(Simple(loss), recorder, seed=0, microbatches=microbatches)
    )
    state, metrics = step(simple_state(), BATCH)
    assert (metrics["none"], metrics["loss"], state.opt_state["kernel"]) == (0, 1, 1)


@pytest.mark.parametrize("names", [["weight"], ["a", "loss"], ["skipped", "a"]])
def test_means_do_not_take_the_names_of_the_steps_own_metrics(names):
    def loss(params, batch, key, step):
        return {name: Mean(jnp.ones(()), jnp.ones(())) for name in names}

    with pytest.raises(ValueError, match="this name is reserved, choose another"):
        make_train_step(Simple(loss), recorder, seed=0, microbatches=1)(
            simple_state(), BATCH
        )


def test_one_compilation_for_each_shape(tiny, tmp_path):
    tiny.data.max_buckets, tiny.data.batch_tokens = 2, 256
    task = make_task(parse(tiny), tmp_path / "run")
    batches = task.batches("train", 0)
    engine = Engine(task)
    state = engine.init(jax.random.key(0))
    for fed in feed(batches, range(2 * len(batches.plan)), engine.mesh):
        state, _ = engine.step(state, fed.placed)
    assert engine.step._cache_size() == len(batches.plan.shapes) == 2
