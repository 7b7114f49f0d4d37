"""Count an n-gram model on a data set, store it in a folder, evaluate it, and score
texts with it.

The folder holds config.json, tokenizer.json and ngram.npz. Counting has no steps, no
gradients and no optimizer, so it is no `Task` of the engine, and has a command of its
own. The data, the tokenizers and the names and units of the scores are those of
language models.
"""

import dataclasses
import logging
import math
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from transformer_jax import fields, files, metrics
from transformer_jax import workdir as workdirs
from transformer_jax.baselines.arpa import arpa_lines
from transformer_jax.baselines.kneser_ney import (
    DISCOUNTS,
    Level,
    NgramModel,
    estimate,
)
from transformer_jax.config import ConfigError, parse_sections
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.files import DataError
from transformer_jax.data.progress import counted, progress
from transformer_jax.data.ragged import ranges
from transformer_jax.data.running_text import Text, read_text, warn_of_unknown
from transformer_jax.data.scoring import (
    encode_given,
    prediction_of,
    read_given,
    score,
)
from transformer_jax.data.sources import text_file
from transformer_jax.data.splits import SOURCES
from transformer_jax.data.streams import Tokens
from transformer_jax.data.tokenizer_training import KINDS
from transformer_jax.errors import UserError

TASK = "ngram"  # config.task
FILE = "ngram.npz"
STREAM = "text"
# errors of a file that is missing or damaged
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class NgramData:
    """Location and tokenization of text, see `data.text.TextData`.

    sentences: True: every line that is not blank is a sentence, whose end is predicted.
        False: the whole split is one text, with its line breaks.
    """

    source: str = "files"
    name: str = ""
    directory: str = fields.path("")
    train_split: str = "train"
    test_split: str = "val"
    text_column: str = "text"
    sentences: bool = False
    tokenizer: str = "words"
    tokenizer_lines: int = 500_000
    vocabulary: str = fields.path("")
    lowercase: bool = False
    min_count: int = 1

    # texts begin with no tokens of languages, see `TextData`
    marks: ClassVar[tuple[str, ...]] = ()
    apart: ClassVar[bool] = False
    special_tokens: ClassVar[tuple[str, ...]] = ()

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.source not in SOURCES:
            yield "source", f"must be one of {', '.join(SOURCES)}"
        if not self.directory:
            yield (
                "directory",
                "must be the folder of the data: add --config.data.directory=DIR",
            )
        if self.tokenizer not in KINDS:
            yield "tokenizer", f"must be one of {', '.join(KINDS)}"
        if self.vocabulary and self.tokenizer != "bert":
            yield "vocabulary", "must be '' unless data.tokenizer = 'bert'"
        if self.tokenizer_lines < 0:
            yield "tokenizer_lines", "must be at least 1, or 0 for all"
        if self.min_count < 1:
            yield "min_count", "must be at least 1"


@dataclasses.dataclass(frozen=True)
class NgramModelConfig:
    """The model.

    order: n. A token is predicted from the n - 1 tokens before it.
    discounts: "one" for each order, or "modified", three, see `kneser_ney.estimate`.
    vocab_size: most ids of the tokenizer.
    """

    order: int = 5
    discounts: str = "modified"
    vocab_size: int = 50_000

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.order < 1:
            yield "order", "must be at least 1, e.g. 5"
        if self.discounts not in DISCOUNTS:
            yield "discounts", f"must be one of {', '.join(DISCOUNTS)}"
        if self.vocab_size < 1:
            yield "vocab_size", "must be at least 1"


SECTIONS = {"data": NgramData, "model": NgramModelConfig}


def defaults() -> ConfigDict:
    """Return a ConfigDict of all keys, with their defaults."""
    values = {name: dataclasses.asdict(cls()) for name, cls in SECTIONS.items()}
    return ConfigDict({"task": TASK, **values})


def is_counted(workdir: epath.PathLike) -> bool:
    """Return True for the folder of an n-gram model, False for any other."""
    path = workdirs.path_of(workdir) / "config.json"
    return files.exists(path) and files.read_object(path).get("task") == TASK


