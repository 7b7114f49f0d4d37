"""Read and write unigram models of SentencePiece (Kudo and Richardson 2018), as
Marian's translation models have them.

A file is a protocol buffer, `ModelProto` of https://github.com/google/sentencepiece.
Its class comes with the package sentencepiece, in the extra "sentencepiece".
"""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from etils import epath
from tokenizers import decoders, models

from transformer_jax.data import files
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError
from transformer_jax.data.unigram import HIDDEN, CharacterMap
from transformer_jax.files import exists, read_object

SPECIALS = {"pad_id": "<pad>", "eos_id": "</s>", "unk_id": "<unk>"}
DAMAGED = "is not a model of SentencePiece, or is damaged: copy the file again"


class Pieces(NamedTuple):
    """A unigram model.

    scores: piece → log-probability.
    character_map: the compiled normalization of characters; b"" for none.
    """

    scores: dict[str, float]
    character_map: bytes


def read(path: epath.PathLike) -> Pieces:
    """Read a file of SentencePiece.

    Raises:
        DataError: the file cannot be read.
        TokenizerError: it is damaged, or a model of another kind; or sentencepiece is
            not installed.
    """
    content = bytes(files.read(epath.Path(path)))
    try:
        pieces = _pieces(_model(content))
        CharacterMap.cached(pieces.character_map)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except (IndexError, ValueError) as error:
        raise TokenizerError(f"{path} {DAMAGED}") from error
    return pieces


def _model(content: bytes = b"") -> Any:
    """Return a ModelProto.

    Raises:
        TokenizerError: sentencepiece is not installed.
        ValueError: `content` is not one.
    """
    try:
        protocol = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except Exception as error:  # protobuf has classes of its own for wrong versions
        raise TokenizerError(
            f"files of SentencePiece need its package ({error}): "
            "pip install -c constraints.txt -e '.[sentencepiece]' in this repository"
        ) from error
    model = protocol.ModelProto()
    try:
        model.MergeFromString(content)
    except Exception as error:  # google.protobuf.message.DecodeError
        raise ValueError(str(error)) from error
    return model


def _pieces(model: Any) -> Pieces:
    scores = {}
    kinds = model.SentencePiece
    for piece in model.pieces:
        if not piece.piece:
            raise ValueError("a piece without a text")
        if piece.type == kinds.NORMAL:
            scores[piece.piece] = piece.score
        elif piece.type not in (kinds.UNKNOWN, kinds.CONTROL):
            raise TokenizerError(
                f"the piece {piece.piece!r} is neither text nor a control symbol"
            )
    normalizer = model.normalizer_spec
    if not (
        normalizer.add_dummy_prefix
        and normalizer.remove_extra_whitespaces
        and normalizer.escape_whitespaces
    ):
        raise TokenizerError(
            "it does not add a space before the text, join spaces and write them as '▁'"
        )
    if model.trainer_spec.model_type != model.trainer_spec.UNIGRAM or not scores:
        raise TokenizerError("it is not a unigram model")
    return Pieces(scores, normalizer.precompiled_charsmap)


def is_folder(folder: epath.PathLike) -> bool:
    """Return True if a folder has the tokenizers of a translation model of Marian."""
    return all(
        exists(epath.Path(folder) / f"{side}.spm") for side in ("source", "target")
    )


def from_folder(folder: epath.PathLike, side: str) -> Tokenizer:
    """Return the tokenizer of one `side`, "source" or "target", of a translation model
    of Marian.

    The folder has source.spm, target.spm, vocab.json, and target_vocab.json if the
    target has a vocabulary of its own. config.json has the id with which the decoder
    begins; by default, this is the id of padding.

    Raises:
        DataError: a file cannot be read.
        TokenizerError: a file is damaged, or does not belong to the others.
    """
    folder = epath.Path(folder)
    path = folder / "vocab.json"
    if side == "target" and exists(folder / "target_vocab.json"):
        path = folder / "target_vocab.json"
    vocabulary = read_object(path, TokenizerError)
    config = read_object(folder / "config.json", TokenizerError)
    _check_added(folder, vocabulary, path.name)
    try:
        pieces = read(folder / f"{side}.spm")
        return tokenizer(pieces, vocabulary, config.get("decoder_start_token_id"))
    except (TokenizerError, TypeError) as error:
        raise TokenizerError(f"{path} and {side}.spm: {error}") from error


def _check_added(folder: epath.Path, vocabulary: Mapping[str, Any], name: str) -> None:
    """Raise TokenizerError if the folder adds tokens to the vocabulary, which is the
    file `name`.
    """
    settings = folder / "tokenizer_config.json"
    content = read_object(settings, TokenizerError) if exists(settings) else {}
    for token in content.get("added_tokens_decoder", {}).values():
        if not token.get("special") and token["content"] not in vocabulary:
            raise TokenizerError(
                f"{settings} adds the token {token['content']!r}, which {name} lacks: "
                "a tokenizer of Marian has the tokens of its vocabulary only. "
                "Copy all files from one model, or remove the token if no text has it."
            )


