"""LoRA: W + (α / r) B A against NumPy, what is trained and what is kept, and what is
refused.
"""

import dataclasses
import re
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from flax import traverse_util
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from helpers.oracle import relative
from helpers.runs import small
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.errors import UserError
from transformer_jax.models.kernels.placement import Named
from transformer_jax.training.checkpoint import CheckpointConfig, Checkpoints
from transformer_jax.training.engine import Engine, make_train_step
from transformer_jax.training.freezing import in_words
from transformer_jax.training.initialization import init_state
from transformer_jax.training.lora import LoraConfig, LowRank, form_of
from transformer_jax.training.sharding import AXES, shardings
from transformer_jax.training.task import Mean

# path → shape, names of axes, number of axes before the inputs, number of inputs
KERNELS = {
    "stack/query/kernel": ((3, 4, 2, 5), ("layers", "embed", "heads", "head_dim"), 1),
    "stack/output/kernel": ((3, 2, 5, 4), ("layers", "heads", "head_dim", "embed"), 1),
    "several/inner/kernel": ((2, 3, 4, 8), ("decoders", "layers", "embed", "mlp"), 2),
    "outer/kernel": ((8, 4), ("mlp", "embed"), 0),
}
INPUTS = {"stack/output/kernel": 2}
OTHERS = {
    "head/kernel": ((4, 3), ("embed", "classes")),
    "head/bias": ((3,), ("classes",)),
    "table": ((6, 4), ("vocab", "vector")),
}
R, ALPHA = 2, 3.0


class Stub(typing.NamedTuple):
    """The part of a config that LoRA reads."""

    lora: LoraConfig
    whole_parts: dict[str, int]


def boxed():
    shapes = {path: entry[:2] for path, entry in (KERNELS | OTHERS).items()}
    return traverse_util.unflatten_dict(
        {
            path: Named(jax.ShapeDtypeStruct(shape, np.float32), names)
            for path, (shape, names) in shapes.items()
        },
        sep="/",
    )


def form(*targets, parts=None, **keys):
    config = LoraConfig(R, ALPHA, targets or ("query", "output", "inner", "outer"))
    config = dataclasses.replace(config, **keys)
    parts = {"head": 0, "table": 4} if parts is None else parts
    return form_of(
        Stub(config, parts | dict.fromkeys(config.fully_trained, 0)), boxed()
    )


def drawn(tree, seed=0):
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.float32(draw.normal(size=x.shape)), nn.unbox(tree))


def flat(tree):
    return {
        path: np.asarray(leaf)
        for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()
    }


