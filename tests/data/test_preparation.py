"""Corpora prepared from tiny archives of the layouts that their servers offer, without a network or TensorFlow."""

import functools
import gzip
import http.server
import importlib.util
import io
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
from conftest import real_data
from tensorflow_datasets.core.download import DownloadManager
from tensorflow_datasets.core.download.checksums import compute_url_info

from transformer_jax.data import multi30k
from transformer_jax.data.preparation import prepare
from transformer_jax.data.sources import DataError, parallel_files, tfds_source


def pack(path: Path, files: dict[str, str | bytes], mode: str = "w:gz") -> None:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def sgm(language: str, lines: list[str]) -> str:
    """As newstest2014-deen-src.de.sgm: segments on lines of their own, between other elements."""
    segments = "".join(f'<seg id="{i}">{line}</seg>\n' for i, line in enumerate(lines, 1))
    head = f'<srcset setid="newstest2014" srclang="any">\n<doc docid="d" origlang="{language}">\n<p>\n'
    return f"{head}{segments}</p>\n</doc>\n</srcset>\n"


def lines(corpus: str, language: str, count: int) -> list[str]:
    return [f"{corpus} {language} {i} ä\u2028é" for i in range(count)]


def text(corpus: str, language: str, count: int) -> str:
    return "".join(line + "\n" for line in lines(corpus, language, count))


def wmt14_archives(folder: Path, other: str) -> None:
    """What wmt14_translate/{other}-en downloads, with a second pair and notes as the archives have them."""

    def pairs(pattern: str, corpus: str, count: int) -> dict[str, str]:
        files = {pattern.format(pair=f"{other}-en", language=lang): text(corpus, lang, count) for lang in (other, "en")}
        return files | {pattern.format(pair="cs-en", language="cs"): text("another pair", "cs", 2)}

    pack(
        folder / "training-parallel-europarl-v7.tgz",
        pairs("training/europarl-v7.{pair}.{language}", "europarl", 5)
        | {f"training/europarl-v7.{other}-en.{other}": text("europarl", other, 2) + "\n" + text("europarl", other, 2)},
    )
    commoncrawl = pairs("commoncrawl.{pair}.{language}", "commoncrawl", 3)
    pack(folder / "training-parallel-commoncrawl.tgz", commoncrawl | {f"commoncrawl.{other}-en.annotation": "x\n"})
    pack(
        folder / "training-parallel-nc-v9.tgz",
        pairs("training/news-commentary-v9.{pair}.{language}", "commentary", 2),
    )
    dev = {f"dev/newstest2013.{lang}": text("newstest2013", lang, 3) for lang in (other, "en")}
    for side, lang in (("src", other), ("ref", "en")):
        name = f"dev/newstest2014-{other}en-{side}.{lang}.sgm"
        dev[name] = sgm(lang, ["Müller &amp; Söhne", *lines("newstest2014", lang, 2)])
    pack(folder / "dev.tgz", dev | {"dev/newstest2012.de": "another year\n"})
    if other == "fr":
        pack(folder / "training-parallel-un.tgz", pairs("un/undoc.2000.{pair}.{language}", "un", 2))
        giga = {
            f"giga-fren.release2.fixed.{lang}.gz": gzip.compress(text("giga", lang, 4).encode())
            for lang in ("fr", "en")
        }
        pack(folder / "training-giga-fren.tar", giga, "w:")


TED_SIZES = {"train": 5, "dev": 3, "test": 2}


def ted_archive(folder: Path) -> None:
    files = {
        f"datasets/{pair}/{lang}.{split}": text(pair, lang, count)
        for pair in ("pt_to_en", "gl_to_en")
        for lang in pair.split("_to_")
        for split, count in TED_SIZES.items()
    }
    pack(folder / "qi18naacl-dataset.tar.gz", files)


@pytest.fixture
def stand_ins(tmp_path, monkeypatch) -> Path:
    """A folder whose files tfds takes for the true ones: it knows their sha256 instead of the originals'."""
    folder = tmp_path / "fetched"
    folder.mkdir()
    original = DownloadManager.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._url_infos = {
            url: compute_url_info(folder / info.filename)
            for url, info in self._url_infos.items()
            if info.filename and (folder / info.filename).exists()
        }

    monkeypatch.setattr(DownloadManager, "__init__", init)
    return folder


