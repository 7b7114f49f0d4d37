"""ConfigDict at the door; frozen dataclasses, each owned by its room, behind it. All problems are told at once."""

import ast
import dataclasses
import difflib
import json
import logging
import typing
from collections.abc import Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from transformer_jax.tasks import task_class
from transformer_jax.training.checkpoint import CheckpointConfig
from transformer_jax.training.engine import EngineConfig
from transformer_jax.training.evaluation import EvaluationConfig
from transformer_jax.training.optimizer import OptimizerConfig
from transformer_jax.training.sharding import MeshConfig
from transformer_jax.training.task import Task, TrainingConfig

log = logging.getLogger(__name__)

ENGINE: dict[str, type] = {
    "optimizer": OptimizerConfig,
    "training": TrainingConfig,
    "evaluation": EvaluationConfig,
    "checkpoint": CheckpointConfig,
    "mesh": MeshConfig,
}

# What may differ when a workdir's training goes on: keys, or sections with a dot. All else makes another experiment.
FREE = (
    *("data.directory", "data.validation_split", "data.test_split"),
    *("training.steps", "training.log_every", "training.evaluate_every"),
    *("evaluation.", "checkpoint.", "decoding.", "mesh."),
)
# Keys of `model` that change how it is computed, and not what.
SAME_FUNCTION = ("model.dtype", "model.attention_implementation", "model.unroll", "model.remat")


class ConfigError(ValueError):
    """A configuration that cannot be run; the message lists every reason."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The checked sections; a task without decoding has None there."""

    task: str
    model: Any
    data: Any
    optimizer: OptimizerConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    mesh: MeshConfig
    decoding: Any = None

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(self.optimizer, self.training, self.evaluation, self.checkpoint, self.mesh)

    def make_task(self, workdir: epath.PathLike) -> Task:
        return task_class(self.task)(self, workdir)


def defaults(task: str, architecture: str | None = None) -> ConfigDict:
    """Every key of the task with its default, for a recipe to change; its model is the task's first unless named."""
    sections = _sections(task, {} if architecture is None else {"architecture": architecture})
    return ConfigDict({"task": task, **{name: dataclasses.asdict(section()) for name, section in sections.items()}})


def _sections(task: str, model: Mapping[str, Any]) -> dict[str, type]:
    """The classes of a config's sections. Raises ConfigError for a model that the task does not have."""
    cls: Any = task_class(task)
    name = model.get("architecture", next(iter(cls.models)))
    if name not in cls.models:
        known = ", ".join(cls.models)
        raise ConfigError(f"config.model.architecture = {name!r}: must be one of {known} for config.task = {task!r}")
    for other, section in cls.models.items():
        if other != name and model.keys() == {field.name for field in dataclasses.fields(section)}:
            raise ConfigError(
                f"config.model.architecture = {name!r}: config.model has the keys of {other!r}; it is chosen by the "
                "recipe, which has the keys of its model: see config.defaults"
            )
    return {**ENGINE, "model": cls.models[name], **cls.sections}