def merged(path, base, a, b):
    """Return W + (α / r) B A of each layer, as the paper writes it for Wᵀ."""
    shape, _, numbered = KERNELS[path]
    inputs = int(np.prod(shape[numbered : numbered + INPUTS.get(path, 1)]))
    sums = []
    for w, one_a, one_b in zip(
        base.reshape(-1, inputs, base.size // inputs // int(np.prod(shape[:numbered]))),
        a.reshape(-1, inputs, R),
        b.reshape(len(a.reshape(-1, inputs, R)), R, -1),
        strict=True,
    ):
        change = one_b.T @ one_a.T  # (outputs, r) (r, inputs)
        sums.append((w.T + ALPHA / R * change).T)
    return np.stack(sums).reshape(shape)


def test_weights_are_merged_as_in_the_paper():
    low = form()
    base = drawn(low.base)
    trained = drawn(low.trained, seed=1)
    whole = flat(low.join(trained, base))
    old = flat(base)
    new = flat(trained)
    assert whole.keys() == old.keys()
    for path in KERNELS:
        module = path.removesuffix("/kernel")
        a, b = new[f"{module}/lora_a"], new[f"{module}/lora_b"]
        np.testing.assert_allclose(
            whole[path], merged(path, old[path], a, b), rtol=1e-5, atol=1e-5
        )
    for path in ("head/kernel", "head/bias"):
        np.testing.assert_array_equal(whole[path], new[path])
    # the rows from 4 on are trained
    np.testing.assert_array_equal(whole["table"][:4], old["table"][:4])
    np.testing.assert_array_equal(whole["table"][4:], new["table"])


def test_the_start_is_the_base_to_the_bit_and_a_is_random():
    low = form()
    base = drawn(low.base)
    trained, kept = low.split(base, jax.random.key(3))
    assert kept is base
    for path, value in flat(low.join(trained, kept)).items():
        np.testing.assert_array_equal(value, flat(base)[path])
    start = flat(trained)
    assert start.keys() == flat(nn.unbox(low.trained)).keys()
    for path, value in start.items():
        if path.endswith("lora_b"):
            assert not value.any()
    # A depends on the key and the name of its weight
    other, _ = form("query").split(base, jax.random.key(3))
    name = "stack/query/lora_a"
    np.testing.assert_array_equal(flat(other)[name], start[name])
    other, _ = form("query").split(base, jax.random.key(4))
    assert (flat(other)[name] != start[name]).all()
    assert len(np.unique(start[name])) == start[name].size
    wide = Named(jax.ShapeDtypeStruct((400, 300), np.float32), ("embed", "mlp"))
    low = form_of(Stub(LoraConfig(50, targets=("x",)), {}), {"x": {"kernel": wide}})
    a = flat(low.split({"x": {"kernel": np.zeros((400, 300))}}, jax.random.key(0))[0])
    assert abs(a["x/lora_a"].std() - 400**-0.5) < 0.01 * 400**-0.5


def test_factors_are_sharded_like_their_weight():
    mesh = AbstractMesh((1, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    low = form("query", "inner", parts={"table": 4})
    specs = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.spec
        for path, x in jax.tree_util.tree_leaves_with_path(shardings(low.trained, mesh))
    }
    assert specs["stack/query/lora_a"] == PartitionSpec(None, "fsdp", None)
    assert specs["stack/query/lora_b"] == PartitionSpec(None, None, "tensor", None)
    assert specs["several/inner/lora_b"][2:] == (None, ("tensor", "fsdp"))
    assert specs["table"] == PartitionSpec(None, None)


class Quadratic:
    """Σ ((x W - y)²) / rows, with one weight."""

    def loss(self, params, batch, key, step):
        error = batch["x"] @ params["outer"]["kernel"] - batch["y"]
        count = jnp.asarray(len(batch["x"]), jnp.float32)
        return {"squares": Mean((error**2).sum(), count)}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_are_those_of_the_chain_rule(microbatches):
    """dA = s dW Bᵀ and dB = s Aᵀ dW, with s = α / r, in float64."""
    wide = Named(jax.ShapeDtypeStruct((7, 4), np.float32), ("mlp", "embed"))
    config = Stub(LoraConfig(R, ALPHA, ("outer",)), {})
    low = form_of(config, {"outer": {"kernel": wide}})
    base, trained = drawn(low.base), drawn(low.trained, seed=1)
    draw = np.random.default_rng(2)
    batch = {"x": draw.normal(size=(6, 7)), "y": draw.normal(size=(6, 4))}
    a, b = (np.float64(flat(trained)[f"outer/lora_{x}"]) for x in "ab")
    w = base["outer"]["kernel"] + ALPHA / R * a @ b
    slope = 2 * batch["x"].T @ (batch["x"] @ w - batch["y"]) / 6
    optimizer = optax.sgd(0.5)
    step = make_train_step(
        Quadratic(), optimizer, seed=0, microbatches=microbatches, form=low
    )
    start = init_state(trained, optimizer, base=base)
    after, metrics = jax.jit(step)(start, jax.tree.map(np.float32, batch))
    expected = {"a": ALPHA / R * slope @ b.T, "b": ALPHA / R * a.T @ slope}
    for name, gradient in expected.items():
        path = f"outer/lora_{name}"
        moved = (flat(trained)[path] - flat(after.params)[path]) / 0.5
        assert relative(moved, gradient) < 1e-5
    norm = np.sqrt(sum((x**2).sum() for x in expected.values()))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
    np.testing.assert_array_equal(
        after.base["outer"]["kernel"], base["outer"]["kernel"]
    )


def classification(**changes):
    config = small("classification", "unused")
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 0
    config.optimizer.learning_rate = 0.01
    config.optimizer.weight_decay = 0.1
    config.training.ema_decay = 0.5
    config.model.unroll = 1
    config.lora.rank = R
    config.lora.alpha = ALPHA
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return config


@pytest.fixture(scope="module")
def trained():
    """An engine, its first state and the states after two and four steps."""
    engine = Engine(make_task(parse(classification()), None))
    state = engine.init(jax.random.key(0))
    states = [jax.tree.map(np.asarray, state)]
    for number in range(4):
        state, metrics = engine.step(state, batch(engine, number))
        assert metrics["skipped"] == 0
        if number % 2:
            states.append(jax.tree.map(np.asarray, state))
    return engine, states


def batch(engine, number):
    return engine.task.dummy_batch(8, 7, seed=number)


def test_only_factors_and_the_head_are_trained(trained):
    _, (start, _, end) = trained
    for path, value in flat(end.base).items():
        np.testing.assert_array_equal(value, flat(start.base)[path])
    for path, value in flat(end.params).items():
        assert (value != flat(start.params)[path]).all(), path
    attention = "bert/encoder/layers/self_attention"
    assert flat(end.params).keys() == {
        *(f"{attention}/{x}/lora_{y}" for x in ("query", "value") for y in "ab"),
        "head/kernel",
        "head/bias",
    }
    # two moments of each parameter that is trained
    sizes = sum(x.size for x in jax.tree.leaves(end.params))
    moments = [x for x in jax.tree.leaves(end.opt_state) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sizes
    assert flat(end.ema).keys() == flat(end.params).keys()
    words = in_words(end.params, {}, end.base)
    total = sum(x.size for x in jax.tree.leaves(end.base))
    assert words.startswith(f"{total:,} parameters of the model; LoRA trains {sizes:,}")


def test_the_adapted_model_is_the_one_with_merged_weights(trained):
    engine, (_, _, end) = trained
    weights = {path: value.copy() for path, value in flat(end.base).items()}
    new = flat(end.params)
    for name in ("query", "value"):
        module = f"bert/encoder/layers/self_attention/{name}"
        a, b = new[f"{module}/lora_a"], new[f"{module}/lora_b"]
        for layer in range(len(a)):
            change = np.tensordot(a[layer], b[layer], axes=1)  # (D, r) (r, N, H)
            weights[f"{module}/kernel"][layer] += np.float32(ALPHA / R) * change
    weights |= {path: new[path] for path in ("head/kernel", "head/bias")}
    by_hand = traverse_util.unflatten_dict(weights, sep="/")
    joined = engine.parameters(jax.tree.map(jnp.asarray, end))
    evaluate = jax.jit(
        lambda params: engine.task.evaluate(params, batch(engine, 9), True)[1]["logits"]
    )
    assert relative(evaluate(joined), evaluate(by_hand)) < 1e-5
    assert relative(evaluate(end.base), evaluate(by_hand)) > 1e-3


def test_a_restored_state_goes_on_to_the_bit(trained, tmp_path):
    engine, (_, half, end) = trained
    checkpoints = Checkpoints(epath.Path(tmp_path), CheckpointConfig(), {})
    checkpoints.save(2, jax.tree.map(jnp.asarray, half), {})
    state, _ = checkpoints.restore(2, engine.abstract_state)
    checkpoints.close()
    for number in (2, 3):
        state, _ = engine.step(state, batch(engine, number))
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(end), strict=True):
        assert np.asarray(one).tobytes() == other.tobytes()


# Other tasks have the same models.
FAMILIES = [
    ("sequence_to_sequence", "transformer"),
    ("sequence_to_sequence", "recurrent"),
    ("sequence_to_sequence", "convs2s"),
    ("several_decoders", "transformer"),
    ("language_modeling", "gpt"),
    ("language_modeling", "recurrent_lm"),
    ("bert_pretraining", "bert"),
    ("classification", "gpt"),
]
TARGETS = {
    "recurrent": ("h?", "encoder/*/i?"),
    "recurrent_lm": ("cells_0/h?",),
    "convs2s": ("query", "convolution"),
}


@pytest.mark.parametrize(("task", "architecture"), FAMILIES)
def test_every_family_can_be_adapted(task, architecture):
    config = small(task, "unused", architecture)
    config.lora.rank = R
    config.lora.targets = TARGETS.get(architecture, ("query", "value"))
    made = make_task(parse(config), None)
    model = jax.eval_shape(made.init, jax.random.key(0))
    low = form_of(made.config, model)
    assert isinstance(low, LowRank)
    whole = jax.eval_shape(low.join, nn.unbox(low.trained), nn.unbox(low.base))
    assert jax.tree.map(lambda x: x.shape, whole) == jax.tree.map(
        lambda x: x.shape, nn.unbox(model)
    )
    for weight in low.weights:
        inputs, outputs = (
            int(np.prod([weight.shape[axis] for axis in axes]))
            for axes in (weight.block.rows, weight.block.columns)
        )
        first = weight.block.rows[0]
        assert weight.names[:first] in (
            (),
            ("layers",),
            ("decoders",),
            ("decoders", "layers"),
        )
        count = sum(box.value.size for box in weight.factors(R).values())
        assert count == R * (inputs + outputs) * int(np.prod(weight.shape[:first]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"targets": ("query", "querry")},
            "'querry' matches no weight: there are inner, outer, output, query; to "
            "choose some of one name, write more of a path, e.g. 'stack/query'",
        ),
        ({"targets": ("uery",)}, "'uery' matches no weight"),
        ({"targets": ("head",)}, "'head' matches no weight"),
        (
            {"fully_trained": ("heads",)},
            "'heads' is no path of parameters: there are head, outer, several, stack",
        ),
        (
            {"targets": ("outer",), "fully_trained": ("outer",)},
            "outer is both in targets and in what is trained as it is",
        ),
    ],
)
def test_names_of_nothing_are_refused(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        form(**options)


@pytest.mark.parametrize(
    ("target", "modules"),
    [
        ("query", {"stack/query"}),
        ("stack/*", {"stack/query", "stack/output"}),
        ("*er", {"several/inner", "outer"}),
        ("stack/query", {"stack/query"}),
    ],
)
def test_targets_are_ends_of_paths(target, modules):
    assert {weight.module for weight in form(target).weights} == modules


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora__rank": -1}, "config.lora.rank = -1: must be at least 1, or 0"),
        ({"lora__alpha": 0.0}, "config.lora.alpha = 0.0: must be positive"),
        ({"lora__targets": ()}, "config.lora.targets = (): must name weights"),
        (
            {"fine_tuning__feature_layers": 1},
            "config.lora.rank = 2: must be 0 with other keys that freeze bert:",
        ),
    ],
)
def test_invalid_keys_are_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(classification(**changes))


def test_a_random_base_is_warned_of(caplog):
    parse(classification())
    assert "config.lora adapts random weights" in caplog.text
