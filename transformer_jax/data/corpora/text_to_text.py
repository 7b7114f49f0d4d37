r"""Write data sets of several tasks as pairs of texts (Raffel et al. 2020).

    python -m transformer_jax.data.corpora.text_to_text --task=sick --data=sick \
        --directory=DIR/sick

The files are `{train,val,test}.inputs`, whose first words name the task, and
`{train,val,test}.targets`, with the answers in words. Line i of one belongs to line i
of the other. `--data` is the folder of the data set:

- en-de, a sentence and its translation: `{train,val,test_2016_flickr}.{en,de}`.
- sick, two sentences and e.g. "neutral": `{train,dev,test}.tsv` with the columns
  sentence1, sentence2 and label.
- trec, a question and e.g. "location": `{train,test}.tsv` with the columns sentence and
  label.
- samsum, a dialogue and its summary: `{train,val,test}.json`, lists of objects with
  dialogue and summary.
- jfleg, a sentence and its correction: `{dev,test}.src` and `{dev,test}.ref0` to
  `{dev,test}.ref3`.

What is done with them:

- The turns of a dialogue are separated by " | ".
- TREC and JFLEG have no validation split. A tenth of the sentences of `train` and `dev`
  is held out, chosen by a hash of the sentence.
- JFLEG has four corrections of each sentence. Each is a line of `train`. The others
  have the first one in `targets`, and all in `targets0` to `targets3`.
- Examples with an empty text are left out.
- `--examples=N` chooses N inputs of `train` at random, the same ones every time.
- `--without_leaks` leaves out the inputs of `train` that `val` or `test` repeat.

Messages go to stderr: how many examples there are, and how many are left out.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags
from etils import epath

from transformer_jax.data import files
from transformer_jax.data.files import DataError
from transformer_jax.data.progress import counted
from transformer_jax.data.references import numbered_files
from transformer_jax.data.sources import parallel_files
from transformer_jax.data.tables import tsv_file
from transformer_jax.errors import UserError
from transformer_jax.files import write_all

# the classes of TREC in words
QUESTIONS = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "human",
    "LOC": "location",
    "NUM": "number",
}
TURNS = " | "  # between the turns of a dialogue
REFERENCES = 4  # corrections of a sentence
HELD_OUT = 10  # one of so many sentences is held out


class Example(NamedTuple):
    """An input without the prefix of its task, and the targets that are right."""

    text: str
    targets: tuple[str, ...]


# Readers: each returns the examples of a split of a folder.


def translations(folder: epath.Path, split: str) -> list[Example]:
    """Read sentences in English and German."""
    pairs = parallel_files(folder, split, ("en", "de"))
    return [Example(pair["en"], (pair["de"],)) for pair in pairs]


def entailments(folder: epath.Path, split: str) -> list[Example]:
    """Read premises and hypotheses."""
    rows = tsv_file(folder, split, ("sentence1", "sentence2", "label"))
    return [
        Example(f"{row['sentence1']} hypothesis: {row['sentence2']}", (row["label"],))
        for row in rows
    ]


def questions(folder: epath.Path, split: str) -> list[Example]:
    """Read questions and the kinds of their answers.

    Raises DataError for a label that TREC does not have.
    """
    rows = tsv_file(folder, split, ("sentence", "label"))
    examples = []
    for i, row in enumerate(rows):
        if row["label"] not in QUESTIONS:
            raise DataError(
                f"{rows.place(i)} has the label {row['label']!r}: "
                f"it must be one of {', '.join(QUESTIONS)}"
            )
        examples.append(Example(row["sentence"], (QUESTIONS[row["label"]],)))
    return examples


def dialogues(folder: epath.Path, split: str) -> list[Example]:
    """Read dialogues and summaries.

    Raises DataError if the file is not a list of objects with both texts.
    """
    path = files.find(folder, f"{split}.json")
    try:
        content = bytes(files.read(path)).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}. Convert it.") from error
    records = files.parse_json(content, str(path))
    if not isinstance(records, list):
        raise DataError(f"{path} must be a list of dialogues: copy the file again")
    examples = []
    for number, record in enumerate(records, 1):
        where = f"{path}, dialogue {number}"
        turns = re.split(r"[\r\n]+", _text(record, "dialogue", where))
        filled = [turn for turn in map(_one_line, turns) if turn]
        summary = _text(record, "summary", where)
        examples.append(Example(TURNS.join(filled), (summary,)))
    return examples


def corrections(folder: epath.Path, split: str) -> list[Example]:
    """Read sentences and their corrections."""
    rows = numbered_files(folder, split, ("src", "ref"), REFERENCES)
    return [Example(row["src"], tuple(row["ref"])) for row in rows]


def _text(record: Any, key: str, where: str) -> str:
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where} must have {key!r}, a text: correct the file")
    files.check_characters(text, key, where)
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split())


class Task(NamedTuple):
    """A task as text.

    prefix: the first words of its inputs.
    read: returns the examples of a split of a folder.
    splits: the split of the folder for each split that is written. Without "val", this
        is a part of "train".
    """

    prefix: str
    read: Callable[[epath.Path, str], list[Example]]
    splits: Mapping[str, str]


TASKS = {
    "en-de": Task(
        "translate English to German: ",
        translations,
        {"train": "train", "val": "val", "test": "test_2016_flickr"},
    ),
    "sick": Task(
        "sick premise: ",
        entailments,
        {"train": "train", "val": "dev", "test": "test"},
    ),
    "trec": Task("trec question: ", questions, {"train": "train", "test": "test"}),
    "samsum": Task(
        "summarize: ",
        dialogues,
        {"train": "train", "val": "val", "test": "test"},
    ),
    "jfleg": Task("correct grammar: ", corrections, {"train": "dev", "test": "test"}),
}


def write(
    task: Task,
    data: epath.PathLike,
    directory: epath.PathLike,
    examples: int = 0,
    without_leaks: bool = False,
) -> list[str]:
    """Write the files of a task, and return what there is to say about each split.

    Args:
        task: one of `TASKS`.
        data: folder of the data set.
        directory: folder for the files.
        examples: the number of inputs of "train", chosen at random; 0: all.
        without_leaks: leave out the inputs of "train" that other splits repeat.

    Raises:
        DataError: a file is missing or invalid.
        UserError: there are fewer than `examples` inputs.
    """
    folder = epath.Path(data).expanduser()
    splits = {
        split: [_tidy(example) for example in task.read(folder, name)]
        for split, name in task.splits.items()
    }
    if "val" not in splits:
        everything = splits["train"]
        splits["train"] = [row for row in everything if not is_held_out(row.text)]
        splits["val"] = [row for row in everything if is_held_out(row.text)]
    notes = {split: list[str]() for split in splits}
    for split, rows in splits.items():
        filled = [row for row in rows if row.text and all(row.targets)]
        if len(filled) < len(rows):
            notes[split].append(f"{len(rows) - len(filled):,} with an empty text")
        splits[split] = filled

    elsewhere = {row.text for split in ("val", "test") for row in splits[split]}
    train = splits["train"]
    new = [row for row in train if row.text not in elsewhere]
    leaks = f"{len(train) - len(new):,} that val or test repeat"
    if without_leaks:
        train = new
        notes["train"].append(leaks)
    splits["train"] = chosen(train, examples) if examples else train

    contents = dict[str, bytes]()
    report = []
    for split, rows in splits.items():
        contents |= _files(task, split, rows)
        left_out = ", ".join(notes[split]) or "none"
        report.append(f"{split}: {counted(len(rows), 'input')}; left out: {left_out}")
    if not without_leaks and len(new) < len(splits["train"]):
        report.append(f"inputs of train: {leaks}; --without_leaks leaves them out")
    write_all(epath.Path(directory).expanduser(), contents)
    return report


def _tidy(example: Example) -> Example:
    """Return an example whose texts are lines with single spaces."""
    return Example(_one_line(example.text), tuple(map(_one_line, example.targets)))


def is_held_out(text: str) -> bool:
    """Return True for a tenth of all texts, by their hash."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0


