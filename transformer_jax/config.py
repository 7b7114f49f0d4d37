"""Parse a ConfigDict into checked, frozen dataclasses, and report all of its
problems at once.
"""

import dataclasses
import difflib
import logging
import math
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from etils import epath
from ml_collections import ConfigDict, FieldReference, config_flags

from transformer_jax import shipped
from transformer_jax.errors import UserError
from transformer_jax.tasks import config_class, task_class
from transformer_jax.training.task import Config, Task

log = logging.getLogger(__name__)


class ConfigError(UserError):
    """Raised for an invalid configuration. The message lists every problem."""


def make_task(config: Config, workdir: epath.PathLike) -> Task:
    """Return an instance of the task `config.task`."""
    task: Any = task_class(config.task)
    return task(config, workdir)


def defaults(task: str, architecture: str | None = None) -> ConfigDict:
    """Return a ConfigDict of all keys of a task, with their defaults.

    `architecture` defaults to the task's first.
    """
    classes = sections(
        task, {} if architecture is None else {"architecture": architecture}
    )
    return ConfigDict(
        {
            "task": task,
            "init_from": "",
            **{
                name: dataclasses.asdict(section()) for name, section in classes.items()
            },
        }
    )


def sections(task: str, model: Mapping[str, Any]) -> dict[str, type]:
    """Return the dataclass of each config section, given the task and the section
    `model`.

    Raises ConfigError if the task has no such architecture, or if the keys of `model`
    are those of another one.
    """
    classes = typing.get_type_hints(config_class(task))
    del classes["task"], classes["init_from"]
    models = {
        section.architecture: section for section in _alternatives(classes["model"])
    }
    name = model.get("architecture", next(iter(models)))
    if not isinstance(name, str) or name not in models:
        raise ConfigError(
            f"config.model.architecture = {name!r}: "
            f"must be one of {', '.join(models)} for config.task = {task!r}"
        )
    for other, section in models.items():
        keys = {field.name for field in dataclasses.fields(section)}
        if other != name and model.keys() == keys:
            raise ConfigError(
                f"config.model.architecture = {name!r}: "
                f"config.model has the keys of {other!r}; set the architecture "
                "in the recipe instead, by config.defaults(task, architecture)"
            )
    return {**classes, "model": models[name]}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def fields(task: str, model: Mapping[str, Any]) -> dict[str, dataclasses.Field]:
    """Return the dataclass field of every dotted key.

    Its metadata includes that of its section.
    """
    of_section = {
        field.name: field.metadata for field in dataclasses.fields(config_class(task))
    }
    by_key = {}
    for section, cls in sections(task, model).items():
        for field in dataclasses.fields(cls):
            metadata = {**of_section[section], **field.metadata}
            copy = dataclasses.field(metadata=metadata)
            copy.name = field.name
            copy.default = field.default
            by_key[f"{section}.{field.name}"] = copy
    return by_key