@pytest.fixture
def no_network(monkeypatch) -> None:
    """Every request goes to a port where nobody listens."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def rows(name: str, directory: Path, split: str, languages: list[str]) -> list[tuple[str, ...]]:
    source = tfds_source(name, directory, split, languages)
    return list(zip(*(source.column(language) for language in languages), strict=True))


@pytest.mark.parametrize("other", ["de", "fr"])
def test_wmt14(other, stand_ins, no_network, tmp_path, capfd):
    wmt14_archives(stand_ins, other)
    name, pair = f"wmt14_translate/{other}-en", [other, "en"]
    prepare(name, tmp_path / "data", stand_ins)
    assert capfd.readouterr().out == ""
    sizes = {"commoncrawl": 3, "commentary": 2} | ({"un": 2, "giga": 4} if other == "fr" else {})
    expected = {row for c, n in sizes.items() for row in zip(lines(c, other, n), lines(c, "en", n), strict=True)}
    # Line 2 of one side of Europarl is empty, and the pair is left out.
    europarl = [
        *zip(lines("europarl", other, 2) * 2, [lines("europarl", "en", 5)[i] for i in (0, 1, 3, 4)], strict=True)
    ]
    found = rows(name, tmp_path / "data", "train", pair)
    assert len(found) == len(expected) + 4
    assert set(found) == expected | set(europarl)
    validation = rows(name, tmp_path / "data", "validation", pair)
    assert sorted(validation) == [*zip(lines("newstest2013", other, 3), lines("newstest2013", "en", 3), strict=True)]
    test = rows(name, tmp_path / "data", "test", pair)
    news = [*zip(lines("newstest2014", other, 2), lines("newstest2014", "en", 2), strict=True)]
    assert sorted(test) == sorted([("Müller &amp; Söhne",) * 2, *news])  # SGML's entities stay


def test_ted(stand_ins, no_network, tmp_path, caplog):
    ted_archive(stand_ins)
    name, data = "ted_hrlr_translate/pt_to_en", tmp_path / "data"
    with caplog.at_level("INFO", "transformer_jax"):
        path = prepare(name, data, stand_ins)
    assert str(path) == f"{data}/{name}/1.0.0"
    assert f"{name} in {path}: train 5, validation 3, test 2" in caplog.text
    for split, stem in (("train", "train"), ("validation", "dev"), ("test", "test")):
        n = TED_SIZES[stem]
        expected = [*zip(lines("pt_to_en", "pt", n), lines("pt_to_en", "en", n), strict=True)]
        assert sorted(rows(name, data, split, ["pt", "en"])) == expected
    written = {p: p.stat().st_mtime_ns for p in Path(path).iterdir()}
    assert prepare(name, data) == path  # ready already: nothing is fetched
    assert {p: p.stat().st_mtime_ns for p in Path(path).iterdir()} == written
    assert importlib.util.find_spec("tensorflow") is None
    assert "tensorflow" not in sys.modules


def test_what_lies_in_downloads_manual_is_taken(stand_ins, no_network, tmp_path):
    ted_archive(stand_ins)
    manual = tmp_path / "data" / "downloads" / "manual"
    manual.mkdir(parents=True)
    (stand_ins / "qi18naacl-dataset.tar.gz").rename(manual / "qi18naacl-dataset.tar.gz")
    with pytest.raises(DataError, match="cannot be reached") as error:  # its sha256 is unknown, and so its name
        prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data")
    assert "manual_dir" not in str(error.value)
    (stand_ins / "qi18naacl-dataset.tar.gz").write_bytes((manual / "qi18naacl-dataset.tar.gz").read_bytes())
    prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data")


def test_what_is_there_but_not_whole_is_not_called_ready(stand_ins, no_network, tmp_path):
    ted_archive(stand_ins)
    path = Path(prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data", stand_ins))
    (path / "dataset_info.json").unlink()
    with pytest.raises(DataError, match=rf"{path} is there, but not whole. Remove it"):
        prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data", stand_ins)


def test_a_file_with_another_sha256_is_refused(no_network, tmp_path):
    ted_archive(tmp_path)
    with pytest.raises(DataError, match=r"qi18naacl-dataset\.tar\.gz.*wrong checksum[\s\S]*fetch it again"):
        prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data", tmp_path)
    assert not (tmp_path / "data" / "ted_hrlr_translate" / "pt_to_en" / "1.0.0").exists()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("wmt14_translate/de-en", "training-parallel-europarl-v7.tgz"),
        ("ted_hrlr_translate/pt_to_en", "qi18naacl-dataset.tar.gz"),
        ("multi30k/en-de", "train.en.gz"),
    ],
)
def test_without_a_network_it_fails_at_once_and_says_what_to_do(name, file, no_network, tmp_path):
    start = time.perf_counter()
    with pytest.raises(DataError, match=rf"{file} cannot be reached .* fetch {file} there, .* --manual_dir=FOLDER"):
        prepare(name, tmp_path)
    assert time.perf_counter() - start < 20  # tfds alone takes 204 s


def test_folders_and_archives_that_are_not_there_or_broken(stand_ins, no_network, tmp_path):
    with pytest.raises(DataError, match=r"no directory .*absent: set --manual_dir"):
        prepare("multi30k/en-de", tmp_path, tmp_path / "absent")
    with pytest.raises(DataError, match="tfds cannot open 'nonsense'"):
        prepare("nonsense", tmp_path)
    (stand_ins / "qi18naacl-dataset.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"Cannot prepare ted_hrlr_translate/pt_to_en in .* extracting"):
        prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data", stand_ins)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Answers every http request with the file of the same name in a folder, whatever the host."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):
            return str(folder / path.rpartition("/")[2])

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{running.server_port}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield folder
        running.shutdown()
        thread.join()


def test_archives_are_downloaded(stand_ins, server, tmp_path):
    ted_archive(server)
    prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data")
    assert len(rows("ted_hrlr_translate/pt_to_en", tmp_path / "data", "validation", ["pt"])) == 3


def test_a_server_without_the_file(server, tmp_path):
    with pytest.raises(DataError, match=r"Cannot prepare ted_hrlr_translate/pt_to_en .*404"):
        prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data")


MULTI30K_SIZES = dict(zip(multi30k.SPLITS, (7, 5, 3, 2, 4), strict=True))


def multi30k_files(folder: Path, splits=multi30k.SPLITS, languages=("en", "de", "fr")) -> None:
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
        assert found == [*zip(lines(split, "fr", count), lines(split, "en", count), strict=True)]


def test_multi30k_from_a_folder(no_network, tmp_path):
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    multi30k_files(fetched, ("train", "val", "test_2017_flickr"), ("de", "fr"))
    (fetched / "val.de").write_bytes(gzip.decompress((fetched / "val.de.gz").read_bytes()))
    (fetched / "val.de.gz").unlink()
    prepare("multi30k/de-fr", tmp_path / "data", fetched)
    for split in ("train", "val", "test_2017_flickr"):
        count = MULTI30K_SIZES[split]
        expected = [*zip(lines(split, "de", count), lines(split, "fr", count), strict=True)]
        assert rows("multi30k/de-fr", tmp_path / "data", split, ["de", "fr"]) == expected
    with pytest.raises(DataError, match="'train', 'val', 'test_2017_flickr'"):
        tfds_source("multi30k/de-fr", tmp_path / "data", "test_2016_flickr", ["de"])
    # Half a pair is refused, and so is a folder without val.
    with pytest.raises(DataError, match=r"neither train\.en nor train\.en\.gz"):
        prepare("multi30k/en-de", tmp_path / "data", fetched)
    for path in fetched.glob("val.*"):
        path.unlink()
    with pytest.raises(DataError, match=r"neither val\.de nor val\.de\.gz"):
        prepare("multi30k/de-fr", tmp_path / "others", fetched)


def test_multi30k_as_it_is(no_network, tmp_path):
    folder = real_data("multi30k")
    prepare("multi30k/en-de", tmp_path, folder)
    for split, count in (("train", 29_000), ("val", 1_014), ("test_2016_flickr", 1_000)):
        files = parallel_files(folder, split, ["en", "de"])
        found = tfds_source("multi30k/en-de", tmp_path, split, ["en", "de"])
        assert len(found) == count
        assert all(found[i] == files[i] for i in range(count))
