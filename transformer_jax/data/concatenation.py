"""Longer sentences from short ones: parallel lines joined, to see what length does to a model."""

import random
from collections.abc import Iterator, Sequence

from etils import epath

from transformer_jax.data.sources import DataError, parallel_files


def concatenations(count: int, longest: int, seed: int) -> Iterator[list[int]]:
    """Groups of 1, 2, … `longest` of `count` lines. Of each size all lines are taken once, in an order of its own, but
    for the few that fill no group."""
    for size in range(1, longest + 1):
        order = random.Random(f"{seed} {size}").sample(range(count), count)
        yield from (order[i : i + size] for i in range(0, count - size + 1, size))


def concatenate(
    directory: epath.PathLike,
    output: epath.PathLike,
    splits: Sequence[str],
    languages: Sequence[str],
    longest: int,
    seed: int = 0,
) -> dict[str, int]:
    """Writes each split of `directory`, lines joined in groups by a space, to `output`; returns its lines.

    Raises DataError where a split is missing or has fewer than `longest` lines, and where `output` is `directory`.
    """
    if epath.Path(output).expanduser() == epath.Path(directory).expanduser():
        raise DataError(f"{output} holds the text to be joined: choose another folder for the result")
    counts = {}
    for split in splits:
        source = parallel_files(directory, split, languages)
        if len(source) < longest:
            raise DataError(f"{split} in {directory} has {len(source)} lines: too few to join {longest} of them")
        groups = list(concatenations(len(source), longest, seed))
        counts[split] = len(groups)
        epath.Path(output).expanduser().mkdir(parents=True, exist_ok=True)
        for language in languages:
            column = source.column(language)
            text = "".join(" ".join(column[i] for i in group) + "\n" for group in groups)
            (epath.Path(output).expanduser() / f"{split}.{language}").write_text(text)
    return counts
