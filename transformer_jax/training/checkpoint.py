"""Save and restore checkpoints. A restored step is bit for bit the one that was saved; otherwise it is an error.

    <workdir>/checkpoints/STEP/state/           the train state, written by Orbax
                              meta/meta.json    what the caller gave to `save`, with the step's scores
                              manifest.json     size and sha256 of every file above, written last

Orbax notices a file that is missing or too short, but returns wrong numbers for flipped bits. Hence the manifest: a
step counts only when its manifest exists and every file agrees with it.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath, epy
from jax.experimental import multihost_utils

from transformer_jax.training import manifest
from transformer_jax.training.logging import absolute
from transformer_jax.training.manifest import Damage

with epy.lazy_imports():  # 0.3 s that the first step need not wait for
    import orbax.checkpoint as ocp

PyTree = Any

log = logging.getLogger(__name__)


def _wanted(record: logging.LogRecord) -> bool:
    """Return False for Orbax's forty INFO lines a save, and for its threads' tracebacks of what `save` raises."""
    return "orbax" not in record.pathname or (
        record.levelno >= logging.WARNING and "_SignalingThread" not in record.msg
    )


logging.getLogger("absl").addFilter(_wanted)  # absl.app sends them to stderr

_META = "meta.json"
_STEP_FOLDER = re.compile(r"(0|[1-9]\d*)(\.orbax-checkpoint-tmp.*)?")
_LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")


class CheckpointError(ValueError):
    """A checkpoint could not be written, or is damaged, or does not fit the model."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and which steps to keep: the latest and, in addition, those with the best score."""

    every: int = 1000  # steps between saves
    keep_latest: int = 5
    keep_best: int = 1  # 0 keeps none for its score
    best_metric: str = "loss"  # the name of a validation metric, e.g. "bleu" or "loss"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.every < 1:
            yield "every", "must be at least 1; to save only at the end, set it to training.steps"
        if self.keep_latest < 1:
            yield "keep_latest", "must be at least 1, for training to resume from; with 2, one may be damaged"
        if self.keep_best < 0:
            yield "keep_best", "must be at least 0; 0 keeps none for its score"
        if not self.best_metric:
            yield "best_metric", "must name a validation metric, e.g. 'loss'"


