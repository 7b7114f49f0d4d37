"""Read and write the tokenizer files of other programs: BERT's vocabulary, and the
folders of Hugging Face.

Such a folder describes its tokenizer completely in `tokenizer.json`. Older ones have
`vocab.txt` (BERT) instead, or `vocab.json` and `merges.txt` (GPT and GPT-2). Marian's
translation models have two tokenizers, see `sentencepiece`. Other files of the folder
add settings and name the special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from etils import epath
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from transformer_jax.data import files, sentencepiece, sources
from transformer_jax.data.tokenizer_frames import separators
from transformer_jax.data.tokenizer_training import bert
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError, of_bert
from transformer_jax.errors import UserError
from transformer_jax.files import exists, read_object, write_all

Settings = dict[str, Any]

# later files win over earlier ones
SETTINGS = ("config.json", "special_tokens_map.json", "tokenizer_config.json")
# the files of tokenizers in folders of Hugging Face
FILES = (
    *SETTINGS[1:],
    "added_tokens.json",
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "source.spm",
    "target.spm",
    "target_vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# The settings that name special tokens, in this order.
NAMED = {
    "pad_id": ("pad_token",),
    "bos_id": ("bos_token", "cls_token"),
    "eos_id": ("eos_token", "sep_token"),
    "mask_id": ("mask_token",),
}
TOKENS = (*(key for keys in NAMED.values() for key in keys), "unk_token")
# The types of further settings that are read.
TYPES = {
    "vocab_size": int,
    "added_tokens_decoder": dict,
    "add_prefix_space": bool,
    "add_bos_token": bool,
    "src_lang": str,
    "tgt_lang": str,
}
# the keys of config.data that `keys_of` may return
KEYS = (
    "tokenizer",
    "lowercase",
    "min_count",
    "joint_tokenizer",
    "source_frame",
    "target_frame",
)
# classes that leave tokenizer.json as it is
GENERIC = ("PreTrainedTokenizer", "TokenizersBackend", "None")
# the class of a folder that names only the type of its model, and of one with the same
# tokenizer
CLASSES = {
    "BartTokenizer": "RobertaTokenizer",
    "bart": "RobertaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "openai-gpt": "OpenAIGPTTokenizer",
    "mbart": "MBartTokenizer",
    "roberta": "RobertaTokenizer",
}
# the classes of a vocab.json with merges.txt
BYTE_PAIRS = ("GPT2Tokenizer", "OpenAIGPTTokenizer", "RobertaTokenizer")
# the id with which the decoder begins, by the type of a model whose folder names none
FIRST_IDS = {"bart": 2}
# the special tokens of RoBERTa's tokenizers, unless a folder names others
ROBERTA = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
# Settings of BERT's tokenizers, and their names in `tokenizer.json`.
NORMALIZATION = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def is_pretrained(config: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a Hugging Face folder: it names the type of a
    model.
    """
    return "model_type" in config


def is_folder(path: epath.PathLike) -> bool:
    """Return True for a folder of Hugging Face."""
    try:
        config = read_object(epath.Path(path).expanduser() / "config.json")
    except UserError:
        return False
    return is_pretrained(config)


def from_vocabulary(path: epath.PathLike, lowercase: bool) -> Tokenizer:
    """Make BERT's tokenizer from a `vocab.txt`, in which line i, counted from 0, is the
    token with id i.

    Args:
        path: a file that has the tokens [UNK], [CLS] and [SEP], and may have [PAD] and
            [MASK].
        lowercase: convert text to lower case and strip accents, as the models called
            "uncased" require.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
        TokenizerError: a line is empty or repeats another, or a required token is
            missing.
    """
    return Tokenizer(
        bert(_vocabulary(epath.Path(path).expanduser()), lowercase).to_str()
    )


