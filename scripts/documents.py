r"""Write text for pre-training: a sentence per line, a blank line between documents.

    python scripts/documents.py --inputs=squad/train.json,multi30k/train.en \
        --output=DIR/train.txt

Each paragraph of a SQuAD file (.json) is a document, and so is each line of any other
file. A rule of thumb finds the ends of sentences. Documents that repeat an earlier one
are left out. Messages go to stderr, nothing to stdout.
"""

import sys

from absl import flags

from transformer_jax import command_line
from transformer_jax.data.documents import write_documents

INPUTS = flags.DEFINE_list(
    "inputs", None, "comma-separated files: SQuAD .json, or text", required=True
)
OUTPUT = flags.DEFINE_string("output", None, "file for the documents", required=True)
HELD_OUT = flags.DEFINE_integer(
    "held_out", 0, "hold out every N-th document; 0: none", lower_bound=0
)
HELD_OUT_OUTPUT = flags.DEFINE_string(
    "held_out_output", "", "file for the documents that are held out"
)


def main() -> None:
    for path in filter(None, (OUTPUT.value, HELD_OUT_OUTPUT.value)):
        command_line.check_output(path)
    counts = write_documents(
        INPUTS.value, OUTPUT.value, HELD_OUT.value, HELD_OUT_OUTPUT.value
    )
    for path, size in counts.items():
        print(
            f"{path}: {size.documents:,} documents, "
            f"{size.sentences:,} sentences, {size.words:,} words",
            file=sys.stderr,
        )


if __name__ == "__main__":
    command_line.run(main, distributed=False)
