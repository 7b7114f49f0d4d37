"""The columns of sequence to sequence: how files of pairs are read, and their texts."""

import functools

from transformer_jax.data.corpus import Reader
from transformer_jax.data.languages import directions_files
from transformer_jax.data.mixture import mixture_files
from transformer_jax.data.references import numbered_files, references_table
from transformer_jax.data.streams import Tokens
from transformer_jax.tasks.sequence_to_sequence_config import SequenceToSequenceConfig


def tokens_of(config: SequenceToSequenceConfig, side: str, column: str) -> Tokens:
    """Return the stream of a column of texts. `side` is "source" or "target"."""
    data = config.data
    joint = data.joint_tokenizer
    key = f"{side}_vocab_size"
    return Tokens(
        column,
        "tokenizer.json" if joint else f"tokenizer.{side}.json",
        getattr(config.model, key),
        f"model.{key}",
        marks=data.marks if side == "source" else (),
        prefixes=data.prefixes if side == "source" else (),
        apart=data.apart,
        frame=data.source_frame if side == "source" else data.target_frame,
    )


def reader_of(config: SequenceToSequenceConfig) -> Reader:
    """Return the function that reads the files of a split."""
    data = config.data
    if data.table:
        return functools.partial(
            references_table,
            table=data.table,
            count=data.references,
            read=config.input.source_column,
        )
    if data.directions:
        return functools.partial(directions_files, directions=data.directions)
    if data.mixture or data.prefixes:
        return functools.partial(
            mixture_files,
            names=tuple(data.weights),
            prefixes=data.prefixes,
            references=data.references,
        )
    if data.references > 1:
        return functools.partial(numbered_files, count=data.references)
    return config.input.reader()
