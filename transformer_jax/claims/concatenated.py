"""Tutorial texts: positions are added to embeddings, or concatenated with them.

For an embedding x and a position p, W [x; p] = W_x x + W_p p, where W_x and W_p are the
halves of W. If they are equal, this is W_x (x + p). So concatenation is addition with a
map of its own for positions. The first condition checks this numerically. The others
train the Transformer of configs/dates.py, width 128, for 500 steps: the recipe, and two
models whose encoder reads W (x + p) or W [x; p]. The decoder adds positions in all of
them.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from etils import epath

from transformer_jax.claims.claim import Claim, Computed, Expected, Measurements
from transformer_jax.claims.trained import Trained
from transformer_jax.models.attention import Valid
from transformer_jax.models.front_ends import FrontEnd
from transformer_jax.models.layers import Embedding, Linear
from transformer_jax.models.positions import sinusoidal_positions
from transformer_jax.models.transformer import Transformer
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.tasks.sequence_to_sequence_config import SequenceToSequenceConfig
from transformer_jax.training.task import Task

Array = jax.Array


class Mapped(FrontEnd):
    """W (x + p), or W [x; p] if `concatenates`, of embeddings x and sinusoids p.

    Both are (S, D), and so is the result.
    """

    vocab_size: int
    d_model: int
    max_length: int
    concatenates: bool

    @nn.compact
    def __call__(self, ids: Array, valid: Valid = None) -> tuple[Array, Valid]:
        """Map ids (B, S) to vectors (B, S, D), and return `valid` (B, S) too."""
        x = Embedding(self.vocab_size, self.d_model, name="embedding")(ids)
        table = sinusoidal_positions(self.max_length, self.d_model)
        p = jnp.broadcast_to(jnp.asarray(table[: ids.shape[1]])[None], x.shape)
        if self.concatenates:
            both = jnp.concatenate([x, p], axis=-1)
        else:
            both = x + p
        shape = (both.shape[-1], self.d_model)
        linear = Linear("BSC,CD->BSD", shape, ("features", "embed"), name="map")
        return linear(both), valid


def with_map(concatenates: bool) -> type[Task]:
    """Return the task "sequence_to_sequence" whose encoder reads `Mapped`."""

    class MappedSequenceToSequence(SequenceToSequence):
        def __init__(
            self, config: SequenceToSequenceConfig, workdir: epath.PathLike | None
        ):
            super().__init__(config, workdir)
            c: Any = config.model
            sizes = (c.source_vocab_size, c.d_model, c.max_length)
            self.model = Transformer(c, Mapped(*sizes, concatenates))

    return MappedSequenceToSequence


Added = with_map(concatenates=False)
Concatenated = with_map(concatenates=True)


def algebra(seed: int, quick: bool) -> Measurements:
    """Measure the largest differences between the two sides of both equations,
    relative to the largest number.
    """
    size, width, length = 128, 128, 64
    id_key, init_key = jax.random.split(jax.random.key(seed))
    ids = jax.random.randint(id_key, (8, length), 0, size)
    concatenated = Mapped(size, width, length, concatenates=True)
    params = nn.unbox(concatenated.init(init_key, ids))["params"]
    x: Any = Embedding(size, width).apply({"params": params["embedding"]}, ids)
    p = jnp.asarray(sinusoidal_positions(length, width))[None]
    of_x, of_p = jnp.split(params["map"]["kernel"], 2)

    def of_kernel(kernel: Array, concatenates: bool) -> Array:
        module = Mapped(size, width, length, concatenates)
        linear = {**params["map"], "kernel": kernel}
        y, _ = module.apply({"params": {**params, "map": linear}}, ids)
        return y

    def error(y: Array, other: Array) -> float:
        return float(abs(y - other).max() / abs(other).max())

    both = of_kernel(jnp.concatenate([of_x, of_p]), concatenates=True)
    shared = of_kernel(jnp.concatenate([of_x, of_x]), concatenates=True)
    return {
        "error of W_x x + W_p p": error(both, x @ of_x + p @ of_p),
        "error of a shared map": error(shared, of_kernel(of_x, concatenates=False)),
    }


def condition(task: str = "") -> Trained:
    """Return a training on dates, by default with the package's own task."""
    keys: dict[str, Any] = {"training.steps": 500}
    if task:
        keys["task"] = f"transformer_jax.claims.concatenated:{task}"
    quick = {
        "data.train_split": "train[:200]",
        "data.validation_split": "validation[:20]",
    }
    return Trained("dates.py", keys, quick=quick)


CLAIM = Claim(
    statement="Concatenating positions to embeddings is adding them with a map of "
    "their own, and with a shared map it is the same as adding them",
    source="tutorial texts on Vaswani et al. 2017, Section 3.5",
    conditions={
        "algebra": Computed(algebra),
        "added": condition(),
        "added, mapped": condition("Added"),
        "concatenated, mapped": condition("Concatenated"),
    },
    # The equations hold up to rounding, 6e-8 for each of some hundred terms. The texts
    # conclude that the choice does not matter. 0.02 nats is about the loss of the
    # recipe after 500 steps.
    expected=(
        Expected("error of W_x x + W_p p", "algebra", most=1e-5, guess=(0.0, 2e-6)),
        Expected("error of a shared map", "algebra", most=1e-5, guess=(0.0, 2e-6)),
        Expected(
            "loss",
            "concatenated, mapped",
            minus="added, mapped",
            least=-0.02,
            most=0.02,
            guess=(-0.01, 0.01),
        ),
    ),
    cost="six minutes on a core",
)
