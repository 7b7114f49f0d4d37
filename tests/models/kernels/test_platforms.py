"""The platform of a trace."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from transformer_jax.models.kernels import platforms


def test_without_a_mesh_it_is_jaxs_default():
    assert platforms.current() == jax.default_backend()


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu", "cuda"])
def test_it_is_that_of_the_mesh_in_scope(platform):
    device = AbstractDevice("any", None, platform)
    mesh = AbstractMesh((2,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert platforms.current() == platform
        assert platforms.is_cpu() == (platform == "cpu")
        assert platforms.is_gpu() == (platform in ("gpu", "cuda"))


def test_a_mesh_of_no_devices_leaves_jaxs_default():
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("data",))):
        assert platforms.current() == jax.default_backend()
