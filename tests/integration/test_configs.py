"""Every recipe, shrunk, trains, is evaluated and predicts.

New files in configs/ are tested automatically.
"""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest

import transformer_jax
from helpers import ROOT, modalities
from helpers.closed_forms import num_parameters
from helpers.corpus import put_before, write_corpus
from helpers.papers import GPT, TABLE_3
from helpers.runs import get_config, other_than, rows, run, shrink
from transformer_jax.config import ConfigError, parse
from transformer_jax.data.corpora.text_to_text import TASKS
from transformer_jax.data.languages import languages_of, mark_of
from transformer_jax.data.mixture import weights_of
from transformer_jax.models.t5 import dropout
from transformer_jax.models.transformer import TransformerConfig
from transformer_jax.tasks import task_class

ARGUMENTS = {
    "bert": ["mini", "large,ltr"],
    "finetune": [
        *("task=sick", "task=stsb", "task=swag", "task=squad2", "task=wnut17"),
        *("model=gpt,task=stsb", "model=gpt,task=swag"),
    ],
    "denoising": ["objective=span_corruption", "objective=text_infilling"],
    "electra": ["mini"],
    "captions": ["blind", "photographs", "transformer,photographs"],
    "dates": [""],
    "digits": ["transformer"],
    "gpt": ["", "shakespeare-cpu-long", "llama-tiny", "lstm", "mini", "gpt2-small"],
    "languages": ["recurrent", "pivot,decoders=each"],
    "multi30k": [
        "de-en,size=small,relative",
        "en-de,quick,positions=rotary,wordpiece",
        "annotated",
    ],
    "rnn": ["none,lstm,reversed"],
    "word_vectors": ["task=sick"],
    "t5": ["mini", "small"],
    "text_to_text": ["pretrain", ""],
    "speech": ["model=ctc", "model=joint", "model=las,data=words"],
    "wmt14": ["big,norm=pre,en-fr"],
}
# counted and not trained, see tests/baselines/test_counted.py
COUNTED = {"lm"}
RECIPES = sorted({path.stem for path in (ROOT / "configs").glob("*.py")} - COUNTED)


