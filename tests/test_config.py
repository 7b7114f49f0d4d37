"""Checked configs: every problem is reported with its key, value, rule and remedy."""

import dataclasses
import importlib

import pytest

from helpers.runs import small
from transformer_jax.config import (
    ConfigError,
    defaults,
    fields,
    load_recipe,
    override,
    parse,
    parse_arg,
    share,
    shrink,
)
from transformer_jax.tasks import TASKS


def test_defaults_become_dataclasses(tiny):
    config = parse(tiny)
    assert config.model.d_model == 16
    assert config.training.label_smoothing == 0.1


def test_all_problems_are_reported_at_once(tiny):
    tiny.model.norm = "Pre"
    tiny.training.steps = 0
    tiny.optimizer.schedule = "triangular"
    tiny.unlock()
    tiny.data.max_lenght = 7
    with pytest.raises(ConfigError) as error:
        parse(tiny)
    message = str(error.value)
    assert "config.model.norm = 'Pre': must be one of post, pre" in message
    assert "config.training.steps = 0: must be at least 1" in message
    assert (
        "config.optimizer.schedule = 'triangular': must be one of noam, inverse_sqrt"
        in message
    )
    assert "config.data.max_lenght is not a key: did you mean max_length?" in message


def test_the_tokenizers_of_another_run_may_share_a_table(tiny):
    """They may have the same ids, as in Marian's models.

    Those that are trained here would not.
    """
    tiny.data.joint_tokenizer, tiny.init_from = False, "elsewhere"
    assert parse(tiny).model.shares_tables


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data.rows_multiple": 8, "training.microbatches": 3},
            "training.microbatches = 3: must divide",
        ),
        ({"training.evaluate_every": 3}, "checkpoint.every = 2: must be a multiple"),
        (
            {"data.max_length": 64, "data.batch_tokens": 4096},
            "data.max_length = 64: must not exceed",
        ),
        (
            {"model.source_vocab_size": 301, "model.tie_embeddings": "decoder"},
            "data.joint_tokenizer = True: requires",
        ),
        (
            {"data.joint_tokenizer": False},
            "model.tie_embeddings = 'all': requires data.joint_tokenizer = True",
        ),
        ({"data.directory": ""}, "data.directory = '': must be the folder of the data"),
        ({"data.source": "web"}, "data.source = 'web': must be one of files, tfds"),
        (
            {"data.source": "tfds"},
            "data.name = '': must be the data set's name in tfds",
        ),
        ({"data.target_language": "en"}, "data.target_language = 'en': must differ"),
        ({"data.tokenizer": "letters"}, "data.tokenizer = 'letters': must be one of"),
        ({"data.max_length": 1}, "data.max_length = 1: must be at least 2"),
        (
            {"data.max_ratio": 0.5},
            "data.max_ratio = 0.5: must be at least 1, or 0 for no limit",
        ),
        (
            {"data.max_ratio": float("nan")},
            "data.max_ratio = nan: must be finite; set it to a number",
        ),
        (
            {"data.tokenizer_lines": -1},
            "data.tokenizer_lines = -1: must be at least 1, or 0 for all",
        ),
        ({"data.min_count": 0}, "data.min_count = 0: must be at least 1"),
        (
            {"data.batch_tokens": 100},
            "data.batch_tokens = 100: must have room for rows_multiple = 8 rows",
        ),
        (
            {"training.label_smoothing": 1.0},
            "training.label_smoothing = 1.0: must be in [0, 1)",
        ),
        ({"training.seed": -1}, "training.seed = -1: must be in"),
        (
            {"evaluation.checkpoint": "last"},
            "evaluation.checkpoint = 'last': must be one of latest, best, average",
        ),
        (
            {"evaluation.checkpoint": "ema"},
            "evaluation.checkpoint = 'ema': training.ema_decay = 0.0 keeps no moving",
        ),
        (
            {"training.ema_decay": 1.0},
            (
                "training.ema_decay = 1.0: must be in [0, 1), e.g. 0.999; "
                "0 keeps no average"
            ),
        ),
        ({"training.ema_decay": -0.1}, "training.ema_decay = -0.1: must be in [0, 1)"),
        ({"training.microbatches": 0}, "training.microbatches = 0: must be at least 1"),
        (
            {"training.evaluate_every": 0},
            "training.evaluate_every = 0: must be at least 1",
        ),
        (
            {"training.watch_every": -1},
            "training.watch_every = -1: must not be negative",
        ),
        (
            {"data.tokenizer": "unigram", "data.min_count": 2},
            "data.min_count = 2: must be 1 with data.tokenizer = 'uni",
        ),
        (
            {"evaluation.checkpoint": "average"},
            "evaluation.average_last = 10: must not exceed checkpoint.keep_latest",
        ),
        ({"evaluation.batch_size": 0}, "evaluation.batch_size = 0: must be at least 1"),
        (
            {"evaluation.bleu_tokenizer": "mecab"},
            (
                "evaluation.bleu_tokenizer = 'mecab': "
                "must be one of 13a, intl, zh, ja-mecab, ko-mecab, char, none; use"
            ),
        ),
        ({"mesh.fsdp": 0}, "mesh.fsdp = 0: must be at least 1, or -1"),
        ({"mesh.fsdp": -1}, "mesh.data = -1: only one axis"),
    ],
)
def test_each_problem_has_value_rule_and_remedy(tiny, change, message):
    tiny.update_from_flattened_dict(change)
    with pytest.raises(ConfigError) as error:
        parse(tiny)
    assert f"config.{message}" in str(error.value)


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        (
            "classification",
            {"fine_tuning.frozen_layers": 3},
            "frozen_layers = 3: must not exceed model.num_layers = 2",
        ),
        (
            "regression",
            {"fine_tuning.feature_layers": 3},
            "feature_layers = 3: must not exceed model.num_layers = 2",
        ),
        (
            "classification",
            {"fine_tuning.frozen_layers": -1},
            "frozen_layers = -1: must be at least 0, which trains",
        ),
        (
            "classification",
            {"fine_tuning.feature_layers": -1},
            "feature_layers = -1: must be at least 0, which trains",
        ),
        (
            "classification",
            {"fine_tuning.frozen_layers": 1, "fine_tuning.feature_layers": 1},
            (
                "frozen_layers = 1: must be 0 with fine_tuning.feature_layers, "
                "which freezes the whole encoder"
            ),
        ),
    ],
)
def test_each_problem_of_fine_tuning(corpus, task, change, message):
    config = small(task, corpus)
    config.update_from_flattened_dict(change)
    with pytest.raises(ConfigError) as error:
        parse(config)
    assert str(error.value).startswith(f"config.fine_tuning.{message}")


