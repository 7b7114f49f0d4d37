"""Greedy search, beam search and sampling for any model that provides a step function and a cache.

A `Step` takes the cache, the newest token of every row (N,) int32, and the position of this token, a scalar int32. The
position is also the number of tokens already in the cache. The step returns the logits of the next token (N, V)
float32, and the cache with the newest token added. A cache is any pytree whose leaves have the rows as their first
axis.

Greedy search has N = B rows. Beam search and sampling have N = B·K rows; the K beams or samples of a batch row are
adjacent. `step` may close over values that these K rows share, e.g. the encoder's output. Leaving such values out of
the cache makes reordering it cheaper.

Shapes: B batch · K beams or samples · V vocabulary · T = `max_length`, the largest number of tokens in an output,
including EOS but not BOS.

PAD and BOS are never chosen, unless EOS has the same id. `pad_id` is None if the vocabulary has no PAD. The
probabilities of PAD and BOS are not redistributed to other tokens. Call these functions under `jit`; keyword arguments
other than arrays are static.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.fields import size

Cache = Any
Step = Callable[[Cache, jax.Array, jax.Array], tuple[jax.Array, Cache]]

LENGTH_PENALTY_FORMS = ("wu", "power")
LEAST_TEMPERATURE = 1e-6  # logits divided by a smaller temperature may overflow float32
IMPOSSIBLE = -1e9  # used for log 0; finite, so that differences are never NaN


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Settings for sampling and for the length of outputs."""

    max_extra: int = size(50, small=5)  # longest output in tokens; `DecodingConfig` adds max_ratio · S to it
    temperature: float = 0.0  # 0 searches for the most probable output; a positive value samples, see `sample`
    top_k: int = 0  # 0 for all tokens
    top_p: float = 1.0  # 1 for all tokens
    seed: int = 0  # of the random draws; the draws of each record are independent
    n_best: int = 1  # number of outputs for each record

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.max_extra < 1:
            yield "max_extra", "must be at least 1, because outputs could otherwise be empty; use 50 if in doubt"
        draws = self.temperature != 0
        if draws and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            yield (
                "temperature",
                f"must be finite, 0 or at least {LEAST_TEMPERATURE}; use 0 for the most probable output, 1.0 to sample "
                "from the model's own distribution",
            )
        if self.top_k < 0:
            yield "top_k", "must be at least 0; use 0 to sample from all tokens"
        elif self.top_k and not draws:
            yield "top_k", "needs sampling: set decoding.temperature, e.g. to 1.0, or top_k to 0"
        if not 0 < self.top_p <= 1:
            yield "top_p", "must be in (0, 1]; use 1.0 to sample from all tokens"
        elif self.top_p < 1 and not draws:
            yield "top_p", "needs sampling: set decoding.temperature, e.g. to 1.0, or top_p to 1.0"
        if not 0 <= self.seed < 2**31:
            yield "seed", "must be in [0, 2³¹)"
        if self.n_best < 1:
            yield "n_best", "must be at least 1"
        elif self.n_best > self.most_found and not draws:
            yield (
                "n_best",
                f"must be at most {self.most_found}, the number of outputs that a search finds: raise "
                "decoding.beam_size to n_best (encoder–decoders only), or sample with decoding.temperature = 1.0",
            )

    @property
    def most_found(self) -> int:
        """The number of outputs that a search finds."""
        return 1


@dataclasses.dataclass(frozen=True)
class DecodingConfig(SamplingConfig):
    """Settings for beam search, greedy search or sampling with an encoder–decoder, and for the length of outputs.

    Outputs have at most max_ratio · S + max_extra tokens, where S is the length of the padded source.
    """

    beam_size: int = 4  # 1 for greedy search; ignored by sampling
    length_penalty: float = 0.6  # α; 0 ranks by probability alone
    length_penalty_form: str = "wu"  # "wu" or "power", see `lp`
    max_ratio: float = 1.0  # tokens of output per position of the padded source

    def max_length(self, source_length: int) -> int:
        """Return T for sources padded to `source_length` positions."""
        return int(min(source_length * self.max_ratio, 2**31)) + self.max_extra

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.beam_size < 1:
            yield "beam_size", "must be at least 1; use 1 for greedy search, 4 for Vaswani et al. 2017"
        if not 0 <= self.length_penalty < math.inf:
            yield "length_penalty", "must be finite, at least 0; use 0 for none, 0.6 for Vaswani et al. 2017"
        if self.length_penalty_form not in LENGTH_PENALTY_FORMS:
            yield "length_penalty_form", f"must be one of {', '.join(LENGTH_PENALTY_FORMS)}; use wu if in doubt"
        if not 0 <= self.max_ratio < math.inf:
            yield "max_ratio", "must be finite, at least 0; use 1.0 for outputs about as long as their sources"

    @property
    def most_found(self) -> int:
        return max(self.beam_size, 1)


