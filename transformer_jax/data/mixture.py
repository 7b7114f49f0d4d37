"""Several data sets of text to text, mixed by weights (Raffel et al. 2020, Section
3.5.2).

Each data set is a folder of its own. The first words of an input, its prefix, name the
task, e.g. "summarize: …".

Differs: In the paper, a batch has examples of several data sets, and weights are shares
of examples. Here, a batch has examples of one data set, and weights are shares of
batches.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from etils import epath

from transformer_jax.data import files
from transformer_jax.data.batching import BatchPlan, Plan
from transformer_jax.data.files import DataError
from transformer_jax.data.languages import Joined
from transformer_jax.data.progress import counted
from transformer_jax.data.references import numbered_files
from transformer_jax.data.sources import Source, bounds, file_name, parallel_files
from transformer_jax.errors import UserError

log = logging.getLogger(__name__)

NAME = re.compile(r"[^\s\[\]:=/]+")
# A split, and the only data set that is wanted, e.g. "test:sick".
SPLIT_OF_DATA_SET = re.compile(rf"(.+):({NAME.pattern})")
# Batches of which each data set has the same number, whichever these batches are.
BLOCK = 1000


# Weights.


def weights_of(entries: Sequence[str]) -> dict[str, float]:
    """Return the weight of each data set, e.g. {"sick": 1.0} for "sick=1".

    Raises:
        DataError: an entry is not of this form, a weight is not a finite number above
            0, or too small beside the others, or a data set is named twice.
    """
    weights = dict[str, float]()
    for entry in entries:
        name, equals, number = entry.partition("=")
        if not equals or not NAME.fullmatch(name):
            raise DataError(
                f"{entry!r} is no data set with a weight: write NAME=WEIGHT with the "
                "name of a folder in data.directory, e.g. sick=1"
            )
        if name in weights:
            raise DataError(f"{name} is named twice: give each data set one weight")
        weights[name] = _number(number)
        if not 0 < weights[name] < math.inf:
            raise DataError(
                f"{entry!r} has the weight {number!r}: it must be a number above 0; "
                "leave out a data set that is not to be trained on"
            )
    for name, count in zip(weights, counts_of([*weights.values()]), strict=True):
        if not count:
            raise DataError(
                f"{name} has less than one of {BLOCK} batches: "
                "give it a larger weight, or leave it out"
            )
    return weights


def _number(text: str) -> float:
    """Return a number, or NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def counts_of(weights: Sequence[float], total: int = BLOCK) -> np.ndarray:
    """Divide `total` in proportion to weights, by largest remainder.

    Each result is its exact share, rounded up or down.
    """
    # the largest first, because the sum of large weights may be infinite
    relative = np.array(weights, np.float64) / max(weights, default=1)
    shares = total * relative / relative.sum()
    counts = np.floor(shares).astype(np.int64)
    missing = total - counts.sum()
    counts[np.argsort(counts - shares, kind="stable")[:missing]] += 1
    return counts


# Files.


def check_prefixes(
    lines: Sequence[str], prefixes: Sequence[str], place: str = "line "
) -> None:
    """Raise DataError if a line begins with none of `prefixes`. It may be blank.

    `place` is what precedes its number, from 1, in the message.
    """
    known = tuple(prefixes)
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith(known):
            raise DataError(
                f"{place}{number} is {line[:60]!r}: it must begin with the prefix of a "
                f"task, which is one of {', '.join(map(repr, known))} (data.prefixes)"
            )


def mixture_files(
    directory: epath.PathLike,
    split: str,
    columns: Sequence[str],
    names: Sequence[str],
    prefixes: Sequence[str] = (),
    references: int = 1,
) -> Source:
    """Read data sets one after another, see `parallel_files`.

    Args:
        directory: folder that has a folder for each data set.
        split: e.g. "val", or that of one data set, e.g. "val:sick". A part of a split,
            e.g. "train[:90%]", is a part of each data set.
        columns: names for source and target, which are also those of the files.
        names: the folders. If there are none, the files are in `directory` itself.
        prefixes: each line of the source begins with one of them. (): with anything.
        references: number of targets of each line of the source. If it is above 1, see
            `numbered_files`.

    Raises:
        DataError: a folder or file is missing or unreadable, or has no lines, the files
            of a data set differ in their number of lines, a line begins with another
            prefix, or `split` names another data set.
    """
    if names and (match := SPLIT_OF_DATA_SET.fullmatch(split)):
        if match[2] not in names:
            raise DataError(
                f"{split!r} names the data set {match[2]}, which data.mixture does "
                f"not: choose from {', '.join(names)}"
            )
        split = match[1]
        names = (match[2],)
    whole = epath.Path(directory).expanduser()
    if not names:
        return _data_set(whole, split, columns, prefixes, references)
    folders = [whole / name for name in names]
    for name, folder in zip(names, folders, strict=True):
        if not folder.is_dir():
            raise DataError(
                f"data.mixture names {name}, but there is no folder {folder}: "
                "correct the name, or set data.directory to the folder above it"
            )
    parts = [
        _data_set(folder, split, columns, prefixes, references) for folder in folders
    ]
    joined = {name: Joined([part.column(name) for part in parts]) for name in columns}
    return Source(joined, ", ".join(part.where for part in parts))


