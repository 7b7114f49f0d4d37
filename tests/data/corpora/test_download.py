"""Corpora prepared without a network or TensorFlow, from tiny archives with the
layouts of the real ones.
"""

import bz2
import gzip
import hashlib
import http.server
import importlib.util
import io
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from etils import epath

from helpers.downloads import lines, rows, text
from transformer_jax.data.corpora import download
from transformer_jax.data.corpora.download import Downloads, prepare
from transformer_jax.data.sources import DataError


def pack(path: Path, files: dict[str, str | bytes], mode: str = "w:gz") -> None:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def sgm(language: str, lines: list[str]) -> str:
    """Return text in the format of newstest2014-deen-src.de.sgm: one segment per
    line, between other elements.
    """
    segments = "".join(
        f'<seg id="{i}">{line}</seg>\n' for i, line in enumerate(lines, 1)
    )
    head = (
        '<srcset setid="newstest2014" srclang="any">\n<doc docid="d"'
        f' origlang="{language}">\n<p>\n'
    )
    return f"{head}{segments}</p>\n</doc>\n</srcset>\n"


def wmt14_archives(folder: Path, other: str) -> None:
    """Write the archives of wmt14_translate/{other}-en.

    Like the real ones, they also hold another pair and notes.
    """

    def pairs(pattern: str, corpus: str, count: int) -> dict[str, str]:
        files = {
            pattern.format(pair=f"{other}-en", language=lang): text(corpus, lang, count)
            for lang in (other, "en")
        }
        return files | {
            pattern.format(pair="cs-en", language="cs"): text("another pair", "cs", 2)
        }

    pack(
        folder / "training-parallel-europarl-v7.tgz",
        pairs("training/europarl-v7.{pair}.{language}", "europarl", 5)
        | {
            f"training/europarl-v7.{other}-en.{other}": (
                text("europarl", other, 2) + "\n" + text("europarl", other, 2)
            )
        },
    )
    commoncrawl = pairs("commoncrawl.{pair}.{language}", "commoncrawl", 3)
    pack(
        folder / "training-parallel-commoncrawl.tgz",
        commoncrawl | {f"commoncrawl.{other}-en.annotation": "x\n"},
    )
    pack(
        folder / "training-parallel-nc-v9.tgz",
        pairs("training/news-commentary-v9.{pair}.{language}", "commentary", 2),
    )
    dev = {
        f"dev/newstest2013.{lang}": text("newstest2013", lang, 3)
        for lang in (other, "en")
    }
    for side, lang in (("src", other), ("ref", "en")):
        name = f"dev/newstest2014-{other}en-{side}.{lang}.sgm"
        dev[name] = sgm(lang, ["Müller &amp; Söhne", *lines("newstest2014", lang, 2)])
    pack(folder / "dev.tgz", dev | {"dev/newstest2012.de": "another year\n"})
    if other == "fr":
        pack(
            folder / "training-parallel-un.tgz",
            pairs("un/undoc.2000.{pair}.{language}", "un", 2),
        )
        giga = {
            f"giga-fren.release2.fixed.{lang}.gz": gzip.compress(
                text("giga", lang, 4).encode()
            )
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


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("other", ["de", "fr"])
def test_wmt14(other, stand_ins, no_network, tmp_path, capfd):
    wmt14_archives(stand_ins, other)
    name, pair = f"wmt14_translate/{other}-en", [other, "en"]
    prepare(name, tmp_path / "data", stand_ins)
    assert capfd.readouterr().out == ""
    sizes = {"commoncrawl": 3, "commentary": 2} | (
        {"un": 2, "giga": 4} if other == "fr" else {}
    )
    expected = {
        row
        for c, n in sizes.items()
        for row in zip(lines(c, other, n), lines(c, "en", n), strict=True)
    }
    # The third line of one side of Europarl is empty, so this pair is left out.
    europarl = [
        *zip(
            lines("europarl", other, 2) * 2,
            [lines("europarl", "en", 5)[i] for i in (0, 1, 3, 4)],
            strict=True,
        )
    ]
    found = rows(name, tmp_path / "data", "train", pair)
    assert len(found) == len(expected) + 4
    assert set(found) == expected | set(europarl)
    validation = rows(name, tmp_path / "data", "validation", pair)
    assert sorted(validation) == [
        *zip(
            lines("newstest2013", other, 3), lines("newstest2013", "en", 3), strict=True
        )
    ]
    test = rows(name, tmp_path / "data", "test", pair)
    news = [
        *zip(
            lines("newstest2014", other, 2), lines("newstest2014", "en", 2), strict=True
        )
    ]
    # SGML entities are kept
    assert sorted(test) == sorted([("Müller &amp; Söhne",) * 2, *news])


def test_ted(stand_ins, no_network, tmp_path, caplog):
    ted_archive(stand_ins)
    name, data = "ted_hrlr_translate/pt_to_en", tmp_path / "data"
    with caplog.at_level("INFO", "transformer_jax"):
        path = prepare(name, data, stand_ins)
    assert str(path) == f"{data}/{name}/1.0.0"
    assert f"{name} in {path}: train 5, validation 3, test 2" in caplog.text
    for split, stem in (("train", "train"), ("validation", "dev"), ("test", "test")):
        n = TED_SIZES[stem]
        expected = [
            *zip(lines("pt_to_en", "pt", n), lines("pt_to_en", "en", n), strict=True)
        ]
        assert sorted(rows(name, data, split, ["pt", "en"])) == expected
    written = {p: p.stat().st_mtime_ns for p in Path(path).iterdir()}
    assert prepare(name, data) == path  # already prepared: nothing is fetched
    assert {p: p.stat().st_mtime_ns for p in Path(path).iterdir()} == written
    assert importlib.util.find_spec("tensorflow") is None
    assert "tensorflow" not in sys.modules


def test_what_lies_in_downloads_manual_is_taken(
    stand_ins, no_network, tmp_path, caplog
):
    ted_archive(stand_ins)
    manual = tmp_path / "data" / "downloads" / "manual"
    manual.mkdir(parents=True)
    archive = (stand_ins / "qi18naacl-dataset.tar.gz").rename(
        manual / "qi18naacl-dataset.tar.gz"
    )
    prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data")  # its sha256 is not known
    assert f"using {archive} for http" in caplog.text
    assert "unchecked: its sha256 is not known" in caplog.text
    (stand_ins / "qi18naacl-dataset.tar.gz").write_bytes(archive.read_bytes())
    caplog.clear()
    prepare("ted_hrlr_translate/gl_to_en", tmp_path / "data")
    assert "unchecked" not in caplog.text


def test_what_is_there_but_not_whole_is_not_called_ready(
    stand_ins, no_network, tmp_path
):
    ted_archive(stand_ins)
    path = Path(prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data", stand_ins))
    (path / "dataset_info.json").unlink()
    with pytest.raises(DataError, match=rf"{path} exists but is incomplete. Remove it"):
        prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data", stand_ins)


def test_a_file_with_another_sha256_is_refused(no_network, tmp_path):
    ted_archive(tmp_path)
    with pytest.raises(
        DataError,
        match=r"qi18naacl-dataset\.tar\.gz.*wrong checksum[\s\S]*fetch it again",
    ):
        prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data", tmp_path)
    assert not (
        tmp_path / "data" / "ted_hrlr_translate" / "pt_to_en" / "1.0.0"
    ).exists()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("wmt14_translate/de-en", "training-parallel-europarl-v7.tgz"),
        ("ted_hrlr_translate/pt_to_en", "qi18naacl-dataset.tar.gz"),
        ("multi30k/en-de", "train.en.gz"),
    ],
)
def test_without_a_network_it_fails_at_once_and_says_what_to_do(
    name, file, no_network, tmp_path
):
    start = time.perf_counter()
    with pytest.raises(
        DataError,
        match=(
            rf"{file} cannot be reached .* fetch {file} there, .* --manual_dir=FOLDER"
        ),
    ):
        prepare(name, tmp_path)
    assert time.perf_counter() - start < 20  # tfds gives up after 204 s


