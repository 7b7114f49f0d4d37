"""Read columns from local files or tfds.

Every reader returns a `Source`: random-access records of named columns, each of which
holds lines of text or arrays.

The text stays on disk, even if it has millions of lines, and is decoded on access.
Plain files are memory-mapped. The text of tfds records is first copied to temporary
files, since decoding a record takes 0.1 ms. Files on `gs://`, `.gz` files and `.tsv`
files cannot be mapped; their bytes are held in memory.

The files of a split are called `{split}.{column}`, `{split}.tsv` or `{split}.txt`,
optionally followed by `.gz`, or `{split}.{column}.npy`. A split may be a part of one,
as in tfds: "train[:90%]", "train[5000:]", "train[-100:]". Parts are counted in lines,
or in characters for `.txt` files. Percentages are rounded down, so "train[90%:]" starts
where "train[:90%]" ends.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import mmap
import operator
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from etils import epath

from transformer_jax import shipped
from transformer_jax.data import features, files
from transformer_jax.data.arrays import array_file, is_array_file
from transformer_jax.data.columns import Column
from transformer_jax.data.files import DataError
from transformer_jax.data.progress import progress
from transformer_jax.files import is_for_user

BLOCK = 2**24  # bytes scanned at a time


# A split or a part of one, e.g. "train[:90%]".
SPLIT = re.compile(r"([^\[\]]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


class Lines(Column):
    """Lines of UTF-8 text, decoded on access. A slice is a list.

    Args:
        content: the bytes, or a mapped file. Lines end in "\\n" or "\\r\\n"; the last
            one may have no line ending.
        offsets: (lines + 1,); line i, with its line ending, is content[offsets[i] :
            offsets[i + 1]].
    """

    def __init__(self, content: bytes | mmap.mmap, offsets: np.ndarray):
        self._content = content
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            start, stop, step = i.indices(len(self))
            return (
                self._read(start, max(start, stop))
                if step == 1
                else [self[j] for j in range(start, stop, step)]
            )
        i = operator.index(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"There is no line {i} in {len(self)} lines.")
        return self._line(i % len(self))

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 10_000):
            yield from self._read(start, min(start + 10_000, len(self)))

    def blocks(self) -> Iterator[bytes]:
        """Yield the text as bytes, many lines at a time.

        Each line ends in "\\n", even if it does not in the file.
        """
        for start in range(0, len(self), 10_000):
            stop = min(start + 10_000, len(self))
            block = self._content[self._offsets[start] : self._offsets[stop]]
            if b"\r" in block or not block.endswith(b"\n"):
                block = "\n".join([*self._read(start, stop), ""]).encode()
            _release(self._content)
            yield block

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def _line(self, i: int) -> str:
        line = self._content[self._offsets[i] : self._offsets[i + 1]].decode()
        return line.removesuffix("\n").removesuffix("\r")

    def _read(self, start: int, stop: int) -> list[str]:
        text = self._content[self._offsets[start] : self._offsets[stop]].decode()
        _release(self._content)
        lines = text.removesuffix("\n").split("\n") if text else []
        if "\r" in text or len(lines) != stop - start:  # lines of tfds may contain "\n"
            return [self._line(i) for i in range(start, stop)]
        return lines

    def part(self, start: int, stop: int) -> Self:
        return type(self)(self._content, self._offsets[start : stop + 1])


class Pieces(Lines):
    """Lines that include their line endings. Joined, they are the original text."""

    def blocks(self) -> Iterator[bytes]:
        for start in range(0, len(self), 10_000):
            yield self._content[
                self._offsets[start] : self._offsets[min(start + 10_000, len(self))]
            ]
            _release(self._content)

    def _line(self, i: int) -> str:
        return self._content[self._offsets[i] : self._offsets[i + 1]].decode()

    def _read(self, start: int, stop: int) -> list[str]:
        return [self._line(i) for i in range(start, stop)]

    def characters(self, split: str, path: str) -> Pieces:
        """Return the part of the text that `split` names, counted in characters."""
        first = int(self._offsets[0])
        last = int(self._offsets[-1])
        count = sum(
            int(_starts_character(self._content[i : i + BLOCK]).sum())
            for i in range(first, last, BLOCK)
        )
        first_character, last_character = bounds(split, count, "characters", path)
        start = self._offset_of(first_character)
        stop = self._offset_of(last_character)
        between = (self._offsets > start) & (self._offsets < stop)
        offsets = np.concatenate([[start], self._offsets[between], [stop]])
        return Pieces(self._content, offsets)

    def _offset_of(self, character: int) -> int:
        """Return the byte offset of character number `character`."""
        for i in range(int(self._offsets[0]), int(self._offsets[-1]), BLOCK):
            starts = np.flatnonzero(_starts_character(self._content[i : i + BLOCK]))
            if character < len(starts):
                return i + int(starts[character])
            character -= len(starts)
        return int(self._offsets[-1])


def _starts_character(block: bytes) -> np.ndarray:
    return np.frombuffer(block, np.uint8) & 0b11000000 != 0b10000000


class Source(Sequence[dict[str, Any]]):
    """Random-access records: source[i] is {column: entry i}. All columns have the same
    length.

    `where` names the files of the records in messages. `first_line` is the line of the
    first record, if each record is a line of a file, or else 0. `lines` are instead the
    lines of all records, if they are not adjacent.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        where: str,
        first_line: int = 0,
        lines: Sequence[int] = (),
    ):
        self._columns = columns
        self.where = where
        self.first_line = first_line
        self._lines = lines

    def place(self, i: int) -> str:
        """Return the file and the line of record i, or its number, for messages."""
        if self._lines:
            return f"{self.where}:{self._lines[i]}"
        if self.first_line:
            return f"{self.where}:{self.first_line + i}"
        return f"{self.where}, example {i + 1}"

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, i):  # no slices: slice a column instead
        return {name: column[i] for name, column in self._columns.items()}

    def column(self, name: str) -> Column:
        """Return a column by its name."""
        return self._columns[name]