def test_freezing_random_values_is_unwise(corpus, caplog):
    for name in ("frozen_layers", "feature_layers"):
        for start, said in (("", True), ("runs/mini", False)):
            caplog.clear()
            config = small("classification", corpus)
            config.init_from, config.fine_tuning[name] = start, 1
            parse(config)
            assert (
                f"config.fine_tuning.{name} keeps random values" in caplog.text
            ) == said


def test_init_from_names_a_workdir(tiny):
    assert parse(tiny).init_from == ""
    override(tiny, ["--config.init_from=runs/mini"])
    assert parse(tiny).init_from == "runs/mini"
    for wrong in (None, 3, ["runs/mini"]):
        with pytest.raises(ConfigError) as error:
            parse(tiny.to_dict() | {"init_from": wrong})
        assert (
            str(error.value)
            == f"config.init_from = {wrong!r}: must be the workdir of another run, or"
            " '' for none"
        )


@pytest.mark.parametrize(
    ("tokenizer", "extra"), [("ja-mecab", "ja"), ("ko-mecab", "ko")]
)
def test_a_tokenizer_of_bleu_that_is_not_installed(tiny, monkeypatch, tokenizer, extra):
    module = f"sacrebleu.tokenizers.tokenizer_{tokenizer.replace('-', '_')}"
    # the value after a failed import
    monkeypatch.setattr(importlib.import_module(module), "MeCab", None)
    tiny.evaluation.bleu_tokenizer = tokenizer
    with pytest.raises(ConfigError) as error:
        parse(tiny)
    assert (
        str(error.value)
        == f"config.evaluation.bleu_tokenizer = {tokenizer!r}: needs MeCab and its"
        f" dictionary: pip install -c constraints.txt -e '.[{extra}]' in the folder"
        " of transformer_jax, or set it to another, e.g. char"
    )


