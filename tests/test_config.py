import json

import pytest
from ml_collections import ConfigDict

from transformer_jax.config import (
    ConfigError,
    check_model,
    claim_workdir,
    defaults,
    override,
    parse,
    parse_arg,
    read_workdir,
    store_config,
)


def test_defaults_become_dataclasses(tiny):
    config = parse(tiny)
    assert config.model.d_model == 16
    assert config.engine.training is config.training


def test_all_problems_are_told_at_once(tiny):
    tiny.model.norm = "Pre"
    tiny.training.steps = 0
    tiny.optimizer.schedule = "linear"
    tiny.unlock()
    tiny.data.max_lenght = 7
    with pytest.raises(ConfigError) as error:
        parse(tiny)
    message = str(error.value)
    assert "config.model.norm = 'Pre': must be one of post, pre" in message
    assert "config.training.steps = 0: must be at least 1" in message
    assert "config.optimizer.schedule = 'linear': must be one of paper, inverse_sqrt" in message
    assert "config.data.max_lenght is not a key: did you mean max_length?" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data.rows_multiple": 8, "training.microbatches": 3}, "training.microbatches = 3: must divide"),
        ({"training.evaluate_every": 3}, "checkpoint.every = 2: must be a multiple"),
        ({"data.max_length": 64, "data.batch_tokens": 4096}, "data.max_length = 64: must not be beyond"),
        ({"model.source_vocab_size": 301, "model.tie_embeddings": "decoder"}, "data.joint_tokenizer = True: one"),
        ({"data.joint_tokenizer": False}, "model.tie_embeddings = 'all': 'all' needs data.joint_tokenizer"),
        ({"data.directory": ""}, "data.directory = '': must be the folder of the data"),
        ({"data.source": "web"}, "data.source = 'web': must be one of files, tfds"),
        ({"data.source": "tfds"}, "data.name = '': must be the data set's name in tfds"),
        ({"data.target_language": "en"}, "data.target_language = 'en': must differ"),
        ({"data.tokenizer": "letters"}, "data.tokenizer = 'letters': must be one of"),
        ({"data.max_length": 1}, "data.max_length = 1: must be at least 2"),
        ({"data.max_ratio": 0.5}, "data.max_ratio = 0.5: must be at least 1, or 0 for no limit"),
        ({"data.max_ratio": float("nan")}, "data.max_ratio = nan: must be at least 1, or 0 for no limit"),
        ({"data.tokenizer_lines": -1}, "data.tokenizer_lines = -1: must be at least 1, or 0 for all"),
        ({"data.min_count": 0}, "data.min_count = 0: must be at least 1"),
        ({"data.batch_tokens": 100}, "data.batch_tokens = 100: must hold rows_multiple = 8 rows"),
        ({"training.label_smoothing": 1.0}, "training.label_smoothing = 1.0: must be in [0, 1)"),
        ({"training.seed": -1}, "training.seed = -1: must be in"),
        ({"evaluation.checkpoint": "last"}, "evaluation.checkpoint = 'last': must be one of latest, best, average"),
        ({"evaluation.checkpoint": "ema"}, "evaluation.checkpoint = 'ema': training.ema_decay = 0.0 keeps no moving"),
        ({"training.ema_decay": 1.0}, "training.ema_decay = 1.0: must be in [0, 1), as 0.999; 0 keeps no average"),
        ({"training.ema_decay": -0.1}, "training.ema_decay = -0.1: must be in [0, 1)"),
        ({"training.microbatches": 0}, "training.microbatches = 0: must be at least 1"),
        ({"training.evaluate_every": 0}, "training.evaluate_every = 0: must be at least 1"),
        (
            {"data.tokenizer": "unigram", "data.min_count": 2},
            "data.min_count = 2: must be 1 with data.tokenizer = 'uni",
        ),
        (
            {"evaluation.checkpoint": "average"},
            "evaluation.average_last = 10: must not be beyond checkpoint.keep_latest",
        ),
        ({"evaluation.rows": 0}, "evaluation.rows = 0: must be at least 1"),
        ({"mesh.fsdp": 0}, "mesh.fsdp = 0: must be at least 1, or -1"),
        ({"mesh.fsdp": -1}, "mesh.data = -1: only one axis"),
    ],
)
def test_each_problem_has_value_rule_and_remedy(tiny, change, message):
    tiny.update_from_flattened_dict(change)
    with pytest.raises(ConfigError) as error:
        parse(tiny)
    assert f"config.{message}" in str(error.value)


def test_types_and_missing_keys(tiny):
    raw = tiny.to_dict()
    raw["model"]["d_model"] = "16"
    del raw["model"]["norm"]
    raw["moddel"] = {}
    with pytest.raises(ConfigError) as error:
        parse(raw)
    assert "config.model.d_model = '16': must be of type int" in str(error.value)
    assert "config.model.norm is missing: set it to a value of type str" in str(error.value)
    assert "config.moddel is not a key: did you mean model?" in str(error.value)


def test_task_must_be_known():
    with pytest.raises(ValueError, match=r"config.task = 'translating' is not a task: choose one of translation"):
        parse({"task": "translating"})
    with pytest.raises(ConfigError, match=r"config.task is missing"):
        parse({})


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


def test_argument():
    words = {"size": ("tiny", "base"), "norm": ("post", "pre")}
    assert parse_arg(None, words, ("quick",)) == {"size": "tiny", "norm": "post", "quick": False}
    assert parse_arg("quick,norm=pre,base", words, ("quick",)) == {"size": "base", "norm": "pre", "quick": True}
    for wrong in ("huge", "size=huge", "colour=red", "quick=1"):
        with pytest.raises(ConfigError, match=r"is unknown: choose from size=tiny\|base, norm=post\|pre, quick"):
            parse_arg(wrong, words, ("quick",))
    for twice in ("tiny,base", "base,quick,size=tiny"):
        with pytest.raises(ConfigError, match=rf"'{twice}' has two values of size, '.*' and '.*': keep one"):
            parse_arg(twice, words, ("quick",))
    assert parse_arg("size=base,base", words)["size"] == "base"


