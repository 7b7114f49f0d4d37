"""Schedules and Adam against NumPy float64; weight decay; clipping."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import oracle
from transformer_jax.models import Transformer, TransformerConfig
from transformer_jax.models.alignment import ALIGNMENTS
from transformer_jax.models.bert import (
    BertConfig,
    Classifier,
    Pretraining,
    TokenClassifier,
)
from transformer_jax.models.convs2s import ConvS2S
from transformer_jax.models.convs2s_config import ConvS2SConfig
from transformer_jax.models.gpt import GPT, GPTConfig
from transformer_jax.models.positions import POSITIONS
from transformer_jax.models.recurrent import RecurrentSeq2Seq
from transformer_jax.models.recurrent_config import RecurrentConfig
from transformer_jax.models.recurrent_lm import RecurrentLM, RecurrentLMConfig
from transformer_jax.models.transformer import TIES
from transformer_jax.training.matrices import Block, blocks
from transformer_jax.training.optimizer import (
    DECAYING,
    OptimizerConfig,
    make_optimizer,
    schedule,
)

SCHEDULES = {
    "noam": OptimizerConfig(warmup_steps=17, learning_rate=2.0),
    "noam, no warm-up": OptimizerConfig(warmup_steps=0),
    "inverse_sqrt": OptimizerConfig(
        schedule="inverse_sqrt", learning_rate=5e-4, warmup_steps=17
    ),
    "inverse_sqrt, no warm-up": OptimizerConfig(
        schedule="inverse_sqrt", learning_rate=5e-4, warmup_steps=0
    ),
    "cosine": OptimizerConfig(
        schedule="cosine", learning_rate=0.3, warmup_steps=17, decay_steps=1009
    ),
    "cosine to a tenth": OptimizerConfig(
        schedule="cosine",
        learning_rate=0.3,
        warmup_steps=17,
        decay_steps=1009,
        end_fraction=0.1,
    ),
    "cosine, no warm-up": OptimizerConfig(
        schedule="cosine", learning_rate=0.3, warmup_steps=0, decay_steps=1009
    ),
    "linear": OptimizerConfig(
        schedule="linear", learning_rate=0.3, warmup_steps=17, decay_steps=1009
    ),
    "linear to a tenth": OptimizerConfig(
        schedule="linear",
        learning_rate=0.3,
        warmup_steps=17,
        decay_steps=1009,
        end_fraction=0.1,
    ),
    "linear, no warm-up": OptimizerConfig(
        schedule="linear", learning_rate=0.3, warmup_steps=0, decay_steps=1009
    ),
    "constant": OptimizerConfig(
        schedule="constant", learning_rate=0.3, warmup_steps=17
    ),
    "constant, no warm-up": OptimizerConfig(
        schedule="constant", learning_rate=0.3, warmup_steps=0
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_their_formulas(name):
    config = SCHEDULES[name]
    rate = jax.jit(schedule(config, 512, 1009))
    for n in (*range(1, 40), 500, 1007, 1008, 1009, 1010, 5000, 300_000):
        expected = oracle.learning_rate(config, 512, n)
        np.testing.assert_allclose(
            rate(n - 1), expected, rtol=2e-6, atol=1e-7 * config.learning_rate
        )


def test_noam_peaks_at_the_end_of_warm_up():
    rates = np.asarray(schedule(OptimizerConfig(), 512, 1009)(np.arange(20_000)))
    assert rates.argmax() + 1 == 4000
    np.testing.assert_allclose(rates.max(), 6.98771e-4, rtol=1e-5)
    np.testing.assert_allclose(np.diff(rates[:3999]), rates[0], rtol=1e-2)
    np.testing.assert_allclose(rates[15_999], rates.max() / 2, rtol=1e-5)


@pytest.mark.parametrize("name", ["inverse_sqrt", "cosine", "linear", "constant"])
def test_the_others_reach_their_learning_rate_at_the_end_of_warm_up(name):
    config = SCHEDULES[name]
    rates = np.asarray(schedule(config, 512, 1009)(np.arange(2000)))
    np.testing.assert_allclose(rates.max(), config.learning_rate, rtol=1e-6)
    np.testing.assert_allclose(rates[16], config.learning_rate, rtol=1e-6)
    assert (rates > 0).all() == (name not in DECAYING)


@pytest.mark.parametrize("kind", DECAYING)
def test_decay_ends_where_it_is_told_and_stays(kind):
    for name, end in {kind: 0.0, f"{kind} to a tenth": 0.03}.items():
        rates = np.asarray(
            schedule(SCHEDULES[name], 512, 1009)(np.array([1008, 1009, 5000]))
        )
        np.testing.assert_allclose(rates, end, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", DECAYING)
def test_decay_ends_with_the_run_unless_told_otherwise(kind):
    config = OptimizerConfig(schedule=kind, learning_rate=0.3, warmup_steps=17)
    for steps in (1009, 2018):
        told = dataclasses.replace(config, decay_steps=steps)
        n = np.arange(0, 2100, 7)
        np.testing.assert_array_equal(
            schedule(config, 512, steps)(n), schedule(told, 512, 1)(n)
        )
    # the run ends within the warm-up
    rates = np.asarray(schedule(config, 512, 10)(np.arange(10)))
    np.testing.assert_allclose(rates, 0.3 * np.arange(1, 11) / 17, rtol=1e-6)


# The last part of every parameter's path, and whether weight decay applies to it.
DECAYS = {
    "bias": False,
    "damping": False,
    "kernel": True,
    "key_table": True,
    "position_v": False,
    "scale": False,
    "segments": True,
    "table": True,
    "v": False,
    "value_table": True,
    "w": True,
}


SIZES = {
    "d_model": 8,
    "d_ff": 12,
    "num_heads": 2,
    "head_dim": 4,
    "value_dim": 4,
    "max_length": 12,
}


def transformer(**options):
    sizes = {
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "source_vocab_size": 11,
        "target_vocab_size": 11,
    }
    return Transformer(TransformerConfig(**SIZES, **sizes, **options))


def gpt(**options):
    return GPT(GPTConfig(**SIZES, num_layers=2, vocab_size=11, **options))


def bert(**options):
    return BertConfig(**SIZES, num_layers=2, vocab_size=11, **options)


def recurrent(**options):
    return RecurrentSeq2Seq(
        RecurrentConfig(source_vocab_size=11, target_vocab_size=13, **options)
    )


MODELS = {
    f"transformer: {positions}, ties {ties}, {norm}-LN": transformer(
        positions=positions, tie_embeddings=ties, output_bias=ties == "none", norm=norm
    )
    for positions in POSITIONS
    for ties in TIES
    for norm in ("pre", "post")
}
MODELS |= {f"gpt: {positions}": gpt(positions=positions) for positions in POSITIONS}
MODELS |= {
    f"bert: {positions}": Classifier(bert(positions=positions), 3)
    for positions in POSITIONS
}
MODELS |= {
    "gpt: untied, pre-LN": gpt(tie_embeddings=False, norm="pre"),
    "gpt: gated, shared keys": gpt(
        feed_forward="gated", num_kv_heads=1, norm_type="rms_norm"
    ),
    "bert: pre-LN": Classifier(bert(norm="pre"), 3),
}
MODELS |= {
    "bert: pre-training": Pretraining(bert()),
    "bert: tags": TokenClassifier(bert(), 3, feature_layers=2),
}
MODELS |= {
    f"recurrent: {attention}": recurrent(attention=attention)
    for attention in ("none", *ALIGNMENTS)
}
MODELS |= {
    "recurrent: damping, local window": recurrent(
        attention="scaled_dot", damping=True, local_window=2
    ),
    "recurrent: LSTM": recurrent(cell="lstm", num_layers=2),
    "recurrent: Bahdanau": recurrent(
        attention="additive", bidirectional=True, readout="maxout"
    ),
    "recurrent language model": RecurrentLM(
        RecurrentLMConfig(vocab_size=11, d_model=7)
    ),
    "convs2s": ConvS2S(ConvS2SConfig(source_vocab_size=11, target_vocab_size=13)),
    "recurrent: Luong": recurrent(
        attention="general", input_feeding=True, local_window=2
    ),
}


def boxed_parameters(model):
    ids = np.zeros((1, 1), np.int32)
    of_bert = isinstance(model, Classifier | TokenClassifier | Pretraining)
    inputs = (
        (ids,) if isinstance(model, GPT) else (ids, ids > 0) if of_bert else (ids, ids)
    )
    return jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]


def test_every_parameter_decays_if_and_only_if_it_is_a_matrix():
    """Every name in DECAYS must occur in a model, too, or a wrong line of DECAYS could
    go unnoticed.
    """
    found = set()
    for name, model in MODELS.items():
        boxed = boxed_parameters(model)
        leaves = jax.tree_util.tree_leaves_with_path(nn.unbox(boxed))
        kinds = [jax.tree_util.keystr(path[-1:], simple=True) for path, _ in leaves]
        marks = [block.is_matrix for block in blocks(boxed)]
        for kind, (path, _), mark in zip(kinds, leaves, marks, strict=True):
            assert mark == DECAYS[kind], (name, jax.tree_util.keystr(path))
        assert {*marks} == {True, False}, name
        found.update(kinds)
    assert found == DECAYS.keys()


def test_decay_acts_on_boxed_and_unboxed_parameters_alike():
    model = MODELS["transformer: learned, ties none, pre-LN"]
    boxed = jax.jit(model.init)(jax.random.key(0), *np.zeros((2, 1, 1), np.int32))
    boxed = boxed["params"]
    config = OptimizerConfig(
        schedule="constant", learning_rate=1.0, warmup_steps=0, weight_decay=0.5
    )
    matrices = blocks(boxed)
    optimizer = make_optimizer(config, schedule(config, 8, 1), matrices)
    for params in (boxed, nn.unbox(boxed)):
        updates, _ = jax.jit(optimizer.update)(
            jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
        )
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        for update, param, block in zip(
            jax.tree.leaves(updates), jax.tree.leaves(params), matrices, strict=True
        ):
            np.testing.assert_allclose(update, -0.5 * block.is_matrix * param)


PARAMS = {
    "kernel": np.float32(np.random.default_rng(0).normal(size=(3, 5))),
    "bias": np.float32(np.random.default_rng(1).normal(size=5)),
    "scale": np.float32(np.random.default_rng(2).normal(size=7)),
    "table": np.float32(np.random.default_rng(3).normal(size=(7, 3))),
}
BLOCKS = [Block((0,), (1,)) if DECAYS[name] else Block((0,)) for name in sorted(PARAMS)]


def some_gradients(steps=4):
    rng = np.random.default_rng(4)
    sizes = (1.0, 0.01, 3.0, 0.2)[:steps]
    return [
        {
            name: np.float32(size * rng.normal(size=p.shape))
            for name, p in PARAMS.items()
        }
        for size in sizes
    ]


def updated(config, gradients):
    optimizer, params = (
        make_optimizer(config, schedule(config, 512, 1), BLOCKS),
        jax.tree.map(jnp.asarray, PARAMS),
    )
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"b1": 0.8, "b2": 0.9, "epsilon": 1e-2},
        {"weight_decay": 0.1},
        {"clip_norm": 0.5},
        {"clip_norm": 0.5, "weight_decay": 0.1, "epsilon": 1e-2},
    ],
)
def test_updates_are_adams(changes, steps):
    config = OptimizerConfig(
        schedule="constant", learning_rate=0.1, warmup_steps=2, **changes
    )
    rates = [0.05, 0.1, 0.1, 0.1][:steps]
    found = updated(config, some_gradients(steps))
    expected = oracle.adam(
        PARAMS,
        some_gradients(steps),
        rates,
        b1=config.b1,
        b2=config.b2,
        epsilon=config.epsilon,
        weight_decay=config.weight_decay,
        decayed=("kernel", "table"),
        clip_norm=config.clip_norm,
    )
    for name, p in PARAMS.items():
        assert oracle.relative(found[name] - p, expected[name] - p) <= 1e-5


def test_the_first_update_moves_every_parameter_by_the_learning_rate():
    (gradient,) = some_gradients(1)
    found = updated(
        OptimizerConfig(schedule="constant", learning_rate=0.1, warmup_steps=0),
        [gradient],
    )
    for name, p in PARAMS.items():
        np.testing.assert_allclose(
            found[name] - p, -0.1 * np.sign(gradient[name]), rtol=1e-5
        )


def first_moment(config, gradient):
    optimizer = make_optimizer(config, schedule(config, 512, 1), BLOCKS)
    _, state = optimizer.update(gradient, optimizer.init(PARAMS), PARAMS)
    (adam,) = [part for part in state if isinstance(part, optax.ScaleByAdamState)]
    return jax.tree.map(lambda m: np.asarray(m) / np.float32(1 - config.b1), adam.mu)


def test_clipping_cuts_to_the_norm_and_leaves_what_is_below():
    (gradient,) = some_gradients(1)
    norm = float(optax.tree.norm(gradient))
    untouched = first_moment(OptimizerConfig(), gradient)
    below = first_moment(OptimizerConfig(clip_norm=1.01 * norm), gradient)
    jax.tree.map(np.testing.assert_array_equal, below, untouched)
    cut = first_moment(OptimizerConfig(clip_norm=0.25 * norm), gradient)
    np.testing.assert_allclose(optax.tree.norm(cut), 0.25 * norm, rtol=1e-5)
    for name, g in gradient.items():
        np.testing.assert_allclose(cut[name], 0.25 * g, rtol=1e-5)


def test_only_the_learning_rate_and_the_decay_act_on_parameters_without_gradient():
    config = OptimizerConfig(
        schedule="constant", learning_rate=0.1, warmup_steps=0, weight_decay=0.3
    )
    found = updated(config, [jax.tree.map(np.zeros_like, PARAMS)])
    for name, p in PARAMS.items():
        np.testing.assert_allclose(
            found[name], p * (0.97 if name in ("kernel", "table") else 1), rtol=1e-6
        )


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        (
            {"name": "adm"},
            "name",
            "must be one of adamw, adam, sgd, adadelta, lion, adafactor, muon, "
            "schedule_free",
        ),
        (
            {"name": "schedule_free", "schedule": "cosine"},
            "schedule",
            "must be 'constant' for schedule_free, which averages parameters "
            "instead of lowering the rate",
        ),
        (
            {"name": "schedule_free", "schedule": "constant", "b1": 0.0},
            "b1",
            "must be positive for schedule_free, e.g. 0.9",
        ),
        (
            {"name": "adam", "weight_decay": 0.1},
            "weight_decay",
            "must be 0 for adam: set optimizer.name = 'adamw'",
        ),
        (
            {"schedule": "step"},
            "schedule",
            "must be one of noam, inverse_sqrt, cosine, linear, constant",
        ),
        (
            {"learning_rate": 0.0},
            "learning_rate",
            "must be positive and below 1e38, to fit into float32",
        ),
        (
            {"epsilon": -1e-9},
            "epsilon",
            "must be positive and below 1e38, to fit into float32",
        ),
        (
            {"warmup_steps": -1},
            "warmup_steps",
            "must be finite and not negative; 0 disables it",
        ),
        (
            {"weight_decay": -0.1},
            "weight_decay",
            "must be finite and not negative; 0 disables it",
        ),
        (
            {"clip_norm": -1.0},
            "clip_norm",
            "must be finite and not negative; 0 disables it",
        ),
        ({"b1": 1.0}, "b1", "must be in [0, 1)"),
        ({"b2": -0.1}, "b2", "must be in [0, 1)"),
        ({"end_fraction": 1.1}, "end_fraction", "must be in [0, 1]"),
        *(
            (
                {"schedule": kind, "decay_steps": 4000},
                "decay_steps",
                (
                    "must be greater than 1 and than warmup_steps = 4000, "
                    "or 0 for training.steps"
                ),
            )
            for kind in DECAYING
        ),
    ],
)
def test_what_is_wrong_with_a_config_is_said(changes, field, rule):
    assert list(OptimizerConfig(**changes).problems()) == [(field, rule)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_is_wrong_with_the_others(name):
    assert not list(SCHEDULES[name].problems())


def test_decay_without_room_and_nan_are_refused():
    """warmup_steps = 0 counts as 1, so decay_steps = 1 leaves no room.

    Comparisons with NaN are never true.
    """
    for kind in DECAYING:
        config = OptimizerConfig(schedule=kind, warmup_steps=0, decay_steps=1)
        assert [name for name, _ in config.problems()] == ["decay_steps"]
    config = OptimizerConfig(learning_rate=float("nan"), clip_norm=float("nan"))
    assert [name for name, _ in config.problems()] == ["learning_rate", "clip_norm"]
