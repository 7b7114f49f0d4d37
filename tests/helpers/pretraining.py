"""Loss of two terms with different weights, like masked language modeling with
next-sentence prediction.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.training.engine import make_train_step
from transformer_jax.training.initialization import init_state
from transformer_jax.training.sharding import MeshConfig, make_mesh, on_mesh, place
from transformer_jax.training.task import Mean

ROWS, LENGTH, VOCAB, SCALE = 32, 5, 6, 0.25

# An optimizer whose state is the gradient.
recorder = optax.GradientTransformation(
    lambda p: jax.tree.map(jnp.zeros_like, p), lambda g, *_: (g, g)
)


class Pretraining:
    """Task that predicts masked tokens and whether a second sentence follows.

    It also has a metric that could have a gradient.
    """

    def loss(self, params: Any, batch: Any, key: Any, step: Any) -> dict[str, Mean]:
        logits = params["table"][batch["text"]]
        right = jnp.take_along_axis(
            jax.nn.log_softmax(logits), batch["label"][..., None], axis=-1
        )[..., 0]
        wrong_order = jax.nn.softplus(
            -batch["follows"] * (logits.sum(axis=1) @ params["vector"])
        )
        return {
            "masked": Mean(-(right * batch["masked"]).sum(), batch["masked"].sum()),
            "follows": Mean(
                (wrong_order * batch["paired"]).sum(), batch["paired"].sum(), SCALE
            ),
            "extent": Mean(jnp.square(logits).sum(), jnp.float32(logits.size), scale=0),
        }


def make_params() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "table": draw.normal(size=(VOCAB, VOCAB)).astype(np.float32),
        "vector": np.full(VOCAB, 0.3, np.float32),
    }


def make_batch() -> dict[str, np.ndarray]:
    """Return rows with 0 to 5 masked tokens.

    Two thirds of the rows have a second sentence.
    """
    draw, row = np.random.default_rng(1), np.arange(ROWS)
    return {
        "text": draw.integers(0, VOCAB, (ROWS, LENGTH), np.int32),
        "label": draw.integers(0, VOCAB, (ROWS, LENGTH), np.int32),
        "masked": (np.arange(LENGTH)[None] < (row * row % 7 % 6)[:, None]).astype(
            np.float32
        ),
        "follows": np.where(row % 5 < 2, 1, -1).astype(np.float32),
        "paired": (row % 3 != 0).astype(np.float32),
    }


def by_hand() -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return the means and the gradient of "masked" + SCALE · "follows", in float64
    and without differentiation.
    """
    params = {name: array.astype(np.float64) for name, array in make_params().items()}
    batch = make_batch()
    logits = params["table"][batch["text"]]
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    labels = np.eye(VOCAB)[batch["label"]]
    state = logits.sum(axis=1)
    margin = batch["follows"] * (state @ params["vector"])
    means = {
        "masked": -(np.log((p * labels).sum(axis=-1)) * batch["masked"]).sum()
        / batch["masked"].sum(),
        "follows": (np.log1p(np.exp(-margin)) * batch["paired"]).sum()
        / batch["paired"].sum(),
        "extent": np.square(logits).mean(),
    }
    d_score = (
        -SCALE
        * batch["follows"]
        / (1 + np.exp(margin))
        * batch["paired"]
        / batch["paired"].sum()
    )
    d_logits = (p - labels) * (batch["masked"] / batch["masked"].sum())[..., None]
    d_logits = d_logits + d_score[:, None, None] * params["vector"]
    d_table = np.zeros((VOCAB, VOCAB))
    np.add.at(d_table, batch["text"], d_logits)
    return means, {"table": d_table, "vector": d_score @ state}


def step_on(
    mesh: tuple[int, int, int], microbatches: int
) -> tuple[dict[str, float], dict[str, list]]:
    """Return the metrics and the gradient of a step on a mesh (data, fsdp, tensor)."""
    placed_on = make_mesh(MeshConfig(*mesh))
    step = on_mesh(
        make_train_step(Pretraining(), recorder, seed=0, microbatches=microbatches),
        placed_on,
    )
    state, metrics = step(
        init_state(make_params(), recorder), place(make_batch(), placed_on, ROWS)
    )
    return {name: float(x) for name, x in metrics.items()}, jax.tree.map(
        lambda x: x.tolist(), state.opt_state
    )