class NgramRun:
    """An n-gram model with its tokenizer and its data.

    Args:
        config: the keys of `defaults`.
        workdir: the folder.

    Raises:
        ConfigError: a key is invalid, or the config is that of another model.
    """

    model: NgramModel

    def __init__(self, config: ConfigDict, workdir: epath.PathLike):
        raw = config.to_dict()
        if raw.get("task") != TASK:
            raise ConfigError(
                f"config.task = {raw.get('task')!r}: must be {TASK!r}; "
                "train other models with scripts/train.py"
            )
        sections, problems = parse_sections(raw, SECTIONS)
        problems += [
            f"config.{name} is not a section: the sections are {', '.join(SECTIONS)}"
            for name in sorted(raw.keys() - {"task", *SECTIONS})
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        self.data: NgramData = sections["data"]
        self.config: NgramModelConfig = sections["model"]
        self.workdir = workdirs.path_of(workdir)
        tokens = Tokens(
            self.data.text_column,
            "tokenizer.json",
            self.config.vocab_size,
            "model.vocab_size",
        )
        self.corpus = Corpus(self.data, {STREAM: tokens}, self.workdir, text_file)

    def count(self) -> None:
        """Estimate the model on the training split.

        Raises:
            ConfigError: no text is as long as an n-gram.
        """
        split = self.data.train_split
        texts = self._texts(split).documents
        if not self.data.sentences:
            begin = self.corpus.special_ids(STREAM).begin
            texts = texts.framed(begin=begin)
        order = self.config.order
        longest = int(texts.lengths.max())
        if order > longest:
            raise ConfigError(
                f"config.model.order = {order}: must be at most {longest}, the tokens "
                f"of the longest text of the split {split} with those that begin and "
                "end it; use a lower order or a longer text"
            )
        with progress(f"counting {counted(len(texts.values), 'token')}"):
            self.model = estimate(texts, order, self._predicted, self.config.discounts)
        for k, level in enumerate(self.model.levels, 1):
            log.info("order %d: %s", k, counted(len(level.keys), "n-gram"))

    @property
    def _predicted(self) -> np.ndarray:
        """(V,) True for the ids that may follow."""
        tokenizer = self.corpus.tokenizers[STREAM]
        never = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.mask_id}
        ends = {tokenizer.eos_id}
        never = never - ends if self.data.sentences else never | ends
        predicted = np.ones(tokenizer.size, bool)
        predicted[[i for i in never if i is not None]] = False
        return predicted

    def _texts(self, split: str) -> Text:
        """Return the texts of a split; sentences with the ids that begin and end
        them.
        """
        if not self.data.sentences:
            return read_text(self.corpus, STREAM, split, "windows")
        column = self.corpus.open(split).column(self.data.text_column)
        lines = [line.removesuffix("\n").removesuffix("\r") for line in column]
        lines = [line for line in lines if line.strip()]
        ids = self.corpus.encode(STREAM, lines)
        begun = ids.framed(begin=self.corpus.special_ids(STREAM).begin)
        return Text(begun, sum(len(line.encode()) for line in lines))

    def save(self) -> None:
        """Write the model to ngram.npz."""
        sha256 = self.corpus.tokenizers[STREAM].sha256
        arrays: dict[str, Any] = {"tokenizer": np.array(sha256)}
        for k, level in enumerate(self.model.levels, 1):
            arrays |= {f"{name}_{k}": x for name, x in level._asdict().items()}
        with files.replacing(self.workdir / FILE) as file:
            np.savez(file, **arrays)

    def restore(self) -> None:
        """Read the model from ngram.npz.

        Raises:
            UserError: the file is missing or damaged, or belongs to another tokenizer.
        """
        path = self.workdir / FILE
        tokenizer = self.corpus.tokenizers[STREAM]
        try:
            with path.open("rb") as file, np.load(file) as arrays:
                sha256 = str(arrays["tokenizer"])
                self.model = NgramModel(
                    [
                        Level(*(arrays[f"{name}_{k}"] for name in Level._fields))
                        for k in range(1, self.config.order + 1)
                    ],
                    tokenizer.size,
                )
        except DAMAGED as error:
            if isinstance(error, OSError) and not files.is_for_user(error):
                raise
            raise UserError(
                f"{path} is no n-gram model of order {self.config.order} ({error}): "
                "count it again with scripts/ngram.py --config=…"
            ) from error
        if sha256 != tokenizer.sha256:
            raise UserError(
                f"{path} was counted with another tokenizer than the one beside it: "
                "restore tokenizer.json, or count again"
            )

    def evaluate(self, split: str | None = None) -> dict[str, Any]:
        """Return the loss in nats per token, the perplexity and the bits per byte of a
        split, by default `data.test_split`.

        Every token is predicted, except the first one of a split that is one text. The
        end of a sentence is predicted, and has no size.
        """
        split = split or self.data.test_split
        texts, size = self._texts(split)
        where = f"{self.corpus.open(split).where}, split {split}"
        is_predicted = ranges(0, texts.lengths) > 0
        count = int(is_predicted.sum())
        if not count:
            raise DataError(
                f"{where}: a token is predicted from those before it, "
                "so there must be two; use a longer text"
            )
        warn_of_unknown(texts, self.corpus.tokenizers[STREAM], where)
        loss = -float(self.model.log_probabilities(texts)[is_predicted].mean())
        scores = {
            "split": split,
            "order": self.config.order,
            "tokens": count,
            **metrics.loss_and_perplexity({"loss": loss}),
        }
        if size:
            scores["bits_per_byte"] = loss * count / size / math.log(2)
        return scores

    def predict(self, records: Sequence[Any], scored: bool = True) -> list[Any]:
        """Return the scores of texts, like `Predictor.predict` with `scored`.

        A sentence follows the begin token, and its end counts as a token of the text.
        Any other text without a context follows a line break, as in language models.

        Raises:
            DataError: see `data.scoring.read_given`.
        """
        given = [read_given(record, number) for number, record in enumerate(records, 1)]
        if not given:
            return []
        sentences = self.data.sentences
        ids, before = encode_given(self.corpus, STREAM, given, begin=sentences)
        if sentences:
            ids = ids.framed(end=self.corpus.special_ids(STREAM).end)
        row = np.repeat(np.arange(len(ids)), ids.lengths)
        is_scored = ranges(0, ids.lengths) >= before[row]
        values = self.model.log_probabilities(ids)
        totals = np.bincount(row, np.where(is_scored, values, 0), len(ids)).tolist()
        counts = np.bincount(row, is_scored, len(ids)).astype(int).tolist()
        scores = (
            score([{"log_likelihood": total, "tokens": tokens}], len(text.encode()))
            for total, tokens, text in zip(
                totals,
                counts,
                [text for each in given for text in each.texts],
                strict=True,
            )
        )
        return [
            prediction_of(each, [next(scores) for _ in each.texts]) for each in given
        ]

    def write_arpa(self, path: epath.PathLike) -> None:
        """Write the model as an ARPA file, see `arpa.arpa_lines`."""
        tokenizer = self.corpus.tokenizers[STREAM]
        names = tokenizer.shown(range(tokenizer.size))
        begin = self.corpus.special_ids(STREAM).begin
        named = {begin: "<s>", tokenizer.eos_id: "</s>", tokenizer.unk_id: "<unk>"}
        for i, name in named.items():
            if i is not None:
                names[i] = name
        with files.replacing(path) as file:
            for line in arpa_lines(self.model, names, begin):
                file.write(f"{line}\n".encode())


