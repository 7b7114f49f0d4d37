"""Convert a Hugging Face folder to a workdir, or a workdir to a Hugging Face folder.

    python scripts/convert.py --from_huggingface=FOLDER --workdir=runs/converted
    python scripts/convert.py --workdir=runs/sst2 --to_huggingface=FOLDER

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
command_line.define_task()


def main(overrides: list[str]) -> None:
    if bool(FROM.value) == bool(TO.value):
        raise UserError(
            "give either --from_huggingface=FOLDER or --to_huggingface=FOLDER; "
            "--help shows examples"
        )
    config = read(WORKDIR.value) if TO.value else conversion.config_for(FROM.value)
    override(config, overrides)
    if TO.value:
        conversion.to_folder(WORKDIR.value, config, TO.value)
    else:
        conversion.to_workdir(config, WORKDIR.value)


if __name__ == "__main__":
    overrides, argv = command_line.split_overrides()
    command_line.run(lambda: main(overrides), argv, distributed=False)
