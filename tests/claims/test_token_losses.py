"""The loss of each token."""

import jax
import numpy as np

from transformer_jax.claims.token_losses import token_losses
from transformer_jax.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(
    vocab_size=5,
    num_layers=1,
    d_model=8,
    d_ff=12,
    num_heads=2,
    head_dim=4,
    value_dim=4,
    max_length=7,
    norm="pre",
)


def test_losses_are_those_of_the_targets():
    draw = np.random.default_rng(0)
    batch = {
        "text": draw.integers(0, 5, (2, 7)),
        "target": draw.integers(0, 5, (2, 7)),
        "text_length": np.array([7, 4]),
    }
    model = GPT(CONFIG)
    variables = model.init(jax.random.key(0), batch["text"])
    logits = np.asarray(model.apply(variables, batch["text"]), np.float64)
    found = np.asarray(token_losses(model, variables, batch))
    for row, place in np.ndindex(2, 7):
        scores = logits[row, place]
        wanted = np.log(np.exp(scores).sum()) - scores[batch["target"][row, place]]
        if place >= batch["text_length"][row]:
            wanted = 0.0
        np.testing.assert_allclose(found[row, place], wanted, rtol=1e-4, atol=1e-6)
