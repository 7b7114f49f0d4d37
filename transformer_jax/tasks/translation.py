"""Translation: parallel text, an encoder–decoder model, label-smoothed cross-entropy, beam search, BLEU."""

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import decoding, losses, metrics
from transformer_jax.data.batching import Batch, BatchPlan, pad
from transformer_jax.data.parallel import ParallelText, TranslationData
from transformer_jax.data.tokenizers import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.decoding import DecodingConfig
from transformer_jax.models.counting import forward_flops
from transformer_jax.models.layers import Projection
from transformer_jax.models.recurrent import RecurrentConfig, RecurrentSeq2Seq
from transformer_jax.models.transformer import Transformer, TransformerConfig, shift_right
from transformer_jax.training.task import Arrays, Batches, Params, Sums, TrainingConfig

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TranslationTraining(TrainingConfig):
    """The engine's keys and those of this objective."""

    label_smoothing: float = 0.1  # ε

    def problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong, as (field, rule and remedy)."""
        yield from super().problems()
        if not 0 <= self.label_smoothing < 1:
            yield "label_smoothing", "must be in [0, 1); 0 switches it off"


class Translation:
    """The task: see `training.task.Task`."""

    models: ClassVar[dict[str, Any]] = {"transformer": TransformerConfig, "recurrent": RecurrentConfig}
    sections: ClassVar[dict[str, type]] = {
        "data": TranslationData,
        "training": TranslationTraining,
        "decoding": DecodingConfig,
    }

    def __init__(self, config: Any, workdir: epath.PathLike):
        """`config` has this class's sections as attributes; tokenizers live in `workdir`."""
        self.config = config
        architectures: dict[str, Any] = {"transformer": Transformer, "recurrent": RecurrentSeq2Seq}
        self.model = architectures[config.model.architecture](config.model)
        model, data = config.model, config.data
        self.d_model, self.dtype = model.d_model, model.dtype
        self.train_split, self.validation_split = data.train_split, data.validation_split
        self.test_split = data.test_split
        vocab_sizes = model.source_vocab_size, model.target_vocab_size
        self.text = ParallelText(data, vocab_sizes, model.max_length, workdir)

    @staticmethod
    def problems(config: Any) -> Iterator[tuple[str, str]]:
        """What is wrong between sections, as (dotted key, rule and remedy)."""
        model, data = config.model, config.data
        if data.max_length > model.max_length:
            yield "data.max_length", f"must not be beyond model.max_length = {model.max_length}"
        if data.joint_tokenizer and model.source_vocab_size != model.target_vocab_size:
            yield (
                "data.joint_tokenizer",
                f"one vocabulary has one size, but model.source_vocab_size = {model.source_vocab_size} and "
                f"model.target_vocab_size = {model.target_vocab_size}: make them equal, or set it to False",
            )
        if model.shares_tables and not data.joint_tokenizer:
            yield "model.tie_embeddings", "'all' needs data.joint_tokenizer; else set it to 'decoder'"

    @staticmethod
    def shrink(config: Any) -> None:
        """Makes a recipe (ConfigDict) small enough for seconds; what is no size stays as it is."""
        model, data = config.model, config.data
        model.source_vocab_size = model.target_vocab_size = 300 if data.tokenizer == "bpe_bytes" else 90
        Translation.models[model.architecture].shrink(model)
        model.max_length = data.max_length = 32
        data.batch_tokens, data.max_shapes, data.rows_multiple = 1024, 1, min(data.rows_multiple, 32)
        config.optimizer.warmup_steps = min(config.optimizer.warmup_steps, 2)
        config.decoding.max_extra = 5
        config.evaluation.rows = 8

    @staticmethod
    def advice(config: Any) -> Iterator[str]:
        """What is merely unwise."""
        if config.model.needs_warmup and config.optimizer.warmup_steps == 0:
            yield (
                "config.optimizer.warmup_steps = 0 with config.model.norm = 'post': post-LN seldom trains without "
                "warm-up (Xiong et al. 2020); set some thousand steps, or model.norm to 'pre'"
            )

    # On the device.

    def init(self, key: jax.Array) -> Params:
        token = jnp.zeros((1, 1), jnp.int32)
        return self.model.init(key, token, token)["params"]

    def _cross_entropy(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        step: jax.Array | int = 0,
        label_smoothing: float = 0.0,
    ) -> tuple[jax.Array, jax.Array]:
        """(sum, weight) over the target's tokens, the end included."""
        source, target = batch["source"], batch["target"]
        weights = target != PAD_ID
        hidden: Any = self.model.apply(
            {"params": params},
            source,
            shift_right(target, BOS_ID),
            source_valid=source != PAD_ID,
            target_valid=weights,
            step=step,
            rngs=None if key is None else {"dropout": key},
            method="hidden",
        )
        vocab_size, dtype = self.config.model.target_vocab_size, self.config.model.dtype

        def loss(project: Projection, x: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
            logits = project(x, vocab_size, dtype)
            return losses.cross_entropy(
                logits, labels, weights, vocab_size=vocab_size, label_smoothing=label_smoothing
            )[0]

        x, project = hidden
        shards = self.config.mesh.data_shards()
        total = losses.sum_in_chunks(loss, project, x, target, weights, losses.CHUNK, shards)
        return total, weights.sum().astype(jnp.float32)

    def loss(
        self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array, step: jax.Array | int
    ) -> tuple[jax.Array, jax.Array, Sums]:
        """Label-smoothed cross-entropy over the target's tokens, the end included."""
        return *self._cross_entropy(params, batch, key, step, self.config.training.label_smoothing), {}

    def measure(self, params: Params, batch: Mapping[str, jax.Array]) -> Sums:
        """Cross-entropy without smoothing, and how many target tokens and sentences it is over."""
        total, weight = self._cross_entropy(params, batch)
        return {"loss": total, "tokens": weight, "examples": (batch["target"] != PAD_ID).any(axis=1).sum()}

    def predict(self, params: Params, batch: Mapping[str, jax.Array], fast: bool) -> dict[str, jax.Array]:
        """The K = `decoding.n_best` translations of each row, best first: tokens (B, K, T), scores and
        log_probabilities (B, K); `fast` is greedy, K = 1."""
        source, options = batch["source"], self.config.decoding
        rows, length = source.shape
        max_length = min(options.max_length(length), self.config.model.max_length)
        drawn = options.temperature > 0 and not fast
        copies = 1 if fast else options.n_best if drawn else options.beam_size
        apply: Any = functools.partial(self.model.apply, {"params": params})
        cache = apply(source, source != PAD_ID, max_length, method="init_cache")
        # What the steps share: the parameters, and the source, which all copies of a row read as it is.
        extend: Any = functools.partial(self.model.apply, {"params": self.model.for_extend(params)}, method="extend")
        # Nothing to translate, in empty lines and in rows that fill a batch: end at once.
        empty = jnp.repeat(cache.source_valid.sum(axis=1, keepdims=True) <= 1, copies, axis=0)

        def step(past: Any, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
            logits, extended = extend(cache._replace(past=past), token[:, None], position)
            end = jnp.where(jnp.arange(logits.shape[-1]) == EOS_ID, 0.0, decoding.IMPOSSIBLE)[None]
            return jnp.where(empty, end, logits[:, 0]), extended.past

        common: dict[str, Any] = {"batch_size": rows, "max_length": max_length}
        common |= {"bos_id": BOS_ID, "eos_id": EOS_ID, "pad_id": PAD_ID}
        if drawn:
            found = decoding.sample(
                step,
                cache.past,
                key=jax.random.key(options.seed),
                row_ids=batch["line"],
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                num_samples=copies,
                vocab_size=self.text.tokenizers[1].size,
                **common,
            )
        elif copies == 1:
            found = decoding.greedy(step, cache.past, **common)
        else:
            found = decoding.beam_search(
                step,
                cache.past,
                beam_size=copies,
                length_penalty=options.length_penalty,
                length_penalty_form=options.length_penalty_form,
                n_best=options.n_best,
                **common,
            )
        best = 1 if fast else options.n_best
        return {name: value[:, :best] for name, value in found._asdict().items()}

    def attention(self, params: Params, batch: Mapping[str, jax.Array]) -> dict[tuple[str, str, str], jax.Array]:
        """(name, who looks, at what) → weights (B, layers, heads, T, S), of a batch as `pair` has it; see `tokens`."""
        chosen = getattr(self.config.model, "attention_implementation", "einsum")
        if chosen != "einsum":
            raise ValueError(
                f"config.model.attention_implementation = {chosen!r} keeps its weights to itself: set it to 'einsum'"
            )
        source, target = batch["source"], batch["target"]
        _, sown = self.model.apply(
            {"params": params},
            source,
            shift_right(target, BOS_ID),
            source_valid=source != PAD_ID,
            target_valid=target != PAD_ID,
            method="hidden",
            mutable="intermediates",
        )
        return self.model.attention_maps(sown["intermediates"])

    # On the host.

    def pair(self, lines: Sequence[str], outputs: Sequence[str]) -> Arrays:
        """Lines and what they were translated to, as one batch."""
        arrays = {}
        for side, (name, text) in enumerate({"source": lines, "target": outputs}.items()):
            ids = self.text.cut(self.text.encode(side, text), name)
            arrays[name] = pad(ids, np.arange(len(text)), int(ids.lengths.max()), PAD_ID)
        return arrays

    def tokens(self, arrays: Arrays) -> list[dict[str, list[str]]]:
        """Of each pair the tokens of "source", "target" and "input", the target as the decoder reads it."""
        inputs = np.asarray(shift_right(jnp.asarray(arrays["target"]), BOS_ID))
        rows = []
        for source, target, read in zip(arrays["source"], arrays["target"], inputs, strict=True):
            length = (target != PAD_ID).sum()
            rows.append(
                {
                    "source": self.text.tokenizers[0].tokens(source[source != PAD_ID]),
                    "target": self.text.tokenizers[1].tokens(target[:length]),
                    "input": self.text.tokenizers[1].tokens(read[:length]),
                }
            )
        return rows

    def prepare(self) -> None:
        """Learns the tokenizers that the workdir lacks."""
        self.text.open(self.train_split)
        _ = self.text.tokenizers

    def batches(self, split: str, seed: int | None) -> Batches:
        """Pairs {"source": (B, S), "target": (B, T)} int32, each ending in EOS, then padding."""
        return Batches(*self.text.batches(split, seed))

    def show(self, arrays: Arrays, filled: np.ndarray) -> list[str]:
        """The first pair, token by token. Raises ValueError for rows without a token or without an end, for ids that
        no vocabulary has, and where the decoder's input tells more of the target than what came before."""
        rows = np.flatnonzero(filled)
        for side, every in arrays.items():
            size, ids = getattr(self.config.model, f"{side}_vocab_size"), every[rows]
            tokens = ids != PAD_ID
            ends = np.maximum(tokens.sum(axis=1) - 1, 0)[:, None]
            wrong = {
                "has no token": ~tokens.any(axis=1),
                "has padding between tokens": (tokens[:, 1:] & ~tokens[:, :-1]).any(axis=1),
                "does not end in </s>": np.take_along_axis(ids, ends, axis=1)[:, 0] != EOS_ID,
                f"has ids beyond the vocabulary of {size}": (ids >= size).any(axis=1),
            }
            for what, where in wrong.items():
                for i in np.flatnonzero(where)[:1]:
                    raise ValueError(f"row {rows[i]} of the first batch {what} in its {side}: {ids[i]}")
        target = arrays["target"]
        inputs = np.asarray(shift_right(jnp.asarray(target), BOS_ID))
        if (inputs[:, 0] != BOS_ID).any() or (inputs[:, 1:] != target[:, :-1]).any():
            raise ValueError("the decoder's input is not the target shifted by one: its labels could be read off it")

        def line(name: str, side: int, ids: np.ndarray, length: int) -> str:
            return f"  {name:<13}  {' '.join(self.text.tokenizers[side].tokens(ids[rows[0], :length]))}"

        lengths = {side: (ids[rows[0]] != PAD_ID).sum() for side, ids in arrays.items()}
        return [
            "the first pair of the first batch:",
            line("source", 0, arrays["source"], lengths["source"]),
            line("decoder input", 1, inputs, lengths["target"]),
            line("target", 1, target, lengths["target"]),
        ]

    def made_up(self, rows: int, length: int, seed: int | None) -> Arrays:
        """Pairs as `batches` has them, of tokens drawn at random."""
        draw, arrays = np.random.default_rng(seed or 0), {}
        for side in ("source", "target"):
            ends = np.full(rows, length) if seed is None else draw.integers(1, length + 1, rows)
            place = np.arange(1, length + 1)[None]
            ids = draw.integers(UNK_ID + 1, getattr(self.config.model, f"{side}_vocab_size"), (rows, length), np.int32)
            arrays[side] = np.select([place < ends[:, None], place == ends[:, None]], [ids, EOS_ID], PAD_ID)
        return arrays

    def exactness(self, params: Params, batch: Mapping[str, jax.Array]) -> Mapping[str, float]:
        """Logits by a cache, token after token, against those of the whole target at once; and how much the logits
        before a token tell of it."""
        source, target = batch["source"], batch["target"]
        inputs = shift_right(target, BOS_ID)

        def whole(inputs: jax.Array) -> Any:
            return self.model.apply({"params": params}, source, inputs, source_valid=source != PAD_ID)

        def cached() -> jax.Array:
            apply: Any = functools.partial(self.model.apply, {"params": params})
            cache, columns = apply(source, source != PAD_ID, inputs.shape[1], method="init_cache"), []
            for t in range(inputs.shape[1]):
                logits, cache = apply(cache, inputs[:, t : t + 1], t, method="extend")
                columns.append(logits)
            return jnp.concatenate(columns, axis=1)

        @jax.jit
        def differences() -> tuple[jax.Array, jax.Array]:
            logits, vocab_size = whole(inputs), self.config.model.target_vocab_size
            half = inputs.shape[1] // 2
            other = inputs.at[:, half:].set(UNK_ID)
            largest = jnp.abs(logits[..., :vocab_size]).max()
            past = jnp.abs(logits - whole(other))[:, :half, :vocab_size].max() / largest
            return jnp.abs(logits - cached())[..., :vocab_size].max() / largest, past

        decoding, leak = differences()
        return {"cached = uncached decoding": float(decoding), "no token is seen before its place": float(leak)}

    def examples(self, split: str) -> tuple[Sequence[str], Sequence[str]]:
        text = self.text.open(split)
        return text.column(self.config.data.source_language), text.column(self.config.data.target_language)

    def read(self, lines: Sequence[str], rows: int) -> Batches:
        """{"source": (rows, S), "line": (rows,)}: S depends on a sentence's own length alone, and so does its
        translation; one that is drawn depends on its place among the lines too, which is "line". A line of spaces is
        an empty one, whatever the tokenizer makes of them."""
        source = self.text.cut(self.text.encode(0, [line if line.strip() else "" for line in lines]), "input")
        empty = np.flatnonzero(source.lengths == 1) + 1
        if len(empty):
            shown = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
            log.warning("%d empty lines stay empty: %s", len(empty), shown)
        plan = BatchPlan.ladder(source.lengths, self._ladder(), rows)

        def load(batch: Batch) -> Arrays:
            return {
                "source": pad(source, batch.indices, batch.shape[0], PAD_ID),
                "line": batch.indices.astype(np.int32),
            }

        return Batches(plan, load)

    def _ladder(self) -> list[int]:
        """8, 12, 16, 24, 32, 48 … model.max_length."""
        limit = self.config.model.max_length
        steps = [2**n * half // 2 for n in range(3, 32) for half in (2, 3)]
        return [*(step for step in steps if step < limit), limit]

    def write(self, arrays: Arrays, batch: Arrays) -> list[str]:
        """The best text, each on one line; "" for an empty source."""
        return [self._text(tokens[0]) for tokens in arrays["tokens"]]

    def _text(self, tokens: np.ndarray) -> str:
        return self.text.tokenizers[1].decode(tokens).replace("\n", " ")

    def write_scored(self, arrays: Arrays, batch: Arrays) -> list[str]:
        """{"text", "score"}: the score is log P / lp, which beam search ranks by; log P of what greedy search finds or
        was drawn.

        With `decoding.n_best` above 1: {"hypotheses": [{"text", "score", "log_probability"}, …]}, best first, fewer
        where a search finds no more, as in an empty source.
        """
        rows = [
            [
                {"text": self._text(tokens), "score": float(score), "log_probability": float(log_probability)}
                for tokens, score, log_probability in zip(*row, strict=True)
                if score != -math.inf
            ]
            for row in zip(arrays["tokens"], arrays["scores"], arrays["log_probabilities"], strict=True)
        ]
        if self.config.decoding.n_best > 1:
            results: list[Any] = [{"hypotheses": row} for row in rows]
        else:
            results = [{name: row[0][name] for name in ("text", "score")} for row in rows]
        return [json.dumps(result, ensure_ascii=False) for result in results]

    def score(
        self, sums: Mapping[str, float], lines: Sequence[str], references: Sequence[str]
    ) -> dict[str, float | str]:
        loss = sums["loss"] / sums["tokens"]
        references = [reference.replace("\n", " ") for reference in references]  # as in outputs
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700)),
            **metrics.bleu(lines, references),
            "exact_match": metrics.exact_match(lines, references),
            "examples": int(sums["examples"]),
        }

    def flops(self, batch: Arrays) -> float:
        """Of the matrix products of a training step, padding left out."""
        source, target = ((batch[side] != PAD_ID).sum(axis=1) for side in ("source", "target"))
        return 3 * float(forward_flops(self.config.model, source, target).sum())

    def identity(self, training: bool) -> dict[str, str]:
        """Hashes of the tokenizers and, for training, of the text."""
        return self.text.identity(training)
