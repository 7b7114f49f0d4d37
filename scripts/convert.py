r"""Convert a Hugging Face folder to a workdir, or a workdir to a Hugging Face folder.

    python scripts/convert.py --from_huggingface=FOLDER --workdir=runs/converted
    python scripts/convert.py --workdir=runs/sst2 --to_huggingface=FOLDER

An adapter of PEFT is read with its base, and written from a run with LoRA:

    python scripts/convert.py --from_huggingface=BASE --from_peft=ADAPTER \
        --workdir=runs/adapted
    python scripts/convert.py --workdir=runs/lora --to_peft=ADAPTER

The new workdir works with predict.py, evaluate.py (with --config.data.directory=DIR)
and attention_report.py. The new folder works with from_pretrained of transformers.
Messages go to stderr, nothing to stdout.
"""

from absl import flags

from transformer_jax import command_line, conversion
from transformer_jax.config import override
from transformer_jax.errors import UserError
from transformer_jax.workdir import read

WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
FROM = flags.DEFINE_string(
    "from_huggingface", None, "Hugging Face folder to read; --workdir is then new"
)
TO = flags.DEFINE_string("to_huggingface", None, "new Hugging Face folder to write")
FROM_PEFT = flags.DEFINE_string(
    "from_peft", "", "folder of an adapter of PEFT for the model of --from_huggingface"
)
TO_PEFT = flags.DEFINE_string("to_peft", None, "new folder for an adapter of PEFT")
command_line.define_task()


def main(overrides: list[str]) -> None:
    if sum(map(bool, (FROM.value, TO.value, TO_PEFT.value))) != 1:
        raise UserError(
            "give one of --from_huggingface=FOLDER, --to_huggingface=FOLDER and "
            "--to_peft=FOLDER; --help shows examples"
        )
    if FROM_PEFT.value and not FROM.value:
        raise UserError("--from_peft needs its base: add --from_huggingface=FOLDER")
    if FROM.value:
        config = conversion.config_for(FROM.value, FROM_PEFT.value)
    else:
        config = read(WORKDIR.value)
    override(config, overrides)
    if FROM.value:
        conversion.to_workdir(config, WORKDIR.value, FROM_PEFT.value)
    elif TO.value:
        conversion.to_folder(WORKDIR.value, config, TO.value)
    else:
        conversion.to_adapter(WORKDIR.value, config, TO_PEFT.value)


if __name__ == "__main__":
    overrides, argv = command_line.split_overrides()
    command_line.run(lambda: main(overrides), argv, distributed=False)