class Hypotheses(NamedTuple):
    """The K best outputs of each row, best first, or K samples.

    From a search, outputs that end in EOS come first, then outputs cut off at T tokens; each group is ordered by score.
    Samples are ordered by score alone. If there are fewer than K outputs, which happens with tiny vocabularies, the
    remaining places contain only PAD, and their scores are minus infinity.
    """

    tokens: jax.Array  # (B, K, T) int32: without BOS, with EOS, then PAD (EOS if the vocabulary has no PAD)
    scores: jax.Array  # (B, K) float32: log P(Y|X) / lp(Y)
    log_probabilities: jax.Array  # (B, K) float32: log P(Y|X), summed over the tokens including EOS


def lp(length: jax.Array | int, alpha: float, form: str) -> jax.Array:
    """Return the length penalty lp(Y) for |Y| = `length` tokens, including EOS.

    form: "wu" is ((5 + |Y|) / 6)^α (Wu et al. 2016, eq. 14); "power" is |Y|^α. α is `alpha`.

    Differs: There is no coverage penalty, which is the other term of that equation.
    Raises ValueError if `alpha` is negative or not finite, or `form` is unknown.
    """
    if form not in LENGTH_PENALTY_FORMS or not 0 <= alpha < math.inf:
        raise ValueError(
            f"{form=}, {alpha=}: form must be one of {LENGTH_PENALTY_FORMS} and alpha ≥ 0; use 0 for no penalty"
        )
    length = jnp.asarray(length, jnp.float32)
    return ((5.0 + length) / 6.0) ** alpha if form == "wu" else length**alpha


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return `jax.lax.top_k(x, k)`, with the same order of ties, in about half the time for a vocabulary on CPUs.

    The last axis is split into groups of adjacent values. The k largest values are in the k groups with the largest
    maxima, so only these groups are searched.
    """
    size = math.gcd(x.shape[-1], 16)
    groups = x.reshape(*x.shape[:-1], -1, size)
    if size == 1 or groups.shape[-2] <= k:
        return jax.lax.top_k(x, k)
    chosen = jnp.sort(jax.lax.top_k(groups.max(axis=-1), k)[1], axis=-1)  # sorted, so that ties are ordered as in x
    members = jnp.take_along_axis(groups, chosen[..., None], axis=-2)
    values, places = jax.lax.top_k(members.reshape(*x.shape[:-1], -1), k)
    return values, jnp.take_along_axis(chosen, places // size, axis=-1) * size + places % size


def _best_tokens(logits: jax.Array, k: int, forbidden: list[int]) -> tuple[jax.Array, jax.Array]:
    """Return log-probabilities and ids (N, C), C ≥ k if V ≥ k, of tokens that include the k best allowed ones.

    Forbidden tokens have the log-probability IMPOSSIBLE.
    """
    values, tokens = _top_k(logits, min(k + len(forbidden), logits.shape[-1]))
    log_probabilities = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    barred = jnp.isin(tokens, jnp.array(forbidden, jnp.int32))
    return jnp.where(barred, IMPOSSIBLE, jnp.maximum(log_probabilities, IMPOSSIBLE)), tokens


def _forbidden(bos_id: int, eos_id: int, pad_id: int | None) -> list[int]:
    return sorted({bos_id, bos_id if pad_id is None else pad_id} - {eos_id})


def _one_by_one(
    step: Step,
    cache: Cache,
    choose: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    *,
    rows: int,
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Choose one token per row and step until EOS → tokens (N, T) and their total log-probabilities (N,).

    `choose` maps logits (N, V) and a position to the next token of each row and its log-probability, both (N,).
    """
    fill = eos_id if pad_id is None else pad_id

    def unfinished(state):
        position, _, _, finished, _ = state
        return (position < max_length) & ~finished.all()

    def advance(state):
        position, tokens, total, finished, cache = state
        logits, cache = step(cache, tokens[:, position], position)
        token, log_probability = choose(logits, position)
        total += jnp.where(finished, 0.0, log_probability)
        tokens = tokens.at[:, position + 1].set(jnp.where(finished, fill, token))
        return position + 1, tokens, total, finished | (token == eos_id), cache

    tokens = jnp.full((rows, 1 + max_length), fill, jnp.int32).at[:, 0].set(bos_id)
    total, finished = jnp.zeros(rows, jnp.float32), jnp.zeros(rows, bool)
    state = (jnp.int32(0), tokens, total, finished, cache)
    _, tokens, total, _, _ = jax.lax.while_loop(unfinished, advance, state)
    return tokens[:, 1:], total


