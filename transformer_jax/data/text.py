"""Open, tokenize and batch the text columns of a data set."""

import dataclasses
import functools
import hashlib
import logging
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from transformer_jax import fields, files
from transformer_jax.data import sources, tokenizer_files
from transformer_jax.data.batching import (
    Batches,
    BatchPlan,
    entropy,
    ladder_lengths,
    padded_arrays,
)
from transformer_jax.data.progress import counted, progress
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.tokenizer_training import KINDS, train_tokenizer
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError
from transformer_jax.errors import UserError

log = logging.getLogger(__name__)

SOURCES = ("files", "tfds")

# (directory, split, columns)
Reader = Callable[[epath.PathLike, str, Sequence[str]], sources.Source]


@dataclasses.dataclass(frozen=True)
class TextData:
    """Location, tokenization and batching of the text."""

    # "files": files in `directory`; "tfds": the data set `name`, prepared in
    # `directory`
    source: str = "files"
    name: str = ""
    directory: str = fields.path("")
    train_split: str = "train"  # a split, or a part of one, e.g. "train[:90%]"
    validation_split: str = fields.free("val")
    test_split: str = fields.free("test")
    tokenizer: str = "bpe_bytes"
    # lines to train it on, spread evenly over the training split; 0: all, in memory
    tokenizer_lines: int = 500_000
    # a vocab.txt of BERT to use instead of training a tokenizer of kind "bert"
    vocabulary: str = fields.path("")
    lowercase: bool = False
    # minimum count of words and characters in a vocabulary, and of BPE and WordPiece
    # merges
    min_count: int = 1
    # most tokens of an example, including begin and end
    max_length: int = fields.size(256, 32)
    # most padded positions in the widest stream of a batch
    batch_tokens: int = fields.size(4096, 1024)
    # most batch shapes, and hence compilations of the training step
    max_buckets: int = fields.size(8, 1)
    # divides the rows of every batch; devices and microbatches must divide it
    rows_multiple: int = fields.size(8, 8)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.source not in SOURCES:
            yield "source", f"must be one of {', '.join(SOURCES)}"
        if self.source == "tfds" and not self.name:
            yield (
                "name",
                "must be the data set's name in tfds, e.g. 'wmt14_translate/de-en'",
            )
        if not self.directory:
            yield (
                "directory",
                "must be the folder of the data: add --config.data.directory=DIR",
            )
        if self.tokenizer not in KINDS:
            yield "tokenizer", f"must be one of {', '.join(KINDS)}"
        elif self.tokenizer == "unigram" and self.min_count > 1:
            yield (
                "min_count",
                (
                    "must be 1 with data.tokenizer = 'unigram', "
                    "which selects by probability"
                ),
            )
        if self.vocabulary and self.tokenizer != "bert":
            yield (
                "vocabulary",
                (
                    "must be '' unless data.tokenizer = 'bert': "
                    "add --config.data.tokenizer=bert"
                ),
            )
        if self.max_length < 2:
            yield "max_length", "must be at least 2: one token and the end token"
        if self.tokenizer_lines < 0:
            yield "tokenizer_lines", "must be at least 1, or 0 for all"
        for name in ("min_count", "batch_tokens", "max_buckets", "rows_multiple"):
            if getattr(self, name) < 1:
                yield name, "must be at least 1"
        if (
            self.rows_multiple >= 1
            and self.batch_tokens < self.max_length * self.rows_multiple
        ):
            yield (
                "batch_tokens",
                (
                    f"must have room for rows_multiple = {self.rows_multiple} "
                    f"rows of max_length = {self.max_length}: "
                    f"set it to {self.max_length * self.rows_multiple} or more"
                ),
            )


@dataclasses.dataclass(frozen=True)
class ParallelData(TextData):
    """Parallel text: line i of the source language and line i of the target language
    form a pair.
    """

    source_language: str = "en"
    target_language: str = "de"
    joint_tokenizer: bool = True  # one tokenizer and vocabulary for both languages
    # largest length ratio of a training pair, longer over shorter side in tokens; 0: no
    # limit
    max_ratio: float = 0.0
    # (least, most) training pairs for these settings; most = 0: no limit
    meant_for: tuple[int, ...] = fields.free(())

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.source_language == self.target_language:
            yield "target_language", "must differ from source_language"
        if not (self.max_ratio == 0 or 1 <= self.max_ratio < math.inf):
            yield "max_ratio", "must be at least 1, or 0 for no limit"
        if len(self.meant_for) not in (0, 2):
            yield (
                "meant_for",
                "must be two numbers of pairs, (least, most), or () for no warning",
            )

    def size_advice(self, pairs: int) -> str:
        """Return a warning if these settings are meant for another number of
        training pairs, or "".
        """
        least, most = self.meant_for or (0, 0)
        if least <= pairs <= (most or pairs):
            return ""
        rule = f"at most {most:,}" if most and pairs > most else f"at least {least:,}"
        return (
            f"{self.train_split} has {counted(pairs, 'pair')}, but the settings "
            f"of this recipe are meant for {rule}: choose another size of the recipe, "
            "or set data.meant_for=() to keep these settings without this warning"
        )