@pytest.mark.parametrize(
    "attention",
    ["additive", "none", "concat", "dot", "general", "scaled_dot", "multi_head"],
)
@pytest.mark.parametrize("size", ["", "small"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_an_attention_is_one_key(attention, size, cell):
    config = get_config("rnn", f"attention={attention},cell={cell},{size}")
    config.data.directory = "none"
    model = parse(config).model
    assert (model.architecture, model.attention, model.cell) == (
        "recurrent",
        attention,
        cell,
    )
    assert parse(get_config("dates", attention)).model.attention == attention


# Recipes that others cover almost entirely: the data of all are the same files here.
SLOW = {
    ("bert", "large,ltr"),
    ("spoken_digits", ""),  # tests/tasks/test_inputs.py trains it
    ("captions", "blind"),  # captions,photographs has the same decoder
    ("captions", "transformer,photographs"),
    ("denoising", "objective=span_corruption"),  # tests/tasks trains it
    ("digits", "transformer"),  # tests/tasks/test_inputs.py trains the other
    ("finetune", "model=gpt,task=stsb"),
    ("finetune", "model=gpt,task=swag"),
    ("gpt", ""),
    ("languages", "recurrent"),  # tests/tasks trains a Transformer
    ("gpt", "gpt2-small"),
    ("gpt", "mini"),
    ("gpt", "shakespeare-cpu-long"),
    ("multi30k", "annotated"),
    ("multi30k", "en-de,quick,positions=rotary,wordpiece"),
    ("multi30k", "de-en,size=small,relative"),
    ("own_files", ""),
    ("scan", ""),  # tests/integration/test_records.py trains it
    ("scenes", ""),  # captions:photographs has the same parts
    ("rnn", "none,lstm,reversed"),  # tests/models/test_recurrent.py has its equations
    ("speech", "model=joint"),
    ("speech", "model=las,data=words"),  # tests/tasks/test_transcription.py trains it
    ("t5", "small"),
    ("text_to_text", "pretrain"),  # denoising has the same task
    ("wmt14", "big,norm=pre,en-fr"),
    ("word_vectors", "task=sick"),  # finetune-task=sick has the same parts
}
RUNS = [
    pytest.param(name, arg, marks=pytest.mark.slow if (name, arg) in SLOW else ())
    for name in RECIPES
    for arg in ARGUMENTS.get(name, [""])
]


@pytest.mark.parametrize(("name", "arg"), RUNS)
def test_recipe_runs(name, arg, tmp_path: Path):
    config = get_config(name, arg)
    data = config.data
    corpus = tmp_path / "corpus"
    directions = data.get("directions", ())
    named = [
        data.get("source_language", "en"),
        data.get("target_language", "de"),
        *(language for pair in directions for language in languages_of(pair)),
    ]
    languages = tuple(dict.fromkeys(named))
    write_corpus(corpus, languages=languages)
    shutil.copy(corpus / "train.txt", corpus / "input.txt")
    modality = config.input.modality if "input" in config else "tokens"
    lines = ["ek", ""]
    if directions:
        _, target = languages_of(directions[0])
        lines[0] = f"{mark_of(target)} ek"
    if data.get("mixture", ()):
        data.prefixes = ("do ",)
        lines[0] = "do ek"
        for data_set in weights_of(data.mixture):
            write_corpus(corpus / data_set, languages=languages)
            put_before("do ", corpus / data_set, languages[0])
    if modality != "tokens":
        modalities.write(config, corpus)
        lines = modalities.entries(modality, corpus)
    if name in ("finetune", "word_vectors"):
        data.train_split, data.validation_split, data.test_split = (
            "train",
            "val",
            "test",
        )
    shrink(config, corpus, steps=2)
    run(config, tmp_path / "run")
    written = rows(tmp_path / "run")
    assert {row["split"] for row in written} == {"train", data.validation_split}
    assert all(math.isfinite(row["loss"]) for row in written)
    predictor = transformer_jax.load(str(tmp_path / "run"))
    scores = predictor.evaluate()
    assert scores["examples"] > 0
    assert scores["step"] == 2
    inputs = predictor.config.columns.inputs
    predictions = predictor.predict([dict.fromkeys(inputs, line) for line in lines])
    assert len(predictions) == 2
    EXPECTED[config.task](written, scores, predictions)


def translated(written, scores, predictions):
    # in one, three or four directions, or of five data sets
    assert scores["examples"] in (7, 21, 28, 35)
    assert {"loss", "bleu", "bleu_tokenized", "exact_match"} <= set(scores)
    assert all(isinstance(prediction, str) for prediction in predictions)


def transcribed(written, scores, predictions):
    assert "ctc" in written[0] or "attention" in written[0]
    edits = ("substitutions", "deletions", "insertions")
    rate = sum(scores[name] for name in edits)
    assert scores["word_error_rate"] == pytest.approx(rate)
    assert all(isinstance(prediction, str) for prediction in predictions)


def continued(written, scores, predictions):
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    assert scores["bits_per_byte"] > 0
    assert [set(prediction) for prediction in predictions] == [{"continuation"}] * 2


def filled(written, scores, predictions):
    assert scores["perplexity"] > 1
    assert 0 <= scores["masked_accuracy"] <= 1
    assert {"masked_lm", "learning_rate"} <= set(written[0])
    assert predictions == [{"masks": []}] * 2


def detected(written, scores, predictions):
    assert {"masked_lm", "replaced_tokens", "replaced_accuracy"} <= set(written[0])
    assert scores["loss"] > 50 * scores["replaced_loss"]
    for prediction in predictions:
        assert len(prediction["tokens"]) == len(prediction["replaced"]) >= 2
        assert all(0 <= p <= 1 for p in prediction["replaced"])


def denoised(written, scores, predictions):
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    assert all(isinstance(prediction, str) for prediction in predictions)
    assert predictions[1] == ""


def classified(written, scores, predictions):
    assert scores["examples"] == 7
    assert 0 <= scores["accuracy"] <= 1
    # a metric that is not part of the loss is logged
    assert {"cross_entropy", "accuracy"} <= set(written[0])
    for prediction in predictions:
        assert set(prediction["probabilities"]) == {"even", "odd"}
        assert sum(prediction["probabilities"].values()) == pytest.approx(1)


def measured(written, scores, predictions):
    assert -1 <= scores["spearman"] <= 1
    assert all(math.isfinite(prediction["value"]) for prediction in predictions)


def chosen(written, scores, predictions):
    assert 0 <= scores["accuracy"] <= 1
    for prediction in predictions:
        assert prediction["choice"] in (0, 1)
        assert sum(prediction["probabilities"]) == pytest.approx(1)


def answered(written, scores, predictions):
    assert {"exact_match", "f1", "best_f1"} <= set(scores)
    assert predictions[1]["answer"] == ""


def tagged(written, scores, predictions):
    assert {"accuracy", "precision", "recall", "f1"} <= set(scores)
    assert [len(prediction["tags"]) for prediction in predictions] == [1, 0]


EXPECTED = {
    "sequence_to_sequence": translated,
    "several_decoders": translated,
    "transcription": transcribed,
    "language_modeling": continued,
    "bert_pretraining": filled,
    "denoising": denoised,
    "electra_pretraining": detected,
    "classification": classified,
    "regression": measured,
    "multiple_choice": chosen,
    "question_answering": answered,
    "tagging": tagged,
}


@pytest.mark.parametrize("size", ["base", "large", "mini"])
@pytest.mark.parametrize(
    "flags", ["", ",phase2", ",cased", ",ltr", ",phase2,ltr,cased"]
)
def test_sizes_of_bert(size, flags):
    config = get_config("bert", size + flags)
    config.data.directory = "none"
    parsed = parse(config)
    assert parsed.data.max_length == (512 if "phase2" in flags else 128)
    assert parsed.data.lowercase == ("cased" not in flags)
    assert parsed.model.causal == ("ltr" in flags) != parsed.masking.next_sentence
    # With the pooler and without the heads of pre-training. Devlin et al. 2019, Section
    # 3, say 110M and 340M.
    assert (
        num_parameters(parsed.model)
        == {"base": 109_482_240, "large": 335_141_888, "mini": 5_404_928}[size]
    )


@pytest.mark.parametrize(("size", "count"), [("small", 14e6), ("base", 110e6)])
def test_sizes_of_electra(size, count):
    """Clark et al. 2020, Table 1, has the numbers of parameters."""
    config = get_config("electra", size)
    config.data.directory = "none"
    parsed = parse(config)
    assert num_parameters(parsed.model) == pytest.approx(count, rel=0.04)
    divisor = {"small": 4, "base": 3}[size]
    assert parsed.generator.d_model * divisor == parsed.model.d_model


@pytest.mark.parametrize("size", GPT)
def test_sizes_of_gpt(size):
    config = get_config("gpt", size)
    config.data.directory = "none"
    assert num_parameters(parse(config).model) == GPT[size]


def test_the_small_language_models_are_of_one_size_and_the_recipe_says_which():
    doc = (ROOT / "configs" / "gpt.py").read_text().split('"""')[1]
    counts = {}
    for size in (
        "shakespeare-cpu",
        "shakespeare-cpu-long",
        "llama-tiny",
        "lstm",
        "mini",
    ):
        config = get_config("gpt", size)
        config.data.directory = "none"
        counts[size] = num_parameters(parse(config).model)
        assert f"{counts[size]:,}" in doc
    assert counts["lstm"] == pytest.approx(counts["shakespeare-cpu"], rel=0.02)


GLUE = ("sst2", "cola", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte")
FINE_TUNED = (*GLUE, "trec", "sick", "swag", "squad", "squad2", "conll2003", "wnut17")


@pytest.mark.parametrize("task", FINE_TUNED)
def test_every_task_of_finetune_is_valid_in_every_size(task):
    doc = (ROOT / "configs" / "finetune.py").read_text().split('"""')[1]
    assert task in doc
    for size in ("mini", "base", "large"):
        for flags in (
            "",
            ",cased",
            *([",tfds"] if task in (*GLUE, "squad", "squad2", "conll2003") else []),
        ):
            config = get_config("finetune", f"task={task},size={size}{flags}")
            config.data.directory = "none"
            parsed = parse(config)
            assert parsed.data.lowercase == ("cased" not in flags)
            assert parsed.data.source == ("tfds" if "tfds" in flags else "files")
            assert parsed.checkpoint.best_metric in task_class(parsed.task).metrics
            # A fine-tuned model takes the parameters of the pre-trained one.
            assert parsed.model == dataclasses.replace(
                parse_bert(size).model, dropout_rate=parsed.model.dropout_rate
            )


@pytest.mark.parametrize("arg", ARGUMENTS["denoising"])
def test_a_pretrained_transformer_has_the_model_of_own_files(arg):
    config = get_config("denoising", arg)
    other = get_config("own_files", "long-short,10k")
    for each in (config, other):
        each.data.directory = "none"
        each.model.dropout_rate = 0.0
    assert parse(config).model == parse(other).model
    assert config.data.tokenizer == other.data.tokenizer
    rate = {"objective=span_corruption": 0.15, "objective=text_infilling": 0.3}[arg]
    assert config.denoising.rate == rate
    assert config.denoising.permute_sentences == (rate == 0.3)


@pytest.mark.parametrize("tasks", ["all", *TASKS])
def test_text_to_text_is_fine_tuned_from_its_own_pretraining(tasks):
    """The model is T5's."""
    pretrained = get_config("text_to_text", "pretrain")
    tuned = get_config("text_to_text", f"tasks={tasks}")
    theirs = get_config("t5", "mini")
    for config in (pretrained, tuned, theirs):
        config.data.directory = "none"
        config.model.update(dropout(0.0))
    theirs.model.max_length = tuned.model.max_length
    assert parse(tuned).model == parse(pretrained).model == parse(theirs).model
    assert tuned.data.tokenizer == pretrained.data.tokenizer
    names = tuple(TASKS) if tasks == "all" else (tasks,)
    assert tuple(parse(tuned).data.weights) == names
    assert tuned.data.prefixes == tuple(TASKS[name].prefix for name in names)
    assert tuned.checkpoint.best_metric in task_class(tuned.task).metrics
    doc = (ROOT / "configs" / "text_to_text.py").read_text().split('"""')[1]
    assert f"{num_parameters(parse(tuned).model):,}" in doc


def parse_bert(size):
    config = get_config("bert", size)
    config.data.directory = "none"
    return parse(config)


@pytest.mark.parametrize("task", FINE_TUNED[: FINE_TUNED.index("squad")])
def test_every_task_on_texts_is_valid_for_gpt(task):
    """Sizes beyond mini have the paper's settings: 3 epochs of 32 examples, here of
    the split that is trained on.
    """
    for size in ("mini", "gpt", "gpt2-small"):
        config = get_config("finetune", f"task={task},model=gpt,size={size}")
        config.data.directory = "none"
        parsed = parse(config)
        pretrained = get_config("gpt", size)
        pretrained.data.directory = "none"
        theirs, how = (
            parse(pretrained),
            {
                name: getattr(parsed.model, name)
                for name in ("dtype", "unroll", "remat")
            },
        )
        assert parsed.model == dataclasses.replace(theirs.model, **how)
        assert (parsed.data.tokenizer, parsed.data.lowercase) == (
            theirs.data.tokenizer,
            theirs.data.lowercase,
        )
        assert parsed.fine_tuning.auxiliary_weight == 0.5
        assert getattr(parsed.fine_tuning, "both_orders", False) == (
            task in ("mrpc", "qqp", "stsb")
        )
        assert parsed.checkpoint.best_metric in task_class(parsed.task).metrics
        if size != "mini":
            assert parsed.data.batch_tokens == 32 * parsed.data.max_length
            assert parsed.optimizer.learning_rate == 6.25e-5
            assert parsed.optimizer.warmup_steps == pytest.approx(
                0.002 * parsed.training.steps, abs=1
            )


@pytest.mark.parametrize("task", ["trec", "sst2", "sick"])
def test_kinds_of_word_vectors_differ_in_two_keys(task):
    def of(kind):
        config = get_config("word_vectors", f"task={task},vectors={kind}")
        config.data.directory = "none"
        return parse(config)

    random = of("random")
    assert not random.given_tables
    assert not random.frozen
    assert get_config("finetune", f"task={task}").data.labels == random.data.labels
    glove = of("glove")
    (table,) = glove.given_tables
    assert table.vectors.width == 50
    assert not glove.frozen
    assert dataclasses.replace(glove, vectors=random.vectors) == random
    frozen = of("frozen")
    assert frozen.frozen == {table.path: table.size}
    assert dataclasses.replace(frozen, vectors=glove.vectors) == glove


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("size=gpt", "model=bert has no size=gpt: choose from mini, base, large"),
        ("model=gpt,size=large", "model=gpt has no size=large: choose from mini, gpt,"),
        (
            "model=gpt,task=squad",
            "task=squad is for model=bert: choose from sst2, cola, ",
        ),
    ],
)
def test_finetune_refuses_words_that_do_not_go_together(arg, message):
    with pytest.raises(ConfigError, match=message):
        get_config("finetune", arg)


FOLLOWERS = {"optimizer.warmup_steps", "training.evaluate_every", "checkpoint.every"}


def flat(config):
    return {
        f"{name}.{key}": value
        for name, values in config.to_dict().items()
        if isinstance(values, dict)
        for key, value in values.items()
    }


@pytest.mark.parametrize(
    ("name", "arg"),
    [(name, arg) for name in RECIPES for arg in ARGUMENTS.get(name, [""])],
)
def test_setting_a_key_of_a_recipe_changes_no_other(name, arg):
    """Only the number of steps has followers: the warm-up and the intervals that are
    parts of it.
    """
    config = get_config(name, arg)
    for key, value in flat(config).items():
        section, field = key.split(".")
        before = flat(config)
        config[section][field] = other_than(value)
        changed = {
            other for other, now in flat(config).items() if now != before[other]
        } - {key}
        assert changed <= (FOLLOWERS if key == "training.steps" else set()), key


@pytest.mark.parametrize(
    ("name", "arg"),
    [(name, arg) for name in RECIPES for arg in ARGUMENTS.get(name, [""])],
)
def test_a_short_run_of_a_recipe_reaches_its_learning_rate(name, arg):
    """Warm-up is a share of the steps.

    With the noam schedule, a shorter warm-up would raise the rate, so it stays.
    """
    config = get_config(name, arg)
    if config.optimizer.schedule != "noam":
        config.training.steps = 100
        assert 0 < config.optimizer.warmup_steps <= 40


@pytest.mark.parametrize(
    ("size", "pairs", "words"),
    [
        ("10k", 1, ""),
        ("10k", 100_000, ""),
        (
            "10k",
            115_000,
            (
                "train has 115,000 pairs, "
                "but the settings of this recipe are meant for at most 100,000: "
            ),
        ),
        ("1m", 115_000, ""),
        (
            "1m",
            10_000,
            (
                "meant for at least 100,001: "
                "choose another size of the recipe, or set data.meant_for=()"
            ),
        ),
        ("1m", 20_000_000, "at most 10,000,000"),
        ("100m", 36_000_000, ""),
    ],
)
def test_data_of_another_size_is_warned_of(size, pairs, words):
    config = get_config("own_files", f"de-en,{size}")
    config.data.directory = "none"
    advice = parse(config).data.size_advice(pairs)
    assert words in advice
    assert bool(words) == bool(advice)


def test_recipes_without_a_range_of_sizes_take_any_data():
    config = get_config("multi30k", "")
    config.data.directory = "none"
    assert parse(config).data.size_advice(1) == ""


@pytest.mark.parametrize("name", [*RECIPES, *COUNTED])
def test_recipe_refuses_unknown_arguments(name):
    with pytest.raises(ConfigError, match="config argument 'nonsense' is unknown"):
        get_config(name, "nonsense")


@pytest.mark.parametrize("word", ["norm=post", "pre", "tokenizer=unigram"])
def test_annotated_is_one_model(word):
    with pytest.raises(ConfigError, match="cannot be combined with 'annotated'"):
        get_config("multi30k", f"annotated,{word}")


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        ("dot,reversed", "requires attention=none"),
        ("transformer,lstm", "requires a recurrent model"),
    ],
)
def test_rnn_refuses_words_that_do_not_go_together(arg, words):
    with pytest.raises(ConfigError, match=words):
        get_config("rnn", arg)


