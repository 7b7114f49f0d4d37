"""A folder of Marian with its tokenizers: text is translated as in transformers."""

import itertools
import json
import shutil

import pytest

import transformer_jax
from helpers.parity import check_loads, need_transformers, random_model
from transformer_jax import conversion
from transformer_jax.workdir import read

transformers, torch = need_transformers()
sentencepiece = pytest.importorskip(
    "sentencepiece", reason="pip install 'transformer_jax[huggingface]'"
)

SIZES = {
    "d_model": 21,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 23,
    "decoder_ffn_dim": 23,
    "max_position_embeddings": 37,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
}
GENERATION = {
    "num_beams": 3,
    "max_length": 19,
    "length_penalty": 1.2,
    "early_stopping": True,
}
TEXT = {
    "source": [
        "the cat sees the dog",
        "a dog sees the cats",
        "the dogs see a cat",
        "cats and dogs",
        "a cat",
    ],
    "target": [
        "die Katze sieht den Hund",
        "ein Hund sieht Katzen",
        "Hunde sehen eine Katze",
        "Hund und Katze",
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, vocabulary = tmp_path_factory.mktemp("translation"), {"</s>": 0, "<unk>": 1}
    for side, lines in TEXT.items():
        with (folder / f"{side}.spm").open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines * 5),
                model_writer=file,
                vocab_size=41,
                hard_vocab_limit=False,
                minloglevel=2,
                num_threads=1,
            )
        model = sentencepiece.SentencePieceProcessor(
            model_file=str(folder / f"{side}.spm")
        )
        for i in range(3, model.get_piece_size()):
            vocabulary.setdefault(model.id_to_piece(i), len(vocabulary))
    vocabulary["<pad>"] = pad = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    ids = {"vocab_size": pad + 1, "pad_token_id": pad, "decoder_start_token_id": pad}
    theirs = random_model(
        transformers,
        torch,
        "MarianMTModel",
        transformers.MarianConfig(**SIZES | ids),
        0,
        folder,
    )
    theirs.generation_config.update(bad_words_ids=[[pad]], **GENERATION)
    theirs.generation_config.save_pretrained(folder)
    return folder


# a package that normalizes punctuation, which the tokenizer ignores
@pytest.mark.filterwarnings("ignore:Recommended")
def test_a_run_translates_as_transformers_does(folder, tmp_path):
    """The folder becomes a workdir, which becomes a folder again."""
    conversion.to_workdir(conversion.config_for(str(folder)), tmp_path / "run")
    lines = [*TEXT["source"], "the zoo", "dogs  see   cats and a cat"]
    predictor = transformer_jax.load(str(tmp_path / "run"))
    ours, target = predictor.predict(lines), predictor.task.corpus.tokenizers["target"]
    conversion.to_folder(
        tmp_path / "run", read(tmp_path / "run"), str(tmp_path / "back")
    )
    for theirs in folder, tmp_path / "back":
        tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
        model = check_loads(transformers, "MarianMTModel", theirs)
        output = model.generate(**tokenizer(lines, padding=True, return_tensors="pt"))
        special = {model.config.pad_token_id, model.config.eos_token_id}
        expected = [
            target.decode([i for i in row if i not in special])
            for row in output.tolist()
        ]
        assert ours == expected
    assert len(set(ours)) > 1


@pytest.mark.filterwarnings("ignore:Recommended")
def test_ctranslate2_translates_as_the_run_whose_folder_it_converts(folder, tmp_path):
    """Its decoder begins with zeros, so the row of the padding id must be zero."""
    ctranslate2 = pytest.importorskip("ctranslate2", reason="pip install ctranslate2")
    shutil.copytree(folder, tmp_path / "theirs")
    config = transformers.MarianConfig.from_pretrained(folder)
    model = random_model(
        transformers, torch, "MarianMTModel", config, 6, tmp_path / "theirs"
    )
    model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    with torch.no_grad():
        model.model.shared.weight.mul_(3)
        model.model.shared.weight[model.config.pad_token_id] = 0
        model.final_logits_bias[0, model.config.eos_token_id] += 6
    model.generation_config.length_penalty = 1.0
    model.save_pretrained(tmp_path / "theirs")
    run = tmp_path / "run"
    conversion.to_workdir(conversion.config_for(str(tmp_path / "theirs")), run)
    conversion.to_folder(run, read(run), str(tmp_path / "back"))
    converter = ctranslate2.converters.TransformersConverter(str(tmp_path / "back"))
    converter.convert(str(tmp_path / "ct2"))
    translator = ctranslate2.Translator(
        str(tmp_path / "ct2"), compute_type="float32", intra_threads=1
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    pieces = [
        tokenizer.convert_ids_to_tokens(ids)
        for ids in tokenizer(SENTENCES)["input_ids"]
    ]
    for beams in (1, 3):
        predictor = transformer_jax.load(str(run), {"decoding.beam_size": beams})
        results = translator.translate_batch(
            pieces,
            beam_size=beams,
            length_penalty=1.0,
            min_decoding_length=0,
            max_decoding_length=GENERATION["max_length"] - 2,
        )
        target = predictor.task.corpus.tokenizers["target"]
        expected = [
            target.decode(tokenizer.convert_tokens_to_ids(result.hypotheses[0]))
            for result in results
        ]
        assert predictor.predict(SENTENCES) == expected
        assert len(set(expected)) > 1


SENTENCES = [
    " ".join(words)
    for words in itertools.product(
        ("the", "a"), ("cat", "dog"), ("sees",), TEXT["source"]
    )
]


@pytest.mark.filterwarnings("ignore:Recommended")
@pytest.mark.parametrize(
    "settings",
    [
        {"renormalize_logits": True, "num_beams": 6},
        {"no_repeat_ngram_size": 2, "min_length": 5},
    ],
)
def test_settings_of_generate_come_from_the_folder(folder, settings, tmp_path):
    shutil.copytree(folder, tmp_path / "theirs")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.MarianMTModel.from_pretrained(folder)
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    plain = model.generate(**inputs)
    model.generation_config.update(**settings)
    model.generation_config.save_pretrained(tmp_path / "theirs")
    conversion.to_workdir(
        conversion.config_for(str(tmp_path / "theirs")), tmp_path / "run"
    )
    predictor = transformer_jax.load(str(tmp_path / "run"))
    ours, target = (
        predictor.predict(SENTENCES),
        predictor.task.corpus.tokenizers["target"],
    )
    special = {model.config.pad_token_id, model.config.eos_token_id}

    def texts(output):
        return [
            target.decode([i for i in row if i not in special])
            for row in output.tolist()
        ]

    assert ours == texts(model.generate(**inputs))
    assert ours != texts(plain)
