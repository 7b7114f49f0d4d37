"""Join parallel lines to longer ones, to study the effect of length on a model."""

import os
import random
from collections.abc import Iterator, Sequence

from etils import epath

from transformer_jax import files
from transformer_jax.data.sources import DataError, parallel_files


def concatenations(count: int, longest: int, seed: int) -> Iterator[list[int]]:
    """Yield groups of 1, 2, … `longest` of `count` lines.

    The groups of each size take every line once, in their own order, except for the few lines that do not fill a group.
    """
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
    """Join the lines of each split of `directory` in groups, by a space, and write them to `output`.

    Returns:
        The number of lines written for each split.

    Raises:
        DataError: a split is missing or has fewer than `longest` lines, or `output` is `directory`. Nothing is written.
    """
    if not splits or not languages:
        raise DataError(f"splits {list(splits)} and languages {list(languages)}: name one or more of each")
    source, target = (epath.Path(path).expanduser() for path in (directory, output))
    if os.path.realpath(source) == os.path.realpath(target):
        raise DataError(f"{output} holds the text to be joined: choose another folder for the result")
    texts = {split: parallel_files(source, split, languages) for split in splits}
    for split, text in texts.items():
        if not 1 <= longest <= len(text):
            rule = f"choose from 1 to {len(text)}"
            raise DataError(f"{split} in {directory} has {len(text)} lines: {longest} can't be joined; {rule}")
    target.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split, text in texts.items():
        groups = list(concatenations(len(text), longest, seed))
        counts[split] = len(groups)
        for language in languages:
            column = text.column(language)
            path = target / f"{split}.{language}"
            with files.replacing(path, follow=False) as file:  # `path` may be a link to the text
                file.writelines((" ".join(column[i] for i in group) + "\n").encode() for group in groups)
    return counts
