"""Streams whose positions are vectors: frames of sound and cells of images."""

import json
import tracemalloc

import numpy as np
import pytest

from transformer_jax.data.batching import Batch, padded_arrays
from transformer_jax.data.files import DataError
from transformer_jax.data.sound import Sounds, log_mel
from transformer_jax.data.streams import Frames, Grid, Image, Tokens
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError

GRID = Grid("image", (4, 6, 1), cell=2)
IMAGE = np.arange(24, dtype=np.uint8).reshape(4, 6)


def test_cells_come_in_reading_order_and_pixels_as_shares_of_255():
    rows = GRID.encode([IMAGE])
    cells = rows[0] * 255
    assert cells.dtype == np.float32
    expected = [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11], [12, 13, 18, 19]]
    np.testing.assert_allclose(cells[:4], expected, rtol=1e-6)
    assert GRID.limit == rows.lengths[0] == len(cells) == 6
    words = "6 cells, from input.grid_shape = (4, 6, 1) and input.cell_size = 2"
    assert GRID.limit_words == words
    labels, text = GRID.shown(rows[0])
    assert labels == ["1,1", "1,2", "1,3", "2,1", "2,2", "2,3"]
    assert text == ""


def test_channels_of_a_cell_stay_together():
    grid = np.random.default_rng(0).normal(size=(2, 3, 5))
    rows = Grid("features", (2, 3, 5), cell=1).encode([grid])
    np.testing.assert_allclose(rows[0], grid.reshape(6, 5), rtol=1e-6)


def test_an_image_may_be_an_array_a_list_json_or_a_file(tmp_path):
    np.save(tmp_path / "image.npy", IMAGE)
    whole = GRID.encode([IMAGE.astype(float)])
    for entry in (IMAGE.tolist(), json.dumps(IMAGE.tolist())):
        np.testing.assert_array_equal(GRID.encode([entry]).values, whole.values)
    file = GRID.encode([str(tmp_path / "image.npy")])
    np.testing.assert_array_equal(file.values, GRID.encode([IMAGE]).values)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (IMAGE.T, r"image 2: has the shape \(6, 4\): must be input.grid_shape = \(4, "),
        ("[[1, 2], [3]]", "image 2: "),
        ("[[1, 2", "image 2: "),
        ("[" * 100_000, "image 2: "),
        ("no such file", "image 2: .*No such file"),
        ("", r"image 2: .* cannot be read as \.npy"),
        ("/dev/null", r"image 2: .* cannot be read as \.npy"),
        ([["a"] * 6] * 4, "image 2: could not convert"),
    ],
)
def test_what_is_no_image_is_refused_with_its_number(entry, message):
    with pytest.raises(DataError, match=message):
        GRID.encode([IMAGE, entry])


def test_frames_are_stacked_windows():
    frames = Frames("file", rate=8000, bands=5, stacked=3, limit=64)
    samples = np.random.default_rng(0).normal(size=800)
    windows = log_mel(samples, 8000, 5)
    assert len(windows) == 8
    rows = frames.encode([samples, samples[:200]])
    assert rows.lengths.tolist() == [3, 1]
    stacked = np.concatenate([windows, np.zeros((1, 5))]).reshape(3, 15)
    np.testing.assert_array_equal(rows[0], stacked.astype(np.float32))
    assert frames.shown(rows[0]) == (["0.00 s", "0.03 s", "0.06 s"], "")


def test_vectors_are_padded_with_zeros():
    rows = GRID.encode([IMAGE, IMAGE + 1])
    batch = Batch(0, np.array([1, -1, 0]), (8,))
    arrays = padded_arrays({"source": rows}, {}, batch)
    assert arrays["source"].shape == (3, 8, 4)
    assert arrays["source"].dtype == np.float32
    assert arrays["source_length"].tolist() == [6, 0, 6]
    np.testing.assert_array_equal(arrays["source"][0, :6], rows[1])
    assert not arrays["source"][0, 6:].any()
    assert not arrays["source"][1].any()


def test_rows_of_a_column_do_not_lie_in_memory_twice():
    drawn = np.random.default_rng(0).normal(size=(4, 6))

    class Images:
        def __len__(self):
            return 4000

        def __getitem__(self, i):
            return drawn + i

    tracemalloc.start()
    rows = GRID.encode(Images())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.3 * rows.values.nbytes
    assert rows.values.shape == (4000 * 6, 4)
    assert rows.lengths.tolist() == [6] * 4000
    for i in (0, 1, 1999, 3999):
        np.testing.assert_array_equal(rows[i], GRID.encode([drawn + i]).values)


@pytest.mark.parametrize("stream", [GRID, Frames("file", 8000, 5, 3, 64)])
def test_a_dummy_batch_has_the_features_of_a_real_one(stream):
    dummy = stream.dummy(np.random.default_rng(0), np.array([2, 5]), 5)
    assert dummy.shape == (2, 5, stream.features)
    assert dummy.dtype == np.float32
    assert not dummy[0, 2:].any()
    assert dummy[0, :2].all()


@pytest.mark.parametrize("vocab_size", [3, 4, 5, 100])
def test_dummy_ids_are_in_the_vocabulary(vocab_size):
    stream = Tokens("text", "tokenizer.json", vocab_size, "model.vocab_size")
    dummy = stream.dummy(np.random.default_rng(0), np.array([2, 50]), 50)
    assert dummy.max() < vocab_size
    assert dummy[0, :3].tolist() == [dummy[0, 0], 2, 0]


