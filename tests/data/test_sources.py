"""Sources: lines, text, tables and data sets of tfds, and parts of their splits."""

import errno
import gzip
import json
import shutil
import subprocess
import sys
import time

import pytest

from helpers.corpus import real_data
from transformer_jax.data import sources
from transformer_jax.data.corpora import dates as dates_module
from transformer_jax.data.sources import (
    DataError,
    Source,
    parallel_files,
    text_file,
    tfds_source,
)
from transformer_jax.data.tables import tsv_file


def zipped(content: bytes) -> bytes:
    """gzip without the time of day, which would be part of the tests' names."""
    return gzip.compress(content, mtime=0)


def write(directory, **files):
    for name, content in files.items():
        (directory / name.replace("_", ".", 1)).write_bytes(content)


def test_files(tmp_path):
    write(tmp_path, train_en=b"a b\n\nc\n", train_de="ä\nö\nü".encode(), val_en=b"x\n")
    source = parallel_files(tmp_path, "train", ["en", "de"])
    assert len(source) == 3
    assert source[0] == {"en": "a b", "de": "ä"}
    assert source[-1] == {"en": "c", "de": "ü"}
    assert source.column("en") == ["a b", "", "c"]
    assert [example["de"] for example in source] == ["ä", "ö", "ü"]
    assert parallel_files(str(tmp_path), "val", ["en"])[0] == {"en": "x"}


def test_only_newlines_end_lines(tmp_path):
    text = "a\u2028b\u0085c\x0bd\x0ce\x1cf\rg\r\n\r\nlast\r"
    write(tmp_path, train_en=text.encode())
    column = parallel_files(tmp_path, "train", ["en"]).column("en")
    assert column == ["a\u2028b\u0085c\x0bd\x0ce\x1cf\rg", "", "last"]