def greedy(
    step: Step, cache: Cache, *, batch_size: int, max_length: int, bos_id: int, eos_id: int, pad_id: int | None
) -> Hypotheses:
    """Choose the most probable token at every position until EOS. K = 1, and scores are log-probabilities."""
    forbidden = _forbidden(bos_id, eos_id, pad_id)

    def choose(logits, _):
        log_probabilities, candidates = _best_tokens(logits, 1, forbidden)
        best = log_probabilities.argmax(axis=-1, keepdims=True)
        return jnp.take_along_axis(candidates, best, axis=-1)[:, 0], log_probabilities.max(axis=-1)

    ids: dict[str, Any] = {"bos_id": bos_id, "eos_id": eos_id, "pad_id": pad_id}
    tokens, total = _one_by_one(step, cache, choose, rows=batch_size, max_length=max_length, **ids)
    return Hypotheses(tokens[:, None], total[:, None], total[:, None])


def _nucleus(probabilities: jax.Array, p: float) -> jax.Array:
    """Return a mask (N, C) of the smallest set in each row whose total probability is at least p.

    Among equal probabilities, the first are included first. The smallest probability in the set is found by bisection;
    on CPUs, this takes a small fraction of the time of sorting a vocabulary.
    """
    bits = jax.lax.bitcast_convert_type(probabilities, jnp.int32)  # same order as the floats, none of which is negative
    p = max(p, 1e-30)  # a smaller p would be rounded to 0 in float32, and the set would be empty

    def mass(kept):
        return jnp.where(kept, probabilities, 0.0).sum(axis=-1, keepdims=True)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = mass(bits >= middle) >= p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros_like(bits[:, :1])
    least, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, np.float32(2.0).view(np.int32))))
    equal = bits == least
    before = mass(bits > least) + (jnp.cumsum(equal, axis=-1) - 1) * probabilities
    return (bits > least) | (equal & (before < p))


