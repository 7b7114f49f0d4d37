"""Parameter and FLOP counts of every model, in closed form.

D d_model · N num_heads · K key-value heads · d_k, d_v head widths of keys and values ·
F d_ff · V vocabulary · k max_relative_distance · S, T source and target lengths.
Padding rows of embedding tables are not counted.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.models.bert import BertConfig
from transformer_jax.models.convs2s_config import ConvS2SConfig
from transformer_jax.models.gpt import GPTConfig
from transformer_jax.models.recurrent_config import RecurrentConfig
from transformer_jax.models.recurrent_lm import RecurrentLMConfig
from transformer_jax.models.stack import BlockConfig
from transformer_jax.models.transformer import TransformerConfig

GATES = {"lstm": 4, "gru": 3}  # gates of a cell, including the candidate
CARRIES = {"lstm": 2, "gru": 1}  # arrays in a cell's carry


@functools.singledispatch
def num_parameters(config: Any) -> int:
    """Return the number of parameters of the model that `config` describes.

    Raises:
        NotImplementedError: No count is registered for this type of config.
    """
    raise NotImplementedError(
        f"{type(config).__name__}: no parameter count is registered; "
        "add one with @num_parameters.register"
    )


@functools.singledispatch
def forward_flops(config: Any, *lengths: np.ndarray) -> np.ndarray:
    """Return the FLOPs of the matrix products in one forward pass.

    The result is an array of one value per sequence. `lengths` has one array for each
    input of the model, e.g. source and target lengths. A product (m, k) × (k, n) counts
    as 2·m·k·n. Masked scores are counted; padding is not. Training takes three times as
    many FLOPs.

    Raises:
        NotImplementedError: No count is registered for this type of config.
    """
    raise NotImplementedError(
        f"{type(config).__name__}: no FLOP count is registered; "
        "add one with @forward_flops.register"
    )


# The parts of a Transformer, for the counts of every model made of them.


def _norm(config: BlockConfig) -> int:
    return config.d_model * (2 if config.norm_type == "layer_norm" else 1)


def _kv_heads(config: BlockConfig) -> int:
    return config.num_kv_heads or config.num_heads


def stack_parameters(config: BlockConfig, num_layers: int, cross: bool = False) -> int:
    """Count the parameters of a stack.

    Each layer has self-attention, cross-attention if `cross`, a feed-forward network,
    and a norm for each of these:

    heads = N·d_k + K·(d_k + d_v); attention = D·heads + N·d_v·D, plus heads + D with
    biases; ffn = 2·D·F, plus F + D with biases; norm = 2·D for layer norm and D for
    RMSNorm. A gate adds D·F to the ffn, plus F with biases.

    Relative positions add (2k + 1)·(d_k + d_v) to each layer. A relative bias adds N
    for each bucket to the stack. A pre-LN stack has one more norm.
    """
    c, attentions, gated = config, 1 + cross, config.feed_forward == "gated"
    heads = c.num_heads * c.head_dim + _kv_heads(c) * (c.head_dim + c.value_dim)
    attention = (
        c.d_model * heads
        + c.num_heads * c.value_dim * c.d_model
        + c.attention_bias * (heads + c.d_model)
    )
    ffn = (2 + gated) * c.d_model * c.d_ff + c.feed_forward_bias * (
        (1 + gated) * c.d_ff + c.d_model
    )
    relative = (
        (2 * c.max_relative_distance + 1)
        * (c.head_dim + c.value_dim)
        * (c.positions == "relative")
    )
    layer = attentions * attention + ffn + (attentions + 1) * _norm(c) + relative
    bias = c.num_heads * c.relative_buckets * (c.positions == "relative_bias")
    return num_layers * layer + bias + _norm(c) * (c.norm == "pre")


def table_parameters(config: Any, vocab_sizes: int, positions: int = 1) -> int:
    """Count embedding and output tables, and tables of positions.

    `vocab_sizes` is the number of rows of the former in total, and `positions` the
    number of the latter.
    """
    return (
        vocab_sizes + positions * config.max_length * (config.positions == "learned")
    ) * config.d_model


def _attention_flops(
    config: BlockConfig, queries: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """Count projections, scores and weighted sums.

    N·(d_k + d_v) is the total width of queries and output, and of scores and weighted
    sums. That of keys and values is K·(d_k + d_v).
    """
    c = config
    products = (
        c.num_heads * (c.d_model * queries + queries * keys)
        + _kv_heads(c) * c.d_model * keys
    )
    return 2 * (c.head_dim + c.value_dim) * products


def stack_flops(
    config: BlockConfig,
    num_layers: int,
    length: np.ndarray,
    memory: np.ndarray | None = None,
) -> np.ndarray:
    """Count a stack.

    Relative positions take one product of each query with all 2k + 1 distances, for
    keys and values.

    Rotary positions take no matrix product.
    """
    c = config
    maps = 3 if c.feed_forward == "gated" else 2
    layer = _attention_flops(c, length, length) + 2 * maps * length * c.d_model * c.d_ff
    if memory is not None:
        layer = layer + _attention_flops(c, length, memory)
    if c.positions == "relative":
        layer = layer + 2 * length * (2 * c.max_relative_distance + 1) * c.num_heads * (
            c.head_dim + c.value_dim
        )
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
        "embeddings": c.source_vocab_size + c.target_vocab_size,
        "none": c.source_vocab_size + 2 * c.target_vocab_size,
    }
    stacks = stack_parameters(c, c.num_encoder_layers) + stack_parameters(
        c, c.num_decoder_layers, cross=True
    )
    return (
        stacks
        + table_parameters(c, tables[c.tie_embeddings], positions=2)
        + c.output_bias * c.target_vocab_size
        + c.embedding_norm * 2 * _norm(c)
    )


@forward_flops.register
def _transformer_flops(config: TransformerConfig, *lengths: np.ndarray) -> np.ndarray:
    source, target = _float(lengths)
    stacks = stack_flops(config, config.num_encoder_layers, source)
    stacks = stacks + stack_flops(config, config.num_decoder_layers, target, source)
    return stacks + 2 * target * config.d_model * config.target_vocab_size


@num_parameters.register
def _gpt(config: GPTConfig) -> int:
    tables = table_parameters(config, config.vocab_size * (2 - config.tie_embeddings))
    return stack_parameters(config, config.num_layers) + tables


@forward_flops.register
def _gpt_flops(config: GPTConfig, *lengths: np.ndarray) -> np.ndarray:
    (length,) = _float(lengths)
    return (
        stack_flops(config, config.num_layers, length)
        + 2 * length * config.d_model * config.vocab_size
    )


@num_parameters.register
def _bert(config: BertConfig) -> int:
    """Count `Bert` with its pooler, D·D + D.

    The heads have more: a classifier's D·C + C for C classes, those of pre-training D·D
    + 5·D + V + 2. Embeddings of another width E have a map to D, E·D + D.
    """
    pooler = config.d_model * config.d_model + config.d_model
    width = config.embedding_width
    projection = (width + 1) * config.d_model if config.embedding_dim else 0
    read = dataclasses.replace(config, d_model=width, embedding_dim=0)
    tables = table_parameters(read, config.vocab_size + config.num_segments)
    embedded = tables + _norm(read) + projection
    return stack_parameters(config, config.num_layers) + embedded + pooler


@forward_flops.register
def _bert_flops(config: BertConfig, *lengths: np.ndarray) -> np.ndarray:
    """Count the pooler once per sequence, but not the head of `Classifier`."""
    (length,) = _float(lengths)
    pooler = 2 * config.d_model**2 * (length > 0)
    projection = 2 * config.embedding_dim * config.d_model * length
    return stack_flops(config, config.num_layers, length) + projection + pooler


_Map = tuple[int, int]  # inputs and outputs of an affine map


class _Products(NamedTuple):
    """Multiplications per sentence, source position, target position and pair of both.

    The first three together use each weight once, except biases, embeddings, the v of
    additive scores and the damping rate. Their sum is therefore also the number of
    these weights.
    """

    sentence: int
    source: int
    target: int
    pair: int


class AlignmentCount(NamedTuple):
    """Multiplications of a score and its context.

    They are counted per source position, target position and pair of both.

    Every weight matrix is used once at a position. `vectors` counts the parameters
    outside of matrices.
    """

    source: int = 0
    target: int = 0
    pair: int = 0
    vectors: int = 0


def _additive(config: RecurrentConfig) -> AlignmentCount:
    c, d, e = config, config.d_model, config.encoder_dim
    return AlignmentCount(
        e * c.attention_dim,
        d * c.attention_dim,
        c.attention_dim + e,
        vectors=c.attention_dim,
    )


def _multi_head(config: RecurrentConfig) -> AlignmentCount:
    d, e = config.d_model, config.encoder_dim
    return AlignmentCount(source=2 * e * d, target=d * d + d * e, pair=2 * d)


# One row for each value of RecurrentConfig.attention.
ALIGNMENT_COUNTS: dict[str, Callable[[RecurrentConfig], AlignmentCount]] = {
    "none": lambda config: AlignmentCount(),
    "additive": _additive,
    "concat": _additive,
    "dot": lambda config: AlignmentCount(pair=config.d_model + config.encoder_dim),
    "general": lambda config: AlignmentCount(
        target=config.d_model * config.encoder_dim, pair=2 * config.encoder_dim
    ),
    "scaled_dot": _multi_head,
    "multi_head": _multi_head,
}


def _recurrent_products(config: RecurrentConfig) -> _Products:
    c, d, e = config, config.d_model, config.encoder_dim
    directions, gates = 1 + c.bidirectional, GATES[c.cell]
    width = e // directions

    def recurrence(inputs: int, width: int, first: int) -> int:
        """Count all layers at one position.

        The first layer has `first` inputs, the others `inputs`.
        """
        return gates * width * (first + width + (c.num_layers - 1) * (inputs + width))

    if c.decoder == "luong":
        more, readout = d * c.input_feeding, (e + d) * d
    else:
        more = e * c.reads_context
        readout = (
            2 * c.readout_dim * (d + e + c.embedding_dim)
            if c.readout == "maxout" and c.reads_context
            else 0
        )
    alignment = ALIGNMENT_COUNTS[c.attention](c)
    encoder = directions * recurrence(e, width, c.embedding_dim)
    bridges = c.num_layers * CARRIES[c.cell] * width * d * c.bidirectional
    if c.encoder == "none":
        encoder = 0
        bridges = c.num_layers * CARRIES[c.cell] * e * d
    return _Products(
        sentence=bridges,
        source=encoder + alignment.source,
        target=(
            recurrence(d, d, c.embedding_dim + more)
            + readout
            + c.output_dim * c.target_vocab_size
            + alignment.target
            + (d * d + d) * (c.local_window > 0)
            + d * c.context_gate
        ),
        pair=alignment.pair,
    )


@num_parameters.register
def _recurrent(config: RecurrentConfig) -> int:
    """Add the biases to the products.

    There are four per unit of a cell (a GRU's candidate has two), and those of bridges,
    maxout and output.
    """
    c, (sentence, source, target, _) = config, _recurrent_products(config)
    has_encoder = c.encoder == "recurrent"
    units = c.encoder_dim * has_encoder + c.d_model
    biases = 4 * c.num_layers * units + c.target_vocab_size + c.context_gate
    has_bridges = c.bidirectional or not has_encoder
    biases += c.num_layers * CARRIES[c.cell] * c.d_model * has_bridges
    biases += 2 * c.readout_dim * (c.readout == "maxout")
    width = c.encoder_dim // (1 + c.bidirectional)
    inputs = GATES[c.cell] * (2 * c.encoder_dim + width) + 4  # of a unit of a pyramid
    source += c.pyramid_layers * c.encoder_dim * inputs
    vectors = ALIGNMENT_COUNTS[c.attention](c).vectors
    embeddings = (c.source_vocab_size + c.target_vocab_size) * c.embedding_dim
    return embeddings + sentence + source + target + biases + vectors + c.damping


@forward_flops.register
def _recurrent_flops(config: RecurrentConfig, *lengths: np.ndarray) -> np.ndarray:
    """Omit the extra logits that training computes with teacher forcing below 1.

    Training needs them to feed predicted words back.
    """
    s, t = _float(lengths)
    products = _recurrent_products(config)
    return 2 * (
        products.sentence
        + s * products.source
        + t * products.target
        + s * t * products.pair
    )


@num_parameters.register
def _recurrent_lm(config: RecurrentLMConfig) -> int:
    """Count 2·g·D² + 4·D for each layer of cells with g gates.

    An output layer that is not tied adds a bias.
    """
    c, untied = config, not config.tie_embeddings
    layer = 2 * GATES[c.cell] * c.d_model**2 + 4 * c.d_model
    return c.num_layers * layer + c.vocab_size * (c.d_model * (1 + untied) + untied)


@forward_flops.register
def _recurrent_lm_flops(config: RecurrentLMConfig, *lengths: np.ndarray) -> np.ndarray:
    c, (length,) = config, _float(lengths)
    return (
        2
        * length
        * (c.num_layers * 2 * GATES[c.cell] * c.d_model**2 + c.d_model * c.vocab_size)
    )


def _convs2s_maps(config: ConvS2SConfig) -> tuple[list[_Map], list[_Map]]:
    """Return (inputs, outputs) of each affine map of a source and a target position.

    An encoder layer has a convolution, K·D → 2·D. A decoder layer also has two maps
    around its attention, D → E and E → D.
    """
    c, e, d = config, config.embedding_dim, config.d_model
    convolution = (c.encoder_kernel_width * d, 2 * d)
    source = [(e, d), *[convolution] * c.num_encoder_layers, (d, e)]
    convolution = (c.decoder_kernel_width * d, 2 * d)
    layers = [convolution, (d, e), (e, d)] * c.num_decoder_layers
    return source, [(e, d), *layers, (d, e), (e, c.target_vocab_size)]


@num_parameters.register
def _convs2s(config: ConvS2SConfig) -> int:
    """Count n·m weights and m biases of a map from n to m units, and with weight
    normalization m gains.
    """
    source, target = _convs2s_maps(config)
    vectors = 1 + config.weight_norm
    maps = sum(m * (n + vectors) for n, m in source + target)
    rows = config.source_vocab_size + config.target_vocab_size + 2 * config.max_length
    return maps + rows * config.embedding_dim


@forward_flops.register
def _convs2s_flops(config: ConvS2SConfig, *lengths: np.ndarray) -> np.ndarray:
    """Count E for a score of a pair of positions, and E for its part of the context."""
    s, t = _float(lengths)
    of_source, of_target = (
        sum(n * m for n, m in maps) for maps in _convs2s_maps(config)
    )
    pairs = 2 * config.num_decoder_layers * config.embedding_dim
    return 2 * (s * of_source + t * of_target + s * t * pairs)
