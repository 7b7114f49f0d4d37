"""Files of GLUE are read as they are published."""

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
