"""Where parallel text comes from: local files, or tfds. Each gives the same thing, a `Source`."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import logging
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath


class DataError(ValueError):
    """Data that is missing or broken; the message names the file (and line), the rule and the remedy."""


class Source(Sequence[dict[str, str]]):
    """Random-access examples of text: source[i] is {language: line i}. All columns have the same length."""

    def __init__(self, columns: Mapping[str, list[str]]):
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, i):  # slices are not needed, since `column` gives a list
        return {language: column[i] for language, column in self._columns.items()}

    def column(self, language: str) -> list[str]:
        return self._columns[language]


def parallel_files(directory: epath.PathLike, split: str, languages: Sequence[str]) -> Source:
    """Reads `{split}.{language}`, else `{split}.{language}.gz`: in UTF-8, lines i of all files belong together.

    Lines end at "\\n" or "\\r\\n" and nowhere else (not at U+2028 or its like); a byte order mark is dropped.

    Raises:
        DataError: a directory or file is missing or unreadable, a line is not UTF-8, the numbers of lines
            differ, or there are none.
    """
    paths = [_find(epath.Path(directory).expanduser(), split, language) for language in languages]
    columns = [_lines(path) for path in paths]
    counts = [len(column) for column in columns]
    if min(counts) != max(counts):
        first, longest = min(counts), counts.index(max(counts))
        raise DataError(
            "Files of parallel text must have the same number of lines, but "
            + ", ".join(f"{path} has {count}" for path, count in zip(paths, counts, strict=True))
            + f". The first line without a partner is {paths[longest]}:{first + 1}: "
            f"{columns[longest][first][:80]!r}. Cut the longer file, or look above for where they part."
        )
    if not counts[0]:
        raise DataError(f"{' and '.join(map(str, paths))} hold no line: a corpus needs at least one.")
    return Source(dict(zip(languages, columns, strict=True)))


def tfds_source(name: str, directory: epath.PathLike, split: str, languages: Sequence[str]) -> Source:
    """Reads text features of a tfds dataset prepared as array_record; `split` may be "train[:90%]".

    "dates" is ours and is prepared in `directory` when it is not yet. Nothing is downloaded.

    Raises:
        DataError: unknown name, split or feature, data not prepared there, or bytes that are not UTF-8.
    """
    import tensorflow_datasets as tfds

    with _quiet():
        builder = _builder(name, epath.Path(directory).expanduser())
        text = [key for key, feature in builder.info.features.items() if isinstance(feature, tfds.features.Text)]
        if unknown := [language for language in languages if language not in text]:
            raise DataError(f"tfds {name} has no text {', '.join(unknown)}: choose from {', '.join(text)}.")
        try:
            records = builder.as_data_source(split)
        except ValueError as error:
            raise DataError(f"Cannot read split {split!r} of tfds {name} in {directory}: {error}") from error
        columns: dict[str, list[str]] = {language: [] for language in languages}
        for start in range(0, len(records), 10_000):  # three times as fast as singly
            for i, record in enumerate(records.__getitems__(range(start, min(start + 10_000, len(records))))):
                for language in languages:
                    columns[language].append(_text(record[language], f"{name} {split} {start + i} {language}"))
    return Source(columns)


def _find(directory: epath.Path, split: str, language: str) -> epath.Path:
    if not directory.is_dir():
        raise DataError(f"There is no directory {directory}: set data.directory to where the files are.")
    for path in (directory / f"{split}.{language}", directory / f"{split}.{language}.gz"):
        if path.is_file():
            return path
    held = defaultdict(list)
    for path in sorted(directory.iterdir()):
        stem, _, suffix = path.name.removesuffix(".gz").rpartition(".")
        if stem and path.is_file():
            held[stem].append(suffix)
    listing = "; ".join(f"{stem} ({', '.join(suffixes)})" for stem, suffixes in held.items()) or "no such files"
    raise DataError(
        f"There is neither {split}.{language} nor {split}.{language}.gz in {directory}. It holds {listing}. "
        "Set data.directory, the split and the languages accordingly."
    )


def _lines(path: epath.Path) -> list[str]:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:  # EOFError: truncated
        raise DataError(f"Cannot read {path}: {error} Make it readable, or copy it again.") from error
    return decode_lines(content, str(path))


def decode_lines(content: bytes, path: str) -> list[str]:
    """The lines of UTF-8 text that came from `path`. Raises DataError, with file and line, if it is not UTF-8."""
    content = content.removeprefix(b"\xef\xbb\xbf")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line, start = content.count(b"\n", 0, error.start) + 1, content.rfind(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start - start} of "
            "the line. Convert the file (iconv -t UTF-8), or mend the line."
        ) from error
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


# Builders that tfds finds only after their module has been imported: some of its own, and ours.
_MODULES = {f"wmt{year}_translate": f"tensorflow_datasets.translate.wmt{year}" for year in range(13, 20)} | {
    "dates": "transformer_jax.data.dates",
    "multi30k": "transformer_jax.data.multi30k",
}


def tfds_builder(name: str, directory: epath.PathLike) -> Any:
    """The tfds builder of `name` in `directory`, as array_record, prepared or not.

    Raises:
        DataError: no such data set, or `directory` holds it in another format.
    """
    import tensorflow_datasets as tfds

    try:
        if module := _MODULES.get(name.partition("/")[0]):
            importlib.import_module(module)
        return tfds.builder(name, data_dir=epath.Path(directory).expanduser(), file_format="array_record")
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"tfds cannot open {name!r} in {directory} as array_record: {reason} "
            "Set data.name to a dataset of tfds, to dates or multi30k/en-de, and data.directory to where it is in "
            "this format."
        ) from error


def _builder(name: str, directory: epath.Path) -> Any:
    """The builder of data that are prepared in `directory`."""
    builder = tfds_builder(name, directory)
    if name == "dates" and not builder.is_prepared():
        try:
            with contextlib.suppress(FileExistsError):  # another process was faster
                builder.download_and_prepare()
        except OSError as error:
            raise DataError(f"Cannot prepare dates in {directory}: {error} Set data.directory elsewhere.") from error
        builder = tfds_builder(name, directory)
    # Training downloads nothing: without a network that fails only after minutes.
    if not builder.is_prepared():
        raise DataError(
            f"{name} is not prepared in {directory} (looked for {builder.data_path}). Set data.directory, or prepare "
            "it, if need be on a machine with a network, and copy it there:\n"
            f"  python scripts/prepare.py --name={name} --directory={directory}"
        )
    return builder


def _text(value: bytes | str, where: str) -> str:
    """tfds gives bytes, its mock data str."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise DataError(f"tfds example {where} is not UTF-8 ({error}): prepare the data anew.") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back tfds' progress bars, and its warnings about folders that are not prepared yet."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
