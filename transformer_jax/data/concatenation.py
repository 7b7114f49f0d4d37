"""Join lines of parallel text into longer ones, to study how length affects a model."""

import contextlib
import os
import random
from collections.abc import Iterator, Sequence

from etils import epath

from transformer_jax import files
from transformer_jax.data.sources import DataError, parallel_files


def concatenations(count: int, longest: int, seed: int) -> Iterator[list[int]]:
    """Yield groups of 1, 2, … `longest` line numbers below `count`.

    For each size, the lines are shuffled and divided into groups. The last lines are
    left out if they do not fill a group.
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
    """Join groups of lines of each split in `directory` with spaces, and write the
    result to `output`.

    Characters within a line that may end one, e.g. U+2028, become spaces.

    Returns:
        The number of lines written for each split.

    Raises:
        DataError: a split is missing or has fewer than `longest` lines, or `output` is
            `directory` or is not writable. The files in `output` are then unchanged.
    """
    if not splits or not languages:
        raise DataError(
            f"splits {list(splits)} and languages {list(languages)}: "
            "name one or more of each"
        )
    if not str(directory) or not str(output):
        raise DataError(
            f"directory {directory!r} and output {output!r}: "
            "set both; use . for the current folder"
        )
    source, target = (epath.Path(path).expanduser() for path in (directory, output))
    if os.path.realpath(source) == os.path.realpath(target):
        raise DataError(
            f"{output} is the folder of the input text: "
            "choose another folder for the output"
        )
    texts = {split: parallel_files(source, split, languages) for split in splits}
    for split, text in texts.items():
        if not 1 <= longest <= len(text):
            rule = f"choose from 1 to {len(text)}"
            raise DataError(
                f"{split} in {directory} has {len(text)} lines: "
                f"cannot join groups of {longest}; {rule}"
            )
    paths = {
        (split, language): target / f"{split}.{language}"
        for split in texts
        for language in languages
    }
    if folders := [str(path) for path in paths.values() if path.is_dir()]:
        raise DataError(
            f"Cannot write {', '.join(folders)}: "
            "a folder is in the way. Choose another output."
        )
    counts = {}
    try:
        target.mkdir(parents=True, exist_ok=True)
        # All files are replaced together at the end. An old output file may be a link
        # to the input text: the link is replaced, not the text.
        with contextlib.ExitStack() as stack:
            for split, text in texts.items():
                groups = list(concatenations(len(text), longest, seed))
                counts[split] = len(groups)
                for language in languages:
                    column = text.column(language)
                    file = stack.enter_context(
                        files.replacing(paths[split, language], follow=False)
                    )
                    joined = (
                        files.one_line(" ".join(column[i] for i in group))
                        for group in groups
                    )
                    file.writelines(line.encode() + b"\n" for line in joined)
                    file.flush()
    except OSError as error:
        if not files.is_for_user(error):
            raise
        raise DataError(
            f"Cannot write to {output}: {error}. "
            "Free disk space or choose another output."
        ) from error
    return counts
