"""The folder of a run: its config.json, and checks that a config matches the
experiment in the folder.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from transformer_jax import files
from transformer_jax.config import ConfigError, defaults, fields, shares
from transformer_jax.tasks import NOT_TRAINED, TASKS, allow, is_known
from transformer_jax.training.task import Config, Task

log = logging.getLogger(__name__)


def path_of(workdir: epath.PathLike, option: str = "--workdir") -> epath.Path:
    """Return the path of a workdir.

    Raises UserError if the name, given by `option`, cannot be used for a folder.
    """
    name = os.fspath(workdir)
    scheme, separator, rest = name.partition("://")
    if not name:
        rule = "is empty: name a folder, e.g. ./run"
    elif name.startswith("~"):
        rule = (
            "refers to the home of an unknown user: "
            "write the full path, or ./~… for a folder with this name"
        )
    elif not name.isprintable():
        rule = "contains unprintable characters: choose another name"
    elif separator and (scheme not in ("gs", "s3") or not rest.strip("/")):
        rule = "cannot be written to: name a folder, or gs://BUCKET/FOLDER"
    else:
        path = epath.Path(workdir)
        if not separator:
            with files.explained(
                f"{option}={name} cannot be used", "name another folder"
            ):
                files.status(f"{name}/.")  # fails if its files cannot be reached
        return path
    raise ConfigError(f"{option}={ascii(name)[1:-1]} {rule}")


def settled(workdir: epath.PathLike, config: ConfigDict) -> ConfigDict:
    """Return a copy of `config` as a run in `workdir` uses and stores it.

    Paths of data become absolute, so that the run can be continued from any folder. A
    key that follows training.steps, but may not change in a workdir, keeps its value in
    a workdir with checkpoints: the warm-up stays as it was if the run is made longer.
    """
    if not isinstance(config, ConfigDict) or "task" not in config:
        return config
    copy = config.to_dict()
    field_of = fields(config.task, config.get("model", {}))
    for name, field in field_of.items():
        section, key = name.split(".")
        if "path" in field.metadata and key in copy.get(section, {}):
            copy[section][key] = absolute(copy[section][key])
    copy["init_from"] = absolute(copy.get("init_from", ""))
    workdir = epath.Path(workdir)
    if files.exists(workdir / "checkpoints") and files.exists(workdir / "config.json"):
        stored = read(workdir, task=config.task)
        if absolute(stored.init_from) == copy["init_from"]:
            copy["init_from"] = stored.init_from
        for name in shares(config):
            section, key = name.split(".")
            if not field_of[name].metadata.get("free"):
                copy[section][key] = stored[section][key]
    return ConfigDict(copy)


def absolute(path: Any) -> Any:
    """Return the absolute path of a local file or folder, with symbolic links in it."""
    if not isinstance(path, str) or not path or "://" in path:
        return path
    expanded = os.path.expanduser(path)
    return expanded if expanded.startswith("~") else os.path.abspath(expanded)


# the workdir on the command line, which is known before recipes run
_named: list[str] = []


def name_on_command_line(workdir: str) -> None:
    """Remember the workdir of the run that a command may continue, for
    `continued_from`.
    """
    _named[:] = [workdir]


def continued_from(source: str) -> dict[str, Any] | None:
    """Return the config of the run on the command line, if it has checkpoints and
    started from `source`.
    """
    for name in _named:
        workdir = path_of(os.path.expanduser(name))
        if files.exists(workdir / "checkpoints") and files.exists(
            workdir / "config.json"
        ):
            config = read(workdir).to_dict()
            if absolute(config["init_from"]) == absolute(source):
                return config
    return None


def claim(workdir: epath.PathLike, config: ConfigDict) -> None:
    """Write config.json into a new workdir; reject an existing workdir that holds
    another experiment.

    A workdir without checkpoints accepts any config. The tokenizers that an earlier
    start made there are removed, to be made again; those that the user put there or has
    changed stay. A workdir with checkpoints keeps its config.json until `store` is
    called, which happens once the new config is known to work.

    Raises ConfigError if the workdir holds another experiment (the message names the
    keys that differ), if its config.json is not that of a run, or if it cannot be
    written. Raises OSError if the disk fails.
    """
    workdir = epath.Path(workdir)
    try:
        files.ensure_folder(workdir)
        begun = files.exists(workdir / "config.json")
        if files.exists(workdir / "checkpoints"):
            if not begun:
                raise ConfigError(
                    f"{workdir} has checkpoints but no config.json: "
                    "choose another --workdir"
                )
            _compare(
                workdir, read(workdir, task=config.task).to_dict(), config.to_dict()
            )
            return
        if begun:
            _stored(workdir)  # refuses the folder of something else
            _remove_made_tokenizers(workdir)
    except OSError as error:
        if not files.is_lasting(error):
            raise
        raise _unwritable(workdir, error) from error
    store(workdir, config)


def _remove_made_tokenizers(workdir: epath.Path) -> None:
    for path in workdir.iterdir():
        if path.match("tokenizer*.json"):
            if files.is_made(path):
                log.info("%s of an earlier start is removed", path)
                path.unlink(missing_ok=True)
            else:
                log.info(
                    "%s was not made by an earlier start: it is kept and used", path
                )


def store(workdir: epath.PathLike, config: ConfigDict) -> None:
    """Write config.json.

    Raises ConfigError if it cannot be written, and OSError if the disk fails.
    """
    text = json.dumps(config.to_dict(), indent=2) + "\n"
    try:
        files.write(epath.Path(workdir) / "config.json", text.encode())
    except files.OutputError as error:
        raise _unwritable(workdir, error) from error


def _unwritable(workdir: epath.PathLike, error: Exception) -> ConfigError:
    return ConfigError(
        f"--workdir={workdir} cannot be written: {error}; choose another"
    )


def check_model(workdir: epath.PathLike, config: ConfigDict) -> None:
    """Raise ConfigError if `config` defines a model other than that of the parameters
    in `workdir`.

    The message names the keys that differ. Keys that change only how the model is
    computed, or only the randomness of training, may differ.
    """
    field_of = fields(config.task, config.model)
    stored = read(workdir, task=config.task).to_dict()
    refused = [
        line
        for key, line in _differing(stored, config.to_dict()).items()
        if _defines_model(key, field_of)
    ]
    if refused:
        title = f"{workdir} holds parameters of another model; do not change:"
        raise ConfigError("\n  ".join([title, *refused]))


def check_same_model(source: str, theirs: Any, ours: Config) -> None:
    """Raise ConfigError if `theirs`, the config of the model in `source`, is not that
    of the model of `ours`.

    The message names the keys that differ. Keys that change only how the model is
    computed, or only the randomness of training, may differ.
    """
    field_of = fields(ours.task, {"architecture": ours.model.architecture})
    differing = _differing(
        {"model": dataclasses.asdict(theirs)},
        {"model": dataclasses.asdict(ours.model)},
        ("there", "here"),
    )
    if another := differing.get("model.architecture"):
        raise ConfigError(
            f"config.init_from = {source!r} holds another kind of model; "
            f"name another run:\n  {another}"
        )
    refused = [line for key, line in differing.items() if _defines_model(key, field_of)]
    if refused:
        title = (
            f"config.init_from = {source!r} holds another model; "
            "set these keys to its values:"
        )
        raise ConfigError("\n  ".join([title, *refused]))


def differing_outputs(theirs: Config, ours: Config) -> list[str]:
    """Return the dotted keys outside the model section that define the outputs of a
    model, and that differ.

    Tasks of different kinds have none in common.
    """
    if theirs.task != ours.task:
        return []
    field_of = fields(ours.task, {"architecture": ours.model.architecture})
    differing = _differing(dataclasses.asdict(theirs), dataclasses.asdict(ours))
    return [
        key
        for key in differing
        if key in field_of and field_of[key].metadata.get("model")
    ]


def _defines_model(key: str, field_of: Mapping[str, dataclasses.Field]) -> bool:
    """Return True for a key that defines the model, its outputs or the parameters in a
    checkpoint, and not only how they are computed or trained.
    """
    metadata = field_of[key].metadata.keys() if key in field_of else set()
    if "how" in metadata or "off" in metadata:
        return False
    defines = not metadata.isdisjoint({"model", "parameters"})
    return defines or key.startswith(("task", "model."))


def _differing(
    old: dict[str, Any],
    new: dict[str, Any],
    where: tuple[str, str] = ("in the workdir", "now"),
) -> dict[str, str]:
    """Return a line for each key that has different values in two configs."""
    where_old, where_new = where
    old_values = _flat(old)
    new_values = _flat(new)
    lines = {}
    for key in sorted(old_values.keys() | new_values.keys()):
        before = old_values.get(key)
        now = new_values.get(key)
        if before != now:
            lines[key] = f"config.{key}: {before!r} {where_old}, {now!r} {where_new}"
    return lines


def _compare(workdir: epath.Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    differing = _differing(old, new)
    field_of = fields(new["task"], new["model"])
    refused = [
        line
        for key, line in differing.items()
        if key not in field_of or not field_of[key].metadata.get("free")
    ]
    if refused:
        title = f"{workdir} holds another experiment; choose another --workdir:"
        raise ConfigError("\n  ".join([title, *refused]))
    for line in differing.values():
        log.info("changed since the workdir was created: %s", line)


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": v for key, v in value.items()}
        else:
            flat[name] = value
    return flat


def read(
    workdir: epath.PathLike,
    option: str = "--workdir",
    task: str | type[Task] | None = None,
) -> ConfigDict:
    """Return the config of a run. Keys missing from its config.json get their defaults.

    A folder does not choose code to run: its task must be one of this package, or
    `task`, which the user has named.

    Raises ConfigError if there is no readable config.json, or if it names another task.
    The message says that `option` named the workdir.
    """
    path = path_of(workdir, option)
    if task is not None:
        allow(task)
    try:
        stored = _stored(path, option)
    except OSError as error:
        if not isinstance(error, FileNotFoundError) and not files.is_lasting(error):
            raise
        raise ConfigError(
            f"{option}={workdir} is not the folder of a run: "
            f"{error}; train there first with scripts/train.py"
        ) from error
    try:
        config = _with_defaults(stored)
    except ConfigError as error:
        raise ConfigError(f"{option}={workdir}, config.json: {error}") from error
    return ConfigDict(config)


def _stored(workdir: epath.Path, option: str = "--workdir") -> dict[str, Any]:
    """Return the content of config.json.

    Raises OSError if it cannot be read, and ConfigError if no run wrote it.
    """
    where = f"{option}={workdir}, config.json"
    try:
        stored = json.loads((workdir / "config.json").read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: it is damaged ({error}): restore it, or choose another folder"
        ) from error
    if (
        not isinstance(stored, dict)
        or "task" not in stored
        or not isinstance(stored.get("model", {}), dict)
    ):
        raise ConfigError(
            f"{where}: it does not specify a task and a model: "
            "choose the folder of a run, or a new one"
        )
    return stored


def _with_defaults(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the config with defaults for the keys that a config.json lacks."""
    _check_task(stored["task"])
    config = defaults(
        stored["task"], stored.get("model", {}).get("architecture")
    ).to_dict()
    for name, value in stored.items():
        section = isinstance(config.get(name), dict)
        if name in config and section != isinstance(value, dict):
            kind = "an object of keys and values" if section else "a text"
            raise ConfigError(f"config.{name} = {value!r:.80}: must be {kind}")
        if not section:
            config[name] = value
            continue
        for key, item in value.items():
            if not _is_retired(f"{name}.{key}", item):
                # JSON has no tuples
                config[name][key] = tuple(item) if isinstance(item, list) else item
    return config