def test_types_and_missing_keys(tiny):
    raw = tiny.to_dict()
    raw["model"]["d_model"] = "16"
    del raw["model"]["norm"]
    raw["moddel"] = {}
    with pytest.raises(ConfigError) as error:
        parse(raw)
    assert "config.model.d_model = '16': must be of type int" in str(error.value)
    assert "config.model.norm is missing: set it to a value of type str" in str(
        error.value
    )
    assert "config.moddel is not a key: did you mean model?" in str(error.value)


def test_task_must_be_known():
    with pytest.raises(
        ValueError,
        match=(
            r"config.task = 'translating' is not a task: choose one of sequence_to_seq"
        ),
    ):
        parse({"task": "translating"})
    with pytest.raises(ConfigError, match=r"config.task is missing"):
        parse({})


def test_a_task_of_another_package_is_named_by_module_and_class(tiny):
    tiny.task = "transformer_jax.tasks.sequence_to_sequence:SequenceToSequence"
    assert parse(tiny).task == tiny.task
    for wrong, message in {
        "no_such_package.tasks:Mine": (
            r"cannot be imported: No module named 'no_such_package'. Add the folder"
        ),
        "transformer_jax.tasks.text:Mine": (
            "cannot be imported: module .* has no attribute 'Mine'"
        ),
        "transformer_jax.tasks.text:Corpus": (
            "is not a task: it must be a subclass of transformer_jax.training.task"
        ),
        "transformer_jax.training.task:Task": "does not say what its config is: write",
    }.items():
        with pytest.raises(ValueError, match=f"config.task = '{wrong}' {message}"):
            parse({"task": wrong})


def test_post_norm_without_warmup_is_unwise(tiny, caplog):
    parse(tiny)
    assert "warm-up" not in caplog.text
    tiny.optimizer.warmup_steps = 0
    parse(tiny)
    assert "post-LN seldom trains without warm-up" in caplog.text
    caplog.clear()
    tiny.model.norm = "pre"
    parse(tiny)
    assert "warm-up" not in caplog.text


def test_a_rate_that_ends_before_the_run_is_unwise(tiny, caplog):
    tiny.optimizer.warmup_steps = 1
    advice = (
        "config.optimizer.decay_steps = 3: "
        "after that step, the learning rate stays at 0 of its"
    )
    for schedule in ("cosine", "linear", "inverse_sqrt"):
        tiny.optimizer.schedule = schedule
        for steps, end in ((4, 0), (4, 4), (4, 8), (4, 3)):
            caplog.clear()
            tiny.training.steps, tiny.optimizer.decay_steps = steps, end
            parse(tiny)
            assert (advice in caplog.text) == (end == 3 and schedule != "inverse_sqrt")


def test_shares_follow_the_steps(tiny):
    tiny.training.steps = 100
    tiny.training.evaluate_every = share(tiny, 4)
    tiny.checkpoint.every = share(tiny, 4)
    tiny.optimizer.warmup_steps = share(tiny, 10)
    for steps, every, warmup in ((100, 25, 10), (10, 3, 1), (1, 1, 1)):
        tiny.training.steps = steps
        config = parse(tiny)
        assert (config.training.evaluate_every, config.checkpoint.every) == (
            every,
            every,
        )
        assert config.optimizer.warmup_steps == warmup
    tiny.training.evaluate_every = 7  # values set by hand are kept
    tiny.training.steps = 50
    assert (tiny.training.evaluate_every, tiny.checkpoint.every) == (7, 13)


