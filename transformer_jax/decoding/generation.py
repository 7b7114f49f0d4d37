"""Continuations of prompts by a language model.

They are written in pieces: between two pieces, the host can look at the text, show it,
and end what is complete.

Shapes: B prompts · K continuations of each · N = B·K rows · P width of the prompts · E
`max_extra`, the largest number of tokens of a continuation · V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.decoding.options import GenerationConfig
from transformer_jax.decoding.rules import Rules, rules
from transformer_jax.decoding.sampling import draw, log_probability, row_keys
from transformer_jax.decoding.steps import Cache, is_end, never_chosen

# Maps (cache, tokens (N, T), their place in the cache, the places (N,) at which the
# rows begin) to logits (N, T, V) and the cache with the tokens added.
Extend = Callable[
    [Cache, jax.Array, jax.Array | int, jax.Array], tuple[jax.Array, Cache]
]


class Continuations(NamedTuple):
    """Continuations that may grow further.

    The rows (N) are the first axis of every leaf.
    """

    cache: Cache  # everything but the newest token
    newest: jax.Array  # (N,) int32
    # (N, P + E) int32: prompt and continuation; other places hold ids ≥ V; None if
    # unused
    past: jax.Array | None
    tokens: jax.Array  # (N, E) int32; filled up after the end, see `Writer.fill`
    # (N, E) float32: of each token, by the model's own distribution; 0 after the end
    log_probabilities: jax.Array
    finished: jax.Array  # (N,) bool
    written: jax.Array  # (N,) int32: the number of tokens so far, the same in all rows


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes continuations with `extend`, a function of a model.

    At each step, the logits of the next token pass through these stages, which have the
    order of Hugging Face's `generate`: PAD, BOS and ids ≥ `vocab_size` are excluded;
    `Rules`; then the most probable token is taken, or one is drawn from the
    distribution of `truncate`. The draws of a row depend on the seed, on its id, on the
    number of the continuation, and on the number of tokens before the draw, not on the
    other rows.

    With `greedy`, there is one continuation of each prompt, of most probable tokens,
    whatever the options. Special ids that the vocabulary does not have are None.
    Without EOS, all continuations have E tokens.
    """

    extend: Extend
    options: GenerationConfig
    greedy: bool
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None

    @property
    def copies(self) -> int:
        """K."""
        return 1 if self.greedy else self.options.n_best

    @property
    def fill(self) -> int:
        """The id after the end of a continuation: PAD; if there is none, EOS; if
        there is neither, `vocab_size`.
        """
        return next(
            i for i in (self.pad_id, self.eos_id, self.vocab_size) if i is not None
        )

    def begin(
        self, cache: Cache, prompts: jax.Array, lengths: jax.Array
    ) -> Continuations:
        """Read prompts (B, P) of `lengths` (B,) into an empty cache of B rows with room
        for P + E - 1 tokens.

        A prompt without tokens is finished.
        """
        (B, P), K, E = prompts.shape, self.copies, self.options.max_extra
        # The prompts are moved to the right, so that all end at the same place.
        places = jnp.arange(P)[None] - (P - lengths)[:, None]
        moved = jnp.take_along_axis(prompts, jnp.maximum(places, 0), axis=1)
        if P > 1:
            _, cache = self.extend(cache, moved[:, :-1], 0, P - lengths)
        past = None
        if self._rules(P) is not None:
            nothing = jnp.iinfo(jnp.int32).max
            prompt = jnp.where(places >= 0, moved, nothing)
            past = jnp.pad(prompt, ((0, 0), (0, E)), constant_values=nothing)
        cache, newest, past, finished = jax.tree.map(
            lambda x: jnp.repeat(x, K, axis=0),
            (cache, moved[:, -1], past, lengths == 0),
        )
        tokens, log_probabilities = (
            jnp.full((B * K, E), self.fill, jnp.int32),
            jnp.zeros((B * K, E), jnp.float32),
        )
        written = jnp.zeros(B * K, jnp.int32)
        return Continuations(
            cache, newest, past, tokens, log_probabilities, finished, written
        )

    def proceed(
        self,
        written: Continuations,
        width: int,
        lengths: jax.Array,
        row_ids: jax.Array,
        steps: jax.Array | int,
    ) -> Continuations:
        """Add up to `steps` tokens to every row that is not finished, but no more than
        E in total.

        `width` is P, and the other arguments are as in `begin`. `row_ids` (B,) are
        integers that identify the prompts.
        """
        K, options = self.copies, self.options
        start, keys = (
            jnp.repeat(width - lengths, K),
            row_keys(jax.random.key(options.seed), row_ids, K),
        )
        first = written.written.max()
        limit = jnp.minimum(first + steps, options.max_extra)

        def unfinished(carry: tuple[jax.Array, Continuations]) -> jax.Array:
            count, so_far = carry
            return (count < limit) & ~so_far.finished.all()

        def advance(
            carry: tuple[jax.Array, Continuations],
        ) -> tuple[jax.Array, Continuations]:
            count, so_far = carry
            position = width - 1 + count
            cache = (
                jax.tree.map(lambda x: x[None], so_far.cache)
                if single
                else so_far.cache
            )
            logits, cache = self.extend(cache, so_far.newest[:, None], position, start)
            cache = jax.tree.map(lambda x: x[0], cache) if single else cache
            token, added = self._choose(
                logits[:, 0], so_far.past, keys, position, start, width
            )
            ended = so_far.finished
            newest = jnp.where(ended, so_far.newest, token)
            token, added = (
                jnp.where(ended, self.fill, token),
                jnp.where(ended, 0.0, added),
            )
            past = so_far.past
            if past is not None:
                past = past.at[:, position + 1].set(token)
            tokens = so_far.tokens.at[:, count].set(token)
            log_probabilities = so_far.log_probabilities.at[:, count].set(added)
            if self._ends:
                ended |= is_end(token, self._ends)
            return count + 1, Continuations(
                cache,
                newest,
                past,
                tokens,
                log_probabilities,
                ended,
                jnp.full_like(so_far.written, count + 1),
            )

        # Between steps, the cache of a single row has no axis for rows: with it, XLA
        # for CPUs would copy the cache four times at every step.
        single = len(written.newest) == 1
        if single:
            written = written._replace(
                cache=jax.tree.map(lambda x: x[0], written.cache)
            )
        written = jax.lax.while_loop(unfinished, advance, (first, written))[1]
        return (
            written._replace(cache=jax.tree.map(lambda x: x[None], written.cache))
            if single
            else written
        )

    @property
    def _ends(self) -> tuple[int, ...]:
        """The ids that end a continuation."""
        return (*(() if self.eos_id is None else (self.eos_id,)), *self.options.end_ids)

    @property
    def _forbidden(self) -> list[int]:
        return never_chosen(self.bos_id, self.pad_id, self._ends)

    def _rules(self, width: int) -> Rules | None:
        """Return what changes logits, given the width of the prompts."""
        return rules(self.options, self._ends, self._forbidden, width)

    def _choose(
        self,
        logits: jax.Array,
        past: jax.Array | None,
        keys: jax.Array,
        position: jax.Array,
        start: jax.Array,
        width: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the next token (N,) and its log-probability (N,), given logits (N,
        V).
        """
        forbidden, options = jnp.array(self._forbidden, jnp.int32), self.options
        allowed = (
            logits.at[:, forbidden].set(-jnp.inf).at[:, self.vocab_size :].set(-jnp.inf)
        )
        change = self._rules(width)
        if change is not None and past is not None:
            allowed = change(allowed, past, position)
        if self.greedy or not options.temperature:
            token = allowed.argmax(axis=-1).astype(jnp.int32)
        else:
            token = draw(
                allowed,
                keys,
                position - start,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
            )
        return token, log_probability(logits, token)