def parallel_files(
    directory: epath.PathLike, split: str, columns: Sequence[str]
) -> Source:
    """Read `{split}.{column}.npy` if there is such a file (see `arrays`), otherwise
    `{split}.{column}[.gz]`, in UTF-8.

    Entry i of one file belongs to entry i of the others.

    Lines end at "\\n" or "\\r\\n" and nowhere else (e.g. not at U+2028). A byte order
    mark is dropped.

    Raises:
        DataError: a directory or file is missing or unreadable, a line is not UTF-8,
            the files differ in their number of lines, or they have none.
    """
    names = [f"{file_name(split)}.{column}" for column in columns]
    read = [_column_file(directory, name) for name in names]
    counts = [len(column) for _, column in read]
    if min(counts) != max(counts):
        _refuse_unequal(read)
    where = " and ".join(str(path) for path, _ in read)
    if not counts[0]:
        raise DataError(f"{where} have no lines: a corpus needs at least one.")
    part = bounds(split, counts[0], "lines", where)
    parts = [column.part(*part) for _, column in read]
    return Source(dict(zip(columns, parts, strict=True)), where)


def _column_file(directory: epath.PathLike, name: str) -> tuple[epath.Path, Column]:
    """Return the path and the content of a file of arrays or of lines."""
    if is_array_file(directory, name):
        return array_file(directory, name)
    path = files.find(directory, name)
    lines = parse_lines(files.read(path), str(path))
    check_endings(lines, path)
    return path, lines


def _refuse_unequal(read: Sequence[tuple[epath.Path, Column]]) -> None:
    counts = [len(column) for _, column in read]
    shortest = min(counts)
    path, longest = read[counts.index(max(counts))]
    raise DataError(
        "Files of parallel text must have the same number of lines, but "
        + ", ".join(f"{path} has {len(column)}" for path, column in read)
        + f". The first line without a counterpart is {path}:{shortest + 1}:"
        f" {longest[shortest][:80]!r}. Shorten the longer file, or find an"
        " earlier line where they diverge."
    )


def text_file(
    directory: epath.PathLike, split: str, columns: Sequence[str] = ("text",)
) -> Source:
    """Read `{split}.txt[.gz]`, in UTF-8, as one column.

    Its lines keep their endings: joined, they are the text.

    Raises:
        DataError: the file is missing, unreadable, empty or not UTF-8, or `columns` are
            not exactly one.
    """
    path = files.find(directory, f"{file_name(split)}.txt")
    if len(columns) != 1:
        raise DataError(
            f"{path} has a single column of text, "
            f"but the columns are {', '.join(columns)}: choose one."
        )
    lines = parse_lines(files.read(path), str(path))
    return Source(
        {
            columns[0]: (
                Pieces(lines._content, lines._offsets).characters(split, str(path))
            )
        },
        str(path),
    )


