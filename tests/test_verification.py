"""verify: it holds for the recipe as it is, and each comparison can fail."""

import json

import jax
import jax.numpy as jnp
import pytest
from conftest import on_devices, shrink

from transformer_jax import verification
from transformer_jax.config import defaults
from transformer_jax.models import transformer
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.verification import Row, verify

NAMES = [
    "resumed = never stopped, bit for bit",
    "unrolled = a loop over layers",
    "rematerialised = kept",
    "rematerialised but for products = kept",
    "in microbatches = whole",
    "fused attention = its equation",
    "1 device = 1 devices",
    "rows of a batch do not see one another",
    "cached = uncached decoding",
    "no token is seen before its place",
]


def test_all_holds(tiny):
    rows = list(verify(tiny))
    assert [row.name for row in rows] == NAMES
    assert [row.name for row in rows if not row.held] == []
    assert [row.name for row in rows if row.difference is None] == ["1 device = 1 devices"]


def test_eight_devices_are_one(tmp_path):
    config = shrink(defaults("translation"), tmp_path)
    program = (
        "import json; from ml_collections import ConfigDict\n"
        "import jax; jax.config.update('jax_disable_most_optimizations', True)\n"
        "from transformer_jax.verification import _Run, _apart\n"
        f"run = _Run(ConfigDict({config.to_dict()!r}), {{'model.dropout_rate': 0.0}})\n"
        "print(json.dumps(_apart(run.losses_on_one_device(), run.losses())))"
    )
    assert 0 <= json.loads(on_devices(8, program)) < verification.ROUNDING


def test_each_comparison_can_fail(tiny, monkeypatch):
    """One fault for each; a fault may fail others too."""

    def wrong_restore(self, step, abstract):
        state, meta = restore(self, step, abstract)
        return jax.tree.map(lambda x: x + jnp.ones_like(x) * 1e-6 if x.dtype == jnp.float32 else x, state), meta

    def wrong_layers(body, num_layers, unroll, remat):
        right = over_layers(body, num_layers, unroll, "none")
        off = 0.01 * (unroll > 1) + 0.02 * (remat == "full") + 0.03 * (remat == "scores")

        def run(block, x, inputs):
            y, out = right(block, x, inputs)
            return y if y is None else y * (1 + off), out

        return run

    restore, over_layers, attention = Checkpoints.restore, transformer.over_layers, verification.on_mesh
    task = transformer_task()
    loss, measure, exactness = task.loss, task.measure, task.exactness

    def wrong_loss(self, params, batch, key):
        total, weight, more = loss(self, params, batch, key)
        factor = 1.1 if self.config.training.microbatches > 1 else 1.0
        factor += 0.1 * (self.config.model.attention_implementation != "einsum")
        return total * factor, weight, more

    def wrong_measure(self, params, batch):
        sums = measure(self, params, batch)
        return sums | {"loss": sums["loss"] * (1 + batch["target"].mean())}

    monkeypatch.setattr(Checkpoints, "restore", wrong_restore)
    monkeypatch.setattr(transformer, "over_layers", wrong_layers)
    monkeypatch.setattr(task, "loss", wrong_loss)
    monkeypatch.setattr(task, "measure", wrong_measure)
    monkeypatch.setattr(task, "exactness", lambda *given: {name: 1.0 for name in exactness(*given)})
    assert attention is verification.on_mesh
    held = {row.name for row in verify(tiny) if row.held}
    assert held == {"1 device = 1 devices"}


def transformer_task():
    from transformer_jax.tasks import task_class

    return task_class("translation")


@pytest.mark.parametrize(("difference", "held"), [(None, True), (0.0, True), (1e-5, True), (2e-5, False)])
def test_a_row_holds_up_to_what_is_allowed(difference, held):
    assert Row("x", difference, 1e-5).held == held


def test_what_is_no_number_does_not_hold():
    assert not Row("x", float("nan"), 1e-5).held


def test_a_token_seen_before_its_place_is_noticed(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(transformer, "causal_mask", lambda length, *_: jnp.ones((1, 1, length, length), bool))
    run = verification._Run(tiny)
    params = run.engine.init(jax.random.key(0)).params
    leak = run.task.exactness(params, jax.device_put(run.batch(0)))["no token is seen before its place"]
    assert leak > 1e-3