def truncate(logits: jax.Array, *, temperature: float, top_k: int, top_p: float) -> tuple[jax.Array, jax.Array]:
    """Return the distribution to sample from, as logits (N, C) and their tokens (N, C), for logits (N, V).

    Three steps are applied in this order:
    1. Temperature: softmax(x / temperature) (Ackley et al. 1985).
    2. Top-k: keep the k most probable tokens (Fan et al. 2018). 0 keeps all.
    3. Top-p: renormalize, then keep the smallest set of most probable tokens whose total probability is at least p
       (Holtzman et al. 2020). 1 keeps all.

    The logits of removed tokens are left out or minus infinity. The most probable token is always kept. Among equally
    probable tokens, those with smaller ids are kept first.

    Raises ValueError if `temperature`, `top_k` or `top_p` is out of range.
    """
    if not (LEAST_TEMPERATURE <= temperature < math.inf and top_k >= 0 and 0 < top_p <= 1):
        raise ValueError(
            f"{temperature=}, {top_k=}, {top_p=}: temperature must be at least {LEAST_TEMPERATURE}, top_k at least 0, "
            "and top_p in (0, 1]; use 1.0, 0 and 1.0 to sample from the model's own distribution"
        )
    # IMPOSSIBLE becomes minus infinity at any temperature. The largest logit becomes 0, so it cannot overflow.
    largest = logits.max(axis=-1, keepdims=True)
    logits = jnp.where(logits <= IMPOSSIBLE, -jnp.inf, (logits - largest) / temperature)
    if 0 < top_k < logits.shape[-1]:
        logits, tokens = _top_k(logits, top_k)
    else:
        tokens = jnp.broadcast_to(jnp.arange(logits.shape[-1])[None], logits.shape)
    if top_p < 1:
        logits = jnp.where(_nucleus(jax.nn.softmax(logits), top_p), logits, -jnp.inf)
    return logits, tokens


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
    vocab_size: int | None = None,
) -> Hypotheses:
    """Draw K = `num_samples` independent outputs for each row, ordered by score. Outputs may be equal.

    The score of an output is its log-probability under the model's own distribution, before `truncate`.

    `cache` has B rows; this function repeats each of them K times. `row_ids` (B,) are integers that identify the rows.
    The draws of a row depend only on `key` and its id, not on the rest of the batch or on the row's place in it. Ids ≥
    `vocab_size` are never drawn, although label smoothing gives them some probability. Tokens with a probability below
    about 1e-7 are hardly ever drawn, because of the limited range of Gumbel noise in float32.

    Raises ValueError if `temperature`, `top_k` or `top_p` is out of range, see `truncate`.
    """
    B, K, T = batch_size, num_samples, max_length
    forbidden = jnp.array(_forbidden(bos_id, eos_id, pad_id), jnp.int32)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = jax.vmap(fold, in_axes=(0, None))(fold(key, row_ids), jnp.arange(K)).reshape(B * K)

    def choose(logits, position):
        allowed = logits.at[:, forbidden].set(-jnp.inf)
        if vocab_size is not None:
            allowed = allowed.at[:, vocab_size:].set(-jnp.inf)
        likely, tokens = truncate(allowed, temperature=temperature, top_k=top_k, top_p=top_p)
        draw = jax.vmap(lambda key, x: jax.random.categorical(jax.random.fold_in(key, position), x))(keys, likely)
        token = jnp.take_along_axis(tokens, draw[:, None], axis=-1)
        log_probability = jnp.take_along_axis(logits, token, axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
        return token[:, 0], log_probability

    cache = jax.tree.map(lambda x: jnp.repeat(x, K, axis=0), cache)
    ids: dict[str, Any] = {"bos_id": bos_id, "eos_id": eos_id, "pad_id": pad_id}
    tokens, total = _one_by_one(step, cache, choose, rows=B * K, max_length=T, **ids)
    total, order = jax.lax.top_k(total.reshape(B, K), K)
    return Hypotheses(_take(tokens.reshape(B, K, T), order), total, total)


class _Beams(NamedTuple):
    """Hypotheses of each row. A score of IMPOSSIBLE marks an empty place."""

    tokens: jax.Array  # (B, K, 1 + T), BOS first
    log_probabilities: jax.Array  # (B, K)
    scores: jax.Array  # (B, K)


def _take(beams: Any, chosen: jax.Array) -> Any:
    """Select the entries `chosen` (B, k) from leaves (B, K, …) → (B, k, …), row by row, so that B may be sharded."""
    take = jax.vmap(lambda row, i: row.at[i].get(mode="promise_in_bounds"))
    return jax.tree.map(lambda x: take(x, chosen), beams)


def _join(a: _Beams, b: _Beams) -> _Beams:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), a, b)


