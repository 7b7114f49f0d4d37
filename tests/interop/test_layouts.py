"""Layouts: what is read where, and that writing is its inverse."""

import jax
import numpy as np
import pytest

from transformer_jax.interop.layouts import (
    JOINING,
    LINEAR,
    SAME,
    Entry,
    Layout,
    Leaf,
    linear,
    resolve,
    tensors_of,
)
from transformer_jax.interop.tensors import InteropError

D, N, H, L = 5, 3, 2, 7

# Layout, our shape, their shape, and the index in theirs of our element [i, …].
LAYOUTS = {
    "same": (SAME, (D, N), (D, N), lambda i, j: (i, j)),
    "vector": (Layout(inputs=0), (N, H), (N * H,), lambda n, h: (n * H + h,)),
    "linear": (LINEAR, (D, N, H), (N * H, D), lambda d, n, h: (n * H + h, d)),
    "joining": (JOINING, (N, H, D), (D, N * H), lambda n, h, d: (d, n * H + h)),
    "conv1d": (Layout(1), (D, N, H), (D, N * H), lambda d, n, h: (d, n * H + h)),
    "values of q|k|v": (
        Layout(1, part=(2, 3)),
        (D, N, H),
        (D, 3 * N * H),
        lambda d, n, h: (d, 2 * N * H + n * H + h),
    ),
    "keys of a joint bias": (
        Layout(0, part=(1, 3)),
        (N, H),
        (3 * N * H,),
        lambda n, h: (N * H + n * H + h,),
    ),
    "halves": (
        Layout(1, True, halves=True),
        (D, N, 6),
        (N * 6, D),
        lambda d, n, h: (n * 6 + h % 2 * 3 + h // 2, d),
    ),
    "halves of a bias": (
        Layout(0, halves=True),
        (N, 6),
        (N * 6,),
        lambda n, h: (n * 6 + h % 2 * 3 + h // 2,),
    ),
    "another order": (
        Layout(1, True, order=(2, 0, 1)),
        (D, N),
        (N, D),
        lambda d, n: ((2, 0, 1)[n], d),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    layout, ours, theirs, place = LAYOUTS[name]
    assert layout.shape(ours) == theirs
    tensor = np.random.default_rng(0).normal(size=theirs).astype(np.float32)
    value = layout.read(tensor, ours)
    assert value.shape == ours
    for index in np.ndindex(ours):
        assert value[index] == tensor[place(*index)]
    again = np.zeros_like(tensor)
    layout.write(again, value)
    np.testing.assert_array_equal(layout.read(again, ours), value)
    assert np.count_nonzero(again) == value.size
    np.testing.assert_array_equal(again[again != 0], tensor[again != 0])


def stacked():
    """Return the slot of a stacked kernel, its tensors by name, and the whole
    kernel.
    """
    tensors = {
        f"layer.{i}.weight": np.random.default_rng(i).normal(size=(N * H, D))
        for i in range(L)
    }
    (slot,) = resolve(
        [Entry("kernel", "layer.{}.weight", LINEAR)], {"kernel": (L, D, N, H)}
    )
    whole = np.stack([tensor.T.reshape(D, N, H) for tensor in tensors.values()]).astype(
        np.float32
    )
    return slot, tensors, whole


def test_a_block_needs_only_its_layers():
    slot, tensors, whole = stacked()
    seen = []

    def tensor(name):
        seen.append(name)
        return tensors[name]

    leaf = Leaf(slot, tensor)
    assert (leaf.shape, leaf.size) == ((L, D, N, H), L * D * N * H)
    block = leaf[slice(2, 4), slice(1, 3), slice(None), slice(1, 2)]
    assert block.dtype == np.float32
    np.testing.assert_array_equal(block, whole[2:4, 1:3, :, 1:2])
    assert seen == ["layer.2.weight", "layer.3.weight"]
    np.testing.assert_array_equal(np.asarray(leaf), whole)
    np.testing.assert_array_equal(
        leaf.place(jax.sharding.SingleDeviceSharding(jax.devices()[0])), whole
    )


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (3, 6), (6, 8), (0, 8)])
def test_rows_that_the_file_does_not_have_are_zeros(start, stop):
    table = np.random.default_rng(0).normal(size=(5, D)).astype(np.float32)
    (slot,) = resolve([Entry("table", "embedding", rows=5)], {"table": (8, D)})
    assert slot.tensor_shape == (5, D)
    padded = np.concatenate([table, np.zeros((3, D), np.float32)])
    np.testing.assert_array_equal(
        Leaf(slot, lambda _: table)[slice(start, stop), slice(None)], padded[start:stop]
    )
    ((name, shape, make),) = tensors_of([slot], {"table": padded})
    assert (name, shape) == ("embedding", (5, D))
    np.testing.assert_array_equal(make(), table)


def test_writing_is_the_inverse_of_reading():
    slot, tensors, whole = stacked()
    made = {
        name: (shape, make())
        for name, shape, make in tensors_of([slot], {"kernel": whole})
    }
    assert made.keys() == tensors.keys()
    for name, (shape, value) in made.items():
        assert shape == (N * H, D)
        np.testing.assert_array_equal(value, tensors[name].astype(np.float32))


def test_several_parameters_share_a_tensor():
    entries = [
        e
        for i, name in enumerate("qkv")
        for e in linear(name, "attention", Layout(1, part=(i, 3)))
    ]
    shapes = {
        f"{name}/{part}": shape
        for name in "qkv"
        for part, shape in (("kernel", (D, N, H)), ("bias", (N, H)))
    }
    slots = resolve(entries, shapes)
    joint = {
        "attention.weight": np.random.default_rng(0)
        .normal(size=(D, 3 * N * H))
        .astype(np.float32)
    }
    joint["attention.bias"] = joint["attention.weight"][0]
    params = {slot.path: np.asarray(Leaf(slot, joint.__getitem__)) for slot in slots}
    np.testing.assert_array_equal(
        params["k/bias"].ravel(), joint["attention.bias"][N * H : 2 * N * H]
    )
    made = {name: make() for name, _, make in tensors_of(slots, params)}
    assert made.keys() == joint.keys()
    for name, value in made.items():
        np.testing.assert_array_equal(value, joint[name])


def test_a_parameter_without_an_entry_is_named():
    with pytest.raises(
        InteropError,
        match=r"these parameters have no place in a model of transformers:\n  b\n  c$",
    ):
        resolve([Entry("a", "a")], {"a": (2,), "c": (2,), "b": (3,)})
