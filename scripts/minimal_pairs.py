r"""Measure how often a run finds the acceptable one of two sentences more probable.

    python scripts/minimal_pairs.py --workdir=runs/gpt --input=blimp/blimp.tsv.gz

The input is a table with the columns field, phenomenon, paradigm, sentence_good and
sentence_bad, e.g. BLiMP. The run is one that `predict.py --score` can score with, i.e.
a language model or a pre-trained BERT, or an n-gram model of scripts/ngram.py.
Sentences go through the tokenizer of the run. The scores are printed as one JSON line,
and a table of them on stderr, or in the file --output.
"""

import functools
import sys

from absl import flags
from etils import epath
from ml_collections import ConfigDict

from transformer_jax import command_line, files, minimal_pairs
from transformer_jax import workdir as workdirs
from transformer_jax.baselines import counted
from transformer_jax.errors import UserError
from transformer_jax.predictor import Predictor
from transformer_jax.training import processes
from transformer_jax.training.logging import json_line

INPUT = flags.DEFINE_string("input", None, "table of pairs, *.tsv[.gz]", required=True)
OUTPUT = flags.DEFINE_string("output", None, "file for the table, instead of stderr")


def read(workdir: epath.PathLike) -> ConfigDict:
    if counted.is_counted(workdir):
        return counted.stored(workdir)
    return workdirs.read(workdir)


def main(config: ConfigDict) -> None:
    workdir = flags.FLAGS.workdir
    command_line.check_output("-")
    if OUTPUT.value is not None:
        command_line.check_output(OUTPUT.value, INPUT.value, workdir)
    pairs = minimal_pairs.read_pairs(INPUT.value)
    processes.agree("input", lambda: [*pairs.good, *pairs.bad])
    described = {}
    run: Predictor | counted.NgramRun
    if config.task == counted.TASK:
        run = counted.load(workdir, config)
        described = {"order": run.config.order}
    else:
        run = Predictor(workdir, config)
        described = {"step": run.step, "parameters_sha256": run.parameters_sha256}
        if not run.scores_texts:
            raise UserError(
                f"--workdir={workdir}: config.task = {config.task!r} does not say how "
                "probable a text is; name the run of a language model, of "
                "bert_pretraining or of scripts/ngram.py"
            )
    score = functools.partial(run.predict, scored=True)
    count = len(pairs.good)
    values = minimal_pairs.log_likelihoods([*pairs.good, *pairs.bad], score)
    scores = minimal_pairs.accuracies(pairs, values[:count], values[count:])
    if not processes.is_first():
        return
    text = minimal_pairs.readable(scores) + "\n"
    if OUTPUT.value is None:
        print(text, end="", file=sys.stderr)
    else:
        files.write(OUTPUT.value, text.encode())
    print(json_line(described | scores))


if __name__ == "__main__":
    command_line.run_on_workdir(main, read)
