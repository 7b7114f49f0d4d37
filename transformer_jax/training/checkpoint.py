"""Save and restore checkpoints, verified by checksums.

A restored step is bit for bit identical to the saved one; anything else raises an
error.

In <workdir>/checkpoints:

    STEP/state/           the train state, written by Orbax
         meta/meta.json   the caller's `meta` and the step's scores
         scores.json      the scores, if the step was evaluated after it was saved
         manifest.json    size and sha256 of every file above, written last
    STEP.set-aside/       a step that was complete and is not used any more

Orbax detects missing and truncated files, but returns wrong numbers if bits were
flipped. The manifest closes this gap: a step is valid only if its manifest exists and
every file matches it.
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import math
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath, epy
from jax.experimental import multihost_utils

from transformer_jax import files
from transformer_jax.errors import UserError
from transformer_jax.training import manifest, processes
from transformer_jax.training.logging import absolute
from transformer_jax.training.manifest import Damage
from transformer_jax.training.metric import Metric

# the import takes 0.3 s and is not needed before the first step
with epy.lazy_imports():
    import orbax.checkpoint as ocp

PyTree = Any

log = logging.getLogger(__name__)


def _wanted(record: logging.LogRecord) -> bool:
    """Return False for Orbax's INFO lines (forty per save), and for tracebacks of
    errors that `save` re-raises.
    """
    return "orbax" not in record.pathname or (
        record.levelno >= logging.WARNING and "_SignalingThread" not in record.msg
    )


# absl.app prints Orbax's records to stderr
logging.getLogger("absl").addFilter(_wanted)

_META = "meta.json"
_SCORES = "scores.json"
_SET_ASIDE = re.compile(r"(0|[1-9]\d*)\.set-aside.*")
_STEP_FOLDER = re.compile(r"(0|[1-9]\d*)(\.orbax-checkpoint-tmp.*)?")


class CheckpointError(UserError):
    """A checkpoint could not be written, is damaged, or does not match the model."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Interval of saves, and the number of steps to keep: the latest ones, plus
    those with the best score.
    """

    every: int = 1000  # steps between saves
    keep_latest: int = 5
    keep_best: int = 1  # number of best-scoring steps to keep; 0 ignores the scores
    # the validation metric that defines "best", e.g. "bleu" or "loss"
    best_metric: str = "loss"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.every < 1:
            yield (
                "every",
                "must be at least 1; to save only at the end, set it to training.steps",
            )
        if self.keep_latest < 1:
            yield (
                "keep_latest",
                (
                    "must be at least 1, because training resumes from it; "
                    "with 2, one may be damaged"
                ),
            )
        if self.keep_best < 0:
            yield "keep_best", "must be at least 0; 0 keeps no step for its score"
        if not self.best_metric:
            yield "best_metric", "must name a validation metric, e.g. 'loss'"


def parameters_sha256(params: PyTree) -> str:
    """Return the sha256 of the arrays' bytes (C order, little endian), in
    `jax.tree.leaves` order.

    Names and shapes are left out, so that three lines of NumPy can reproduce the hash.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        if not getattr(leaf, "is_fully_addressable", True):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _check_merged(folder: epath.Path) -> None:
    """Raise OSError unless Orbax has merged what the processes wrote of a step.

    Orbax looks for their parts with a glob, which takes a folder that cannot be read
    for an empty one. It then completes a step without arrays.
    """
    merged = folder / "state" / "manifest.ocdbt"
    if processes.first_says(lambda: files.status(merged) is None):
        raise OSError(errno.EIO, "Orbax has not written this file", str(merged))


def check_fingerprint(
    fingerprint: Mapping[str, str], meta: Mapping[str, Any], where: Any
) -> None:
    """Raise CheckpointError unless the checkpoint with this `meta` was made with the
    same tokenizers and data.
    """
    stored = meta["fingerprint"]
    for name, value in fingerprint.items():
        if name not in stored:
            raise CheckpointError(
                f"{name}: sha256 {value[:12]}… here, none in the checkpoints "
                f"of {where}, which were made without it or by a version "
                "that encoded the data in another way; use another --workdir"
            )
        if stored[name] != value:
            raise CheckpointError(
                f"{name}: sha256 {value[:12]}… here, {stored[name][:12]}… "
                f"in the checkpoints of {where}: they do not match; restore "
                "the file that the run was trained with, or use another --workdir"
            )