def check_endings(lines: Lines, path: epath.Path) -> None:
    """Raise DataError for text whose lines end with "\\r" alone."""
    if len(lines) == 1 and lines[0].count("\r") > 1:
        raise DataError(
            f"{path} is one line with carriage returns in it. "
            "End lines with \\n (mac2unix, dos2unix)."
        )


def held(lines: Iterable[str]) -> Lines:
    """Return lines, which may contain line endings, in memory."""
    encoded = [line.encode() + b"\n" for line in lines]
    return Lines(b"".join(encoded), np.cumsum([0, *map(len, encoded)]))


def bounds(split: str, count: int, noun: str, path: str) -> tuple[int, int]:
    """Return the start and stop of the part of `count` lines that `split` names.

    `noun` is what the lines are called in messages, e.g. "rows".

    Raises DataError if the part is empty or exceeds the lines of `path`.
    """
    match = _parsed(split)
    start = 0 if match[2] is None else _bound(match[2], count)
    stop = count if match[3] is None else _bound(match[3], count)
    if not count:
        raise DataError(f"{path} has no {noun}: it needs at least one.")
    if not 0 <= start < stop <= count:
        raise DataError(
            f"{split} is the part {start} to {stop} of the {count} {noun} of {path}: "
            "it must not be empty, and must lie within the file."
        )
    return start, stop


def _bound(text: str, count: int) -> int:
    number = int(text.removesuffix("%"))
    if text.endswith("%"):
        return (100 + number if text.startswith("-") else number) * count // 100
    return count + number if text.startswith("-") else number


def file_name(split: str) -> str:
    """Return the name of the split of which `split` is a part, e.g. "train" for
    "train[:90%]".
    """
    return _parsed(split)[1]


def _parsed(split: str) -> re.Match[str]:
    if not (match := SPLIT.fullmatch(split)):
        raise DataError(
            f"{split!r} is not a split: "
            "it must be a name or a part of one, e.g. train or train[:90%]."
        )
    return match


def tfds_source(
    name: str, directory: epath.PathLike, split: str, columns: Sequence[str]
) -> Source:
    """Read features of a tfds data set that is prepared as array_record, as text (see
    `features`).

    `split` may be a part of a split, in the syntax of tfds. The data set "dates", which
    is part of this package, is prepared in `directory` if it is not there yet. Nothing
    is downloaded.

    Raises:
        DataError: the name, the split or a feature is unknown, the data is not
            prepared, or a text is not UTF-8.
    """
    with _quiet():
        builder = _builder(name, epath.Path(directory).expanduser())
        readers = features.readers(builder.info.features)
        if unknown := [column for column in columns if column not in readers]:
            raise DataError(
                f"tfds {name} has no text in {', '.join(unknown)}: "
                f"choose from {', '.join(readers)}."
            )
        try:
            records = builder.as_data_source(split)
        except ValueError as error:
            sizes = " or ".join(
                f"{name} ({part.num_examples})"
                for name, part in builder.info.splits.items()
            )
            raise DataError(
                f"Cannot read split {split!r} of tfds {name} in {directory}: "
                f"{error} It must be {sizes}, or a non-empty part of one."
            ) from error
        chosen = {column: readers[column] for column in columns}
        return Source(
            _written_out(records, chosen, f"{name} {split}"),
            f"tfds {name} {split} in {directory}",
        )


def _release(content: bytes | mmap.mmap) -> None:
    """Release the memory of the parts of a mapped file that were read."""
    if isinstance(content, mmap.mmap) and hasattr(content, "madvise"):
        content.madvise(mmap.MADV_DONTNEED)


def decode_lines(content: bytes | mmap.mmap, path: str) -> list[str]:
    """Return the lines of the content of `path`.

    Raises DataError, with the line number, if it is not UTF-8.
    """
    return list(parse_lines(content, path))


