"""How many parameters a Transformer has, and how many FLOPs a model takes, in closed form."""

import functools
from typing import Any

import numpy as np

from transformer_jax.models.recurrent import RecurrentConfig
from transformer_jax.models.transformer import TransformerConfig

GATES = {"lstm": 4, "gru": 3}  # a cell's gates, the candidate counted
CARRIES = {"lstm": 2, "gru": 1}  # arrays that it hands on


def num_parameters(config: TransformerConfig) -> int:
    """The number of parameters in closed form, the padding rows of the embedding tables left out.

    attention(D) = D·N·(2 d_k + d_v) + N·d_v·D, plus biases N·(2 d_k + d_v) + D;
    ffn = 2·D·F + F + D; norm = 2·D; an encoder layer has one attention, one ffn and two norms, a decoder
    layer two, one and three; a pre-LN stack one norm more; V·D for every separate embedding or output table;
    max_length·D for each table of learned positions, (2k + 1)·(d_k + d_v) a layer for relative ones.
    """
    c = config
    heads = c.num_heads * (2 * c.head_dim + c.value_dim)
    attention = c.d_model * heads + c.num_heads * c.value_dim * c.d_model
    if c.attention_bias:
        attention += heads + c.d_model
    ffn, norm = 2 * c.d_model * c.d_ff + c.d_ff + c.d_model, 2 * c.d_model
    total = c.num_encoder_layers * (attention + ffn + 2 * norm)
    total += c.num_decoder_layers * (2 * attention + ffn + 3 * norm)
    total += 2 * norm * (c.norm == "pre")
    if c.positions == "relative":
        distances = 2 * c.max_relative_distance + 1
        total += (c.num_encoder_layers + c.num_decoder_layers) * distances * (c.head_dim + c.value_dim)
    tables = {
        "all": c.target_vocab_size,
        "decoder": c.source_vocab_size + c.target_vocab_size,
        "none": c.source_vocab_size + 2 * c.target_vocab_size,
    }
    total += tables[c.tie_embeddings] * c.d_model + c.output_bias * c.target_vocab_size
    return total + 2 * c.max_length * c.d_model * (c.positions == "learned")


@functools.singledispatch
def forward_flops(config: Any, source_lengths: np.ndarray, target_lengths: np.ndarray) -> np.ndarray:
    """FLOPs of the matrix products in one forward pass over pairs of these lengths; training takes three times it.

    A product (m, k) × (k, n) counts 2·m·k·n; masked scores count, padding does not. `config` is a model's.
    """
    raise NotImplementedError(f"register the products of a {type(config).__name__} with forward_flops")


@forward_flops.register
def _transformer_flops(config: TransformerConfig, source_lengths: np.ndarray, target_lengths: np.ndarray) -> np.ndarray:
    """Relative positions count with all their 2k + 1 distances for every query; rotations are no products."""
    c, s, t = config, np.asarray(source_lengths, np.float64), np.asarray(target_lengths, np.float64)
    mix = c.num_heads * (c.head_dim + c.value_dim)  # queries and output, keys and values, or scores and average
    ffn = 2 * c.d_model * c.d_ff
    relations = (2 * c.max_relative_distance + 1) * mix if c.positions == "relative" else 0
    encoder = s * (2 * c.d_model * mix + ffn + relations) + s * s * mix
    decoder = t * (3 * c.d_model * mix + ffn + relations) + s * c.d_model * mix + t * t * mix + t * s * mix
    logits = t * c.d_model * c.target_vocab_size
    return 2 * (c.num_encoder_layers * encoder + c.num_decoder_layers * decoder + logits)


@forward_flops.register
def _recurrent_flops(config: RecurrentConfig, source_lengths: np.ndarray, target_lengths: np.ndarray) -> np.ndarray:
    """Words of the model's own, which teacher forcing below 1 needs, do not count."""
    c, s, t = config, np.asarray(source_lengths, np.float64), np.asarray(target_lengths, np.float64)
    directions, gates = 1 + c.bidirectional, GATES[c.cell]
    width, d, e = c.encoder_dim // directions, c.d_model, c.encoder_dim

    def recurrence(inputs: int, width: int, first: int) -> int:
        """Of all layers at a position, the first of which has other inputs."""
        return gates * width * (first + width + (c.num_layers - 1) * (inputs + width))

    source = directions * recurrence(e, width, c.embedding_dim)
    more = {"none": e * (c.summary == "every_step"), "additive": e}.get(c.attention, d * c.input_feeding)
    target = recurrence(d, d, c.embedding_dim + more) + c.output_dim * c.target_vocab_size
    per_pair = e + d  # scores and contexts
    if c.attention in ("additive", "concat"):
        source, target, per_pair = source + e * c.attention_dim, target + d * c.attention_dim, c.attention_dim + e
    elif c.attention == "general":
        target, per_pair = target + d * e, 2 * e
    elif c.attention in ("scaled_dot", "multi_head"):
        source, target, per_pair = source + 2 * e * d, target + d * d + d * e, 2 * d
    if c.local_window:
        target += d * d + d
    if c.luong_decoder:
        target += (e + d) * d
    elif c.readout == "maxout" and c.reads_context:
        target += 2 * c.readout_dim * (d + e + c.embedding_dim)
    bridges = c.num_layers * CARRIES[c.cell] * width * d * c.bidirectional
    return 2 * (bridges + s * source + t * target + s * t * per_pair * (c.attention != "none"))
