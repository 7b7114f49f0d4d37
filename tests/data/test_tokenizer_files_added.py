"""Tokens that a Hugging Face folder adds, and its spaces before a text, give the ids
of transformers.
"""

import json
import shutil

import pytest
import tokenizers
from tokenizers import AddedToken

from transformer_jax.data import sentencepiece, tokenizer_files
from transformer_jax.data.tokenizers import TokenizerError
from transformer_jax.files import write_all

WORDS = [
    "a new dog",
    "the two dogs see a cat",
    "New words, newwords and a line",
    "norm Norm NORM it",
] * 5
ADDED = [
    AddedToken("<new>"),
    AddedToken("newword", single_word=True),
    AddedToken("[L]", lstrip=True, normalized=False),
    AddedToken("[R]", rstrip=True),
    AddedToken("[S]", single_word=True, lstrip=True, rstrip=True),
    AddedToken("Norm", normalized=True),
    AddedToken("RAW", normalized=False),
    AddedToken("<sp>", special=True),
]
TEXTS = [
    *(
        "a <new> dog",
        "a<new>dog",
        "A <NEW> dog",
        " <new>  x ",
        "<new>",
        "newword newwords newword.",
    ),
    *(
        "a  [L]  b",
        "a  [R]  b",
        "a[S]b [S] c",
        "norm NORM RAW raw RAWs",
        "two  spaces",
        " lead",
        "\nline\n",
        " ",
        "",
    ),
]
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip(
        "transformers", reason="pip install 'transformer_jax[huggingface]'"
    )


def made(library, kind, folder):
    """Return a tokenizer of transformers with a vocabulary of its own."""
    options = {"vocab_size": 400, "show_progress": False}
    if kind == "bert":
        words = tokenizers.BertWordPieceTokenizer(lowercase=True)
        words.train_from_iterator(WORDS, **options)
        words.save_model(str(folder))
        return library.BertTokenizer.from_pretrained(folder)
    if kind == "gpt2":
        pairs = tokenizers.ByteLevelBPETokenizer()
        pairs.train_from_iterator(WORDS, special_tokens=["<|endoftext|>"], **options)
        pairs.save_model(str(folder))
        return library.GPT2Tokenizer.from_pretrained(folder)
    spaced = tokenizers.SentencePieceBPETokenizer()
    spaced.train_from_iterator(
        WORDS, special_tokens=["<unk>", "<s>", "</s>"], **options
    )
    model = json.loads(spaced.to_str())["model"]
    return library.LlamaTokenizer(
        vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]]
    )


@pytest.fixture(scope="module", params=["bert", "gpt2", "llama"])
def folders(request, library, tmp_path_factory):
    """Folders of one tokenizer, as `save_pretrained` writes them: without and with
    the added tokens.
    """
    base = tmp_path_factory.mktemp(request.param)
    tokenizer = made(library, request.param, base)
    tokenizer.save_pretrained(base / "plain")
    for token in ADDED:
        tokenizer.add_tokens([token], special_tokens=token.special)
    tokenizer.save_pretrained(base / "added")
    return base


def change(folder, name, **values):
    path = folder / name
    path.write_text(
        json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values)
    )


def added_by(folder):
    """Return the added tokens of a tokenizer.json by their ids."""
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return {token.pop("id"): token for token in tokens}


def check(library, folder):
    theirs = library.AutoTokenizer.from_pretrained(folder)
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert tokenizer_files.from_folder(folder).encode_batch(TEXTS) == expected
    return expected


def test_tokens_in_tokenizer_json(library, folders):
    assert check(library, folders / "added") != check(library, folders / "plain")


@pytest.mark.parametrize("settings", [{}, GENERIC])
def test_tokens_in_tokenizer_config(library, folders, tmp_path, settings):
    folder = shutil.copytree(folders / "plain", tmp_path / "folder")
    change(
        folder,
        "tokenizer_config.json",
        added_tokens_decoder=added_by(folders / "added"),
        **settings,
    )
    assert check(library, folder) == check(library, folders / "added")


