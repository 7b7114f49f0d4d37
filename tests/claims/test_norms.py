"""Norms and residual connections that are taken out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import ROOT
from transformer_jax.claims.claim import Setting
from transformer_jax.claims.norms import (
    AblatedGPT,
    AblatedResidual,
    BatchNorm,
    NoNorm,
    batch_norm_scores,
    condition,
)
from transformer_jax.models.gpt import GPT, GPTConfig
from transformer_jax.predictor import Predictor

CONFIG = GPTConfig(
    vocab_size=11,
    num_layers=2,
    d_model=8,
    d_ff=12,
    num_heads=2,
    head_dim=4,
    value_dim=4,
    max_length=7,
    norm="pre",
)
TOKENS = np.random.default_rng(0).integers(0, 11, (3, 5))


def test_batch_norm_is_the_equation():
    x = np.random.default_rng(1).normal(2.0, 3.0, (3, 5, 7))
    params = {"scale": np.arange(1.0, 8.0), "bias": np.arange(7.0)}
    norm = BatchNorm(1e-5)
    y, stored = norm.apply({"params": params}, np.float32(x), mutable=["statistics"])
    rows = x.reshape(15, 7)
    wanted = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5)
    wanted = (params["scale"] * wanted + params["bias"]).reshape(x.shape)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stored["statistics"]["mean"], rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stored["statistics"]["variance"], rows.var(0), rtol=1e-5)


def test_fixed_statistics_are_used():
    x = np.random.default_rng(2).normal(size=(2, 3, 5)).astype(np.float32)
    fixed = {"mean": np.ones(5), "variance": np.full(5, 4.0)}
    params = {"scale": np.ones(5), "bias": np.zeros(5)}
    y = BatchNorm(1e-12).apply({"params": params, "statistics": fixed}, x)
    np.testing.assert_allclose(y, (x - 1) / 2, rtol=1e-5, atol=1e-6)


def test_with_everything_it_is_gpt():
    model = AblatedGPT(CONFIG)
    params = model.init(jax.random.key(0), TOKENS)["params"]
    params = jax.tree.map(
        lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params
    )
    own = dict(params["decoder"])
    final = own.pop("final_norm")
    renamed = [
        {
            name: {"layer_norm": values["normalize"]} if "residual" in name else values
            for name, values in own[f"blocks_{i}"].items()
        }
        for i in range(2)
    ]
    stacked = jax.tree.map(lambda *values: jnp.stack(values), *renamed)
    whole = {**params, "decoder": {"layers": stacked, "final_norm": final}}
    np.testing.assert_allclose(
        model.apply({"params": params}, TOKENS),
        GPT(CONFIG).apply({"params": whole}, TOKENS),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("is_residual", [True, False])
def test_the_residual_connection(is_residual):
    residual = AblatedResidual(
        "pre", 0.0, 1e-6, make_norm=NoNorm, is_residual=is_residual
    )
    x = jnp.ones((1, 2, 3))
    y = jnp.full((1, 2, 3), 5.0)
    np.testing.assert_array_equal(residual.apply({}, x, method="before"), x)
    np.testing.assert_array_equal(
        residual.apply({}, x, y, method="after"), x * is_residual + y
    )


def test_only_statistics_of_the_batch_see_later_tokens():
    model = AblatedGPT(CONFIG, make_norm=BatchNorm)
    variables = model.init(jax.random.key(0), TOKENS)
    params = {"params": variables["params"]}
    _, stored = model.apply(params, TOKENS, mutable=["statistics"])
    other = np.concatenate([TOKENS[:, :3], (TOKENS[:, 3:] + 1) % 11], axis=1)

    def change(given):
        apart = model.apply(given, TOKENS) - model.apply(given, other)
        return float(jnp.abs(apart[:, :3]).max())

    assert change(params | stored) < 1e-6
    assert change(params) > 1e-4


def test_the_loss_of_batch_norm_has_fixed_statistics(tmp_path):
    text = "The quick brown fox jumps over the lazy dog. " * 30
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text(text)
    setting = Setting(0, tmp_path, tmp_path / "runs", tmp_path, ROOT / "configs", True)
    splits = {"data.train_split": "input[:900]", "data.validation_split": "input[900:]"}
    how = dataclasses.replace(condition("WithBatchNorm"), quick=splits)
    workdir = how.train(setting)
    predictor = Predictor.load(workdir, {}, task=how.config(setting).task)
    found = batch_norm_scores(predictor, setting)
    assert found["loss"] == pytest.approx(
        found["loss with statistics of the batch"], rel=0.05
    )
    assert found["loss"] != found["loss with statistics of the batch"]