def chosen(rows: Sequence[Example], count: int) -> list[Example]:
    """Return `count` random rows in their order.

    A larger number has all rows of a smaller one.

    Raises UserError if there are fewer.
    """
    if count > len(rows):
        raise UserError(
            f"examples = {count}: there are only {len(rows)}, so set it to 0 for all"
        )
    order = np.random.default_rng(0).permutation(len(rows))
    return [rows[i] for i in sorted(order[:count])]


def _files(task: Task, split: str, rows: Sequence[Example]) -> dict[str, bytes]:
    """Return the content of each file of a split.

    In "train", each target of an input is a line.
    """
    several = len(rows[0].targets) if rows else 1
    repeats = several if split == "train" else 1
    columns = {
        "inputs": [task.prefix + row.text for row in rows for _ in range(repeats)],
        "targets": [target for row in rows for target in row.targets[:repeats]],
    }
    if several > 1 and split != "train":
        for number in range(several):
            columns[f"targets{number}"] = [row.targets[number] for row in rows]
    return {
        f"{split}.{name}": "".join(f"{line}\n" for line in lines).encode()
        for name, lines in columns.items()
    }


if __name__ == "__main__":
    TASK = flags.DEFINE_enum("task", None, list(TASKS), "the task", required=True)
    DATA = flags.DEFINE_string("data", None, "folder of the data set", required=True)
    DIRECTORY = flags.DEFINE_string(
        "directory", None, "folder for the files", required=True
    )
    EXAMPLES = flags.DEFINE_integer(
        "examples", 0, "inputs of train, chosen at random; 0: all", lower_bound=0
    )
    WITHOUT_LEAKS = flags.DEFINE_bool(
        "without_leaks", False, "leave out inputs of train that val or test repeat"
    )

    def main(_: Sequence[str]) -> None:
        """Write the files of one task."""
        try:
            report = write(
                TASKS[TASK.value],
                DATA.value,
                DIRECTORY.value,
                EXAMPLES.value,
                WITHOUT_LEAKS.value,
            )
        except UserError as error:
            sys.exit(f"error: {error}")
        print("\n".join(report), file=sys.stderr)

    app.run(main)