def parse_arg(
    arg: str | None, words: Mapping[str, tuple[str, ...]], flags: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Parse a recipe's `:ARG`: comma-separated items, each `key=value`, a bare value,
    or a flag.

    `words` maps each key to its allowed values, with the default first; () allows any
    text but "", the default. `flags` are words that are True if given. Returns the
    value of every key and flag. Raises ConfigError for an unknown item, and for two
    values of one key.
    """
    standard: dict[str, Any] = {
        key: values[0] if values else "" for key, values in words.items()
    }
    standard |= dict.fromkeys(flags, False)
    owner = {value: key for key, values in words.items() for value in values}
    given: dict[str, Any] = {}
    for part in filter(None, (arg or "").split(",")):
        key, equals, value = part.partition("=")
        if not equals and part in flags:
            given[part] = True
            continue
        if not equals and part in owner:
            key = owner[part]
            value = part
        elif not equals or not (
            value in words.get(key, ()) or (value and words.get(key) == ())
        ):
            choices = [
                f"{key}={'|'.join(values) or '…'}" for key, values in words.items()
            ]
            remedy = ""
            if "pair" in words and (
                pair := re.fullmatch("([a-z]{2,3})-([a-z]{2,3})", value or part)
            ):
                remedy = (
                    f"; for your own files use --config=configs/own_files.py:{pair[0]}"
                )
            raise ConfigError(
                f"config argument {part!r} is unknown: "
                f"choose from {', '.join([*choices, *flags])}{remedy}"
            )
        if given.setdefault(key, value) != value:
            raise ConfigError(
                f"config argument {arg!r} has two values for {key}, "
                f"{given[key]!r} and {value!r}: keep one"
            )
    return standard | given


class Share(FieldReference):
    """A reference to a part of training.steps, made by `share`.

    by_hand: a value was set instead, which no longer follows training.steps.
    """

    by_hand = False

    def set(self, value: Any, type_safe: bool = True) -> None:
        self.by_hand = not isinstance(value, FieldReference)
        super().set(value, type_safe)


def shares(config: ConfigDict) -> dict[str, Share]:
    """Return the dotted keys that hold a `share`, with their references."""
    return {
        f"{name}.{key}": value
        for name, section in config.items()
        if isinstance(section, ConfigDict)
        for key, value in section.items(preserve_field_references=True)
        if isinstance(value, Share) and not value.by_hand
    }


def share(config: ConfigDict, parts: int, of: int = 1) -> Any:
    """Return `of` / `parts` of training.steps, rounded up, as a reference that follows
    later changes of training.steps.

    Use it for evaluate_every, checkpoint.every and warm-up, so that
    --config.training.steps alone shortens a recipe.
    """
    return Share((config.training.get_ref("steps") * of + parts - 1) // parts)


def separate_shares(config: ConfigDict) -> None:
    """Give each key that holds a `share` a reference of its own.

    After `a = b = share(config, 4)`, both keys hold one reference, so that overriding
    one of them would change the other.
    """
    for name, reference in shares(config).items():
        section, key = name.split(".")
        with config.unlocked():
            del config[section][key]
            config[section][key] = Share(reference)


def parse(config: ConfigDict | Mapping[str, Any]) -> Config:
    """Check types, ranges and combinations of values, and return the config as
    dataclasses.

    Logs a warning for valid but unwise values. Raises ConfigError with all problems,
    each with dotted key, value, rule and remedy.
    """
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise ConfigError(
            f"the config is {config!r}: "
            "get_config must return a ConfigDict, e.g. from config.defaults"
        )
    raw = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    if "task" not in raw:
        raise ConfigError(
            "config.task is missing: name a task, e.g. 'sequence_to_sequence'"
        )
    cls = config_class(raw["task"])
    classes = sections(raw["task"], raw.get("model", {}))
    names = ["task", "init_from", *classes]
    problems = [_unknown("config", name, names) for name in raw.keys() - {*names}]
    start = raw.get("init_from", "")
    if not isinstance(start, str):
        problems.append(
            f"config.init_from = {start!r}: "
            "must be the workdir of another run, or '' for none"
        )
        start = ""
    parsed, of_sections = parse_sections(raw, classes)
    problems += of_sections
    if len(parsed) == len(classes):
        checked = cls(task=raw["task"], init_from=os.path.expanduser(start), **parsed)
        for key, rule in checked.problems():
            section, field = key.split(".")
            problems.append(
                f"config.{key} = {getattr(parsed[section], field)!r}: {rule}"
            )
        problems += _check_best_metric(checked, task_class(raw["task"]).metrics)
    if problems:
        raise ConfigError("\n".join(problems))
    for advice in checked.advice():
        log.warning("%s", advice)
    return checked


def parse_sections(
    raw: Mapping[str, Any], classes: Mapping[str, type]
) -> tuple[dict[str, Any], list[str]]:
    """Return the sections of a config as dataclasses, and a message for each invalid
    key.

    A section with an invalid key is left out. `classes` are the dataclasses by name.
    """
    parsed: dict[str, Any] = {}
    problems = list[str]()
    for name, section_class in classes.items():
        of_section = _check_section(name, section_class, raw.get(name, {}))
        if not of_section:
            section = section_class(**raw[name])
            of_section = [
                f"config.{name}.{key} = {raw[name][key]!r}: {rule}"
                for key, rule in section.problems()
            ]
        if not of_section:
            parsed[name] = section
        problems += of_section
    return parsed, problems


def _check_best_metric(config: Config, metrics: Iterable[str]) -> list[str]:
    """Return the problem with checkpoint.best_metric, if a step is chosen by it."""
    name = config.checkpoint.best_metric
    if config.evaluation.checkpoint == "best":
        remedy = "or set evaluation.checkpoint = 'latest'"
    elif config.checkpoint.keep_best:
        remedy = "or set checkpoint.keep_best = 0"
    else:
        return []
    if name in metrics:
        return []
    close = difflib.get_close_matches(name, metrics, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return [
        f"config.checkpoint.best_metric = {name!r}: must be one of the task's "
        f"scores, {', '.join(metrics)}{hint}; {remedy}"
    ]


def _unknown(section: str, name: str, keys: list[str]) -> str:
    close = difflib.get_close_matches(name, keys, 1)
    hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(keys)}"
    return f"{section}.{name} is not a key: {hint}"


def _check_section(name: str, cls: type, values: Mapping[str, Any]) -> list[str]:
    hints = typing.get_type_hints(cls)
    keys = [field.name for field in dataclasses.fields(cls)]
    problems = [
        _unknown(f"config.{name}", key, keys) for key in values if key not in keys
    ]
    for key in keys:
        if key not in values:
            kind = typing.get_origin(hints[key]) or hints[key]
            problems.append(
                f"config.{name}.{key} is missing: "
                f"set it to a value of type {kind.__name__}"
            )
        elif rule := _broken_rule(values[key], hints[key]):
            problems.append(f"config.{name}.{key} = {values[key]!r}: {rule}")
    return problems


def _broken_rule(value: Any, hint: Any) -> str:
    """Return the rule that a value of a field breaks, given the field's type, or ""."""
    kind = typing.get_origin(hint) or hint
    is_integer_for_float = kind is float and type(value) is int
    if type(value) is not kind and not is_integer_for_float:
        return f"must be of type {kind.__name__}"
    if kind is float and not math.isfinite(value):
        return "must be finite; set it to a number"
    entries = [value]
    if kind is tuple:
        entries = value
        entry_type = typing.get_args(hint)[0]
        if not all(isinstance(entry, entry_type) for entry in entries):
            return f"its values must be of type {entry_type.__name__}"
    if not all(map(_fits, entries)):
        return "must be less than 2³¹"
    return ""


def _fits(value: Any) -> bool:
    """Return False for an integer that does not fit in 32 bits, the size of integers
    on devices.
    """
    return type(value) is not int or -(2**31) <= value < 2**31


def override(config: ConfigDict, arguments: list[str]) -> None:
    """Apply `--config.a.b=v` or `--config.a.b v` arguments to `config` in place.

    `ml_collections.config_flags` reads each value as the type of the value that it
    replaces. Raises ConfigError for unknown keys and for values of another type.
    """
    by_key: dict[str, list[str]] = {}
    key = ""
    for argument in arguments:
        if match := re.match(r"--?(?:no)?config\.([^=]*)", argument):
            key = match[1]
            _value_of(key, config)
        by_key.setdefault(key, []).append(argument)
    for key, group in by_key.items():
        _apply(config, key, ["", *group])


def _apply(config: ConfigDict, key: str, command_line: list[str]) -> None:
    """Apply the arguments for one key."""
    parsed = absl_flags.FlagValues()
    config_flags.DEFINE_config_dict(
        "config", config, flag_values=parsed, lock_config=False, sys_argv=command_line
    )
    try:
        rest = parsed(command_line)[1:]
    except absl_flags.IllegalFlagValueError as error:
        value = re.sub(r"--?(no)?config\.[^=]*=", "", command_line[-1], count=1)
        kind = type(_value_of(key, config)).__name__
        example = ", written as ('a', 'b')" if kind == "tuple" else ""
        raise ConfigError(
            f"config.{key} = {value!r}: must be of type {kind}{example}"
        ) from error
    except absl_flags.Error:
        rest = [""]
    if rest:
        raise ConfigError(
            f"{' '.join(command_line[1:])}: write it as --config.{key}=VALUE"
        )


def _value_of(key: str, config: ConfigDict) -> Any:
    """Return the value of a dotted key.

    Raises ConfigError if there is none.
    """
    if not key:
        raise ConfigError("--config.: write it as --config.SECTION.KEY=VALUE")
    section: Any = config
    for name in key.split("."):
        if not isinstance(section, ConfigDict) or name not in section:
            raise ConfigError(_no_such_key(key, config))
        section = section[name]
    if isinstance(section, ConfigDict):
        raise ConfigError(
            f"config.{key} is a section: "
            f"set a key in it, e.g. config.{key}.{next(iter(section))}"
        )
    return section


def _no_such_key(key: str, config: ConfigDict) -> str:
    """Return the message for an unknown dotted key, with a similar key of its
    section or the same name elsewhere.
    """
    section, _, name = key.rpartition(".")
    keys = [
        f"{part}.{k}"
        for part, values in config.items()
        if isinstance(values, ConfigDict)
        for k in values
    ]
    names = [k.rpartition(".")[2] for k in keys if k.startswith(f"{section}.")]
    close = [f"{section}.{k}" for k in difflib.get_close_matches(name, names, 1)]
    same_name = [k for k in keys if k.endswith(f".{name}")]
    suggestions = close or same_name or difflib.get_close_matches(key, keys, 1, 0.8)
    if suggestions:
        return f"config.{key} is not a key: did you mean {suggestions[0]}?"
    if names:
        return (
            f"config.{key} is not a key: "
            f"the keys of config.{section} are {', '.join(names)}"
        )
    return (
        f"config.{key} is not a key: "
        f"the sections are {', '.join(k for k in config if k != 'task')}"
    )


def load_recipe(text: str) -> ConfigDict:
    """Run a recipe, `configs/NAME.py[:ARG]`, and return the config from its function
    `get_config([ARG])`. A NAME alone is a recipe of transformer_jax.

    `ml_collections.config_flags` reads recipes too, but it names no line of a recipe
    that fails, and takes the first colon of a path for the beginning of ARG.
    Raises ConfigError if there is no such file, or if the recipe fails.
    """
    name, colon, arg = _split_recipe(text)
    path = Path(os.path.expanduser(name))
    if not os.path.isfile(path):
        ours = shipped.recipe(name)
        if ours is None:
            raise ConfigError(
                f"--config={text}: there is no file {name!r} in {Path.cwd()}; "
                f"{_recipe_hint(path)}"
            )
        path = ours
    try:
        recipe = sys.modules["recipe"] = types.ModuleType("recipe")
        recipe.__file__ = str(path)
        exec(compile(path.read_bytes(), str(path), "exec"), recipe.__dict__)
        if not callable(get_config := getattr(recipe, "get_config", None)):
            raise ConfigError(
                "the recipe has no function get_config(arg): see configs/dates.py"
            )
        config = get_config(*[arg] if colon else [])
        if not isinstance(config, ConfigDict):
            raise ConfigError(
                f"get_config returned {config!r}: "
                "return a ConfigDict, see config.defaults"
            )
        separate_shares(config)
    except ConfigError as error:
        raise ConfigError(f"--config={text}: {error}") from error
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        where = f", line {lines[-1]}" if lines else ""
        raise ConfigError(
            f"--config={text}{where}: {type(error).__name__}: {error}; fix the recipe"
        ) from error
    return config.lock()


def _recipe_hint(path: Path) -> str:
    """Return what to write instead of a path to no file."""
    if shipped.recipe(path.stem) is not None:
        return f"write --config={path.stem} for the recipe of transformer_jax"
    return "name a recipe, e.g. --config=dates"


def _split_recipe(text: str) -> tuple[str, str, str]:
    """Split FILE[:ARG] at the first colon before which a file is named.

    Folders may have colons in their names.
    """
    for colon in re.finditer(":", text):
        if os.path.isfile(os.path.expanduser(text[: colon.start()])):
            return text[: colon.start()], ":", text[colon.end() :]
    whole = os.path.isfile(os.path.expanduser(text))
    return (text, "", "") if whole else text.partition(":")


def shrink(config: ConfigDict) -> None:
    """Shrink a config in place until it runs in seconds.

    Keys that are not sizes, and sizes of 0, keep their values.
    """
    before = config.to_dict()
    field_of = fields(config.task, before["model"])
    for key, field in field_of.items():
        section, name = key.split(".")
        value = before[section][name]
        is_size = type(value) in (int, tuple) and value
        if "small" in field.metadata and is_size:
            like = field.metadata["like"]
            if like and value == before[section][like]:
                field = field_of[f"{section}.{like}"]
            config[section][name] = field.metadata["small"]
