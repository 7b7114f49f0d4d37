"""Text is normalized and divided as SentencePiece and Marian do it, in every script
and form.
"""

import io
import itertools
import json
import random
import unicodedata

import pytest

from transformer_jax.data import sentencepiece, unigram

RULES = {
    "A": "a",
    "AE": "æ",
    "AEX": "<>",
    "\u00a0": " ",
    "\x01": "",
    "ﬁ": "fi",
    "😀": ":-)",
} | {
    "e\u0323": "ẹ",
    "e\u0323\u0302": "ệ",
}
TEXTS = [
    *(
        "Tiếng Việt là ngôn ngữ của người Việt. Xin chào!",
        "Một con mèo nhỏ đang ngủ trên ghế",
    ),
    *("한국어는 한국의 언어이다", "고양이가 의자에서 자고 있다"),
    *("हिन्दी भारत की भाषा है", "क़ ख़ ग़ ज़ ड़ ढ़ फ़ \u0915\u093c"),
    *(
        "اللغة العربية هي لغة",
        "ﷺ ﷲ ﻻ",
        "بِسْمِ اللَّهِ",
        "ภาษาไทยเป็นภาษา กำ",
        "עִבְרִית הִיא שָׂפָה \ufb2a\ufb3e",
    ),
    *(
        "👩\u200d👩\u200d👧\u200d👦 ❤\ufe0f 👍🏽 🇩🇪",
        "ﬁne ﬂow oﬃce ĳ ŀ ǆ",
        "Ｆｕｌｌ　ｗｉｄｔｈ １２３！",
    ),
    *(
        "ｶﾞｷﾞｸﾞ ﾊﾟﾋﾟ ｱｲｳ",
        "か\u3099は\u309aガ",
        "a\u0301\u0302\u0303 o\u0328\u0304 e\u0302\u0323 e\u0323\u0302",
    ),
    *(
        "q\u0307\u0323 d\u0323\u0307",
        "\u0378\ufdd0 \U0010fffe\ue000",
        "a\x00b\x01c\x07\x1f\x7f\x85d\u200b\u200c\u200d\ufeff",
    ),
    *(
        "a\u00a0b\u2003c\u3000d\u2028e\u2029f\tg\rh\ni\x0bj\x0ck",
        "  two  spaces \u3000 ",
        "▁ ▁a ▁▁ b▁",
        "",
        " ",
        "\u3000",
    ),
    *(
        "½ ² ℃ ㎏ ① Ⅻ ™ …",
        "İıſß ẞ Ǆ ΑΣΑΣ",
        "日本語 カタカナ 漢字 ㍿ 豈",
        "x</s><unk><pad>y <s>",
        "",
        " ",
        "\u3000",
    ),
]
RULE_NAMES = ["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "identity"]


def compiled(rules):
    """Return the character map of rules: a double array with a block of 256 places
    for the children of each node.
    """
    units, values, blocks = {0: 0}, b"", itertools.count(256, 256)
    pending = [(0, [(key.encode(), value.encode()) for key, value in rules.items()])]
    while pending:
        node, entries = pending.pop()
        first = next(blocks)
        units[node] |= (node ^ first) << 10
        for label, group in itertools.groupby(
            sorted(entries), lambda entry: entry[0][:1]
        ):
            if label:
                units[first ^ label[0]] = label[0]
                pending.append(
                    (first ^ label[0], [(key[1:], value) for key, value in group])
                )
            else:
                units[node] |= 1 << 8
                units[first] = len(values)
                values += next(group)[1] + b"\0"
    array = b"".join(
        units.get(place, 0).to_bytes(4, "little") for place in range(next(blocks))
    )
    return len(array).to_bytes(4, "little") + array + values


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("AAEAEX", "▁aæ<>"),
        ("e\u0323\u0302 e\u0323e\u0302", "▁ệ▁ẹe\u0302"),
        (" \x01 a\u00a0 \u00a0b \u00a0", "▁a▁b"),
        ("\u3000ﬁ😀\u3000", "▁\u3000fi:-)\u3000"),
        ("▁a▁", "▁▁a"),
        ("a\0b", "▁a\U0010ffffb"),
        ("\x01 ", ""),
    ],
)
def test_the_longest_rule_is_applied(text, normalized):
    normalize = unigram.Normalizer(compiled(RULES))
    assert normalize(text) == normalize.aligned(text)[0] == normalized


def test_each_character_of_the_result_has_its_place_in_the_text():
    text = " Ae\u0323\u0302  xﬁ"
    assert unigram.Normalizer(compiled(RULES)).aligned(text) == (
        "▁aệ▁xfi",
        [(1, 2), (1, 2), (2, 5), (5, 6), (7, 8), (8, 9), (8, 9)],
    )


