"""The corpus of a run: the columns of a data set, and the streams that encode them."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from transformer_jax.data import sources
from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.columns import texts_of
from transformer_jax.data.progress import progress
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.streams import SpecialIds, Stream, Tokens
from transformer_jax.data.tokenizer_store import TokenizerStore
from transformer_jax.data.tokenizers import Tokenizer

# (directory, split, columns)
Reader = Callable[[epath.PathLike, str, Sequence[str]], sources.Source]


class Corpus:
    """The columns of a data set, and the streams that turn them into rows of numbers.

    Args:
        config: a `SplitData`, which says where the data is. If there are streams of
            tokens, it is a `TextData`.
        streams: how columns are encoded, keyed by their names in batches.
        workdir: folder from which tokenizers are loaded, or to which they are written
            after training. None: there are no tokenizers, and special ids are those of
            tokenizers trained by this package.
        read: function that reads the files of a split, e.g. `sources.parallel_files`.
            Not used for tfds.
        extra_columns: further columns to read, e.g. labels.
        start: folder from which missing tokenizers are copied instead of trained: the
            workdir of another run, or a Hugging Face folder.
    """

    def __init__(
        self,
        config: Any,
        streams: Mapping[str, Stream],
        workdir: epath.PathLike | None,
        read: Reader,
        extra_columns: Sequence[str] = (),
        start: epath.PathLike | None = None,
    ):
        self.config = config
        self.workdir = None if workdir is None else epath.Path(workdir)
        self._read = read
        self._opened: dict[str, sources.Source] = {}
        self._hashes: dict[str, str] = {}
        columns = [stream.column for stream in streams.values()]
        self._columns = list(dict.fromkeys([*columns, *extra_columns]))
        store = None
        if self.workdir is not None:
            store = TokenizerStore(config, self.workdir, self.open, start)
        self.streams: Mapping[str, Stream] = _with_tokenizers(streams, store)

    def open(self, split: str) -> sources.Source:
        """Return the columns of a split. It is opened once and then cached.

        Raises:
            DataError: the split cannot be read, or all lines of a text are blank.
        """
        data = self.config
        if split not in self._opened:
            if data.source == "tfds":
                source = sources.tfds_source(
                    data.name, data.directory, split, self._columns
                )
            else:
                source = self._read(data.directory, split, self._columns)
            self._opened[split] = source
            texts = (
                stream.column
                for stream in self.streams.values()
                if isinstance(stream, Tokens)
            )
            for name in dict.fromkeys(texts):
                column = source.column(name)
                if not any(text.strip() for i in column for text in texts_of(i)):
                    raise sources.DataError(
                        f"{source.where}: all {len(source)} "
                        f"lines of {name} in the split {split} are blank: "
                        "choose a file or a split that contains text."
                    )
        return self._opened[split]

    def tokens(self, name: str) -> Tokens:
        """Return the stream `name`, which must be one of tokens."""
        stream = self.streams[name]
        assert isinstance(stream, Tokens)
        return stream

    @property
    def tokenizers(self) -> dict[str, Tokenizer]:
        """The tokenizer of each stream of tokens.

        Raises:
            ValueError: see `TokenizerStore.tokenizer`, or there is no workdir.
        """
        return {
            name: stream.tokenizer
            for name, stream in self.streams.items()
            if isinstance(stream, Tokens)
        }

    def size(self, name: str) -> int:
        """See `Tokens.size`."""
        return self.tokens(name).size

    def special_ids(self, name: str) -> SpecialIds:
        """See `Tokens.special_ids`."""
        return self.tokens(name).special_ids

    def optional_ids(self, name: str) -> tuple[int | None, int | None, int | None]:
        """See `Tokens.optional_ids`."""
        return self.tokens(name).optional_ids

    def begin_id(self, name: str) -> int:
        """Return the id that begins a text.

        Raises TokenizerError if the tokenizer has none.
        """
        return int(self.encode(name, [""], begin=True, end=False).values[0])

    def encode(
        self, name: str, column: Sequence[Any], begin: bool = False, end: bool = True
    ) -> Ragged:
        """Return a row for each entry of a column, see `Stream.encode`."""
        return self.streams[name].encode(column, begin, end)

    def plan(
        self,
        lengths: np.ndarray,
        seed: int,
        max_lengths: Sequence[int] | None = None,
        groups: np.ndarray | None = None,
    ) -> BatchPlan:
        """Return a shuffled plan for training on examples of `lengths` (n, k), with
        the config's bucket options.

        Examples of different `groups` (n,) are never in one batch.
        """
        data = self.config
        return BatchPlan(
            lengths,
            max_lengths=max_lengths,
            tokens=data.batch_tokens,
            max_buckets=data.max_buckets,
            rows_multiple=data.rows_multiple,
            seed=seed,
            groups=groups,
        )

    def fingerprint(self, training: bool) -> dict[str, str]:
        """Return hashes of what the streams depend on, and if `training`, of the
        training split.
        """
        hashes = {
            f"{name} {part}": value
            for name, stream in self.streams.items()
            for part, value in stream.fingerprint().items()
        }
        if training:
            hashes["training data"] = self.sha256(self.config.train_split)
        return hashes

    def sha256(self, split: str) -> str:
        """Return the SHA-256 of a split's content.

        It is computed once and then cached.
        """
        if split not in self._hashes:
            digest = hashlib.sha256()
            source = self.open(split)
            with progress(f"computing the sha256 of the split {split}"):
                for column in self._columns:
                    for block in source.column(column).blocks():
                        digest.update(block)
            self._hashes[split] = digest.hexdigest()
        return self._hashes[split]


def _with_tokenizers(
    streams: Mapping[str, Stream], store: TokenizerStore | None
) -> dict[str, Stream]:
    """Return the streams, those of tokens with their tokenizers of the store."""
    shared: dict[str, list[Tokens]] = {}
    for stream in streams.values():
        if isinstance(stream, Tokens):
            shared.setdefault(stream.file, []).append(stream)
    load: dict[str, Callable[[], Tokenizer]] = {}
    if store is not None:
        for file, sharing in shared.items():
            load[file] = functools.cache(functools.partial(store.tokenizer, sharing))
    return {
        name: dataclasses.replace(stream, load=load.get(stream.file))
        if isinstance(stream, Tokens)
        else stream
        for name, stream in streams.items()
    }
