"""Models of images and sounds, and those of several decoders, train on eight devices
as on one.
"""

import json

import numpy as np
import pytest

from helpers import modalities
from helpers.processes import on_devices
from helpers.runs import small

PROGRAM = """
import json
import jax
from ml_collections import ConfigDict
from transformer_jax.config import make_task, parse
from transformer_jax.training.engine import Engine
from transformer_jax.training.sharding import feed

found = []
for mesh in MESHES:
    raw = ConfigDict(CONFIG)
    raw.mesh.data, raw.mesh.fsdp, raw.mesh.tensor = mesh
    task = make_task(parse(raw), WORKDIR)
    task.fingerprint(training=True)
    engine = Engine(task)
    state = engine.init(jax.random.key(0))
    batches = task.batches("train", 0)
    found.append([])
    for fed in feed(batches, range(3), engine.mesh):
        state, metrics = engine.step(state, fed.placed)
        found[-1].append(float(metrics["loss"]))
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("recipe", "arg"),
    [
        pytest.param("spoken_digits", "", marks=pytest.mark.slow),
        pytest.param("captions", "", marks=pytest.mark.slow),
        ("captions", "photographs"),
    ],
)
def test_eight_devices_train_as_one(recipe, arg, tmp_path):
    config = modalities.small_recipe(recipe, arg, tmp_path / "corpus")
    one, eight = losses_on_one_and_eight(config, tmp_path)
    np.testing.assert_allclose(eight, one, rtol=1e-5)


def test_eight_devices_train_several_decoders_as_one(corpus, tmp_path):
    config = small("several_decoders", corpus)
    config.data.directions = ("en-de", "en-fr", "fr-en")
    one, eight = losses_on_one_and_eight(config, tmp_path)
    np.testing.assert_allclose(eight, one, rtol=1e-5)


def losses_on_one_and_eight(config, tmp_path):
    """Return the losses of three steps on one device, and on a mesh of eight."""
    config.model.num_heads = 8
    for key in ("head_dim", "value_dim"):
        if key in config.model:
            config.model[key] = 4
    config.model.vocab_multiple = 8
    program = PROGRAM.replace("CONFIG", repr(config.to_dict()))
    program = program.replace("WORKDIR", repr(str(tmp_path / "run")))
    (one,) = json.loads(on_devices(1, program.replace("MESHES", "[(1, 1, 1)]")))
    (eight,) = json.loads(on_devices(8, program.replace("MESHES", "[(2, 2, 2)]")))
    return one, eight