class Checkpoints:
    """The checkpoints in one directory.

    Only the training run may call `save` and `discard_after`.

    With several processes, every process must call every method. The first lists,
    renames and removes steps, and tells the others. An error of the disk that may pass
    is raised as it is, e.g. as OSError, so that a launcher tries again.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        config: CheckpointConfig,
        metrics: Mapping[str, Metric],
    ):
        """`metrics` are those of the task. Without `config.best_metric` among them, no
        step is best.
        """
        self.directory = absolute(directory)
        self.config = config
        self.metrics = metrics
        # of the files of steps that match their manifests
        self._stamps: dict[int, str] = {}

    def save(
        self,
        step: int,
        state: PyTree,
        meta: dict,
        metrics: dict[str, float] | None = None,
        preemption: bool = False,
        pending: bool = False,
        scoring: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> None:
        """Write `state` (arrays) and `meta` (JSON) as `step`, then remove the steps
        that are no longer kept.

        Set `preemption` for a step that exists only to resume a stopped run. The next
        save removes it. Set `pending` if the step should have been evaluated; see
        `complete`. `scoring` says what the scores `metrics` depend on, by key. Only
        scores with equal `scoring` are compared.

        On return, the step is complete on disk. Raises CheckpointError if the step
        exists or cannot be written. In that case the earlier steps are untouched and
        the partial step is invalid. It is not removed here, because Orbax's threads may
        still be writing; `discard_after` removes it at the next start.
        """
        folder = self._folder(step)
        if processes.first_says(lambda: files.exists(folder)):
            raise CheckpointError(
                f"{folder} already exists. "
                "Stop any other run that trains in this workdir, or resume through "
                "discard_after(), which removes the steps that will be repeated."
            )
        facts = {
            "step": step,
            "meta": meta,
            "metrics": _numbers(metrics),
            "preemption": preemption,
            "pending": pending,
            "scoring": dict(scoring),
        }
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(facts)
        )
        try:
            with _only_the_error():
                # Without `force`, Orbax silently skips the save if a newer step exists.
                self._manager.save(step, args=items, force=True)
            _check_merged(folder)
            manifest.write(folder)
        # another process has died; the disk is fine, and a restart is enough
        except jax.errors.JaxRuntimeError:
            raise
        # Orbax raises bare Exception, ValueError, OSError, …
        except Exception as error:
            self._explain(step, error)
            raise
        # Orbax's preservation policy would delete old steps inside save(), before the
        # new step has its manifest. A kill at that moment could leave no valid step, so
        # old steps are removed here instead.
        self._prune(step)

    def complete(
        self, step: int, metrics: dict[str, float] | None, preemption: bool
    ) -> None:
        """Add the scores of a step that was saved as `pending`, then remove the
        steps that are no longer kept.
        """
        folder = self._folder(step)
        facts = {
            "metrics": _numbers(metrics),
            "preemption": preemption,
            "pending": False,
        }
        processes.first(lambda: manifest.add(folder, _SCORES, json.dumps(facts)))
        self._prune(step)

    def _explain(self, step: int, error: Exception) -> None:
        """Raise CheckpointError for a failed save that the user can help; otherwise
        add a note to the error.
        """
        with contextlib.suppress(OSError):
            valid = (
                at
                for at in reversed(self._complete())
                if manifest.damage(self._folder(at), alone=True) is None
            )
            newest = next(valid, None)
            rest = (
                "there is no earlier step"
                if newest is None
                else f"the newest valid step is {newest}"
            )
            message = f"step {step} was not saved in {self.directory} ({rest})"
            if files.is_lasting(error):
                raise CheckpointError(
                    f"{message}: {error}\nCheck that the directory "
                    "is writable and that the disk has room, then start again."
                ) from error
            error.add_note(f"{message}. The same command continues from there.")

    def _prune(self, step: int) -> None:
        """Remove the steps that are no longer kept, and those set aside, after
        `step` was saved.
        """

        def remove() -> None:
            for old in self._surplus():
                _remove(self._folder(old))
            for path in self._paths():
                if _SET_ASIDE.fullmatch(path.name):
                    _remove(path)

        processes.first(remove)
        multihost_utils.sync_global_devices(f"checkpoint {step} complete")

    def verified(self, steps: Sequence[int] | None = None) -> list[int]:
        """Return those of `steps` (default: all) that match their manifest, ascending.

        Logs the others. Raises the errors of `newest` if one of the given `steps`
        cannot be read.
        """
        if steps is not None:
            return sorted(
                step for step in steps if self._good(step, self._readable(step))
            )
        steps = processes.first_says(self._steps)
        return sorted(step for step in steps if self._good(step, self._damage(step)))

    def newest(self) -> int | None:
        """Return the newest valid step, or None if there is none.

        Logs which newer steps are damaged, and why.

        Raises OSError if a newer step cannot be read, or CheckpointError if the user
        must act first. The error may be temporary, and a run that resumed from an older
        step would set the newer one aside.
        """
        for step in reversed(processes.first_says(self._steps)):
            if self._good(step, self._readable(step)):
                return step
        return None

    def regular(self, steps: Sequence[int]) -> list[int]:
        """Return `steps` without preemption steps, except that the last is always
        included. `steps` is ascending.
        """
        return [
            step
            for step in steps
            if step == steps[-1] or not self._facts(step).get("preemption")
        ]

    def latest(self, count: int) -> list[int]:
        """Return the `count` newest regular steps, ascending.

        They are not checked against their manifests.
        """
        return processes.first_says(lambda: self._latest(count))

    def best(self) -> int | None:
        """Return the valid step with the best `config.best_metric`, or None if none has
        it. Ties go to the newest.

        Only those steps are compared whose scores mean the same as those of the newest.
        Logs which others there are.

        Raises the errors of `newest` if a better step cannot be read.
        """
        groups = processes.first_says(self._best_first)
        for older_group in groups[1:]:
            old_scoring = self._facts(older_group[0])["scoring"]
            scoring = self._facts(max(groups[0]))["scoring"]
            log.warning(
                "checkpoint.best_metric = %r compares steps %s. "
                "Left out: %s, whose scores do not mean the same (%s)",
                self.config.best_metric,
                _list(groups[0]),
                _list(older_group),
                "; ".join(different(old_scoring, scoring)),
            )
        steps = groups[0] if groups else []
        good = (step for step in steps if self._good(step, self._readable(step)))
        return next(good, None)

    def scores(self, step: int) -> dict[str, float]:
        """Return the validation scores saved with the step."""
        return self._stored(step)["metrics"]

    def scoring(self, step: int) -> dict[str, Any]:
        """Return what the step's scores depend on, by key; {} for a step of an older
        version.
        """
        return self._stored(step).get("scoring", {})

    def meta(self, step: int) -> dict:
        """Return the `meta` saved with the step.

        Raises CheckpointError if the folder holds another step.
        """
        stored = self._stored(step)
        held = stored.get("step", stored["meta"].get("position", step))
        if held != step:
            raise CheckpointError(
                f"{self._folder(step)} holds step {held}: rename the folder to {held}"
            )
        return stored["meta"]

    def is_pending(self, step: int) -> bool:
        """Return True if the step should have been evaluated, but the run was
        stopped before.
        """
        return bool(self._stored(step).get("pending"))

    def restore(self, step: int, abstract_state: PyTree) -> tuple[PyTree, dict]:
        """Return (state, meta).

        The state has the dtypes and shardings of `abstract_state`
        (jax.ShapeDtypeStruct).

        A leaf without a sharding goes to the first device. Raises CheckpointError if
        the step is damaged, or if its array names, shapes or dtypes differ from those
        of `abstract_state`; the message lists the differences.
        """
        state = self._restore(step, abstract_state, "")
        return state, self.meta(step)

    def restore_params(
        self, step: int, abstract_params: PyTree, part: str = "params"
    ) -> PyTree:
        """Return only the parameters of a state, or another `part` with the same
        structure, e.g. "ema".
        """
        return self._restore(step, {part: abstract_params}, f"{part}/")[part]

    def average(self, steps: Sequence[int], abstract_params: PyTree) -> PyTree:
        """Return the mean of the steps' parameters, summed in float32 in the order
        given and divided once.
        """
        if not steps:
            raise CheckpointError(
                "average() needs at least one step; save a checkpoint first"
            )
        total = None
        for step in steps:
            params = jax.tree.map(
                lambda p: p.astype(jnp.float32),
                self.restore_params(step, abstract_params),
            )
            total = params if total is None else jax.tree.map(jnp.add, total, params)
        return jax.tree.map(
            lambda t, p: (t / len(steps)).astype(p.dtype), total, abstract_params
        )

    def discard_after(self, step: int | None) -> None:
        """Remove unfinished steps and set those after `step` aside.

        Training continues from `step`.

        A step that was complete is renamed to STEP.set-aside. The next save removes it.

        With `step` None there is no valid step, and training starts anew. Raises
        CheckpointError if there are damaged steps that were once complete, because
        training from the start would overwrite the run. Also raises CheckpointError if
        there are several steps and none has a manifest, since a kill leaves at most one
        unfinished step.
        """

        def discard() -> None:
            steps = self._steps()
            if step is None and len(steps) > 1 and not self._complete():
                raise CheckpointError(
                    f"{self.directory}: none of the steps {', '.join(map(str, steps))} "
                    f"has a {manifest.NAME}. Restore these files from a backup, "
                    "remove the folder to start over, or choose another workdir."
                )
            for at, folder in self._entries():
                finished = manifest.exists(folder)
                if step is None and finished:
                    damage = manifest.damage(folder, alone=True)
                    raise CheckpointError(
                        f"{self.directory} has no valid checkpoint left. "
                        f"{folder}: {damage}. Restore the folder from a backup, "
                        "remove it to start over, or choose another workdir."
                    )
                if not finished:
                    log.warning("removing %s: it was not saved completely", folder)
                    folder.rmtree()
                elif step is not None and at > step:
                    _set_aside(folder, f"training continues from step {step}")

        processes.first(discard)
        multihost_utils.sync_global_devices(f"checkpoints after {step} discarded")
        self.close()

    def close(self) -> None:
        """Close Orbax's manager, with its threads and its list of steps.

        The next call creates a new one.
        """
        manager = self.__dict__.pop("_manager", None)
        if manager is not None:
            manager.close()

    @functools.cached_property
    def _manager(self) -> "ocp.CheckpointManager":
        manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(filename=_META),
            },
            options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False),
        )
        # JAX's preemption service has one counter, and signals.StopRequest advances it.
        # Orbax would set it to the step's number during a save, and the processes would
        # miss the number at which they agreed to stop.
        manager.reached_preemption = lambda step: False
        return manager

    def _folder(self, step: int) -> epath.Path:
        return self.directory / str(step)

    def _entries(self) -> list[tuple[int, epath.Path]]:
        """Return (step, folder) for every step, finished or not.

        Other files in the directory are ignored.
        """
        entries = []
        for path in self._paths():
            if match := _STEP_FOLDER.fullmatch(path.name):
                entries.append((int(match[1]), path))
        return entries

    def _paths(self) -> list[epath.Path]:
        with files.explained(
            f"{self.directory} is not a folder of checkpoints",
            "restore it, or choose another workdir",
        ):
            if not files.exists(self.directory):
                return []
            return list(self.directory.iterdir())

    def _steps(self) -> list[int]:
        return sorted(
            step for step, path in self._entries() if path == self._folder(step)
        )

    def _stored(self, step: int) -> dict[str, Any]:
        folder = self._folder(step)
        stored = json.loads((folder / "meta" / _META).read_text())
        later = (
            json.loads((folder / _SCORES).read_text())
            if files.exists(folder / _SCORES)
            else {}
        )
        return stored | later

    def _facts(self, step: int) -> dict[str, Any]:
        """Return what is stored with the step, with {} for missing values, if it is
        damaged. Raises OSError.
        """
        empty: dict[str, Any] = {"metrics": {}, "scoring": {}}
        with contextlib.suppress(ValueError, FileNotFoundError):
            return empty | self._stored(step)
        return empty

    def _damage(self, step: int) -> Damage | None:
        """Return what is wrong with a step.

        Files that have not changed since they were hashed are not read again.
        """
        folder = self._folder(step)
        if (
            step in self._stamps
            and processes.first_says(lambda: manifest.stamp(folder))
            == self._stamps[step]
        ):
            return None
        self._stamps.pop(step, None)
        damage = manifest.damage(folder)
        if damage is None:
            self._stamps[step] = processes.first_says(lambda: manifest.stamp(folder))
        return damage

    def _readable(self, step: int) -> Damage | None:
        """Return what is wrong with a step, or None.

        Raises OSError or CheckpointError if the step cannot be read: it may be intact.
        """
        damage = self._damage(step)
        if damage is not None and not damage.readable:
            raise (CheckpointError if damage.lasting else OSError)(
                f"{self._folder(step)}: {damage}. "
                "The step may be intact: check the disk and start again, "
                "or remove the folder to use another step."
            )
        return damage

    def _good(self, step: int, damage: Damage | None) -> bool:
        if damage is not None:
            log.warning("skipping checkpoint %s: %s", self._folder(step), damage)
        return damage is None

    def _best_first(self) -> list[list[int]]:
        """Return the complete steps that have a score other than NaN, those with the
        best first, ties newest first.

        Scores that do not mean the same are in lists of their own, that of the newest
        step first. A step of an older version, which does not say what its score means,
        belongs to the newest.
        """
        name = self.config.best_metric
        metric = self.metrics.get(name)
        if metric is None:
            return []
        facts = {step: self._facts(step) for step in self._complete()}
        merits = {
            step: metric.merit(stored["metrics"].get(name, math.nan))
            for step, stored in facts.items()
        }
        meanings = {
            step: _meaning(stored["scoring"], metric) for step, stored in facts.items()
        }
        left = [step for step, merit in merits.items() if not math.isnan(merit)]
        groups = []
        while left:
            newest = next(
                (meanings[step] for step in reversed(left) if meanings[step]), {}
            )
            group = [step for step in left if meanings[step] in ({}, newest)]
            groups.append(
                sorted(group, key=lambda step: (merits[step], step), reverse=True)
            )
            left = [step for step in left if step not in group]
        return groups

    def _complete(self) -> list[int]:
        return [step for step in self._steps() if manifest.exists(self._folder(step))]

    def _latest(self, count: int) -> list[int]:
        return self.regular(self._complete())[-count:]

    def _surplus(self) -> list[int]:
        needed = self._latest(self.config.keep_latest)
        for group in self._best_first():
            needed += group[: self.config.keep_best]
        return [step for step in self._complete() if step not in needed]

    def _restore(self, step: int, abstract: PyTree, prefix: str) -> PyTree:
        """Return the part of the stored state that `abstract` describes, whose array
        names begin with `prefix`.
        """
        damage = self._damage(step)
        if damage is not None and not damage.readable:
            raise (CheckpointError if damage.lasting else OSError)(
                f"{self._folder(step)}: {damage}. Check the disk and start again."
            )
        if damage is not None:
            raise CheckpointError(
                f"{self._folder(step)} cannot be restored: {damage}. Use "
                f"another step (valid ones: {self.verified()}), or save this one again."
            )
        stored = _shapes(self._manager.item_metadata(step)["state"].tree)
        expected = _shapes(abstract)
        names = sorted(
            expected.keys() | {name for name in stored if name.startswith(prefix)}
        )
        wrong = [
            f"{name}: stored {stored.get(name, 'nothing')}, "
            f"expected {expected.get(name, 'nothing')}"
            for name in names
            if stored.get(name) != expected.get(name)
        ]
        if wrong:
            raise CheckpointError(
                f"{self._folder(step)} does not match the model; "
                f"{len(wrong)} of {len(names)} arrays differ:"
                + "\n  ".join(["", *wrong[:10]] + ["…"] * (len(wrong) > 10))
                + "\nUse the config that it was trained with, or another workdir."
            )
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=x.sharding or first
            ),
            abstract,
        )
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
        state = ocp.args.PyTreeRestore(
            abstract, restore_args=restore_args, partial_restore=True
        )
        return self._manager.restore(step, args=ocp.args.Composite(state=state))[
            "state"
        ]


def different(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, with the values."""
    return [
        f"{key}: {old.get(key)!r}, later {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _meaning(scoring: Mapping[str, Any], metric: Metric) -> dict[str, Any]:
    """Return the part of `scoring` that `metric` depends on."""
    if metric.of_predictions:
        return dict(scoring)
    return {
        key: value
        for key, value in scoring.items()
        if not key.startswith(("evaluation.", "decoding.", "answers."))
    }


def _numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (metrics or {}).items()}


