"""Launchers: the processes that they start, restart and leave behind."""

import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from helpers import ROOT
from helpers.forked import script

LAUNCH = ROOT / "scripts" / "launch"

# Stand-in for train.py. A plan lists exit codes for each attempt; "sleep" stands for a
# process that does not end.
STUB = """
import json, os, pathlib, signal, sys, time
what = None
signal.signal(
    signal.SIGTERM,
    lambda *_: os.abort() if what == "abort when told" else sys.exit(75),
)
given = dict(a.lstrip("-").split("=", 1) for a in sys.argv[1:])
folder, me = pathlib.Path(given["workdir"]), int(given["process_id"])
plan = json.loads((folder / "plan.json").read_text())
attempt = len(list(folder.glob(f"started-{me}-*")))
(folder / f"started-{me}-{attempt}").write_text(json.dumps(given))
while len(list(folder.glob(f"started-*-{attempt}"))) < int(given["num_processes"]):
    time.sleep(0.01)
what = plan[attempt][me]
if isinstance(what, str) and what.startswith("save"):
    (folder / "checkpoints" / what[4:]).mkdir(parents=True)
    (folder / "checkpoints" / what[4:] / "manifest.json").write_text("")
    what = 1
if what in ("sleep", "abort when told"):
    time.sleep(600)
if isinstance(what, int) and what < 0:
    os.kill(os.getpid(), -what)
sys.exit(what)
"""


@pytest.fixture
def supervise(tmp_path):
    """Yield a function that starts the supervisor with a plan, for a job in
    `tmp_path`.
    """
    (tmp_path / "launch").mkdir()
    copy = tmp_path / "launch" / "supervise.py"
    copy.write_text((LAUNCH / "supervise.py").read_text())
    (tmp_path / "train.py").write_text(STUB)

    begun = []

    def start(plan: list, tries: int = 3) -> subprocess.Popen:
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        environment = {**os.environ, "TRIES": str(tries), "PAUSE": "0.01"}
        command = [
            sys.executable,
            str(copy),
            str(len(plan[0])),
            f"--workdir={tmp_path}",
        ]
        begun.append(
            subprocess.Popen(
                command, env=environment, stderr=subprocess.PIPE, text=True
            )
        )
        return begun[-1]

    yield start
    for process in begun:
        with process:
            process.terminate()
    subprocess.run(["pkill", "-9", "-f", f"workdir={tmp_path}"], check=False)


def ends(process: subprocess.Popen, code: int) -> str:
    """Wait for the process to end with exit code `code`, and return its stderr."""
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    return stderr


def heard(number: int) -> int:
    """Return a signal that the supervisor acts on: `number`, unless nohup or a
    background job ignores it.
    """
    return signal.SIGTERM if signal.getsignal(number) == signal.SIG_IGN else number


def started(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("started-*"))


def alive(folder: Path) -> bool:
    """Return True if any process of the job is running."""
    pattern = f"process_id=[0-9]+ --workdir={folder}"
    return (
        subprocess.run(
            ["pgrep", "-f", pattern], capture_output=True, check=False
        ).returncode
        == 0
    )


def until(what) -> None:
    stop = time.monotonic() + 60
    while not what():
        assert time.monotonic() < stop, "the condition did not become true within 60 s"
        time.sleep(0.01)


def test_all_start_again_when_one_dies_and_none_is_left(supervise, tmp_path):
    said = ends(supervise([[1, "sleep"], ["sleep", 3], [0, 0]]), 0)
    assert "exit code 3: restarting all processes in 0.02 s (2 of 3)" in said
    assert started(tmp_path) == [
        f"started-{i}-{attempt}" for i in range(2) for attempt in range(3)
    ]
    given = [json.loads((tmp_path / f"started-{i}-2").read_text()) for i in range(2)]
    assert [one["process_id"] for one in given] == ["0", "1"]
    assert {one["num_processes"] for one in given} == {"2"}
    assert given[0]["coordinator_address"] == given[1]["coordinator_address"]
    assert not alive(tmp_path)


def test_an_error_of_the_users_is_not_tried_again(supervise, tmp_path):
    ends(supervise([["sleep", 2], [0, 0]]), 2)
    assert len(started(tmp_path)) == 2
    assert not alive(tmp_path)


def test_it_gives_up_when_nothing_is_saved_any_more(supervise, tmp_path):
    for name in ("15-good", "notes"):  # folders of the user, not steps
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").write_text("")
    said = ends(supervise([["save10"], [1], ["save20"], [1], [5], [0]], tries=2), 5)
    assert "giving up after 2 restarts without a newer checkpoint" in said
    assert len(started(tmp_path)) == 5


