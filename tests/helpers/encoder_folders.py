"""Hugging Face folders of small RoBERTas, XLM-Rs, DistilBERTs and ELECTRAs, written
without transformers.
"""

import json
import string

import numpy as np
import tokenizers

from helpers.bert_folders import (
    CONFIG,
    MASKED_LM,
    D,
    F,
    L,
    N,
    T,
    V,
    drawn,
    numbered,
    shapes,
)
from helpers.parity import write_back, write_file
from transformer_jax.interop import huggingface
from transformer_jax.interop.tensors import Tensors

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
LETTERS = ["▁", *string.ascii_lowercase]
ROBERTA = CONFIG | {
    "model_type": "roberta",
    "max_position_embeddings": T + 2,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
DISTILBERT = {
    "model_type": "distilbert",
    "vocab_size": V,
    "dim": D,
    "n_layers": L,
    "n_heads": N,
    "hidden_dim": F,
    "max_position_embeddings": T,
}
E = 11  # the width of the embeddings
ELECTRA = CONFIG | {"model_type": "electra", "embedding_size": E}
CONFIGS = {
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA | {"model_type": "xlm-roberta"},
    "DistilBert": DISTILBERT,
    "Electra": ELECTRA,
}
# a part of a name in BERT → that in DistilBERT
DISTILLED = {
    "bert.encoder.layer": "distilbert.transformer.layer",
    "bert.embeddings": "distilbert.embeddings",
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
    "bert.pooler.dense": "pre_classifier",
    "cls.predictions.transform.dense": "vocab_transform",
    "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
    "cls.predictions.bias": "vocab_projector.bias",
}
OF_ROBERTA = {
    "bert.": "roberta.",
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "cls.predictions.bias": "lm_head.bias",
}
OF_ELECTRA = {
    "bert.": "electra.",
    "cls.predictions.transform": "generator_predictions",
    "cls.predictions.bias": "generator_lm_head.bias",
}
RENAMED = {"DistilBert": DISTILLED, "Electra": OF_ELECTRA}
POSITIONS = "embeddings.position_embeddings.weight"
SEGMENTS = "embeddings.token_type_embeddings.weight"


def tensors(family, *heads, masked_lm=False, pooler=True):
    """Return random tensors of a class, by the names of `family`."""
    found = shapes(*heads) | (MASKED_LM if masked_lm else {})
    if not pooler:
        found = {name: shape for name, shape in found.items() if "pooler" not in name}
    renamed = {}
    for name, shape in found.items():
        for old, new in RENAMED.get(family, OF_ROBERTA).items():
            name = name.replace(old, new)
        renamed[name] = shape
    if family == "DistilBert":
        del renamed[f"distilbert.{SEGMENTS}"]
    elif family == "Electra":
        for name, shape in renamed.items():
            if ".embeddings." in name or "generator_predictions" in name:
                renamed[name] = tuple(E if size == D else size for size in shape)
        renamed |= {
            "electra.embeddings_project.weight": (D, E),
            "electra.embeddings_project.bias": (D,),
        }
        if masked_lm:
            renamed["generator_predictions.dense.weight"] = (E, D)
    else:
        renamed |= {f"roberta.{POSITIONS}": (T + 2, D), f"roberta.{SEGMENTS}": (1, D)}
    return drawn(renamed)


def discriminator():
    """Return the tensors of an ELECTRA that tells which tokens were replaced."""
    start = "discriminator_predictions"
    heads = {f"{start}.dense": (D, D), f"{start}.dense_prediction": (1, D)}
    return tensors("Electra", *heads.items(), pooler=False)


def classifier(family, classes=3):
    """Return the tensors of a classifier. That of DistilBERT has BERT's pooler."""
    if family == "DistilBert":
        return tensors(family, ("classifier", (classes, D)))
    heads = {"classifier.dense": (D, D), "classifier.out_proj": (classes, D)}
    return tensors(family, *heads.items(), pooler=False)


def check_round_trip(folder, family):
    """Check that a classifier is read and written again without a change, except the
    rows of no positions, which become zeros.
    """
    arrays = classifier(family)
    labels = numbered(["bad", "fair", "good"])
    head = "ForSequenceClassification"
    theirs = save(folder / "a", family, head, arrays, **labels)
    found = huggingface.read(theirs)
    write_back(found, found.params(), folder / "b")
    written = Tensors(folder / "b")
    assert set(written) == set(arrays)
    for name, array in arrays.items():
        skipped = 2 if name == f"roberta.{POSITIONS}" else 0
        np.testing.assert_array_equal(written[name][skipped:], array[skipped:], name)
        assert not written[name][:skipped].any()
    before, after = (
        json.loads((path / "config.json").read_text())
        for path in (theirs, folder / "b")
    )
    assert {key: after[key] for key in before} == before


def save(folder, family, head, arrays, **changes):
    """Write a folder with the class `family` + `head` and a tokenizer of letters."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[family] | {"architectures": [f"{family}{head}"]} | changes
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", arrays)
    if family == "Roberta":
        letters = ["Ġ", *string.ascii_lowercase]
        vocabulary = {x: i for i, x in enumerate([*SPECIALS, *letters, "<mask>"])}
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n")
    elif family == "XLMRoberta":
        unigram().save(str(folder / "tokenizer.json"))
    else:
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        letters = string.ascii_lowercase
        vocabulary += [*letters, *(f"##{letter}" for letter in letters)]
        (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    return folder


def unigram():
    """Return the tokenizer of an XLM-R, whose pieces are letters."""
    pieces = [(token, 0.0) for token in SPECIALS]
    pieces += [(letter, -1.0) for letter in LETTERS]
    model = tokenizers.models.Unigram([*pieces, ("<mask>", 0.0)], unk_id=3)
    made = tokenizers.Tokenizer(model)
    splits = tokenizers.pre_tokenizers
    made.pre_tokenizer = splits.Sequence(
        [splits.WhitespaceSplit(), splits.Metaspace(prepend_scheme="always")]
    )
    made.decoder = tokenizers.decoders.Metaspace()
    made.add_special_tokens(SPECIALS)
    made.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return made
