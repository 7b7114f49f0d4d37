"""Every recipe, shrunk, trains, is evaluated and predicts: a new file in configs/ is tested by existing."""

import importlib.util
import json
from pathlib import Path

import pytest
from conftest import ROOT, shrink, write_corpus

import transformer_jax
from transformer_jax.config import ConfigError, claim_workdir, parse
from transformer_jax.training.loop import train

ARGUMENTS = {
    "dates": [""],
    "multi30k": [
        "en-de",
        "de-en,size=small,relative",
        "en-fr,norm=pre,base",
        "en-de,quick,positions=rotary",
        "annotated",
    ],
    "wmt14": ["base", "big,norm=pre"],
}
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def get_config(name: str, arg: str):
    path = ROOT / "configs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"configs_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arg)


@pytest.mark.parametrize(("name", "arg"), [(name, arg) for name in RECIPES for arg in ARGUMENTS.get(name, [""])])
def test_recipe_runs(name, arg, tmp_path: Path):
    config = get_config(name, arg)
    languages = (config.data.source_language, config.data.target_language)
    write_corpus(tmp_path / "corpus", languages=languages)
    shrink(config, tmp_path / "corpus", steps=2)
    workdir = tmp_path / "run"
    claim_workdir(workdir, config)
    parsed = parse(config)
    train(parsed.make_task(workdir), parsed.engine, workdir)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert {row["split"] for row in rows} == {"train", config.data.validation_split}
    predictor = transformer_jax.load(str(workdir))
    scores = predictor.evaluate()
    assert scores["examples"] == 7
    assert scores["step"] == 2
    assert len(predictor.predict(["ek", ""])) == 2


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_refuses_unknown_arguments(name):
    with pytest.raises(ConfigError, match="config argument 'nonsense' is unknown"):
        get_config(name, "nonsense")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_says_what_it_is(name):
    doc = (ROOT / "configs" / f"{name}.py").read_text()
    for word in (
        "Paper:",
        "Command:",
        "Cost:" if name != "multi30k" else "cost",
        "Expected:" if name == "dates" else "",
    ):
        assert word in doc
