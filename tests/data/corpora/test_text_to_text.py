"""Data sets of several tasks, written as pairs of texts."""

import json
import subprocess
import sys

import pytest

from helpers.corpus import real_data
from transformer_jax.data.corpora.text_to_text import (
    REFERENCES,
    TASKS,
    chosen,
    is_held_out,
    write,
)
from transformer_jax.data.files import DataError
from transformer_jax.errors import UserError


def lines(path):
    return path.read_text().splitlines()


def pairs(folder, split):
    files = [lines(folder / f"{split}.{name}") for name in ("inputs", "targets")]
    return list(zip(*files, strict=True))


def write_lines(path, texts):
    path.write_text("".join(f"{text}\n" for text in texts))


def test_translations_keep_their_lines(tmp_path):
    for split, count in (("train", 9), ("val", 2), ("test_2016_flickr", 3)):
        for language in ("en", "de"):
            texts = [f"{split} {i} in  {language} " for i in range(count)]
            write_lines(tmp_path / f"{split}.{language}", texts)
    report = write(TASKS["en-de"], tmp_path, tmp_path / "out")
    assert report[0] == "train: 9 inputs; left out: none"
    assert pairs(tmp_path / "out", "train")[1] == (
        "translate English to German: train 1 in en",
        "train 1 in de",
    )
    assert len(pairs(tmp_path / "out", "test")) == 3

    few = write(TASKS["en-de"], tmp_path, tmp_path / "few", examples=4)
    assert few[0] == "train: 4 inputs; left out: none"
    everything = pairs(tmp_path / "out", "train")
    four = pairs(tmp_path / "few", "train")
    write(TASKS["en-de"], tmp_path, tmp_path / "fewer", examples=2)
    two = pairs(tmp_path / "fewer", "train")
    assert set(two) < set(four) < set(everything)
    assert four == [pair for pair in everything if pair in four]
    assert len(pairs(tmp_path / "few", "val")) == 2
    with pytest.raises(UserError, match="examples = 10: there are only 9, so set it"):
        write(TASKS["en-de"], tmp_path, tmp_path / "few", examples=10)


def test_answers_are_words(tmp_path):
    rows = ["sentence1\tsentence2\tlabel", "A man runs\tA man sits\tcontradiction"]
    for split in ("train", "dev", "test"):
        write_lines(tmp_path / f"{split}.tsv", rows)
    report = write(TASKS["sick"], tmp_path, tmp_path / "out")
    assert pairs(tmp_path / "out", "val") == [
        ("sick premise: A man runs hypothesis: A man sits", "contradiction")
    ]
    assert report[-1].startswith("inputs of train: 1 that val or test repeat")


def test_a_part_of_the_questions_is_held_out_by_its_text(tmp_path):
    questions = [f"question {i} ?\tLOC" for i in range(200)] * 2
    for split in ("train", "test"):
        write_lines(tmp_path / f"{split}.tsv", ["sentence\tlabel", *questions])
    write(TASKS["trec"], tmp_path, tmp_path / "out")
    train = pairs(tmp_path / "out", "train")
    val = pairs(tmp_path / "out", "val")
    assert len(train) + len(val) == 400
    assert not set(train) & set(val)
    assert 20 < len(val) < 70
    assert train[0] == ("trec question: question 0 ?", "location")
    held_out = sum(is_held_out(str(i)) for i in range(10_000))
    assert held_out == pytest.approx(1000, abs=99)


def test_a_class_that_trec_lacks_is_refused_with_its_line(tmp_path):
    write_lines(tmp_path / "train.tsv", ["sentence\tlabel", "a ?\tLOC", "b ?\tPLACE"])
    with pytest.raises(DataError, match=r"train\.tsv:3 has the label 'PLACE'"):
        write(TASKS["trec"], tmp_path, tmp_path / "out")


def dialogue(text, summary="They meet."):
    return {"id": "1", "dialogue": text, "summary": summary}