def test_muon_changes_the_optimizer_of_the_recipe_that_it_was_tuned_for():
    adamw = get_config("gpt", "shakespeare-cpu")
    muon = get_config("gpt", "shakespeare-cpu,muon")
    assert (muon.optimizer.name, muon.optimizer.b1) == ("muon", 0.95)
    muon.optimizer = adamw.optimizer
    assert muon.to_dict() == adamw.to_dict()
    with pytest.raises(ConfigError, match="not for llama-tiny: set"):
        get_config("gpt", "llama-tiny,muon")


@pytest.mark.parametrize("name", [*RECIPES, *COUNTED])
def test_recipe_says_what_it_is(name):
    doc = (ROOT / "configs" / f"{name}.py").read_text()
    for word in ("Paper:", "Command:", "Cost:", "Expected:"):
        assert word in doc


# Names of configs/wmt14.py → rows of the table of parameter counts. Label smoothing has
# no parameters.
WMT14_ROWS = {
    **{f"heads-{n}": f"A h={n}" for n in (1, 4, 16, 32)},
    **{f"d_k-{width}": f"B d_k={width}" for width in (16, 32)},
    **{f"layers-{n}": f"C N={n}" for n in (2, 4, 8)},
    **{
        f"{key}-{width}": f"C {key}={width}"
        for key, width in (("d_model", 256), ("d_model", 1024))
    },
    **{f"d_ff-{width}": f"C d_ff={width}" for width in (1024, 4096)},
    **{f"dropout-{rate}": f"D dropout={rate}" for rate in ("0", "0.2")},
    **{f"smoothing-{rate}": "base" for rate in ("0", "0.2")},
    **{"learned": "E learned positions", "base": "base", "big": "big"},
}