def parameters_sha256(params: PyTree) -> str:
    """Return the sha256 sum of the arrays' bytes (C order, little endian), in `jax.tree.leaves` order.

    Names and shapes are not part of it, so that three lines of NumPy can reproduce it.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        if not getattr(leaf, "is_fully_addressable", True):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def check_fingerprint(fingerprint: Mapping[str, str], meta: Mapping[str, Any], where: Any) -> None:
    """Raise CheckpointError unless a checkpoint with this `meta` was made with the same tokenizers and data."""
    stored = meta["fingerprint"]
    for name, value in fingerprint.items():
        if stored.get(name) != value:
            raise CheckpointError(
                f"{name}: sha256 {value[:12]}… here, {stored.get(name, 'none')[:12]}… in the checkpoints of {where}: "
                "they do not belong together; restore the file it was trained with, or use another --workdir"
            )


class Checkpoints:
    """The checkpoints below one directory. Only the run that trains may call `save` and `discard_after`.

    Where there are several processes, all of them call every method. Only the first writes manifests and removes steps.
    """

    def __init__(self, directory: epath.PathLike, config: CheckpointConfig):
        self.directory = absolute(directory)
        self.config = config

    def save(
        self,
        step: int,
        state: PyTree,
        meta: dict,
        metrics: dict[str, float] | None = None,
        preemption: bool = False,
    ) -> None:
        """Write `state` (arrays) and `meta` (JSON) as `step`, then remove the steps that need not be kept.

        A `preemption` step is one to resume from after the run was stopped. The next save removes it.

        When this returns, the step is complete on disk. Raises CheckpointError if the step exists or cannot be
        written. Then the earlier steps are untouched, and what is left of this one does not count: `discard_after`
        removes it at the next start. (Not here: Orbax's threads may still be writing.)
        """
        folder = self._folder(step)
        if folder.exists():
            raise CheckpointError(
                f"{folder} exists already. Stop whatever else trains in this workdir, or resume through "
                "discard_after(), which removes the steps that are to be trained again."
            )
        scores = {name: float(value) for name, value in (metrics or {}).items()}
        facts = {"meta": meta, "metrics": scores, "preemption": preemption}
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(facts))
        try:
            with _only_the_error():
                self._manager.save(step, args=items, force=True)  # else skipped in silence if a newer step exists
            if jax.process_index() == 0:
                manifest.write(folder)
        except jax.errors.JaxRuntimeError:  # a process has died: that is not the disk's fault, and a restart mends it
            raise
        except Exception as error:  # Orbax raises bare Exception, ValueError, OSError, …
            newest = max(self.verified(), default=None)
            rest = "no step was saved before" if newest is None else f"the newest good step is {newest}"
            raise CheckpointError(
                f"step {step} was not saved in {self.directory} ({rest}): {error}\n"
                "See that the directory can be written and the disk has room, then start again."
            ) from error
        # Not by Orbax's preservation policy: that deletes inside save(), when the new step has no manifest
        # yet, and a kill in between could leave no good step at all.
        if jax.process_index() == 0:
            for old in self._surplus():
                self._folder(old).rmtree()
        multihost_utils.sync_global_devices(f"checkpoint {step} complete")

    def verified(self, steps: Sequence[int] | None = None) -> list[int]:
        """Return the steps that agree with their manifest, ascending. Logs which of `steps` (default: all) do not."""
        return sorted(self._verified(self._steps() if steps is None else steps))

    def newest(self) -> int | None:
        """Return the newest verified step. Logs which newer ones are damaged, and why.

        Raises CheckpointError where a newer one cannot be read. The disk's fault may be temporary, and a run that
        resumed from an older step would remove the newer one.
        """
        for step in reversed(self._steps()):
            damage = manifest.damage(self._folder(step))
            if damage is not None and not damage.readable:
                raise CheckpointError(
                    f"{self._folder(step)}: {damage}. It may be whole: check the disk and start again, or remove that "
                    "folder to take an older step."
                )
            if self._good(step, damage):
                return step
        return None

    def regular(self, steps: Sequence[int]) -> list[int]:
        """Return `steps`, ascending, without preemption steps other than the last."""

        def preemption(step: int) -> bool:
            with contextlib.suppress(OSError, ValueError):
                return bool(self._stored(step).get("preemption"))
            return False

        return [step for step in steps if step == steps[-1] or not preemption(step)]

    def latest(self, count: int) -> list[int]:
        """Return the `count` newest regular steps, ascending, whether they verify or not."""
        return self.regular(self._complete())[-count:]

    def best(self) -> int | None:
        """Return the verified step with the best `config.best_metric`, the newer of equals; None if none has it."""
        return next(self._verified(self._best_first(self._complete())), None)

    def scores(self, step: int) -> dict[str, float]:
        """Return the validation scores that were saved with the step."""
        return self._stored(step)["metrics"]

    def meta(self, step: int) -> dict:
        """Return the `meta` that was saved with the step."""
        return self._stored(step)["meta"]

    def restore(self, step: int, abstract_state: PyTree) -> tuple[PyTree, dict]:
        """Return the state, with the dtypes and shardings of `abstract_state` (jax.ShapeDtypeStruct), and the meta.

        A leaf without a sharding goes to the first device. Raises CheckpointError if the step is damaged or holds
        other parameters, shapes or dtypes, and names them.
        """
        state = self._restore(step, abstract_state, "")
        return state, self.meta(step)

    def restore_params(self, step: int, abstract_params: PyTree, part: str = "params") -> PyTree:
        """Return only `state.params` (or `state["params"]`), or another part of the state of that shape, e.g. "ema"."""
        return self._restore(step, {part: abstract_params}, f"{part}/")[part]

    def average(self, steps: Sequence[int], abstract_params: PyTree) -> PyTree:
        """Return the mean of the steps' parameters, summed in float32 in the order given and divided once."""
        if not steps:
            raise CheckpointError("average() needs at least one step; save a checkpoint first")
        total = None
        for step in steps:
            params = jax.tree.map(lambda p: p.astype(jnp.float32), self.restore_params(step, abstract_params))
            total = params if total is None else jax.tree.map(jnp.add, total, params)
        return jax.tree.map(lambda t, p: (t / len(steps)).astype(p.dtype), total, abstract_params)

    def discard_after(self, step: int | None) -> None:
        """Remove newer and unfinished steps: training continues from `step` and saves them again.

        None means that training starts, since no step is good. Raises CheckpointError if a step was good once: the
        disk's fault may be temporary, and removing the step would lose the run. Likewise if several have no manifest:
        a kill leaves one of them.
        """
        if jax.process_index() == 0:
            steps = self._steps()
            if step is None and len(steps) > 1 and not self._complete():
                raise CheckpointError(
                    f"{self.directory}: none of the steps {', '.join(map(str, steps))} has its {manifest.NAME}. "
                    "Restore these files from a backup, remove the folder to train anew, or choose another workdir."
                )
            for at, folder in self._entries():
                finished = manifest.exists(folder)
                if step is None and finished:
                    damage = manifest.damage(folder)
                    raise CheckpointError(
                        f"{self.directory} has no good checkpoint left, newest damage: {folder}: {damage}. "
                        "Restore the folder from a backup, remove it to train anew, or choose another workdir."
                    )
                newer = step is not None and at > step
                if newer or not finished:
                    reason = f"training goes on from step {step}" if newer else "saving it was not finished"
                    log.warning("removing %s: %s", folder, reason)
                    folder.rmtree()
        multihost_utils.sync_global_devices(f"checkpoints after {step} discarded")
        self.close()

    def close(self) -> None:
        """Drop Orbax's manager, with its list of steps and its threads. The next call makes a new one."""
        manager = self.__dict__.pop("_manager", None)
        if manager is not None:
            manager.close()

    @functools.cached_property
    def _manager(self) -> "ocp.CheckpointManager":
        return ocp.CheckpointManager(
            self.directory,
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(filename=_META),
            },
            options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False),
        )

    def _folder(self, step: int) -> epath.Path:
        return self.directory / str(step)

    def _entries(self) -> list[tuple[int, epath.Path]]:
        """Return (step, folder) of every step, finished or not. Anything else in the directory is not ours."""
        if not self.directory.is_dir():
            return []
        found = ((_STEP_FOLDER.fullmatch(path.name), path) for path in self.directory.iterdir())
        return [(int(match[1]), path) for match, path in found if match]

    def _steps(self) -> list[int]:
        return sorted(step for step, path in self._entries() if path == self._folder(step))

    def _stored(self, step: int) -> dict[str, dict]:
        return json.loads((self._folder(step) / "meta" / _META).read_text())

    def _verified(self, steps: Iterable[int]) -> Iterator[int]:
        return (step for step in steps if self._good(step, manifest.damage(self._folder(step))))

    def _good(self, step: int, damage: Damage | None) -> bool:
        if damage is not None:
            log.warning("passing over checkpoint %s: %s", self._folder(step), damage)
        return damage is None

    def _best_first(self, steps: Sequence[int]) -> list[int]:
        """Return those of `steps` whose score is a number, best first, the newer of equals first."""
        sign = -1 if self.config.best_metric in _LOWER_IS_BETTER else 1
        scores = {}
        for step in steps:
            try:
                score = sign * self.scores(step)[self.config.best_metric]
            except (OSError, ValueError, KeyError):  # not evaluated at this step, or damaged
                continue
            if not math.isnan(score):
                scores[step] = score
        return sorted(scores, key=lambda step: (scores[step], step), reverse=True)

    def _complete(self) -> list[int]:
        return [step for step in self._steps() if manifest.exists(self._folder(step))]

    def _surplus(self) -> list[int]:
        complete = self._complete()
        kept = self.latest(self.config.keep_latest) + self._best_first(complete)[: self.config.keep_best]
        return [step for step in complete if step not in kept]

    def _restore(self, step: int, abstract: PyTree, prefix: str) -> PyTree:
        """Return the part of the stored state that `abstract` describes; its names begin with `prefix`."""
        damage = manifest.damage(self._folder(step))
        if damage is not None:
            raise CheckpointError(
                f"{self._folder(step)} cannot be restored: {damage}. "
                f"Take another step (those that verify: {self.verified()}), or save this one again."
            )
        stored = _shapes(self._manager.item_metadata(step)["state"].tree)
        expected = _shapes(abstract)
        names = sorted(expected.keys() | {name for name in stored if name.startswith(prefix)})
        wrong = [
            f"{name}: stored {stored.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
            for name in names
            if stored.get(name) != expected.get(name)
        ]
        if wrong:
            raise CheckpointError(
                f"{self._folder(step)} does not fit the model; {len(wrong)} of {len(names)} arrays differ:"
                + "\n  ".join(["", *wrong[:10]] + ["…"] * (len(wrong) > 10))
                + "\nUse the config with which it was trained, or another workdir."
            )
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or first), abstract
        )
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
        state = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)
        return self._manager.restore(step, args=ocp.args.Composite(state=state))["state"]


@contextlib.contextmanager
def _only_the_error() -> Iterator[None]:
    """Hide what the threads of Orbax and TensorStore print about the other writes of a save that fails.

    It comes when nobody waits for these writes any more. So, after an error, it stays hidden.
    """
    asyncio, hook = logging.getLogger("asyncio"), sys.unraisablehook
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
    """Return e.g. {"params/decoder/kernel": "float32[7, 5]"}, alike for a namedtuple and for Orbax's dict of it."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
