"""The name of every parameter of every model, and the names of its axes, which
decide sharding and weight decay.
"""

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from transformer_jax.models import (
    GPT,
    Bert,
    BertConfig,
    Classifier,
    ConvS2S,
    ConvS2SConfig,
    GPTConfig,
    RecurrentConfig,
    RecurrentLM,
    RecurrentLMConfig,
    RecurrentSeq2Seq,
    Transformer,
    TransformerConfig,
)
from transformer_jax.models.bert import Pretraining, TokenClassifier
from transformer_jax.models.gpt import SIZES
from transformer_jax.models.t5 import SIZES as T5_SIZES

TOKENS = np.zeros((1, 1), np.int32)


def below(name, parameters):
    return {
        f"{name}/{path}" if path else name: axes for path, axes in parameters.items()
    }


def linear(name, *axes, bias=()):
    """Return the axes of a kernel and of its bias, if it has one."""
    return below(name, {"kernel": axes} | ({"bias": bias} if bias else {}))


def norm(name, *layers):
    return below(name, {"scale": (*layers, "embed"), "bias": (*layers, "embed")})


def attention(name, bias=True, relative=False, shared="heads"):
    parameters = {}
    for projection in ("query", "key", "value"):
        heads = "heads" if projection == "query" else shared
        bias_axes = bias and ("layers", heads, "head_dim")
        parameters |= linear(
            projection, "layers", "embed", heads, "head_dim", bias=bias_axes
        )
    parameters |= linear(
        "output",
        "layers",
        "heads",
        "head_dim",
        "embed",
        bias=bias and ("layers", "embed"),
    )
    if relative:
        parameters |= {
            f"relative/{side}_table": ("layers", "distance", "head_dim")
            for side in ("key", "value")
        }
    return below(name, parameters)


def stack(name, cross=False, pre=False, bias=True, relative=False):
    layers = attention("self_attention", bias, relative) | norm(
        "self_attention_residual/layer_norm", "layers"
    )
    if cross:
        layers |= attention("cross_attention", bias) | norm(
            "cross_attention_residual/layer_norm", "layers"
        )
    layers |= linear(
        "feed_forward/inner", "layers", "embed", "mlp", bias=("layers", "mlp")
    )
    layers |= linear(
        "feed_forward/outer", "layers", "mlp", "embed", bias=("layers", "embed")
    )
    layers |= norm("feed_forward_residual/layer_norm", "layers")
    return below(name, below("layers", layers) | (norm("final_norm") if pre else {}))


def llama(name):
    """Return the stack of Llama: shared keys and values, a gate, gains without
    biases, no other biases.
    """
    layers = attention("self_attention", bias=False, shared="kv_heads")
    for hidden in ("gate", "inner"):
        layers |= linear(f"feed_forward/{hidden}", "layers", "embed", "mlp")
    layers |= linear("feed_forward/outer", "layers", "mlp", "embed")
    layers |= {
        f"{part}_residual/rms_norm/scale": ("layers", "embed")
        for part in ("self_attention", "feed_forward")
    }
    return below(name, below("layers", layers) | {"final_norm/scale": ("embed",)})


def t5(name, cross=False):
    """Return the stack of T5: no biases but that of positions, gains, no gate."""
    layers = attention("self_attention", bias=False)
    parts = ["self_attention", "feed_forward"]
    if cross:
        layers |= attention("cross_attention", bias=False)
        parts.append("cross_attention")
    layers |= linear("feed_forward/inner", "layers", "embed", "mlp")
    layers |= linear("feed_forward/outer", "layers", "mlp", "embed")
    layers |= {f"{part}_residual/rms_norm/scale": ("layers", "embed") for part in parts}
    last = {"final_norm/scale": ("embed",)}
    bias = {"relative_bias/table": ("distance", "heads")}
    return below(name, below("layers", layers) | last | bias)


def embeddings(*names, learned=True):
    tables = {f"{name}embedding/table": ("vocab", "vector") for name in names}
    return tables | (
        {f"{name}positions/table": ("position", "embed") for name in names}
        if learned
        else {}
    )


