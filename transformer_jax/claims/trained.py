"""A condition that trains a recipe and scores the result."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from transformer_jax import experiment
from transformer_jax.claims.claim import Measurements, Setting
from transformer_jax.config import load_recipe, override, shrink
from transformer_jax.predictor import Predictor
from transformer_jax.training.divergence import Diverged

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


def validation_scores(predictor: Predictor, setting: Setting) -> Measurements:
    """Return the scores on the validation split that are numbers."""
    scores = predictor.evaluate(predictor.config.data.validation_split)
    return {
        name: float(value)
        for name, value in scores.items()
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

    recipe: name of a recipe and its argument, e.g. "multi30k.py:en-de,quick".
    keys: values of keys that differ from the recipe, e.g. {"model.norm": "pre"}.
    data: folder of the data below that of all data sets, e.g. "multi30k/tok"; "": the
        recipe makes its data.
    score: what is measured of the trained model, by default `validation_scores`.
    diverged: what is measured if training diverges. Without it, that is an error.
    quick: further keys of a quick run, e.g. {"data.train_split": "train[:100]"}.
    """

    recipe: str
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: str = ""
    score: Score = validation_scores
    diverged: Measurements | None = None
    quick: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, setting: Setting) -> Measurements:
        config = load_recipe(str(setting.recipes / self.recipe))
        change(config, {**self.keys, "training.seed": setting.seed})
        if self.data:
            change(config, {"data.directory": setting.data / self.data})
        if setting.quick:
            with config.unlocked():
                shrink(config)
            known = {key: QUICK[key] for key in QUICK if has(config, key)}
            change(config, {**known, **self.quick})
        workdir = setting.workdir / "run"
        try:
            experiment.run(config, workdir)
        except Diverged:
            if self.diverged is None:
                raise
            return self.diverged
        return self.score(Predictor.load(workdir, {}), setting)

    @property
    def design(self) -> Mapping[str, Any]:
        score = f"{self.score.__module__}.{self.score.__qualname__}"
        keys = {key: str(value) for key, value in self.keys.items()}
        return {"recipe": self.recipe, "keys": keys, "score": score}
