"""Scripts from the point of view of a user: results on stdout, messages on stderr,
errors without tracebacks.
"""

import json
import platform
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers import ROOT
from helpers.corpus import write_corpus
from helpers.forked import begun, script
from helpers.processes import in_a_new_process
from transformer_jax import command_line


def train(recipe: Path, workdir: Path, *arguments: str) -> subprocess.CompletedProcess:
    return script("train", f"--config={recipe}", f"--workdir={workdir}", *arguments)


def fails(result: subprocess.CompletedProcess, *words: str) -> None:
    """Assert a failure: exit code 2, nothing on stdout, an error message and no
    traceback on stderr.
    """
    stderr = result.stderr.decode()
    assert result.returncode == 2, stderr
    assert result.stdout == b""
    assert "Traceback" not in stderr
    assert "error: " in stderr
    for word in words:
        assert word in stderr


def test_training_shows_how_far_it_is(trained):
    said = (trained.parent / "stderr").read_text()
    assert "step 4/4  loss" in said
    assert "ETA" in said


def test_evaluate_prints_one_json_line(trained):
    result = script(
        "evaluate",
        f"--workdir={trained}",
        "--split=val",
        "--config.decoding.beam_size=2",
    )
    assert result.returncode == 0, result.stderr.decode()
    (line,) = result.stdout.decode().splitlines()
    values = json.loads(line)
    assert values["step"] == 4
    assert values["split"] == "val"
    assert len(values["parameters_sha256"]) == 64
    assert {
        "loss",
        "perplexity",
        "bleu",
        "bleu_signature",
        "bleu_tokenized",
        "exact_match",
        "examples",
    } <= set(values)


def test_predict_keeps_order_empty_and_over_long_lines(trained, tmp_path):
    lines = ["ek at", "", "ek " * 60, "ut"] * 5
    result = script(
        "predict", f"--workdir={trained}", stdin="\n".join(lines).encode() + b"\n"
    )
    assert result.returncode == 0, result.stderr.decode()
    predicted = result.stdout.decode().split("\n")[:-1]
    assert len(predicted) == 20
    assert predicted[1] == ""
    assert predicted[:4] * 5 == predicted
    assert b"5 lines are empty: lines 2, 6, 10, 14, 18" in result.stderr
    assert b"input, line 3: " in result.stderr

    (tmp_path / "in").write_text("\n".join(lines))
    files = (f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}")
    assert script("predict", f"--workdir={trained}", *files).stdout == b""
    assert (tmp_path / "out").read_text().split("\n")[:-1] == predicted
    scored = script("predict", f"--workdir={trained}", "--score", *files[:1])
    assert [
        json.loads(line)["text"] for line in scored.stdout.decode().splitlines()
    ] == predicted
    several = script(
        "predict", f"--workdir={trained}", *files[:1], "--config.decoding.n_best=2"
    )
    best = [
        json.loads(line)["hypotheses"] for line in several.stdout.decode().splitlines()
    ]
    assert [row[0]["text"] for row in best] == predicted
    assert len(best[0]) == 2
    assert set(best[0][0]) == {"text", "score", "log_probability"}
    fails(
        script(
            "predict", f"--workdir={trained}", *files[:1], "--config.decoding.top_k=5"
        ),
        "decoding.temperature",
    )


def test_predictions_that_nobody_reads_end_without_a_traceback(trained):
    command = [
        sys.executable,
        str(ROOT / "scripts" / "predict.py"),
        f"--workdir={trained}",
    ]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, stderr = process.communicate(b"ek at\n", timeout=300)
    assert process.returncode == 2, stderr
    assert b"error: stdout cannot be written: Broken pipe" in stderr
    assert b"Traceback" not in stderr


