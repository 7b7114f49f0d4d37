"""Parameters and FLOPs of every model, in closed form.

D d_model · N num_heads · d_k, d_v widths of a head · F d_ff · V vocabulary · k max_relative_distance · B, S, T lengths.
Padding rows of embedding tables are not counted.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.models.bert import BertConfig
from transformer_jax.models.gpt import GPTConfig
from transformer_jax.models.recurrent import RecurrentConfig
from transformer_jax.models.stack import BlockConfig
from transformer_jax.models.transformer import TransformerConfig

GATES = {"lstm": 4, "gru": 3}  # a cell's gates, including the candidate
CARRIES = {"lstm": 2, "gru": 1}  # arrays that a cell hands to its next step


@functools.singledispatch
def num_parameters(config: Any) -> int:
    """Return the number of parameters of the model with this config."""
    raise NotImplementedError(f"register the parameters of a {type(config).__name__} with num_parameters")


@functools.singledispatch
def forward_flops(config: Any, *lengths: np.ndarray) -> np.ndarray:
    """Return the FLOPs of the matrix products in one forward pass over sequences of these lengths.

    `lengths` are those of the model's inputs, e.g. source and target. Training takes three times as many FLOPs. A
    product (m, k) × (k, n) counts 2·m·k·n; masked scores count, padding does not.
    """
    raise NotImplementedError(f"register the products of a {type(config).__name__} with forward_flops")


# The parts of a Transformer.


def _norm(config: BlockConfig) -> int:
    return 2 * config.d_model


def _stack(config: BlockConfig, num_layers: int, cross: bool = False) -> int:
    """Count a stack: each layer has attention (two with `cross`), a feed-forward network, and a norm for each of them.

    attention(D) = D·N·(2 d_k + d_v) + N·d_v·D, plus biases N·(2 d_k + d_v) + D; ffn = 2·D·F + F + D; norm = 2·D;
    relative positions have (2k + 1)·(d_k + d_v) in each layer; a pre-LN stack has one more norm.
    """
    c, attentions = config, 1 + cross
    heads = c.num_heads * (2 * c.head_dim + c.value_dim)
    attention = c.d_model * heads + c.num_heads * c.value_dim * c.d_model + c.attention_bias * (heads + c.d_model)
    ffn = 2 * c.d_model * c.d_ff + c.d_ff + c.d_model
    relative = (2 * c.max_relative_distance + 1) * (c.head_dim + c.value_dim) * (c.positions == "relative")
    layer = attentions * attention + ffn + (attentions + 1) * _norm(c) + relative
    return num_layers * layer + _norm(c) * (c.norm == "pre")


def _tables(config: Any, vocab_sizes: int, positions: int = 1) -> int:
    """Count embedding and output tables of V rows in all, and so many tables of positions."""
    return (vocab_sizes + positions * config.max_length * (config.positions == "learned")) * config.d_model


def _attention_flops(config: BlockConfig, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Count projections, scores and averages; N·(d_k + d_v) is the width of each pair of them."""
    width = config.num_heads * (config.head_dim + config.value_dim)
    return 2 * width * (config.d_model * (queries + keys) + queries * keys)


def _stack_flops(
    config: BlockConfig, num_layers: int, length: np.ndarray, memory: np.ndarray | None = None
) -> np.ndarray:
    """Relative positions count with all their 2k + 1 distances for every query; rotations are not products."""
    c = config
    layer = _attention_flops(c, length, length) + 4 * length * c.d_model * c.d_ff
    if memory is not None:
        layer = layer + _attention_flops(c, length, memory)
    if c.positions == "relative":
        layer = layer + 2 * length * (2 * c.max_relative_distance + 1) * c.num_heads * (c.head_dim + c.value_dim)
    return num_layers * layer


def _float(lengths: tuple[Any, ...]) -> list[np.ndarray]:
    return [np.asarray(length, np.float64) for length in lengths]


# The models.


@num_parameters.register
def _transformer(config: TransformerConfig) -> int:
    c = config
    tables = {
        "all": c.target_vocab_size,
        "decoder": c.source_vocab_size + c.target_vocab_size,
        "none": c.source_vocab_size + 2 * c.target_vocab_size,
    }
    stacks = _stack(c, c.num_encoder_layers) + _stack(c, c.num_decoder_layers, cross=True)
    return stacks + _tables(c, tables[c.tie_embeddings], positions=2) + c.output_bias * c.target_vocab_size