def parse_arg(arg: str | None, words: Mapping[str, tuple[str, ...]], flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """A recipe's `:ARG`, comma-separated: `key=value` or a bare word.

    `words` maps a key to the values it may have, its default first; `flags` are words that switch something on.
    Returns every key and flag. Raises ConfigError for anything else, and for two values of one key.
    """
    found: dict[str, Any] = {key: values[0] for key, values in words.items()} | dict.fromkeys(flags, False)
    owner = {value: key for key, values in words.items() for value in values}
    given: dict[str, Any] = {}
    for part in filter(None, (arg or "").split(",")):
        key, equals, value = part.partition("=")
        if not equals and part in flags:
            given[part] = True
            continue
        if not equals and part in owner:
            key, value = owner[part], part
        elif not equals or value not in words.get(key, ()):
            choices = [f"{key}={'|'.join(values)}" for key, values in words.items()]
            raise ConfigError(f"config argument {part!r} is unknown: choose from {', '.join([*choices, *flags])}")
        if given.setdefault(key, value) != value:
            raise ConfigError(
                f"config argument {arg!r} has two values of {key}, {given[key]!r} and {value!r}: keep one"
            )
    return found | given


def parse(config: ConfigDict | Mapping[str, Any]) -> Config:
    """Checks types, ranges and what belongs together.

    Raises ConfigError with all problems, each with dotted key, value, rule and remedy. Logs what is unwise.
    """
    raw = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    if "task" not in raw:
        raise ConfigError("config.task is missing: set it to the name of a task, as 'translation'")
    cls: Any = task_class(raw["task"])
    classes = _sections(raw["task"], raw.get("model", {}))
    problems = [_unknown("config", name, ["task", *classes]) for name in raw.keys() - {"task", *classes}]
    sections = {}
    for name, section_class in classes.items():
        found = _check_section(name, section_class, raw.get(name, {}))
        problems += found
        if not found:
            section = section_class(**raw[name])
            found = [f"config.{name}.{key} = {raw[name][key]!r}: {rule}" for key, rule in section.problems()]
            problems += found
        if not found:
            sections[name] = section
    if len(sections) == len(classes):
        parsed = Config(task=raw["task"], **sections)
        for key, rule in [*_between(parsed), *cls.problems(parsed)]:
            section, field = key.split(".")
            problems.append(f"config.{key} = {getattr(sections[section], field)!r}: {rule}")
    if problems:
        raise ConfigError("\n".join(problems))
    for advice in cls.advice(parsed):
        log.warning("%s", advice)
    return parsed


def _between(config: Config) -> list[tuple[str, str]]:
    """Rules between the engine's sections."""
    problems = []
    rows, micro = config.data.rows_multiple, config.training.microbatches
    if rows % micro:
        problems.append(
            (
                "training.microbatches",
                f"must divide data.rows_multiple = {rows}: set that to a multiple of {micro}",
            )
        )
    every, checked = config.checkpoint.every, config.training.evaluate_every
    if config.checkpoint.keep_best and every % checked:
        problems.append(
            (
                "checkpoint.every",
                f"must be a multiple of training.evaluate_every = {checked} to keep the best: "
                "change either, or set checkpoint.keep_best to 0",
            )
        )
    if config.evaluation.checkpoint == "average" and config.evaluation.average_last > config.checkpoint.keep_latest:
        problems.append(
            (
                "evaluation.average_last",
                f"must not be beyond checkpoint.keep_latest = {config.checkpoint.keep_latest}, since older ones are "
                f"removed: set it to {config.checkpoint.keep_latest}, or train with more kept",
            )
        )
    if config.evaluation.checkpoint == "ema" and not config.training.ema_decay:
        problems.append(
            (
                "evaluation.checkpoint",
                "training.ema_decay = 0.0 keeps no moving average: train with it at 0.999, say, or set this to "
                "'latest', 'best' or 'average'",
            )
        )
    return problems


def _unknown(where: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}"
    return f"{where}.{name} is not a key: {hint}"


def _check_section(name: str, cls: type, values: Mapping[str, Any]) -> list[str]:
    types = typing.get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls)]
    problems = [_unknown(f"config.{name}", key, fields) for key in values if key not in fields]
    for key in fields:
        if key not in values:
            problems.append(f"config.{name}.{key} is missing: set it to a value of type {types[key].__name__}")
        elif type(values[key]) is not types[key] and not (types[key] is float and type(values[key]) is int):
            problems.append(f"config.{name}.{key} = {values[key]!r}: must be of type {types[key].__name__}")
    return problems


