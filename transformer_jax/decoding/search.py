"""The choice of a method by the options. See the package for the shapes."""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.decoding.beam import beam_search
from transformer_jax.decoding.loop import greedy, sample
from transformer_jax.decoding.options import DecodingConfig, SamplingConfig
from transformer_jax.decoding.rules import rules
from transformer_jax.decoding.steps import (
    Cache,
    Hypotheses,
    Step,
    certain,
    never_chosen,
)


def search(
    step: Step,
    cache: Cache,
    options: SamplingConfig,
    *,
    only_greedy: bool,
    row_ids: jax.Array,
    vocab_size: int,
    **common: Any,
) -> Hypotheses:
    """Return the `options.n_best` outputs of each row, best first, from the method that
    the options select.

    With `only_greedy`, it is greedy search with one output, whatever the options.
    `common` are `batch_size`, `max_length`, `bos_id`, `eos_id` and `pad_id`. See
    `sample` for the other arguments.
    """
    if isinstance(options, DecodingConfig) and options.at_limit == "end":
        step = _ended(step, common["max_length"] - 1, common["eos_id"])
    ends = (common["eos_id"], *options.end_ids)
    change = rules(
        options, ends, never_chosen(common["bos_id"], common["pad_id"], ends)
    )
    common |= {"end_ids": options.end_ids, "change": change}
    if options.temperature and not only_greedy:
        return sample(
            step,
            cache,
            key=jax.random.key(options.seed),
            row_ids=row_ids,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            num_samples=options.n_best,
            vocab_size=vocab_size,
            **common,
        )
    if beams(options, only_greedy) == 1 or not isinstance(options, DecodingConfig):
        return greedy(step, cache, **common)
    hypotheses = beam_search(
        step,
        cache,
        beam_size=options.most_found,
        length_penalty=options.length_penalty,
        length_penalty_form=options.length_penalty_form,
        n_best=options.n_best,
        stopping_rule=options.stopping_rule,
        ranks_cut=options.at_limit == "rank",
        **common,
    )
    return jax.tree.map(lambda x: x[:, : options.n_best], hypotheses)


def _ended(step: Step, last: int, eos_id: int) -> Step:
    """Return `step` with EOS certain after the token at position `last`."""

    def ended(
        cache: Cache, tokens: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, Cache]:
        logits, cache = step(cache, tokens, position)
        return jnp.where(
            position == last, certain(eos_id, logits.shape[-1])[None], logits
        ), cache

    return ended


def copies(options: SamplingConfig, only_greedy: bool) -> int:
    """Return K, the number of rows that `search` passes to `step` for each row of
    the cache.
    """
    if only_greedy:
        return 1
    return options.n_best if options.temperature else options.most_found


def beams(options: SamplingConfig, only_greedy: bool) -> int:
    """Return the number of beams if `search` is a beam search, and 1 otherwise."""
    return 1 if options.temperature else copies(options, only_greedy)
