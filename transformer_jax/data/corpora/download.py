"""Prepare standard corpora for training: download their files or take them from a
folder, and write array_record.

The builders of tfds define what to download and how to read it. The downloads of tfds
itself need TensorFlow to unpack archives, and take minutes to fail without a network.
`Downloads` replaces them. Unlike the library pooch, it writes to gs:// too, and takes
files that were fetched by hand.
"""

import bz2
import contextlib
import functools
import gzip
import hashlib
import io
import logging
import lzma
import os
import shutil
import tarfile
import time
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import IO, Any

import requests
import tensorflow_datasets as tfds
from etils import epath

from transformer_jax.data.sources import DataError, tfds_builder

log = logging.getLogger(__name__)

PATIENCE = 10, 60  # seconds to wait for a connection, and for the next bytes
BLOCK = 2**20  # bytes
LOG_EVERY = 10  # seconds between progress messages of a download

BROKEN = (
    OSError,
    EOFError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


def prepare(
    name: str, directory: epath.PathLike, manual_dir: epath.PathLike | None = None
) -> epath.Path:
    """Prepare the tfds data set `name` in `directory`, and return its folder.

    `directory` is the `data.directory` for training. Files in `manual_dir` (default:
    `directory`/downloads/manual) are used if they have the same names as on their
    servers. The others are downloaded. The SHA-256 of every file is checked if tfds
    knows it. A data set that is already prepared is left unchanged.

    Raises:
        DataError: the data set or folder does not exist; a file cannot be downloaded or
            is damaged; or the data set already exists but is incomplete.
    """
    directory = epath.Path(directory).expanduser()
    builder = tfds_builder(name, directory)
    if manual_dir is not None and not epath.Path(manual_dir).expanduser().is_dir():
        raise DataError(
            f"There is no directory {manual_dir}: "
            "set --manual_dir to where the downloaded files are."
        )
    if not builder.is_prepared():
        downloads = Downloads(directory / "downloads", manual_dir, known_files(builder))
        try:
            # tfds writes messages to stdout
            with contextlib.redirect_stdout(io.StringIO()):
                _with_downloads(builder, downloads).download_and_prepare(
                    download_config=tfds.download.DownloadConfig(
                        manual_dir=manual_dir, try_download_gcs=False
                    )
                )
        except (DataError, OSError, AssertionError, UnicodeError, EOFError) as error:
            raise DataError(f"Cannot prepare {name} in {directory}: {error}") from error
        builder = tfds_builder(name, directory)
        if not builder.is_prepared():  # tfds does not touch an existing folder
            raise DataError(
                f"Cannot prepare {name}: {builder.data_path} exists but is incomplete. "
                "Remove it and prepare it again."
            )
    counts = ", ".join(
        f"{split} {info.num_examples:,}" for split, info in builder.info.splits.items()
    )
    log.info("%s in %s: %s", name, builder.data_path, counts)
    return builder.data_path


def known_files(builder: tfds.core.DatasetBuilder) -> Mapping[str, Any]:
    """Return what tfds knows about a builder's files: {url: object with `filename`
    (may be None) and `checksum`}.
    """
    return builder.url_infos or {}


def _with_downloads(
    builder: tfds.core.DatasetBuilder, downloads: "Downloads"
) -> tfds.core.DatasetBuilder:
    """Return a builder of the same data set that takes its files from `downloads`."""
    base: Any = type(builder)

    class WithDownloads(base, skip_registration=True):  # type: ignore[call-arg]
        name = builder.name

        @functools.wraps(base._split_generators)  # tfds inspects the signature
        def _split_generators(
            self, dl_manager: Any, *arguments: Any, **keywords: Any
        ) -> Any:
            return super()._split_generators(downloads, *arguments, **keywords)

    return WithDownloads(
        data_dir=builder.data_dir_root,
        config=builder.builder_config,
        version=str(builder.version),
        file_format="array_record",
    )


class Downloads:
    """Fetcher of the files of a tfds builder.

    It has the methods of `tfds.download.DownloadManager` that builders call. URLs and
    paths may be nested in lists and dicts; the result has the same structure.

    Args:
        directory: folder for downloaded files, at the host and path of their URL, and
            for unpacked archives.
        manual_dir: folder of files that were fetched by hand. Default: `manual` in
            `directory`.
        checksums: the file name and SHA-256 of URLs, as returned by `known_files`.
    """

    register_checksums = False

    def __init__(
        self,
        directory: epath.Path,
        manual_dir: epath.PathLike | None,
        checksums: Mapping[str, Any],
    ):
        self.download_dir = directory
        self._manual = (
            epath.Path(manual_dir).expanduser() if manual_dir else directory / "manual"
        )
        self._checksums = checksums

    @property
    def manual_dir(self) -> epath.Path:
        """The folder of files that were fetched by hand.

        Raises:
            DataError: it does not exist or is empty.
        """
        if not self._manual.is_dir() or not any(self._manual.iterdir()):
            raise DataError(
                f"There are no files in {self._manual}: "
                "set --manual_dir to where the downloaded files are."
            )
        return self._manual

    def download(self, urls: Any) -> Any:
        """Return the paths of the files at `urls`.

        Files are downloaded unless they already exist.
        """
        return _map(self._download, urls)

    def extract(self, paths: Any) -> Any:
        """Return folders with the contents of archives, decompressed files (.gz,
        .bz2, .xz), and other files as is.
        """
        return _map(self._extract, paths)

    def download_and_extract(self, urls: Any) -> Any:
        """Download the files at `urls` and extract them."""
        return _map(lambda url: self._extract(self._download(url)), urls)

    def iter_archive(self, path: Any) -> Iterator[tuple[str, IO[bytes]]]:
        """Yield the (name, content) of each file in an archive.

        Read each content before requesting the next.
        """
        yield from _members(epath.Path(getattr(path, "path", path)))

    def _download(self, url: Any) -> epath.Path:
        url = getattr(url, "url", url)  # a tfds.download.Resource
        expected = self._checksums.get(url)
        parts = urllib.parse.urlsplit(url)
        name = PurePosixPath(parts.path).name or "download"
        if expected is not None and expected.filename:
            name = expected.filename
        by_hand = self._manual / name
        path = self._path_of(parts, name)
        if by_hand.is_file():
            if expected is None:
                log.warning(
                    "using %s for %s unchecked: its sha256 is not known", by_hand, url
                )
            else:
                _check_file(by_hand, url, expected.checksum)
            return by_hand
        if path.is_file():
            if expected is not None:
                _check_file(path, url, expected.checksum)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            sha256 = self._fetch(url, name, temporary)
            if expected is not None and sha256 != expected.checksum:
                raise DataError(
                    f"{url} {_wrong(sha256, expected.checksum)} {_by_hand(name)}"
                )
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def _path_of(self, url: urllib.parse.SplitResult, name: str) -> epath.Path:
        """Return the path of a downloaded file. Different URLs have different paths."""
        folders = [
            part
            for part in (url.netloc, *url.path.split("/")[:-1])
            if part not in ("", ".", "..")
        ]
        if url.query:
            folders.append(hashlib.sha256(url.query.encode()).hexdigest()[:8])
        return self.download_dir.joinpath(*folders, name)

    def _fetch(self, url: str, name: str, path: epath.Path) -> str:
        """Download `url` to `path`, and return the SHA-256 of the content."""
        try:
            # Without this header, a server may declare that an archive is the
            # compressed encoding of its content.
            response = requests.get(
                url,
                stream=True,
                timeout=PATIENCE,
                headers={"Accept-Encoding": "identity"},
            )
        except requests.RequestException as error:
            raise DataError(
                f"{url} cannot be reached ({type(error).__name__}). {_by_hand(name)}"
            ) from error
        digest = hashlib.sha256()
        written = 0
        logged = time.monotonic()
        with response, path.open("wb") as file:
            response.raise_for_status()
            of = (
                f" of {int(size):,}"
                if (size := response.headers.get("Content-Length", "")).isdigit()
                else ""
            )
            log.info(
                "downloading %s%s", url, of and f": {of.removeprefix(' of ')} bytes"
            )
            try:
                for block in response.iter_content(BLOCK):
                    file.write(block)
                    digest.update(block)
                    written += len(block)
                    if time.monotonic() - logged >= LOG_EVERY:
                        logged = time.monotonic()
                        log.info("%s: %s%s bytes", name, f"{written:,}", of)
            except requests.RequestException as error:
                raise DataError(
                    f"The download of {url} stopped "
                    f"after {written:,} bytes ({type(error).__name__}): start again."
                ) from error
        return digest.hexdigest()

    def _extract(self, path: Any) -> epath.Path:
        path = epath.Path(getattr(path, "path", path))
        if _opener(path) is None and not _is_archive(path):
            return path
        target = self.download_dir / "extracted" / f"{path.name}.{_sha256(path)[:16]}"
        if target.exists():
            return target
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        log.info("extracting %s", path)
        try:
            for name, content in _members(path):
                file = temporary / name if name else temporary
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as copy:
                    shutil.copyfileobj(content, copy, BLOCK)
            temporary.rename(target)
        except BROKEN as error:
            raise DataError(
                f"Error while extracting {path}: {error}. "
                "Remove the file and fetch it again."
            ) from error
        finally:
            if temporary.is_dir():
                temporary.rmtree()
            else:
                temporary.unlink(missing_ok=True)
        return target


def _map(function: Callable[[Any], epath.Path], tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_map(function, value) for value in tree]
    return function(tree)


def _sha256(path: epath.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _check_file(path: epath.Path, url: str, expected: str) -> None:
    """Raise DataError if a file does not have the expected SHA-256."""
    sha256 = _sha256(path)
    if sha256 != expected:
        raise DataError(
            f"{path}, for {url}, {_wrong(sha256, expected)} "
            "Remove the file and fetch it again."
        )


def _wrong(sha256: str, expected: str) -> str:
    return f"has the wrong checksum: its sha256 is {sha256}, not {expected}."


def _by_hand(name: str) -> str:
    return (
        "Prepare the data on a machine with network access and copy it here; or "
        f"fetch {name} there, put it into a folder here and add --manual_dir=FOLDER."
    )


def _is_archive(path: epath.Path) -> bool:
    return path.name.endswith(
        (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
    )


def _opener(path: epath.Path) -> Callable[..., IO[bytes]] | None:
    """Return the function that opens a single compressed file, or None for archives
    and other files.
    """
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return None if _is_archive(path) else openers.get(path.suffix)


def _members(path: epath.Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the (name, content) of each file in an archive.

    The name is "" for a single compressed file.

    Raises:
        DataError: a name points outside the folder that the archive is extracted to.
    """
    with path.open("rb") as file:
        if opener := _opener(path):
            with opener(file) as content:
                yield "", content
        elif path.name.endswith(".zip"):
            with zipfile.ZipFile(file) as zipped:
                for entry in zipped.infolist():
                    if not entry.is_dir() and (name := _safe(entry.filename, path)):
                        yield name, zipped.open(entry)
        else:
            with tarfile.open(fileobj=file) as tar:
                for member in tar:
                    try:
                        # for a link, the file in the archive that it points to
                        extracted = tar.extractfile(member)
                    except KeyError:
                        log.warning(
                            "%s: "
                            "skipping %s, a link to a file that is not in the archive",
                            path,
                            member.name,
                        )
                        continue
                    if extracted and (name := _safe(member.name, path)):
                        yield name, extracted


def _safe(name: str, archive: epath.Path) -> str | None:
    """Return a member's name, or None if it should not be extracted (hidden files
    and backups).
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(
            f"{archive} has a file {name}, a path outside of the archive: "
            "do not trust this archive."
        )
    return None if path.name.startswith(".") or path.name.endswith("~") else str(path)
