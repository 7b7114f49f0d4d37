"""Photographs in any file become RGB bytes of one size, or a message."""

import io
import re
import struct
import zipfile
import zlib

import numpy as np
import pytest

from transformer_jax.data.files import DataError
from transformer_jax.data.photographs import (
    MOST_PIXELS,
    photograph,
    photographs_of,
    photographs_table,
    read_photograph,
)
from transformer_jax.data.sources import Source, held
from transformer_jax.errors import UserError

Image = pytest.importorskip("PIL.Image")

RED = (255, 0, 0)
SIZE = (4, 6)


def content(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def halves(mode, left, right):
    """Return a picture of 6×4 pixels whose halves have two colours."""
    image = Image.new(mode, (6, 4), right)
    image.paste(left, (0, 0, 3, 4))
    return image


def colours(pixels):
    """Return the colours of the two halves."""
    assert pixels.shape == (4, 6, 3)
    assert pixels.dtype == np.uint8
    return tuple(pixels[0, 0]), tuple(pixels[-1, -1])


def palette(**options):
    image = halves("RGB", RED, (0, 0, 255)).convert("P", palette=Image.Palette.ADAPTIVE)
    return content(image, "GIF", **options)


def first_of_two():
    one, other = halves("RGB", RED, (0, 0, 255)), Image.new("RGB", (6, 4), "green")
    return content(one, "GIF", save_all=True, append_images=[other])


@pytest.mark.parametrize(
    ("file", "left", "right"),
    [
        (content(halves("RGB", RED, (0, 9, 0))), RED, (0, 9, 0)),
        # transparent red is white, half of it is pink
        (
            content(halves("RGBA", (*RED, 0), (*RED, 128))),
            (255, 255, 255),
            (255, 127, 127),
        ),
        (content(halves("LA", (7, 255), (7, 0))), (7, 7, 7), (255, 255, 255)),
        (content(halves("L", 7, 9)), (7, 7, 7), (9, 9, 9)),
        (content(halves("1", 0, 1)), (0, 0, 0), (255, 255, 255)),
        (palette(), RED, (0, 0, 255)),
        (palette(transparency=0), None, (255, 255, 255)),
        (first_of_two(), RED, (0, 0, 255)),
        (
            content(halves("CMYK", (0, 255, 255, 0), (0, 0, 0, 255)), "TIFF"),
            RED,
            (0,) * 3,
        ),
    ],
    ids=["rgb", "rgba", "la", "grey", "bits", "palette", "clear", "frames", "cmyk"],
)
def test_every_mode_becomes_rgb_on_white(file, left, right):
    found_left, found_right = colours(photograph(file, SIZE))
    if left is None:  # one of the two colours of the palette is transparent
        assert (255, 255, 255) in (found_left, found_right)
    else:
        assert found_left == left
        np.testing.assert_allclose(found_right, right, atol=1)


def test_a_cmyk_jpeg_is_read():
    file = content(halves("CMYK", (0, 255, 255, 0), (0, 0, 0, 255)), "JPEG", quality=95)
    left, right = colours(photograph(file, SIZE))
    np.testing.assert_allclose(left, RED, atol=30)
    np.testing.assert_allclose(right, 0, atol=30)


def test_the_orientation_of_the_camera_is_applied():
    """Orientation 3 is upside down, 6 lies on its side."""
    image = halves("RGB", RED, (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = content(image, exif=exif)
    assert colours(photograph(turned, SIZE)) == ((0, 0, 255), RED)
    exif[0x0112] = 6
    upright = photograph(content(image, exif=exif), (6, 4))
    assert (upright[:3] == RED).all()
    assert (upright[3:] == (0, 0, 255)).all()


def test_another_size_is_scaled():
    image = Image.new("RGB", (1, 1), RED)
    assert (photograph(content(image), SIZE) == RED).all()
    large = halves("RGB", RED, (0, 0, 255)).resize((60, 40), Image.Resampling.NEAREST)
    left, right = colours(photograph(content(large), SIZE))
    np.testing.assert_allclose(left, RED, atol=3)
    np.testing.assert_allclose(right, (0, 0, 255), atol=3)


def header(width, height):
    """Return the start of a PNG file of this size, without any pixels."""
    small = content(Image.new("L", (1, 1)))
    head = small[8:33]  # length, IHDR, 13 bytes, checksum
    body = b"IHDR" + struct.pack(">II", width, height) + head[16:21]
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return small[:8] + chunk + small[33:]


def deep_png():
    """Return a PNG file of one pixel with 16 bits in each of three channels."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(7))),
        (b"IEND", b""),
    ]
    file = b"\x89PNG\r\n\x1a\n"
    for kind, body in chunks:
        checksum = struct.pack(">I", zlib.crc32(kind + body))
        file += struct.pack(">I", len(body)) + kind + body + checksum
    return file


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (header(20_000, 20_000), "has more than 67,108,864 pixels: scale it down"),
        (header(9_000, 9_000), "is 9000 × 9000, but has more than 67,108,864 pixels"),
        (header(10_000, 10_000), "is 10000 × 10000, but has more than"),
        (
            content(Image.effect_noise((64, 64), 50), "JPEG")[:900],
            "cannot be read as a picture: image file is truncated",
        ),
        (b"", "cannot be read as a picture: cannot identify image file. Copy it"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "cannot be read as a picture: cannot identify"),
        (content(halves("RGB", RED, RED))[:50], "cannot be read as a picture"),
        (
            content(Image.new("I;16", (6, 4), 40_000)),
            "has more than 8 bits in a channel: convert it to 8 bits",
        ),
        (deep_png(), "has more than 8 bits in a channel: convert it to 8 bits"),
        (b"P6 2 1 65535 " + bytes(12), "has more than 8 bits in a channel"),
    ],
)
def test_what_cannot_be_read_is_refused(file, message):
    assert MOST_PIXELS == 67_108_864
    with pytest.raises(DataError, match=message):
        photograph(file, SIZE)


def test_messages_name_the_file(tmp_path):
    with pytest.raises(
        DataError, match=re.escape(f"{tmp_path}/a.png cannot be read: N")
    ):
        read_photograph(tmp_path / "a.png", SIZE)
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(
        DataError, match=re.escape(f"{tmp_path}/a.png cannot be read as")
    ):
        read_photograph(tmp_path / "a.png", SIZE)


NAMES = ("a.png", "more/b.png")


def write(folder, zipped):
    files = {
        name: content(halves("RGB", RED, (i, i, i))) for i, name in enumerate(NAMES)
    }
    if zipped:
        with zipfile.ZipFile(folder / "test.zip", "w") as archive:
            for name, file in files.items():
                archive.writestr(name, file)
        return
    (folder / "more").mkdir()
    for name, file in files.items():
        (folder / name).write_bytes(file)


def named(folder, names):
    table = Source({"image": held(names)}, "captions.tsv", lines=[7, 12, 17])
    return photographs_of(folder, "test", table, "image", SIZE)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_table_names_files_of_an_archive_or_of_the_folder(tmp_path, zipped):
    write(tmp_path, zipped)
    column = named(tmp_path, NAMES)
    assert len(column) == 2
    assert [colours(pixels)[1] for pixels in column] == [(0, 0, 0), (1, 1, 1)]
    (second,) = column.part(1, 2)
    np.testing.assert_array_equal(second, column[1])
    assert b"".join(column.blocks()) != b"".join(column.part(0, 1).blocks())


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("c.png", "captions.tsv:12: there is no image 'c.png' in "),
        ("more", "captions.tsv:12: there is no image 'more' in "),
        ("../a.png", "captions.tsv:12: image = '../a.png' leads out of the folder"),
        ("more/../../a.png", "captions.tsv:12: .* leads out of the folder"),
        ("/etc/passwd", "captions.tsv:12: .* leads out of the folder"),
        ("..\\a.png", "captions.tsv:12: .* leads out of the folder"),
        ("C:\\a.png", "captions.tsv:12: .* leads out of the folder"),
        ("gs://b/a.png", "captions.tsv:12: .* leads out of the folder"),
        ("", "captions.tsv:12: .* leads out of the folder"),
    ],
)
def test_names_of_no_file_in_the_folder_are_refused(tmp_path, zipped, name, message):
    write(tmp_path, zipped)
    if zipped:  # an archive may have such a name
        with zipfile.ZipFile(tmp_path / "test.zip", "a") as archive:
            archive.writestr("../a.png", b"x")
    with pytest.raises(DataError, match=message):
        named(tmp_path, ["a.png", name])


@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_picture_is_named_with_its_line(tmp_path, zipped):
    if zipped:
        with zipfile.ZipFile(tmp_path / "test.zip", "w") as archive:
            archive.writestr("a.png", b"no picture")
    else:
        (tmp_path / "a.png").write_bytes(b"no picture")
    column = named(tmp_path, ["a.png"])
    with pytest.raises(
        DataError, match=r"captions.tsv:7: a.png cannot be read as a pic"
    ):
        column[0]


def test_a_damaged_archive_is_refused(tmp_path):
    write(tmp_path, zipped=True)
    file = tmp_path / "test.zip"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[60] ^= 255
    file.write_bytes(flipped)
    with pytest.raises(
        DataError, match=r"captions.tsv:7: a.png in .*test.zip is damaged"
    ):
        named(tmp_path, ["a.png"])[0]
    file.write_bytes(whole[:-30])
    with pytest.raises(DataError, match=r"test.zip cannot be read as a zip file"):
        named(tmp_path, ["a.png"])


def test_a_table_of_a_split_names_pictures(tmp_path):
    write(tmp_path, zipped=True)
    lines = ["image\ttext", *(f"{name}\tx" for name in NAMES)]
    (tmp_path / "test.tsv").write_text("\n".join(lines) + "\n")
    table = photographs_table(tmp_path, "test[1:]", ("image", "text"), SIZE)
    assert colours(table.column("image")[0])[1] == (1, 1, 1)


def test_without_pillow_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(UserError, match=re.escape("-e '.[images]'")):
        photograph(b"", SIZE)
