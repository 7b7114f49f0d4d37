"""The FLOPs of a task's loss."""

import jax.numpy as jnp
import numpy as np

from transformer_jax.training.flops import of_loss


def test_the_products_of_a_loss_are_counted():
    """Each of the entries of (B, F) is a sum of D products."""
    rows, width, outputs = 2, 3, 5

    def init(key):
        return {"kernel": jnp.zeros((width, outputs))}

    def loss(params, batch, key, step):
        return jnp.tanh(batch["x"] @ params["kernel"]).sum()

    batch = {"x": np.zeros((rows, width), np.float32)}
    assert of_loss(init, loss, batch) == 2 * rows * width * outputs
