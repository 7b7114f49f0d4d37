"""The models of the recipes in PyTorch, with its fused attention, for comparisons of
speed.

They are what a careful user of PyTorch writes: one product for queries, keys and
values, `scaled_dot_product_attention`, and no Python in a layer that a kernel could do.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
# What these models have; a recipe that differs is refused.
FIXED = {
    "norm_type": "layer_norm",
    "feed_forward": "plain",
    "num_kv_heads": 0,
    "attention_window": 0,
    "qk_norm": False,
}


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, Section 3.2.2)."""

    def __init__(self, c: Any, causal: bool = False, crosses: bool = False):
        super().__init__()
        width = c.num_heads * c.head_dim
        self.heads = c.num_heads
        self.is_causal = causal
        self.dropout_rate = c.attention_dropout_rate
        self.sizes = [width] if crosses else [width, width, width]
        self.of_queries = nn.Linear(c.d_model, sum(self.sizes), c.attention_bias)
        if crosses:
            self.of_memory = nn.Linear(c.d_model, 2 * width, c.attention_bias)
        self.output = nn.Linear(width, c.d_model, c.attention_bias)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        parts = self.of_queries(x).split(self.sizes, dim=-1)
        if memory is not None:
            parts = (*parts, *self.of_memory(memory).chunk(2, dim=-1))
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts
        )
        heads = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout_rate if self.training else 0.0,
            is_causal=self.is_causal,
        )
        return self.output(heads.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, c: Any):
        super().__init__()
        self.first = nn.Linear(c.d_model, c.d_ff, c.feed_forward_bias)
        self.second = nn.Linear(c.d_ff, c.d_model, c.feed_forward_bias)
        self.activation = ACTIVATIONS[c.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


class Layer(nn.Module):
    """Self-attention, attention to the memory if `crosses`, and feed-forward network,
    each with a residual connection and a norm before or after.
    """

    def __init__(self, c: Any, causal: bool, crosses: bool):
        super().__init__()
        parts: list[nn.Module] = [Attention(c, causal=causal)]
        if crosses:
            parts.append(Attention(c, crosses=True))
        parts.append(FeedForward(c))
        self.parts = nn.ModuleList(parts)
        norms = [nn.LayerNorm(c.d_model, c.norm_epsilon) for _ in parts]
        self.norms = nn.ModuleList(norms)
        self.dropout = nn.Dropout(c.dropout_rate)
        self.is_pre = c.norm == "pre"

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        last = len(self.parts) - 1
        for i, (part, norm) in enumerate(zip(self.parts, self.norms, strict=True)):
            given = norm(x) if self.is_pre else x
            y = part(given, memory) if 0 < i < last else part(given)
            x = x + self.dropout(y)
            if not self.is_pre:
                x = norm(x)
        return x


class Stack(nn.Module):
    def __init__(self, c: Any, count: int, causal: bool = False, crosses: bool = False):
        super().__init__()
        layers = [Layer(c, causal, crosses) for _ in range(count)]
        self.layers = nn.ModuleList(layers)
        has_norm = c.norm == "pre"
        self.norm = nn.LayerNorm(c.d_model) if has_norm else nn.Identity()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)


class Embedded(nn.Module):
    """Token embeddings and learned positions, and the loss of a tied output layer."""

    def __init__(self, c: Any, vocab_size: int, length: int, smoothing: float):
        super().__init__()
        rows = -(-vocab_size // c.vocab_multiple) * c.vocab_multiple
        self.table = nn.Parameter(torch.randn(rows, c.d_model) * c.d_model**-0.5)
        self.positions = nn.Parameter(torch.randn(length, c.d_model) * 0.02)
        self.dropout = nn.Dropout(c.dropout_rate)
        self.smoothing = smoothing

    def embed(self, ids: Tensor, added: Tensor | float = 0.0) -> Tensor:
        x = F.embedding(ids, self.table) + self.positions[: ids.shape[1]] + added
        return self.dropout(x)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, self.table)
        return F.cross_entropy(
            logits.flatten(0, -2), target.flatten(), label_smoothing=self.smoothing
        )


class Transformer(Embedded):
    def __init__(self, c: Any, length: int, smoothing: float):
        super().__init__(c, c.source_vocab_size, length, smoothing)
        self.encoder = Stack(c, c.num_encoder_layers)
        self.decoder = Stack(c, c.num_decoder_layers, causal=True, crosses=True)

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.encoder(self.embed(ids))
        return self.loss(self.decoder(self.embed(ids), memory), ids)


class GPT(Embedded):
    def __init__(self, c: Any, length: int, smoothing: float):
        super().__init__(c, c.vocab_size, length, smoothing)
        self.decoder = Stack(c, c.num_layers, causal=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.decoder(self.embed(ids)), ids)


class BERT(Embedded):
    """Masked language model of 15 % of the positions, and next-sentence prediction."""

    def __init__(self, c: Any, length: int, smoothing: float):
        super().__init__(c, c.vocab_size, length, smoothing)
        self.segment = nn.Parameter(torch.randn(c.d_model) * 0.02)
        self.norm = nn.LayerNorm(c.d_model)
        self.encoder = Stack(c, c.num_layers)
        self.transform = nn.Linear(c.d_model, c.d_model)
        self.transform_norm = nn.LayerNorm(c.d_model)
        self.pooler = nn.Linear(c.d_model, c.d_model)
        self.next_sentence = nn.Linear(c.d_model, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encoder(self.norm(self.embed(ids, self.segment)))
        masked = slice(0, round(0.15 * ids.shape[1]))
        hidden = self.transform_norm(F.gelu(self.transform(x[:, masked])))
        pooled = torch.tanh(self.pooler(x[:, 0]))
        is_next = ids[:, 0] % 2
        of_pairs = F.cross_entropy(self.next_sentence(pooled), is_next)
        return self.loss(hidden, ids[:, masked]) + of_pairs


MODELS = {"transformer": Transformer, "gpt": GPT, "bert": BERT}


def build(config: Any, length: int) -> nn.Module:
    """Return the model of a recipe's config.

    Raises:
        ValueError: the recipe has a part that these models lack.
    """
    c = config.model
    if c.architecture not in MODELS:
        raise ValueError(
            f"model.architecture = {c.architecture!r}: "
            f"compared are {', '.join(MODELS)}; choose such a recipe"
        )
    for key, value in FIXED.items():
        if getattr(c, key) != value:
            raise ValueError(
                f"model.{key} = {getattr(c, key)!r}: the model in PyTorch has "
                f"{value!r}; add --config.model.{key}={value}"
            )
    if c.activation not in ACTIVATIONS:
        raise ValueError(
            f"model.activation = {c.activation!r}: the model in PyTorch has "
            f"{' or '.join(ACTIVATIONS)}; add --config.model.activation=gelu"
        )
    smoothing = getattr(config.training, "label_smoothing", 0.0)
    return MODELS[c.architecture](c, length, smoothing)
