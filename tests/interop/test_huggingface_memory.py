"""Large files: what is in memory at once, and what each device gets."""

import json

import numpy as np

from helpers.bert_folders import PRETRAINING, drawn, save
from helpers.processes import on_devices

ON_EIGHT = """
import jax, json, sys
from transformer_jax import config, transfer
from transformer_jax.interop import huggingface, layouts
from transformer_jax.training.initialization import abstract_parameters
from transformer_jax.training.sharding import make_mesh

keys = config.defaults("bert_pretraining")
keys.update_from_flattened_dict(transfer.keys_for("FOLDER"))
keys.update_from_flattened_dict({"data.directory": "none", "data.max_length": 32})
keys.update_from_flattened_dict({"model.vocab_multiple": 8, "mesh.fsdp": 8})
parsed = config.parse(keys)
task = config.make_task(parsed, None)
abstract = abstract_parameters(task, make_mesh(parsed.mesh))
found, read = huggingface.read("FOLDER", parsed.model), {}
original = layouts.Slot.read

def counted(slot, index, tensor):
    block = original(slot, index, tensor)
    read.setdefault(slot.path, []).append(block.size)
    return block

layouts.Slot.read = counted
shares = {}
for path, leaf in found.parameters.items():
    target = abstract
    for name in path.split("/"):
        target = target[name]
    placed = leaf.place(target.sharding)
    assert placed.shape == target.shape
    sizes = [shard.data.size for shard in placed.addressable_shards]
    split = "fsdp" in str(target.sharding.spec)
    shares[path] = [
        split,
        placed.size,
        sorted(set(sizes)),
        sorted(set(read[path])),
        float(abs(placed).sum()),
    ]
print(json.dumps(shares))
"""


def test_each_of_eight_devices_reads_and_holds_its_share(tmp_path):
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40}
    wide = {21: 24, 23: 40}
    tensors = drawn(
        {
            name: tuple(wide.get(n, n) for n in shape)
            for name, shape in PRETRAINING.items()
        }
    )
    folder = save(tmp_path, tensors, **sizes)
    shares = json.loads(on_devices(8, ON_EIGHT.replace("FOLDER", str(folder))))
    assert shares["bert/embedding/table"][:2] == [True, 64 * 24]
    sharded = {path for path, (split, *_) in shares.items() if split}
    assert len(sharded) > 20
    for path, (_, size, held, read, total) in shares.items():
        share = size // 8 if path in sharded else size
        assert held == read == [share], path
        assert total > 0
    query = [
        np.abs(x).sum(dtype=np.float64)
        for name, x in tensors.items()
        if name.endswith("query.weight")
    ]
    np.testing.assert_allclose(
        shares["bert/encoder/layers/self_attention/query/kernel"][4],
        sum(query),
        rtol=1e-5,
    )
