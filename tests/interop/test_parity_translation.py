"""A folder of Marian with its tokenizers: text is translated as in transformers."""

import json

import jax
import numpy as np
import pytest
from parity import need_transformers, random_model

from transformer_jax import transfer
from transformer_jax.config import defaults, make_task, parse
from transformer_jax.interop import huggingface
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.initialization import abstract_parameters
from transformer_jax.training.sharding import make_mesh

transformers, torch = need_transformers()
sentencepiece = pytest.importorskip("sentencepiece", reason="pip install 'transformer_jax[huggingface]'")

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
GENERATION = {"num_beams": 3, "max_length": 19, "length_penalty": 1.2, "early_stopping": True}
TEXT = {
    "source": ["the cat sees the dog", "a dog sees the cats", "the dogs see a cat", "cats and dogs", "a cat"],
    "target": ["die Katze sieht den Hund", "ein Hund sieht Katzen", "Hunde sehen eine Katze", "Hund und Katze"],
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
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        for i in range(3, model.get_piece_size()):
            vocabulary.setdefault(model.id_to_piece(i), len(vocabulary))
    vocabulary["<pad>"] = pad = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    ids = {"vocab_size": pad + 1, "pad_token_id": pad, "decoder_start_token_id": pad}
    theirs = random_model(transformers, torch, "MarianMTModel", transformers.MarianConfig(**SIZES | ids), 0, folder)
    theirs.generation_config.update(bad_words_ids=[[pad]], **GENERATION)
    theirs.generation_config.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:Recommended")  # a package that normalizes punctuation, which the tokenizer ignores
def test_a_run_translates_as_transformers_does(folder, tmp_path):
    _, outputs, fields = huggingface.describe(folder)
    config = defaults("sequence_to_sequence")
    config.update_from_flattened_dict({f"model.{name}": value for name, value in fields.items()})
    config.update_from_flattened_dict(dict(outputs.settings))
    config.init_from, config.data.directory, config.data.joint_tokenizer = str(folder), "unused", False
    config.data.max_length = 32
    (tmp_path / "run").mkdir()
    task = make_task(parse(config), tmp_path / "run")
    mesh = make_mesh(task.config.mesh)
    fresh = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_parameters(task, mesh))
    fresh = jax.device_put(fresh, jax.devices()[0])
    params = transfer.load(task, mesh)(fresh)
    lines = [*TEXT["source"], "the zoo", "dogs  see   cats and a cat"]
    ours = Evaluator(task, mesh).predict(params, [{"en": line} for line in lines])

    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    theirs = transformers.MarianMTModel.from_pretrained(folder).eval()
    output = theirs.generate(**tokenizer(lines, padding=True, return_tensors="pt"))
    special = {theirs.config.pad_token_id, theirs.config.eos_token_id}
    target = task.corpus.tokenizers["target"]
    expected = [target.decode([i for i in row if i not in special]) for row in output.tolist()]
    assert [line["text"] for line in ours] == expected
    assert len(set(expected)) > 1
