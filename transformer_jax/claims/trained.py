"""A condition that trains a recipe and scores the result."""

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from transformer_jax import experiment
from transformer_jax.claims.claim import Measurements, Setting
from transformer_jax.config import load_recipe, override, shrink
from transformer_jax.predictor import Predictor
from transformer_jax.training.divergence import Diverged
from transformer_jax.training.lock import InUse

Score = Callable[[Predictor, Setting], Measurements]

# What a quick run changes beside the sizes: a few steps on a few examples.
QUICK = {
    "training.steps": 4,
    "training.log_every": 2,
    "training.evaluate_every": 4,
    "checkpoint.every": 4,
    "optimizer.warmup_steps": 1,
    "data.max_buckets": 1,
    "decoding.beam_size": 1,
}
POLL = 1.0  # seconds between two attempts to train what another process trains


def validation_scores(predictor: Predictor, setting: Setting) -> Measurements:
    """Return the scores on the validation split that are numbers."""
    return scores_of(predictor, predictor.config.data.validation_split)


def scores_of(predictor: Predictor, split: str) -> Measurements:
    """Return the scores on a split that are numbers."""
    return {
        name: float(value)
        for name, value in predictor.evaluate(split).items()
        if isinstance(value, int | float) and name not in ("step", "examples")
    }


def change(config: ConfigDict, keys: Mapping[str, Any]) -> None:
    """Set keys of a config, e.g. {"model.norm": "pre"}.

    Raises ConfigError, see `config.override`.
    """
    override(config, [f"--config.{key}={value}" for key, value in keys.items()])


def has(config: ConfigDict, key: str) -> bool:
    """Return True if a config has a key, e.g. "decoding.beam_size"."""
    section, name = key.split(".")
    return section in config and name in config[section]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A recipe that is trained with some keys changed, and then scored.

    Conditions that differ only in their score share one training, also if they are
    conditions of different claims.

    recipe: name of a recipe and its argument, e.g. "multi30k.py:en-de,quick", or a
        function that returns a config.
    keys: values of keys that differ from the recipe, e.g. {"model.norm": "pre"}.
    data: folder of the data below that of all data sets, e.g. "multi30k/tok"; or a
        function that writes data and returns their folder; "": the recipe makes its
        data.
    score: what is measured of the trained model, by default `validation_scores`.
    overrides: keys that have other values when the model is scored, e.g.
        {"decoding.beam_size": 50}: those that `transformer_jax.load` may change.
    start: what is trained before, to start from its parameters.
    diverged: what is measured if training diverges. Without it, that is an error.
    quick: further keys of a quick run, e.g. {"data.train_split": "train[:100]"}.

    Functions are told apart by their names and, if they are `functools.partial`, by
    their arguments. So a change of their code is not noticed.
    """

    recipe: str | Callable[[], ConfigDict]
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: str | Callable[[Setting], Path] = ""
    score: Score = validation_scores
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    start: "Trained | None" = None
    diverged: Measurements | None = None
    quick: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, setting: Setting) -> Measurements:
        try:
            workdir = self.train(setting)
        except Diverged:
            if self.diverged is None:
                raise
            return self.diverged
        task = self.config(setting).task
        return self.score(Predictor.load(workdir, self.overrides, task=task), setting)

    def train(self, setting: Setting) -> Path:
        """Train, or finish an earlier run of the same training, and return its folder.

        If another process trains the same, wait for it. Raises the errors of
        `experiment.run`.
        """
        workdir = self._workdir(setting)
        finished = workdir.with_name(f"{workdir.name}.finished")
        if finished.exists():
            return workdir
        config = self.config(setting)
        if self.start is not None:
            config.init_from = str(self.start.train(setting))
        while True:
            try:
                experiment.run(config, workdir)
                break
            except InUse:
                time.sleep(POLL)
        finished.touch()
        return workdir

    def config(self, setting: Setting) -> ConfigDict:
        """Return the config of the training, but for `init_from`."""
        if isinstance(self.recipe, str):
            config = load_recipe(str(setting.recipes / self.recipe))
        else:
            config = self.recipe()
        change(config, {**self.keys, "training.seed": setting.seed})
        if self.data:
            change(config, {"data.directory": self._directory(setting)})
        if setting.quick:
            with config.unlocked():
                shrink(config)
            known = {key: QUICK[key] for key in QUICK if has(config, key)}
            change(config, {**known, **self.quick})
        return config

    def _directory(self, setting: Setting) -> Path:
        if isinstance(self.data, str):
            return setting.data / self.data
        return self.data(setting)

    def _workdir(self, setting: Setting) -> Path:
        design = json.dumps([self.training, setting.quick], sort_keys=True)
        digest = hashlib.sha256(design.encode()).hexdigest()[:8]
        recipe = self.training["recipe"].partition(".py")[0].partition("(")[0]
        name = recipe.rpartition(".")[2]
        return setting.runs / f"{name}-{digest}" / str(setting.seed)

    @property
    def training(self) -> dict[str, Any]:
        """The settings that define the training, as JSON."""
        return {
            "recipe": self.recipe
            if isinstance(self.recipe, str)
            else name_of(self.recipe),
            "keys": texts_of(self.keys),
            "data": self.data if isinstance(self.data, str) else name_of(self.data),
            "start": self.start.training if self.start is not None else None,
        }

    @property
    def design(self) -> Mapping[str, Any]:
        """The settings that determine the result: training, score and overrides."""
        design = {**self.training, "score": name_of(self.score)}
        if self.overrides:
            design["overrides"] = texts_of(self.overrides)
        return design


def texts_of(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return keys with their values as text."""
    return {key: str(value) for key, value in keys.items()}


def name_of(function: str | Callable[..., Any]) -> str:
    """Return the name of a function, with the arguments that a partial function has, or
    a name itself.
    """
    if isinstance(function, str):
        return function
    if not isinstance(function, functools.partial):
        return f"{function.__module__}.{function.__qualname__}"
    keywords = [f"{key}={value!r}" for key, value in function.keywords.items()]
    arguments = [repr(argument) for argument in function.args]
    return f"{name_of(function.func)}({', '.join([*arguments, *keywords])})"
