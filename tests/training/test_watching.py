"""Watching a run: norms, dead units and entropies by hand, for every kind of model, and
on eight devices.
"""

import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.processes import on_devices
from helpers.runs import small
from transformer_jax.config import make_task, parse
from transformer_jax.models.layers import FeedForward
from transformer_jax.training import watching
from transformer_jax.training.engine import Engine
from transformer_jax.training.task import Axis
from transformer_jax.training.watching import Place

STACKED = Place(
    "bert/encoder/layers/feed_forward/inner/kernel", ("layers", "embed", "mlp")
)


@pytest.mark.parametrize(
    ("path", "axes", "group"),
    [
        (STACKED.path, STACKED.axes, "bert/encoder/layers"),
        ("bert/segments", ("segment", "vector"), "bert"),
        ("decoder/cells_0/hn/bias", ("state",), "decoder/cells_0"),
        ("embedding/table", ("vocab", "vector"), "embedding"),
        ("kernel", (), "kernel"),
    ],
)
def test_a_parameter_belongs_to_a_layer_or_to_the_first_modules(path, axes, group):
    assert Place(path, axes).group == group


def test_norms_are_those_of_layers_and_groups():
    places = [STACKED, Place("head/bias", ())]
    kernel = np.arange(12.0).reshape(2, 2, 3)
    found = watching.norms("norm", [kernel, np.array([3.0, 4.0])], places)
    np.testing.assert_allclose(
        found["norm/bert/encoder/layers"],
        [np.linalg.norm(layer) for layer in kernel],
        rtol=1e-6,
    )
    assert found["norm/head"] == 5
    total = np.square(kernel).sum() + 25
    np.testing.assert_allclose(found["norm"] ** 2, total, rtol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "gated"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_units_that_are_never_active_are_dead(kind, activation):
    """Of 8 units, 2 have an input far below 0 at every position."""
    layer = FeedForward(d_model=4, d_ff=8, activation=activation, kind=kind)
    x = jax.random.normal(jax.random.key(0), (3, 5, 4))
    boxed = layer.init(jax.random.key(1), x)["params"]
    places = watching.places_of({"encoder": nn.get_partition_spec(boxed)})
    params = nn.unbox(boxed)
    first = params["gate" if kind == "gated" else "inner"]
    first["bias"] = first["bias"].at[:2].set(-60.0)

    def loss(params):
        return jnp.sin(layer.apply({"params": params}, x)).sum()

    gradient = jax.grad(loss)(params)
    found = watching.dead_units({"encoder": gradient}, places, {})
    assert {name: float(share) for name, share in found.items()} == {
        f"dead_units/encoder/{name}": 2 / 8
        for name in sorted({"inner", *params} - {"outer"})
    }


def test_frozen_layers_have_no_dead_units():
    gradient = [jnp.ones((2, 4, 8)).at[1, :, :2].set(0), jnp.ones((2, 8))]
    places = [STACKED, Place(STACKED.path.replace("kernel", "bias"), ("layers", "mlp"))]
    name = "dead_units/bert/encoder/layers"
    assert watching.dead_units(gradient, places, {})[name].tolist() == [0, 0]
    gradient[1] = gradient[1].at[1, :3].set(0)
    assert watching.dead_units(gradient, places, {})[name].tolist() == [0, 0.25]
    partly = watching.dead_units(gradient, places, {"bert/encoder": 1})[name]
    np.testing.assert_array_equal(partly, [math.nan, 0.25])
    assert watching.dead_units(gradient, places, {"bert": None}) == {}
    gradient[1] = gradient[1].at[1, 0].set(jnp.inf)
    np.testing.assert_array_equal(
        watching.dead_units(gradient, places, {})[name], [0, math.nan]
    )


def test_entropy_is_the_mean_over_heads_and_queries():
    """Row 0 has one query, row 1 two, and row 2 holds no example. There are two layers
    and two heads.
    """
    weights = np.zeros((3, 2, 2, 2, 4))
    weights[..., 0] = 1  # entropy 0
    weights[0, 0, 0, 0] = [0.5, 0.5, 0, 0]
    weights[1, 1, :, :] = 0.25
    weights[0, :, :, 1] = 0.25  # padding
    weights[2] = 0.25
    axis = Axis(np.zeros((3, 2)), np.array([1, 2, 2]), lambda row: ([], ""))
    maps = {("self-attention, first", "text", "text"): jnp.asarray(weights)}
    sums = watching.entropy_sums((maps, {"text": axis}), np.array([True, True, False]))
    total, count = sums["attention_entropy/self-attention_first"]
    assert count == 3
    np.testing.assert_allclose(total, [np.log(2) / 2, 2 * np.log(4)], rtol=1e-6)


# task, architecture, and names that a watched step has; "" for none of this kind
KINDS = {
    "encoder-decoder": (
        "sequence_to_sequence",
        None,
        {
            "gradient_norm/decoder/layers": (2,),
            "update_norm/target_embedding": (),
            "dead_units/encoder/layers": (2,),
            "attention_entropy/cross-attention": (2,),
            "attention_entropy/encoder_self-attention": (2,),
            "attention_entropy/decoder_self-attention": (2,),
        },
    ),
    "rnn": (
        "sequence_to_sequence",
        "recurrent",
        {"gradient_norm/encoder/forward_0": (), "parameter_norm": ()},
    ),
    "gpt": (
        "language_modeling",
        None,
        {"dead_units/decoder/layers": (2,), "attention_entropy/self-attention": (2,)},
    ),
    "bert": (
        "bert_pretraining",
        None,
        {
            "parameter_norm/bert/encoder/layers": (2,),
            "gradient_norm/masked_lm/transform": (),
            "attention_entropy/self-attention": (2,),
        },
    ),
    "choices": (
        "multiple_choice",
        None,
        {"attention_entropy/self-attention_choice_0": (2,)},
    ),
    "text to text": (
        "denoising",
        None,
        {"dead_units/decoder/layers": (2,), "attention_entropy/cross-attention": (2,)},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_watched(kind, corpus, tmp_path):
    task, architecture, shapes = KINDS[kind]
    config = small(task, corpus, architecture)
    if kind == "text to text":  # as in T5
        config.model.update(
            positions="relative_bias", feed_forward="gated", activation="gelu_tanh"
        )
    engine = Engine(make_task(parse(config), tmp_path))
    batch = engine.task.dummy_batch(8, 16)
    found = jax.eval_shape(watching.make_watch(engine), engine.abstract_state, batch)
    assert shapes.items() <= {name: x.shape for name, x in found.items()}.items()
    norms = {name.split("/", 1)[1] for name in found if name.startswith("update_norm/")}
    for other in ("gradient_norm", "parameter_norm"):
        assert {f"{other}/{name}" for name in norms} <= set(found)
    assert "gradient_norm" not in found


SHARDED = """
import json
import sys
import numpy as np
from pathlib import Path
from helpers.runs import parameters, small
from transformer_jax.config import make_task, parse
from transformer_jax.training.engine import Engine
from transformer_jax.training.sharding import place
from transformer_jax.training.watching import Watch

def watched(devices, **mesh):
    config = small("language_modeling", Path("none"))
    config.model.dropout_rate = config.model.attention_dropout_rate = 0.0
    # the first update of Adam is nearly the sign of the gradient, so sums in another
    # order change it where the gradient is near 0
    config.optimizer.name = "sgd"
    config.mesh.update(mesh)
    task = make_task(parse(config), "none")
    engine = Engine(task, devices)
    shardings = jax.tree.map(lambda x: x.sharding, engine.abstract_state.params)
    state = engine.begin(jax.device_put(parameters(task), shardings))
    batch = task.dummy_batch(16, 12, seed=0)
    placed = place(batch, engine.mesh, 16)
    return Watch(engine).measure(state, placed)

print(json.dumps([
    watched(jax.devices()[:1]),
    watched(jax.devices(), data=2, fsdp=2, tensor=2),
]))
"""


def test_a_mesh_of_eight_devices_measures_the_same():
    one, eight = json.loads(on_devices(8, SHARDED))
    assert one.keys() == eight.keys()
    assert "dead_units/decoder/layers/1" in one
    for name, value in one.items():
        assert eight[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name