def test_ids_stand_for_parts_of_the_text():
    pieces = sentencepiece.Pieces({"▁": -2.0, "ệ": -1.0, "fi": -1.0}, compiled(RULES))
    vocabulary = {
        token: i
        for i, token in enumerate(["</s>", "<unk>", "<pad>", ">>de<<", "▁", "ệ", "fi"])
    }
    tokenizer = sentencepiece.tokenizer(pieces, vocabulary)
    text = ">>de<< e\u0323\u0302zzﬁ"
    ids, starts, ends = tokenizer.spans([text])
    assert ids[0].tolist() == tokenizer.encode_batch([text])[0] == [3, 4, 5, 1, 6]
    parts = [text[start:end] for start, end in zip(starts[0], ends[0], strict=True)]
    assert parts == [">>de<<", "e\u0323\u0302", "e\u0323\u0302", "zz", "ﬁ"]


@pytest.fixture(scope="module", params=RULE_NAMES)
def trained(request, tmp_path_factory):
    """A model of SentencePiece in a file, and the same loaded by its own library."""
    library = pytest.importorskip(
        "sentencepiece", reason="pip install 'transformer_jax[huggingface]'"
    )
    content = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS if "\0" not in text] * 3),
        model_writer=content,
        vocab_size=400,
        hard_vocab_limit=False,
        character_coverage=0.98,
        normalization_rule_name=request.param,
        minloglevel=2,
        num_threads=1,
    )
    path = tmp_path_factory.mktemp("spm") / "source.spm"
    path.write_bytes(content.getvalue())
    return path, library.SentencePieceProcessor(model_file=str(path))


def forms(texts):
    """Return the texts as they are, and composed and decomposed."""
    return [
        *texts,
        *(
            unicodedata.normalize(form, text)
            for form in ("NFC", "NFD", "NFKD")
            for text in texts
        ),
    ]


def mixtures():
    """Return strings of random letters, combining characters, parts of Hangul and
    other characters.
    """
    draw = random.Random(0)
    letters, jamo = "aeioudqcơưâ  ▁", "".join(map(chr, range(0x1100, 0x1200)))
    points = [chr(i) for i in range(1, 0x30000) if not 0xD800 <= i < 0xE000]
    pools = (
        letters,
        letters,
        jamo,
        [point for point in points if unicodedata.combining(point)],
        points,
    )
    return [
        "".join(draw.choice(draw.choice(pools)) for _ in range(draw.randint(1, 9)))
        for _ in range(5_000)
    ]


def test_any_text_is_normalized_as_by_sentencepiece(trained):
    path, theirs = trained
    normalize = unigram.Normalizer(sentencepiece.read(path).character_map)
    texts = [text for text in [*forms(TEXTS), *mixtures()] if "\0" not in text]
    assert [normalize(text) for text in texts] == theirs.normalize(texts)
    assert [normalize.aligned(text)[0] for text in texts] == [
        normalize(text) for text in texts
    ]


def test_ids_of_any_text_are_those_of_sentencepiece(trained):
    """The vocabulary is that of the model in another order, with three pieces more
    and without some.
    """
    path, theirs = trained
    pieces = sentencepiece.read(path)
    absent = sorted(pieces.scores)[:40:4]
    tokens = [
        "</s>",
        "<unk>",
        *sorted(pieces.scores.keys() - set(absent)),
        "日本",
        "zz",
        ">>de<<",
        "<pad>",
    ]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    texts = [*forms(TEXTS), *mixtures()]
    expected = [
        [vocabulary.get(piece, 1) for piece in row]
        for row in theirs.encode(texts, out_type=str)
    ]
    tokenizer = sentencepiece.tokenizer(pieces, vocabulary)
    assert tokenizer.encode_batch(texts) == expected
    assert [row.tolist() for row in tokenizer.spans(texts)[0]] == expected
    assert any(1 in row for row in expected)


# a package that normalizes punctuation
@pytest.mark.filterwarnings("ignore:Recommended")
def test_ids_are_those_of_marian(trained, tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="pip install 'transformer_jax[huggingface]'"
    )
    path, theirs = trained
    pieces = [theirs.id_to_piece(i) for i in range(3, theirs.get_piece_size())]
    vocabulary = {
        token: i
        for i, token in enumerate(["</s>", "<unk>", *pieces, ">>de<<", "<pad>"])
    }
    for side in ("source", "target"):
        (tmp_path / f"{side}.spm").write_bytes(path.read_bytes())
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "marian"}))
    marian = transformers.MarianTokenizer.from_pretrained(tmp_path)
    texts = [
        text
        for text in forms(TEXTS)
        if "</s>" not in text and text.strip() and "\0" not in text
    ]
    texts += [">>de<< Tiếng Việt", ">>fr<<Một >>de<< con", " >>de<< mèo", "a >>de<< b"]
    expected = marian(texts, add_special_tokens=False)["input_ids"]
    assert sentencepiece.from_folder(tmp_path, "source").encode_batch(texts) == expected
