"""Invalid uses of evaluate.py.

Each ends with one error message and leaves all files unchanged.
"""

import pytest

from helpers.abusing import refused, unharmed
from helpers.forked import script

RUN = "--workdir=@/run"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param((), ("--workdir is missing", "--help"), id="nothing"),
        pytest.param(("--workdir",), ("workdir",), id="half an option"),
        pytest.param(
            ("--workdir=",),
            ("--workdir= is empty: name a folder",),
            id="workdir without a name",
        ),
        pytest.param(
            ("--workdir=@/none",),
            ("@/none is not the folder of a run",),
            id="no workdir",
        ),
        pytest.param(
            ("--workdir=@/loop.txt",),
            ("loop.txt cannot be used: Too many",),
            id="workdir is a loop",
        ),
        pytest.param(
            ("--workdir=@/torn",),
            ("torn, config.json: it is damaged",),
            id="torn config.json",
        ),
        pytest.param(
            ("--workdir=@/damaged",),
            ("has no valid checkpoint", "from a backup"),
            id="damaged checkpoints",
        ),
        pytest.param(
            ("--workdir=@/untrained",),
            ("has no valid checkpoint", "train there first"),
            id="no checkpoint",
        ),
        pytest.param(("--workdir=@/wordless",), ("tokenizer.json",), id="no tokenizer"),
        pytest.param((RUN, "--split=none"), ("none.en",), id="unknown split"),
        pytest.param((RUN, "--split="), ("--split",), id="split without a name"),
        pytest.param(
            (RUN, "--split=../place/val"), ("../place/val",), id="split elsewhere"
        ),
        pytest.param(
            (RUN, "--splt=val"), ("'splt'", "split", "--help"), id="a misspelt option"
        ),
        pytest.param((RUN, "val"), ("'val' is not an option",), id="no option"),
        pytest.param(
            (RUN, "--config=configs/dates.py"), ("'config'", "--help"), id="a recipe"
        ),
        pytest.param(
            (RUN, "--config.data.directory=@/none"),
            ("There is no directory @/none",),
            id="no data",
        ),
        pytest.param(
            (RUN, "--config.data.directory=@/lines.txt"),
            ("lines.txt",),
            id="data is a file",
        ),
        pytest.param(
            (RUN, "--config.data.test_split="), ("split",), id="an empty test split"
        ),
        pytest.param(
            (RUN, "--config.evaluation.checkpoint=last"),
            ("must be one of latest, best",),
            id="checkpoint",
        ),
        pytest.param(
            (RUN, "--config.evaluation.bleu_tokenizer=spm"),
            ("must be one of 13a, intl, zh",),
            id="of BLEU",
        ),
        pytest.param(
            (RUN, "--config.evaluation.batch_size=0"),
            ("must be at least 1",),
            id="no rows",
        ),
        pytest.param(
            (RUN, "--config.evaluation.batch_size=true"),
            ("must be of type int",),
            id="a batch of true",
        ),
        pytest.param(
            (RUN, "--config.evaluation"),
            ("config.evaluation is a section: set a key in it",),
            id="no value",
        ),
        pytest.param(
            (RUN, "--config.evaluation.batch_sise=2"),
            ("did you mean evaluation.batch_size",),
            id="misspelt",
        ),
        pytest.param(
            (RUN, "--config.task.x=2"),
            ("config.task.x is not a key",),
            id="below what is no section",
        ),
        pytest.param(
            (RUN, "--config.optimizer.learning_rate=nan"),
            ("= nan: must be finite",),
            id="nan",
        ),
        pytest.param(
            (RUN, "--config.optimizer.learning_rate=-inf"),
            ("= -inf: must be finite",),
            id="-inf",
        ),
        pytest.param(
            (RUN, "--config.optimizer.learning_rate=fast"),
            ("'fast': must be of type float",),
            id="a word",
        ),
        pytest.param(
            (RUN, "--config.decoding.beam_size=301"),
            ("must not exceed model.target_vocab_size",),
            id="beam",
        ),
        pytest.param(
            (RUN, "--config.decoding.beam_size=" + "(" * 300),
            ("must be of type int",),
            id="brackets",
        ),
        pytest.param(
            (RUN, "--config.model.d_model=32"),
            ("parameters of another model", "16 in the workdir"),
            id="another model",
        ),
        pytest.param((RUN, "--flagfile=@/none"), ("none",), id="no flagfile"),
    ],
)
def test_abuses(place, arguments, words):
    arguments = [argument.replace("@", str(place)) for argument in arguments]
    with unharmed(place):
        refused(
            script("evaluate", *arguments, cwd=place),
            *(word.replace("@", str(place)) for word in words),
        )