def test_tokens_in_added_tokens(library, folders, tmp_path):
    folder = shutil.copytree(folders / "plain", tmp_path / "folder")
    before, after = (added_by(folders / name) for name in ("plain", "added"))
    change(
        folder,
        "added_tokens.json",
        **{token["content"]: i for i, token in after.items() if i not in before},
    )
    change(folder, "special_tokens_map.json", additional_special_tokens=["<sp>"])
    assert check(library, folder) != check(library, folders / "plain")


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("settings", [{}, GENERIC])
def test_a_space_before_the_text(library, folders, tmp_path, prefix, settings):
    """A generic class leaves this to tokenizer.json."""
    folder = shutil.copytree(folders / "added", tmp_path / "folder")
    change(folder, "tokenizer_config.json", add_prefix_space=prefix, **settings)
    check(library, folder)


def test_a_space_is_neither_put_before_the_text_nor_taken_from_it(tmp_path):
    """The layout of Llama 2: a normalizer puts the space, and the decoder removes
    it.
    """
    model = tokenizers.models.BPE(
        {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3}, [("▁", "a")], unk_token="<unk>"
    )
    whole = tokenizers.Tokenizer(model)
    steps = [
        tokenizers.normalizers.Prepend("▁"),
        tokenizers.normalizers.Replace(" ", "▁"),
    ]
    whole.normalizer = tokenizers.normalizers.Sequence(steps)
    whole.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    whole.save(str(tmp_path / "tokenizer.json"))
    change(tmp_path, "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    tokenizer = tokenizer_files.from_folder(tmp_path)
    assert (tokenizer.encode_batch(["a a"]), tokenizer.decode([3, 3])) == (
        [[3, 3]],
        "a a",
    )
    change(tmp_path, "tokenizer_config.json", add_prefix_space=False)
    tokenizer = tokenizer_files.from_folder(tmp_path)
    assert (tokenizer.encode_batch(["a a"]), tokenizer.decode([3, 3])) == (
        [[2, 3]],
        " a a",
    )


@pytest.mark.parametrize(("prefix", "ids"), [(True, [3, 3]), (False, [2, 3])])
def test_a_tokenizer_json_that_older_versions_wrote(prefix, ids, tmp_path):
    """They named the space before a text "add_prefix_space", and not
    "prepend_scheme".
    """
    model = tokenizers.models.BPE(
        {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3}, [("▁", "a")], unk_token="<unk>"
    )
    whole = json.loads(tokenizers.Tokenizer(model).to_str())
    spaced = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(whole | {"pre_tokenizer": spaced, "decoder": spaced})
    )
    change(
        tmp_path,
        "tokenizer_config.json",
        tokenizer_class="LlamaTokenizer",
        add_prefix_space=prefix,
    )
    assert tokenizer_files.from_folder(tmp_path).encode_batch(["a a"]) == [ids]


def test_a_damaged_tokenizer_json_is_refused(tmp_path):
    whole = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"pre_tokenizer": [1]}))
    change(
        tmp_path,
        "tokenizer_config.json",
        tokenizer_class="LlamaTokenizer",
        add_prefix_space=False,
    )
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json: .* Copy the folder again"
    ):
        tokenizer_files.from_folder(tmp_path)


def test_added_tokens_with_other_ids_are_refused(folders, tmp_path):
    folder = shutil.copytree(folders / "plain", tmp_path / "folder")
    change(
        folder, "tokenizer_config.json", added_tokens_decoder={7: {"content": "<new>"}}
    )
    with pytest.raises(
        TokenizerError,
        match=r"gives the added token '<new>' the id 7, but in the vocabulary it has",
    ):
        tokenizer_files.from_folder(folder)


def test_tokens_that_marian_has_beyond_its_vocabulary_are_refused(tmp_path):
    vocabulary = {"</s>": 0, "<unk>": 1, "▁a": 2, "<pad>": 3}
    tokenizer = sentencepiece.tokenizer(
        sentencepiece.Pieces({"▁a": -1.0}, b""), vocabulary
    )
    write_all(tmp_path, sentencepiece.contents(tokenizer, tokenizer, 37))
    (tmp_path / "config.json").write_text("{}")
    change(
        tmp_path,
        "tokenizer_config.json",
        added_tokens_decoder={"3": {"content": "<pad>", "special": True}},
    )
    assert sentencepiece.from_folder(tmp_path, "source").encode_batch(["a"]) == [[2]]
    change(
        tmp_path,
        "tokenizer_config.json",
        added_tokens_decoder={"4": {"content": "<new>"}},
    )
    with pytest.raises(
        TokenizerError, match=r"adds the token '<new>', which vocab.json lacks"
    ):
        sentencepiece.from_folder(tmp_path, "source")