def override(config: ConfigDict, arguments: list[str]) -> None:
    """Applies `--config.a.b=v` arguments to `config`.

    For programs whose config comes from a workdir. Values are read as the type they replace.
    Raises ConfigError for unknown keys and values of another type.
    """
    for argument in arguments:
        key, equals, text = argument.removeprefix("--config.").partition("=")
        if not equals:
            raise ConfigError(f"{argument}: write it as --config.{key}=VALUE")
        *path, last = key.split(".")
        section: Any = config
        for name in (*path, last):
            if not isinstance(section, ConfigDict) or name not in section:
                known = list(section.keys()) if isinstance(section, ConfigDict) else []
                raise ConfigError(_unknown("config", key, [".".join((*path, k)) for k in known]))
            section, parent = section[name], section
        try:
            parent[last] = text if isinstance(section, str) else _literal(text)
        except (TypeError, ValueError, SyntaxError) as error:
            raise ConfigError(f"config.{key} = {text!r}: must be of type {type(section).__name__}") from error


def _literal(text: str) -> Any:
    return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)


def claim_workdir(workdir: epath.PathLike, config: ConfigDict) -> None:
    """Writes config.json into a new workdir; refuses an old one for another experiment.

    A workdir without checkpoints has learned nothing yet: it takes any config, and tokenizers are trained anew. One
    with checkpoints keeps its config.json as it is, until `store_config` is called with what has proved to be of use.
    Raises ConfigError, naming the keys that differ, if it holds another experiment, or if it cannot be written.
    """
    workdir = epath.Path(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        old = read_workdir(workdir).to_dict() if (workdir / "config.json").exists() else None
        if (workdir / "checkpoints").exists():
            if old is None:
                raise ConfigError(f"{workdir} has checkpoints but no config.json: choose another --workdir")
            _compare(workdir, old, config.to_dict())
            return
        if old is not None:
            for name in ("tokenizer.json", "tokenizer.source.json", "tokenizer.target.json"):
                (workdir / name).unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(workdir, error) from error
    store_config(workdir, config)


def store_config(workdir: epath.PathLike, config: ConfigDict) -> None:
    """Writes config.json. Raises ConfigError if it cannot be written."""
    path = epath.Path(workdir) / "config.json"
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(workdir, error) from error


def _unwritable(workdir: epath.PathLike, error: OSError) -> ConfigError:
    return ConfigError(f"--workdir={workdir} cannot be written: {error}; choose another")


def check_model(workdir: epath.PathLike, config: ConfigDict) -> None:
    """Raises ConfigError, naming the keys, where `config` makes another model of the parameters in `workdir`. Dropout
    is for training alone."""
    differing = _differing(read_workdir(workdir).to_dict(), config.to_dict())
    refused = [
        line
        for key, line in differing.items()
        if key.startswith(("task", "model.")) and key not in SAME_FUNCTION and not key.endswith("dropout_rate")
    ]
    if refused:
        raise ConfigError("\n  ".join([f"{workdir} holds parameters of another model: leave out", *refused]))


def _differing(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    there, now = _flat(old), _flat(new)
    return {
        key: f"config.{key}: {there.get(key)!r} there, {now.get(key)!r} now"
        for key in sorted(there.keys() | now.keys())
        if there.get(key) != now.get(key)
    }


def _compare(workdir: epath.Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    differing = _differing(old, new)
    refused = [line for key, line in differing.items() if not key.startswith(FREE)]
    if refused:
        raise ConfigError("\n  ".join([f"{workdir} holds another experiment; choose another --workdir:", *refused]))
    for line in differing.values():
        log.info("changed since the workdir was made: %s", line)


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def read_workdir(workdir: epath.PathLike) -> ConfigDict:
    """The config of a run; keys that it is too old to have are at their defaults.

    Raises ConfigError if there is none that can be read.
    """
    path = epath.Path(workdir) / "config.json"
    try:
        stored = json.loads(path.read_text())
        if not isinstance(stored, dict) or "task" not in stored or not isinstance(stored.get("model", {}), dict):
            raise ValueError("config.json names no task, or no model")
        config = defaults(stored["task"], stored.get("model", {}).get("architecture")).to_dict()
        for name, value in stored.items():
            config[name] = {**config[name], **value} if name in config and isinstance(value, dict) else value
        return ConfigDict(config)
    except ConfigError as error:
        raise ConfigError(f"--workdir={workdir}, config.json: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--workdir={workdir} is not the folder of a run: {error}; train one there with scripts/train.py"
        ) from error
