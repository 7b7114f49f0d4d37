"""The loop that adds one token at a time, and what it serves: greedy search and
sampling.

See the package for the shapes. G is the number of tokens that are given: 1 for BOS, or
the width of the prompts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.decoding import caches
from transformer_jax.decoding.distributions import (
    best_tokens,
    draw,
    exclude,
    log_probability,
    row_keys,
)
from transformer_jax.decoding.steps import (
    Cache,
    Change,
    Hypotheses,
    Step,
    is_end,
    never_chosen,
    take,
)

# Maps logits (N, V), the text so far (N, G + T) and the position of the newest token to
# the next token of each row and its log-probability, both (N,).
Choose = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Continuations(NamedTuple):
    """Continuations of given tokens. They may grow further.

    The rows (N) are the first axis of every leaf.
    """

    cache: Cache  # everything but the newest token
    newest: jax.Array  # (N,) int32
    # (N, G + T) int32: what is given and its continuation, filled up after the end
    text: jax.Array
    # (N, T) float32: of each token, by the model's own distribution; 0 after the end
    log_probabilities: jax.Array
    finished: jax.Array  # (N,) bool
    written: jax.Array  # (N,) int32: the number of tokens so far, the same in all rows

    @property
    def tokens(self) -> jax.Array:
        """The continuations alone, (N, T)."""
        return self.text[:, -self.log_probabilities.shape[1] :]


def begin(
    cache: Cache,
    newest: jax.Array,
    given: jax.Array,
    max_length: int,
    fill: int,
) -> Continuations:
    """Return continuations of `given` (N, G) without a token so far, and with room for
    T = `max_length` tokens.

    `newest` (N,) is the last given token of each row. `fill` is the id after the end.
    """
    rows = given.shape[0]
    return Continuations(
        cache=cache,
        newest=newest,
        text=jnp.pad(given, ((0, 0), (0, max_length)), constant_values=fill),
        log_probabilities=jnp.zeros((rows, max_length), jnp.float32),
        finished=jnp.zeros(rows, bool),
        written=jnp.zeros(rows, jnp.int32),
    )


def write(
    step: Step,
    choose: Choose,
    continuations: Continuations,
    *,
    ends: Sequence[int],
    fill: int,
    most: jax.Array | int,
) -> Continuations:
    """Add up to `most` tokens to every row that is not finished, but no more than T in
    total.

    ends: the ids that end a row, or none.
    fill: the id after the end.
    """
    max_length = continuations.log_probabilities.shape[1]
    given = continuations.text.shape[1] - max_length
    first = continuations.written.max()
    limit = jnp.minimum(first + most, max_length)

    def unfinished(state: tuple[jax.Array, Continuations]) -> jax.Array:
        count, so_far = state
        return (count < limit) & ~so_far.finished.all()

    def advance(
        state: tuple[jax.Array, Continuations],
    ) -> tuple[jax.Array, Continuations]:
        count, so_far = state
        position = given - 1 + count
        logits, cache = step(so_far.cache, so_far.newest, position)
        token, log_probability = choose(logits, so_far.text, position)
        finished = so_far.finished
        newest = jnp.where(finished, so_far.newest, token)
        log_probability = jnp.where(finished, 0.0, log_probability)
        token = jnp.where(finished, fill, token)
        if ends:
            finished |= is_end(token, ends)
        return count + 1, so_far._replace(
            cache=cache,
            newest=newest,
            text=so_far.text.at[:, position + 1].set(token),
            log_probabilities=so_far.log_probabilities.at[:, count].set(
                log_probability
            ),
            finished=finished,
        )

    count, written = jax.lax.while_loop(unfinished, advance, (first, continuations))
    return written._replace(written=jnp.full_like(written.written, count))


def next_token(
    logits: jax.Array,
    text: jax.Array,
    position: jax.Array,
    *,
    forbidden: Sequence[int],
    vocab_size: int | None,
    change: Change | None,
    draw: Callable[[jax.Array, jax.Array], jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the next token of each row (N,) and its log-probability (N,) by the
    model's own distribution.

    The stages have the order of Hugging Face's `generate`: the ids `forbidden` and ids
    ≥ `vocab_size` are excluded; `change`; then the most probable token is taken, or
    `draw` maps the logits and the position to one.
    """
    allowed = exclude(logits, forbidden, vocab_size)
    if change is not None:
        allowed = change(allowed, text, position)
    if draw is None:
        token = allowed.argmax(axis=-1).astype(jnp.int32)
    else:
        token = draw(allowed, position)
    return token, log_probability(logits, token)


