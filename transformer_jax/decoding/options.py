"""Config sections of decoding."""

import dataclasses
import fractions
import math
from collections.abc import Iterator

from transformer_jax.decoding.beam import LENGTH_PENALTY_FORMS, STOPPING_RULES
from transformer_jax.decoding.distributions import LEAST_TEMPERATURE
from transformer_jax.fields import size


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Settings for sampling and for the length of outputs."""

    # longest output in tokens; `DecodingConfig` adds max_ratio · S to it
    max_extra: int = size(50, small=5)
    # 0 searches for the most probable output; a positive value samples, see `sample`
    temperature: float = 0.0
    top_k: int = 0  # 0 for all tokens
    top_p: float = 1.0  # 1 for all tokens
    seed: int = 0  # of the random draws; the draws of each record are independent
    n_best: int = 1  # number of outputs for each record
    # ids that end an output, besides the end id of the tokenizer
    end_ids: tuple[int, ...] = ()
    forbidden_ids: tuple[int, ...] = ()  # ids that are never chosen
    # shortest output in tokens, with the one that ends it; 0 and 1 allow any
    min_tokens: int = 0
    # no sequence of this many tokens occurs twice; 0 for no rule
    no_repeat_ngram: int = 0
    repetition_penalty: float = 1.0  # θ, see `penalize`; 1 for none

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.max_extra < 1:
            yield (
                "max_extra",
                (
                    "must be at least 1, because outputs could otherwise be empty; "
                    "use 50 if in doubt"
                ),
            )
        draws = self.temperature != 0
        if draws and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            yield (
                "temperature",
                (
                    f"must be finite, 0 or at least {LEAST_TEMPERATURE}; "
                    "use 0 for the most probable output, "
                    "1.0 to sample from the model's own distribution"
                ),
            )
        if self.top_k < 0:
            yield "top_k", "must be at least 0; use 0 to sample from all tokens"
        elif self.top_k and not draws:
            yield (
                "top_k",
                "needs sampling: set decoding.temperature, e.g. to 1.0, or top_k to 0",
            )
        if not 0 < self.top_p <= 1:
            yield "top_p", "must be in (0, 1]; use 1.0 to sample from all tokens"
        elif self.top_p < 1 and not draws:
            yield (
                "top_p",
                (
                    "needs sampling: "
                    "set decoding.temperature, e.g. to 1.0, or top_p to 1.0"
                ),
            )
        if not 0 <= self.seed < 2**31:
            yield "seed", "must be in [0, 2³¹)"
        if self.n_best < 1:
            yield "n_best", "must be at least 1"
        elif self.n_best > self.most_found and not draws:
            yield (
                "n_best",
                (
                    f"must be at most {self.most_found}, the number of outputs "
                    "that a search finds: raise decoding.beam_size to n_best "
                    "(encoder–decoders only), or sample with decoding.temperature = 1.0"
                ),
            )
        for name in ("end_ids", "forbidden_ids"):
            if any(i < 0 for i in getattr(self, name)):
                yield (
                    name,
                    (
                        "must hold ids of the vocabulary, which are at least 0; "
                        "use () for none"
                    ),
                )
        for name in ("min_tokens", "no_repeat_ngram"):
            if getattr(self, name) < 0:
                yield name, "must be at least 0, which is no rule"
        if not 0 < self.repetition_penalty < math.inf:
            yield (
                "repetition_penalty",
                (
                    "must be finite, positive; "
                    "use 1.0 for none, 1.2 for Keskar et al. 2019"
                ),
            )

    @property
    def most_found(self) -> int:
        """The number of outputs that a search finds."""
        return 1


@dataclasses.dataclass(frozen=True)
class GenerationConfig(SamplingConfig):
    """Settings for the continuation of prompts by a language model."""

    # a continuation ends before the first of these strings in it
    stop_strings: tuple[str, ...] = ()
    # follows every turn of a prompt that is given as several turns
    turn_separator: str = "\n"
    # the begin id precedes prompts, texts to score, and texts of training and
    # evaluation
    prepend_begin: bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if not all(isinstance(string, str) and string for string in self.stop_strings):
            yield (
                "stop_strings",
                "must hold strings that are not empty, e.g. ('\\n',); use () for none",
            )


@dataclasses.dataclass(frozen=True)
class DecodingConfig(SamplingConfig):
    """Settings for beam search, greedy search or sampling with an encoder–decoder, and
    for the length of outputs.

    Outputs have at most max_ratio · S + max_extra tokens, where S is the length of the
    padded source.
    """

    beam_size: int = 4  # 1 for greedy search; ignored by sampling
    length_penalty: float = 0.6  # α; 0 ranks by probability alone
    length_penalty_form: str = "wu"  # "wu" or "power", see `lp`
    stopping_rule: str = "exact"  # when a beam search ends, see `beam_search`
    # Outputs of the largest length without EOS: "cut": a beam search ranks them below
    # those that have ended. "rank": it ranks them among these. "end": their last token
    # becomes EOS, at no cost.
    at_limit: str = "cut"
    max_ratio: float = 1.0  # tokens of output per position of the padded source
    # the id that every output begins with, e.g. of a language; -1 for any
    first_id: int = -1
    # beam search ranks by probabilities that sum to 1 over the tokens that may be
    # chosen
    renormalize: bool = False

    def max_length(self, source_length: int) -> int:
        """Return T for sources padded to `source_length` positions."""
        ratio = fractions.Fraction(str(self.max_ratio))
        share = source_length * ratio.numerator // ratio.denominator
        return share + self.max_extra

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.beam_size < 1:
            yield (
                "beam_size",
                (
                    "must be at least 1; "
                    "use 1 for greedy search, 4 for Vaswani et al. 2017"
                ),
            )
        if not 0 <= self.length_penalty < math.inf:
            yield (
                "length_penalty",
                (
                    "must be finite, at least 0; "
                    "use 0 for none, 0.6 for Vaswani et al. 2017"
                ),
            )
        if self.length_penalty_form not in LENGTH_PENALTY_FORMS:
            yield (
                "length_penalty_form",
                f"must be one of {', '.join(LENGTH_PENALTY_FORMS)}; use wu if in doubt",
            )
        if self.stopping_rule not in STOPPING_RULES:
            yield (
                "stopping_rule",
                f"must be one of {', '.join(STOPPING_RULES)}; use exact if in doubt",
            )
        if self.at_limit not in ("cut", "rank", "end"):
            yield (
                "at_limit",
                "must be cut, or end for outputs that always end in EOS, or rank",
            )
        if self.first_id < -1:
            yield (
                "first_id",
                "must be an id of the vocabulary, or -1 for any first token",
            )
        if not 0 <= self.max_ratio < math.inf:
            yield (
                "max_ratio",
                (
                    "must be finite, at least 0; "
                    "use 1.0 for outputs about as long as their sources"
                ),
            )

    @property
    def most_found(self) -> int:
        return max(self.beam_size, 1)
