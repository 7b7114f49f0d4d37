"""Workdir and data on gs://: the real clients against the storage server of
bucket.py.
"""

import json
import subprocess
import sys

import pytest

from helpers import ROOT
from helpers.bucket import served
from helpers.corpus import write_corpus
from helpers.runs import RECIPE


@pytest.fixture
def run(tmp_path):
    """Yield a function that runs a script with a corpus in gs://bucket.

    `run.store` is the content of the storage.
    """
    pytest.importorskip("gcsfs", reason="no gcsfs: pip install 'transformer_jax[gcs]'")
    write_corpus(tmp_path / "corpus")
    recipe = tmp_path / "tiny.py"
    recipe.write_text(RECIPE.replace("DIRECTORY", "gs://bucket/corpus"))
    with served() as (store, environment):
        for path in (tmp_path / "corpus").iterdir():
            store.put(f"bucket/corpus/{path.name}", path.read_bytes())
        environment |= {"PAUSE": "0"}

        def script(
            name: str, *arguments: str, stdin: bytes = b""
        ) -> subprocess.CompletedProcess:
            command = [
                sys.executable,
                f"scripts/{name}.py",
                "--workdir=gs://bucket/run",
                *arguments,
            ]
            if name == "launch/supervise":
                command.insert(2, "2")
            return subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                input=stdin,
                capture_output=True,
                timeout=300,
            )

        script.config, script.store = f"--config={recipe}", store
        yield script


def names(run, folder: str) -> list[str]:
    prefix = f"bucket/run/{folder}"
    return sorted(
        {
            key.removeprefix(prefix).split("/")[0]
            for key in run.store.objects
            if key.startswith(prefix)
        }
    )


def ends(done: subprocess.CompletedProcess, code: int = 0) -> str:
    assert done.returncode == code, done.stderr.decode()
    return done.stderr.decode()


@pytest.mark.slow
def test_a_run_lives_in_a_bucket(run):
    """Train, skip a damaged checkpoint, resume, evaluate and predict, as on a disk."""
    assert "step 4/4  loss" in ends(run("train", run.config))
    assert names(run, "checkpoints/") == ["2", "4"]
    assert {"config.json", "metrics.jsonl", "tokenizer.json"} <= set(names(run, ""))
    assert any(name.startswith("events.out.tfevents") for name in names(run, ""))
    saved = {
        key for key in run.store.objects if key.startswith("bucket/run/checkpoints/4/")
    }
    manifest = json.loads(
        run.store.objects["bucket/run/checkpoints/4/manifest.json"][0]
    )
    assert {
        f"bucket/run/checkpoints/4/{name}"
        for name in (*manifest["files"], "manifest.json")
    } == saved

    (damaged,) = [key for key in saved if key.endswith("meta.json")]
    run.store.put(damaged, run.store.objects[damaged][0][:-1])
    said = ends(run("train", run.config))
    assert "skipping checkpoint gs://bucket/run/checkpoints/4" in said
    assert "resumed from step 2" in said
    rows = [
        json.loads(line)
        for line in run.store.objects["bucket/run/metrics.jsonl"][0].splitlines()
    ]
    assert [row["step"] for row in rows] == [2, 2, 4, 4]
    scored = run("evaluate", "--split=val")
    assert json.loads(scored.stdout)["step"] == 4, scored.stderr.decode()

    run.store.put("bucket/out/lines.txt", b"old")
    ends(run("predict", "--output=gs://bucket/out/lines.txt", stdin=b"ek\nut\n"))
    assert len(run.store.objects["bucket/out/lines.txt"][0].splitlines()) == 2
    assert [key for key in run.store.objects if key.startswith("bucket/out/")] == [
        "bucket/out/lines.txt"
    ]
    said = ends(
        run("predict", "--output=gs://bucket/run/config.json", stdin=b"ek\n"), 2
    )
    assert "is a file of the run" in said


@pytest.mark.slow
def test_two_processes_under_a_supervisor(run):
    said = ends(run("launch/supervise", run.config))
    assert "on 2 devices: data 2" in said
    assert names(run, "checkpoints/") == ["2", "4"]
    assert "resumed from step 4" in ends(
        run("launch/supervise", run.config, "--config.training.steps=6")
    )
    assert names(run, "checkpoints/") == ["2", "4", "6"]
    assert len(run("predict", stdin=b"ek\nek ak\n").stdout.splitlines()) == 2


def test_what_is_not_there(run):
    assert "gs://bucket/run is not the folder of a run" in ends(run("evaluate"), 2)


@pytest.mark.slow
def test_data_that_is_not_there(run):
    assert "gs://bucket/none" in ends(
        run("train", run.config, "--config.data.directory=gs://bucket/none"), 2
    )
