"""Invalid uses of describe.py.

Each ends with one error message and leaves all files unchanged.
"""

import pytest

from helpers.abusing import refused, unharmed
from helpers.forked import script

ROWS = [
    (["--mesh=x"], "--mesh=x: write it as data=64,fsdp=8,tensor=1"),
    (["--mesh=data"], "--mesh=data: write it as"),
    (["--mesh=data=0"], "--mesh=data=0: write it as"),
    (["--mesh=data=-1"], "--mesh=data=-1: write it as"),
    (
        ["--mesh=data=2,data=3"],
        (
            "--mesh=data=2,data=3: "
            "write it as data=64,fsdp=8,tensor=1, each axis at most once"
        ),
    ),
    (["--mesh=data=٣"], "write it as data=64"),
    (["--mesh=data=99999999999999"], "write it as data=64"),
    (["--mesh", "data=2"], "--mesh=data=2: write it with =, and only once"),
    (
        ["--mesh=tensor=3"],
        "cannot be divided among mesh.tensor = 3 devices",
        "change model.num_heads or the mesh",
    ),
    (["--config.mesh.data=3"], "set --mesh instead, e.g. --mesh=data=64,fsdp=8"),
    (["--length=1"], "--length=1"),
    (["--length=33"], "--length=33: must be at most data.max_length = 32"),
    (
        ["--length=99999999999"],
        "--length=99999999999: must be at most data.max_length = 32",
    ),
    (["--link_gb_s=0"], "--link_gb_s=0"),
    (["--link_gb_s=inf"], "--link_gb_s=inf: must be finite"),
    (["--link_gb_s=nan"], "--link_gb_s=nan: must be finite"),
    (["--peak_tflop_s=nan"], "--peak_tflop_s=nan: must be finite"),
    (["--config.model.num_heads=0"], "config.model.num_heads = 0: must be at least 1"),
    (["--config.training.steps=99999999999999999999999"], "must be less than 2³¹"),
    (
        ["--topology=v9:2x2"],
        "--topology=v9:2x2: there is no such topology",
        "v5e: 1x1, 2x2, 2x4",
    ),
    (
        ["--topology=v5e"],
        "--topology=v5e: there is no such topology",
        "write it as CHIP:LAYOUT, e.g. v5e:16x16",
    ),
    (
        ["--topology=h100:8"],
        "--topology=h100:8: there is no such topology",
        "h100: 1x1x1, 1x1x2, 1x1x4, 1x1x8, 2x1x8",
    ),
    (
        ["--topology=h100:99999x1x8"],
        "--topology=h100:99999x1x8: there is no such topology",
    ),
    (
        ["--topology=v5e:2x2", "--peak_tflop_s=9"],
        "--peak_tflop_s cannot be used with --topology",
    ),
    (["--step=predict"], "--step needs --topology, e.g. --topology=v5e:16x16"),
    (["--step=x"], "--step=x: value should be one of <train|evaluate|predict>"),
    (["--save=x.hlo"], "--save needs --topology"),
    (["--topology=v5e:2x2", "--save=/nowhere/x.hlo"], "/nowhere"),
    (["--workdir=x"], "Unknown command line flag 'workdir'"),
    (["--config="], "there is no file ''"),
    (["--config=/nowhere.py"], "/nowhere.py"),
]


@pytest.mark.parametrize(
    ("given", "words"), [(given, words) for given, *words in ROWS], ids=str
)
def test_refused(recipe, tmp_path, given, words):
    length = (
        []
        if any(argument.startswith("--length") for argument in given)
        else ["--length=16"]
    )
    with unharmed(recipe.parent, tmp_path, new=("__pycache__",)):
        refused(
            script("describe", f"--config={recipe}", *length, *given, cwd=tmp_path),
            *words,
        )