class SpecialIds(NamedTuple):
    """Ids that begin, end and pad a sequence.

    If a vocabulary has no begin id, its end id takes that role (GPT-2).
    """

    begin: int
    end: int
    pad: int | None


TRAINED_HERE = SpecialIds(begin=1, end=2, pad=0)  # positions in `tokenizers.SPECIALS`


class Stream(NamedTuple):
    """A text column and its tokenization for the model."""

    column: str
    # file name in the workdir; streams with the same name share one tokenizer
    tokenizer: str
    vocab_size: int  # size of the model's vocabulary
    key: str  # config key of `vocab_size`, for messages, e.g. "model.source_vocab_size"


class Corpus:
    """The text of a data set, and the tokenizers in a workdir that turn it into ids.

    Args:
        config: where the text is, and how it is tokenized.
        streams: the columns to tokenize, keyed by their names in batches.
        workdir: folder from which tokenizers are loaded, or to which they are written
            after training. None: there are no tokenizers, and special ids are those of
            tokenizers trained by this package.
        read: function that reads the files of a split, e.g. `sources.parallel_files`.
            Not used for tfds.
        others: further columns to read, e.g. labels.
        start: folder from which missing tokenizers are copied instead of trained: the
            workdir of another run, or a Hugging Face folder.
    """

    def __init__(
        self,
        config: TextData,
        streams: Mapping[str, Stream],
        workdir: epath.PathLike | None,
        read: Reader,
        others: Sequence[str] = (),
        start: epath.PathLike | None = None,
    ):
        self.config, self.streams, self.workdir = (
            config,
            streams,
            None if workdir is None else epath.Path(workdir),
        )
        self._start = None if start is None else epath.Path(start)
        self._read, self._opened, self._hashes = (
            read,
            dict[str, sources.Source](),
            dict[str, str](),
        )
        self._columns = list(
            dict.fromkeys([*(stream.column for stream in streams.values()), *others])
        )

    def open(self, split: str) -> sources.Source:
        """Return the text of a split. It is opened once and then cached.

        Raises:
            DataError: the split cannot be read, or all lines of a stream are blank.
        """
        data = self.config
        if split not in self._opened:
            if data.source == "tfds":
                self._opened[split] = sources.tfds_source(
                    data.name, data.directory, split, self._columns
                )
            else:
                self._opened[split] = self._read(data.directory, split, self._columns)
            text = self._opened[split]
            for name in dict.fromkeys(
                stream.column for stream in self.streams.values()
            ):
                if not any(line.strip() for line in text.column(name)):
                    raise sources.DataError(
                        f"{text.where}: all {len(text)} "
                        f"lines of {name} in the split {split} are blank: "
                        "choose a file or a split that contains text."
                    )
        return self._opened[split]

    @functools.cached_property
    def tokenizers(self) -> dict[str, Tokenizer]:
        """The tokenizer of each stream, from the workdir.

        A missing one is copied from `start`, or without `start` made from
        `data.vocabulary` or trained on the training split, and saved.

        Raises:
            ValueError: a tokenizer cannot be loaded or trained, has too many ids for
                the model, or is missing in `start`, or in a workdir that has
                checkpoints.
        """
        shared: dict[str, list[Stream]] = {}
        for stream in self.streams.values():
            shared.setdefault(stream.tokenizer, []).append(stream)
        loaded = {
            file: self._tokenizer(file, streams) for file, streams in shared.items()
        }
        return {name: loaded[stream.tokenizer] for name, stream in self.streams.items()}

    def size(self, name: str) -> int:
        """Return the number of ids of a stream: of its tokenizer, or of its
        embedding if there is no workdir.
        """
        return (
            self.streams[name].vocab_size
            if self.workdir is None
            else self.tokenizers[name].size
        )

    def _tokenizer(self, file: str, streams: Sequence[Stream]) -> Tokenizer:
        """Load the tokenizer that `streams` share.

        If its file is missing, make it first.
        """
        if self.workdir is None:
            raise UserError("without a workdir there are no tokenizers: pass a workdir")
        path, vocab_size = (
            self.workdir / file,
            min(stream.vocab_size for stream in streams),
        )
        keys = " and ".join(dict.fromkeys(stream.key for stream in streams))
        if not files.exists(path):
            if files.exists(self.workdir / "checkpoints"):
                raise UserError(
                    f"{path} is missing, but the checkpoints in this workdir "
                    "depend on it: restore the file, or train again in another workdir"
                )
            if self._start is not None:
                self._copy(self._start, path)
            elif self.config.vocabulary:
                _keep(
                    tokenizer_files.from_vocabulary(
                        self.config.vocabulary, self.config.lowercase
                    ),
                    path,
                )
                log.info("%s made from %s", file, self.config.vocabulary)
            else:
                self._train(
                    path,
                    list(dict.fromkeys(stream.column for stream in streams)),
                    vocab_size,
                    keys,
                )
        tokenizer = Tokenizer.load(path)
        if tokenizer.size > vocab_size:
            raise UserError(
                f"{path} has {tokenizer.size} ids, but {keys} = {vocab_size}: the "
                f"vocabulary does not fit the model; set {keys} to {tokenizer.size}, "
                "or restore the tokenizer that the model was trained with"
            )
        return tokenizer

    def _train(
        self, path: epath.Path, columns: Sequence[str], vocab_size: int, keys: str
    ) -> None:
        """Train a tokenizer on columns of the training split, and save it."""
        data, text = self.config, self.open(self.config.train_split)
        share = -(-data.tokenizer_lines // len(columns)) or len(text)
        chosen = (
            [i * len(text) // share for i in range(share)]
            if share < len(text)
            else range(len(text))
        )
        lines = [text.column(column)[i] for column in columns for i in chosen]
        try:
            with progress(f"training {path.name} on {counted(len(lines), 'line')}"):
                tokenizer = train_tokenizer(
                    data.tokenizer,
                    lines,
                    vocab_size,
                    min_count=data.min_count,
                    lowercase=data.lowercase,
                )
        except TokenizerError as error:
            raise TokenizerError(
                f"data.tokenizer = {data.tokenizer!r}, "
                f"{keys} = {vocab_size}, data.min_count = {data.min_count}: {error}"
            ) from error
        _keep(tokenizer, path)
        log.info(
            "trained %s on %s: a vocabulary of %s, at most %s",
            path.name,
            counted(len(lines), "line"),
            counted(tokenizer.size, "token"),
            f"{vocab_size:,}",
        )

    def _copy(self, folder: epath.Path, path: epath.Path) -> None:
        """Copy the tokenizer of the run or the Hugging Face folder that this run
        starts from.
        """
        if tokenizer_files.is_folder(folder):
            tokenizer = tokenizer_files.from_folder(folder, path.name)
        elif files.exists(source := folder / path.name):
            tokenizer = Tokenizer.load(source)
        else:
            raise UserError(
                f"{source} is missing, but this run starts from {folder}: "
                "restore the file, or copy the tokenizer "
                f"that the parameters there were trained with to {path}"
            )
        _keep(tokenizer, path)
        log.info("%s taken from %s", path.name, folder)

    def special_ids(self, stream: str) -> SpecialIds:
        """Return the ids that begin, end and pad a sequence of `stream`.

        Raises:
            TokenizerError: the tokenizer has no end id.
        """
        begin, end, pad = self.optional_ids(stream)
        if end is None:
            raise TokenizerError(
                f"{self.streams[stream].tokenizer} "
                "has no special id for the end of a text: use a tokenizer that has one"
            )
        return SpecialIds(end if begin is None else begin, end, pad)

    def optional_ids(self, stream: str) -> tuple[int | None, int | None, int | None]:
        """Return the ids of begin, end and padding that the tokenizer of `stream` has.

        None: there is none.
        """
        if self.workdir is None:
            return TRAINED_HERE
        tokenizer = self.tokenizers[stream]
        return tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id

    def begin_id(self, stream: str) -> int:
        """Return the id that begins a text.

        Raises TokenizerError if the tokenizer has none.
        """
        return int(self.encode(stream, [""], begin=True, end=False).values[0])

    def encode(
        self, stream: str, lines: Sequence[str], begin: bool = False, end: bool = True
    ) -> Ragged:
        """Return the ids of each line, with the tokenizer's begin id before it and its
        end id after it if requested.

        Raises:
            TokenizerError: the tokenizer has no id for what is requested.
        """
        tokenizer = self.tokenizers[stream]
        added = {
            "begin": tokenizer.bos_id if begin else None,
            "end": tokenizer.eos_id if end else None,
        }
        for name, wanted in (("begin", begin), ("end", end)):
            if wanted and added[name] is None:
                raise TokenizerError(
                    f"{self.streams[stream].tokenizer} has no special "
                    f"id for the {name} of a line: use a tokenizer that has one"
                )
        return tokenizer.encode(lines, **added)

    def plan(
        self, lengths: np.ndarray, seed: int, max_lengths: Sequence[int] | None = None
    ) -> BatchPlan:
        """Return a shuffled plan for training on examples of `lengths` (n, k), with
        the config's bucket options.
        """
        data = self.config
        return BatchPlan(
            lengths,
            max_lengths=max_lengths,
            tokens=data.batch_tokens,
            max_buckets=data.max_buckets,
            rows_multiple=data.rows_multiple,
            seed=seed,
        )

    def fingerprint(self, training: bool) -> dict[str, str]:
        """Return hashes of the tokenizers and, if `training`, of the training split."""
        hashes = {
            f"{name} tokenizer": tokenizer.sha256
            for name, tokenizer in self.tokenizers.items()
        }
        return hashes | (
            {"training data": self.sha256(self.config.train_split)} if training else {}
        )

    def sha256(self, split: str) -> str:
        """Return the SHA-256 of a split's text. It is computed once and then cached."""
        if split not in self._hashes:
            digest, text = hashlib.sha256(), self.open(split)
            with progress(f"computing the sha256 of the split {split}"):
                for column in self._columns:
                    for block in text.column(column).blocks():
                        digest.update(block)
            self._hashes[split] = digest.hexdigest()
        return self._hashes[split]


def cut(
    rows: Ragged,
    limit: int,
    what: str,
    key: str = "model.max_length",
    begin: bool = False,
    end: bool = True,
    tail: bool = False,
) -> Ragged:
    """Truncate rows to at most `limit` tokens, and log a warning for each row that is
    truncated.

    Args:
        rows: the tokens of each line.
        limit: most tokens per row.
        what: source of the lines, for the warning.
        key: config key of `limit`, for the warning.
        begin: keep the first token of a row, its begin id.
        end: keep the last token of a row, its end id.
        tail: keep the last tokens of a row instead of the first.
    """
    for i in np.flatnonzero(rows.lengths > limit):
        log.warning(
            "%s, line %d: %d tokens, cut to %s = %d",
            what,
            i + 1,
            rows.lengths[i],
            key,
            limit,
        )
    return rows.cut(limit, begin, end, tail)


def ladder_batches(
    corpus: Corpus,
    texts: Mapping[str, Sequence[str]],
    *,
    rows: int,
    limit: int,
    what: str,
    begin: bool = False,
    end: bool = True,
    key: str = "model.max_length",
    tail: bool = False,
    others: Mapping[str, np.ndarray] = types.MappingProxyType({}),
) -> Batches:
    """Return batches for evaluation and prediction: each line once, truncated to
    `limit` tokens, `rows` per batch.

    The padded length of a line in the first stream depends only on its own length. So
    results computed from the first stream alone do not depend on the other lines.

    Args:
        corpus: corpus whose tokenizers encode the text.
        texts: lines of one or more streams, keyed by stream; line i of one belongs to
            line i of the others.
        rows: number of rows of every batch.
        limit: most tokens of a line.
        what: source of the lines, for warnings.
        begin: add the tokenizer's begin id before each line.
        end: add the tokenizer's end id after each line.
        key: config key of `limit`, for warnings.
        tail: keep the last tokens of a longer line instead of the first.
        others: further arrays (lines,), e.g. labels.

    Returns:
        Batches with arrays as in `padded_arrays`. `records` are the lines of the first
        stream, `references` those of the second.
    """
    first, *more = texts
    streams = {
        name: cut(
            corpus.encode(name, text, begin, end), limit, what, key, begin, end, tail
        )
        for name, text in texts.items()
    }
    if (empty := np.flatnonzero(streams[first].lengths == begin + end) + 1).size:
        shown = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
        number = f"line {shown} is" if len(empty) == 1 else f"{len(empty):,} lines are"
        log.warning(
            "%s: %s empty%s",
            what,
            number,
            "" if len(empty) == 1 else f": lines {shown}",
        )
    lengths = np.stack([ids.lengths for ids in streams.values()], axis=1)
    plan = BatchPlan.ladder(lengths, ladder_lengths(limit), rows)
    load = functools.partial(padded_arrays, streams, others)
    return Batches(plan, load, texts[first], texts[more[0]] if more else ())


def bucket_batches(
    corpus: Corpus,
    texts: Mapping[str, Sequence[str]],
    *,
    split: str,
    seed: int,
    max_ratio: float = 0.0,
    begin: bool = False,
    end: bool = True,
    others: Mapping[str, np.ndarray] = types.MappingProxyType({}),
) -> Batches:
    """Return batches for training, with examples of similar length together.

    Arguments are as in `ladder_batches`.

    An example is left out if one of its texts is empty or has more than
    `data.max_length` tokens, or if one has more than `max_ratio` times as many tokens
    as another (0: no limit).

    Raises:
        ValueError: no example is left to train on.
    """
    data = corpus.config
    streams = {
        name: corpus.encode(name, text, begin, end) for name, text in texts.items()
    }
    lengths = np.stack([ids.lengths for ids in streams.values()], axis=1)
    shorter, longer = (
        lengths.min(axis=1) - begin - end,
        lengths.max(axis=1) - begin - end,
    )
    empty = shorter == 0
    allowed = max_ratio * shorter
    uneven = (
        (allowed > 0) & (longer > allowed) & (longer + begin + end <= data.max_length)
    )
    # the plan drops them together with those that are too long
    lengths[empty | uneven] = data.max_length + 1
    if (lengths > data.max_length).any(axis=1).all():
        raise UserError(
            f"{split}: none of {len(lengths)} examples is left to train on: "
            f"{empty.sum()} have an empty side, {uneven.sum()} "
            f"exceed data.max_ratio = {max_ratio:g}, and the others exceed "
            f"data.max_length = {data.max_length}; check the files, or raise the limits"
        )
    plan = corpus.plan(lengths, seed, max_lengths=(data.max_length,) * len(streams))
    reasons = {
        f"longer than data.max_length = {data.max_length}": (
            plan.dropped - empty.sum() - uneven.sum()
        ),
        "with an empty side": empty.sum(),
        f"above data.max_ratio = {max_ratio:g}": uneven.sum(),
    }
    left_out = ", ".join(
        f"{count:,} {reason}" for reason, count in reasons.items() if count
    )
    log.info(
        "%s: %s in %s of %s; %.0f %% of the %s positions are filled; left out: %s",
        split,
        counted(len(plan.kept), "example"),
        counted(len(plan), "batch", "batches"),
        counted(len(plan.shapes), "shape"),
        100 * plan.fill[-1],
        list(streams)[-1],
        left_out or "none",
    )
    target = list(streams.values())[-1].values
    load = functools.partial(padded_arrays, streams, others)
    return Batches(plan, load, baseline=functools.partial(entropy, target))


def example_batches(
    corpus: Corpus,
    streams: Mapping[str, Ragged],
    others: Mapping[str, np.ndarray | Ragged],
    *,
    seed: int | None,
    rows: int,
    limit: int,
) -> Batches:
    """Return batches of encoded examples: shuffled with a `seed` for training, each
    example once and in order without.

    Args:
        corpus: corpus of the examples, whose config has the options of training
            batches.
        streams: the ids of each example in each stream, with special tokens.
        others: further arrays (examples,), e.g. labels, or one value per token of the
            first stream.
        seed: seed of the shuffle, or None.
        rows: number of rows of a batch without a seed.
        limit: most tokens of an example.
    """
    lengths = np.stack([ids.lengths for ids in streams.values()], axis=1)
    plan = example_plan(corpus, lengths, seed=seed, rows=rows, limit=limit)
    return Batches(plan, functools.partial(padded_arrays, streams, others))


def example_plan(
    corpus: Corpus, lengths: np.ndarray, *, seed: int | None, rows: int, limit: int
) -> BatchPlan:
    """Return the plan of `example_batches` for examples of `lengths` (n, k)."""
    return (
        BatchPlan.ladder(lengths, ladder_lengths(limit), rows)
        if seed is None
        else corpus.plan(lengths, seed)
    )


def _keep(tokenizer: Tokenizer, path: epath.Path) -> None:
    """Write a tokenizer that the run has made to its workdir, and note there that
    the run made it.
    """
    files.make_folder(path.parent)
    files.write_made(path, tokenizer.to_json().encode())
