r"""Write what a run predicts to one file, which needs only JAX to be used.

    python scripts/export.py --workdir=runs/sst2 --output=sst2.npz
    python scripts/export.py --workdir=runs/gpt --output=scores.npz --score \
        --platforms=cpu
    python scripts/export.py --workdir=runs/bert --output=vectors.npz --embeddings=mean

The file holds the parameters and one program (StableHLO) for each platform, for any
number of rows and any length. It reads token ids, not text; the tokenizers are in the
file. Decoding is that of the config, e.g. --config.decoding.beam_size=1 for greedy
search. transformer_jax/exported.py reads the file. Messages go to stderr, nothing to
stdout.
"""

from absl import flags
from ml_collections import ConfigDict

from transformer_jax import command_line, exporting
from transformer_jax.errors import UserError
from transformer_jax.training.task import POOLINGS

OUTPUT = flags.DEFINE_string("output", None, "file to write", required=True)
PLATFORMS = flags.DEFINE_list(
    "platforms",
    ["cpu", "cuda", "tpu"],
    f"platforms to export for: some of {', '.join(exporting.PLATFORMS)}",
)
SCORE = flags.DEFINE_bool(
    "score", False, "export the scores of given texts; for a language model"
)
EMBEDDINGS = flags.DEFINE_enum(
    "embeddings", None, POOLINGS, "export one vector per text; for a BERT"
)


def main(config: ConfigDict) -> None:
    command_line.check_output(OUTPUT.value, workdir=flags.FLAGS.workdir)
    if OUTPUT.value == "-":
        raise UserError("--output=- is not a file: name one, e.g. --output=run.npz")
    if SCORE.value and EMBEDDINGS.value:
        raise UserError(
            "a file has scores or vectors: leave out --score or --embeddings"
        )
    exporting.to_file(
        flags.FLAGS.workdir,
        config,
        OUTPUT.value,
        PLATFORMS.value,
        SCORE.value,
        EMBEDDINGS.value or "",
    )


if __name__ == "__main__":
    command_line.run_on_workdir(main)
