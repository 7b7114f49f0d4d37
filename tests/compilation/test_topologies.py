"""Steps compiled for TPUs and GPUs that are not at hand: names of topologies, and
what fits.
"""

import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys

import pytest

from helpers import ROOT
from helpers.processes import in_a_new_process
from transformer_jax.compilation import target, topologies
from transformer_jax.compilation.chips import CHIPS
from transformer_jax.tasks import TASKS

RECIPE = """
from transformer_jax.config import defaults, shrink

def get_config(arg):
    config = defaults(*arg.split(","))
    shrink(config)
    return config
"""

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None

needs_libtpu = pytest.mark.skipif(
    not HAS_LIBTPU, reason=f"libtpu is not installed: {topologies.INSTALL}"
)

HAS_PLUGIN = importlib.util.find_spec("jax_cuda13_plugin") is not None

needs_plugin = pytest.mark.skipif(
    not HAS_PLUGIN,
    reason=f"JAX's plugin for GPUs is not installed: {topologies.INSTALL_GPU}",
)


@pytest.mark.parametrize(
    "name", ["v9:2x2", "v5e", "v5e:", "2x2", "", "h100:8", "h100:1x1x9", "h100:0x1x8"]
)
def test_unknown_topologies_are_refused_with_the_known_ones(name):
    with pytest.raises(
        ValueError,
        match=f"--topology={name}: there is no such topology; .*v5p: 2x2x1.*8x8x8",
    ) as error:
        topologies.devices_of(name)
    assert all(kind in str(error.value) for kind in CHIPS)


def test_a_mesh_has_all_devices_of_the_topology():
    topologies.check_mesh("v5e:2x2", "data=2,fsdp=2", [2, 2, 1], 4)
    with pytest.raises(
        ValueError,
        match=(
            r"--mesh=data=3: its axes multiply to 3, but v5e:2x2 has 4 devices:"
            r" .*data=4"
        ),
    ):
        topologies.check_mesh("v5e:2x2", "data=3", [3, 1, 1], 4)


def test_without_their_compiler_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=(
            r"--topology=v5e:2x2: compiling for TPUs needs libtpu: pip install"
            r" .*\[tpu\]"
        ),
    ):
        topologies.devices_of("v5e:2x2")
    with pytest.raises(
        ValueError,
        match=(
            r"--topology=h100:1x1x8: .* JAX's plugin .*: pip install .*\[gpu-compiler\]"
        ),
    ):
        topologies.devices_of("h100:1x1x8")


def described(
    arg: str,
    *arguments: str,
    topology: str = "v5e:2x2",
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "scripts/describe.py",
        f"--config={arg}",
        f"--topology={topology}",
        "--length=8",
    ]
    command += arguments
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )


