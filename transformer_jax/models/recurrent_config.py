"""The config of recurrent encoder–decoders, and the rules between its fields."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from transformer_jax import fields
from transformer_jax.errors import UserError
from transformer_jax.models.alignment import ALIGNMENTS
from transformer_jax.models.cells import CELLS
from transformer_jax.models.layers import TokenVectors

Array = jax.Array

SUMMARIES = ("initial", "every_step")
ENCODERS = ("recurrent", "none")
READOUTS = ("linear", "maxout")
MAY_BE_ZERO = ("pyramid_layers", "local_window", "teacher_forcing_steps")


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """Config of `RecurrentSeq2Seq`.

    `attention` selects the model; the other fields are options of the papers.
    """

    architecture: str = dataclasses.field(default="recurrent", kw_only=True)
    source_vocab_size: int = fields.size(10_000, 304)
    target_vocab_size: int = fields.size(10_000, 304)
    cell: str = "gru"
    num_layers: int = 1
    # further layers of the encoder, each with half the positions of the one below (Chan
    # et al. 2016)
    pyramid_layers: int = 0
    embedding_dim: int = fields.size(256, 8)  # E
    # C: output at each position, both directions together
    encoder_dim: int = fields.size(512, 32, like="d_model")
    d_model: int = fields.size(512, 16)  # D: the decoder's state
    bidirectional: bool = False
    # "none": attention reads the vectors of the front end, e.g. of an image (Xu et al.
    # 2015), and `encoder_dim` is their width. `pyramid_layers`, `bidirectional` and
    # `reverse_source` need "recurrent".
    encoder: str = "recurrent"
    # a unidirectional encoder reads the source backwards (Sutskever et al. 2014)
    reverse_source: bool = False
    attention: str = "none"
    # How the decoder uses the encoder's last state without attention. "initial": as its
    # first state (Sutskever et al. 2014). "every_step": also as an input to every step
    # and to the readout (Cho et al. 2014).
    summary: str = "initial"
    # hidden units of "additive" and "concat" attention
    attention_dim: int = fields.size(512, 8)
    num_heads: int = fields.size(8, 8)  # of "multi_head" attention
    # each step's output is an input to the next step (Luong et al. 2015, Section 3.3)
    input_feeding: bool = False
    # D of Luong et al.'s local-p attention; 0 for global attention
    local_window: int = 0
    damping: bool = False  # see `alignment.damped_scores`
    # a scalar gate on the context of "additive" attention (Xu et al. 2015)
    context_gate: bool = False
    # How additive attention and summary = "every_step" combine state, context and
    # previous word before the output layer. "linear": concatenated. "maxout": a maxout
    # layer (Goodfellow et al. 2013).
    readout: str = "linear"
    readout_dim: int = fields.size(500, 8)  # of "maxout"
    # The share of training steps in which the decoder reads the reference word, not the
    # word it predicted. The share changes linearly from teacher_forcing to
    # teacher_forcing_end over teacher_forcing_steps updates (Bengio et al. 2015,
    # Section 2.4). With 0 updates it stays at teacher_forcing.
    teacher_forcing: float = fields.random(1.0, 1.0)
    teacher_forcing_end: float = fields.random(1.0, 1.0)
    teacher_forcing_steps: int = fields.random(0, 0)
    dropout_rate: float = fields.random(0.5, 0.0)
    max_length: int = fields.size(1024, 32)
    vocab_multiple: int = 1
    dtype: str = fields.how("float32")  # of the products outside the cells

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        for name, value in dataclasses.asdict(self).items():
            least = 0 if name in MAY_BE_ZERO else 1
            if type(value) is int and value < least:
                yield name, f"must be at least {least}"
        if not 0 <= self.dropout_rate < 1:
            yield "dropout_rate", "must be in [0, 1)"
        for name in ("teacher_forcing", "teacher_forcing_end"):
            if not 0 <= getattr(self, name) <= 1:
                yield name, "must be in [0, 1]; 1 always feeds the reference word"
        choices = {
            "cell": tuple(CELLS),
            "attention": ("none", *ALIGNMENTS),
            "summary": SUMMARIES,
            "encoder": ENCODERS,
            "readout": READOUTS,
        }
        choices |= {"architecture": ("recurrent",), "dtype": ("float32", "bfloat16")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                yield name, f"must be one of {', '.join(allowed)}"
        if self.teacher_forcing_end != 1 and not self.teacher_forcing_steps:
            yield (
                "teacher_forcing_end",
                (
                    "needs teacher_forcing_steps: "
                    "set that to at least 1, or leave this at 1.0"
                ),
            )
        if self.bidirectional and self.encoder_dim % 2:
            yield (
                "encoder_dim",
                (
                    "must be even, "
                    "because each direction of a bidirectional encoder has half of it"
                ),
            )
        if self.bidirectional and self.reverse_source:
            yield (
                "reverse_source",
                "needs a unidirectional encoder: set this or bidirectional to False",
            )
        if self.encoder == "none":
            yield from self._problems_without_encoder()
        elif not self.bidirectional and self.encoder_dim != self.d_model:
            rule = (
                f"must be equal to d_model = {self.d_model}, "
                "because the encoder's last state is the decoder's first"
            )
            yield "encoder_dim", f"{rule}: change it or set bidirectional to True"
        if self.attention == "dot" and self.encoder_dim != self.d_model:
            rule = f"must be equal to d_model = {self.d_model} for 'dot' attention"
            yield "encoder_dim", f"{rule}: change it or set attention to 'general'"
        if self.context_gate and self.attention != "additive":
            yield (
                "context_gate",
                "needs attention = 'additive': change that, or set this to False",
            )
        if self.attention == "multi_head" and self.d_model % self.num_heads:
            yield "num_heads", f"must divide d_model = {self.d_model}"
        if (
            self.attention == "none"
            and self.bidirectional
            and self.summary == "initial"
        ):
            yield (
                "summary",
                (
                    "would ignore the forward direction of the encoder: "
                    "set it to 'every_step'"
                ),
            )
        for name in ("input_feeding", "local_window"):
            if getattr(self, name) and self.decoder != "luong":
                rest = "concat, dot, general, scaled_dot or multi_head"
                yield (
                    name,
                    f"needs Luong's decoder: switch it off, or set attention to {rest}",
                )
        if self.local_window and self.attention == "multi_head":
            yield (
                "local_window",
                (
                    "needs attention with one head: "
                    "set it to 0, or attention to 'scaled_dot'"
                ),
            )
        if self.readout == "maxout" and not self.reads_context:
            rest = (
                "attention = 'additive', "
                "or attention = 'none' with summary = 'every_step'"
            )
            yield "readout", f"needs {rest}: change these, or set readout to 'linear'"
        if self.summary == "every_step" and self.attention != "none":
            yield (
                "summary",
                "needs attention = 'none': change that, or set summary to 'initial'",
            )
        if self.damping and self.attention not in ("scaled_dot", "multi_head"):
            yield (
                "damping",
                (
                    "needs scores q·k/√d: "
                    "set attention to 'scaled_dot' or 'multi_head', or damping to False"
                ),
            )

    def _problems_without_encoder(self) -> Iterator[tuple[str, str]]:
        for name in ("bidirectional", "reverse_source"):
            if getattr(self, name):
                yield name, "needs encoder = 'recurrent': set this to False"
        if self.pyramid_layers:
            yield "pyramid_layers", "needs encoder = 'recurrent': set this to 0"

    @property
    def decoder(self) -> str:
        """The decoder that the options select: a name in `decoders.DECODERS`."""
        if self.attention == "none":
            return "plain" if self.summary == "initial" else "cho"
        return "bahdanau" if self.attention == "additive" else "luong"

    @property
    def reads_context(self) -> bool:
        """True if the decoder's output depends directly on context and word.

        The word is the previous one. Otherwise the output depends on both only through
        the state.
        """
        return self.decoder in ("cho", "bahdanau")

    @property
    def output_dim(self) -> int:
        """Width of the decoder's output.

        The output layer maps it to the vocabulary.
        """
        if not self.reads_context:
            return self.d_model
        if self.readout == "maxout":
            return self.readout_dim
        return self.d_model + self.encoder_dim + self.embedding_dim

    @property
    def reads_itself(self) -> bool:
        """True if training feeds predicted words back to the decoder."""
        return self.teacher_forcing < 1 or (
            self.teacher_forcing_steps > 0 and self.teacher_forcing_end < 1
        )

    def teacher_forcing_at(self, step: Array | int) -> Array:
        """Return the share of reference words that the decoder reads.

        `step` = 0, 1, … is the number of the update.
        """
        if not self.teacher_forcing_steps:
            return jnp.asarray(self.teacher_forcing)
        passed = jnp.minimum(step / self.teacher_forcing_steps, 1)
        change = self.teacher_forcing_end - self.teacher_forcing
        return self.teacher_forcing + change * passed

    @property
    def shares_tables(self) -> bool:
        """Always False: source and target have separate embeddings."""
        return False

    @property
    def token_vectors(self) -> TokenVectors:
        """The vectors of source and target tokens."""
        factor = self.embedding_dim**0.5
        return TokenVectors("embedding_dim", self.embedding_dim, factor, False)

    @property
    def source_width(self) -> int:
        """The width of the vectors that front ends return."""
        return self.encoder_dim if self.encoder == "none" else self.embedding_dim

    @property
    def memory_width(self) -> int:
        """The width of the vectors that the encoder writes."""
        return self.encoder_dim

    @property
    def memory_stride(self) -> int:
        """The positions that the encoder reads for each that it writes."""
        return 2**self.pyramid_layers

    @property
    def source_dropout_rate(self) -> float:
        """The dropout of front ends. It is 0 if an encoder follows that has its own."""
        return self.dropout_rate if self.encoder == "none" else 0.0

    @property
    def source_positions(self) -> str:
        """The kind of positions that front ends add: none."""
        return "none"

    @property
    def needs_warmup(self) -> bool:
        """Always False: the learning rate needs no warm-up."""
        return False

    def check(self) -> None:
        """Raise ValueError for the first of `problems`."""
        for field, rule in self.problems():
            raise UserError(
                f"RecurrentConfig.{field} = {getattr(self, field)!r}: {rule}"
            )
