"""Parallel text for a model: opened, tokenized, arranged in batches."""

import dataclasses
import functools
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from etils import epath

from transformer_jax.data import sources, tokenizers
from transformer_jax.data.batching import Batch, BatchPlan, pad
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.tokenizers import EOS_ID, PAD_ID, Tokenizer, TokenizerError

log = logging.getLogger(__name__)

SOURCES = ("files", "tfds")


@dataclasses.dataclass(frozen=True)
class TranslationData:
    """Where the text is, how it is tokenized and how it is batched."""

    source: str = "files"  # "files": {split}.{language}[.gz] in `directory`; "tfds": `name`, prepared there
    name: str = ""
    directory: str = ""
    train_split: str = "train"
    validation_split: str = "val"
    test_split: str = "test"
    source_language: str = "en"
    target_language: str = "de"
    tokenizer: str = "bpe_bytes"
    tokenizer_lines: int = 500_000  # it learns from, evenly spread over the training split; 0: from all, held in memory
    joint_tokenizer: bool = True  # one vocabulary for both languages
    lowercase: bool = False
    min_count: int = 1  # of words and characters that enter a vocabulary, and of pairs that BPE and WordPiece merge
    max_length: int = 256  # tokens a sentence, the end included; longer pairs are not trained on
    max_ratio: float = 0.0  # tokens of the longer side over the shorter's, beyond: not trained on; 0: no limit
    batch_tokens: int = 4096  # padded positions of a batch's longer side
    max_shapes: int = 8  # batch shapes, and so compilations of the training step
    rows_multiple: int = 8  # of every batch's rows: what devices and microbatches divide

    def problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong, as (field, rule and remedy)."""
        if self.source not in SOURCES:
            yield "source", f"must be one of {', '.join(SOURCES)}"
        if self.source == "tfds" and not self.name:
            yield "name", "must be the data set's name in tfds, as 'wmt14_translate/de-en'"
        if not self.directory:
            yield "directory", "must be the folder of the data: add --config.data.directory=DIR"
        if self.source_language == self.target_language:
            yield "target_language", "must differ from source_language"
        if self.tokenizer not in tokenizers.KINDS:
            yield "tokenizer", f"must be one of {', '.join(tokenizers.KINDS)}"
        elif self.tokenizer == "unigram" and self.min_count > 1:
            yield "min_count", "must be 1 with data.tokenizer = 'unigram', which goes by probability, not by count"
        if self.max_length < 2:
            yield "max_length", "must be at least 2: a token and the end"
        if not (self.max_ratio == 0 or 1 <= self.max_ratio < math.inf):
            yield "max_ratio", "must be at least 1, or 0 for no limit"
        if self.tokenizer_lines < 0:
            yield "tokenizer_lines", "must be at least 1, or 0 for all"
        for name in ("min_count", "batch_tokens", "max_shapes", "rows_multiple"):
            if getattr(self, name) < 1:
                yield name, "must be at least 1"
        if self.rows_multiple >= 1 and self.batch_tokens < self.max_length * self.rows_multiple:
            yield (
                "batch_tokens",
                f"must hold rows_multiple = {self.rows_multiple} rows of max_length = {self.max_length}: set it to "
                f"{self.max_length * self.rows_multiple} or more",
            )


class ParallelText:
    """The corpus of a `TranslationData`, in the ids of the tokenizers that lie in `workdir`.

    `vocab_sizes`: of source and target, that the model has room for; `limit`: tokens that it has positions for.
    """

    def __init__(self, config: TranslationData, vocab_sizes: tuple[int, int], limit: int, workdir: epath.PathLike):
        self.config, self._vocab_sizes, self._limit, self.workdir = config, vocab_sizes, limit, epath.Path(workdir)
        self._opened: dict[str, sources.Source] = {}

    def open(self, split: str) -> sources.Source:
        data = self.config
        languages = (data.source_language, data.target_language)
        if split not in self._opened:
            if data.source == "tfds":
                self._opened[split] = sources.tfds_source(data.name, data.directory, split, languages)
            else:
                self._opened[split] = sources.parallel_files(data.directory, split, languages)
        return self._opened[split]

    @functools.cached_property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """(source, target): those of the workdir; when it has none yet, trained on the training split."""
        data = self.config
        sides = dict(zip(("source", "target"), self._vocab_sizes, strict=True))
        if data.joint_tokenizer:
            joint = self._tokenizer("tokenizer.json", ("source", "target"), sides["target"])
            return joint, joint
        source, target = (self._tokenizer(f"tokenizer.{side}.json", (side,), size) for side, size in sides.items())
        return source, target

    def _tokenizer(self, name: str, sides: Sequence[str], vocab_size: int) -> Tokenizer:
        path, data = self.workdir / name, self.config
        keys = " and ".join(f"model.{side}_vocab_size" for side in sides)
        if not path.exists():
            if (self.workdir / "checkpoints").exists():
                raise ValueError(
                    f"{path} is missing, and the checkpoints beside it belong to it: restore the file, or "
                    "train anew in another workdir"
                )
            languages = {"source": data.source_language, "target": data.target_language}
            text = self.open(data.train_split)
            share = -(-data.tokenizer_lines // len(sides)) or len(text)
            chosen = [i * len(text) // share for i in range(share)] if share < len(text) else range(len(text))
            lines = [text.column(languages[side])[i] for side in sides for i in chosen]
            try:
                tokenizer = tokenizers.train_tokenizer(
                    data.tokenizer, lines, vocab_size, min_count=data.min_count, lowercase=data.lowercase
                )
            except TokenizerError as error:
                raise TokenizerError(
                    f"data.tokenizer = {data.tokenizer!r}, {keys} = {vocab_size}, data.min_count = {data.min_count}: "
                    f"{error}"
                ) from error
            tokenizer.save(path)
            log.info("trained %s on %d lines: %d of %d ids", name, len(lines), tokenizer.size, vocab_size)
        tokenizer = Tokenizer.load(path)
        if tokenizer.size > vocab_size:
            raise ValueError(
                f"{path} has {tokenizer.size} ids, but {keys} = {vocab_size}: the vocabulary does not fit the "
                f"model; set {keys} to {tokenizer.size} or restore the tokenizer it was trained with"
            )
        return tokenizer

    def encode(self, side: int, lines: Sequence[str]) -> Ragged:
        return self.tokenizers[side].encode(lines, EOS_ID)

    def batches(self, split: str, seed: int | None) -> tuple[BatchPlan, Callable[[Batch], dict[str, np.ndarray]]]:
        """Pairs {"source": (B, S), "target": (B, T)} int32, each ending in EOS, then padding."""
        data = self.config
        training = seed is not None
        text = self.open(split)
        source = self.encode(0, text.column(data.source_language))
        target = self.encode(1, text.column(data.target_language))
        if not training:
            source, target = self.cut(source, split), self.cut(target, split)
        lengths = np.stack([source.lengths, target.lengths], axis=1)
        if training:
            # A pair with an empty side teaches nothing: one past the limit drops it with the over-long ones.
            shorter, longer = lengths.min(axis=1) - 1, lengths.max(axis=1) - 1
            empty = shorter == 0
            limit = data.max_ratio * shorter
            uneven = (limit > 0) & (longer > limit) & (longer < data.max_length)
            lengths[empty | uneven] = data.max_length + 1
            if (lengths > data.max_length).any(axis=1).all():
                raise ValueError(
                    f"{split}: none of {len(lengths)} pairs is left: {empty.sum()} have an empty side, {uneven.sum()} "
                    f"are beyond data.max_ratio = {data.max_ratio:g}, the others longer than data.max_length = "
                    f"{data.max_length}; look at the files, or raise the limits"
                )
        plan = BatchPlan(
            lengths,
            max_lengths=(data.max_length,) * 2 if training else None,
            tokens=data.batch_tokens if training else max(data.batch_tokens, int(lengths.max()) * data.rows_multiple),
            max_shapes=data.max_shapes,
            rows_multiple=data.rows_multiple,
            seed=seed,
        )
        if training:
            log.info(
                "%s: %d pairs in %d batches of %d shapes, %.0f %% of the target positions filled; left out: %d longer "
                "than data.max_length = %d, %d with an empty side, %d beyond data.max_ratio = %g",
                split,
                len(plan.kept),
                len(plan),
                len(plan.shapes),
                100 * plan.fill[1],
                plan.dropped - empty.sum() - uneven.sum(),
                data.max_length,
                empty.sum(),
                uneven.sum(),
                data.max_ratio,
            )

        def load(batch: Batch) -> dict[str, np.ndarray]:
            return {
                "source": pad(source, batch.indices, batch.shape[0], PAD_ID),
                "target": pad(target, batch.indices, batch.shape[1], PAD_ID),
            }

        return plan, load

    def cut(self, rows: Ragged, what: str) -> Ragged:
        """Rows of at most model.max_length tokens; those cut are said."""
        limit = self._limit
        for i in np.flatnonzero(rows.lengths > limit):
            log.warning("%s, line %d: %d tokens, cut to model.max_length = %d", what, i + 1, rows.lengths[i], limit)
        return rows.cut(limit, EOS_ID)

    def identity(self, training: bool) -> dict[str, str]:
        """Hashes of the tokenizers and, for training, of the text."""
        data = self.config
        source, target = self.tokenizers
        hashes = {"source tokenizer": source.sha256, "target tokenizer": target.sha256}
        if training:
            digest = hashlib.sha256()
            for language in (data.source_language, data.target_language):
                for block in self.open(data.train_split).column(language).blocks():
                    digest.update(block)
            hashes["training data"] = digest.hexdigest()
        return hashes