# predict.py with a model that predicts characters that end a line for some readers.
SEVERAL_LINES = """
import runpy, sys
from types import SimpleNamespace
from transformer_jax.predictor import Predictor
from transformer_jax.training.task import Columns

def start(predictor, workdir, config):
    predictor.config = SimpleNamespace(columns=Columns(("text",), 1))

Predictor.__init__ = start
Predictor.streamed = False
Predictor.predict = lambda self, records, scored: ["a\\rb\\u2028c"] * len(records)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_prediction_is_one_line_of_the_output(trained, tmp_path):
    (tmp_path / "program.py").write_text(SEVERAL_LINES)
    predict = str(ROOT / "scripts" / "predict.py")
    with begun(
        tmp_path / "program.py", predict, f"--workdir={trained}", stdin=b"ek\nat\n"
    ) as running:
        done = running.end()
    assert done.stdout == b"a b c\n" * 2, done.stderr.decode()


def test_two_processes_predict_and_score_as_one(trained):
    """The output of Gloo must not be among the results."""
    lines = b"ek at\n\nut\n"

    def by_two(name: str, *arguments: str) -> bytes:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            together = [
                f"--coordinator_address=127.0.0.1:{free.getsockname()[1]}",
                "--num_processes=2",
            ]
        command = [
            sys.executable,
            str(ROOT / "scripts" / f"{name}.py"),
            f"--workdir={trained}",
            *arguments,
            *together,
        ]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        running = [
            subprocess.Popen([*command, f"--process_id={i}"], cwd=ROOT, **pipes)
            for i in range(2)
        ]
        with ThreadPoolExecutor() as pool:
            (first, said), (second, _) = pool.map(
                lambda process: process.communicate(lines, timeout=300), running
            )
        assert [process.returncode for process in running] == [0, 0], said
        assert second == b""
        return first

    assert (
        by_two("predict")
        == script("predict", f"--workdir={trained}", stdin=lines).stdout
    )
    assert json.loads(by_two("evaluate", "--split=val"))["examples"] == 11


def test_pictures(trained, tmp_path):
    pytest.importorskip(
        "matplotlib",
        reason="no matplotlib: pip install -c constraints.txt -e '.[plots]'",
    )
    report = (
        "attention_report",
        f"--workdir={trained}",
        f"--output={tmp_path / 'report.html'}",
    )
    result = script(*report, "--sentences=2", stdin=b"ek at\tdk\n\nut\nek\n")
    assert result.returncode == 0, result.stderr.decode()
    assert b"drawing the first 2 of 3 lines" in result.stderr
    page = (tmp_path / "report.html").read_text()
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page)[1])
    assert [sentence["name"] for sentence in data["sentences"]] == ["ek at", "ut"]
    cross = data["sentences"][0]["maps"][0]
    assert "".join(cross["rows"]) == "dk</s>"
    assert "".join(cross["columns"]) == "ek▁at</s>"
    assert cross["texts"] == [["ek at", "source"], ["dk", "target"]]
    fails(script(*report, stdin=b"\n \n"), "--input=-: all lines are empty")
    nowhere = tmp_path / "none" / "report.html"
    fails(
        script(*report[:2], f"--output={nowhere}", stdin=b"ek\n"),
        f"there is no folder {nowhere.parent}",
    )
    fails(
        script(*report[:2], f"--output={tmp_path}", stdin=b"ek\n"),
        f"--output={tmp_path} is a folder",
    )

    compare = (
        "compare",
        f"--workdirs={trained}",
        f"--output={tmp_path / 'lengths.svg'}",
    )
    result = script(
        *compare,
        "--lengths=1,2",
        "--split=val",
        "--values=bleu_tokenized",
        "--config.decoding.beam_size=1",
    )
    assert result.returncode == 0, result.stderr.decode()
    parts = [line.split("\t") for line in result.stdout.decode().splitlines()]
    assert [part[1] for part in parts] == ["0-1", "2-2", "3-3"]
    assert sum(int(part[2]) for part in parts) == 11
    assert (tmp_path / "lengths.svg").exists()
    fails(
        script(*compare, "--lengths=2,x", "--values=bleu"),
        "lengths 2,x must be integers",
    )
    fails(
        script(*compare, "--split=val"),
        "require --lengths: add it, e.g. --lengths=10,20,30",
    )
    fails(
        script("compare", f"--workdirs={trained}", "--output=x.doc"),
        "x.doc must end in one of",
    )


def test_concatenate(tmp_path):
    write_corpus(tmp_path / "in", languages=("de", "en"))
    arguments = (
        f"--directory={tmp_path / 'in'}",
        f"--output={tmp_path / 'out'}",
        "--splits=train,val",
        "--longest=2",
    )
    result = script("concatenate", *arguments)
    assert result.returncode == 0, result.stderr.decode()
    assert b"train, 90 lines" in result.stderr
    assert b"val, 16 lines" in result.stderr


def test_benchmark_prints_one_json_line(recipe):
    result = script("benchmark", f"--config={recipe}", "--rounds=1")
    assert result.returncode == 0, result.stderr.decode()
    values = json.loads(result.stdout)
    assert {"compile_s", "step_ms", "tokens_per_s", "peak_gflops", "peak_bytes"} <= set(
        values
    )
    assert 0 < values["matmul_utilization"] < 1  # no peak is published for CPUs


def test_benchmark_needs_no_data_with_a_length(recipe):
    missing = "--config.data.directory=/nowhere"
    result = script(
        "benchmark", f"--config={recipe}", missing, "--length=5", "--rounds=2"
    )
    assert result.returncode == 0, result.stderr.decode()
    values = json.loads(result.stdout)
    assert values["shapes"] == 1
    assert values["tokens_per_s"] * values["step_ms"] / 1000 == pytest.approx(
        1024 // 5 * 5, rel=0.01
    )


def test_describe_applies_the_options_of_xla_in_the_environment(recipe, tmp_path):
    result = script(
        "describe",
        f"--config={recipe}",
        "--length=8",
        environment={"XLA_FLAGS": f"--xla_dump_to={tmp_path / 'dump'}"},
    )
    assert result.returncode == 0, result.stderr.decode()
    assert list((tmp_path / "dump").iterdir())


def test_wrong_commands(recipe, tmp_path):
    workdir = tmp_path / "run"
    fails(train(recipe, workdir, "--config.model.d_modle=8"), "d_modle", "d_model")
    fails(
        train(Path(f"{recipe}:norm=middle"), workdir),
        "'norm=middle' is unknown: choose from norm=post|pre",
    )
    fails(
        train(recipe, workdir, "--config.model.num_heads=0"),
        "config.model.num_heads = 0: must be at least 1",
    )
    fails(
        script("predict", f"--workdir={workdir}", "in.txt"),
        "'in.txt' is not an option",
        "--help",
    )
    fails(train(tmp_path / "none.py", workdir), "none.py")
    fails(script("train", f"--config={recipe}"), "--workdir")
    fails(
        train(recipe, workdir, "--profile=20"), "--profile=20: write it as FIRST-LAST"
    )
    fails(
        train(recipe, workdir, "--num_processes=2"),
        "--coordinator_address is missing: set all of --coordinator",
    )
    fails(
        script("evaluate", "--workdir=~/none"),
        f"--workdir={Path.home() / 'none'} is not the folder of a run",
    )
    described = script("describe", f"--config={recipe}", "--config.mesh.fsdp=2")
    fails(described, "set --mesh instead, e.g. --mesh=data=64,fsdp=8")
    assert not workdir.exists()


def test_wrong_data(recipe, tmp_path):
    def with_files(**contents: bytes) -> subprocess.CompletedProcess:
        write_corpus(tmp_path / "corpus")
        for name, content in contents.items():
            (tmp_path / "corpus" / name.replace("_", ".")).write_bytes(content)
        return train(
            recipe, tmp_path / "run", f"--config.data.directory={tmp_path / 'corpus'}"
        )

    missing = train(
        recipe,
        tmp_path / "run",
        f"--config.data.directory={tmp_path}",
        "--config.data.train_split=trial",
    )
    fails(missing, "neither trial.en nor trial.en.gz")
    fails(with_files(train_de=b"dk\n" * 59), "train.en:60")
    fails(with_files(train_de=b"", train_en=b""), "train.en", "have no lines")
    fails(
        with_files(train_de=b"dk\n" * 30 + b"d\xff\n" + b"dk\n" * 29),
        "train.de:31 is not UTF-8: byte 0xff at offset 1",
    )
    wmt14 = [
        f"--config={ROOT / 'configs' / 'wmt14.py'}:base",
        f"--config.data.directory={tmp_path}",
    ]
    start = time.monotonic()
    absent = script("train", *wmt14, f"--workdir={tmp_path / 'run'}")
    fails(
        absent,
        "wmt14_translate/de-en is not prepared in",
        "scripts/prepare.py --name=wmt14_translate/de-en",
    )
    # without a network, a download gives up after 204 s
    assert time.monotonic() - start < 100


def test_wrong_workdir(recipe, trained, tmp_path):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    fails(
        train(recipe, trained, "--config.model.d_ff=48", "--config.training.seed=5"),
        "holds another experiment",
        "config.model.d_ff: 24 in the workdir, 48 now",
        "config.training.seed: 0 in the workdir, 5 now",
    )
    elsewhere = "--config.data.directory=/nowhere", "--config.training.steps=8"
    fails(train(recipe, trained, *elsewhere), "There is no directory /nowhere")
    (tmp_path / "file").write_text("")
    fails(train(recipe, tmp_path / "file" / "run"), "file/run cannot be written")
    nowhere = tmp_path / "none" / "out"
    fails(
        script("predict", f"--workdir={trained}", f"--output={nowhere}"),
        f"there is no folder {nowhere.parent}",
    )
    fails(
        script("evaluate", f"--workdir={trained}", "--config.model.norm=pre"),
        "holds parameters of another model; do not change:",
        "config.model.norm: 'post' in the workdir, 'pre' now",
    )
    fails(
        script("predict", f"--workdir={trained}", stdin=b"ek\n\xff\n"),
        "stdin:2 is not UTF-8",
    )
    assert {
        path: path.read_bytes() for path in trained.rglob("*") if path.is_file()
    } == before


def test_an_output_that_may_not_be_written_is_refused_before_the_work(
    tmp_path, monkeypatch
):
    """Call the check in this process with `os.access` replaced: some tests are run
    by root, who may write anywhere.
    """
    command_line.check_output(str(tmp_path / "out"))
    monkeypatch.setattr(command_line.os, "access", lambda path, mode: False)
    with pytest.raises(
        ValueError,
        match=r"--output=.*out: no permission to write there; name a file elsewhere",
    ):
        command_line.check_output(str(tmp_path / "out"))


def test_truncated_checkpoint(recipe, tmp_path):
    workdir = tmp_path / "run"
    assert train(recipe, workdir).returncode == 0
    biggest = max(
        (workdir / "checkpoints" / "4").rglob("*"), key=lambda path: path.stat().st_size
    )
    biggest.write_bytes(biggest.read_bytes()[:-7])
    result = script("evaluate", f"--workdir={workdir}", "--split=val")
    assert json.loads(result.stdout)["step"] == 2
    assert b"skipping checkpoint" in result.stderr
    assert biggest.name.encode() in result.stderr


def test_compiled_programs_are_kept_in_the_users_cache(tmp_path, monkeypatch):
    """A second process compiles nothing. A truncated entry is compiled again."""
    program = (
        "import warnings\n"
        "warnings.simplefilter('error')\n"
        "import jax, jax.numpy as jnp\n"
        "from transformer_jax.command_line import cache_compilations\n"
        "cache_compilations()\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "print(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.eye(3)).sum())\n"
    )
    kept_in = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": ""}

    def printed(program):
        (tmp_path / "program.py").write_text(program)
        done = script(str(tmp_path / "program"), environment=kept_in)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    def entries():
        return {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*-cache")}

    first = printed(program)
    kept = entries()
    assert kept
    assert all(
        p.parent.name.startswith("xla-") and p.parents[1].name == "transformer_jax"
        for p in kept
    )
    assert printed(program) == first
    assert entries() == kept
    # JAX would store no other program as long as this is there
    torn = next(iter(kept)).with_name("torn-cache")
    torn.write_bytes(b"half")
    printed(program.replace("sin", "cos"))
    assert not torn.exists()
    assert len(entries()) > len(kept)
    for path in kept:
        path.write_bytes(path.read_bytes()[:20])
    assert printed(program.replace("'error'", "'ignore'")) == first
    # JAX reads this variable when it is imported
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    in_a_new_process(program)
    assert (tmp_path / "own").exists()


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="this behaviour is specific to glibc"
)
def test_freed_memory_stays_with_the_process():
    program = """