# The tasks whose steps differ most: both stacks of the Transformer, and recurrence.
FAMILIES = ("sequence_to_sequence", "sequence_to_sequence,recurrent")
OTHER_MODELS = ("sequence_to_sequence,recurrent", "sequence_to_sequence,convs2s")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.py"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=[pytest.mark.slow] * (task not in FAMILIES))
        for task in (*TASKS, *OTHER_MODELS)
    ],
)
@pytest.mark.parametrize(
    ("topology", "step"),
    [
        pytest.param(
            topology,
            step,
            marks=[needs]
            + [pytest.mark.slow] * ((topology, step) != ("v5e:2x2", "train")),
        )
        for topology, needs in (("v5e:2x2", needs_libtpu), ("h100:2x1x2", needs_plugin))
        for step in target.STEPS
    ],
)
def test_every_family_compiles(tiny, tmp_path, topology, task, step):
    saved = tmp_path / "step.hlo"
    done = described(
        f"{tiny}:{task}",
        f"--step={step}",
        f"--save={saved}",
        "--json",
        topology=topology,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning" not in done.stderr
    found = json.loads(done.stdout)
    assert found["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1}
    assert 0 < found["held"] + found["temporary"] + found["code"] < found["memory"]
    assert saved.read_text().startswith("HloModule")
    assert found["bound_s"] > 0
    if topology.startswith("h100"):
        assert found["estimate_s"] is None
    else:
        assert found["estimate_s"] > found["bound_s"]
    # each gradient is reduced once, that of a table that is both looked up and tied,
    # too
    if step == "train":
        reduced = sum(
            c["bytes"] for c in found["collectives"] if c["kind"] == "all-reduce"
        )
        assert 0.9 < reduced / (4 * found["parameters"]) < 1.05


@needs_plugin
def test_a_step_for_two_gpus(tiny):
    """Each device holds the whole state, i.e. parameters and two moments, and half
    of the batch.
    """
    done = described(f"{tiny}:classification", "--json", topology="h100:1x1x2")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    batch = sum(4 * math.prod(shape) for shape in found["batch"].values())
    state = 3 * 4 * found["parameters"]
    assert state + batch / 2 <= found["held"] < state + batch / 2 + 1000
    assert found["estimate_s"] is None
    assert found["step_time"]["flops"] == pytest.approx(found["flops"] / 2, rel=1e-3)
    assert [(c["kind"], c["group"]) for c in found["collectives"]] == [
        ("all-reduce", 2)
    ]
    # not positions beyond the batch
    assert 0.95 < found["collectives"][0]["bytes"] / (4 * found["parameters"]) < 1.01


@needs_plugin
def test_a_step_that_exceeds_the_memory_of_a_gpu(tiny):
    """The compiler does not mind, so the bytes of the program are compared with the
    memory of the chip.
    """
    done = in_a_new_process(
        f"""
import dataclasses, sys
sys.path.insert(0, {str(tiny.parent)!r})
from tiny import get_config
from transformer_jax.config import make_task, parse
from transformer_jax.compilation import chips, target, topologies
from transformer_jax.training.engine import Engine

config = get_config("classification")
name = "h100:1x1x1"
chip = chips.CHIPS["h100"]
config.data.directory = "(none)"
engine = Engine(make_task(parse(config), None), topologies.devices_of(name))
batch = engine.task.dummy_batch(8192, 8)
used = target.compile_for(name, chip, engine, batch, "train", 1)[0].used
print(used)
for memory in (used, used // 2):
    smaller = dataclasses.replace(chip, memory=memory)
    try:
        target.compile_for(name, smaller, engine, batch, "train", 1)
        print("fits")
    except target.DoesNotFit as error:
        print(error)
""",
    )
    used, fits, message = done.splitlines()
    assert fits == "fits"
    half = f"{int(used) / 2 / 2**30:.2f} GiB"
    assert half > "0.05"
    assert message.startswith(
        f"--topology=h100:1x1x1: the step does not fit by {half}: "
        f"a device has {half}, and the"
    )
    assert "a larger training.microbatches" in message


@needs_libtpu
@pytest.mark.slow
def test_a_second_process_with_libtpu(tiny):
    """By default, it may load libtpu too.

    If it may not, the message names the file and the remedy.
    """
    hold = (
        "from transformer_jax.compilation.topologies import devices_of; "
        "devices_of('v5e:2x2'); print(); input()"
    )
    environment = os.environ | {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    streams = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    with subprocess.Popen(
        [sys.executable, "-c", hold], env=environment, text=True, **streams
    ) as first:
        assert first.stdout is not None
        first.stdout.readline()
        refused = described(
            f"{tiny}:classification",
            "--mesh=data=3",
            environment={"ALLOW_MULTIPLE_LIBTPU_LOAD": "0"},
        )
        loaded = described(f"{tiny}:classification", "--mesh=data=3")
        first.communicate("\n")
    assert refused.returncode == loaded.returncode == 2
    assert (
        "another process has loaded libtpu (it holds /tmp/libtpu_lockfile): "
        "wait until it" in refused.stderr
    )
    assert "v5e:2x2 has 4 devices" in loaded.stderr


@needs_libtpu
def test_children_of_a_process_with_libtpu_heed_sighup(monkeypatch):
    """By itself, libtpu makes a process ignore it; see tests/conftest.py."""
    for name, value in topologies.SETTINGS.items():
        monkeypatch.setenv(name, value)  # and removed at the end
    topologies.devices_of("v5e:2x2")
    program = "import signal; print(signal.getsignal(signal.SIGHUP).name)"
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # by nohup
    assert in_a_new_process(program) == f"SIG_{'IGN' if ignored else 'DFL'}\n"


@needs_libtpu
def test_axes_of_a_mesh_may_divide_the_sides_of_a_slice():
    """8 of 4 × 4 × 4 chips are one side and half of another."""
    rows = json.loads(output_of(MESH))
    assert len(rows) == 8
    assert sorted(chip for row in rows for chip in row) == [
        [x, y, z] for x in range(4) for y in range(4) for z in range(4)
    ]
    for row in rows:
        assert sorted(len({chip[side] for chip in row}) for side in range(3)) == [
            1,
            2,
            4,
        ]


MESH = """
import json
from transformer_jax.compilation import topologies
from transformer_jax.training.sharding import MeshConfig, make_mesh

grid = make_mesh(MeshConfig(data=8, fsdp=8), topologies.devices_of("v5p:4x4x4")).devices
print(json.dumps([[list(chip.coords) for chip in row] for row in grid[:, :, 0]]))
"""

ATTENTION = """
import json, sys
import jax
import jax.numpy as jnp
from transformer_jax.models import masks
from transformer_jax.models.kernels.accelerators import KERNEL_attention
from transformer_jax.compilation import topologies
from transformer_jax.compilation.hlo import parse
from transformer_jax.compilation.step_time import kernel_flops
from transformer_jax.training.sharding import (
    MeshConfig,
    batch_sharding,
    make_mesh,
    on_mesh,
)

mesh = make_mesh(MeshConfig(tensor=TENSOR), topologies.devices_of(TOPOLOGY))

def attend(query, key, value, valid):
    mask = masks.CAUSAL & masks.padding(valid)
    return KERNEL_attention(query, key, value, mask=mask, dtype="bfloat16"OPTIONS).sum()

def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(mesh))

heads = [array(4, LENGTH, n, 64) for n in (16, 4, 4)]
valid = array(4, LENGTH, dtype=jnp.bool)
step = on_mesh(jax.value_and_grad(attend, (0, 1, 2)), mesh)
program = step.lower(*heads, valid).compile()
flops = [
    flops for x, _, _ in parse(program.as_text()).walk() if (flops := kernel_flops(x))
]
print(json.dumps([program.memory_analysis().temp_size_in_bytes, flops]))
"""


def compiled(kernel, length, topology, tensor=1, options="", precision="default"):
    """Return the bytes of temporary memory and the FLOPs of the kernels of attention
    with its gradients.
    """
    program = (
        ATTENTION.replace("KERNEL", kernel)
        .replace("LENGTH", str(length))
        .replace("OPTIONS", options)
    )
    program = program.replace("TENSOR", str(tensor)).replace("TOPOLOGY", repr(topology))
    return json.loads(output_of(program, JAX_DEFAULT_MATMUL_PRECISION=precision))


def output_of(program, **environment):
    """Run a program of Python on CPUs, in which warnings are errors, and return what
    it prints.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "tensor", "devices"),
    [pytest.param("v5e:1x1", 1, 1, marks=pytest.mark.slow), ("v5e:2x2", 2, 4)],
)
def test_splash_attention_compiles_for_tpus(topology, tensor, devices):
    """The temporaries of 4 × 16 heads at length 2,048 are far from the 1 GiB of
    their weights in float32.
    """
    temporary, flops = compiled("splash", 2048, topology, tensor)
    assert temporary < 2**28
    # 10 of 4 × 4 blocks are not above the diagonal
    product = 2 * 4 * 16 * 2048**2 * 64 * 10 // 16 // devices
    assert sorted(flops) == [2 * product, 3 * product, 4 * product]


@needs_libtpu
@pytest.mark.parametrize(
    ("length", "topology", "rate"),
    [
        pytest.param(64, "v5e:1x1", 0, marks=pytest.mark.slow),
        (64, "v5e:1x1", 0.1),
        pytest.param(1024, "v5e:1x1", 0, marks=pytest.mark.slow),
        pytest.param(1024, "v5e:1x1", 0.1, marks=pytest.mark.slow),
        pytest.param(512, "v6e:1x1", 0, marks=pytest.mark.slow),
        pytest.param(512, "v6e:1x1", 0.1, marks=pytest.mark.slow),
    ],
)
def test_short_attention_compiles_for_tpus(length, topology, rate):
    """1,024 is the longest.

    At length 64, two sentences form a block, of which half the scores are not used.
    Chunks of 128 queries skip keys that are after them.
    """
    _, flops = compiled(
        "short",
        length,
        topology,
        options=f", dropout_rate={rate}, dropout_key=jax.random.key(0)",
    )
    product = (
        2
        * 16
        * 64
        * {64: 2 * 128**2, 512: 4 * 512**2 * 10 // 16, 1024: 4 * 1024**2 * 36 // 64}[
            length
        ]
    )
    assert sorted(flops) == [2 * product, 5 * product]


@needs_libtpu
def test_short_attention_in_bfloat16_compiles_where_products_of_float32_are_precise():
    _, flops = compiled("short", 64, "v5e:1x1", precision="highest")
    assert len(flops) == 2


LINEAR = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from transformer_jax.models.layers import Linear
from transformer_jax.compilation import topologies
from transformer_jax.training.sharding import MeshConfig, make_mesh, on_mesh

mesh = make_mesh(MeshConfig(data=1, tensor=4), topologies.devices_of("v5e:2x2"))

def array(shape, *axes):
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

linear = Linear(
    "BTF,FD->BTD",
    (512, 256),
    ("mlp", "embed"),
    dtype="bfloat16",
    output_dtype="bfloat16",
)
kernel = array((512, 256), "tensor", None)
params = {"params": {"kernel": kernel, "bias": array((256,))}}
x = array((8, 128, 512), None, None, "tensor")
print(on_mesh(linear.apply, mesh).lower(params, x).compile().as_text())
"""


@needs_libtpu
def test_devices_that_share_the_inputs_of_a_map_exchange_rounded_sums():
    reduced = re.findall(r"= (\w+)\[8,128,256\]\S* all-reduce", output_of(LINEAR))
    assert set(reduced) == {"bf16"}


RESIDUAL = """
import json
import flax.linen as nn
import jax
import jax.numpy as jnp
from transformer_jax.models.layers import FeedForward, Residual
from transformer_jax.compilation import topologies
from transformer_jax.compilation.hlo import parse
from transformer_jax.training.sharding import (
    MeshConfig,
    batch_sharding,
    make_mesh,
    on_mesh,
    replicated,
)

mesh = make_mesh(MeshConfig(), topologies.devices_of(TOPOLOGY))

class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            residual = Residual("post", 0.0, 1e-6, dtype="bfloat16")
            x = residual.after(x, FeedForward(512, 1024, dtype="bfloat16")(x))
        return x.astype(jnp.float32)

def loss(params, x):
    return jnp.square(Layers().apply(params, x)).sum()

x = jax.ShapeDtypeStruct((64, 128, 512), jnp.bfloat16, sharding=batch_sharding(mesh))
params = nn.unbox(jax.eval_shape(Layers().init, jax.random.key(0), x))
params = jax.tree.map(
    lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=replicated(mesh)), params
)
program = on_mesh(jax.grad(loss, (0, 1)), mesh).lower(params, x).compile()
written = [x.shape for x, _, _ in parse(program.as_text()).walk()]
arrays = sum("f32[64,128,512]" in shape for shape in written)
print(json.dumps([program.memory_analysis().temp_size_in_bytes, arrays]))
"""


@pytest.mark.parametrize(
    ("topology", "memory", "arrays"),
    [
        pytest.param("v5e:1x1", 2**24, 0, marks=[needs_libtpu, pytest.mark.slow]),
        pytest.param("h100:1x1x1", math.inf, 1, marks=needs_plugin),
    ],
)
def test_a_residual_stream_in_bfloat16_keeps_no_sum_in_float32(
    topology, memory, arrays
):
    """A sum would take 16 MiB. On a GPU, the loss has an array in float32."""
    found = json.loads(output_of(RESIDUAL.replace("TOPOLOGY", repr(topology))))
    assert found[0] < memory
    assert found[1] <= arrays
