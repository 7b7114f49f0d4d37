r"""Predict one output line for each input line, in order, on stdout or in a file.

Messages go to stderr.

    python scripts/predict.py --workdir=runs/dates --input=lines.txt \
        --output=predicted.txt

A line of input is a text. For a task with several inputs, e.g. a pair of texts or a
question and its context, a line holds them separated by tabs, or as a JSON object whose
fields are the names of the inputs.

On a terminal, a language model's continuations appear as plain text while they are
written.

Predicted text is written as is, except that characters that may end a line, e.g.
U+2028, become spaces. Any other prediction is written as a JSON object. With
--config.decoding.n_best above 1, the prediction of a translation model is
{"hypotheses": [{"text", "score", "log_probability"}, ...]}, best first.

With --embeddings, a BERT writes {"embedding": [...]}, one vector for each text.
"""

import itertools
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict

from transformer_jax import command_line, files
from transformer_jax.data.examples import parse_record
from transformer_jax.errors import UserError
from transformer_jax.predictor import Predictor
from transformer_jax.training import processes
from transformer_jax.training.task import POOLINGS, Record

INPUT = flags.DEFINE_string("input", "-", "text file, or - for stdin")
OUTPUT = flags.DEFINE_string("output", "-", "file to write, or - for stdout")
SCORE = flags.DEFINE_bool(
    "score",
    False,
    "write JSON objects with scores; a language model scores the given texts",
)
EMBEDDINGS = flags.DEFINE_enum(
    "embeddings",
    None,
    POOLINGS,
    "write one vector per text: the mean over its tokens, or the output at [CLS]; "
    "for a BERT",
)
STREAM = flags.DEFINE_bool(
    "stream",
    None,
    "show continuations as plain text while they are written; "
    "the default on a terminal",
)


def main(config: ConfigDict) -> None:
    command_line.check_output(OUTPUT.value, INPUT.value, flags.FLAGS.workdir)
    objects = SCORE.value or EMBEDDINGS.value is not None
    if STREAM.value and (objects or OUTPUT.value != "-"):
        raise UserError(
            "--stream shows text on stdout: leave out --score, --embeddings and "
            "--output, or --stream"
        )
    if SCORE.value and EMBEDDINGS.value:
        raise UserError(
            "a line has scores or a vector: leave out --score or --embeddings"
        )
    lines = command_line.read_lines(INPUT.value)
    predictor = Predictor(flags.FLAGS.workdir, config)
    watched = OUTPUT.value == "-" and not objects and sys.stdout.isatty()
    if STREAM.value or (STREAM.value is None and watched and predictor.streamed):
        stream(predictor, lines)
    else:
        write(predictor, lines)


def stream(predictor: Predictor, lines: Sequence[str]) -> None:
    """Show what is predicted for each line, and a line feed."""
    for number, line in enumerate(lines):
        for piece in itertools.chain(predictor.stream(line, number), ["\n"]):
            if processes.is_first():
                sys.stdout.buffer.write(piece.encode())
                sys.stdout.flush()


def write(predictor: Predictor, lines: Sequence[str]) -> None:
    """Write a line for each line."""
    columns, needed = predictor.config.columns
    records = [
        parse_record(line, f"input, line {n}", columns, needed, needed)
        for n, line in enumerate(lines, 1)
    ]
    if EMBEDDINGS.value:
        vectors = predictor.embed(records, EMBEDDINGS.value)
        found: list[Record] = [{"embedding": vector.tolist()} for vector in vectors]
    else:
        found = predictor.predict(records, scored=SCORE.value)
    text = "".join(files.one_line(prediction) + "\n" for prediction in found).encode()
    if not processes.is_first():
        return
    if OUTPUT.value == "-":
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
    else:
        files.write(OUTPUT.value, text)


if __name__ == "__main__":
    command_line.run_on_workdir(main)