def parse_lines(content: bytes | mmap.mmap, path: str) -> Lines:
    """Find the lines of the content of `path`.

    Raises DataError, with the line number, if it is not UTF-8.
    """
    if content[:2] == files.GZIP_MARK:
        raise DataError(
            f"{path} contains gzip data instead of text. "
            "Decompress it, e.g. with gunzip."
        )
    if encoding := _other_encoding(content[:64]):
        raise DataError(
            f"{path} is not UTF-8 but looks like {encoding}. "
            f"Convert the file (iconv -f {encoding} -t UTF-8)."
        )
    first = 3 if content[:3] == b"\xef\xbb\xbf" else 0
    offsets = [np.array([first])]
    start = first
    with progress(f"reading {path}", len(content), "bytes") as advance:
        while start < len(content):
            stop = min(start + BLOCK, len(content))
            for _ in range(3):  # do not split a character between two blocks
                stop -= stop < len(content) and content[stop] & 0b11000000 == 0b10000000
            block = content[start:stop]
            try:
                block.decode()
            except UnicodeDecodeError as error:
                at = start + error.start
                line = sum(map(len, offsets)) + block.count(b"\n", 0, error.start)
                begin = max(content.rfind(b"\n", 0, at) + 1, first)
                raise DataError(
                    f"{path}:{line} is not UTF-8: "
                    f"byte 0x{content[at]:02x} at offset {at - begin} of the line. "
                    "Convert the file (iconv -t UTF-8), or correct the line."
                ) from error
            _release(content)
            offsets.append(
                np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
                + (start + 1)
            )
            advance(stop - start)
            start = stop
    if max(offsets[-1], default=first) < len(content):
        offsets.append(np.array([len(content)]))
    return Lines(content, np.concatenate(offsets))


def _other_encoding(start: bytes) -> str | None:
    """Return the encoding that the first bytes of a file show by a mark or by a zero in
    every second byte, or None.

    Other zero bytes are characters of UTF-8.
    """
    marks = {
        b"\xff\xfe\0\0": "UTF-32",
        b"\0\0\xfe\xff": "UTF-32",
        b"\xff\xfe": "UTF-16",
        b"\xfe\xff": "UTF-16",
    }
    for mark, name in marks.items():
        if start.startswith(mark):
            return name
    even = start[::2]
    odd = start[1::2]
    if len(start) < 4 or len(start) % 2 or any(even) == any(odd):
        return None
    if all(even) or all(odd):
        return "UTF-16LE" if any(even) else "UTF-16BE"
    return None


# Modules of builders that tfds finds only after an import: some of its own, and those
# of this package.
_MODULES = {
    f"wmt{year}_translate": f"tensorflow_datasets.translate.wmt{year}"
    for year in range(13, 20)
} | {
    "glue": "tensorflow_datasets.text.glue",
    "conll2003": "tensorflow_datasets.text.conll2003.conll2003",
    "dates": "transformer_jax.data.corpora.dates",
    "multi30k": "transformer_jax.data.corpora.multi30k",
}


def tfds_builder(name: str, directory: epath.PathLike) -> Any:
    """Return the tfds builder of `name` in `directory`, as array_record.

    The data need not be prepared.

    Raises:
        DataError: the data set does not exist, or the one in `directory` has another
            format or is damaged.
    """
    import tensorflow_datasets as tfds
    from google.protobuf import json_format

    _check_builder(name, epath.Path(directory).expanduser())
    try:
        if module := _MODULES.get(name.partition("/")[0]):
            importlib.import_module(module)
        return tfds.builder(
            name,
            data_dir=epath.Path(directory).expanduser(),
            file_format="array_record",
        )
    # ParseError: dataset_info.json is truncated
    except (ValueError, json_format.ParseError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"tfds cannot open {name!r} in {directory} as array_record: "
            f"{reason} Set data.name to a data set of tfds or of this package (dates, "
            "multi30k/en-de), "
            "and data.directory to the folder that has it in this format."
        ) from error


# data set, configuration, version
_NAME = re.compile(r"([a-z0-9_]+)(/[\w+-][\w+.-]*)?(:[\d*.]+)?")


