"""Continuations of prompts by a language model.

They are written in pieces: between two pieces, the host can look at the text, show it,
and end what is complete.

Shapes: B prompts · K continuations of each · N = B·K rows · P width of the prompts · E
`max_extra`, the largest number of tokens of a continuation · V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from transformer_jax.decoding import loop
from transformer_jax.decoding.caches import packing
from transformer_jax.decoding.distributions import draw, row_keys
from transformer_jax.decoding.loop import Continuations
from transformer_jax.decoding.options import GenerationConfig
from transformer_jax.decoding.rules import rules
from transformer_jax.decoding.steps import Cache, never_chosen
from transformer_jax.models.caches import pack, repeat_rows, unpack

# Maps (cache, tokens (N, T), their place in the cache, the places (N,) at which the
# rows begin) to logits (N, T, V) and the cache with the tokens added.
Extend = Callable[
    [Cache, jax.Array, jax.Array | int, jax.Array], tuple[jax.Array, Cache]
]


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
        width = prompts.shape[1]
        # The prompts are moved to the right, so that all end at the same place.
        places = jnp.arange(width)[None] - (width - lengths)[:, None]
        moved = jnp.take_along_axis(prompts, jnp.maximum(places, 0), axis=1)
        if width > 1:
            _, cache = self.extend(cache, moved[:, :-1], 0, width - lengths)
        no_token = jnp.iinfo(jnp.int32).max
        prompt = jnp.where(places >= 0, moved, no_token)
        cache, newest, prompt, finished = repeat_rows(
            (cache, moved[:, -1], prompt, lengths == 0), self.copies
        )
        start = loop.begin(cache, newest, prompt, self.options.max_extra, self.fill)
        return start._replace(finished=finished)

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
        begins = jnp.repeat(width - lengths, self.copies)
        rows = written.newest.shape[0]

        def step(
            cache: Cache, newest: jax.Array, position: jax.Array
        ) -> tuple[jax.Array, Cache]:
            logits, cache = self.extend(cache, newest[:, None], position, begins)
            return logits[:, 0], cache

        written = loop.write(
            packing(step, rows),
            self._choose(width, begins, row_ids),
            written._replace(cache=pack(written.cache, rows)),
            ends=self._ends,
            fill=self.fill,
            most=steps,
        )
        return written._replace(cache=unpack(written.cache, rows))

    @property
    def _ends(self) -> tuple[int, ...]:
        """The ids that end a continuation."""
        end = () if self.eos_id is None else (self.eos_id,)
        return (*end, *self.options.end_ids)

    def _choose(self, width: int, begins: jax.Array, row_ids: jax.Array) -> loop.Choose:
        """Return the function that chooses the next token of every row."""
        options = self.options
        keys = row_keys(jax.random.key(options.seed), row_ids, self.copies)

        def drawn(allowed: jax.Array, position: jax.Array) -> jax.Array:
            return draw(
                allowed,
                keys,
                position - begins,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
            )

        forbidden = never_chosen(self.bos_id, self.pad_id, self._ends)
        draws = options.temperature and not self.greedy
        return functools.partial(
            loop.next_token,
            forbidden=forbidden,
            vocab_size=self.vocab_size,
            change=rules(options, self._ends, forbidden, width),
            draw=drawn if draws else None,
        )
