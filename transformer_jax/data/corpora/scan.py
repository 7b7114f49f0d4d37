r"""Write SCAN, commands and their actions, as parallel files (Lake and Baroni 2018).

    python -m transformer_jax.data.corpora.scan --data=scan --split=cut26 \
        --directory=DIR

`--data` is the folder of the data set. Its files have lines such as `IN: jump twice
OUT: I_JUMP I_JUMP`. Those that are read, also as .gz:

- simple, length, jump, turn_left: `NAME_train.txt` and `NAME_test.txt`, where jump and
  turn_left have the names addprim_jump and addprim_turn_left.
- cutN, e.g. cut26: `tasks.txt`, the whole set. Examples with more than N actions are
  not for training (Newman et al. 2020; Csordás et al. 2021). cut22 has the same
  examples as length.

The files that are written are `{train,val,generalization,test}.{commands,actions}`:

- val is a twentieth of the examples for training, so it is like train.
- test and generalization are the two halves of the other examples. Together they are
  the published test split, or with cutN all longer examples. Compare models on
  generalization, and score test last.

Examples are chosen at random by their number, the same ones every time. In the split
jump, "jump" alone is a tenth of the examples for training, so it is also in val.

Messages go to stderr: how many examples there are, and how long the actions are.
"""

import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import app, flags
from etils import epath

from transformer_jax.data import files
from transformer_jax.data.files import DataError
from transformer_jax.data.progress import counted
from transformer_jax.errors import UserError
from transformer_jax.files import write_all

# the first part of the names of files
PUBLISHED = {
    "simple": "simple",
    "length": "length",
    "jump": "addprim_jump",
    "turn_left": "addprim_turn_left",
}
LINE = re.compile(r"IN: (\S.*) OUT: (\S.*)")
CUT = re.compile(r"cut(\d+)")
HELD_OUT = 20  # one of so many examples for training is held out
LAST = "test.actions"  # the file that is written last


class Example(NamedTuple):
    """A command and its actions, both as words between spaces."""

    command: str
    actions: str

    @property
    def length(self) -> int:
        """The number of actions."""
        return len(self.actions.split())


def examples(folder: epath.PathLike, name: str) -> list[Example]:
    """Read the examples of a file of SCAN.

    Raises DataError if the file is missing, or a line has another form.
    """
    path = files.find(folder, name)
    content = bytes(files.read(path)).decode(errors="replace")
    rows = []
    for number, line in enumerate(content.splitlines(), 1):
        match = LINE.fullmatch(line.strip())
        if match is None:
            raise DataError(
                f"{path}:{number} is {line!r:.80}: it must have the form "
                "'IN: command OUT: actions'. Copy the file again."
            )
        rows.append(Example(*match.groups()))
    return rows


def parts(folder: epath.PathLike, split: str) -> tuple[list[Example], list[Example]]:
    """Return the examples of a split for training, and the others.

    Raises:
        DataError: see `examples`.
        UserError: there is no such split, or it leaves one of the two empty.
    """
    if split in PUBLISHED:
        name = PUBLISHED[split]
        return (
            examples(folder, f"{name}_train.txt"),
            examples(folder, f"{name}_test.txt"),
        )
    match = CUT.fullmatch(split)
    if match is None:
        raise UserError(
            f"the split {split!r} does not exist: choose one of "
            f"{', '.join(PUBLISHED)}, or a number of actions, e.g. cut26"
        )
    most = int(match[1])
    everything = examples(folder, "tasks.txt")
    train = [example for example in everything if example.length <= most]
    others = [example for example in everything if example.length > most]
    if not train or not others:
        lengths = [example.length for example in everything]
        raise UserError(
            f"the split {split!r} has {len(train)} examples for training and "
            f"{len(others)} others: choose a number of actions from "
            f"{min(lengths, default=0)} to {max(lengths, default=0) - 1}"
        )
    return train, others


def divided(rows: Sequence[Example], count: int) -> tuple[list[Example], list[Example]]:
    """Return `count` random rows and the others, both in their order."""
    order = np.random.default_rng(0).permutation(len(rows))
    chosen = set(order[:count].tolist())
    return (
        [row for i, row in enumerate(rows) if i in chosen],
        [row for i, row in enumerate(rows) if i not in chosen],
    )


def write(data: epath.PathLike, split: str, directory: epath.PathLike) -> list[str]:
    """Write the files of a split, and return a line about each of its parts.

    Args:
        data: folder of the data set.
        split: its name, e.g. "simple" or "cut26".
        directory: folder for the files.

    Raises the errors of `parts`.
    """
    for_training, others = parts(epath.Path(data).expanduser(), split)
    val, train = divided(for_training, -(-len(for_training) // HELD_OUT))
    generalization, test = divided(others, len(others) // 2)
    rows = {"train": train, "val": val, "generalization": generalization, "test": test}
    contents = {}
    for name, of_part in rows.items():
        for column, texts in (
            ("commands", [row.command for row in of_part]),
            ("actions", [row.actions for row in of_part]),
        ):
            lines = "".join(f"{text}\n" for text in texts)
            contents[f"{name}.{column}"] = lines.encode()
    write_all(epath.Path(directory).expanduser(), contents)
    return [f"{name}: {_summary(of_part)}" for name, of_part in rows.items()]


def _summary(rows: Sequence[Example]) -> str:
    lengths = [row.length for row in rows]
    if not lengths:
        return "0 examples"
    return f"{counted(len(rows), 'example')}, {min(lengths)} to {max(lengths)} actions"


if __name__ == "__main__":
    DATA = flags.DEFINE_string("data", None, "folder of the data set", required=True)
    SPLIT = flags.DEFINE_string(
        "split", "simple", f"{', '.join(PUBLISHED)}, or e.g. cut26"
    )
    DIRECTORY = flags.DEFINE_string(
        "directory", None, "folder for the files", required=True
    )

    def main(_: Sequence[str]) -> None:
        """Write the files of one split."""
        try:
            report = write(DATA.value, SPLIT.value, DIRECTORY.value)
        except UserError as error:
            sys.exit(f"error: {error}")
        print("\n".join(report), file=sys.stderr)

    app.run(main)
