"""A corpus small enough to train on in seconds, and the real data sets."""

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers import ROOT


def write_corpus(
    directory: Path, pairs: int = 60, languages: tuple[str, ...] = ("en", "de", "fr")
) -> None:
    """Write a corpus of made-up words.

    Each language spells the same words in its own way.

    Training sentences have 1–6 words. Other sentences have 1–3, because translation
    compiles a program for each length. In `{split}.txt`, three sentences are a
    document. In `{split}.tsv`, each is a row, with its reversal, the number of its
    first word as the value, "even" or "odd" as the label, and 0 or 1 for these. In
    `{split}.json`, each is a context, the answer to whose first word is its last word.
    In `{split}.conll`, every word with an "a" is a place.
    """
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, count in (
        ("train", pairs),
        ("val", 11),
        ("test", 7),
        ("test_2016_flickr", 7),
        ("validation", 11),
    ):
        longest = 6 if split == "train" else 3
        rows = [
            [draw.randrange(20) for _ in range(draw.randint(1, longest))]
            for _ in range(count)
        ]
        for language in languages:
            lines = [
                " ".join(f"{language[0]}{'aeiou'[w % 5]}{'kmst'[w // 5]}" for w in row)
                for row in rows
            ]
            (directory / f"{split}.{language}").write_text("\n".join(lines) + "\n")
        table = [
            f"{line}\t{line[::-1]}\t{row[0]}"
            f"\t{'odd' if row[0] % 2 else 'even'}\t{row[0] % 2}\n"
            for line, row in zip(lines, rows, strict=True)
        ]
        (directory / f"{split}.tsv").write_text(
            "sentence\treversed\tvalue\tlabel\tnumber\n" + "".join(table)
        )
        tagged = [
            "".join(
                f"{word}\t{'B-LOC' if 'a' in word else 'O'}\n" for word in line.split()
            )
            for line in lines
        ]
        (directory / f"{split}.conll").write_text("\n".join(tagged))
        documents = ["\n".join(lines[i : i + 3]) + "\n" for i in range(0, count, 3)]
        (directory / f"{split}.txt").write_text("\n".join(documents))
        write_questions(directory / f"{split}.json", lines)


def put_before(prefix: str, directory: Path, column: str) -> None:
    """Put a prefix before each line of a column, in all splits."""
    for path in directory.glob(f"*.{column}"):
        lines = path.read_text().splitlines()
        path.write_text("".join(f"{prefix}{line}\n" for line in lines))


def write_questions(path: Path, contexts: Sequence[str]) -> None:
    """Write a question about each context in the layout of SQuAD: its first word,
    answered by its last word.
    """
    paragraphs = []
    for i, context in enumerate(contexts):
        first, last = context.split()[0], context.split()[-1]
        answer = {"text": last, "answer_start": len(context) - len(last)}
        paragraphs.append(
            {
                "context": context,
                "qas": [{"id": str(i), "question": first, "answers": [answer]}],
            }
        )
    path.write_text(json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}))


def real_data(name: str) -> Path:
    """Return the folder of a real data set, or skip the test if it is missing."""
    folder = (
        Path(os.environ.get("TRANSFORMER_JAX_DATA", ROOT.parent / "shared" / "data"))
        / name
    )
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}: set TRANSFORMER_JAX_DATA")
    return folder