def cell(name, with_bias, without_bias):
    """Return the axes of the gates' maps of the input (i…) and of the state (h…)."""
    parameters = {}
    for gate in with_bias:
        parameters |= linear(gate, "embed", "state", bias=("state",))
    for gate in without_bias:
        parameters |= linear(gate, "embed", "state")
    return below(name, parameters)


def lstm(name):
    return cell(name, ("hi", "hf", "hg", "ho"), ("ii", "if", "ig", "io"))


def gru(name):
    return cell(name, ("ir", "iz", "in", "hn"), ("hr", "hz"))


def affine(name, *axes, of_outputs="channels"):
    """Return the axes of a map with weight normalization in ConvS2S."""
    axes = axes or ("embed", of_outputs)
    bias = (of_outputs,)
    return linear(name, *axes, bias=bias) | below(name, {"scale": bias})


CONVOLUTIONS = affine("first") | affine("block_0/convolution") | affine("last")
BERT = (
    embeddings("")
    | {"segments": ("segment", "vector")}
    | norm("norm")
    | stack("encoder")
    | linear("pooler", "embed", "vector", bias=("vector",))
)
MASKED_LM = (
    linear("transform", "embed", "vector", bias=("vector",))
    | norm("norm")
    | {"bias": ("vocab",)}
)
CLASSIFIER = below("bert", BERT) | linear("head", "embed", "classes", bias=("classes",))
WORDS = embeddings("source_", "target_", learned=False)
OUTPUT = {"output/table": ("vocab", "embed"), "output/bias": ("vocab",)}
BRIDGED = (
    lstm("encoder/forward_0") | lstm("encoder/backward_0") | lstm("decoder/cells_0")
)
for leaf in "01":
    BRIDGED |= linear(f"encoder/bridge_0_{leaf}", "embed", "state", bias=("state",))
ADDITIVE = below(
    "decoder/alignment",
    linear("query", "embed", "state") | linear("key", "embed", "state"),
)
ADDITIVE |= {"decoder/alignment/v": ("state",)}
LUONG = (
    WORDS
    | OUTPUT
    | gru("encoder/forward_0")
    | gru("decoder/cells_0")
    | linear("decoder/combine", "embed", "state")
)
HEADS = {
    f"decoder/alignment/{name}/kernel": ("embed", "state", "head_dim")
    for name in ("query", "key", "value")
}
HEADS |= {"decoder/alignment/output/kernel": ("state", "head_dim", "embed")}
LOCAL = linear("decoder/alignment/position", "embed", "state") | {
    "decoder/alignment/position_v": ("state",)
}
BOTH = {
    "bidirectional": True,
    "cell": "lstm",
    "attention": "additive",
    "readout": "maxout",
}

