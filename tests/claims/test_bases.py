"""The training that several claims share."""

from helpers import ROOT
from transformer_jax.claims import beam, heads, size, smoothing
from transformer_jax.claims.bases import BASE, base, in_paper
from transformer_jax.config import load_recipe


def test_claims_share_the_base():
    shared = (
        heads.condition(4),
        size.of_width(128),
        beam.condition(50, normalized=True),
        smoothing.CLAIM.conditions["smoothing 0.1"],
    )
    assert all(condition.training == BASE.training for condition in shared)


def test_keys_and_options_are_added():
    condition = base({"model.d_ff": 64}, {"model.d_ff": 8}, overrides={"a": 1})
    assert condition.keys == {**BASE.keys, "model.d_ff": 64}
    assert condition.quick == {**BASE.quick, "model.d_ff": 8}
    assert condition.design["overrides"] == {"a": "1"}
    assert "overrides" not in BASE.design


def test_the_rows_of_the_paper_exist():
    for claim in (heads, size, smoothing):
        for command in claim.CLAIM.paper:
            recipe = command.split("--config=")[1].split()[0]
            config = load_recipe(str(ROOT / recipe))
            assert config.model.num_heads in (1, 8, 16, 32)
    (command,) = in_paper("big")
    assert command.endswith("--config=configs/wmt14.py:big --workdir=runs/big")
