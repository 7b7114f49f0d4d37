"""Hugging Face folders of BART and mBART, written without transformers."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from helpers import marian_folders
from helpers.marian_folders import D, T, V, norm

LETTERS = "abcdefghijklmnopqrstu"
LANGUAGES = ("de_DE", "en_XX", "ro_RO")
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
BYTES = [*SPECIALS, "Ġ", *LETTERS, "Ġe", "Ġd", "ea", "da", "<mask>"]
PIECES = [*SPECIALS, "▁", *LETTERS, "▁e", *LANGUAGES, "<mask>"]
ENGLISH, GERMAN = PIECES.index("en_XX"), PIECES.index("de_DE")
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
KINDS = {
    "Bart": {"decoder_start_token_id": 2},
    "MBart": {"decoder_start_token_id": GERMAN},
}


def shapes(kind):
    """Return the shapes of the tensors of "Bart" or "MBart"."""
    found = marian_folders.SHARED | {}
    for stack in ("encoder", "decoder"):
        found[f"model.{stack}.embed_positions.weight"] = (T + 2, D)
        found |= norm(f"model.{stack}.layernorm_embedding")
        if kind == "MBart":
            found |= norm(f"model.{stack}.layer_norm")
    return found


def config(kind):
    """Return the content of config.json."""
    names = {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "model_type": kind.lower(),
        "activation_function": "gelu",
    }
    return marian_folders.CONFIG | names | IDS | KINDS[kind]


def save(kind, folder, names=None, **changes):
    """Write config.json and the tensors, and return the latter."""
    names = shapes(kind) if names is None else names
    return marian_folders.save(folder, names, **config(kind) | changes)


def save_tokenizer(kind, folder, **settings):
    """Write the tokenizer: of bytes, or of pieces and languages."""
    write = _of_bytes if kind == "Bart" else _of_pieces
    named = {"tokenizer_class": f"{kind}Tokenizer"}
    write(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))


def _of_bytes(folder):
    ids = {token: i for i, token in enumerate(BYTES)}
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("#version: 0.2\nĠ e\nĠ d\ne a\nd a\n")


def _of_pieces(folder):
    made = Tokenizer(models.Unigram([(piece, -2.0) for piece in PIECES], unk_id=3))
    splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    made.decoder = decoders.Metaspace()
    made.add_special_tokens([*SPECIALS, *LANGUAGES, "<mask>"])
    made.save(str(folder / "tokenizer.json"))


assert len(BYTES) == len(PIECES) == V
