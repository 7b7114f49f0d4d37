"""Standard corpora made ready for training: downloaded, or taken from a folder, and written as array_record.

tfds does it, and its own road needs TensorFlow in one place, the unpacking of archives; here it does not.
"""

import contextlib
import functools
import io
import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import requests
import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.core.download import download_manager, extractor, util

from transformer_jax.data import multi30k
from transformer_jax.data.sources import DataError, tfds_builder

log = logging.getLogger(__name__)

PATIENCE = 10  # seconds until a server that does not answer is one that cannot be reached

# What tfds' extractor takes from TensorFlow.
FILES = SimpleNamespace(
    compat=SimpleNamespace(as_text=str),
    io=SimpleNamespace(gfile=SimpleNamespace(GFile=lambda path, mode: epath.Path(path).open(mode))),
)


def prepare(name: str, directory: epath.PathLike, manual_dir: epath.PathLike | None = None) -> epath.Path:
    """Makes the tfds data set `name` ready in `directory`, where data.directory then points; returns its folder.

    Files that lie in `manual_dir` (else in `directory`/downloads/manual) under the names that they have on their
    servers are taken from there; tfds compares their sha256 where it knows it. The others are downloaded. What is
    ready already stays as it is.

    Raises:
        DataError: no such data set or folder; a file that can't be had or is broken; a folder of the data set that is
            there, but not whole.
    """
    directory = epath.Path(directory).expanduser()
    builder = tfds_builder(name, directory)
    if manual_dir is not None and not epath.Path(manual_dir).expanduser().is_dir():
        raise DataError(f"There is no directory {manual_dir}: set --manual_dir to where the downloaded files are.")
    if not builder.is_prepared():
        config = tfds.download.DownloadConfig(manual_dir=manual_dir, try_download_gcs=False)
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),  # tfds announces itself there
                mock.patch.object(extractor, "tf", FILES),
                mock.patch.object(tfds.download.DownloadManager, "_download", _download_if_reachable),
            ):
                builder.download_and_prepare(download_config=config)
        except download_manager.NonMatchingChecksumError as error:
            raise DataError(f"{error}\nRemove the file and fetch it again.") from error
        except (OSError, AssertionError, UnicodeError, EOFError, extractor.ExtractError, util.DownloadError) as error:
            raise DataError(f"Cannot prepare {name} in {directory}: {error}") from error
        if not builder.is_prepared():  # tfds leaves what it finds there alone
            raise DataError(
                f"Cannot prepare {name}: {builder.data_path} is there, but not whole. Remove it and prepare it again."
            )
    counts = ", ".join(f"{split} {info.num_examples:,}" for split, info in builder.info.splits.items())
    log.info("%s in %s: %s", name, builder.data_path, counts)
    return builder.data_path


_tfds_download = tfds.download.DownloadManager._download


@functools.wraps(_tfds_download)
def _download_if_reachable(self: tfds.download.DownloadManager, resource: Any) -> Any:
    """tfds' retries, without a network, take minutes: this asks once before."""
    if (url := resource.url).startswith("http"):
        try:
            requests.head(url, timeout=PATIENCE, allow_redirects=True).close()
        except requests.RequestException as error:
            known = self._url_infos.get(url)
            remedy = "Prepare the data on a machine with a network and copy them here"
            if known or url.startswith(multi30k.URL):  # tfds takes what lies in a folder by the name that it knows
                file = (known and known.filename) or url.rpartition("/")[2]
                remedy += f"; or fetch {file} there, put it into a folder here and add --manual_dir=FOLDER"
            raise DataError(f"{url} cannot be reached ({type(error).__name__}). {remedy}.") from error
    return _tfds_download(self, resource)