def _outputs(
    step: Step,
    cache: Cache,
    choose: Choose,
    rows: int,
    max_length: int,
    bos_id: int,
    ends: Sequence[int],
    fill: int,
) -> tuple[jax.Array, jax.Array]:
    """Write after BOS alone → tokens (N, T) and their total log-probabilities (N,)."""
    given = jnp.full((rows, 1), bos_id, jnp.int32)
    start = begin(cache, given[:, 0], given, max_length, fill)
    written = write(step, choose, start, ends=ends, fill=fill, most=max_length)
    # from the first token to the last, so that rounding does not depend on T
    total, _ = jax.lax.scan(
        lambda total, added: (total + added, None),
        jnp.zeros(rows, jnp.float32),
        written.log_probabilities.T,
    )
    return written.tokens, total


def greedy(
    step: Step,
    cache: Cache,
    *,
    batch_size: int,
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int | None,
    end_ids: Sequence[int] = (),
    change: Change | None = None,
) -> Hypotheses:
    """Choose the most probable token at every position until EOS. K = 1, and scores are
    log-probabilities.

    With `change`, the token is the best one by the changed logits.
    """
    ends = (eos_id, *end_ids)
    forbidden = never_chosen(bos_id, pad_id, ends)

    def best(
        logits: jax.Array,
        text: jax.Array,
        position: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Return what `next_token` would; on CPUs, this is faster."""
        log_probabilities, tokens = best_tokens(logits, 1, forbidden)
        column = log_probabilities.argmax(axis=-1, keepdims=True)
        token = jnp.take_along_axis(tokens, column, axis=-1)[:, 0]
        return token, log_probabilities.max(axis=-1)

    def changed(
        logits: jax.Array,
        text: jax.Array,
        position: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        return next_token(
            logits,
            text,
            position,
            forbidden=forbidden,
            vocab_size=None,
            change=change,
            draw=None,
        )

    tokens, total = _outputs(
        step,
        cache,
        best if change is None else changed,
        rows=batch_size,
        max_length=max_length,
        bos_id=bos_id,
        ends=ends,
        fill=eos_id if pad_id is None else pad_id,
    )
    return Hypotheses(tokens[:, None], total[:, None], total[:, None])


def sample(
    step: Step,
    cache: Cache,
    *,
    key: jax.Array,
    row_ids: jax.Array,
    temperature: float,
    top_k: int,
    top_p: float,
    num_samples: int,
    batch_size: int,
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int | None,
    end_ids: Sequence[int] = (),
    vocab_size: int | None = None,
    change: Change | None = None,
) -> Hypotheses:
    """Draw K = `num_samples` independent outputs for each row, ordered by score.

    Outputs may be equal.

    The score of an output is its log-probability under the model's own distribution,
    before `change` and `truncate`.

    `cache` has B rows; this function repeats each of them K times. `row_ids` (B,) are
    integers that identify the rows. The draws of a row depend only on `key` and its id,
    not on the rest of the batch or on the row's place in it. Ids ≥ `vocab_size` are
    never drawn, although label smoothing gives them some probability. Tokens with a
    probability below about 1e-7 are hardly ever drawn, because of the limited range of
    Gumbel noise in float32.

    Raises ValueError if `temperature`, `top_k` or `top_p` is out of range, see
    `truncate`.
    """
    ends = (eos_id, *end_ids)
    keys = row_keys(key, row_ids, num_samples)

    def drawn(allowed: jax.Array, position: jax.Array) -> jax.Array:
        return draw(
            allowed,
            keys,
            jnp.broadcast_to(position, keys.shape),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )

    def choose(
        logits: jax.Array,
        text: jax.Array,
        position: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        return next_token(
            logits,
            text,
            position,
            forbidden=never_chosen(bos_id, pad_id, ends),
            vocab_size=vocab_size,
            change=change,
            draw=drawn,
        )

    cache = caches.repeat(cache, num_samples)
    tokens, total = _outputs(
        step,
        cache,
        choose,
        rows=batch_size * num_samples,
        max_length=max_length,
        bos_id=bos_id,
        ends=ends,
        fill=eos_id if pad_id is None else pad_id,
    )
    total, order = jax.lax.top_k(total.reshape(batch_size, -1), num_samples)
    tokens = take(tokens.reshape(batch_size, num_samples, max_length), order)
    return Hypotheses(tokens, total, total)
