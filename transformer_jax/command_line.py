"""What the scripts share: flags, messages on stderr, errors without tracebacks."""

import logging
import sys
from collections.abc import Callable

from absl import app, flags
from ml_collections import ConfigDict

from transformer_jax.config import override, read_workdir

EXIT_ERROR = 2


def run(main: Callable[[], None], argv: list[str] | None = None) -> None:
    """Parses flags and runs `main`. What a user can mend ends as one message on stderr and exit code 2."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("transformer_jax").setLevel(logging.INFO)
    app.define_help_flags()
    try:
        try:
            flags.FLAGS(sys.argv if argv is None else argv)
        except (AttributeError, KeyError, TypeError) as error:
            # ml_collections' words for a wrong --config.key, at times a quoted string within a string.
            words = str(error.args[0]).replace("\\n", "\n").replace("\\'", "'").splitlines()
            raise flags.Error("config key " + "; ".join(word.strip("\"'") for word in words)) from error
        main()
    except (ValueError, OSError, flags.Error) as error:
        print(f"error: {_message(error)}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(130)


def _message(error: Exception) -> str:
    """ml_collections puts a whole traceback into its message: what counts is its last line, after the class."""
    message = str(error).strip()
    if "Traceback (most recent call last)" in message:
        message = message.splitlines()[-1].partition(": ")[2]
    return message


def run_on_workdir(main: Callable[[ConfigDict], None]) -> None:
    """The same for a program that takes its config from --workdir, with `--config.a.b=v` over it."""
    overrides = [argument for argument in sys.argv if argument.startswith("--config.")]
    argv = [argument for argument in sys.argv if not argument.startswith("--config.")]
    workdir = flags.DEFINE_string("workdir", None, "the folder of a run", required=True)

    def overridden() -> None:
        config = read_workdir(workdir.value)
        override(config, overrides)
        main(config)

    run(overridden, argv)
