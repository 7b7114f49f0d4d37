"""Invalid uses of benchmark.py. Each ends with one error message and creates no
file.
"""

import pytest

from helpers.abusing import refused, unharmed
from helpers.forked import script

ROWS = [
    (["--rounds=0"], "--rounds=0"),
    (["--rounds=-1"], "--rounds=-1"),
    (["--rounds=x"], "--rounds=x"),
    (["--rounds=1.5"], "--rounds=1.5"),
    (["--rounds=99999999999999999999999999"], "--rounds=99999999999999999999999999"),
    (["--length=1"], "--length=1"),
    (["--length=x"], "--length=x"),
    (["--length=99999"], "--length=99999: must be at most data.max_length = "),
    (
        ["--config.data.directory=/nowhere"],
        "There is no directory /nowhere: set data.directory",
    ),
    (["--config.data.directory=/dev/null"], "/dev/null"),
    (["--config.data.train_split=none"], "neither none.en nor none.en.gz"),
    (["--config.data.source_language=xx"], "train.xx"),
    (["--config.mesh.data=3"], "needs exactly 3 devices and there are 1"),
    (["--config.model.num_heads=0"], "config.model.num_heads = 0: must be at least 1"),
    (["--config.training.steps=99999999999999999999999"], "must be less than 2³¹"),
    (["--workdir=x"], "Unknown command line flag 'workdir'"),
    (["--config="], "there is no file ''"),
    (["--config=/nowhere.py"], "/nowhere.py"),
    (["--num_processes=2"], "--coordinator_address is missing"),
]


@pytest.mark.parametrize(
    ("given", "words"), [(given, words) for given, *words in ROWS], ids=str
)
def test_refused(recipe, tmp_path, given, words):
    environment = {"TMPDIR": str(tmp_path)}
    with unharmed(recipe.parent, tmp_path, new=("__pycache__",)):
        done = script(
            "benchmark",
            f"--config={recipe}",
            *given,
            cwd=tmp_path,
            environment=environment,
        )
        refused(done, *words)
