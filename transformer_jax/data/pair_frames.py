"""Tokens around source and target of encoder–decoders in Hugging Face folders."""

from collections.abc import Mapping
from typing import Any

from etils import epath

from transformer_jax.data import tokenizer_files
from transformer_jax.data.tokenizer_frames import frame
from transformer_jax.data.tokenizers import TokenizerError

# the classes whose texts have the token of their language, and whether it follows the
# text (Liu et al. 2020) or precedes it (Tang et al. 2020)
LANGUAGE_FOLLOWS = {"MBartTokenizer": True, "MBart50Tokenizer": False}


def frames_of(path: epath.PathLike, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.data for the tokens around source and target, given the
    Hugging Face folder of an encoder–decoder with one tokenizer.

    The language of the source is src_lang of tokenizer_config.json, by default
    "en_XX" as in transformers. That of the target is the token with which `generate`
    begins, by default tgt_lang or that of the source.

    Args:
        path: the folder.
        config: its config.json and generation_config.json.

    Raises:
        TokenizerError: a language is no token, or see `tokenizer_frames.frame` and
            `tokenizer_files.from_folder`.
    """
    folder = epath.Path(path).expanduser()
    settings = tokenizer_files.settings_of(folder)
    tokenizer = tokenizer_files.from_folder(folder)
    kind = tokenizer_files.class_of(settings)
    if kind not in LANGUAGE_FOLLOWS:
        before, after = frame(tokenizer)
    elif LANGUAGE_FOLLOWS[kind]:
        before, after = "", settings.get("src_lang", "en_XX")
    else:
        before, after = settings.get("src_lang", "en_XX"), ""
    other = settings.get("tgt_lang", "")
    key = "decoder_start_token_id" if after else "forced_bos_token_id"
    first = config.get(key)
    if (before or after) and type(first) is int and first != tokenizer.eos_id:
        other = tokenizer.tokens([first])[0]
        if not other:
            raise TokenizerError(
                f"{folder}: {key} = {first}, but the tokenizer has no such id: "
                f"choose one below {tokenizer.size}, that of a language"
            )
    source = (before, after)
    target = (before and (other or before), after and (other or after))
    for token in (*source, *target):
        if token and tokenizer.id_of(token) is None:
            raise TokenizerError(
                f"{folder}: the language {token!r} is no token of the tokenizer: name "
                "another one as src_lang or tgt_lang in tokenizer_config.json"
            )
    return {
        "source_frame": source if any(source) else (),
        "target_frame": target if any(target) else (),
    }
