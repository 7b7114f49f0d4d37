"""Models of transformers with random weights, and comparisons with ours."""

import json
import struct

import numpy as np
import pytest
from flax import traverse_util

from helpers.oracle import relative
from transformer_jax.interop import huggingface, layouts

MISSING = (
    "transformers or torch is not installed: pip install 'transformer_jax[huggingface]'"
)


def need_transformers():
    """Return the modules transformers and torch, or skip the tests of a module."""
    return pytest.importorskip("transformers", reason=MISSING), pytest.importorskip(
        "torch", reason=MISSING
    )


def random_model(transformers, torch, name, config, seed, folder):
    """Make a model of the class `name`, save it in `folder` and return it.

    No bias is zero and no gain is one.
    """
    draw = torch.Generator().manual_seed(seed)
    model = getattr(transformers, name)(config)
    # e.g. sinusoids
    fixed = {key for key, x in model.named_parameters() if not x.requires_grad}
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            if not parameter.is_floating_point() or key in fixed:
                continue
            near = 1.0 if parameter.ndim == 1 and (parameter == 1).all() else 0.0
            parameter.copy_(near + 0.2 * torch.randn(parameter.shape, generator=draw))
    model.save_pretrained(folder)
    return model.eval()


def check_loads(transformers, name, folder):
    """Check that transformers loads the folder without missing or unexpected weights.

    Return the model.
    """
    model, info = getattr(transformers, name).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def write_back(found, params, folder):
    """Write what `huggingface.read` has returned to `folder`."""
    architecture = found.architecture
    settings = dict(found.outputs.settings)
    huggingface.write(
        folder, architecture.task, found.model, params, settings, architecture.name
    )


def check_gradients(found, gradients, theirs, zero=()):
    """Compare our gradients with those of their model.

    Where names end in one of `zero`, the gradients are zero, and both are rounding
    errors.
    """
    ours = as_theirs(found, gradients)
    for other, name in found.architecture.ties.items():
        if other not in ours and name in ours:  # they may have one tensor, by that name
            ours[other] = ours[name]
    expected = {
        name: p.grad.numpy()
        for name, p in theirs.named_parameters()
        if p.grad is not None
    }
    assert ours.keys() >= expected.keys()
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        if name.endswith(zero):
            assert (
                max(np.abs(gradient).max(), np.abs(ours[name]).max()) < 1e-6 * largest
            ), name
        else:
            assert relative(ours[name], gradient) < 1e-4, name


def as_theirs(found, tree):
    """Return a tree of ours, e.g. gradients, under the names and in the layouts of
    transformers.
    """
    return {
        name: make() for name, _, make in layouts.tensors_of(found.table, flat(tree))
    }


def flat(tree):
    return {
        path: np.asarray(leaf)
        for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()
    }


def write_file(path, tensors, metadata=True):
    """Write a safetensors file, by the definition of the format."""
    names = {
        np.dtype(np.float32): "F32",
        np.dtype(np.float16): "F16",
        np.dtype(np.int64): "I64",
    }
    header, data = ({"__metadata__": {"format": "pt"}} if metadata else {}), b""
    for name, tensor in tensors.items():
        places = [len(data), len(data) + tensor.nbytes]
        kind = names.get(tensor.dtype, "BF16")
        header[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": places,
        }
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