def from_folder(path: epath.PathLike, file: str = "tokenizer.json") -> Tokenizer:
    """Read the tokenizer of a Hugging Face folder.

    It gives the same ids as in transformers.

    A special token that the folder names wins over one that `tokenizers.NAMES` finds.
    An id in `config.json` is used if there is neither.

    Differs: special ids are never added to a text, and the name of a special token in a
    text is encoded as its characters. Lines are neither padded nor cut, whatever
    `tokenizer.json` says.

    Args:
        path: the folder.
        file: the name that the tokenizer gets in a workdir. In a folder with two
            tokenizers, "tokenizer.source.json" and "tokenizer.target.json" select one.

    Raises:
        DataError: a file cannot be read, or is not UTF-8.
        TokenizerError: a file is missing or invalid, or the tokenizer has more ids than
            the model of the folder.
    """
    folder = epath.Path(path).expanduser()
    settings = settings_of(folder)
    readers = {
        ("tokenizer.json",): _complete,
        ("vocab.txt",): _word_pieces,
        ("vocab.json", "merges.txt"): _byte_pairs,
    }
    complete = [
        names for names in readers if all(exists(folder / name) for name in names)
    ]
    names = complete[0] if complete else None
    if names is None and sentencepiece.is_folder(folder):
        side = file.removeprefix("tokenizer.").removesuffix(".json")
        if side not in ("source", "target"):
            raise TokenizerError(
                f"{folder} has two tokenizers, source.spm and target.spm: "
                "set data.joint_tokenizer to False"
            )
        return sentencepiece.from_folder(folder, side)
    if names is None:
        paths = folder.iterdir() if folder.is_dir() else []
        listing = ", ".join(sorted(path.name for path in paths)) or "nothing"
        raise TokenizerError(
            f"{folder} has no tokenizer, i.e. tokenizer.json, vocab.txt, or vocab.json "
            f"and merges.txt. The folder contains {listing}. "
            "Copy the missing files, or let transformers write them: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    source = " and ".join(str(folder / name) for name in names)
    text = readers[names](folder, settings)
    try:
        tokenizer = Tokenizer(text)
    except TokenizerError as error:
        raise TokenizerError(f"{source}: {error}. Copy the folder again.") from error
    if special_ids := _special_ids(tokenizer, settings):
        tokenizer = Tokenizer(text, special_ids)
    if tokenizer.size > (size := settings.get("vocab_size", tokenizer.size)):
        raise TokenizerError(
            f"{source} has {tokenizer.size} ids, "
            f"but {folder / 'config.json'} says vocab_size = {size}: "
            "the vocabulary does not fit the model; copy all files from the same model"
        )
    return tokenizer


def names_of(path: epath.PathLike) -> tuple[str, ...]:
    """Return the names that the tokenizers of a Hugging Face folder get in a
    workdir.
    """
    folder = epath.Path(path).expanduser()
    if sentencepiece.is_folder(folder) and not exists(folder / "tokenizer.json"):
        return "tokenizer.source.json", "tokenizer.target.json"
    return ("tokenizer.json",)


def keys_of(path: epath.PathLike) -> Settings:
    """Return the keys of config.data that describe the tokenizers of a Hugging Face
    folder.

    Raises the errors of `from_folder`.
    """
    names = names_of(path)
    kind, lowercase = kind_of(from_folder(path, names[0]))
    keys = {"tokenizer": kind, "lowercase": lowercase, "min_count": 1}
    return keys | ({"joint_tokenizer": False} if len(names) > 1 else {})


def is_other_end(path: epath.PathLike, end: Any) -> bool:
    """Return True for the id of a token at which `generate` ends, but that is not the
    end id of the tokenizer.

    `end` is what a Hugging Face folder says: an id, a list of ids, or None. Raises the
    errors of `from_folder`.
    """
    if type(end) is not int:
        return False
    tokenizer = from_folder(path)
    return end != tokenizer.eos_id and tokenizer.tokens([end]) != [""]


def begins(path: epath.PathLike) -> bool:
    """Return True if transformers puts the begin id before a text, given a Hugging Face
    folder with one tokenizer.

    The post-processor of tokenizer.json decides, unless tokenizer_config.json has
    add_bos_token. Raises the errors of `from_folder`.
    """
    folder = epath.Path(path).expanduser()
    settings = settings_of(folder)
    first = from_folder(folder).bos_id
    if (
        first is None
        or "add_bos_token" in settings
        or not exists(folder / "tokenizer.json")
    ):
        return first is not None and settings.get("add_bos_token", False)
    return tokenizers.Tokenizer.from_str(_complete(folder, settings)).encode("").ids[
        :1
    ] == [first]


def kind_of(tokenizer: Tokenizer) -> tuple[str, bool]:
    """Return the kind of a tokenizer, or the nearest of `tokenizer_training.KINDS`,
    and True if it lower-cases.
    """
    content = json.loads(tokenizer.to_json())
    model = content["model"]["type"]
    normalizer = json.dumps(content.get("normalizer"))
    kinds = {
        "Unigram": "unigram",
        "WordLevel": "words",
        "WordPiece": "bert" if of_bert(content) else "wordpiece",
    }
    bytes_or_not = (
        "bpe_bytes"
        if '"ByteLevel"' in json.dumps(content.get("pre_tokenizer"))
        else "bpe_metaspace"
    )
    return (
        kinds.get(model, bytes_or_not),
        '"lowercase": true' in normalizer or '"Lowercase"' in normalizer,
    )


def to_folder(tokenizer: Tokenizer, path: epath.PathLike, **options: Any) -> None:
    """Write the tokenizer of a Hugging Face folder.

    `AutoTokenizer.from_pretrained(path)` then gives the same ids.

    Args:
        tokenizer: the tokenizer.
        path: the folder, which is made if it is missing.
        options: those of `contents`.

    Raises:
        TokenizerError: the tokenizer lacks an id that the options need.
        OutputError: a file cannot be written.
    """
    write_all(epath.Path(path).expanduser(), contents(tokenizer, **options))


def contents(
    tokenizer: Tokenizer,
    *,
    begin: bool = False,
    end: bool = False,
    pad_id: int | None = None,
    max_length: int | None = None,
    segments: bool = True,
    frame: Sequence[str] = (),
) -> dict[str, bytes]:
    """Return the files of a tokenizer: `tokenizer.json`, `tokenizer_config.json` and,
    for BERT's, `vocab.txt`.

    Args:
        tokenizer: the tokenizer.
        begin: transformers puts the begin id before a text.
        end: transformers puts the end id after a text, and after both texts of a pair.
        pad_id: the id with which transformers pads a batch. None: that of the
            tokenizer, if it has one.
        max_length: most positions of the model; transformers warns of longer texts.
            None: no limit.
        segments: transformers tells the model to which text of a pair a token belongs.
        frame: tokens that transformers puts before a text, and after the end id; "" for
            none, (): none.

    Raises:
        TokenizerError: the tokenizer lacks the id that `begin` or `end` needs.
    """
    content = json.loads(tokenizer.to_json()) | {
        "post_processor": None,
        "padding": None,
        "truncation": None,
    }
    content.pop("special_ids", None)
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    if begin or end:
        template = _template(tokenizer, begin, end, segments, frame or ("", ""))
        library.post_processor = template
    wordpiece = of_bert(content) and content["model"]["type"] == "WordPiece"
    settings: Settings = {
        "tokenizer_class": "BertTokenizer" if wordpiece else "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    if not segments:
        settings["model_input_names"] = ["input_ids", "attention_mask"]
    for name, keys in (NAMED | {"unk_id": ("unk_token",)}).items():
        special_id = getattr(tokenizer, name)
        if name == "pad_id" and pad_id is not None:
            special_id = pad_id
        if special_id is not None:
            key = keys[-1] if wordpiece else keys[0]
            settings[key] = tokenizer.tokens([special_id])[0]
    if frame and tokenizer.id_of(ROBERTA["bos_token"]) is not None:
        # the begin id is that of the decoder
        settings["bos_token"] = ROBERTA["bos_token"]
    texts = {"tokenizer.json": library.to_str(pretty=True)}
    if wordpiece:
        settings |= {
            theirs: content["normalizer"][ours]
            for theirs, ours in NORMALIZATION.items()
        }
        texts["vocab.txt"] = "".join(
            token + "\n" for token in tokenizer.tokens(range(tokenizer.size))
        )
    texts["tokenizer_config.json"] = json.dumps(settings, indent=2) + "\n"
    return {name: text.encode() for name, text in texts.items()}


def _template(
    tokenizer: Tokenizer,
    begin: bool,
    end: bool,
    segments: bool,
    frame: Sequence[str],
) -> processors.TemplateProcessing:
    """Return the post-processor that puts special ids around a text, and around both
    texts of a pair.
    """
    special_ids: dict[str, int | None] = {}
    if begin:
        special_ids["begin"] = tokenizer.bos_id
    if end:
        special_ids["end"] = tokenizer.eos_id
    special_tokens: dict[str, tuple[str, int]] = {}
    for name, special_id in special_ids.items():
        if special_id is None:
            raise TokenizerError(
                f"The tokenizer has no {name} id to put around a text: "
                f"use one that has it, or {name}=False."
            )
        special_tokens[name] = (tokenizer.tokens([special_id])[0], special_id)
    before, after = ([token] if token else [] for token in frame)
    for token in (*before, *after):
        special_tokens[token] = (token, _known(tokenizer, token))
    first = before + ([special_tokens["begin"][0]] if begin else [])
    last = [special_tokens["end"][0]] if end else []
    between = last * (separators(tokenizer) - 1)
    last += after
    single = [f"{piece}:0" for piece in (*first, "$A", *last)]
    second = [f"{piece}:{int(segments)}" for piece in ("$B", *last)]
    return processors.TemplateProcessing(
        single=single,
        pair=[*single, *(f"{piece}:0" for piece in between), *second],
        special_tokens=list(special_tokens.values()),
    )


def _known(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token. Raises TokenizerError if there is none."""
    known = tokenizer.id_of(token)
    if known is None:
        raise TokenizerError(
            f"The tokenizer has no token {token!r} to put around a text: "
            "use the one that the model was trained with."
        )
    return known


def settings_of(folder: epath.Path) -> Settings:
    """Return what the files beside the tokenizer say, without values that are null.

    Special tokens are strings.
    """
    settings: Settings = {}
    types = TYPES | dict.fromkeys(NORMALIZATION, bool) | dict.fromkeys(TOKENS, str)
    for path in (folder / name for name in SETTINGS):
        content = read_object(path, TokenizerError) if exists(path) else {}
        for key, value in content.items():
            if key in TOKENS and isinstance(value, dict):
                value = value.get("content")
            if not isinstance(value, (types.get(key, object), type(None))):
                raise TokenizerError(
                    f"{path}: {key} = {value!r:.80} "
                    f"must be of type {types[key].__name__}. Copy the file again."
                )
            if value is not None:
                settings[key] = value
    return settings


def _complete(folder: epath.Path, settings: Settings) -> str:
    """Read `tokenizer.json`.

    What the settings say about normalization, spaces and added tokens wins.

    As in transformers, a generic class ignores "add_prefix_space".
    """
    content = read_object(folder / "tokenizer.json", TokenizerError)
    content |= {"padding": None, "truncation": None}
    normalizer = content.get("normalizer")
    if isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer":
        normalizer |= {
            ours: settings[theirs]
            for theirs, ours in NORMALIZATION.items()
            if theirs in settings
        }
    try:
        return _as_settings_say(content, folder, settings)
    except (TokenizerError, OSError):
        raise
    except Exception as error:  # the Rust library raises bare Exception
        raise TokenizerError(
            f"{folder / 'tokenizer.json'}: Not a tokenizer's JSON: "
            f"{error}. Copy the folder again."
        ) from error


def _as_settings_say(
    content: dict[str, Any], folder: epath.Path, settings: Settings
) -> str:
    """Return a `tokenizer.json` with the space before a text and the added tokens of
    the settings.
    """
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content, ensure_ascii=False))
    kind = class_of(settings)
    prefix = settings.get(
        "add_prefix_space", False if kind == "GPT2Tokenizer" else None
    )
    if prefix is not None and kind not in GENERIC:
        # older files say otherwise where a space is put
        present = json.loads(tokenizer.to_str())
        _put_prefix(present, prefix)
        tokenizer = tokenizers.Tokenizer.from_str(
            json.dumps(present, ensure_ascii=False)
        )
    return _with_added(tokenizer, folder, settings).to_str()


def class_of(settings: Settings) -> str:
    """Return the name of the tokenizer's class in transformers, or of its type of
    model.
    """
    name = str(
        settings.get("tokenizer_class", settings.get("model_type"))
    ).removesuffix("Fast")
    return CLASSES.get(name, name)


def _put_prefix(content: dict[str, Any], prefix: bool) -> None:
    """Let the parts of a `tokenizer.json` put a space before a text, or not."""
    for part in _steps(content, "pre_tokenizer", "pretokenizers"):
        if part["type"] == "ByteLevel":
            part["add_prefix_space"] = prefix
        elif (
            part["type"] == "Metaspace"
            and (part["prepend_scheme"] != "never") != prefix
        ):
            part["prepend_scheme"] = "first" if prefix else "never"
    if prefix:
        return
    normalizers_ = [
        step
        for step in _steps(content, "normalizer", "normalizers")
        if step["type"] != "Prepend"
    ]
    content["normalizer"] = {"type": "Sequence", "normalizers": normalizers_}
    for part in _steps(content, "decoder", "decoders"):
        if part["type"] == "Strip":
            part["start"] = 0
        elif part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"


def _steps(content: dict[str, Any], part: str, name: str) -> list[dict[str, Any]]:
    """Return the steps of a part of a `tokenizer.json`."""
    whole = content.get(part)
    if whole is None:
        return []
    return whole[name] if whole["type"] == "Sequence" else [whole]


def _word_pieces(folder: epath.Path, settings: Settings) -> str:
    """Read BERT's tokenizer from `vocab.txt`."""
    tokenizer = bert(
        _vocabulary(folder / "vocab.txt"), settings.get("do_lower_case", True)
    )
    for theirs, ours in NORMALIZATION.items():
        if theirs in settings:
            setattr(tokenizer.normalizer, ours, settings[theirs])
    return _with_added(tokenizer, folder, settings).to_str()


def _byte_pairs(folder: epath.Path, settings: Settings) -> str:
    """Read the tokenizer of GPT-2, RoBERTa or the first GPT from `vocab.json` and
    `merges.txt`.

    GPT-2's works on bytes (Radford et al. 2019, section 2.2), and RoBERTa's does the
    same with other special tokens (Liu et al. 2019, section 4.4). The first GPT's
    splits text as BERT's, and marks the ends of words (Radford et al. 2018, section
    4.1).
    Differs: the latter was split by spaCy, as transformers no longer does.
    """
    kind = class_of(settings)
    vocabulary, merges = _merges(folder)
    if kind in ("GPT2Tokenizer", "RobertaTokenizer"):
        of_gpt = kind == "GPT2Tokenizer"
        named = ({"eos_token": "<|endoftext|>"} if of_gpt else ROBERTA) | settings
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=settings.get("add_prefix_space", False)
        )
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "OpenAIGPTTokenizer":
        named = {"unk_token": "<unk>"} | settings
        model = models.BPE(
            vocabulary, merges, unk_token=named["unk_token"], end_of_word_suffix="</w>"
        )
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    else:
        raise TokenizerError(
            f"{folder} has vocab.json and merges.txt, but tokenizer_class "
            f"or model_type is {kind}: known are {', '.join(BYTE_PAIRS)}. "
            "Let transformers write tokenizer.json: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    special = dict.fromkeys(named[key] for key in TOKENS if key in named)
    tokenizer.add_special_tokens([token for token in special if token in vocabulary])
    if kind == "RobertaTokenizer":
        _as_roberta(tokenizer, named)
    return _with_added(tokenizer, folder, settings).to_str()


def _as_roberta(tokenizer: tokenizers.Tokenizer, named: Settings) -> None:
    """Let a tokenizer frame texts, and drop spaces before a mask, as RoBERTa's does."""
    mask = named["mask_token"]
    if tokenizer.token_to_id(mask) is not None:
        added = AddedToken(mask, lstrip=True, normalized=False)
        tokenizer.add_special_tokens([added])
    first = named["bos_token"]
    last = named["eos_token"]
    begin = tokenizer.token_to_id(first)
    end = tokenizer.token_to_id(last)
    if begin is None or end is None:
        raise TokenizerError(
            f"vocab.json lacks {first} or {last}: copy all files of one model"
        )
    frame = processors.RobertaProcessing((last, end), (first, begin))
    tokenizer.post_processor = frame


def _vocabulary(path: epath.Path) -> dict[str, int]:
    """Read a `vocab.txt` of BERT."""
    vocabulary: dict[str, int] = {}
    for i, token in enumerate(sources.decode_lines(files.read(path), str(path))):
        if not token:
            raise TokenizerError(
                f"{path}:{i + 1} is empty: each line must be a token. "
                "Copy the file again."
            )
        if token in vocabulary:
            raise TokenizerError(
                f"{path}:{i + 1} repeats {token!r} of line {vocabulary[token] + 1}: "
                "a token must have one id. Copy the file again."
            )
        vocabulary[token] = i
    if missing := [
        token for token in ("[UNK]", "[CLS]", "[SEP]") if token not in vocabulary
    ]:
        raise TokenizerError(
            f"{path} has {len(vocabulary)} lines, none of which is "
            f"{' or '.join(missing)}: use the vocab.txt of a BERT, which has all three."
        )
    return vocabulary


def _merges(folder: epath.Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Read `vocab.json`, an object of tokens and ids, and `merges.txt`.

    Each line of `merges.txt` names two tokens to merge.
    """
    path = folder / "merges.txt"
    vocabulary = read_object(folder / "vocab.json", TokenizerError)
    if not_ids := [
        token for token, i in vocabulary.items() if type(i) is not int or i < 0
    ]:
        raise TokenizerError(
            f"{folder / 'vocab.json'} gives {not_ids[0]!r} no id from 0 up. "
            "Copy the file again."
        )
    merges = []
    for number, line in enumerate(sources.decode_lines(files.read(path), str(path)), 1):
        if line and not line.startswith("#version"):
            pair = tuple(line.split(" "))
            if len(pair) != 2:
                raise TokenizerError(
                    f"{path}:{number} has {len(pair)} parts instead of 2: "
                    f"{line!r}. Copy it again."
                )
            if unknown := [
                token for token in (*pair, "".join(pair)) if token not in vocabulary
            ]:
                raise TokenizerError(
                    f"{path}:{number} has {unknown[0]!r}, which vocab.json lacks. "
                    "Copy both files from the same model."
                )
            merges.append(pair)
    return vocabulary, merges


def _with_added(
    tokenizer: tokenizers.Tokenizer, folder: epath.Path, settings: Settings
) -> tokenizers.Tokenizer:
    """Add the tokens that a folder has beyond its vocabulary, those of
    `added_tokens.json` only if there are no others.

    The latter file lacks the properties of tokens: special ones are those that the
    settings name.
    """
    try:
        decoder = settings.get("added_tokens_decoder", {})
        added: dict[int, Any] = {
            int(i): AddedToken(**token) for i, token in decoder.items()
        }
    except (TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder}: added_tokens_decoder must have ids and tokens: "
            f"{error}. Copy it again."
        ) from error
    if "added_tokens_decoder" not in settings and exists(folder / "added_tokens.json"):
        special = {settings[key] for key in TOKENS if key in settings}
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = settings.get(key, [])
            special |= {
                str(token["content"] if isinstance(token, dict) else token)
                for token in tokens
            }
        more = read_object(folder / "added_tokens.json", TokenizerError)
        for token, i in more.items():
            added[i] = AddedToken(
                token, normalized=token not in special, special=token in special
            )
    for i, token in sorted(added.items()):
        tokenizer.add_tokens([token])
        actual = tokenizer.token_to_id(token.content)
        if actual != i:
            raise TokenizerError(
                f"{folder} gives the added token {token.content!r} the id {i}, but in "
                f"the vocabulary it has {actual}. Copy all files from the same model."
            )
    return tokenizer


def _special_ids(tokenizer: Tokenizer, settings: Settings) -> dict[str, int]:
    """Return the special ids that differ from those that the tokenizer finds by
    their names.
    """
    special = {}
    for name, keys in NAMED.items():
        default = getattr(tokenizer, name)
        choices: list[Any] = []
        if name == "bos_id":
            first = FIRST_IDS.get(settings.get("model_type", ""))
            choices.append(settings.get("decoder_start_token_id", first))
        choices += [tokenizer.id_of(settings[key]) for key in keys if key in settings]
        choices.append(default)
        configured = settings.get(f"{keys[0]}_id")  # an id, or several
        choices += configured if isinstance(configured, list) else [configured]
        chosen = next((i for i in choices if i in range(tokenizer.size)), None)
        if chosen is not None and chosen != default:
            special[name] = chosen
    return special