def _list(steps: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(steps)))


def _set_aside(folder: epath.Path, reason: str) -> None:
    """Rename the folder of a step that was complete."""
    aside = folder.with_name(f"{folder.name}.set-aside")
    number = 1
    while files.exists(aside):
        number += 1
        aside = folder.with_name(f"{folder.name}.set-aside-{number}")
    log.warning(
        "%s: %s; this step is set aside as %s until the next save",
        folder,
        reason,
        aside.name,
    )
    folder.rename(aside)


def _remove(folder: epath.Path) -> None:
    """Remove a step, its manifest first: what an interruption leaves is not taken
    for a damaged step.
    """
    (folder / manifest.NAME).unlink(missing_ok=True)
    folder.rmtree()


@contextlib.contextmanager
def _only_the_error() -> Iterator[None]:
    """Silence the secondary errors that the threads of Orbax and TensorStore print when
    a save fails.

    They arrive after the save has raised its own error. So after an error, they stay
    silenced.
    """
    asyncio = logging.getLogger("asyncio")
    hook = sys.unraisablehook
    level = asyncio.level

    def show(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = show
    asyncio.setLevel(logging.CRITICAL)
    yield
    sys.unraisablehook = hook
    asyncio.setLevel(level)


def _shapes(tree: PyTree) -> dict[str, str]:
    """Return the arrays' types by name, e.g. {"params/decoder/kernel": "float32[7,
    5]"}.

    A namedtuple and the dict that Orbax makes of it give the same result.
    """
    return {
        jax.tree_util.keystr(
            path, simple=True, separator="/"
        ): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