# Keys of earlier versions that an older config.json may have. With the value here, the
# model is the same without the key.
RETIRED = {"model.match_embedding": False}


def _is_retired(key: str, value: Any) -> bool:
    """Return True for a key of an earlier version that may be left out.

    Raises ConfigError if it has a value that this version cannot follow.
    """
    if key in RETIRED and value != RETIRED[key]:
        raise ConfigError(
            f"config.{key} = {value!r}: this version has no such key; use the version "
            "of transformer_jax that trained this run, or train another run"
        )
    return key in RETIRED


def _check_task(name: Any) -> None:
    """Raise ConfigError for a task that a folder may not choose."""
    if is_known(name):
        return
    if str(name) in NOT_TRAINED:
        raise ConfigError(
            f"config.task = {name!r} is not a task: {NOT_TRAINED[str(name)]}"
        )
    if isinstance(name, str) and ":" in name:
        raise ConfigError(
            f"config.task = {name!r} is not a task of transformer_jax, "
            "and a folder may not choose code to run. "
            f"If you trust {name.partition(':')[0]}, name the task yourself: "
            f"--task={name}, or in Python transformer_jax.load(…, task={name!r})"
        )
    remedy = ""
    if name == "translation":
        remedy = (
            ". Version 0.1 had 'translation', with other config keys; "
            "use that version for its runs"
        )
    raise ConfigError(
        f"config.task = {name!r} is not a task: "
        f"choose one of {', '.join(TASKS)}{remedy}"
    )