def test_overrides_are_read_as_the_type_they_replace(tiny):
    override(tiny, ["--config.decoding.beam_size=7", "--config.model.norm=pre", "--config.data.lowercase=true"])
    assert (tiny.decoding.beam_size, tiny.model.norm, tiny.data.lowercase) == (7, "pre", True)
    with pytest.raises(ConfigError, match=r"config.decoding.beam is not a key: did you mean decoding.beam_size"):
        override(tiny, ["--config.decoding.beam=3"])
    for wrong in ("many", "", "08", "4f"):
        with pytest.raises(ConfigError, match=rf"config.decoding.beam_size = '{wrong}': must be of type int"):
            override(tiny, [f"--config.decoding.beam_size={wrong}"])
    with pytest.raises(ConfigError, match=r"write it as --config.decoding.beam_size=VALUE"):
        override(tiny, ["--config.decoding.beam_size"])


def test_workdir_holds_one_experiment(tiny, tmp_path, caplog):
    workdir = tmp_path / "run"
    claim_workdir(workdir, tiny)
    assert read_workdir(workdir).to_dict() == tiny.to_dict()
    (workdir / "checkpoints").mkdir()

    free = ConfigDict(tiny.to_dict())
    free.training.steps, free.data.directory, free.decoding.beam_size = 9, "elsewhere", 9
    claim_workdir(workdir, free)
    assert "config.training.steps: 4 there, 9 now" in caplog.text
    assert read_workdir(workdir).to_dict() == tiny.to_dict()
    store_config(workdir, free)
    assert json.loads((workdir / "config.json").read_text())["training"]["steps"] == 9

    other = ConfigDict(tiny.to_dict())
    other.model.d_model, other.optimizer.b1, other.training.seed = 32, 0.8, 1
    with pytest.raises(ConfigError) as error:
        claim_workdir(workdir, other)
    for line in ("config.model.d_model: 16 there, 32 now", "config.optimizer.b1", "config.training.seed: 0 there"):
        assert line in str(error.value)


def test_a_run_is_scored_with_its_own_model_however_computed(tiny, tmp_path):
    claim_workdir(tmp_path, tiny)
    same, other = ConfigDict(tiny.to_dict()), ConfigDict(tiny.to_dict())
    same.model.dtype, same.model.attention_implementation = "bfloat16", "xla"
    same.model.dropout_rate, same.model.attention_dropout_rate = 0.45, 0.35
    same.training.label_smoothing = 0.3
    check_model(tmp_path, same)
    other.model.norm = "pre"
    with pytest.raises(ConfigError, match=r"parameters of another model: leave out\n  config.model.norm: 'post' there"):
        check_model(tmp_path, other)


def test_keys_younger_than_the_workdir_are_at_their_defaults(tiny, tmp_path):
    claim_workdir(tmp_path, tiny)
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    del stored["model"]["unroll"], stored["model"]["architecture"], stored["mesh"]
    path.write_text(json.dumps(stored))
    assert read_workdir(tmp_path).to_dict() == tiny.to_dict()
    claim_workdir(tmp_path, tiny)
    path.write_text(json.dumps(stored))
    tiny.model.unroll = 2
    with pytest.raises(ConfigError, match=r"config.model.unroll: 1 there, 2 now"):
        claim_workdir(tmp_path, tiny)
    path.write_text('{"architectures": ["Marian"]}')
    with pytest.raises(ConfigError, match=r"is not the folder of a run: config.json names no task"):
        read_workdir(tmp_path)
    path.write_text('{"task": "translation", "model": {"architecture": "perceptron"}}')
    with pytest.raises(ConfigError, match=r"config.json: config.model.architecture = 'perceptron': must be one of"):
        read_workdir(tmp_path)


def test_workdir_that_has_learned_nothing_takes_any_config(tiny, tmp_path):
    """A first attempt that failed, for a wrong key or file, does not spoil the workdir."""
    claim_workdir(tmp_path, tiny)
    (tmp_path / "tokenizer.json").write_text("{}")
    tiny.data.train_split = "val"
    claim_workdir(tmp_path, tiny)
    assert read_workdir(tmp_path).data.train_split == "val"
    assert not (tmp_path / "tokenizer.json").exists()
    (tmp_path / "tokenizer.json").write_text("{}")
    claim_workdir(tmp_path, tiny)  # the files may be others by now
    assert not (tmp_path / "tokenizer.json").exists()


def test_workdir_errors(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run cannot be written"):
        claim_workdir(tmp_path / "file" / "run", tiny)
    with pytest.raises(ConfigError, match=r"file/run cannot be written"):
        store_config(tmp_path / "file" / "run", tiny)
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has checkpoints but no config.json"):
        claim_workdir(tmp_path / "old", tiny)
    with pytest.raises(ConfigError, match=r"is not the folder of a run"):
        read_workdir(tmp_path)
    (tmp_path / "file").rename(tmp_path / "old" / "config.json")
    with pytest.raises(ConfigError, match=r"old is not the folder of a run: Expecting value"):
        claim_workdir(tmp_path / "old", tiny)


def test_a_folder_that_is_no_run_loses_nothing(tiny, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    claim_workdir(tmp_path, tiny)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


def test_defaults_name_every_key():
    assert set(defaults("translation")) == {
        *("task", "model", "data", "optimizer", "training", "evaluation", "checkpoint", "decoding", "mesh")
    }
