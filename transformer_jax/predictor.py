"""A trained run, opened for prediction and evaluation."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from transformer_jax import config as configs
from transformer_jax.report.attention import AttentionMap, Sentence
from transformer_jax.training import processes
from transformer_jax.training.checkpoint import Checkpoints, parameters_sha256
from transformer_jax.training.evaluation import Evaluator, restore_parameters
from transformer_jax.training.sharding import make_mesh
from transformer_jax.training.task import Params


class Predictor:
    """The model of a workdir; `params`, `step` and `task` are there for research code."""

    @classmethod
    def load(cls, workdir: epath.PathLike, overrides: Mapping[str, Any]) -> "Predictor":
        """See `transformer_jax.load`."""
        config = configs.read_workdir(epath.Path(workdir).expanduser())
        configs.override(config, [f"--config.{key}={value}" for key, value in overrides.items()])
        return cls(workdir, config)

    def __init__(self, workdir: epath.PathLike, config: ConfigDict):
        """`config` is the run's, perhaps with other values, as of `evaluation` or `decoding`.

        Raises CheckpointError where no good checkpoint is found, ConfigError for values that cannot be used, or that
        make another model.
        """
        workdir = epath.Path(workdir).expanduser()
        configs.check_model(workdir, config)
        self.config = configs.parse(config)
        self.task = self.config.make_task(workdir)
        mesh = make_mesh(self.config.mesh)
        checkpoints = Checkpoints(epath.Path(workdir) / "checkpoints", self.config.checkpoint)
        restored = restore_parameters(self.task, checkpoints, self.config.evaluation, mesh)
        self.step: int = restored[0]
        self.params: Params = restored[1]
        self._evaluator = Evaluator(self.task, mesh, self.config.evaluation.rows)

    def predict(self, lines: Sequence[str], scored: bool = False) -> list[str]:
        """A line for every line, in order; JSON objects if `scored`, or if `decoding.n_best` asks for more than one.

        Raises ValueError for a single str, which would be read as a line for each character.
        """
        _check_lines(lines)
        several = self.config.decoding is not None and self.config.decoding.n_best > 1
        write = self.task.write_scored if scored or several else self.task.write
        return self._evaluator.predict(self.params, lines, write=write)

    def evaluate(self, split: str | None = None) -> dict[str, float | str | int]:
        """The task's scores on a split (by default the test split), with `step` and `parameters_sha256`."""
        split = split or self.task.test_split
        processes.agree(f"data of {split}", lambda: [*map(list, self.task.examples(split))])
        scores = self._evaluator.evaluate(self.params, split, fast=False)
        return {"split": split, "step": self.step, **scores, "parameters_sha256": self.parameters_sha256}

    def attention(self, lines: Sequence[str], outputs: Sequence[str] | None = None) -> list[Sentence]:
        """What looks at what while the model reads its own translations of `lines`, tokenized anew, or `outputs`.

        Raises ValueError for model.attention_implementation = "xla", which keeps its weights to itself, and where
        there is not one output for each line.
        """
        _check_lines(lines)
        if not lines:
            return []
        outputs = self._evaluator.predict(self.params, lines) if outputs is None else outputs
        _check_lines(outputs)
        if len(outputs) != len(lines):
            raise ValueError(f"{len(lines)} lines, but {len(outputs)} outputs: give one for each line")
        arrays = self.task.pair(lines, outputs)
        sentences = []
        found = self._evaluator.attention(self.params, arrays)
        for line, tokens, weights in zip(lines, self.task.tokens(arrays), found, strict=True):
            maps = [
                AttentionMap(name, tokens[who], tokens[what], w[:, :, : len(tokens[who]), : len(tokens[what])])
                for (name, who, what), w in weights.items()
            ]
            sentences.append(Sentence(line, maps))
        return sentences

    @functools.cached_property
    def parameters_sha256(self) -> str:
        return parameters_sha256(self.params)


def _check_lines(lines: Sequence[str]) -> None:
    if isinstance(lines, str):
        raise ValueError(f"{lines[:80]!r} is one line, not a list of lines: put it in brackets")