def _check_builder(name: str, directory: epath.Path) -> None:
    """Raise DataError if tfds would run code that the name of a data set, or its
    files, choose.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise DataError(
            f"tfds cannot open {name!r} in {directory}. "
            "Set data.name to NAME or NAME/CONFIG, e.g. glue/sst2. OWNER:NAME "
            "would run the owner's code: write such a data set to files instead."
        )
    try:
        feature = features.foreign_class(directory / match[1])
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and not is_for_user(error):
            raise
        raise DataError(
            f"features.json of tfds {name} in {directory} cannot be read: "
            f"{error}. Copy it again."
        ) from error
    if feature is not None:
        raise DataError(
            f"{feature} is not a feature of tfds, "
            f"and files may not choose code to run. If you trust the data set {name} "
            f"in {directory}, import {feature.rpartition('.')[0]} in your recipe."
        )


def _builder(name: str, directory: epath.Path) -> Any:
    """Return the builder of a data set that is prepared in `directory`.

    Prepare it if it is `dates`.
    """
    builder = tfds_builder(name, directory)
    if name == "dates" and not builder.is_prepared():
        try:
            builder.download_and_prepare()
        except OSError as error:
            another_was_faster = tfds_builder(name, directory).is_prepared()
            if not another_was_faster and not is_for_user(error):
                raise
            if not another_was_faster:
                raise DataError(
                    f"Cannot prepare dates in {directory}: "
                    f"{error} Set data.directory to another folder."
                ) from error
        builder = tfds_builder(name, directory)
    # Only `scripts/prepare.py` downloads data; training does not.
    if not builder.is_prepared():
        raise DataError(
            f"{name} is not prepared in {directory} (looked for {builder.data_path}). "
            "Set data.directory, or prepare it on a machine "
            f"with network access and copy it here:\n  {shipped.script('prepare')} "
            f"{shlex.quote(f'--name={name}')} {shlex.quote(f'--directory={directory}')}"
        )
    return builder


def _written_out(
    records: Any, readers: Mapping[str, features.Reader], name: str
) -> dict[str, Lines]:
    """Copy the text of all records to temporary files in TMPDIR, which are deleted
    when the process ends.
    """
    try:
        return _copied(records, readers, name)
    except OSError as error:
        if not is_for_user(error):
            raise
        raise DataError(
            f"Cannot copy the text of tfds {name} to {tempfile.gettempdir()}: "
            f"{error} Free space there, or set TMPDIR."
        ) from error


def _copied(
    records: Any, readers: Mapping[str, features.Reader], name: str
) -> dict[str, Lines]:
    lengths = {column: [np.zeros(1, np.int64)] for column in readers}
    with contextlib.ExitStack() as stack:
        copies = {
            column: stack.enter_context(tempfile.TemporaryFile()) for column in readers
        }
        advance = stack.enter_context(
            progress(f"reading tfds {name}", len(records), "records")
        )
        for start in range(0, len(records), 10_000):
            try:
                rows = _rows(records, range(start, min(start + 10_000, len(records))))
            except (OSError, RuntimeError) as error:  # array_record raises RuntimeError
                if isinstance(error, OSError) and not is_for_user(error):
                    raise
                raise DataError(
                    f"tfds {name} cannot be read: "
                    f"{error} Copy its files again, or prepare it again."
                ) from error
            for column, file in copies.items():
                texts = [
                    _line(readers[column], row, f"{name} {i} {column}")
                    for i, row in enumerate(rows, start)
                ]
                file.writelines(texts)
                lengths[column].append(
                    np.fromiter(map(len, texts), np.int64, len(texts))
                )
            advance(10_000)
        written = {}
        for column, file in copies.items():
            file.flush()
            written[column] = Lines(
                files.mapped(file), np.cumsum(np.concatenate(lengths[column]))
            )
    return written


def _rows(records: Any, indices: range) -> Iterable[features.Values]:
    """Decode records as protocol buffers, which is ten times as fast as the decoding
    of tfds.
    """
    from tensorflow_datasets.core.data_sources.array_record import ArrayRecordDataSource
    from tensorflow_datasets.proto import tf_example_pb2

    if not isinstance(records, ArrayRecordDataSource):  # mock data of tfds
        return [
            {key: [value] for key, value in row.items()}
            for row in records.__getitems__(indices)
        ]
    examples = map(
        tf_example_pb2.Example.FromString, records.data_source.__getitems__(indices)
    )
    return [
        {
            key: (
                value.bytes_list.value
                or value.int64_list.value
                or value.float_list.value
            )
            for key, value in example.features.feature.items()
        }
        for example in examples
    ]


def _line(reader: features.Reader, row: features.Values, where: str) -> bytes:
    """Return a feature of an example as bytes with a line ending."""
    try:
        return reader(row).encode() + b"\n"
    except UnicodeDecodeError as error:
        raise DataError(
            f"tfds example {where} is not UTF-8 ({error}): prepare the data again."
        ) from error
    except ValueError as error:
        raise DataError(
            f"tfds example {where} {error}: "
            "prepare the data again from corrected files."
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress bars of tfds, and its warnings about folders that are
    not prepared yet.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