def test_lines_are_a_sequence(tmp_path):
    write(tmp_path, train_en="ä\nb\r\n\nd".encode(), train_de=b"1\n2\n3\n4\n")
    column = parallel_files(tmp_path, "train", ["en", "de"]).column("en")
    expected = ["ä", "b", "", "d"]
    assert list(column) == expected
    assert [column[i] for i in range(-4, 4)] == expected * 2
    for part in (
        slice(None),
        slice(1, 3),
        slice(3, 1),
        slice(None, None, -2),
        slice(-2, None),
        slice(9, 99),
    ):
        assert column[part] == expected[part]
    assert column != ["ä", "b"]
    assert b"".join(column.blocks()) == "ä\nb\n\nd\n".encode()
    for i in (4, -5):
        with pytest.raises(IndexError, match=f"no line {i} in 4 lines"):
            column[i]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_blocks_end_anywhere(size, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", max(size, 4))
    text = "\ufeff日本ä\n\n😀b\r\nc\n\né"[: 11 + size]
    write(tmp_path, train_en=text.encode())
    lines = [
        line.removesuffix("\r") for line in text[1:].removesuffix("\n").split("\n")
    ]
    assert list(parallel_files(tmp_path, "train", ["en"]).column("en")) == lines
    for at, (line, offset) in {3: (1, 0), 12: (2, 0), 13: (3, 0)}.items():
        content = text.encode()
        write(tmp_path, train_en=content[:at] + b"\x80" * size + content[at:])
        with pytest.raises(
            DataError,
            match=rf"train\.en:{line} is not UTF-8: byte 0x80 at offset {offset} of",
        ):
            parallel_files(tmp_path, "train", ["en"])


def test_byte_order_mark_is_dropped_at_the_start_only(tmp_path):
    write(tmp_path, train_en="\ufeffa\n\ufeffb\n".encode())
    assert parallel_files(tmp_path, "train", ["en"]).column("en") == ["a", "\ufeffb"]


def test_unequal_numbers_of_lines(tmp_path):
    write(tmp_path, train_en=b"a\nb\n", train_de=b"a\nb\nalone\nd\n")
    with pytest.raises(DataError) as error:
        parallel_files(tmp_path, "train", ["en", "de"])
    assert f"{tmp_path}/train.en has 2, {tmp_path}/train.de has 4." in str(error.value)
    assert f"without a counterpart is {tmp_path}/train.de:3: 'alone'. Shorten" in str(
        error.value
    )


def test_no_line_at_all(tmp_path):
    write(tmp_path, train_en=b"", train_de=b"\xef\xbb\xbf")
    with pytest.raises(DataError, match=r"train\.en and .*train\.de have no lines"):
        parallel_files(tmp_path, "train", ["en", "de"])


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_invalid_utf8_is_located(mark, tmp_path):
    write(tmp_path, train_en=mark + b"fine\n\nna\xefve\nfine\n")
    with pytest.raises(
        DataError, match=r"train\.en:3 is not UTF-8: byte 0xef at offset 2 of the line"
    ):
        parallel_files(tmp_path, "train", ["en"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\nb\n".encode("utf-16"), "not UTF-8 but looks like UTF-16"),
        (
            "a\nb\n".encode("utf-16-be"),
            r"not UTF-8 but looks like UTF-16BE.*iconv -f UTF-16BE -t UTF-8",
        ),
        (
            "a\n".encode("utf-16-le"),
            r"not UTF-8 but looks like UTF-16LE.*iconv -f UTF-16LE -t UTF-8",
        ),
        ("a\nb\n".encode("utf-32"), "not UTF-8 but looks like UTF-32"),
        (zipped(b"a\n"), "contains gzip data instead of text"),
        (b"a\rb\rc\r", r"is one line with carriage returns in it. End lines with \\n"),
    ],
)
def test_what_is_not_text_in_lines(content, message, tmp_path):
    (tmp_path / "train.en").write_bytes(content)
    with pytest.raises(DataError, match=rf"train\.en .*{message}"):
        parallel_files(tmp_path, "train", ["en"])


@pytest.mark.parametrize(
    ("part", "start", "stop"),
    [
        *[
            ("", 0, 11),
            ("[:]", 0, 11),
            ("[:90%]", 0, 9),
            ("[90%:]", 9, 11),
            ("[5:]", 5, 11),
            ("[:-2]", 0, 9),
        ],
        *[
            ("[-3:]", 8, 11),
            ("[-10%:]", 9, 11),
            ("[2:3]", 2, 3),
            ("[50%:100%]", 5, 11),
            ("[0:11]", 0, 11),
        ],
    ],
)
def test_parts_of_splits(part, start, stop, tmp_path):
    lines = [f"é{i}" for i in range(11)]
    write(
        tmp_path,
        train_en=("\ufeff" + "\n".join(lines)).encode(),
        train_de="".join(f"{i}\n" for i in lines).encode(),
    )
    source = parallel_files(tmp_path, f"train{part}", ["en", "de"])
    assert source.column("en") == source.column("de") == lines[start:stop]
    assert b"".join(source.column("en").blocks()).decode() == "".join(
        f"{line}\n" for line in lines[start:stop]
    )
    write(tmp_path, train_tsv=("a\n" + "\n".join(lines)).encode())
    assert tsv_file(tmp_path, f"train{part}", ["a"]).column("a") == lines[start:stop]
    text = "éa\n日😀\n\nb\r\nä"  # 11 characters
    write(tmp_path, train_txt=("\ufeff" + text).encode())
    assert (
        "".join(text_file(tmp_path, f"train{part}").column("text")) == text[start:stop]
    )


@pytest.mark.parametrize(
    "split",
    [
        "train[",
        "train[:90",
        "train[a:]",
        "train]",
        "[:3]",
        "train[1:2][3:]",
        "",
        "train[3]",
    ],
)
@pytest.mark.parametrize("read", [parallel_files, tsv_file, text_file])
def test_what_is_not_a_split(read, split, tmp_path):
    with pytest.raises(
        DataError, match=r"is not a split: it must be a name or a part of one, e\.g\."
    ):
        read(tmp_path, split, ["text"])


@pytest.mark.parametrize(
    "part", ["[:0]", "[3:]", "[2:2]", "[2:1]", "[:4]", "[-4:]", "[:134%]", "[:33%]"]
)
def test_parts_that_are_empty_or_beyond_the_end(part, tmp_path):
    files = {
        "en": (parallel_files, "a\nb\n\n"),
        "tsv": (tsv_file, "en\na\nb\n\n"),
        "txt": (text_file, "a\nb"),
    }
    for (suffix, (read, content)), what in zip(
        files.items(), ("lines", "rows", "characters"), strict=True
    ):
        (tmp_path / f"train.{suffix}").write_text(content)
        with pytest.raises(
            DataError,
            match=(
                rf"part -?\d+ to \d+ of the 3 {what} of .*train\.{suffix}: it must not"
                r" be empty"
            ),
        ):
            read(tmp_path, f"train{part}", ["en"])


@pytest.mark.parametrize(
    "text", ["\0", "\0a", "a\0", "\0\0\0\0", "a\0bc\n\0\n", "\0a\0bc", "a\0\0\0b"]
)
def test_a_zero_byte_is_a_character(text, tmp_path):
    write(tmp_path, train_txt=text.encode(), train_en=text.encode())
    assert "".join(text_file(tmp_path, "train").column("text")) == text
    assert list(
        parallel_files(tmp_path, "train", ["en"]).column("en")
    ) == text.removesuffix("\n").split("\n")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_text_is_its_lines_with_their_ends(size, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", max(size, 4))
    text = "\n日本ä\r\n\n😀b\rc\n\né"
    write(tmp_path, train_txt=text.encode())
    column = text_file(tmp_path, "train").column("text")
    assert list(column) == column[:] == ["\n", "日本ä\r\n", "\n", "😀b\rc\n", "\n", "é"]
    assert column[-1] == "é"
    assert b"".join(column.blocks()) == text.encode()
    for start in range(len(text)):
        for stop in range(start + 1, len(text) + 1):
            part = text_file(tmp_path, f"train[{start}:{stop}]", ["other"]).column(
                "other"
            )
            assert "".join(part) == text[start:stop]
            assert b"".join(part.blocks()) == text[start:stop].encode()


def test_text_that_is_none(tmp_path):
    write(tmp_path, train_txt=b"", val_txt=b"a\n\xff")
    with pytest.raises(
        DataError, match=r"train\.txt has no characters: it needs at least one"
    ):
        text_file(tmp_path, "train")
    with pytest.raises(DataError, match=r"val\.txt:2 is not UTF-8"):
        text_file(tmp_path, "val")
    with pytest.raises(DataError, match=r"neither test\.txt nor test\.txt\.gz"):
        text_file(tmp_path, "test")
    write(tmp_path, val_txt=b"a")
    with pytest.raises(
        DataError, match=r"single column of text, but the columns are a, b: choose one"
    ):
        text_file(tmp_path, "val", ["a", "b"])


def test_shakespeare_and_trec():
    text = real_data("tinyshakespeare") / "input.txt"
    parts = [
        "".join(text_file(text.parent, f"input{part}").column("text"))
        for part in ("[:90%]", "[90%:]")
    ]
    assert [len(part) for part in parts] == [1_003_854, 111_540]
    assert "".join(parts) == text.read_text()
    questions = tsv_file(real_data("trec"), "train[5000:]", ["sentence", "label"])
    assert len(questions) == 452
    assert set(questions.column("label")) == {
        "ABBR",
        "DESC",
        "ENTY",
        "HUM",
        "LOC",
        "NUM",
    }


@pytest.fixture(scope="module")
def dates(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tfds")
    return directory, tfds_source("dates", directory, "train", ["written", "iso"])


def test_dates_are_prepared_and_read(dates, capfd):
    directory, source = dates
    assert isinstance(source, Source)
    assert len(source) == 40_000
    assert source[0].keys() == {"written", "iso"}
    assert all(type(text) is str for text in source[0].values())
    assert source[17] == {
        language: source.column(language)[17] for language in ("written", "iso")
    }
    part = tfds_source("dates", directory, "train[10:20]", ["iso"])
    assert part.column("iso") == source.column("iso")[10:20]
    assert len(tfds_source("dates", str(directory), "validation", ["iso"])) == 1_000
    assert capfd.readouterr() == ("", "")


def test_processes_may_prepare_dates_at_once_and_say_nothing(tmp_path, capfd):
    code = (
        "import sys; from transformer_jax.data.sources import tfds_source; "
        "from transformer_jax.data.corpora import dates; "
        "dates.SIZES = dict.fromkeys(dates.SIZES, 2000); "
        "tfds_source('dates', sys.argv[1], 'test', ['iso'])"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(2)
    ]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert capfd.readouterr() == ("", "")


def test_dates_that_another_process_prepared_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(dates_module, "SIZES", dict.fromkeys(dates_module.SIZES, 500))
    prepare = dates_module.Dates.download_and_prepare

    def both(builder, *args, **kwargs):
        prepare(builder, *args, **kwargs)
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(dates_module.Dates, "download_and_prepare", both)
    assert len(tfds_source("dates", tmp_path, "test", ["iso"]))


def test_unknown_split(dates):
    with pytest.raises(
        DataError,
        match=(
            r"Cannot read split 'dev' of tfds dates in .*'train', 'validation', 'test'"
        ),
    ):
        tfds_source("dates", dates[0], "dev", ["iso"])
    with pytest.raises(
        DataError, match=r"It must be train \(\d+\) or .*, or a non-empty part of one"
    ):
        tfds_source("dates", dates[0], "train[:0]", ["iso"])


def test_no_room_for_the_text_of_a_tfds(dates, monkeypatch):
    def full_disk():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sources.tempfile, "TemporaryFile", full_disk)
    with pytest.raises(
        DataError,
        match=r"Cannot copy the text of tfds dates test to .*No space.* or set TMPDIR",
    ):
        tfds_source("dates", dates[0], "test", ["iso"])


def test_unknown_feature(dates):
    with pytest.raises(
        DataError, match=r"tfds dates has no text in de: choose from .*written"
    ):
        tfds_source("dates", dates[0], "train", ["iso", "de"])


def test_dates_cannot_be_prepared_in_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"Cannot prepare dates in .*file: .* Set data\.directory to an"
    ):
        tfds_source("dates", tmp_path / "file", "train", ["iso"])


@pytest.mark.parametrize("name", ["nonsense", "wmt14_translate/xx-yy", ""])
def test_unknown_name(name, tmp_path):
    with pytest.raises(
        DataError, match=rf"tfds cannot open '{name}' .* Set data\.name"
    ):
        tfds_source(name, tmp_path, "train", ["de", "en"])


def test_another_format_is_refused(dates, tmp_path):
    shutil.copytree(dates[0], tmp_path, dirs_exist_ok=True)
    info = tmp_path / "dates" / "1.0.0" / "dataset_info.json"
    content = json.loads(info.read_text())
    info.write_text(json.dumps({**content, "fileFormat": "tfrecord"}))
    with pytest.raises(DataError, match=r"as array_record: .*TFRECORD"):
        tfds_source("dates", tmp_path, "test", ["iso"])


def test_a_copy_that_is_not_whole(dates, tmp_path):
    shutil.copytree(dates[0], tmp_path, dirs_exist_ok=True)
    (shard,) = (tmp_path / "dates" / "1.0.0").glob("*test.array_record*")
    cut_off = shard.read_bytes()[:1000]
    for damage in (
        lambda: shard.write_bytes(cut_off),
        lambda: shard.write_bytes(b""),
        shard.unlink,
    ):
        damage()
        with pytest.raises(
            DataError,
            match=r"tfds dates test cannot be read: .* Copy its files again, or prep",
        ):
            tfds_source("dates", tmp_path, "test", ["iso"])
    info = tmp_path / "dates" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text()[:200])
    with pytest.raises(DataError, match=r"tfds cannot open 'dates' in .*"):
        tfds_source("dates", tmp_path, "test", ["iso"])


