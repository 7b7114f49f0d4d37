"""Verification: all comparisons hold for a correct recipe, and each of them can
fail.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from helpers import ROOT
from helpers.runs import get_config
from transformer_jax import verification
from transformer_jax.models import stack, transformer
from transformer_jax.models.masks import Mask
from transformer_jax.tasks import task_class
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.verification import Row, verify

NAMES = [
    "resumed run = uninterrupted run, bit for bit",
    "model.unroll = 2 vs. 1",
    "model.attention_implementation = blocked vs. auto",
    "model.attention_implementation = jax vs. auto",
    "model.remat = full vs. none",
    "model.remat = scores vs. none",
    "microbatches = the whole batch",
    "1 device = 1 × 1 × 1 (data, fsdp, tensor)",
    "batch = its rows one by one",
    "cached = uncached decoding",
    "no token is seen before its place",
]


@pytest.mark.slow
def test_all_holds(tiny):
    tiny.training.ema_decay, tiny.model.remat, tiny.data.rows_multiple = 0.9, "full", 64
    rows = list(verify(tiny, exports=True))
    assert [row.name for row in rows] == [*NAMES, "exported = live"]
    assert [row.name for row in rows if not row.held] == []
    assert [row.name for row in rows if row.difference is None] == [
        "1 device = 1 × 1 × 1 (data, fsdp, tensor)"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["joint", "ctc"])
def test_all_holds_for_speech(model):
    rows = list(verify(get_config("speech", f"model={model}")))
    assert [row.name for row in rows if not row.held] == []
    assert "scores of CTC = loss of CTC" in [row.name for row in rows]


@pytest.mark.slow
def test_the_script_says_what_does_not_hold():
    """On eight devices, make the losses wrong on the mesh with eight tensor devices."""
    program = (
        "import sys; sys.argv = ['verify', '--config=configs/dates.py']\nimport os; "
        "os.environ['XLA_FLAGS'] += ' "
        "--xla_force_host_platform_device_count=8'\nsys.path.insert(0, "
        "'scripts')\nimport verify\nfrom transformer_jax "
        "import verification\nlosses = verification._Run.losses\ndef wrong(run):\n    "
        "return [loss * (1 + 0.1 * (run.engine.config.mesh.tensor == 8)) "
        "for loss in losses(run)]\nverification._Run.losses = "
        "wrong\nverify.command_line.run(verify.main, distributed=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(NAMES) + 3
    assert [line[:50].strip() for line in lines if line.endswith("FAILED")] == [
        "1 device = 1 × 1 × 8 (data, fsdp, tensor)"
    ]


@pytest.mark.slow
def test_each_comparison_can_fail(tiny, monkeypatch):
    """Inject one fault for each comparison.

    A fault may make other comparisons fail, too.
    """

    def wrong_restore(self, step, abstract):
        state, meta = restore(self, step, abstract)
        return (
            jax.tree.map(
                lambda x: x + jnp.ones_like(x) * 1e-6 if x.dtype == jnp.float32 else x,
                state,
            ),
            meta,
        )

    def wrong_layers(self, body, carry):
        unroll, remat = self.config.unroll, self.config.remat
        off = (
            0.01 * (unroll > 1) + 0.02 * (remat == "full") + 0.03 * (remat == "scores")
        )
        y, out = over_layers(self, body, carry)
        return y if y is None else y * (1 + off), out

    def wrong_loss(self, params, batch, key, step):
        mean = loss(self, params, batch, key, step)["loss"]
        factor = 1.1 if self.config.training.microbatches > 1 else 1.0
        factor += 0.1 * (self.config.model.attention_implementation != "auto")
        return {
            "loss": mean._replace(
                sum=mean.sum * factor * (1 + 0.01 * batch["target"].mean())
            )
        }

    def wrong_extend(self, cache, target, position):
        return extend(self, cache, target, position * 0)

    task: type = task_class("sequence_to_sequence")
    restore, over_layers, extend = (
        Checkpoints.restore,
        stack.Stack._run,
        transformer.Transformer.extend,
    )
    loss = task.loss
    monkeypatch.setattr(Checkpoints, "restore", wrong_restore)
    monkeypatch.setattr(stack.Stack, "_run", wrong_layers)
    monkeypatch.setattr(transformer.Transformer, "extend", wrong_extend)
    monkeypatch.setattr(task, "loss", wrong_loss)
    held = {row.name for row in verify(tiny) if row.held}
    assert held == {
        "1 device = 1 × 1 × 1 (data, fsdp, tensor)",
        "no token is seen before its place",
    }


@pytest.mark.parametrize(
    ("difference", "held"), [(None, True), (0.0, True), (1e-5, True), (2e-5, False)]
)
def test_a_row_holds_up_to_what_is_allowed(difference, held):
    assert Row("x", difference, 1e-5).held == held


def test_what_is_no_number_does_not_hold():
    assert not Row("x", float("nan"), 1e-5).held


def test_a_token_seen_before_its_place_is_noticed(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(transformer, "CAUSAL", Mask())
    run = verification._Run(tiny)
    params = run.engine.init(jax.random.key(0)).params
    leak = run.engine.task.checks(params, jax.device_put(run.batch(0)))[
        "no token is seen before its place"
    ]
    assert leak > 1e-3