def test_it_passes_a_stop_on(supervise, tmp_path):
    """On SIGTERM, the processes save and stop.

    The supervisor's exit code 75 asks for another run.
    """
    process = supervise([["sleep", "sleep"]])
    until(lambda: len(started(tmp_path)) == 2)
    process.send_signal(signal.SIGTERM)
    ends(process, 75)
    assert not alive(tmp_path)


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="only Linux can signal a process when its parent dies",
)
def test_its_processes_stop_when_it_is_killed(supervise, tmp_path):
    process = supervise([["sleep", "sleep"]])
    until(lambda: len(started(tmp_path)) == 2)
    process.kill()
    process.wait()
    until(lambda: not alive(tmp_path))
    assert not alive(tmp_path)


# How a process dies: what the stand-in for train.py does, and whether a launcher starts
# the job again. Another process then ends with exit code 1, or is aborted by JAX.
DEATHS = {
    "kill -9, or out of memory": (-9, True),
    "SIGTERM or Ctrl-C to this process alone": (75, True),
    "segmentation fault": (-11, True),
    "abort": (-6, True),
    "exception": (1, True),
    "error of the user's": (2, False),
}


@pytest.mark.parametrize("survivor", [1, pytest.param(-6, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("code", "restarts"), DEATHS.values(), ids=DEATHS)
def test_local_restarts_unless_the_user_must_act(
    supervise, tmp_path, code, restarts, survivor
):
    for plan in ([[code, survivor], [0, 0]], [[survivor, code], [0, 0]]):
        said = ends(supervise(plan), 0 if restarts else 2)
        assert ("restarting all processes" in said) == restarts
        for path in tmp_path.glob("started-*"):
            path.unlink()


def test_a_stop_before_training_counts_though_a_process_aborts(supervise, tmp_path):
    """The first process ends at once, which aborts the others."""
    process = supervise([["abort when told", "sleep"]])
    until(lambda: len(started(tmp_path)) == 2)
    process.send_signal(heard(signal.SIGHUP))
    ends(process, 75)
    assert not alive(tmp_path)


@pytest.mark.parametrize(
    "setting", [{"TRIES": "abc"}, {"TRIES": "-1"}, {"PAUSE": "x"}, {"PAUSE": "nan"}]
)
@pytest.mark.parametrize(
    "launcher", ["local.sh 1", "slurm.sbatch", "tpu_pod.sh pod zone"]
)
def test_settings_that_are_no_numbers(launcher, setting):
    if launcher == "slurm.sbatch" and "PAUSE" in setting:
        pytest.skip("SLURM makes the pauses")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7", **setting}
    command = f"bash {LAUNCH}/{launcher} --config=x --workdir=/nonexistent/x"
    done = subprocess.run(
        command.split(), capture_output=True, text=True, env=environment, check=False
    )
    ((name, value),) = setting.items()
    assert (
        done.returncode,
        done.stderr.startswith(f"error: {name}={value}: must be a number"),
    ) == (2, True)


def test_slurm_outside_a_job():
    script = ["bash", str(LAUNCH / "slurm.sbatch"), "--config=x"]
    environment = {
        name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"
    }
    done = subprocess.run(
        script, capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "error: not in a SLURM job: submit this script with sbatch\n",
    )


def test_a_stop_reaches_processes_that_just_start(supervise, tmp_path):
    process = supervise([["sleep", "sleep"], ["sleep", "sleep"], ["sleep", "sleep"]])
    until(lambda: alive(tmp_path))
    process.send_signal(heard(signal.SIGINT))
    ends(process, 75)
    assert not alive(tmp_path)


@pytest.mark.parametrize(
    "arguments", [[], ["0", "--workdir=x"], ["two", "--workdir=x"], ["2", "--config=x"]]
)
def test_it_says_how_it_is_used(arguments):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = ["bash", str(LAUNCH / "local.sh"), *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 2
    assert "N --config=FILE --workdir=DIR" in result.stderr


# Start two processes like SLURM. They also stand in for gcloud's two hosts, which JAX
# finds in the same way here.
TWO_TASKS = """#!/usr/bin/env bash
pids=()
for i in 0 1; do
    SLURM_JOB_ID=NUMBER SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 \\
        SLURM_PROCID=$i SLURM_LOCALID=$i COMMAND &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid"
    one=$?
    code=$((one > code ? one : code)) # srun's is the highest
done
exit $code
"""
GCLOUD = TWO_TASKS.replace("COMMAND", 'bash -c "${*#*--command=}"').replace(
    "pids=()",
    'echo "$@" >>GCLOUD\n[[ $* = *pkill* ]] && exit 0\nset -- "${@: -1}"\npids=()',
)


@pytest.fixture
def stubs(tmp_path, recipe):
    """Put stand-ins for the commands that launchers call first in PATH.

    Return a function that runs a command there. Its attributes are the flags and the
    workdir to use.
    """
    # JAX derives the port from the job number
    folder, number = tmp_path / "bin", random.randrange(4096)
    folder.mkdir()
    programs = {
        "srun": TWO_TASKS.replace("COMMAND", '"${@:3}"').replace("NUMBER", str(number)),
        "scontrol": f'#!/usr/bin/env bash\necho "$@" >>{tmp_path}/scontrol\n',
        "gcloud": (
            GCLOUD.replace(">>GCLOUD", f">>{tmp_path}/gcloud").replace(
                "NUMBER", str(number)
            )
        ),
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = {"PATH": path, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PAUSE": "0"}
    workdir = tmp_path / "run"

    def launch(command: list[str], **more: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, **options, **more}
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
            timeout=300,
        )

    launch.flags = [f"--config={recipe}", f"--workdir={workdir}"]
    launch.workdir = workdir
    return launch


def trained_by_two(result: subprocess.CompletedProcess, workdir: Path) -> None:
    assert result.returncode == 0, result.stderr
    assert "on 2 devices: data 2" in result.stderr
    assert result.stderr.count("step 4/4  loss") == 1  # only one process logs
    rows = [
        json.loads(line)
        for line in (workdir / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [2, 2, 4, 4]
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == [
        "2",
        "4",
    ]


def test_local_processes_train_and_score_together(stubs):
    result = stubs(["bash", str(LAUNCH / "local.sh"), "2", *stubs.flags])
    trained_by_two(result, stubs.workdir)
    assert "restarting all processes" not in result.stderr


@pytest.mark.slow
def test_slurm(stubs, tmp_path):
    script = ["bash", str(LAUNCH / "slurm.sbatch")]
    trained_by_two(stubs([*script, *stubs.flags], SLURM_JOB_ID="7"), stubs.workdir)
    # refused: another experiment
    other = [*script, *stubs.flags, "--config.model.d_ff=48"]
    assert stubs(other, SLURM_JOB_ID="7").returncode == 2
    assert not (tmp_path / "scontrol").exists()
    (tmp_path / "bin" / "srun").write_text("#!/usr/bin/env bash\nexit 75\n")
    assert stubs(script, SLURM_JOB_ID="7").returncode == 0
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"
    assert (
        stubs(script, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="3", TRIES="3").returncode
        == 75
    )


@pytest.mark.parametrize(("code", "restarts"), DEATHS.values(), ids=DEATHS)
def test_slurm_requeues_unless_the_user_must_act(stubs, tmp_path, code, restarts):
    (tmp_path / "bin" / "srun").write_text(
        f"#!/usr/bin/env bash\nexit {code if code >= 0 else 128 - code}\n"
    )
    stubs(["bash", str(LAUNCH / "slurm.sbatch"), "--config=x"], SLURM_JOB_ID="7")
    assert (tmp_path / "scontrol").exists() == restarts


@pytest.mark.parametrize(("code", "restarts"), DEATHS.values(), ids=DEATHS)
def test_tpu_pod_restarts_unless_the_user_must_act(stubs, tmp_path, code, restarts):
    code = code if code >= 0 else 128 - code
    once = (
        f"[[ $* = *pkill* || -e {tmp_path}/again "
        f"]] && exit 0\ntouch {tmp_path}/again\nexit {code}\n"
    )
    (tmp_path / "bin" / "gcloud").write_text(f"#!/usr/bin/env bash\n{once}")
    done = stubs(["bash", str(LAUNCH / "tpu_pod.sh"), "pod", "zone", "--config=x"])
    assert done.returncode == (0 if restarts else code)
    assert ("restarting all hosts" in done.stderr) == restarts


@pytest.mark.parametrize(("code", "restarts"), DEATHS.values(), ids=DEATHS)
def test_kubernetes_restarts_unless_the_user_must_act(code, restarts):
    """Apply the rules of the file like Kubernetes, which was not run."""
    spec = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"], job["backoffLimit"]) == (
        "FailJob",
        "In",
        0,
    )
    code = code if code >= 0 else 128 - code
    reason = (
        "PodFailurePolicy"
        if code in rule["onExitCodes"]["values"]
        else "BackoffLimitExceeded"
    )
    (last,) = spec["failurePolicy"]["rules"]
    fails = last["action"] == "FailJobSet" and reason in last["onJobFailureReasons"]
    assert fails != restarts
    assert spec["failurePolicy"]["maxRestarts"] > 0


@pytest.mark.slow
def test_tpu_pod(stubs, tmp_path):
    script = ["bash", str(LAUNCH / "tpu_pod.sh"), "pod", "zone"]
    trained_by_two(stubs([*script, *stubs.flags], REPOSITORY=str(ROOT)), stubs.workdir)
    (called,) = (tmp_path / "gcloud").read_text().splitlines()
    assert called.startswith(
        "compute tpus tpu-vm ssh pod --zone=zone --worker=all --command=cd "
    )
    (tmp_path / "bin" / "gcloud").write_text(
        f"#!/usr/bin/env bash\necho $* >>{tmp_path}/again\nexit 9\n"
    )
    assert "LIBTPU_INIT_ARGS" not in called
    given_up = stubs(
        [*script, *stubs.flags], TRIES="2", LIBTPU_INIT_ARGS="--one=1 --two=2"
    )
    assert given_up.returncode == 9, given_up.stderr
    assert "giving up after 2 restarts" in given_up.stderr
    commands = [
        line.partition("--command=")[2]
        for line in (tmp_path / "again").read_text().splitlines()
    ]
    assert ["pkill" in command for command in commands] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert (
        r" && LIBTPU_INIT_ARGS=--one=1\ --two=2 python scripts/train.py" in commands[0]
    )


@pytest.mark.slow
def test_kubernetes(stubs):
    """Run the pods' command in two processes on this machine."""
    manifest = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    *shell, command = container["command"]
    assert f"--num_processes={job['completions']} " in command
    assert job["completions"] == job["parallelism"]
    own = command[: command.index("--config=")].replace(
        "--num_processes=4", "--num_processes=2"
    )
    own = own.replace(":8476", "") + " ".join(stubs.flags)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    run = (
        f"JOB_COMPLETION_INDEX=1 {shell[0]} -c "
        f"'{own}' & JOB_COMPLETION_INDEX=0 {shell[0]} -c '{own}' && wait $!"
    )
    trained_by_two(stubs(["bash", "-c", run], COORDINATOR=address), stubs.workdir)


def test_a_sweep_is_an_array_of_jobs(recipe, tmp_path):
    """Without sbatch, the command is printed. The runs of the array are those of the
    grid, in order.
    """
    own = [
        f"--config={recipe}",
        f"--workdir={tmp_path / 'runs'}",
        "--grid=training.seed=0,1;optimizer.learning_rate=1e-3,1e-4",
        "--config.training.steps=2",
    ]
    asked = [*own, "--launch", "--slurm", "--gpus=1"]
    bare = {"PATH": "/usr/bin:/bin"}
    printed = script("sweep", *asked, environment=bare)
    expected = [
        "sbatch",
        "--array=0,1,2,3",
        "--ntasks=1",
        "--export=ALL,SCRIPT=scripts/sweep.py",
        "--gpus=1",
        "scripts/launch/slurm.sbatch",
        *own,
        "--run=slurm",
    ]
    assert printed.returncode == 0, printed.stderr
    assert shlex.split(printed.stdout.decode()) == expected
    assert b"there is no sbatch on this machine" in printed.stderr

    stub = tmp_path / "bin" / "sbatch"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    path = {"PATH": f"{stub.parent}:/usr/bin:/bin"}
    submitted = script("sweep", *asked, environment=path)
    assert submitted.stdout.decode().splitlines() == expected[1:]

    refused = script(
        "sweep", *own, "--run=slurm", environment={"SLURM_ARRAY_TASK_ID": "4"}
    )
    assert refused.returncode == 2
    assert b"SLURM_ARRAY_TASK_ID=4 is not the number of a run" in refused.stderr


def test_slurm_starts_the_script_of_a_sweep(stubs, tmp_path):
    (tmp_path / "bin" / "srun").write_text(
        f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" > {tmp_path}/started\n'
    )
    sbatch = ["bash", str(LAUNCH / "slurm.sbatch"), "--run=slurm"]
    done = stubs(sbatch, SLURM_JOB_ID="7", SCRIPT="scripts/sweep.py")
    assert done.returncode == 0, done.stderr
    started = (tmp_path / "started").read_text().split()
    assert started[-3:] == ["python", "scripts/sweep.py", "--run=slurm"]
