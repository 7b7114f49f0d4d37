"""Moving average of the parameters: its recursion in NumPy, resuming, sharding,
evaluation, no cost when off.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import transformer_jax
from helpers.runs import rows, run
from transformer_jax.config import make_task, parse
from transformer_jax.training.checkpoint import (
    CheckpointConfig,
    CheckpointError,
    Checkpoints,
    parameters_sha256,
)
from transformer_jax.training.engine import Engine, make_train_step
from transformer_jax.training.initialization import TrainState, init_state
from transformer_jax.training.matrices import Block
from transformer_jax.training.optimizer import (
    OptimizerConfig,
    count_updates,
    make_optimizer,
)
from transformer_jax.training.task import Mean


class Pulling:
    """Task whose loss is the squared distance of the parameters from the mean of the
    batch.
    """

    def loss(self, params, batch, key, step):
        total = sum(
            ((leaf - batch["x"].mean()) ** 2).sum() for leaf in jax.tree.leaves(params)
        )
        return {"distance": Mean(total, jnp.ones(()))}


def start(optimizer, ema_decay):
    return init_state(
        {"a": jnp.full((3,), 5.0), "b": {"c": jnp.full((2, 1), -2.0)}},
        optimizer,
        ema_decay,
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30], ids=["nan", "inf", "overflow"])
def test_a_step_without_a_finite_gradient_changes_nothing(bad):
    """Parameters, optimizer state and average keep their values.

    The next step is an ordinary one.
    """
    optimizer = optax.adam(0.1)
    step = jax.jit(
        make_train_step(Pulling(), optimizer, seed=0, microbatches=1, ema_decay=0.5)
    )
    before, _ = step(start(optimizer, 0.5), {"x": jnp.ones(4)})
    after, metrics = step(before, {"x": jnp.full((4,), bad)})
    assert (int(before.step), int(after.step), float(metrics["skipped"])) == (1, 2, 1.0)
    for old, new in zip(
        jax.tree.leaves(before)[1:], jax.tree.leaves(after)[1:], strict=True
    ):
        np.testing.assert_array_equal(new, old)
    assert float(step(after, {"x": jnp.ones(4)})[1]["skipped"]) == 0.0


@pytest.mark.parametrize("decay", [0.3, 0.5, 0.99])
def test_the_average_is_the_recursion(decay):
    """The warm-up of the decay, (1 + n) / (10 + n), reaches 0.3 at n = 2.86 and 0.5
    at n = 8.
    """
    optimizer = optax.sgd(0.1)
    state = start(optimizer, decay)
    step = jax.jit(
        make_train_step(Pulling(), optimizer, seed=0, microbatches=1, ema_decay=decay)
    )
    expected = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state.params)]
    for n in range(1, 12):
        state, _ = step(state, {"x": jnp.full((4,), float(n))})
        d = min(decay, (1 + n) / (10 + n))
        params = jax.tree.leaves(state.params)
        expected = [
            d * e + (1 - d) * np.asarray(p, np.float64)
            for e, p in zip(expected, params, strict=True)
        ]
        for found, e, p in zip(
            jax.tree.leaves(state.ema), expected, params, strict=True
        ):
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(found, e, rtol=1e-5)
            assert (np.abs(found - p) > 1e-3).all()


@pytest.mark.parametrize("frozen", [{}, {"b": None}])
def test_schedule_free_evaluates_the_average_of_its_steps(frozen):
    """Algorithm 1 of Defazio et al. 2024, in NumPy. Vectors have no weight decay."""
    config = OptimizerConfig(
        name="schedule_free",
        schedule="constant",
        b1=0.9,
        b2=0.8,
        epsilon=1e-8,
        weight_decay=0.1,
    )
    vectors = [Block((0,)), Block((0,), (1,))]
    optimizer = make_optimizer(config, lambda count: 0.1, vectors)
    state = start(optimizer, 0.0)
    step = jax.jit(
        make_train_step(Pulling(), optimizer, seed=0, microbatches=1, frozen=frozen)
    )
    x = y = z = np.full(3, 5.0)
    v = 0.0
    for n in range(1, 6):
        state, _ = step(state, {"x": jnp.full((4,), float(n))})
        gradient = 2 * (y - n)
        v = 0.8 * v + 0.2 * gradient**2
        z = z - 0.1 * gradient / (np.sqrt(v / (1 - 0.8**n)) + 1e-8)
        x = (1 - 1 / n) * x + z / n
        y = 0.1 * z + 0.9 * x
        np.testing.assert_allclose(state.ema["a"], x, rtol=1e-5)
        np.testing.assert_allclose(state.params["a"], y, rtol=1e-5)
    held = np.full((2, 1), -2.0)
    for found in (state.params["b"]["c"], state.ema["b"]["c"]):
        assert np.array_equal(found, held) == bool(frozen)
    assert count_updates(state.opt_state) == 5


def test_an_optimizer_with_an_average_keeps_no_second_one(tiny):
    tiny.optimizer.update(name="schedule_free", schedule="constant")
    tiny.evaluation.checkpoint = "ema"
    assert not list(parse(tiny).advice())
    tiny.evaluation.checkpoint = "latest"
    assert "set this to 'ema'" in "".join(parse(tiny).advice())
    tiny.training.ema_decay = 0.9
    with pytest.raises(ValueError, match="which keeps an average of its own"):
        parse(tiny)


def test_off_there_is_no_array_of_it(tiny, tmp_path):
    plain = Engine(make_task(parse(tiny), tmp_path)).abstract_state
    assert plain.ema is None
    tiny.training.ema_decay = 0.9
    state = Engine(make_task(parse(tiny), tmp_path)).abstract_state
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves((plain, state.params)))
    assert state.ema == state.params  # equal shapes, dtypes and shardings


@pytest.mark.usefixtures("without_search")
def test_it_is_resumed_bitwise_and_evaluated_by_those_who_ask_for_it(
    tiny, tmp_path, without_search
):
    tiny.training.ema_decay = 0.9
    whole = run(
        tiny, tmp_path / "whole", training__steps=4, evaluation__checkpoint="ema"
    )
    run(tiny, tmp_path / "parts", training__steps=2)
    resumed = run(tiny, tmp_path / "parts", training__steps=4)
    assert parameters_sha256(resumed) == parameters_sha256(whole)

    task = make_task(parse(tiny), tmp_path / "whole")
    batches, evaluate = (
        task.batches("val", seed=None),
        jax.jit(task.evaluate, static_argnums=2),
    )
    arrays = [batches.load(batches.plan.batch(i)) for i in range(len(batches.plan))]

    def loss(params):
        means = [evaluate(params, batch, True)[0]["loss"] for batch in arrays]
        return float(
            sum(mean.sum for mean in means) / sum(mean.weight for mean in means)
        )

    averaged, plain = ("whole", whole.ema), ("parts", whole.params)
    for name, (workdir, params) in (
        ("ema", averaged),
        ("best", averaged),
        ("latest", plain),
        ("best", plain),
    ):
        loaded = transformer_jax.load(
            str(tmp_path / workdir), {"evaluation.checkpoint": name}
        )
        assert loaded.step == 4
        assert loaded.parameters_sha256 == parameters_sha256(params)
        (scored,) = (
            row["loss"]
            for row in rows(tmp_path / workdir)
            if row["split"] == "val" and row["step"] == 4
        )
        assert loss(loaded.params) == pytest.approx(scored, rel=1e-6)
    assert parameters_sha256(whole.ema) != parameters_sha256(whole.params)
    scores = [
        [row["loss"] for row in rows(tmp_path / name) if row["split"] == "val"]
        for name in ("whole", "parts")
    ]
    assert abs(scores[0][1] - scores[1][1]) > 1e-4


def test_it_does_not_change_the_parameters():
    optimizer, batch = optax.sgd(0.1), {"x": jnp.ones((4,))}
    averaged, plain = (
        make_train_step(Pulling(), optimizer, seed=0, microbatches=1, ema_decay=decay)(
            start(optimizer, decay), batch
        )[0]
        for decay in (0.9, 0.0)
    )
    assert plain.ema is None
    assert averaged.ema is not None
    assert parameters_sha256(averaged.params) == parameters_sha256(plain.params)


def test_checkpoints_from_before_it_restore_and_hold_none(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), {})
    state = {
        "step": jnp.asarray(3),
        "params": {"a": jnp.arange(5.0)},
        "opt_state": {"m": jnp.ones(2)},
    }
    checkpoints.save(3, state, {})
    now = TrainState(
        **{name: jax.eval_shape(lambda x: x, part) for name, part in state.items()}
    )
    restored, _ = checkpoints.restore(3, now)
    assert restored.ema is None
    np.testing.assert_array_equal(restored.params["a"], np.arange(5.0))
    with pytest.raises(
        CheckpointError,
        match=(
            r"does not match the model; 1 of 1 arrays differ:\n  ema/a: stored nothing"
        ),
    ):
        checkpoints.restore_params(3, now.params, "ema")