def test_folders_and_archives_that_are_not_there_or_broken(
    stand_ins, no_network, tmp_path
):
    with pytest.raises(DataError, match=r"no directory .*absent: set --manual_dir"):
        prepare("multi30k/en-de", tmp_path, tmp_path / "absent")
    with pytest.raises(DataError, match="tfds cannot open 'nonsense'"):
        prepare("nonsense", tmp_path)
    (stand_ins / "qi18naacl-dataset.tar.gz").write_bytes(b"no archive")
    with pytest.raises(
        DataError,
        match=r"Cannot prepare ted_hrlr_translate/pt_to_en in .* extracting .*",
    ):
        prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data", stand_ins)


def test_archives_are_downloaded_once(stand_ins, server, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(download, "LOG_EVERY", 0)
    ted_archive(server)
    with caplog.at_level("INFO", "transformer_jax"):
        prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data")
    size = (server / "qi18naacl-dataset.tar.gz").stat().st_size
    assert f"/qi18naacl-dataset.tar.gz: {size:,} bytes" in caplog.text
    assert f"qi18naacl-dataset.tar.gz: {size:,} of {size:,} bytes" in caplog.text
    assert (
        len(
            rows("ted_hrlr_translate/pt_to_en", tmp_path / "data", "validation", ["pt"])
        )
        == 3
    )
    (server / "qi18naacl-dataset.tar.gz").unlink()
    prepare("ted_hrlr_translate/gl_to_en", tmp_path / "data")
    assert (
        len(rows("ted_hrlr_translate/gl_to_en", tmp_path / "data", "train", ["gl"]))
        == 5
    )
    assert "unchecked" not in caplog.text
    assert not list((tmp_path / "data" / "downloads").rglob("*.tmp"))


def test_a_download_with_another_sha256_is_refused_and_removed(server, tmp_path):
    (server / "a.txt").write_text("changed")
    url, known = (
        "http://example.org/some/a.txt",
        SimpleNamespace(filename=None, checksum="0" * 64),
    )
    with pytest.raises(
        DataError,
        match=(
            rf"{url} has the wrong checksum: its sha256 is d67.*, not"
            r" 000.*--manual_dir=FOLDER"
        ),
    ):
        Downloads(epath.Path(tmp_path / "kept"), None, {url: known}).download(url)
    assert not [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    known.checksum = sha256(server / "a.txt")
    path = Downloads(epath.Path(tmp_path / "kept"), None, {url: known}).download(url)
    assert path == tmp_path / "kept" / "example.org" / "some" / "a.txt"
    path.write_text("broken later")
    with pytest.raises(
        DataError,
        match=r"kept/example.org/some/a.txt, for .* wrong checksum.* fetch it again",
    ):
        Downloads(epath.Path(tmp_path / "kept"), None, {url: known}).download(url)


def test_a_download_that_breaks_off_leaves_nothing(server, tmp_path, monkeypatch):
    (server / "a.txt").write_bytes(bytes(5_000_000))
    monkeypatch.setattr(
        http.server.SimpleHTTPRequestHandler,
        "copyfile",
        lambda self, source, out: out.write(source.read(2_000_000)),
    )
    with pytest.raises(
        DataError,
        match=(
            r"download of http://example.org/a.txt stopped after [\d,]+ bytes .*start"
            r" again"
        ),
    ):
        Downloads(epath.Path(tmp_path / "kept"), None, {}).download(
            "http://example.org/a.txt"
        )
    assert not [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]


def test_urls_and_paths_in_structures(server, tmp_path):
    for name in "abc":
        (server / name).write_text(name)
    downloads = Downloads(epath.Path(tmp_path / "kept"), None, {})
    found = downloads.download(
        {
            "one": "http://x.org/a",
            "more": ["http://x.org/b", "http://y.org/../b", "http://x.org/c?d=1"],
        }
    )
    assert [path.read_text() for path in (found["one"], *found["more"])] == [
        "a",
        "b",
        "b",
        "c",
    ]
    assert len({found["one"], *found["more"]}) == 4
    assert all(
        str(path).startswith(str(tmp_path / "kept"))
        for path in (found["one"], *found["more"])
    )
    assert downloads.extract(found) == found  # none of them is an archive


def zip_of(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("name", ["a.tar", "a.tgz", "a.tar.bz2", "a.tar.xz", "a.zip"])
def test_archives(name, tmp_path):
    files = {
        "x/one.txt": "1",
        "x/y/two.txt": "2",
        "x/._one.txt": "hidden",
        "x/one.txt~": "backup",
    }
    path, mode = (
        tmp_path / name,
        {".tgz": "gz", ".bz2": "bz2", ".xz": "xz"}.get(Path(name).suffix, ""),
    )
    zip_of(path, files) if name == "a.zip" else pack(path, files, f"w:{mode}")
    downloads = Downloads(epath.Path(tmp_path / "kept"), None, {})
    found = downloads.extract(path)
    assert {
        str(p.relative_to(found)): p.read_text()
        for p in Path(found).rglob("*")
        if p.is_file()
    } == {
        "x/one.txt": "1",
        "x/y/two.txt": "2",
    }
    assert {n: file.read() for n, file in downloads.iter_archive(path)} == {
        "x/one.txt": b"1",
        "x/y/two.txt": b"2",
    }
    stamp = (Path(found) / "x" / "one.txt").stat().st_mtime
    assert downloads.extract([path]) == [found]
    assert (Path(found) / "x" / "one.txt").stat().st_mtime == stamp
    content = path.read_bytes()
    path.write_bytes(content[: 512 if name == "a.tar" else len(content) // 2])
    with pytest.raises(
        DataError, match=rf"Error while extracting .*{name}: [\s\S]*fetch it again"
    ):
        downloads.extract(path)
    assert [p.name for p in (tmp_path / "kept" / "extracted").iterdir()] == [found.name]


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress)]
)
def test_single_compressed_files(suffix, compress, tmp_path):
    (tmp_path / f"a.txt{suffix}").write_bytes(compress(b"content"))
    found = Downloads(epath.Path(tmp_path / "kept"), None, {}).extract(
        tmp_path / f"a.txt{suffix}"
    )
    assert found.read_bytes() == b"content"


@pytest.mark.parametrize("member", ["../outside", "x/../../outside", "/tmp/outside"])
@pytest.mark.parametrize("name", ["a.tgz", "a.zip"])
def test_archives_write_nowhere_else(name, member, tmp_path):
    (zip_of if name == "a.zip" else pack)(tmp_path / name, {"fine": "1", member: "2"})
    with pytest.raises(
        DataError, match=rf"{name} has a file {member}, a path outside of the archive"
    ):
        Downloads(epath.Path(tmp_path / "kept"), None, {}).extract(tmp_path / name)
    assert not list((tmp_path / "kept" / "extracted").iterdir())


def test_links_in_archives_give_the_file_they_lead_to(tmp_path, caplog):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, link in (("one", None), ("two", "one"), ("three", "/etc/passwd")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = (
                (tarfile.SYMTYPE, link, 0) if link else (tarfile.REGTYPE, "", 1)
            )
            archive.addfile(member, io.BytesIO(b"1"))
    found = Downloads(epath.Path(tmp_path / "kept"), None, {}).extract(
        tmp_path / "a.tar"
    )
    assert {path.name: path.read_text() for path in found.iterdir()} == {
        "one": "1",
        "two": "1",
    }
    assert "skipping three, a link to a file that is not in the archive" in caplog.text


def test_there_may_be_no_files_fetched_by_hand(tmp_path):
    with pytest.raises(DataError, match=r"no files in .*manual: set --manual_dir"):
        _ = Downloads(epath.Path(tmp_path), None, {}).manual_dir


def test_a_server_without_the_file(server, tmp_path):
    with pytest.raises(
        DataError, match=r"Cannot prepare ted_hrlr_translate/pt_to_en .*404"
    ):
        prepare("ted_hrlr_translate/pt_to_en", tmp_path / "data")