def test_wmt14_has_every_row_of_the_table():
    assert set(WMT14_ROWS.values()) == set(TABLE_3)
    doc = (ROOT / "configs" / "wmt14.py").read_text().split('"""')[1]
    assert all(row in doc for row in WMT14_ROWS)


@pytest.mark.parametrize("row", WMT14_ROWS)
def test_a_row_of_wmt14_is_the_papers_model(row):
    parsed = parse(get_config("wmt14", row))
    expected = TransformerConfig(**TABLE_3[WMT14_ROWS[row]][0])
    assert (
        dataclasses.replace(parsed.model, vocab_multiple=1, dtype="float32", unroll=1)
        == expected
    )
    assert num_parameters(parsed.model) == num_parameters(expected)
    smoothing = {"smoothing-0": 0.0, "smoothing-0.2": 0.2}.get(row, 0.1)
    assert parsed.training.label_smoothing == smoothing
    assert parsed.training.steps == (300_000 if row == "big" else 100_000)
    assert parsed.evaluation.checkpoint == (
        "average" if row in ("base", "big") else "latest"
    )


@pytest.mark.parametrize("pair", ["en-de", "de-en", "en-fr", "fr-en"])
def test_pairs_of_wmt14(pair):
    config = get_config("wmt14", f"big,{pair}")
    source, target = pair.split("-")
    assert (config.data.source_language, config.data.target_language) == (
        source,
        target,
    )
    assert config.data.name == f"wmt14_translate/{({source, target} - {'en'}).pop()}-en"
    assert config.model.target_vocab_size == (32_000 if "fr" in pair else 37_000)
    assert config.model.dropout_rate == (0.1 if "fr" in pair else 0.3)  # Section 6.1
    assert get_config("wmt14", "").data.source_language == "en"


def test_ted_is_the_tutorials_model():
    model = parse(get_config("ted_hrlr", "")).model
    assert (
        num_parameters(
            dataclasses.replace(model, source_vocab_size=7765, target_vocab_size=7010)
        )
        == 10_184_162
    )