from pathlib import Path
import numpy as np
from transformer_jax.command_line import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def after_an_array():
    before = resident()
    np.ones(2**26, np.uint8)
    return resident() - before

given_back = after_an_array()
keep_freed_memory()
print(given_back, after_an_array())
"""
    given_back, kept = map(int, in_a_new_process(program).split())
    assert given_back < 2**25
    assert kept > 2**25


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="this behaviour is specific to glibc"
)
def test_a_program_finds_the_memory_of_its_last_run():
    program = """
import resource
import jax, jax.numpy as jnp
from transformer_jax.command_line import keep_freed_memory

keep_freed_memory()
x = jnp.ones((512, 512))
# 128 MiB, more than the heap of a thread may hold
tiles = jax.jit(lambda x: jnp.tile(x @ x, (128, 1)))
# a small object may take the start of a freed array's place; the next array then needs
# new pages
for _ in range(11):
    tiles(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(11):
    tiles(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    # One array has 2**15 pages of 4 KiB, so at most two of the eleven arrays need new
    # pages.
    assert int(in_a_new_process(program)) < 3 * 2**15


def test_prepare_makes_a_corpus_of_fetched_files_ready_and_says_so(tmp_path):
    write_corpus(tmp_path / "fetched", languages=("en", "de"))
    arguments = "--name=multi30k/en-de", f"--directory={tmp_path}/data"
    result = script("prepare", *arguments, f"--manual_dir={tmp_path}/fetched")
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout == b""
    folder = f"{tmp_path}/data/multi30k/en-de/1.0.0"
    assert (
        f"multi30k/en-de in {folder}: train 60, val 11, test_2016_flickr 7"
        in result.stderr.decode()
    )
    fails(script("prepare", *arguments, "--manual_dir=absent"), "no directory absent")
