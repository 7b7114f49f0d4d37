"""Every record can be entered: a quick run of each best entry, and the command."""

import json
import os

import pytest

from helpers import ROOT
from helpers.corpus import real_data
from helpers.forked import script
from transformer_jax import records
from transformer_jax.config import make_task, parse
from transformer_jax.errors import UserError
from transformer_jax.records.entry import Entry

OPTIONS = ("--quick", "--seeds=1")


def enter(name, folder, *options):
    data = real_data(".")
    return script(
        "reproduce", f"record:{name}", f"--workdir={folder}", f"--data={data}", *options
    )


@pytest.mark.parametrize("name", records.NAMES)
def test_the_best_entry_can_be_run(name, tmp_path):
    done = enter(name, tmp_path, *OPTIONS)
    assert done.returncode == 0, done.stderr.decode()
    record = records.find(name)
    path = tmp_path / f"record-{name}-quick" / "result.json"
    result = json.loads(path.read_text())
    assert result["record"] == f"record:{name}"
    assert set(result["runs"][0]) >= {record.measure, "parameters", "processors"}
    assert result["runs"][0]["processors"] <= record.processors
    assert result["config"]["task"]
    assert result["problems"][0] == "1 of at least 3 seeds"
    assert record.title in done.stdout.decode()
    last = done.stdout.decode().rstrip().splitlines()[-1]
    assert f"`{record.recipe}" in last


@pytest.mark.parametrize("name", records.NAMES)
def test_the_best_entry_keeps_what_is_fixed(name, tmp_path):
    from transformer_jax.config import load_recipe, override

    record = records.find(name)
    config = load_recipe(str(ROOT / "configs" / record.recipe))
    override(config, [f"--config.{key}={value}" for key, value in record.keys.items()])
    record.check(config)
    config.data.directory = config.data.directory or str(tmp_path)
    make_task(parse(config), tmp_path)
    assert Entry(record, config).design["config"]["task"] == config.task
    assert record.title[0].islower()
    assert record.title[-1] != "."
    assert record.seeds >= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("record:x",), b"no record 'x': choose one of multi30k-22"),
        (("scaling", "--config.model.d_ff=3"), b"needs one record, e.g. record:scan"),
        (("record:scan-26", "--config=none.py"), b"none.py"),
        (("record:scan-26", "--config.model.width=3"), b"width"),
        (
            ("record:scan-26", "--config.data.train_split=test"),
            b"config.data.train_split = 'test': must be 'train' in this record",
        ),
    ],
)
def test_bad_entries(options, message, tmp_path):
    done = script("reproduce", *options, f"--workdir={tmp_path}")
    assert done.returncode == 2
    assert message in done.stderr
    assert not os.listdir(tmp_path)


def test_a_record_that_does_not_exist():
    with pytest.raises(UserError, match="there is no record 'scan'"):
        records.find("scan")
