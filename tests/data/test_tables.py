"""Tables, and files of GLUE as they are published."""

import gzip

import pytest

from helpers.runs import get_config
from transformer_jax.data.files import DataError
from transformer_jax.data.tables import tsv_file

# Task: the first lines of a file in its published layout, and what is read of each
#     example.
GLUE = {
    "cola": (
        [
            "gj04\t1\t\tThe sailors rode the breeze.",
            "gj04\t0\t*\tThe more we study.",
            'c-05\t1\t\t"Yes" he said.',
        ],
        [
            ("The sailors rode the breeze.", "1"),
            ("The more we study.", "0"),
            ('"Yes" he said.', "1"),
        ],
    ),
    "sst2": (
        ["sentence\tlabel", "a film \t1", "no wit \t0"],
        [("a film ", "1"), ("no wit ", "0")],
    ),
    "mrpc": (
        [
            "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
            '1\t702\t703\tHe "said" so .\tSo he said .',
        ],
        [('He "said" so .', "So he said .", "1")],
    ),
    "stsb": (
        [
            (
                "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\t"
                "sentence1\tsentence2\tscore"
            ),
            (
                "0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tA "
                "plane.\tAn air plane.\t5.000"
            ),
        ],
        [("A plane.", "An air plane.", "5.000")],
    ),
    "qqp": (
        [
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
            "133\t7\t8\tHow is it?\tHow?\t1",
            "9\t1",
            "10\t2\t3\ta\tb\t0",
        ],
        [("How is it?", "How?", "1"), ("a", "b", "0")],
    ),
    "mnli": (
        [
            (
                "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\t"
                "sentence2_binary_parse\tsentence1_parse\tsentence2_parse\t"
                "sentence1\tsentence2\tlabel1\tgold_label"
            ),
            (
                "0\t31\t31n\tgov\t( a )\t( b )\t(ROOT "
                "a)\t(ROOT b)\tOne thing.\tTwo things.\tneutral\tentailment"
            ),
        ],
        [("One thing.", "Two things.", "entailment")],
    ),
    "qnli": (
        ["index\tquestion\tsentence\tlabel", "0\tWhen?\tIn May.\tentailment"],
        [("When?", "In May.", "entailment")],
    ),
    "rte": (
        ["index\tsentence1\tsentence2\tlabel", "0\tNo one.\tSomeone.\tnot_entailment"],
        [("No one.", "Someone.", "not_entailment")],
    ),
}


@pytest.mark.parametrize("task", GLUE)
def test_a_recipe_reads_the_published_layout(task, tmp_path):
    lines, expected = GLUE[task]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = get_config("finetune", f"task={task}").data
    columns = [
        name
        for name in (data.text_column, data.second_column, data.label_column)
        if name
    ]
    source = tsv_file(tmp_path, "train", columns)
    assert [tuple(row[name] for name in columns) for row in source] == expected


def test_a_file_without_names_starts_at_its_first_line(tmp_path):
    (tmp_path / "train.tsv").write_text("\n".join(GLUE["cola"][0]))
    source = tsv_file(tmp_path, "train[1:]", ["sentence"])
    assert (source.first_line, len(source)) == (2, 2)
    (tmp_path / "train.tsv").write_text(
        "\n".join([*GLUE["cola"][0], "c-05\t1\tno mark"])
    )
    with pytest.raises(DataError, match=r"train\.tsv:4 has 3 fields"):
        tsv_file(tmp_path, "train", ["sentence"])


def test_damaged_lines_of_qqp_are_counted(tmp_path, caplog):
    (tmp_path / "train.tsv").write_text("\n".join(GLUE["qqp"][0]))
    assert tsv_file(tmp_path, "train", ["label"]).first_line == 0
    assert "1 lines with too few fields are left out, e.g. line 3" in caplog.text


def test_the_published_name_is_read_only_where_the_own_one_is_missing(tmp_path):
    (tmp_path / "train.tsv").write_text(
        "premise\tlabel\tsentence1\tscore\na\tb\tc\td\n"
    )
    assert list(tsv_file(tmp_path, "train", ["premise", "label"])) == [
        {"premise": "a", "label": "b"}
    ]


def write(directory, **files):
    for name, content in files.items():
        (directory / name.replace("_", ".", 1)).write_bytes(content)


def test_tables(tmp_path):
    rows = 'sentence\tlabel\nWhat is \u2028 an atom ?\tDESC\r\n \t\n"quoted\tHUM\n'
    write(tmp_path, train_tsv=rows.encode())
    (tmp_path / "dev.tsv.gz").write_bytes(
        gzip.compress(b"\xef\xbb\xbfid\tlabel\n7\tNUM")
    )
    source = tsv_file(tmp_path, "train", ["label", "sentence"])
    assert list(source) == [
        {"label": "DESC", "sentence": "What is \u2028 an atom ?"},
        {"label": "", "sentence": " "},
        {"label": "HUM", "sentence": '"quoted'},
    ]
    assert b"".join(source.column("label").blocks()) == b"DESC\n\nHUM\n"
    assert list(tsv_file(tmp_path, "dev", ["id"])) == [{"id": "7"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"sentence\tlabel\na\tb\nc\n",
            r"train\.tsv:3 has 1 fields, but the first line names 2: sentence, label",
        ),
        (b"sentence\tlabel\na\tb\tc\n", r"train\.tsv:2 has 3 fields"),
        (b"sentence\tlabel\na\tb\n\n", r"train\.tsv:3 has 1 fields"),
        (
            b"sentence\tclass\na\tb\n",
            (
                r"train\.tsv:1 must name these .* once each: label\. It names:"
                r" sentence, class"
            ),
        ),
        (
            b"label\tlabel\na\tb\n",
            (
                r"train\.tsv:1 must name these columns once each: label\. It names:"
                r" label, label"
            ),
        ),
        (b"", r"train\.tsv:1 must name"),
        (
            b"label\n",
            (
                r"train\.tsv has only the line that names its columns: add a line for"
                r" each example"
            ),
        ),
        (b"label\na\n\xff\n", r"train\.tsv:3 is not UTF-8"),
    ],
)
def test_broken_tables_are_located(content, message, tmp_path):
    write(tmp_path, train_tsv=content)
    with pytest.raises(DataError, match=message):
        tsv_file(tmp_path, "train", ["label"])
    with pytest.raises(
        DataError,
        match=r"neither test\.tsv nor test\.tsv\.gz .* contains train \(tsv\)",
    ):
        tsv_file(tmp_path, "test[:3]", ["label"])


def test_a_tsv_file_with_carriage_returns_alone(tmp_path):
    (tmp_path / "val.tsv").write_bytes(b"sentence\tlabel\ra\t0\rb\t1\r")
    with pytest.raises(
        DataError, match=r"val\.tsv is one line with carriage returns in it"
    ):
        tsv_file(tmp_path, "val", ("sentence", "label"))


def test_an_empty_tsv_file(tmp_path):
    (tmp_path / "val.tsv").write_bytes(b"")
    with pytest.raises(
        DataError,
        match=(
            r"val\.tsv:1 must name these columns once each: sentence\. It names:"
            r" \(none\)"
        ),
    ):
        tsv_file(tmp_path, "val", ("sentence",))