def test_dialogues_are_lines_and_leaks_are_counted(tmp_path):
    splits = {
        "train": [
            dialogue("Ann: Hi\r\nBob:  Hello "),
            dialogue(""),
            dialogue("Ann: Hi\nBob: Hello", "Another\nsummary."),
            dialogue("Ann: No | yes\r\n\r\nBob: ?"),
        ],
        "val": [dialogue("Eve: ?")],
        "test": [dialogue("Ann: Hi\nBob: Hello")],
    }
    for split, records in splits.items():
        (tmp_path / f"{split}.json").write_text(json.dumps(records))
    report = write(TASKS["samsum"], tmp_path, tmp_path / "all")
    assert report == [
        "train: 3 inputs; left out: 1 with an empty text",
        "val: 1 input; left out: none",
        "test: 1 input; left out: none",
        "inputs of train: 2 that val or test repeat; --without_leaks leaves them out",
    ]
    assert pairs(tmp_path / "all", "train") == [
        ("summarize: Ann: Hi | Bob: Hello", "They meet."),
        ("summarize: Ann: Hi | Bob: Hello", "Another summary."),
        ("summarize: Ann: No | yes | Bob: ?", "They meet."),
    ]
    report = write(TASKS["samsum"], tmp_path, tmp_path / "new", without_leaks=True)
    assert report[0] == (
        "train: 1 input; left out: 1 with an empty text, 2 that val or test repeat"
    )
    assert len(report) == 3
    assert len(pairs(tmp_path / "new", "train")) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", r"train\.json must be a list of dialogues"),
        ('[{"dialogue": "a", "summary": "b"}, {}]', "dialogue 2 must have 'dialogue'"),
        ('[{"dialogue": "a", "summary": 1}]', "dialogue 1 must have 'summary', a text"),
        ('["\\ud800"]', "dialogue 1 must have"),
        ("[", r"train\.json:1, column 2 is not JSON"),
    ],
)
def test_faults_of_dialogues_are_refused(tmp_path, content, message):
    (tmp_path / "train.json").write_text(content)
    with pytest.raises(DataError, match=message):
        write(TASKS["samsum"], tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_dialogues_are_utf_8(tmp_path):
    (tmp_path / "train.json").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"train\.json is not UTF-8"):
        write(TASKS["samsum"], tmp_path, tmp_path / "out")


def test_each_correction_is_an_example_of_training(tmp_path):
    for split, count in (("dev", 60), ("test", 2)):
        write_lines(tmp_path / f"{split}.src", [f"{split} {i} ." for i in range(count)])
        for number in range(REFERENCES):
            texts = [f"{split} {i} {number} . " for i in range(count)]
            write_lines(tmp_path / f"{split}.ref{number}", texts)
    write(TASKS["jfleg"], tmp_path, tmp_path / "out")
    train = pairs(tmp_path / "out", "train")
    val = pairs(tmp_path / "out", "val")
    assert len(train) + REFERENCES * len(val) == 240
    source = train[0][0].removeprefix("correct grammar: ")
    name = source.removesuffix(" .")
    assert [target for _, target in train[:4]] == [f"{name} {i} ." for i in range(4)]
    assert {text for text, _ in train[:4]} == {f"correct grammar: {source}"}
    assert pairs(tmp_path / "out", "test")[0][1] == "test 0 0 ."
    assert lines(tmp_path / "out" / "test.targets3") == ["test 0 3 .", "test 1 3 ."]
    assert len(lines(tmp_path / "out" / "val.targets1")) == len(val)
    assert not (tmp_path / "out" / "train.targets0").exists()


def test_a_missing_file_is_named(tmp_path):
    for task in TASKS.values():
        with pytest.raises(DataError, match=str(tmp_path)):
            write(task, tmp_path, tmp_path / "out")


def test_rows_are_chosen_in_their_order():
    assert chosen(range(5), 5) == [0, 1, 2, 3, 4]


def test_the_command_reports_on_stderr(tmp_path):
    module = [sys.executable, "-m", "transformer_jax.data.corpora.text_to_text"]
    options = ["--task=sick", f"--data={tmp_path}", f"--directory={tmp_path}/out"]
    done = subprocess.run([*module, *options], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: There is neither train.tsv nor")
    assert "Traceback" not in done.stderr


SIZES = {
    "en-de": ("multi30k", 29_000, 1014, 1000),
    "sick": ("sick", 4500, 500, 4927),
    "trec": ("trec", 4905, 547, 500),
    "samsum": ("samsum", 14_731, 818, 819),
    "jfleg": ("jfleg", 4 * 672, 82, 747),
}


@pytest.mark.parametrize("name", TASKS)
def test_real_data(name, tmp_path):
    folder, *sizes = SIZES[name]
    write(TASKS[name], real_data(folder), tmp_path)
    for split, size in zip(("train", "val", "test"), sizes, strict=True):
        rows = pairs(tmp_path, split)
        assert len(rows) == size
        assert all(text.startswith(TASKS[name].prefix) for text, _ in rows)
        assert all(target for _, target in rows)
