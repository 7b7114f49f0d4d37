"""Join the lines of parallel text in groups of 1, 2, … neighbours of a shuffle, each size over all lines.

    python scripts/concatenate.py --directory=DIR --output=JOINED --longest=4

The result has sentences of many lengths, to see what length does to a model.
"""

import sys

from absl import flags

from transformer_jax import command_line
from transformer_jax.data.concatenation import concatenate

DIRECTORY = flags.DEFINE_string("directory", None, "the text: {split}.{language} files", required=True)
OUTPUT = flags.DEFINE_string("output", None, "where to write files of the same names", required=True)
SPLITS = flags.DEFINE_list("splits", ["train", "val", "test_2016_flickr"], "what is joined")
LANGUAGES = flags.DEFINE_list("languages", ["de", "en"], "of the text")
LONGEST = flags.DEFINE_integer("longest", 4, "the most lines that are joined", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "of the shuffle")


def main() -> None:
    counts = concatenate(DIRECTORY.value, OUTPUT.value, SPLITS.value, LANGUAGES.value, LONGEST.value, SEED.value)
    for split, lines in counts.items():
        print(f"{OUTPUT.value}: {split}, {lines:,} lines", file=sys.stderr)


if __name__ == "__main__":
    command_line.run(main, distributed=False)