def _data_set(
    folder: epath.Path,
    split: str,
    columns: Sequence[str],
    prefixes: Sequence[str],
    references: int,
) -> Source:
    """Read the pairs of one data set."""
    file = file_name(split)
    if references > 1:
        pairs = numbered_files(folder, file, columns, references)
    else:
        pairs = parallel_files(folder, file, columns)
    source = columns[0]
    if prefixes:
        path = files.find(folder, f"{file}.{source}")
        check_prefixes(pairs.column(source), prefixes, f"{path}:")
    part = bounds(split, len(pairs), "lines", pairs.where)
    parts = {name: pairs.column(name).part(*part) for name in columns}
    return Source(parts, pairs.where)


# The plan.


class Mixture(Plan):
    """The batches of several plans, in proportion to weights.

    Of each block of `BLOCK` batches, every plan has the same number, its share by
    largest remainder. Their order within a block is random but even: if a plan has n
    batches of a block, the j-th one is at a random time between j / n and (j + 1) / n.
    So after any number of batches, each of D ≥ 2 plans has had its share of them to
    within D batches. The batches of a plan follow each other as in the plan alone, from
    one of its epochs to the next.

    A block is what `len` counts as an epoch.

    Args:
        plans: one for each data set.
        weights: (D,) shares of the batches, up to a factor.
        seed: seed for the order.
    """

    def __init__(self, plans: Sequence[Plan], weights: Sequence[float], seed: int):
        self._plans = plans
        self._seed = seed
        self.counts = counts_of(weights)
        shapes = [shape for plan in plans for shape in plan.shapes]
        self.shapes = list(dict.fromkeys(shapes))
        self._latest: tuple[int, np.ndarray, np.ndarray] | None = None

    @classmethod
    def of(
        cls,
        whole: BatchPlan,
        lengths: np.ndarray,
        sizes: Sequence[int],
        weights: Mapping[str, float],
        seed: int,
    ) -> Mixture:
        """Return a mixture of the examples of a plan, with the shapes of this plan.

        Args:
            whole: a plan of the examples of all data sets, one after another.
            lengths: (n, k) those of `whole`.
            sizes: (D,) the number of examples of each data set.
            weights: the weight of each data set, in the same order.
            seed: seed for the order.

        Raises:
            UserError: `whole` keeps no example of a data set.
        """
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        plans = []
        for number, name in enumerate(weights):
            is_chosen = numbers == number
            if not is_chosen[whole.kept].any():
                raise UserError(
                    f"none of the {counted(sizes[number], 'example')} of {name} is "
                    "left to train on: check its files, raise the limits, or take it "
                    "out of data.mixture"
                )
            plans.append(whole.part(lengths, is_chosen))
        mixture = cls(plans, list(weights.values()), seed)
        for name, plan, count in zip(weights, plans, mixture.counts, strict=True):
            log.info(
                "  %s: %s in %s; it has %.1f %% of the steps, so %.0f steps are one of "
                "its epochs",
                name,
                counted(len(plan.kept), "example"),
                counted(len(plan), "batch", "batches"),
                100 * count / BLOCK,
                len(plan) * BLOCK / count,
            )
        return mixture

    def __len__(self) -> int:
        return BLOCK

    def _contents(
        self, epoch: int, position: int
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        data_sets, ranks = self._order(epoch)
        data_set = data_sets[position]
        number = epoch * self.counts[data_set] + ranks[position]
        _, indices, shape = self._plans[data_set].batch(int(number))
        return indices, shape

    def _order(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the data set of each batch of a block, and how many batches of it
        precede this one there.

        The latest block is cached.
        """
        latest = self._latest
        if latest is None or latest[0] != block:
            draw = np.random.default_rng((self._seed, block))
            data_sets = np.repeat(np.arange(len(self.counts)), self.counts)
            ranks = np.concatenate([np.arange(count) for count in self.counts])
            times = (ranks + draw.random(BLOCK)) / self.counts[data_sets]
            order = np.argsort(times, kind="stable")
            latest = (block, data_sets[order], ranks[order])
            self._latest = latest
        _, data_sets, ranks = latest
        return data_sets, ranks


# The config.


def problems_of(
    mixture: Sequence[str], prefixes: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield (field, rule and remedy) for invalid data sets and prefixes."""
    try:
        weights_of(mixture)
    except DataError as error:
        yield "mixture", f"must hold data sets with their weights: {error}"
    if not all(prefix.strip() for prefix in prefixes):
        yield "prefixes", "must hold the first words of inputs, e.g. 'summarize: '"