@forward_flops.register
def _transformer_flops(config: TransformerConfig, *lengths: np.ndarray) -> np.ndarray:
    source, target = _float(lengths)
    stacks = _stack_flops(config, config.num_encoder_layers, source)
    stacks = stacks + _stack_flops(config, config.num_decoder_layers, target, source)
    return stacks + 2 * target * config.d_model * config.target_vocab_size


@num_parameters.register
def _gpt(config: GPTConfig) -> int:
    return _stack(config, config.num_layers) + _tables(config, config.vocab_size * (2 - config.tie_embeddings))


@forward_flops.register
def _gpt_flops(config: GPTConfig, *lengths: np.ndarray) -> np.ndarray:
    (length,) = _float(lengths)
    return _stack_flops(config, config.num_layers, length) + 2 * length * config.d_model * config.vocab_size


@num_parameters.register
def _bert(config: BertConfig) -> int:
    """Count the pooler, D·D + D, but no head: `Classifier` adds D·classes + classes."""
    pooler = config.d_model * config.d_model + config.d_model
    tables = _tables(config, config.vocab_size + config.num_segments)
    return _stack(config, config.num_layers) + tables + _norm(config) + pooler


@forward_flops.register
def _bert_flops(config: BertConfig, *lengths: np.ndarray) -> np.ndarray:
    """Count the pooler, once per sequence, but no head."""
    (length,) = _float(lengths)
    return _stack_flops(config, config.num_layers, length) + 2 * config.d_model**2 * (length > 0)


class _Products(NamedTuple):
    """Multiplications per sentence, source position, target position and pair of both.

    All weights but biases, embeddings and v of additive scores are used once in each of the first three.
    """

    sentence: int
    source: int
    target: int
    pair: int


def _recurrent_products(config: RecurrentConfig) -> _Products:
    c, d, e = config, config.d_model, config.encoder_dim
    directions, gates = 1 + c.bidirectional, GATES[c.cell]
    width = e // directions

    def recurrence(inputs: int, width: int, first: int) -> int:
        """Count all layers at one position. The first layer has `first` inputs."""
        return gates * width * (first + width + (c.num_layers - 1) * (inputs + width))

    if c.luong_decoder:
        more, readout = d * c.input_feeding, (e + d) * d
    else:
        more = e * c.reads_context
        readout = 2 * c.readout_dim * (d + e + c.embedding_dim) if c.readout == "maxout" and c.reads_context else 0
    source, target, pair = {
        "none": (0, 0, 0),
        "additive": (e * c.attention_dim, d * c.attention_dim, c.attention_dim + e),
        "dot": (0, 0, d + e),
        "general": (0, d * e, 2 * e),
        "multi_head": (2 * e * d, d * d + d * e, 2 * d),
    }[{"concat": "additive", "scaled_dot": "multi_head"}.get(c.attention, c.attention)]
    return _Products(
        sentence=c.num_layers * CARRIES[c.cell] * width * d * c.bidirectional,
        source=directions * recurrence(e, width, c.embedding_dim) + source,
        target=(
            recurrence(d, d, c.embedding_dim + more)
            + readout
            + c.output_dim * c.target_vocab_size
            + target
            + (d * d + d) * (c.local_window > 0)
        ),
        pair=pair,
    )


@num_parameters.register
def _recurrent(config: RecurrentConfig) -> int:
    """Add biases: four per unit of a cell (a GRU's candidate has two), and those of bridges, maxout and the output."""
    c, (sentence, source, target, _) = config, _recurrent_products(config)
    biases = 4 * c.num_layers * (c.encoder_dim + c.d_model) + c.target_vocab_size
    biases += c.num_layers * CARRIES[c.cell] * c.d_model * c.bidirectional
    biases += 2 * c.readout_dim * (c.readout == "maxout")
    v = c.attention_dim * (c.attention in ("additive", "concat"))
    embeddings = (c.source_vocab_size + c.target_vocab_size) * c.embedding_dim
    return embeddings + sentence + source + target + biases + v + c.damping


@forward_flops.register
def _recurrent_flops(config: RecurrentConfig, *lengths: np.ndarray) -> np.ndarray:
    """Leave out the model's own words, which it predicts in training when teacher forcing is below 1."""
    s, t = _float(lengths)
    products = _recurrent_products(config)
    return 2 * (products.sentence + s * products.source + t * products.target + s * t * products.pair)