def beam_search(
    step: Step,
    cache: Cache,
    *,
    batch_size: int,
    max_length: int,
    beam_size: int,
    length_penalty: float,
    length_penalty_form: str,
    bos_id: int,
    eos_id: int,
    pad_id: int | None,
    n_best: int | None = None,
) -> Hypotheses:
    """Return the K hypotheses with the largest log P(Y|X) / lp(Y) found by beam search (Wu et al. 2016, Section 7).

    K is `beam_size`. `cache` has B rows; this function repeats each of them K times.

    Each step takes the 2K best continuations of a row. At most K of them end in EOS, so K others stay in the beam.
    Those that end compete for the K places of finished hypotheses.

    The search for a row stops, and its finished hypotheses no longer change, once no hypothesis in the beam can beat
    the worst finished one. log P only decreases and lp only increases with length, so no score can exceed
    log P(so far) / lp(T). With `n_best`, the caller uses only the first `n_best` places, and the search stops once
    none of these can change. The result in these places is the same but is found earlier.

    Differs: Wu et al. also prune hypotheses whose log-probability is too far below the best. Here, only rank counts.

    Raises ValueError if `length_penalty` or `length_penalty_form` is invalid, see `lp`.
    """
    B, K, T = batch_size, beam_size, max_length
    wanted, fill = min(n_best or K, K), eos_id if pad_id is None else pad_id
    forbidden = _forbidden(bos_id, eos_id, pad_id)

    def score(log_probabilities, length):
        penalized = log_probabilities / lp(length, length_penalty, length_penalty_form)
        return jnp.where(log_probabilities > IMPOSSIBLE, penalized, IMPOSSIBLE)

    def unfinished(state):
        position, _, _, done, _ = state
        return (position < T) & ~done.all()

    def advance(state):
        position, alive, finished, done, cache = state
        logits, cache = step(cache, alive.tokens[:, :, position].reshape(B * K), position)

        # Each of the 2K best of a row is among the 2K best of its beam. This is cheaper than searching all K·V.
        added, tokens = (x.reshape(B, K, -1) for x in _best_tokens(logits, 2 * K, forbidden))
        totals = jnp.maximum(alive.log_probabilities[:, :, None] + added, IMPOSSIBLE)
        totals, chosen = jax.lax.top_k(totals.reshape(B, -1), 2 * K)
        parents, token = chosen // added.shape[-1], _take(tokens.reshape(B, -1), chosen)
        continued = _take(alive.tokens, parents).at[:, :, position + 1].set(token)
        ends = token == eos_id

        going_on, kept = jax.lax.top_k(jnp.where(ends, IMPOSSIBLE, totals), K)
        alive = _Beams(_take(continued, kept), going_on, going_on)
        parents = _take(parents, kept)
        cache = jax.tree.map(lambda x: _take(x.reshape(B, K, *x.shape[1:]), parents).reshape(x.shape), cache)

        ended = jnp.where(ends & ~done[:, None], totals, IMPOSSIBLE)  # rounding could exceed the bound in done rows
        finished = _join(finished, _Beams(continued, ended, score(ended, position + 1)))
        finished = _take(finished, jax.lax.top_k(finished.scores, K)[1])
        done |= score(alive.log_probabilities[:, 0], T) <= finished.scores[:, wanted - 1]
        return position + 1, alive, finished, done, cache

    tokens = jnp.full((B, K, 1 + T), fill, jnp.int32).at[:, :, 0].set(bos_id)
    none = jnp.full((B, K), IMPOSSIBLE, jnp.float32)
    first = none.at[:, 0].set(0.0)  # start with one beam, because K equal beams would find the same hypotheses
    cache = jax.tree.map(lambda x: jnp.repeat(x, K, axis=0), cache)
    beams, found = _Beams(tokens, first, first), _Beams(tokens, none, none)
    state = (jnp.int32(0), beams, found, jnp.zeros(B, bool), cache)
    _, alive, finished, _, _ = jax.lax.while_loop(unfinished, advance, state)

    cut_off = alive._replace(scores=score(alive.log_probabilities, T))
    place, count = jnp.arange(K)[None], (finished.scores > IMPOSSIBLE).sum(axis=1, keepdims=True)
    best = _take(_join(finished, cut_off), jnp.where(place < count, place, K + place - count))
    exists = best.scores > IMPOSSIBLE
    scores, log_probabilities = (jnp.where(exists, x, -jnp.inf) for x in (best.scores, best.log_probabilities))
    return Hypotheses(jnp.where(exists[:, :, None], best.tokens[:, :, 1:], fill), scores, log_probabilities)


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
    """Return the `options.n_best` outputs of each row, best first, from the method that the options select.

    With `only_greedy`, it is greedy search with one output, whatever the options. `common` are `batch_size`,
    `max_length`, `bos_id`, `eos_id` and `pad_id`. See `sample` for the other arguments.
    """
    beam_size = options.most_found
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
    if only_greedy or not isinstance(options, DecodingConfig) or beam_size == 1:
        return greedy(step, cache, **common)
    found = beam_search(
        step,
        cache,
        beam_size=beam_size,
        length_penalty=options.length_penalty,
        length_penalty_form=options.length_penalty_form,
        n_best=options.n_best,
        **common,
    )
    return jax.tree.map(lambda x: x[:, : options.n_best], found)


def copies(options: SamplingConfig, only_greedy: bool) -> int:
    """Return K, the number of rows that `search` passes to `step` for each row of the cache."""
    if only_greedy:
        return 1
    return options.n_best if options.temperature else options.most_found


def after_prompt(step: Step, prompt: jax.Array, lengths: jax.Array) -> Step:
    """Return a step that forces the output to begin with a prompt.

    prompt (N, P), lengths (N,). At position 0, the step reads the first token of the prompt, not the caller's token.
    Within the prompt, all other tokens than the next one of the prompt have the logit IMPOSSIBLE.
    """

    def forced(cache: Cache, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Cache]:
        first, following = (prompt[:, jnp.minimum(position + i, prompt.shape[1] - 1)] for i in (0, 1))
        logits, cache = step(cache, jnp.where(position == 0, first, token), position)
        given = (position + 1 < lengths)[:, None] & (jnp.arange(logits.shape[-1])[None] != following[:, None])
        return jnp.where(given, IMPOSSIBLE, logits), cache

    return forced