WORDS = Tokenizer(
    json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "model": {
                "type": "WordLevel",
                "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "xx": 4},
                "unk_token": "a",
            },
            "pre_tokenizer": {"type": "WhitespaceSplit"},
        }
    ),
    {"bos_id": 0, "eos_id": 1},
)


def framed(*frame):
    name = "tokenizer.json"
    return Tokens("text", name, 5, "model.vocab_size", lambda: WORDS, frame=frame)


@pytest.mark.parametrize(
    ("frame", "row", "begin"),
    [
        ((), [2, 3, 1], 0),
        (("<s>", ""), [0, 2, 3, 1], 0),
        (("", "xx"), [2, 3, 1, 4], 4),
        (("xx", ""), [4, 2, 3, 1], 0),
    ],
)
def test_tokens_around_a_text(frame, row, begin):
    stream = framed(*frame)
    rows = stream.encode(["a b", ""])
    assert rows[0].tolist() == row
    assert len(rows[1]) == stream.added(False, True) == len(row) - 2
    assert stream.encode(["a b"], end=False)[0].tolist() == [2, 3]
    assert stream.added(False, False) == 0
    # a longer row keeps what follows the text
    kept = rows.cut(len(row) - 1, end=stream.closing)
    assert kept[0].tolist() == [i for i in row if i != 3]
    assert stream.text(np.array(row)) == "a b"
    assert stream.special_ids == (begin, 1, None)
    dummy = stream.dummy(np.random.default_rng(0), np.array([4]), 4)
    assert not any(
        fault.any() for fault in stream.faults(dummy, np.array([4])).values()
    )
    faults = stream.faults(np.array([[1, 1, 2, 2]]), np.array([4]))
    assert faults["does not end in EOS"].all()


def test_a_token_that_the_tokenizer_lacks_is_refused():
    with pytest.raises(TokenizerError, match="has no token 'yy', which should be bef"):
        framed("", "yy").encode(["a"])


def test_a_sound_of_a_table_that_cannot_be_read_is_refused_with_its_number(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    column = Sounds(["a.wav"], tmp_path, 8000)
    with pytest.raises(DataError, match=r"file 1: .*a\.wav cannot be read as WAV"):
        Frames("file", 8000, 5, 3, 64).encode(column)


PICTURE = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)


def test_a_photograph_is_one_position_of_bytes():
    stream = Image("image", (4, 6))
    rows = stream.encode([PICTURE, PICTURE + 1])
    assert rows.lengths.tolist() == [1, 1]
    np.testing.assert_array_equal(rows[1], PICTURE[None] + 1)
    np.testing.assert_array_equal(stream.picture(rows[0]), PICTURE)
    assert stream.shown(rows[0]) == (["4 × 6 pixels"], "")
    batch = Batch(0, np.array([1, -1]), (1,))
    arrays = padded_arrays({"source": rows}, {}, batch)
    dummy = stream.dummy(np.random.default_rng(0), np.array([1, 1]), 1)
    for found in (arrays["source"], dummy):
        assert (found.dtype, found.shape) == (np.uint8, (2, 1, 4, 6, 3))
    assert arrays["source_length"].tolist() == [1, 0]
    assert not arrays["source"][1].any()


@pytest.mark.parametrize("entry", [PICTURE[:3], PICTURE / 255, PICTURE[..., :1]])
def test_an_array_that_is_no_photograph_is_refused(entry):
    with pytest.raises(
        DataError, match=r"image 1: has the shape .*: must be \(4, 6, 3\)"
    ):
        Image("image", (4, 6)).encode([entry])


def test_a_blind_model_reads_zeros_of_the_same_lengths():
    for stream, entry in (
        (Image("image", (4, 6), blind=True), PICTURE),
        (Grid("image", (4, 6, 1), cell=2, blind=True), IMAGE + 1),
    ):
        rows = stream.encode([entry, entry])
        assert not rows.values.any()
        assert rows.values.shape[1:] == stream.trailing
        assert rows.lengths.tolist() == [stream.limit] * 2
    with pytest.raises(DataError):
        Image("image", (4, 6), blind=True).encode(["missing.png"])


def test_a_sound_is_cut_one_position_beyond_the_limit_before_it_is_encoded():
    """So it is still too long, and an hour of sound needs little memory."""
    frames = Frames("file", rate=8000, bands=5, stacked=3, limit=7)
    draw = np.random.default_rng(0)
    sound = draw.integers(-1000, 1000, 80_000).astype(np.int16)
    assert len(frames.vectors(sound)) == 8
    shorter = frames.vectors(sound[: 200 + 7 * 3 * 80 - 1])
    assert len(shorter) == 7


def test_a_sound_without_samples_is_empty_and_silence_is_not():
    frames = Frames("file", rate=8000, bands=5, stacked=3, limit=7)
    assert frames.vectors(np.zeros(0, np.int16)).shape == (0, 15)
    silence = frames.vectors(np.zeros(800, np.int16))
    assert silence.shape == (3, 15)
    assert not silence.any()


def test_a_sound_of_several_channels_is_refused():
    frames = Frames("file", rate=8000, bands=5, stacked=3, limit=7)
    with pytest.raises(ValueError, match=r"file 1: has the shape \(9, 2\): must be"):
        frames.encode([np.zeros((9, 2))])