def test_keys_of_one_share_are_overridden_one_by_one(tmp_path):
    """A recipe may assign one reference to several keys."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from transformer_jax.config import defaults, share\ndef get_config():\n    "
        "config = defaults('language_modeling')\n    config.training.evaluate_every = "
        "config.checkpoint.every = share(config, 4)\n    return config\n"
    )
    config = load_recipe(str(recipe))
    override(
        config, ["--config.training.steps=1000", "--config.training.evaluate_every=50"]
    )
    assert (config.training.evaluate_every, config.checkpoint.every) == (50, 250)
    override(config, ["--config.training.steps=100"])
    assert (config.training.evaluate_every, config.checkpoint.every) == (50, 25)


def test_a_share_may_be_several_parts(tiny):
    tiny.optimizer.warmup_steps = share(tiny, 28, of=3)
    tiny.training.steps = 2800
    assert tiny.optimizer.warmup_steps == 300
    tiny.training.steps = 10
    assert tiny.optimizer.warmup_steps == 2


def test_argument():
    words = {"size": ("tiny", "base"), "norm": ("post", "pre")}
    assert parse_arg(None, words, ("quick",)) == {
        "size": "tiny",
        "norm": "post",
        "quick": False,
    }
    assert parse_arg("quick,norm=pre,base", words, ("quick",)) == {
        "size": "base",
        "norm": "pre",
        "quick": True,
    }
    for wrong in ("huge", "size=huge", "colour=red", "quick=1"):
        with pytest.raises(
            ConfigError,
            match=r"is unknown: choose from size=tiny\|base, norm=post\|pre, quick",
        ):
            parse_arg(wrong, words, ("quick",))
    for twice in ("tiny,base", "base,quick,size=tiny"):
        with pytest.raises(
            ConfigError,
            match=rf"'{twice}' has two values for size, '.*' and '.*': keep one",
        ):
            parse_arg(twice, words, ("quick",))
    assert parse_arg("size=base,base", words)["size"] == "base"
    any_text = words | {"from": ()}
    assert parse_arg("pre", any_text)["from"] == ""
    assert parse_arg("from=a=b", any_text)["from"] == "a=b"
    for wrong in ("from", "from="):
        with pytest.raises(
            ConfigError,
            match=(
                rf"argument '{wrong}' is unknown: choose from .*, norm=post\|pre,"
                r" from=…"
            ),
        ):
            parse_arg(wrong, any_text)


def test_overrides_are_read_as_the_type_they_replace(tiny):
    override(
        tiny,
        [
            "--config.decoding.beam_size=7",
            "--config.model.norm=pre",
            "--config.data.lowercase=true",
            "--config.optimizer.learning_rate",
            "-1",
            "--config.data.source_language",
            "x: y=z",
        ],
    )
    assert (tiny.decoding.beam_size, tiny.model.norm, tiny.data.lowercase) == (
        7,
        "pre",
        True,
    )
    assert (tiny.optimizer.learning_rate, tiny.data.source_language) == (-1, "x: y=z")
    with pytest.raises(
        ConfigError,
        match=r"config.decoding.beam is not a key: did you mean decoding.beam_size",
    ):
        override(tiny, ["--config.decoding.beam=3"])
    for wrong in ("many", "", "8.0", "4f"):
        with pytest.raises(
            ConfigError,
            match=rf"config.decoding.beam_size = '{wrong}': must be of type int",
        ):
            override(tiny, [f"--config.decoding.beam_size={wrong}"])
    with pytest.raises(
        ConfigError, match=r"write it as --config.decoding.beam_size=VALUE"
    ):
        override(tiny, ["--config.decoding.beam_size"])


def test_defaults_name_every_key():
    common = {
        "task",
        "init_from",
        "model",
        "data",
        "optimizer",
        "training",
        "lora",
        "evaluation",
        "checkpoint",
        "mesh",
    }
    several = common | {"source_vectors", "target_vectors"}
    assert set(defaults("sequence_to_sequence")) == several | {"decoding", "input"}
    common.add("vectors")
    assert set(defaults("language_modeling")) == common | {"decoding"}
    assert set(defaults("bert_pretraining")) == common | {"masking"}
    assert set(defaults("electra_pretraining")) == common | {"masking", "generator"}
    assert (
        set(defaults("classification"))
        == set(defaults("tagging"))
        == common | {"fine_tuning"}
    )
    assert set(defaults("question_answering")) == common | {"fine_tuning", "answers"}


def test_another_architecture_has_other_keys():
    assert defaults("sequence_to_sequence").model.architecture == "transformer"
    recurrent = defaults("sequence_to_sequence", "recurrent")
    assert "cell" in recurrent.model
    with pytest.raises(
        ConfigError,
        match=r"'gpt': must be one of transformer, recurrent, convs2s for config.task",
    ):
        defaults("sequence_to_sequence", "gpt")
    recurrent.model.architecture = "transformer"
    with pytest.raises(
        ConfigError,
        match=r"config.model has the keys of 'recurrent'; set the architecture",
    ):
        parse(recurrent)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_has_a_small_version(task, tmp_path):
    """Sizes become small, all other keys keep their values, and the config remains
    valid.
    """
    whole, config = defaults(task), small(task, tmp_path)
    known = fields(task, whole.model)
    # These are set for the corpus of the tests.
    kept = {
        f"data.{name}"
        for name in (
            "source",
            "directory",
            "labels",
            "label_column",
            "text_column",
            "choice_columns",
            "types",
        )
    }
    kept |= {
        "training.steps",
        "training.log_every",
        "training.evaluate_every",
        "checkpoint.every",
    }
    for key, field in known.items():
        section, name = key.split(".")
        before, after = whole[section][name], config[section][name]
        assert (
            (after <= before)
            if "small" in field.metadata
            else (after == before or key in kept)
        ), key
    parsed = parse(config)
    assert (parsed.model.d_model, parsed.data.max_length, parsed.data.max_buckets) == (
        16,
        32,
        1,
    )


def test_equal_sizes_stay_equal_in_the_small_version():
    for value_dim, expected in ((64, 8), (32, 4)):
        config = defaults("sequence_to_sequence")
        config.model.value_dim = value_dim
        shrink(config)
        assert (config.model.head_dim, config.model.value_dim) == (8, expected)


def test_every_key_may_say_only_what_tools_know():
    for task in TASKS:
        for key, field in fields(task, {}).items():
            assert set(field.metadata) <= {
                "small",
                "like",
                "how",
                "off",
                "makes_tokens",
                "makes_tokenizer",
                "free",
                "model",
                "parameters",
                "added",
                "path",
            }, key
            if field.metadata.get("like"):
                section = key.split(".")[0]
                assert f"{section}.{field.metadata['like']}" in fields(task, {})
            if "off" in field.metadata and field.default is not dataclasses.MISSING:
                assert type(field.metadata["off"]) is type(field.default), key


def test_values_of_a_tuple_have_its_type(corpus):
    config = small("classification", corpus)
    config.data.labels = (0, 1)
    with pytest.raises(
        ConfigError,
        match=r"config.data.labels = \(0, 1\): its values must be of type str",
    ):
        parse(config)


@pytest.mark.parametrize(
    "name", ["x" * 300, "~nobody-is-called-that/a.py", "a:" + "x" * 300]
)
def test_a_recipe_with_an_impossible_name(name):
    with pytest.raises(ConfigError, match="there is no file"):
        load_recipe(name)


def test_a_colon_in_the_path_of_a_recipe(tmp_path):
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "recipe.py").write_text(
        "from transformer_jax.config import defaults\n"
        "def get_config(arg='none'):\n    config = defaults('sequence_to_sequence')\n "
        "   config.data.directory = arg\n    return config\n"
    )
    assert load_recipe(f"{folder}/recipe.py").data.directory == "none"
    assert load_recipe(f"{folder}/recipe.py:c:d").data.directory == "c:d"
