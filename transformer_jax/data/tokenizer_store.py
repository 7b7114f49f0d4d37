"""The tokenizers of a run: loaded from its workdir, or made there."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from etils import epath

from transformer_jax import files
from transformer_jax.data import tokenizer_files
from transformer_jax.data.columns import texts_of
from transformer_jax.data.languages import divided
from transformer_jax.data.progress import counted, progress
from transformer_jax.data.sources import Source
from transformer_jax.data.streams import Tokens
from transformer_jax.data.tokenizer_training import train_tokenizer
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError
from transformer_jax.errors import UserError

log = logging.getLogger(__name__)


class TokenizerStore:
    """The tokenizers in a workdir.

    A missing one is copied from `start`, or without `start` made from `data.vocabulary`
    or trained on the training split, and saved.

    Args:
        config: a `TextData`, which says how tokenizers are made.
        workdir: folder with the tokenizers' files.
        open_split: function that returns the columns of a split, to train on.
        start: see `Corpus`.
    """

    def __init__(
        self,
        config: Any,
        workdir: epath.Path,
        open_split: Callable[[str], Source],
        start: epath.PathLike | None = None,
    ):
        self._config = config
        self._workdir = workdir
        self._open_split = open_split
        self._start = None if start is None else epath.Path(start)

    def tokenizer(self, streams: Sequence[Tokens]) -> Tokenizer:
        """Return the tokenizer that `streams` share. If its file is missing, make it
        first.

        Raises:
            ValueError: the tokenizer cannot be loaded or trained, has too many ids for
                the model, or is missing in `start`, or in a workdir that has
                checkpoints.
        """
        path = self._workdir / streams[0].file
        vocab_size = min(stream.vocab_size for stream in streams)
        keys = " and ".join(dict.fromkeys(stream.key for stream in streams))
        if not files.exists(path):
            if files.exists(self._workdir / "checkpoints"):
                raise UserError(
                    f"{path} is missing, but the checkpoints in this workdir "
                    "depend on it: restore the file, or train again in another workdir"
                )
            columns = list(dict.fromkeys(stream.column for stream in streams))
            self._make(path, columns, vocab_size, keys)
        tokenizer = Tokenizer.load(path)
        if tokenizer.size > vocab_size:
            raise UserError(
                f"{path} has {tokenizer.size} ids, but {keys} = {vocab_size}: the "
                f"vocabulary does not fit the model; set {keys} to {tokenizer.size}, "
                "or restore the tokenizer that the model was trained with"
            )
        return tokenizer

    def _make(
        self, path: epath.Path, columns: Sequence[str], vocab_size: int, keys: str
    ) -> None:
        """Copy or train a tokenizer, and save it."""
        config = self._config
        if self._start is not None:
            _keep(_copied(self._start, path), path)
            log.info("%s taken from %s", path.name, self._start)
        elif config.vocabulary:
            tokenizer = tokenizer_files.from_vocabulary(
                config.vocabulary, config.lowercase
            )
            _keep(tokenizer, path)
            log.info("%s made from %s", path.name, config.vocabulary)
        else:
            _keep(self._trained(path.name, columns, vocab_size, keys), path)

    def _trained(
        self, name: str, columns: Sequence[str], vocab_size: int, keys: str
    ) -> Tokenizer:
        """Return a tokenizer trained on columns of the training split."""
        data = self._config
        text = self._open_split(data.train_split)
        share = -(-data.tokenizer_lines // len(columns)) or len(text)
        chosen: Sequence[int] = range(len(text))
        if share < len(text):
            chosen = [i * len(text) // share for i in range(share)]
        lines = list[str]()
        for column in map(text.column, columns):
            for i in chosen:
                lines += [divided(text, data.marks)[1] for text in texts_of(column[i])]
        try:
            with progress(f"training {name} on {counted(len(lines), 'line')}"):
                tokenizer = train_tokenizer(
                    data.tokenizer,
                    lines,
                    vocab_size,
                    min_count=data.min_count,
                    lowercase=data.lowercase,
                    marks=data.special_tokens,
                )
        except TokenizerError as error:
            raise TokenizerError(
                f"data.tokenizer = {data.tokenizer!r}, "
                f"{keys} = {vocab_size}, data.min_count = {data.min_count}: {error}"
            ) from error
        log.info(
            "trained %s on %s: a vocabulary of %s, at most %s",
            name,
            counted(len(lines), "line"),
            counted(tokenizer.size, "token"),
            f"{vocab_size:,}",
        )
        return tokenizer


def _copied(folder: epath.Path, path: epath.Path) -> Tokenizer:
    """Return the tokenizer of the run or the Hugging Face folder that this run starts
    from.
    """
    if tokenizer_files.is_folder(folder):
        return tokenizer_files.from_folder(folder, path.name)
    source = folder / path.name
    if not files.exists(source):
        raise UserError(
            f"{source} is missing, but this run starts from {folder}: "
            "restore the file, or copy the tokenizer "
            f"that the parameters there were trained with to {path}"
        )
    return Tokenizer.load(source)


def _keep(tokenizer: Tokenizer, path: epath.Path) -> None:
    """Write a tokenizer that the run has made to its workdir, and note there that
    the run made it.
    """
    files.make_folder(path.parent)
    files.write_made(path, tokenizer.to_json().encode())
