"""The least time on two cores to 1.47 nats per character of tiny-shakespeare.

The loss is the mean over all of the held-out tenth, as in every evaluation during
training. The time ends with the row of metrics.jsonl of the first evaluation with at
most 1.47. It includes reading the data, compilations, and the evaluations before.

The best entry is a smaller `shakespeare-cpu-long` with norms of queries and keys,
batches half as large, and Muon. It is evaluated once, after the last step.
"""

from transformer_jax.claims.claim import Measurements
from transformer_jax.records.record import (
    Finished,
    Record,
    Rule,
    first_time,
    lowest,
    number_of_parameters,
    total_time,
)

LOSS = 1.47


def measured(finished: Finished) -> Measurements:
    """Return the minutes to the loss, those of the whole run, the lowest loss and the
    parameters.
    """
    return {
        "minutes": first_time(finished, "loss", most=LOSS),
        "minutes_in_all": total_time(finished),
        "loss": lowest(finished, "loss"),
        "parameters": number_of_parameters(finished.predictor),
    }


RECORD = Record(
    title="the least minutes on two cores to 1.47 nats per character on all held-out "
    "text of tiny-shakespeare",
    measure="minutes",
    better="lower",
    rules=(Rule("loss", most=LOSS),),
    fixed={
        "task": "language_modeling",
        "data.source": "files",
        "data.train_split": "input[:90%]",
        "data.validation_split": "input[90%:]",
        "data.tokenizer": "characters",
        "data.lowercase": False,
        "data.validation_stride": 0,
    },
    processors=2,
    data="tinyshakespeare",
    recipe="gpt.py:shakespeare-cpu-long",
    keys={
        "model.dtype": "float32",
        "model.d_model": 192,
        "model.d_ff": 512,
        "model.num_heads": 3,
        "model.num_kv_heads": 3,
        "model.head_dim": 64,
        "model.value_dim": 64,
        "model.qk_norm": True,
        "model.dropout_rate": 0.1,
        "optimizer.name": "muon",
        "optimizer.b1": 0.95,
        "optimizer.learning_rate": 8e-3,
        "optimizer.warmup_steps": 100,
        "data.batch_tokens": 2048,
        "training.steps": 1600,
        "training.evaluate_every": 1600,
        "checkpoint.every": 1600,
    },
    measured=measured,
    cost="ten minutes on two cores",
    quick={
        "data.train_split": "input[:2000]",
        "data.validation_split": "input[-500:]",
    },
)
