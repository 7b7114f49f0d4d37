"""Tutorial texts: what W_Q, W_K and W_V of Vaswani et al. 2017, Section 3.2.2, are for.

All conditions train the Transformer of configs/dates.py, two layers of width 128 with
four heads, for 500 steps, about one epoch and a half of 40,000 dates. A change acts on
all attention: self-attention of encoder and decoder, and cross-attention.
"""

from typing import Any

import flax.linen as nn

from transformer_jax.claims.changes import linear_map, with_change
from transformer_jax.claims.claim import Claim, Expected
from transformer_jax.claims.trained import Trained


def same_map(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
    """Use W_Q for the keys: W_K = W_Q."""
    if linear_map(context) == "key":
        return context.module.parent.query(*args)
    return call(*args, **kwargs)


def raw_keys(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
    """Use the features of the input (B, S, D) as the keys of the heads, without W_K.

    Head n gets the H = D / N features from nH on. The input is that of the sub-layer:
    after its norm, and in the first layer the embeddings.
    """
    if linear_map(context) == "key":
        _, *heads = context.module.shape
        return args[0].reshape(*args[0].shape[:2], *heads)
    return call(*args, **kwargs)


def rectified(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
    """Apply ReLU to queries, keys and values."""
    y = call(*args, **kwargs)
    return nn.relu(y) if linear_map(context) in ("query", "key", "value") else y


SameMap = with_change(same_map)
RawKeys = with_change(raw_keys)
Rectified = with_change(rectified)


def condition(task: str = "") -> Trained:
    """Return a training on dates, by default with the package's own task."""
    keys: dict[str, Any] = {"training.steps": 500}
    if task:
        keys["task"] = f"transformer_jax.claims.shared_maps:{task}"
    # The small model of a quick run has D = N · H, too.
    quick = {
        "data.train_split": "train[:200]",
        "data.validation_split": "validation[:20]",
    }
    quick_heads = {"model.num_heads": 2, "model.head_dim": 8, "model.value_dim": 8}
    return Trained("dates.py", keys, quick={**quick, **quick_heads})


CLAIM = Claim(
    statement="Attention needs linear maps of its own for queries and keys, without an "
    "activation",
    source="tutorial texts on Vaswani et al. 2017, Section 3.2.2",
    conditions={
        "W_Q, W_K, W_V": condition(),
        "W_K = W_Q": condition("SameMap"),
        "no W_K": condition("RawKeys"),
        "ReLU on Q, K, V": condition("Rectified"),
    },
    # The texts give no figures, hence tests of the sign. With W_K = W_Q the scores of
    # self-attention are symmetric, and those of a position with itself are large. But
    # Kitaev et al. 2020, Section 5, found no cost of shared queries and keys; there,
    # keys have unit length, and no token attends to itself.
    expected=(
        Expected(
            "loss", "W_K = W_Q", minus="W_Q, W_K, W_V", least=0, guess=(-0.01, 0.05)
        ),
        Expected("loss", "no W_K", minus="W_Q, W_K, W_V", least=0, guess=(-0.01, 0.05)),
        Expected(
            "loss", "ReLU on Q, K, V", minus="W_Q, W_K, W_V", least=0, guess=(0.0, 0.05)
        ),
    ),
    cost="eight minutes on a core",
)
