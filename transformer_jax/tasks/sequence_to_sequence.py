"""Sequence to sequence: from a text, a sound or an image to a text.

Label-smoothed cross-entropy, beam search, BLEU. An example is translation.
"""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import decoding, losses, metrics
from transformer_jax.data.batching import Batches
from transformer_jax.data.columns import ArrayRecords, texts_of
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import Rule, bucket_batches, ladder_batches
from transformer_jax.data.examples import as_object, columns_of
from transformer_jax.data.streams import Stream
from transformer_jax.decoding.stopping import before_end
from transformer_jax.errors import UserError
from transformer_jax.files import one_line
from transformer_jax.models.caches import Cache
from transformer_jax.models.convs2s import ConvS2S
from transformer_jax.models.recurrent import RecurrentSeq2Seq
from transformer_jax.models.stack import unstack_layers
from transformer_jax.models.transformer import Transformer, shift_right
from transformer_jax.tasks.chosen_scores import (
    CHOSEN_BY,
    chosen_scores,
    with_sources,
)
from transformer_jax.tasks.inputs import picture_of, shown_vectors
from transformer_jax.tasks.pairs import reader_of, tokens_of
from transformer_jax.tasks.sequence_to_sequence_config import (
    SEVERAL_REFERENCES,
    SequenceToSequenceConfig,
)
from transformer_jax.tasks.teacher_forcing import start, teacher_forced
from transformer_jax.tasks.text import cache_and_causality, valid, with_weights
from transformer_jax.training.metric import LOSS, PERPLEXITY, Metric
from transformer_jax.training.task import (
    Arrays,
    Axis,
    Forward,
    Inspected,
    Mean,
    Outputs,
    Params,
    Record,
    Task,
    Work,
    check_rows,
)

log = logging.getLogger(__name__)

# Each is an `EncoderDecoder`.
ARCHITECTURES: dict[str, Any] = {
    "transformer": Transformer,
    "recurrent": RecurrentSeq2Seq,
    "convs2s": ConvS2S,
}