@pytest.mark.parametrize(
    ("name", "languages"),
    [
        ("wmt14_translate/de-en", ["de", "en"]),
        ("ted_hrlr_translate/pt_to_en", ["pt", "en"]),
        ("multi30k/en-de", ["en", "de"]),
    ],
)
def test_what_is_not_prepared_fails_at_once_and_says_how_to_prepare_it(
    name, languages, tmp_path
):
    start = time.perf_counter()
    with pytest.raises(DataError) as error:
        tfds_source(name, tmp_path, "train", languages)
    # without a network, a download gives up after 204 s
    assert time.perf_counter() - start < 20
    assert (
        f"{name} is not prepared in {tmp_path} (looked for {tmp_path}/{name}/1.0.0)"
        in str(error.value)
    )
    assert str(error.value).endswith(
        f"python scripts/prepare.py --name={name} --directory={tmp_path}"
    )
    assert not list(tmp_path.iterdir())


def test_prepared_data_of_others_are_read_as_bytes_or_text(tmp_path, monkeypatch):
    class Records(list):
        def __getitems__(self, keys):
            return [self[key] for key in keys]

    import tensorflow_datasets as tfds

    records = Records(
        [{"de": b"\xc3\xa4\n\nc\n", "en": "a"}, {"de": b"b", "en": b"\xff"}]
    )

    class Builder:
        info = type(
            "Info",
            (),
            {"features": {"de": tfds.features.Text(), "en": tfds.features.Text()}},
        )
        data_path = tmp_path

        def is_prepared(self):
            return True

        def as_data_source(self, split):
            return records

    monkeypatch.setattr(tfds, "builder", lambda *_, **__: Builder())
    assert tfds_source("anything", tmp_path, "train", ["de"]).column("de") == [
        "ä\n\nc\n",
        "b",
    ]
    with pytest.raises(
        DataError, match="tfds example anything train 1 en is not UTF-8"
    ):
        tfds_source("anything", tmp_path, "train", ["de", "en"])


def test_multi30k():
    data = real_data("multi30k") / "tok"
    source = parallel_files(data, "train", ["en", "de", "fr"])
    assert len(source) == 29_000
    assert source[0]["en"] == "two young , white males are outside near many bushes ."
