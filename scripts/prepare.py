r"""Prepare a standard corpus for training: download it, or read it from a folder.

Does not need TensorFlow.

    python scripts/prepare.py --name=multi30k/en-de --directory=data \
        --manual_dir=fetched

A corpus that is already prepared is left unchanged. Messages go to stderr, nothing to
stdout.
"""

from absl import flags

from transformer_jax import command_line
from transformer_jax.data.corpora.download import prepare
from transformer_jax.workdir import path_of

NAME = flags.DEFINE_string(
    "name",
    None,
    "tfds data set, e.g. multi30k/en-de, wmt14_translate/de-en, "
    "glue/sst2, squad or conll2003",
    required=True,
)
DIRECTORY = flags.DEFINE_string(
    "directory", None, "folder for the data: data.directory in training", required=True
)
MANUAL_DIR = flags.DEFINE_string(
    "manual_dir", None, "folder of files downloaded beforehand, names unchanged"
)


def main() -> None:
    directory = path_of(DIRECTORY.value, "--directory")
    manual_dir = path_of(MANUAL_DIR.value, "--manual_dir") if MANUAL_DIR.value else None
    prepare(NAME.value, directory, manual_dir)


if __name__ == "__main__":
    command_line.run(main, distributed=False)
