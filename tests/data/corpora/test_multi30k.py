"""Multi30k, downloaded or taken from a folder."""

import gzip
from pathlib import Path

import pytest

from helpers.corpus import real_data
from helpers.downloads import lines, rows, text
from transformer_jax.data.corpora import multi30k
from transformer_jax.data.corpora.download import prepare
from transformer_jax.data.sources import DataError, parallel_files, tfds_source

MULTI30K_SIZES = dict(zip(multi30k.SPLITS, (7, 5, 3, 2, 4), strict=True))


def multi30k_files(
    folder: Path, splits=multi30k.SPLITS, languages=("en", "de", "fr")
) -> None:
    for split in splits:
        for lang in languages:
            content = gzip.compress(text(split, lang, MULTI30K_SIZES[split]).encode())
            (folder / f"{split}.{lang}.gz").write_bytes(content)


def test_multi30k_is_downloaded(server, tmp_path, monkeypatch):
    monkeypatch.setattr(multi30k, "URL", multi30k.URL.replace("https:", "http:"))
    multi30k_files(server)
    prepare("multi30k/en-fr", tmp_path / "data")
    for split, count in MULTI30K_SIZES.items():
        found = rows("multi30k/en-fr", tmp_path / "data", split, ["fr", "en"])
        assert found == [
            *zip(lines(split, "fr", count), lines(split, "en", count), strict=True)
        ]


def test_multi30k_from_a_folder(no_network, tmp_path):
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    multi30k_files(fetched, ("train", "val", "test_2017_flickr"), ("de", "fr"))
    (fetched / "val.de").write_bytes(
        gzip.decompress((fetched / "val.de.gz").read_bytes())
    )
    (fetched / "val.de.gz").unlink()
    prepare("multi30k/de-fr", tmp_path / "data", fetched)
    for split in ("train", "val", "test_2017_flickr"):
        count = MULTI30K_SIZES[split]
        expected = [
            *zip(lines(split, "de", count), lines(split, "fr", count), strict=True)
        ]
        assert (
            rows("multi30k/de-fr", tmp_path / "data", split, ["de", "fr"]) == expected
        )
    with pytest.raises(DataError, match="'train', 'val', 'test_2017_flickr'"):
        tfds_source("multi30k/de-fr", tmp_path / "data", "test_2016_flickr", ["de"])
    # Half a pair and a folder without val are refused.
    with pytest.raises(DataError, match=r"neither train\.en nor train\.en\.gz"):
        prepare("multi30k/en-de", tmp_path / "data", fetched)
    for path in fetched.glob("val.*"):
        path.unlink()
    with pytest.raises(DataError, match=r"neither val\.de nor val\.de\.gz"):
        prepare("multi30k/de-fr", tmp_path / "others", fetched)


def test_multi30k_as_it_is(no_network, tmp_path):
    folder = real_data("multi30k")
    prepare("multi30k/en-de", tmp_path, folder)
    for split, count in (
        ("train", 29_000),
        ("val", 1_014),
        ("test_2016_flickr", 1_000),
    ):
        files = parallel_files(folder, split, ["en", "de"])
        found = tfds_source("multi30k/en-de", tmp_path, split, ["en", "de"])
        assert len(found) == count
        assert all(found[i] == files[i] for i in range(count))
