"""N-gram language models, which are counted and not trained.

Paper: Chen and Goodman 1999, interpolated Kneser–Ney smoothing; Kneser and Ney 1995.
Arguments: `shakespeare` (the default) predicts the characters of tiny-shakespeare as
one text, with the splits of gpt.py. `sentences` predicts WordPieces and the end of each
line of train.txt and val.txt, of which blank lines are left out. `order=N`, from 1 to
9; the default is 5.
Command: python scripts/ngram.py --config=configs/lm.py:ngram,order=5 \
    --workdir=runs/ngram --config.data.directory=DIR
Data: for `shakespeare`, DIR holds input.txt. For `sentences`, it holds train.txt and
val.txt, e.g. from scripts/documents.py.
Score: the command prints it, and so does python scripts/ngram.py --workdir=runs/ngram.
Cost: about two seconds on one CPU core per million tokens.
Expected: nats per character on the held-out text, for the orders 2 to 8: 2.484, 2.038,
1.719, 1.561, 1.523, 1.517 and 1.519 (docs/results/gpt.md).
Differs: a text begins with one begin token, not with n - 1, as in KenLM.
"""

from ml_collections import ConfigDict

from transformer_jax.baselines.counted import defaults
from transformer_jax.config import parse_arg

ORDERS = ("5", "1", "2", "3", "4", "6", "7", "8", "9")


def get_config(arg: str | None = None) -> ConfigDict:
    words = {
        "model": ("ngram",),
        "data": ("shakespeare", "sentences"),
        "order": ORDERS,
    }
    choice = parse_arg(arg, words)
    config = defaults()
    config.model.order = int(choice["order"])
    if choice["data"] == "shakespeare":
        config.data.train_split = "input[:90%]"
        config.data.test_split = "input[90%:]"
        config.data.tokenizer = "characters"
        config.model.vocab_size = 80
    else:
        config.data.sentences = True
        config.data.tokenizer = "bert"
        config.data.min_count = 2
    return config