class SequenceToSequence(Task, Inspected):
    """Prediction of a target text from a source.

    A batch holds the ids "source" (B, S) and "target" (B, T), each ending in EOS, their
    lengths "source_length" and "target_length" (B,), and the number of each example,
    "index" (B,). A source that is not text is an array of vectors (B, S, C). In an
    evaluation with R references, the target is (B, R, T), with lengths (B, R).
    """

    metrics: ClassVar = {
        "loss": LOSS,
        "perplexity": PERPLEXITY,
        "bleu": Metric("bleu (greedy)", better="higher"),
        "bleu_tokenized": Metric("bleu_tokenized (greedy)", better="higher"),
        "exact_match": Metric("exact_match (greedy)", better="higher"),
        # only with several references, or with evaluation.text_scores
        **{
            name: Metric(f"{name} (greedy)", better="higher")
            for name in (*SEVERAL_REFERENCES, *CHOSEN_BY)
        },
    }
    corpus: Corpus

    def __init__(
        self, config: SequenceToSequenceConfig, workdir: epath.PathLike | None
    ):
        data = config.data
        source = config.input.stream(data.source_language)
        streams: dict[str, Stream] = {
            "source": source or tokens_of(config, "source", data.source_language),
            "target": tokens_of(config, "target", data.target_language),
        }
        front_end = config.input.front_end(streams["source"], config.model)
        architecture = ARCHITECTURES[config.model.architecture]
        self.model = architecture(config.model, front_end)
        corpus = Corpus(
            data,
            streams,
            workdir,
            reader_of(config),
            config.input.more_columns,
            start=config.init_from or None,
        )
        super().__init__(config, corpus)
        self.streams = corpus.streams
        self.reads_text = source is None

    # On the device.

    def init(self, key: jax.Array) -> Params:
        source, target = (
            jnp.zeros((1, 1, *stream.trailing), stream.dtype)
            for stream in self.streams.values()
        )
        valid = jnp.ones((1, 1), bool)
        method: Any = teacher_forced
        return self.model.init(key, source, valid, target, method=method)["params"]

    def means(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        step: jax.Array | int = 0,
        label_smoothing: float = 0.0,
        regularization: float = 0.0,
    ) -> dict[str, Mean]:
        """Return the mean cross-entropy over the tokens of all references, including
        EOS, and if there is a `regularization`, that of attention.
        """
        target = jnp.asarray(batch["target"])
        lengths = batch["target_length"]
        if target.ndim == 3:
            target = target.reshape(-1, target.shape[2])
            lengths = lengths.reshape(-1)
        target_valid = valid({"target": target, "target_length": lengths}, "target")
        output: Any = self.model.apply(
            {"params": params},
            batch["source"],
            valid(batch, "source"),
            shift_right(target, self.corpus.special_ids("target").begin),
            target_valid,
            step,
            rngs=None if key is None else {"dropout": key},
            method=teacher_forced,
            mutable=["intermediates"] if regularization else False,
        )
        (x, head), sown = output if regularization else (output, {})
        total, weight = losses.token_cross_entropy(
            head, x, target, target_valid, label_smoothing
        )
        if not regularization:
            return {"loss": Mean(total, weight)}
        (of_layers,) = self.model.attention_maps(sown["intermediates"]).values()
        over_heads = of_layers.mean(axis=(1, 2))
        uneven = losses.doubly_stochastic(over_heads, target_valid)
        return {
            "cross_entropy": Mean(total, weight),
            "uneven_attention": Mean(uneven, weight, regularization),
        }

    def loss(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array,
        step: jax.Array | int,
    ) -> dict[str, Mean]:
        """Return label-smoothed cross-entropy over the target's tokens, and with
        `attention_regularization` λ the term λ Σ_i (1 - Σ_t α_ti)² of each target.

        Both are divided by the number of tokens, so that λ weights them as in Xu et al.
        2015, eq. 14, where both are sums.
        """
        training = self.config.training
        return self.means(
            params,
            batch,
            key,
            step,
            training.label_smoothing,
            training.attention_regularization,
        )

    def evaluate(
        self, params: Params, batch: Mapping[str, jax.Array], greedy: bool
    ) -> tuple[dict[str, Mean], Outputs]:
        """Return the cross-entropy without smoothing, and the K = `decoding.n_best`
        outputs of each row, best first.

        The outputs are tokens (B, K, T), scores (B, K) and log_probabilities (B, K).
        With `greedy`, K is 1.
        """
        means = self.means(params, batch) if "target" in batch else {}
        step, cache = self.decoder(params, batch, greedy)
        return means, self.search(step, cache, batch, greedy)._asdict()

    def decoder(
        self, params: Params, batch: Mapping[str, jax.Array], greedy: bool
    ) -> tuple[decoding.Step, Cache]:
        """Return the step that reads a token and scores the next one, and its cache for
        the sources of a batch, see `search`.
        """
        source = batch["source"]
        options = self.config.decoding
        special = self.corpus.special_ids("target")
        cache: Any = self.model.apply(
            {"params": params},
            source,
            valid(batch, "source"),
            self.most_tokens(batch),
            decoding.beams(options, greedy),
            method=start,
        )
        extend: Any = functools.partial(
            self.model.apply,
            {"params": unstack_layers(params)},
            method=self.model.extend,
        )
        # Empty lines and filler rows end at once.
        added = self.streams["source"].added(begin=False, end=True)
        empty = batch["source_length"][:, None] <= added
        empty = jnp.repeat(empty, decoding.copies(options, greedy), axis=0)

        def step(
            cache: Cache, token: jax.Array, position: jax.Array
        ) -> tuple[jax.Array, Cache]:
            logits, cache = extend(cache, token[:, None], position)
            end = decoding.certain(special.end, logits.shape[-1])[None]
            return jnp.where(empty, end, logits[:, 0]), cache

        return step, cache

    def most_tokens(self, batch: Mapping[str, jax.Array]) -> int:
        """Return the largest number of tokens that is written for a source, including
        EOS.
        """
        length = batch["source"].shape[1]
        longest = self.config.decoding.max_length(length)
        return jax.core.min_dim(longest, self.config.model.max_length)

    def search(
        self,
        step: decoding.Step,
        cache: Any,
        batch: Mapping[str, jax.Array],
        greedy: bool,
    ) -> decoding.Hypotheses:
        """Return the outputs with the best scores of a step, by the method that the
        config selects, or by greedy search.
        """
        special = self.corpus.special_ids("target")
        return decoding.search(
            step,
            cache,
            self.config.decoding,
            only_greedy=greedy,
            row_ids=batch["index"],
            vocab_size=self.corpus.size("target"),
            batch_size=batch["source"].shape[0],
            max_length=self.most_tokens(batch),
            bos_id=special.begin,
            eos_id=special.end,
            pad_id=special.pad,
        )

    def with_output(
        self, batch: Mapping[str, jax.Array], outputs: decoding.Hypotheses
    ) -> dict[str, jax.Array]:
        """Return the batch with the best output of each row as its target."""
        tokens = outputs.tokens[:, 0]
        end_id = self.corpus.special_ids("target").end
        end = decoding.is_end(tokens, (end_id, *self.config.decoding.end_ids))
        ended = jnp.cumsum(end, axis=1) - end
        return {
            **batch,
            "target": tokens,
            "target_length": (ended == 0).sum(axis=1),
        }

    def completed(
        self, params: Params, batch: Mapping[str, jax.Array]
    ) -> Mapping[str, jax.Array]:
        """Return the batch with the model's own output as the target it may lack."""
        if "target" in batch:
            return batch
        step, cache = self.decoder(params, batch, greedy=False)
        outputs = self.search(step, cache, batch, greedy=False)
        return self.with_output(batch, outputs)

    def forward(self, params: Params, batch: Mapping[str, jax.Array]) -> Forward:
        """Return the logits of the target's tokens while the decoder reads it.

        Its first inputs are what the encoder reads, and those of the decoder follow.
        """
        (x, head), axes = self._teacher_forced(self.model, params, batch)
        logits = head(x)
        chosen = Axis(
            logits.argmax(axis=-1), axes["target"].lengths, axes["target"].shown
        )
        inputs = {"source": self.source_axis(batch, stride=1), "target": axes["input"]}
        return Forward(logits, chosen, inputs)

    def _teacher_forced(
        self,
        model: Any,
        params: Params,
        batch: Mapping[str, jax.Array],
        **options: Any,
    ) -> tuple[Any, dict[str, Axis]]:
        """Return what `teacher_forced` returns for the target of a batch, and the
        positions of what the decoder reads and predicts, see `attention`.
        """
        begin = self.corpus.special_ids("target").begin
        read = shift_right(jnp.asarray(batch["target"]), begin)
        output = model.apply(
            {"params": params},
            batch["source"],
            valid(batch, "source"),
            read,
            valid(batch, "target"),
            method=teacher_forced,
            **options,
        )
        length = batch["target_length"]
        shown = self.streams["target"].shown
        axes = {
            "target": Axis(batch["target"], length, shown),
            "input": Axis(read, length, shown),
        }
        return output, axes

    def source_axis(
        self, batch: Mapping[str, jax.Array], stride: int | None = None
    ) -> Axis:
        """Return what the vectors of the memory stand for, or with a stride of 1, those
        of the front end.
        """
        read_by = (self.streams["source"], self.model.front_end)
        if stride is None:
            stride = self.config.model.memory_stride
        return Axis(
            batch["source"],
            batch["source_length"],
            functools.partial(shown_vectors, *read_by, stride=stride),
            functools.partial(picture_of, *read_by, stride=stride),
        )

    def attention(
        self, params: Params, batch: Mapping[str, jax.Array]
    ) -> tuple[dict[tuple[str, str, str], jax.Array], dict[str, Axis]]:
        """Return attention weights while the decoder reads the target, or the model's
        own output without a target.

        The ids under "input" are what the decoder reads, and those under "target" are
        what it predicts.
        """
        batch = self.completed(params, batch)
        model = self.model.clone(config=with_weights(self.config.model))
        (_, sown), axes = self._teacher_forced(
            model, params, batch, mutable="intermediates"
        )
        axes = {"source": self.source_axis(batch)} | axes
        return model.attention_maps(sown["intermediates"]), axes

    # On the host.

    def batches(self, split: str, seed: int | None) -> Batches:
        if seed is None:
            return self._in_order(self.columns(split), split)
        return self.training_batches(split, seed)

    def training_batches(
        self, split: str, seed: int, rule: Rule | None = None
    ) -> Batches:
        """Return batches for training, without the examples that break `rule`."""
        columns = self.columns(split)
        data = self.config.data
        if advice := data.size_advice(len(columns["source"])):
            log.warning("%s", advice)
        return bucket_batches(
            self.corpus,
            columns,
            split=split,
            seed=seed,
            max_ratio=data.max_ratio,
            predicted="target",
            rule=rule,
        )

    def columns(self, split: str) -> dict[str, Sequence[Any]]:
        """Return the column of each stream in a split."""
        source = self.corpus.open(split)
        names = self.config.columns.names
        return dict(zip(self.streams, map(source.column, names), strict=True))

    def batches_of(self, records: Sequence[Record]) -> Batches:
        """Return batches in which a record's padded source length, and hence its
        translation, depends only on itself.

        A sampled translation also depends on the position of the record. A record of a
        source that is not text may be a JSON object as text.
        """
        names, needed = self.config.columns
        rows: Sequence[str | Mapping[str, Any]] = records
        arrays: Sequence[str] = ()
        if not self.reads_text:
            arrays = names[:1]
            rows = [as_object(row, names, i) for i, row in enumerate(records, 1)]
        source, target = columns_of(rows, names, needed, arrays)
        columns = {"source": source or []}
        if target is not None:
            columns["target"] = target
        return self._in_order(columns, "input")

    def _in_order(self, columns: Mapping[str, Sequence[Any]], what: str) -> Batches:
        """Return batches for evaluation.

        A blank source counts as empty, whatever the tokenizer makes of spaces.
        """
        model = self.config.model
        rows = self.config.evaluation.batch_size
        source = columns["source"]
        if self.reads_text:
            source = [line if line.strip() else "" for line in source]
        batches = ladder_batches(
            self.corpus,
            {**columns, "source": source},
            rows=rows,
            limit=model.max_length,
            source=what,
        )
        if self.reads_text:
            scores = self.config.evaluation.text_scores
            return with_sources(batches, scores, self.config.data)
        return batches._replace(
            records=ArrayRecords(self.config.columns.names[0], source)
        )

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"text", "score"} for each row.

        The score is log P / lp, by which beam search ranks, or log P for greedy search
        and sampling. The text is a single line, and "" for an empty source.

        With `decoding.n_best` above 1, return {"hypotheses": [{"text", "score",
        "log_probability"}, …]}, best first. There are fewer than `n_best` if the search
        finds no more, e.g. for an empty source.
        """
        decode = self.corpus.tokens("target").text
        ends = self.config.decoding.end_ids
        rows = [
            [
                {
                    "text": one_line(decode(before_end(tokens, ends))),
                    "score": float(score),
                    "log_probability": float(log_probability),
                }
                for tokens, score, log_probability in zip(*row, strict=True)
                if score != -math.inf
            ]
            for row in zip(
                outputs["tokens"],
                outputs["scores"],
                outputs["log_probabilities"],
                strict=True,
            )
        ]
        if self.config.decoding.n_best > 1:
            return [{"hypotheses": row} for row in rows]
        return [{name: row[0][name] for name in ("text", "score")} for row in rows]

    def score(
        self,
        means: Mapping[str, float],
        predictions: Sequence[dict[str, Any]],
        references: Sequence[Any],
    ) -> dict[str, float | str]:
        lines = [
            prediction.get("hypotheses", [prediction])[0]["text"]
            for prediction in predictions
        ]
        # as in the predictions
        of_lines = [[one_line(i) for i in texts_of(entry)] for entry in references]
        scores = {
            **metrics.loss_and_perplexity(means),
            **metrics.bleu(lines, of_lines, self.config.evaluation.bleu_tokenizer),
            "exact_match": metrics.exact_match(lines, of_lines),
        }
        if self.config.data.references > 1:
            scores |= metrics.caption_scores(lines, of_lines)
        chosen = self.config.evaluation.text_scores
        return scores | chosen_scores(chosen, lines, of_lines, references)

    def work(self, batch: Arrays) -> Work:
        """Return the work. Its tokens are those of the target."""
        tokens = int(batch["target_length"].sum())
        return super().work(batch)._replace(tokens=tokens)

    def preview(self, arrays: Arrays) -> list[str]:
        """Return lines that show the first pair, token by token.

        Raises:
            ValueError: a row has no token or no EOS, an id is not in the vocabulary, or
                the decoder's input reveals more of the target than the preceding
                tokens.
        """
        check_rows(arrays)
        rows = np.flatnonzero(arrays["index"] >= 0)
        for side, stream in self.streams.items():
            lengths = arrays[f"{side}_length"][rows]
            for fault, where in stream.faults(arrays[side][rows], lengths).items():
                for row in rows[where][:1]:
                    raise UserError(
                        f"row {row} of the first batch "
                        f"{fault} in its {side}: {arrays[side][row]}"
                    )
        begin = self.corpus.special_ids("target").begin
        target = arrays["target"]
        read = shift_right(target, begin)
        if (read[:, 0] != begin).any() or (read[:, 1:] != target[:, :-1]).any():
            raise UserError(
                "the decoder's input is not the target shifted by one: "
                "it may reveal the labels"
            )
        first = rows[0]
        parts = {"source": arrays["source"], "decoder input": read, "target": target}
        lines = ["the first pair of the first batch:"]
        for name, ids in parts.items():
            side = "source" if name == "source" else "target"
            shown = self.streams[side].shown
            tokens, _ = shown(ids[first, : arrays[f"{side}_length"][first]])
            lines.append(f"  {name:<13}  {' '.join(tokens)}")
        return lines

    def checks(
        self, params: Params, batch: Mapping[str, jax.Array]
    ) -> Mapping[str, float]:
        """Compare cached with uncached decoding, and measure how much logits depend
        on later tokens of the target.
        """
        source = batch["source"]
        source_valid = valid(batch, "source")
        begin = self.corpus.special_ids("target").begin
        read = shift_right(jnp.asarray(batch["target"]), begin)
        apply: Any = functools.partial(self.model.apply, {"params": params})
        cache = apply(source, source_valid, read.shape[1], method=start)

        def whole(read: jax.Array) -> jax.Array:
            x, head = apply(source, source_valid, read, method=teacher_forced)
            return head(x)

        extend = functools.partial(apply, method=self.model.extend)
        return cache_and_causality(
            whole, extend, cache, read, self.config.model.target_vocab_size
        )
