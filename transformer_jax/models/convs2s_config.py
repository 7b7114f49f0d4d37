"""The config of ConvS2S, and the rules between its fields."""

import dataclasses
from collections.abc import Iterator

from transformer_jax import fields
from transformer_jax.errors import UserError
from transformer_jax.models.layers import TokenVectors


@dataclasses.dataclass(frozen=True)
class ConvS2SConfig:
    """Config of `ConvS2S`.

    The widths are those of Gehring et al. 2017, Section 4.2, and the layers and kernels
    those of their model for WMT English–Romanian.
    """

    architecture: str = dataclasses.field(default="convs2s", kw_only=True)
    source_vocab_size: int = fields.size(40_000, 304)
    target_vocab_size: int = fields.size(40_000, 304)
    embedding_dim: int = fields.size(512, 8)  # E: f in the paper
    d_model: int = fields.size(512, 16)  # D: d in the paper, hidden units of all layers
    num_encoder_layers: int = fields.size(20, 2)
    num_decoder_layers: int = fields.size(20, 2)
    # K: k in the paper, the number of positions that an output reads
    encoder_kernel_width: int = 3
    decoder_kernel_width: int = 3
    # of all layers except lookup tables (Salimans and Kingma 2016)
    weight_norm: bool = True
    # of embeddings, the inputs of convolutions and the decoder's output
    dropout_rate: float = fields.random(0.2, 0.0)
    max_length: int = fields.size(1024, 32)
    vocab_multiple: int = 1
    dtype: str = fields.how("float32")  # of the products

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        for name, value in dataclasses.asdict(self).items():
            if type(value) is int and value < 1:
                yield name, "must be at least 1"
        if self.encoder_kernel_width % 2 == 0:
            yield (
                "encoder_kernel_width",
                (
                    "must be odd, because a position has as many neighbours "
                    "on its left as on its right: set it to 3 or 5"
                ),
            )
        if not 0 <= self.dropout_rate < 1:
            yield "dropout_rate", "must be in [0, 1); 0 disables dropout"
        choices = {"architecture": ("convs2s",), "dtype": ("float32", "bfloat16")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                yield name, f"must be one of {', '.join(allowed)}"

    @property
    def retained(self) -> float:
        """p: the share of inputs that dropout retains."""
        return 1 - self.dropout_rate

    @property
    def shares_tables(self) -> bool:
        """Always False: source and target have separate embeddings."""
        return False

    @property
    def token_vectors(self) -> TokenVectors:
        """The vectors of source and target tokens."""
        return TokenVectors("embedding_dim", self.embedding_dim, 1.0, False)

    @property
    def source_width(self) -> int:
        """The width of the vectors that front ends return."""
        return self.embedding_dim

    @property
    def memory_width(self) -> int:
        """The width of the vectors that the encoder writes."""
        return self.embedding_dim

    @property
    def memory_stride(self) -> int:
        """The positions that the encoder reads for each that it writes."""
        return 1

    @property
    def source_dropout_rate(self) -> float:
        """The dropout of front ends."""
        return self.dropout_rate

    @property
    def source_positions(self) -> str:
        """The kind of positions that front ends add."""
        return "learned"

    @property
    def needs_warmup(self) -> bool:
        """Always False: the learning rate needs no warm-up."""
        return False

    def check(self) -> None:
        """Raise ValueError for the first of `problems`."""
        for field, rule in self.problems():
            raise UserError(f"ConvS2SConfig.{field} = {getattr(self, field)!r}: {rule}")
