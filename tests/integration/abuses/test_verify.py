"""Invalid uses of verify.py.

Each is refused before the table is printed, so nothing is on stdout.
"""

import pytest

from helpers.abusing import refused, unharmed
from helpers.forked import script

ROWS = [
    (["--config.model.num_heads=0"], "config.model.num_heads = 0: must be at least 1"),
    (["--config.model.d_model=-16"], "config.model.d_model = -16"),
    (["--config.training.steps=99999999999999999999999"], "must be less than 2³¹"),
    (["--config.data.batch_tokens=1"], "must have room for rows_multiple = 8 rows"),
    (["--config.data.max_length=0"], "config.data.max_length = 0"),
    (["--config.model.dtype=float13"], "must be one of float32, bfloat16"),
    (["--config.optimizer.b1=1"], "config.optimizer.b1 = 1.0: must be in [0, 1)"),
    (["--config.task=gpt"], "config.task = 'gpt' is not a task"),
    (["--config.mesh.tensor=0"], "config.mesh.tensor = 0"),
    (["--config.training.microbatches=7"], "must divide data.rows_multiple = 8"),
    (["--workdir=x"], "Unknown command line flag 'workdir'"),
    (["recipe.py"], "'recipe.py' is not an option"),
    (["--config="], "there is no file ''"),
    (["--config=/nowhere.py"], "/nowhere.py"),
]


@pytest.mark.parametrize(
    ("given", "words"), [(given, words) for given, *words in ROWS], ids=str
)
def test_refused(recipe, tmp_path, given, words):
    with unharmed(recipe.parent, tmp_path, new=("__pycache__",)):
        refused(script("verify", f"--config={recipe}", *given, cwd=tmp_path), *words)