def count(config: ConfigDict, workdir: epath.PathLike) -> NgramRun:
    """Count the model of `config` and store it in `workdir`.

    Raises:
        ConfigError: the config is invalid, or the folder holds another run.
    """
    path = workdirs.path_of(workdir)
    copy = ConfigDict(config.to_dict())
    with copy.unlocked():
        for key in ("directory", "vocabulary"):
            if copy.get("data", {}).get(key):
                copy.data[key] = workdirs.absolute(copy.data[key])
    run = NgramRun(copy, workdir)
    if files.exists(path / "checkpoints"):
        raise ConfigError(
            f"{workdir} holds the checkpoints of a trained run: "
            "choose another --workdir"
        )
    if files.exists(path / FILE) and (
        files.read_object(path / "config.json") != copy.to_dict()
    ):
        raise ConfigError(
            f"{workdir} holds another n-gram model: choose another --workdir"
        )
    workdirs.claim(workdir, copy)
    run.count()
    run.save()
    return run


def load(workdir: epath.PathLike, config: ConfigDict | None = None) -> NgramRun:
    """Return the model in `workdir`, with the config of that folder or another one.

    Raises:
        ConfigError: it is not the folder of an n-gram model.
        UserError: see `NgramRun.restore`.
    """
    run = NgramRun(config or stored(workdir), workdir)
    run.restore()
    return run


def stored(workdir: epath.PathLike) -> ConfigDict:
    """Return the config of the n-gram model in `workdir`.

    Raises:
        ConfigError: it is not the folder of an n-gram model.
    """
    if not is_counted(workdir):
        raise ConfigError(
            f"--workdir={workdir} is not the folder of an n-gram model: "
            "count one there first with scripts/ngram.py --config=…"
        )
    return ConfigDict(files.read_object(epath.Path(workdir) / "config.json"))
