"""Prepare a standard corpus for training: download it, or take its files from a folder. Needs no TensorFlow.

    python scripts/prepare.py --name=multi30k/en-de --directory=data --manual_dir=fetched

What is prepared already is left as it is.
"""

from absl import flags

from transformer_jax import command_line
from transformer_jax.data.corpora.download import prepare

NAME = flags.DEFINE_string(
    "name", None, "wmt14_translate/de-en, ted_hrlr_translate/pt_to_en, multi30k/en-de or another of tfds", required=True
)
DIRECTORY = flags.DEFINE_string("directory", None, "where to put it: data.directory", required=True)
MANUAL_DIR = flags.DEFINE_string("manual_dir", None, "files fetched beforehand, under their own names")


def main() -> None:
    prepare(NAME.value, DIRECTORY.value, MANUAL_DIR.value)


if __name__ == "__main__":
    command_line.run(main, distributed=False)
