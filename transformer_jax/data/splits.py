"""Config keys of every data set, whatever its examples are."""

import dataclasses
from collections.abc import Iterator, Mapping

from transformer_jax import fields

SOURCES = ("files", "tfds")


@dataclasses.dataclass(frozen=True)
class SplitData:
    """Location, splits and batching of examples.

    A position is one entry of a sequence, e.g. a token, a frame or a cell.
    """

    # "files": files in `directory`; "tfds": the data set `name`, prepared in
    # `directory`
    source: str = "files"
    name: str = ""
    directory: str = fields.path("")
    train_split: str = "train"  # a split, or a part of one, e.g. "train[:90%]"
    validation_split: str = fields.free("val")
    test_split: str = fields.free("test")
    # most positions of an example, including begin and end
    max_length: int = fields.size(256, 32)
    # most padded positions in the widest stream of a batch
    batch_tokens: int = fields.size(4096, 1024)
    # most batch shapes, and hence compilations of the training step
    max_buckets: int = fields.size(8, 1)
    # divides the rows of every batch; devices and microbatches must divide it
    rows_multiple: int = fields.size(8, 8)

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each data set that training mixes; {}: there is only one."""
        return {}

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.source not in SOURCES:
            yield "source", f"must be one of {', '.join(SOURCES)}"
        if self.source == "tfds" and not self.name:
            yield (
                "name",
                "must be the data set's name in tfds, e.g. 'wmt14_translate/de-en'",
            )
        if not self.directory:
            yield (
                "directory",
                "must be the folder of the data: add --config.data.directory=DIR",
            )
        for name in ("max_length", "batch_tokens", "max_buckets", "rows_multiple"):
            if getattr(self, name) < 1:
                yield name, "must be at least 1"
        if self.rows_multiple >= 1:
            yield from self.no_room(self.max_length, f"max_length = {self.max_length}")

    def no_room(self, length: int, words: str) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) if a batch may have no room for its rows.

        `length` is the most positions of the widest stream, and `words` what it is
        called in the config.
        """
        least = length * self.rows_multiple
        if self.batch_tokens < least:
            yield (
                "batch_tokens",
                (
                    f"must have room for rows_multiple = {self.rows_multiple} "
                    f"rows of {words}: set it to {least} or more"
                ),
            )