def tokenizer(
    pieces: Pieces, vocabulary: Mapping[str, int], begin: int | None = None
) -> Tokenizer:
    """Return the tokenizer that splits text by `pieces` and takes ids from
    `vocabulary`, as Marian does.

    Args:
        pieces: the model.
        vocabulary: token → id, for the ids 0, 1, 2, … It has "<pad>", "</s>" and
            "<unk>", and most of the pieces; the others are unknown. It may have further
            tokens, e.g. the pieces of another language.
        begin: the id with which the decoder begins. None: that of "<pad>".

    Raises:
        TokenizerError: the vocabulary lacks a special token or all pieces, or its ids
            have gaps.
    """
    if missing := sorted(SPECIALS.values() - vocabulary.keys()):
        raise TokenizerError(
            f"the vocabulary lacks {', '.join(missing)}: use the files of one model"
        )
    if pieces.scores.keys().isdisjoint(vocabulary):
        raise TokenizerError(
            "the vocabulary has none of the pieces: use the files of one model"
        )
    ids = list(vocabulary.values())
    if not all(type(i) is int for i in ids) or sorted(ids) != list(range(len(ids))):
        raise TokenizerError(
            f"the ids of {len(vocabulary)} tokens "
            f"must be 0 to {len(vocabulary) - 1}, each once"
        )
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special_ids = {name: vocabulary[token] for name, token in SPECIALS.items()}
    lowest = min(pieces.scores.values())
    scored: list[tuple[str, float]] = []
    for token in tokens:
        if token in pieces.scores:
            scored.append((token, pieces.scores[token]))
        else:
            scored.append((HIDDEN + token, lowest))
    for piece, score in pieces.scores.items():
        if piece not in vocabulary:
            scored.append((piece, score))
    made = tokenizers.Tokenizer(models.Unigram(scored, unk_id=special_ids["unk_id"]))
    made.decoder = decoders.Sequence(
        [decoders.Replace(HIDDEN, ""), decoders.Metaspace()]
    )
    character_map = base64.b64encode(pieces.character_map).decode()
    content = json.loads(made.to_str()) | {
        "sentencepiece": {"character_map": character_map, "size": len(vocabulary)}
    }
    first = special_ids["pad_id"] if begin is None else begin
    return Tokenizer(
        json.dumps(content, ensure_ascii=False), special_ids | {"bos_id": first}
    )


def contents(source: Tokenizer, target: Tokenizer, max_length: int) -> dict[str, bytes]:
    """Return the files that `from_folder` reads, and tokenizer_config.json for
    `MarianTokenizer` of transformers.

    `max_length` is that of the model; transformers warns of longer texts. Raises
    TokenizerError if a tokenizer is not one that `from_folder` returns, or returned in
    earlier versions.
    """
    source_pieces, source_vocabulary = _parts(source)
    target_pieces, target_vocabulary = _parts(target)
    separate = target_vocabulary != source_vocabulary
    settings: dict[str, Any] = {
        f"{name.removesuffix('_id')}_token": token for name, token in SPECIALS.items()
    }
    settings |= {
        "tokenizer_class": "MarianTokenizer",
        "separate_vocabs": separate,
        "model_max_length": max_length,
    }
    objects = {"vocab.json": source_vocabulary, "tokenizer_config.json": settings}
    if separate:
        objects["target_vocab.json"] = target_vocabulary
    contents = {
        "source.spm": _written(source_pieces),
        "target.spm": _written(target_pieces),
    }
    for name, content in objects.items():
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        contents[name] = text.encode()
    return contents


def _parts(made: Tokenizer) -> tuple[Pieces, dict[str, int]]:
    """Return the arguments with which `tokenizer` makes a tokenizer."""
    content = json.loads(made.to_json())
    settings = content.get("sentencepiece") or _former_settings(content)
    if settings is None:
        raise TokenizerError(
            "transformers has two tokenizers only as unigram models of SentencePiece "
            "with Marian's special ids: encode texts with the tokenizers "
            "in the workdir, or train with data.joint_tokenizer = True"
        )
    tokens = content["model"]["vocab"]
    scores = {token: score for token, score in tokens if not token.startswith(HIDDEN)}
    vocabulary = {
        token.removeprefix(HIDDEN): i
        for i, (token, _) in enumerate(tokens[: settings["size"]])
    }
    return Pieces(scores, base64.b64decode(settings["character_map"])), vocabulary


def _former_settings(content: dict[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a tokenizer in the layout of earlier versions, and hide
    its tokens that are not pieces.

    They were added tokens, and single characters that are less likely than all pieces
    by a factor of e^10. Return None if the layout is another.
    """
    if content["model"]["type"] != "Unigram" or "<(?=pad>|/s>|unk>)" not in json.dumps(
        content["pre_tokenizer"]
    ):
        return None
    tokens = content["model"]["vocab"]
    named = {token["content"] for token in content["added_tokens"]}
    scores = {
        score for token, score in tokens if token not in named and token[0] != HIDDEN
    }
    lowest, *higher = sorted(scores)
    has_characters = bool(higher) and lowest + 10.0 == higher[0]
    for entry in tokens:
        token, score = entry
        if token in named or (has_characters and score == lowest):
            entry[0] = HIDDEN + token
    first = content["normalizer"]["normalizers"][0]
    return {"character_map": first.get("precompiled_charsmap", ""), "size": len(tokens)}


def _written(pieces: Pieces) -> bytes:
    """Return the content of a file of SentencePiece."""
    model = _model()
    kinds = model.SentencePiece
    special = {"<unk>": kinds.UNKNOWN, "<s>": kinds.CONTROL, "</s>": kinds.CONTROL}
    for token, kind in special.items():
        if token not in pieces.scores:
            model.pieces.add(piece=token, type=kind)
    for token, score in pieces.scores.items():
        model.pieces.add(piece=token, score=score)
    model.trainer_spec.model_type = model.trainer_spec.UNIGRAM
    model.normalizer_spec.precompiled_charsmap = pieces.character_map
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = True
    model.normalizer_spec.escape_whitespaces = True
    return model.SerializeToString()
