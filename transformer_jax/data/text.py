"""Config keys of data sets of text."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from transformer_jax import fields
from transformer_jax.data.files import DataError
from transformer_jax.data.languages import languages_of, marks_of
from transformer_jax.data.mixture import problems_of, weights_of
from transformer_jax.data.progress import counted
from transformer_jax.data.splits import SplitData
from transformer_jax.data.tokenizer_training import KINDS


@dataclasses.dataclass(frozen=True)
class TextData(SplitData):
    """Location, tokenization and batching of text."""

    tokenizer: str = fields.tokenizer("bpe_bytes")
    # lines to train it on, spread evenly over the training split, with several
    # references of an example as one line; 0: all, in memory
    tokenizer_lines: int = 500_000
    # a vocab.txt of BERT to use instead of training a tokenizer of kind "bert"
    vocabulary: str = fields.path("", makes_tokenizer=True)
    lowercase: bool = fields.tokenizer(False)
    # minimum count of words and characters in a vocabulary, and of BPE and WordPiece
    # merges
    min_count: int = fields.tokenizer(1, compared=False)

    # True: the tokens of `marks` select a part of the model, instead of being read
    apart: ClassVar[bool] = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens at the beginning of texts, each of which a tokenizer has as one id."""
        return ()

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that a tokenizer has as one id each, and that stand for no text."""
        return () if self.apart else self.marks

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
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
        if self.max_length == 1:
            yield "max_length", "must be at least 2: one token and the end token"
        if self.tokenizer_lines < 0:
            yield "tokenizer_lines", "must be at least 1, or 0 for all"
        if self.min_count < 1:
            yield "min_count", "must be at least 1"


@dataclasses.dataclass(frozen=True)
class ParallelData(TextData):
    """Pairs of a source and a target text: entry i of one column belongs to entry i of
    the other. The columns of a translation task are languages.
    """

    source_language: str = "en"
    target_language: str = "de"
    # texts of the target for each source; all are used for training and for scores
    references: int = 1
    # name of a table of all splits with the column "split" and those of source and
    # target, e.g. "captions.tsv"; each source has `references` lines. "": `{split}.*`
    table: str = ""
    # pairs of languages, e.g. ("en-de", "en-fr"), for one model that translates in all
    # of these directions, see `languages`; (): from source_language to target_language
    directions: tuple[str, ...] = ()
    # data sets, each of which is a folder in `directory`, with their shares of the
    # training batches up to a factor, e.g. ("en-de=4", "sick=1"), see `mixture`; ():
    # the files are in `directory` itself
    mixture: tuple[str, ...] = ()
    # first words of the source, of which each line must begin with one, e.g.
    # ("summarize: ",); (): each line may begin with anything
    prefixes: tuple[str, ...] = ()
    joint_tokenizer: bool = True  # one tokenizer and vocabulary for both languages
    # tokens before each source, and after its end token, "" for none: e.g. ("<s>", "")
    # for BART, ("", "en_XX") for mBART; (): none
    source_frame: tuple[str, ...] = fields.tokenizer((), compared=False)
    # the same for each target; the decoder begins with the token after the target, if
    # there is one, and otherwise with the begin id
    target_frame: tuple[str, ...] = fields.tokenizer((), compared=False)
    # largest length ratio of a training pair, longer over shorter side in tokens; 0: no
    # limit
    max_ratio: float = 0.0
    # (least, most) training pairs for these settings; most = 0: no limit
    meant_for: tuple[int, ...] = fields.free(())

    @property
    def marks(self) -> tuple[str, ...]:
        """The tokens of the languages of targets, if there are several directions."""
        return marks_of(self.directions)

    @property
    def weights(self) -> Mapping[str, float]:
        return weights_of(self.mixture)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.source_language == self.target_language:
            yield "target_language", "must differ from source_language"
        yield from self._problems_of_directions()
        yield from problems_of(self.mixture, self.prefixes)
        for name in ("directions", "mixture", "prefixes"):
            if getattr(self, name):
                yield from self._problems_beside(name)
        if self.references < 1:
            yield "references", "must be at least 1"
        for name in ("source_frame", "target_frame"):
            if len(getattr(self, name)) not in (0, 2):
                yield (
                    name,
                    'must be two tokens, e.g. ("<s>", "") for one before each text, '
                    "or () for none",
                )
        frames = (self.source_frame, self.target_frame)
        framing = max(sum(map(bool, frame)) for frame in frames)
        if framing and self.max_length < 2 + framing:
            yield "max_length", f"must be at least {2 + framing} with these frames"
        if self.source != "files":
            only_files = f"with data.source = {self.source!r}"
            if self.references != 1:
                yield "references", f"must be 1 {only_files}"
            if self.table:
                yield "table", f"must be '' {only_files}"
        if not (self.max_ratio == 0 or 1 <= self.max_ratio < math.inf):
            yield "max_ratio", "must be at least 1, or 0 for no limit"
        if len(self.meant_for) not in (0, 2):
            yield (
                "meant_for",
                "must be two numbers of pairs, (least, most), or () for no warning",
            )

    def _problems_of_directions(self) -> Iterator[tuple[str, str]]:
        for direction in self.directions:
            try:
                languages_of(direction)
            except DataError as error:
                yield "directions", f"must hold pairs of languages: {error}"
        if len(set(self.directions)) < len(self.directions):
            yield "directions", "must name each direction once"

    def _problems_beside(self, key: str) -> Iterator[tuple[str, str]]:
        """Yield problems of keys that must have their default beside `key`."""
        needed: dict[str, Any] = {"source": "files", "table": ""}
        if key != "prefixes":
            needed["references"] = 1
        if key == "directions":
            needed |= {"vocabulary": "", "mixture": (), "prefixes": ()}
        for name, value in needed.items():
            if getattr(self, name) != value:
                yield name, f"must be {value!r} with data.{key}"

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


@dataclasses.dataclass(frozen=True)
class SeparateDirections(ParallelData):
    """Pairs in several directions, of which a batch has one target language."""

    apart: ClassVar[bool] = True

    directions: tuple[str, ...] = ("en-de", "en-fr")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if not self.directions:
            yield (
                "directions",
                'must name the directions of translation, e.g. ("en-de", "en-fr")',
            )
