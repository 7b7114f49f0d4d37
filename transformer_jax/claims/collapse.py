"""Liu et al. 2020: the layers of pre-LN Transformers add little.

The trainings are those of the claim `warmup`: six layers in each stack, width 128, 600
steps with a warm-up of 500. The cosine is that of the outputs of adjacent layers of the
encoder at the same position. A layer of either stack is dropped from the trained model;
the loss that this adds is the mean over all twelve. Both are of 200 captions of the
validation split.

Shapes: B batch · L layers · T positions · D d_model.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import losses
from transformer_jax.claims import measuring
from transformer_jax.claims.claim import Claim, Expected, Measurements, Setting
from transformer_jax.claims.trained import Trained
from transformer_jax.claims.warmup import condition
from transformer_jax.models.masks import padding
from transformer_jax.models.transformer import Transformer
from transformer_jax.predictor import Predictor
from transformer_jax.tasks import text

Array = jax.Array
STACKS = ("encoder", "decoder")


def layer_outputs(model: Transformer, source: Array, valid: Array) -> Array:
    """Return the outputs (B, L, T, D) of the encoder's layers.

    Pass it to `model.apply` as the method.
    """
    x, _ = model.source(source, valid)
    return model.encoder.outputs(x, padding(valid))


def mean_cosine(outputs: Array, valid: Array) -> Array:
    """Return the mean cosine between the outputs (B, L, T, D) of adjacent layers.

    The last layer is left out, because a pre-LN stack applies its final norm to it.
    With two layers, as in quick runs, there is no pair, and the result is NaN. `valid`
    (B, T) is False at positions that do not count.
    """
    unit = outputs / jnp.linalg.norm(outputs, axis=-1, keepdims=True)
    cosines = (unit[:, :-2] * unit[:, 1:-1]).sum(axis=-1).mean(axis=1)
    return jnp.where(valid, cosines, 0).sum() / valid.sum()


def without_layer(params: Mapping[str, Any], stack: str, layer: int) -> dict[str, Any]:
    """Return the parameters of a model without one layer of a stack."""
    inside = params[stack]
    layers = jax.tree.map(lambda x: np.delete(x, layer, axis=0), inside["layers"])
    return {**params, stack: {**inside, "layers": layers}}


def shorter(model: Transformer, stack: str) -> Transformer:
    """Return the model with one layer less in a stack."""
    field = f"num_{stack}_layers"
    keys = {field: getattr(model.config, field) - 1, "unroll": 1}
    return model.clone(config=dataclasses.replace(model.config, **keys))


def mean_loss(
    model: Transformer,
    begin: int,
    batches: Sequence[measuring.Batch],
) -> Callable[[Any], float]:
    """Return the mean loss over all target tokens, as a function of the parameters."""

    @jax.jit
    def of_batch(params: Any, batch: measuring.Batch) -> tuple[Array, Array]:
        logits = measuring.logits_of(model, params, batch, begin)
        is_token = text.valid(batch, "target")
        vocab_size = logits.shape[-1]
        return losses.cross_entropy(
            logits, batch["target"], is_token, vocab_size=vocab_size
        )

    def of_all(params: Any) -> float:
        sums = [of_batch(params, batch) for batch in batches]
        total, tokens = np.sum(np.array(sums, np.float64), axis=0)
        return float(total / tokens)

    return of_all


def layers_matter(predictor: Predictor, setting: Setting) -> Measurements:
    """Return the mean cosine, the loss, and the loss that a dropped layer adds."""
    task: Any = predictor.task
    model = task.model
    params = predictor.params
    begin = measuring.begin_id(predictor)
    split = predictor.config.data.validation_split
    batches = list(measuring.batches_of(predictor, split))

    @jax.jit
    def cosine(params: Any, batch: measuring.Batch) -> Array:
        source = batch["source"]
        is_token = text.valid(batch, "source")
        variables = {"params": params}
        outputs = model.apply(variables, source, is_token, method=layer_outputs)
        return mean_cosine(outputs, is_token)

    cosines = [float(cosine(params, batch)) for batch in batches]
    tokens = [int(batch["source_length"].sum()) for batch in batches]
    whole = mean_loss(model, begin, batches)(params)
    dropped = []
    for stack in STACKS:
        loss = mean_loss(shorter(model, stack), begin, batches)
        num_layers = getattr(model.config, f"num_{stack}_layers")
        for layer in range(num_layers):
            rest = without_layer(params, stack, layer)
            dropped.append(loss(rest))
    return {
        "cosine": float(np.average(cosines, weights=tokens)),
        "loss": whole,
        "loss of a layer": float(np.mean(dropped)) - whole,
    }


def measured(norm: str) -> Trained:
    """Return the training with this norm, and what is measured in it."""
    return dataclasses.replace(
        condition(norm, 500),
        score=layers_matter,
        overrides={"data.validation_split": "val[:200]"},
    )


POST, PRE = "post-LN, warm-up", "pre-LN, warm-up"

CLAIM = Claim(
    statement="Layers are more alike in pre-LN Transformers than in post-LN ones, and "
    "each matters less",
    source="Liu et al. 2020, Section 4",
    conditions={POST: measured("post"), PRE: measured("pre")},
    # Liu et al.: post-LN rescales the residual stream at each norm, so that each layer
    # counts; in pre-LN the stream grows, and the share of layer l falls as 1 / l. By
    # our arithmetic, for independent branches of equal variance, the cosine of layers l
    # and l + 1, of two branches each, is √(l / (l + 1)): 0.71 to 0.89 in pre-LN, and
    # 0.5 in post-LN.
    expected=(
        Expected("cosine", PRE, minus=POST, least=0, guess=(0.03, 0.4)),
        Expected("loss of a layer", PRE, minus=POST, most=0, guess=(-3, -0.1)),
    ),
    cost="half an hour on a core, or one minute after the claim warmup",
)
