"""Join lines of parallel text into longer ones, to study how a model handles length.

    python scripts/concatenate.py --directory=DIR --output=JOINED --longest=4

For each size 1, 2, …, --longest, the lines are shuffled and joined in groups of that
size. Each size uses every line once, except for a remainder that does not fill a group.
Messages go to stderr, nothing to stdout.
"""

import sys

from absl import flags

from transformer_jax import command_line
from transformer_jax.data.concatenation import concatenate

DIRECTORY = flags.DEFINE_string(
    "directory", None, "folder of the text: {split}.{language} files", required=True
)
OUTPUT = flags.DEFINE_string(
    "output", None, "folder for the result: files of the same names", required=True
)
SPLITS = flags.DEFINE_list(
    "splits", ["train", "val", "test_2016_flickr"], "comma-separated splits to join"
)
LANGUAGES = flags.DEFINE_list(
    "languages", ["de", "en"], "comma-separated languages of the text"
)
LONGEST = flags.DEFINE_integer(
    "longest", 4, "maximum number of lines to join into one", lower_bound=1
)
SEED = flags.DEFINE_integer("seed", 0, "seed of the shuffle")


def main() -> None:
    counts = concatenate(
        DIRECTORY.value,
        OUTPUT.value,
        SPLITS.value,
        LANGUAGES.value,
        LONGEST.value,
        SEED.value,
    )
    for split, lines in counts.items():
        print(f"{OUTPUT.value}: {split}, {lines:,} lines", file=sys.stderr)


if __name__ == "__main__":
    command_line.run(main, distributed=False)