MODELS = {
    "transformer": (
        Transformer(TransformerConfig()),
        {"target_embedding/table": ("vocab", "vector")}
        | stack("encoder")
        | stack("decoder", cross=True),
    ),
    "transformer, output bias": (
        Transformer(TransformerConfig(tie_embeddings="decoder", output_bias=True)),
        WORDS
        | {"output_bias": ("vocab",)}
        | stack("encoder")
        | stack("decoder", cross=True),
    ),
    "transformer, untied, pre-LN": (
        Transformer(
            TransformerConfig(
                tie_embeddings="none", norm="pre", positions="learned", output_bias=True
            )
        ),
        embeddings("source_", "target_")
        | OUTPUT
        | stack("encoder", pre=True)
        | stack("decoder", cross=True, pre=True),
    ),
    "transformer, relative, no bias": (
        Transformer(
            TransformerConfig(
                tie_embeddings="decoder", positions="relative", attention_bias=False
            )
        ),
        WORDS
        | stack("encoder", bias=False, relative=True)
        | stack("decoder", cross=True, bias=False, relative=True),
    ),
    "t5": (
        Transformer(TransformerConfig(**T5_SIZES["small"])),
        embeddings("target_", learned=False)
        | t5("encoder")
        | t5("decoder", cross=True),
    ),
    "gpt": (GPT(GPTConfig()), embeddings("") | stack("decoder")),
    "gpt, untied, pre-LN": (
        GPT(GPTConfig(tie_embeddings=False, norm="pre", positions="rotary")),
        embeddings("", learned=False)
        | {"output/table": ("vocab", "embed")}
        | stack("decoder", pre=True),
    ),
    "llama": (
        GPT(GPTConfig(**SIZES["llama-tiny"])),
        embeddings("", learned=False)
        | {"output/table": ("vocab", "embed")}
        | llama("decoder"),
    ),
    "bert": (Bert(BertConfig()), BERT),
    "classifier": (Classifier(BertConfig(), 3), CLASSIFIER),
    "classifier of features": (
        Classifier(BertConfig(), 3, feature_layers=4),
        CLASSIFIER,
    ),
    "token classifier": (TokenClassifier(BertConfig(), 3), CLASSIFIER),
    "pretraining": (
        Pretraining(BertConfig()),
        below("bert", BERT)
        | below("masked_lm", MASKED_LM)
        | linear("next_sentence", "embed", "classes", bias=("classes",)),
    ),
    "convs2s": (
        ConvS2S(ConvS2SConfig(num_encoder_layers=1, num_decoder_layers=1)),
        embeddings("source_", "target_")
        | affine("output", "vocab", "embed", of_outputs="vocab")
        | below("encoder", CONVOLUTIONS)
        | below(
            "decoder",
            CONVOLUTIONS | affine("attention_0/query") | affine("attention_0/context"),
        ),
    ),
    "recurrent": (
        RecurrentSeq2Seq(RecurrentConfig()),
        WORDS | OUTPUT | gru("encoder/forward_0") | gru("decoder/cells_0"),
    ),
    "recurrent language model": (
        RecurrentLM(RecurrentLMConfig()),
        embeddings("", learned=False) | OUTPUT | lstm("cells_0") | lstm("cells_1"),
    ),
    "recurrent, additive": (
        RecurrentSeq2Seq(RecurrentConfig(**BOTH)),
        WORDS
        | OUTPUT
        | BRIDGED
        | ADDITIVE
        | linear("decoder/maxout", "embed", "state", bias=("state",)),
    ),
    "recurrent, concat": (
        RecurrentSeq2Seq(RecurrentConfig(attention="concat", local_window=2)),
        LUONG | ADDITIVE | LOCAL,
    ),
    "recurrent, dot": (RecurrentSeq2Seq(RecurrentConfig(attention="dot")), LUONG),
    "recurrent, general": (
        RecurrentSeq2Seq(RecurrentConfig(attention="general")),
        LUONG | {"decoder/alignment/w": ("embed", "state")},
    ),
    "recurrent, scaled_dot": (
        RecurrentSeq2Seq(RecurrentConfig(attention="scaled_dot")),
        LUONG | HEADS,
    ),
    "recurrent, multi_head": (
        RecurrentSeq2Seq(RecurrentConfig(attention="multi_head", damping=True)),
        LUONG | HEADS | {"decoder/alignment/damping": ()},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_names_its_axes(name):
    model, expected = MODELS[name]
    second = (
        TOKENS == 0
        if isinstance(model, GPT | Bert | Classifier | TokenClassifier | Pretraining)
        else TOKENS
    )
    boxed = jax.eval_shape(model.init, jax.random.key(0), TOKENS, second)["params"]
    specs = jax.tree_util.tree_leaves_with_path(
        nn.get_partition_spec(boxed), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(spec)
        for path, spec in specs
    }
    assert found == expected
    for (path, _), leaf in zip(specs, jax.tree.leaves(nn.unbox(boxed)), strict=True):
        assert leaf.ndim == len(
            found[jax.tree_util.keystr(path, simple=True, separator="/")]
        )
        assert leaf.dtype == np.float32
