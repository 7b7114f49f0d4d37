"""T5 (Raffel et al. 2020) in all sizes, and small ones, on pairs of texts of your own.

Paper: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer".
Sizes: `small` (the default; 60,506,624 parameters), `base` (222,903,552), `large`
(737,668,096), `3b` (2,851,598,336) and `11b` (11,307,321,344); of version 1.1, with
gated GELU and an output layer of its own, `v1_1-small` (76,961,152), `v1_1-base`
(247,577,856), `v1_1-large` (783,150,080), `v1_1-xl` (2,849,757,184) and `v1_1-xxl`
(11,135,332,352); and `mini` (10,393,344: version 1.1, 4 + 4 layers, 256 wide, a
vocabulary of 8,000), for a CPU.
Command: python scripts/train.py --config=configs/t5.py:mini --workdir=runs/t5 \
    --config.data.directory=DIR
Fine-tuning: --config.init_from=FOLDER starts from a Hugging Face folder of the same
size, or from a run. The message names the keys that have to agree with it.
Data: DIR holds train.inputs, train.targets, val.inputs and val.targets, and for
evaluate.py test.inputs and test.targets. Line i of the targets is the answer to line i
of the inputs, whose first words name the task, e.g. "translate English to German: …"
or "summarize: …".
Score: python scripts/evaluate.py --workdir=runs/t5
Cost: not measured yet. `11b` needs the memory of several accelerators
(--config.mesh.fsdp): scripts/describe.py says how much.
Expected: not measured yet.
Differs: The paper pre-trains on text without labels first, with a denoising objective,
and then fine-tunes for 2^18 steps at a learning rate of 0.001; here, all 2^19 steps are
on pairs. The learning rate rises to 0.01 in the first 10,000 steps, where the paper's
is 0.01 from the first step on. The decoder begins with the begin id of the tokenizer,
where T5 has the id of padding; with the tokenizer of a Hugging Face folder, it is the
latter. The vocabulary is learned from the training split, and has no sentinels.
configs/text_to_text.py pre-trains `mini` on text, and mixes several data sets.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share
from transformer_jax.models.t5 import SIZES

# so large that one device does not hold parameters and optimizer state
SHARDED = ("3b", "11b", "v1_1-xl", "v1_1-xxl")


def get_config(arg: str | None = None) -> ConfigDict:
    size = parse_arg(arg, {"size": tuple(SIZES)})["size"]
    mini = size == "mini"
    config = defaults("sequence_to_sequence")

    config.data.source_language = "inputs"
    config.data.target_language = "targets"
    config.data.test_split = "test"
    config.data.tokenizer = "unigram"
    config.data.max_length = 128 if mini else 512
    # padded positions of the longer side: 128 rows of 512 in the paper
    config.data.batch_tokens = 4096 if mini else 65_536

    config.model.update(SIZES[size])
    config.model.max_length = config.data.max_length
    config.model.unroll = 4 if mini else 1
    if not mini:
        config.model.dtype = "bfloat16"
    if size in SHARDED:
        config.model.remat = "full"
        config.mesh.data = 1
        config.mesh.fsdp = -1

    # Section 3.1.2
    config.optimizer.name = "adafactor"
    config.optimizer.schedule = "inverse_sqrt"
    config.optimizer.learning_rate = 0.01
    config.training.steps = 8000 if mini else 2**19
    # 10,000 steps
    config.optimizer.warmup_steps = share(config, 10 if mini else 52)
    config.training.label_smoothing = 0.0
    config.training.evaluate_every = share(config, 20 if mini else 100)
    config.checkpoint.every = share(config, 20 if mini else 100)
    config.checkpoint.keep_latest = 2

    # Section 3.7: beam search for long outputs
    config.decoding.beam_size = 4
    config.decoding.length_penalty = 0.6
    config.decoding.length_penalty_form = "wu"
    config.decoding.max_ratio = 1.0
    config.decoding.max_extra = 50
    return config
