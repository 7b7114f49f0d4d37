"""Translation: parallel text, an encoder–decoder model, label-smoothed cross-entropy, beam search, BLEU."""

import dataclasses
import functools
import hashlib
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
from transformer_jax.data import sources, tokenizers
from transformer_jax.data.batching import Batch, BatchPlan, pad
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.tokenizers import BOS_ID, EOS_ID, PAD_ID, Tokenizer
from transformer_jax.decoding import DecodingConfig
from transformer_jax.models.layers import Projection
from transformer_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    forward_flops,
    shift_right,
    unstack_decoder,
)
from transformer_jax.training.task import Arrays, Batches, Params, Sums, TrainingConfig

log = logging.getLogger(__name__)

SOURCES = ("files", "tfds")


@dataclasses.dataclass(frozen=True)
class TranslationData:
    """Where the text is, how it is tokenized and how it is batched."""

    source: str = "files"  # "files": {split}.{language}[.gz] in `directory`; "tfds": `name`, prepared there
    name: str = ""
    directory: str = ""
    train_split: str = "train"
    validation_split: str = "val"
    test_split: str = "test"
    source_language: str = "en"
    target_language: str = "de"
    tokenizer: str = "bpe_bytes"
    tokenizer_lines: int = 500_000  # it learns from, evenly spread over the training split; 0: from all
    joint_tokenizer: bool = True  # one vocabulary for both languages
    lowercase: bool = False
    min_count: int = 1  # of words and characters that enter a vocabulary
    max_length: int = 256  # tokens a sentence, the end included; longer pairs are not trained on
    max_ratio: float = 0.0  # tokens of the longer side over the shorter's, beyond: not trained on; 0: no limit
    batch_tokens: int = 4096  # padded positions of a batch's longer side
    max_shapes: int = 8  # batch shapes, and so compilations of the training step
    rows_multiple: int = 8  # of every batch's rows: what devices and microbatches divide

    def problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong, as (field, rule and remedy)."""
        if self.source not in SOURCES:
            yield "source", f"must be one of {', '.join(SOURCES)}"
        if self.source == "tfds" and not self.name:
            yield "name", "must be the data set's name in tfds, as 'wmt14_translate/de-en'"
        if not self.directory:
            yield "directory", "must be the folder of the data: add --config.data.directory=DIR"
        if self.source_language == self.target_language:
            yield "target_language", "must differ from source_language"
        if self.tokenizer not in tokenizers.KINDS:
            yield "tokenizer", f"must be one of {', '.join(tokenizers.KINDS)}"
        if self.max_length < 2:
            yield "max_length", "must be at least 2: a token and the end"
        if self.max_ratio and self.max_ratio < 1:
            yield "max_ratio", "must be at least 1, or 0 for no limit"
        if self.tokenizer_lines < 0:
            yield "tokenizer_lines", "must be at least 1, or 0 for all"
        for name in ("min_count", "batch_tokens", "max_shapes", "rows_multiple"):
            if getattr(self, name) < 1:
                yield name, "must be at least 1"
        if self.rows_multiple >= 1 and self.batch_tokens < self.max_length * self.rows_multiple:
            yield (
                "batch_tokens",
                f"must hold rows_multiple = {self.rows_multiple} rows of max_length = {self.max_length}: set it to "
                f"{self.max_length * self.rows_multiple} or more",
            )


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

    sections: ClassVar[dict[str, type]] = {
        "model": TransformerConfig,
        "data": TranslationData,
        "training": TranslationTraining,
        "decoding": DecodingConfig,
    }

    def __init__(self, config: Any, workdir: epath.PathLike):
        """`config` has this class's sections as attributes; tokenizers live in `workdir`."""
        self.config, self.workdir = config, epath.Path(workdir)
        self.model = Transformer(config.model)
        self.d_model, data = config.model.d_model, config.data
        self.train_split, self.validation_split = data.train_split, data.validation_split
        self.test_split = data.test_split
        self._opened: dict[str, sources.Source] = {}

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
        if model.tie_embeddings == "all" and not data.joint_tokenizer:
            yield "model.tie_embeddings", "'all' needs data.joint_tokenizer; else set it to 'decoder'"

    @staticmethod
    def advice(config: Any) -> Iterator[str]:
        """What is merely unwise."""
        if config.model.norm == "post" and config.optimizer.warmup_steps == 0:
            yield (
                "config.optimizer.warmup_steps = 0 with config.model.norm = 'post': post-LN seldom trains without "
                "warm-up (Xiong et al. 2020); set some thousand steps, or model.norm to 'pre'"
            )

    # On the device.

    def init(self, key: jax.Array) -> Params:
        token = jnp.zeros((1, 1), jnp.int32)
        return self.model.init(key, token, token)["params"]

    def _cross_entropy(
        self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array | None, label_smoothing: float
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
        total = losses.sum_in_chunks(loss, project, x, target, weights, 256, self.config.mesh.data_shards())
        return total, weights.sum().astype(jnp.float32)

    def loss(self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array) -> tuple[jax.Array, jax.Array, Sums]:
        """Label-smoothed cross-entropy over the target's tokens, the end included."""
        return *self._cross_entropy(params, batch, key, self.config.training.label_smoothing), {}

    def measure(self, params: Params, batch: Mapping[str, jax.Array]) -> Sums:
        """Cross-entropy without smoothing, and how many target tokens and sentences it is over."""
        total, weight = self._cross_entropy(params, batch, None, 0.0)
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
        # What the steps share: layers taken apart, and the source, which all copies of a row read as it is.
        layers = unstack_decoder(params, self.config.model.num_decoder_layers)
        extend: Any = functools.partial(self.model.apply, {"params": layers}, method="extend")
        # Nothing to translate, in empty lines and in rows that fill a batch: end at once.
        empty = jnp.repeat(cache.source_valid.sum(axis=1, keepdims=True) <= 1, copies, axis=0)

        def step(past: Any, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
            logits, extended = extend(cache._replace(self_attention=past), token[:, None], position)
            end = jnp.where(jnp.arange(logits.shape[-1]) == EOS_ID, 0.0, decoding.IMPOSSIBLE)[None]
            return jnp.where(empty, end, logits[:, 0]), extended.self_attention

        common: dict[str, Any] = {"batch_size": rows, "max_length": max_length}
        common |= {"bos_id": BOS_ID, "eos_id": EOS_ID, "pad_id": PAD_ID}
        if drawn:
            found = decoding.sample(
                step,
                cache.self_attention,
                key=jax.random.key(options.seed),
                row_ids=batch["line"],
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                num_samples=copies,
                **common,
            )
        elif copies == 1:
            found = decoding.greedy(step, cache.self_attention, **common)
        else:
            found = decoding.beam_search(
                step,
                cache.self_attention,
                beam_size=copies,
                length_penalty=options.length_penalty,
                length_penalty_form=options.length_penalty_form,
                n_best=options.n_best,
                **common,
            )
        best = 1 if fast else options.n_best
        return {name: value[:, :best] for name, value in found._asdict().items()}

    # On the host.

    def _open(self, split: str) -> sources.Source:
        data = self.config.data
        languages = (data.source_language, data.target_language)
        if split not in self._opened:
            if data.source == "tfds":
                self._opened[split] = sources.tfds_source(data.name, data.directory, split, languages)
            else:
                self._opened[split] = sources.parallel_files(data.directory, split, languages)
        return self._opened[split]

    @functools.cached_property
    def _tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """(source, target): those of the workdir; when it has none yet, trained on the training split."""
        data, model = self.config.data, self.config.model
        sides = {"source": model.source_vocab_size, "target": model.target_vocab_size}
        if data.joint_tokenizer:
            joint = self._tokenizer("tokenizer.json", ("source", "target"), sides["target"])
            return joint, joint
        source, target = (self._tokenizer(f"tokenizer.{side}.json", (side,), size) for side, size in sides.items())
        return source, target

    def _tokenizer(self, name: str, sides: Sequence[str], vocab_size: int) -> Tokenizer:
        path, data = self.workdir / name, self.config.data
        if not path.exists():
            if (self.workdir / "checkpoints").exists():
                raise ValueError(
                    f"{path} is missing, and the checkpoints beside it belong to it: restore the file, or "
                    "train anew in another workdir"
                )
            languages = {"source": data.source_language, "target": data.target_language}
            text = self._open(data.train_split)
            share = -(-data.tokenizer_lines // len(sides)) or len(text)
            chosen = [i * len(text) // share for i in range(share)] if share < len(text) else range(len(text))
            lines = [text.column(languages[side])[i] for side in sides for i in chosen]
            tokenizer = tokenizers.train_tokenizer(
                data.tokenizer, lines, vocab_size, min_count=data.min_count, lowercase=data.lowercase
            )
            tokenizer.save(path)
            log.info("trained %s on %d lines: %d of %d ids", name, len(lines), tokenizer.size, vocab_size)
        tokenizer = Tokenizer.load(path)
        if tokenizer.size > vocab_size:
            keys = " and ".join(f"model.{side}_vocab_size" for side in sides)
            raise ValueError(
                f"{path} has {tokenizer.size} ids, but {keys} = {vocab_size}: the vocabulary does not fit the "
                f"model; set {keys} to {tokenizer.size} or restore the tokenizer it was trained with"
            )
        return tokenizer

    def _encode(self, side: int, lines: Sequence[str]) -> Ragged:
        return self._tokenizers[side].encode(lines, EOS_ID)

    def batches(self, split: str, seed: int | None) -> Batches:
        """Pairs {"source": (B, S), "target": (B, T)} int32, each ending in EOS, then padding."""
        data = self.config.data
        training = seed is not None
        text = self._open(split)
        source = self._encode(0, text.column(data.source_language))
        target = self._encode(1, text.column(data.target_language))
        if not training:
            source, target = self._cut(source, split), self._cut(target, split)
        lengths = np.stack([source.lengths, target.lengths], axis=1)
        if training:
            # A pair with an empty side teaches nothing: one past the limit drops it with the over-long ones.
            shorter, longer = lengths.min(axis=1) - 1, lengths.max(axis=1) - 1
            empty = shorter == 0
            limit = data.max_ratio * shorter
            uneven = (limit > 0) & (longer > limit) & (longer < data.max_length)
            lengths[empty | uneven] = data.max_length + 1
            if (lengths > data.max_length).any(axis=1).all():
                raise ValueError(
                    f"{split}: none of {len(lengths)} pairs is left: {empty.sum()} have an empty side, {uneven.sum()} "
                    f"are beyond data.max_ratio = {data.max_ratio:g}, the others longer than data.max_length = "
                    f"{data.max_length}"
                )
        plan = BatchPlan(
            lengths,
            max_lengths=(data.max_length,) * 2 if training else None,
            tokens=data.batch_tokens if training else max(data.batch_tokens, int(lengths.max()) * data.rows_multiple),
            max_shapes=data.max_shapes,
            rows_multiple=data.rows_multiple,
            seed=seed,
        )
        if training:
            log.info(
                "%s: %d pairs in %d batches of %d shapes, %.0f %% of the target positions filled; left out: %d longer "
                "than data.max_length = %d, %d with an empty side, %d beyond data.max_ratio = %g",
                split,
                len(plan.kept),
                len(plan),
                len(plan.shapes),
                100 * plan.fill[1],
                plan.dropped - empty.sum() - uneven.sum(),
                data.max_length,
                empty.sum(),
                uneven.sum(),
                data.max_ratio,
            )

        def load(batch: Batch) -> Arrays:
            return {
                "source": pad(source, batch.indices, batch.shape[0], PAD_ID),
                "target": pad(target, batch.indices, batch.shape[1], PAD_ID),
            }

        return Batches(plan, load)

    def _cut(self, rows: Ragged, what: str) -> Ragged:
        """Rows of at most model.max_length tokens; those cut are said."""
        limit = self.config.model.max_length
        for i in np.flatnonzero(rows.lengths > limit):
            log.warning("%s, line %d: %d tokens, cut to model.max_length = %d", what, i + 1, rows.lengths[i], limit)
        return rows.cut(limit, EOS_ID)

    def examples(self, split: str) -> tuple[Sequence[str], Sequence[str]]:
        text = self._open(split)
        return text.column(self.config.data.source_language), text.column(self.config.data.target_language)

    def read(self, lines: Sequence[str], rows: int) -> Batches:
        """{"source": (rows, S), "line": (rows,)}: S depends on a sentence's own length alone, and so does its
        translation; one that is drawn depends on its place among the lines too, which is "line"."""
        source = self._cut(self._encode(0, lines), "input")
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
        return self._tokenizers[1].decode(tokens).replace("\n", " ")

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
        data = self.config.data
        source, target = self._tokenizers
        hashes = {"source tokenizer": source.sha256, "target tokenizer": target.sha256}
        if training:
            digest = hashlib.sha256()
            for language in (data.source_language, data.target_language):
                for block in self._open(data.train_split).column(language).blocks():
                    digest.update(block)
            hashes["training data"] = digest.hexdigest()
        return hashes
