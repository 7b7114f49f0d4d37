"""Transcription: the words of a recording.

Three models: an encoder–decoder with attention, an encoder with connectionist temporal
classification (CTC, Graves et al. 2006), or both with one encoder (Kim et al. 2017).
`training.ctc_weight` selects the model, and `decoding.ctc_weight` what its outputs are
scored by. The decoder with attention is that of `SequenceToSequence`. What is new here
is CTC, and the word error rate.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import decoding, losses, metrics
from transformer_jax.data.batching import Batches
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import Rule
from transformer_jax.data.ragged import Ragged
from transformer_jax.decoding import ctc
from transformer_jax.decoding.steps import never_chosen
from transformer_jax.errors import UserError
from transformer_jax.files import one_line
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.layers import Head, OutputLayer
from transformer_jax.models.transformer import shift_right
from transformer_jax.tasks.inputs import layout_of
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.tasks.text import valid
from transformer_jax.tasks.transcription_config import TranscriptionConfig
from transformer_jax.training.metric import LOSS, Metric
from transformer_jax.training.task import (
    Arrays,
    Attention,
    Axis,
    DeviceArrays,
    Mean,
    Means,
    Outputs,
    Params,
    Predictions,
    Record,
    Scores,
    Step,
    Task,
    Work,
)

log = logging.getLogger(__name__)

SHOWN = 3  # examples that a warning names


def memory_and_teacher_forced(
    model: EncoderDecoder,
    source: jax.Array,
    source_valid: jax.Array,
    target: jax.Array,
    target_valid: jax.Array,
    step: Step,
) -> tuple[Any, jax.Array, Head]:
    """Return the memory, the decoder's output (B, T, D) if it reads ids (B, T), and the
    head that maps it to logits.

    Pass it to `model.apply` as the method.
    """
    memory = model.encode(source, source_valid)
    x = model.hidden(memory, target, target_valid, step)
    return memory, x, model.head()


class Transcription(Task):
    """Prediction of the words of a recording.

    A batch is that of `SequenceToSequence`. The parameters are "model", those of the
    encoder and the decoder, and with CTC also "ctc", those of its output layer. Its
    blank has the id of EOS, which is no label.
    """

    metrics: ClassVar = {
        "loss": LOSS,
        "word_error_rate": Metric("word_error_rate (greedy)", better="lower"),
        "substitutions": Metric("substitutions (greedy)", better="lower"),
        "deletions": Metric("deletions (greedy)", better="lower"),
        "insertions": Metric("insertions (greedy)", better="lower"),
        "exact_match": Metric("exact_match (greedy)", better="higher"),
    }
    corpus: Corpus

    def __init__(self, config: TranscriptionConfig, workdir: epath.PathLike | None):
        self.attention_task = SequenceToSequence(config.without_ctc, workdir)
        super().__init__(config, self.attention_task.corpus)
        self.streams = self.attention_task.streams
        self.model = self.attention_task.model
        self.has_ctc = config.training.ctc_weight > 0
        self.has_decoder = config.training.ctc_weight < 1
        self.ctc = OutputLayer(
            config.model.target_vocab_size,
            config.model.memory_width,
            config.model.vocab_multiple,
            use_bias=True,
            dtype=config.model.dtype,
        )

    # On the device.

    def init(self, key: jax.Array) -> Params:
        params = {}
        if self.has_decoder:
            params["model"] = self.attention_task.init(key)
        else:
            stream = self.streams["source"]
            source = jnp.zeros((1, 1, *stream.trailing), stream.dtype)
            encode: Any = self.model.encode
            params["model"] = self.model.init(key, source, method=encode)["params"]
        if self.has_ctc:
            key = jax.random.fold_in(key, 1)
            params["ctc"] = self.ctc.init(key, method=OutputLayer.head)["params"]
        return params

    def _ctc_logits(self, params: Params, memory: Any) -> jax.Array:
        """Return the logits (B, S', V) of CTC at each position of the memory."""
        head: Any = self.ctc.apply({"params": params["ctc"]}, method=OutputLayer.head)
        return head(memory.vectors)

    def _means(
        self,
        params: Params,
        batch: DeviceArrays,
        key: jax.Array | None = None,
        step: Step = 0,
        label_smoothing: float = 0.0,
    ) -> Means:
        """Return the terms of the objective per token of the target, including EOS:
        (1 - λ) · attention + λ · CTC (Kim et al. 2017).

        Rows without an alignment have no weight in CTC.
        """
        apply: Any = functools.partial(
            self.model.apply,
            {"params": params["model"]},
            batch["source"],
            valid(batch, "source"),
            rngs=None if key is None else {"dropout": key},
        )
        target = jnp.asarray(batch["target"])
        target_valid = valid(batch, "target")
        weight = self.config.training.ctc_weight
        means = {}
        if self.has_decoder:
            reading = shift_right(target, self.corpus.special_ids("target").begin)
            memory, x, head = apply(
                reading, target_valid, step, method=memory_and_teacher_forced
            )
            total, count = losses.token_cross_entropy(
                head, x, target, target_valid, label_smoothing
            )
            means["attention"] = Mean(total, count, scale=1 - weight)
        else:
            memory = apply(method=self.model.encode)
        if self.has_ctc:
            # the labels are the tokens before EOS
            label_valid = jnp.pad(target_valid[:, 1:], ((0, 0), (0, 1)))
            logits = self._ctc_logits(params, memory)
            each, defined = losses.ctc(
                logits, memory.valid, target, label_valid, self.blank
            )
            count = (target_valid.sum(axis=1) * defined).sum()
            means["ctc"] = Mean(each.sum(), count.astype(jnp.float32), scale=weight)
        return means

    def loss(
        self, params: Params, batch: DeviceArrays, key: jax.Array, step: Step
    ) -> Means:
        smoothing = self.config.training.label_smoothing
        return self._means(params, batch, key, step, smoothing)

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """Return the terms of the loss without smoothing, and the outputs of
        `SequenceToSequence.evaluate`.
        """
        means = self._means(params, batch) if "target" in batch else {}
        return means, self._transcribe(params, batch, greedy)._asdict()

    @property
    def blank(self) -> int:
        """The id of no label at a position: that of EOS."""
        return self.corpus.special_ids("target").end

    def _encode(self, params: Params, batch: DeviceArrays) -> Any:
        """Return the memory of the sources of a batch, without dropout."""
        return self.model.apply(
            {"params": params["model"]},
            batch["source"],
            valid(batch, "source"),
            method=self.model.encode,
        )

    def _posteriors(self, params: Params, batch: DeviceArrays) -> jax.Array:
        """Return the log-probabilities (B, S', V) of CTC for the sources of a batch.

        An empty source is certainly blank, even if its row has an EOS.
        """
        memory = self._encode(params, batch)
        logits = self._ctc_logits(params, memory)
        added = self.streams["source"].added(begin=False, end=True)
        is_empty = jnp.asarray(batch["source_length"])[:, None] <= added
        return ctc.log_probabilities(logits, memory.valid & ~is_empty, self.blank)

    def _unused_id(self) -> int:
        """Return an id that no output contains, see `ctc.joint`.

        Raises:
            ValueError: the tokenizer has no such id.
        """
        special = self.corpus.special_ids("target")
        ends = (special.end, *self.config.decoding.end_ids)
        unused = never_chosen(special.begin, special.pad, ends)
        if not unused:
            raise UserError(
                "decoding by attention and CTC together needs a tokenizer with an id "
                "for padding or for the begin of a text: use one, or set "
                "decoding.ctc_weight to 0.0 or 1.0"
            )
        return unused[0]

    def _transcribe(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> decoding.Hypotheses:
        """Return the best outputs by (1 - μ) · log P of the decoder + μ · log P of CTC,
        divided by the length penalty (Watanabe et al. 2017), found in one search.
        """
        weight = self.config.decoding.ctc_weight
        if weight == 0:
            step, cache = self.attention_task.decoder(params["model"], batch, greedy)
            return self.attention_task.search(step, cache, batch, greedy)
        posteriors = self._posteriors(params, batch)
        options = self.config.decoding
        is_sampled = options.temperature > 0
        has_one_output = greedy or (options.beam_size == 1 and not is_sampled)
        if weight == 1 and has_one_output:
            longest = self.attention_task.most_tokens(batch)
            return ctc.best_path(posteriors, longest, self.blank)
        scorer: tuple[decoding.Step, Any] = ctc.prefixes(posteriors, self.blank)
        if weight < 1:
            decoder = self.attention_task.decoder(params["model"], batch, greedy)
            beams = decoding.beams(options, greedy)
            scorer = ctc.joint(decoder, scorer, weight, beams, self._unused_id())
        return self.attention_task.search(*scorer, batch, greedy)

    def attention(self, params: Params, batch: DeviceArrays) -> Attention:
        """Return attention weights while the decoder reads the target, or the task's
        own output without one, and by CTC the probability of each label of this text,
        and of the blank, at each position.
        """
        if "target" not in batch:
            outputs = self._transcribe(params, batch, greedy=False)
            batch = self.attention_task.with_output(batch, outputs)
        maps: dict[tuple[str, str, str], jax.Array] = {}
        axes: dict[str, Axis] = {}
        if self.has_decoder:
            maps, axes = self.attention_task.attention(params["model"], batch)
        if self.has_ctc:
            labels = batch["target"]  # the last is the end, whose id is the blank's
            posteriors = jnp.exp(self._posteriors(params, batch))  # (B, S', V)
            of_labels = jnp.take_along_axis(posteriors, labels[:, None], axis=2)
            by_label = of_labels.swapaxes(1, 2)  # (B, T, S')
            maps["probability by CTC", "label", "source"] = by_label[:, None, None]
            axes["source"] = self.attention_task.source_axis(batch)
            axes["label"] = Axis(labels, batch["target_length"], self._shown_labels)
        return maps, axes

    def _shown_labels(self, ids: np.ndarray) -> tuple[list[str], str]:
        """Return readable labels, "–" for the blank, and the text."""
        labels, text = self.streams["target"].shown(ids)
        shown = zip(ids, labels, strict=True)
        return ["–" if i == self.blank else label for i, label in shown], text

    # On the host.

    def positions(self, length: int) -> int:
        """Return the number of positions that the encoder makes of `length` ones."""
        layout = layout_of(self.model.front_end, length)
        return -(-layout.rows * layout.columns // self.config.model.memory_stride)

    def batches(self, split: str, seed: int | None) -> Batches:
        """Return batches of a split. In training, a recording is left out if CTC has
        no alignment of its text.
        """
        if seed is None or not self.has_ctc:
            return self.attention_task.batches(split, seed)
        table = self.corpus.open(split)

        def broken(streams: Mapping[str, Ragged], others: np.ndarray) -> np.ndarray:
            room = self._positions_of(streams["source"].lengths)
            needed = aligned_positions(streams["target"])
            too_short = (needed > room) & others
            for i in np.flatnonzero(too_short)[:SHOWN]:
                log.warning(
                    "%s is left out: CTC needs %d positions for the text, "
                    "and the encoder makes %d of the recording",
                    table.place(i),
                    needed[i],
                    room[i],
                )
            return too_short

        rule = Rule("with too few positions for CTC", broken)
        return self.attention_task.training_batches(split, seed, rule)

    def _positions_of(self, lengths: np.ndarray) -> np.ndarray:
        """Return the positions of the memory for sources of `lengths` (n,)."""
        distinct, inverse = np.unique(lengths, return_inverse=True)
        return np.array([*map(self.positions, distinct)])[inverse]

    def batches_of(self, records: Sequence[Record]) -> Batches:
        return self.attention_task.batches_of(records)

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        """See `Task.dummy_batch`. With CTC, texts are cut so that each has an
        alignment.
        """
        batch = super().dummy_batch(rows, length, seed, references)
        if not self.has_ctc or "target" not in batch:
            return batch
        target = batch["target"]
        added = self.streams["source"].added(begin=False, end=True)
        room = self._positions_of(batch["source_length"])
        room = np.where(batch["source_length"] > added, room, 0)
        is_same = np.pad(target[:, 1:] == target[:, :-1], ((0, 0), (1, 0)))
        needed = np.cumsum(1 + is_same, axis=1)
        fitting = (needed <= room[:, None]).sum(axis=1)
        labels = np.minimum(fitting, batch["target_length"] - 1)
        place = np.arange(target.shape[1])
        target = np.where(place < labels[:, None], target, 0)
        target[np.arange(rows), labels] = self.blank
        batch["target"] = target
        batch["target_length"] = (labels + 1).astype(np.int32)
        return batch

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """See `SequenceToSequence.decode`."""
        return self.attention_task.decode(outputs, batch)

    def score(
        self,
        means: Mapping[str, float],
        predictions: Predictions,
        references: Sequence[Any],
    ) -> Scores:
        """Return the loss, the word error rate, see `metrics.word_error_rate`, and the
        share of texts without an error.
        """
        lines = [
            prediction.get("hypotheses", [prediction])[0]["text"]
            for prediction in predictions
        ]
        references = [one_line(reference) for reference in references]
        weight = self.config.training.ctc_weight
        scales = {"attention": 1 - weight, "ctc": weight}
        loss: Scores = {}
        if means:
            loss["loss"] = sum(scales[name] * value for name, value in means.items())
        return {
            **loss,
            **metrics.word_error_rate(lines, references),
            "exact_match": metrics.exact_match(lines, references),
        }

    def preview(self, arrays: Arrays) -> list[str]:
        """See `SequenceToSequence.preview`.

        Raises:
            ValueError: also if the tokenizer has no id that joint decoding needs.
        """
        if 0 < self.config.decoding.ctc_weight < 1:
            self._unused_id()
        return self.attention_task.preview(arrays)

    def work(self, batch: Arrays) -> Work:
        """Return the work. Its tokens are those of the target."""
        tokens = int(batch["target_length"].sum())
        return super().work(batch)._replace(tokens=tokens)

    def checks(self, params: Params, batch: DeviceArrays) -> Mapping[str, float]:
        """Return those of `SequenceToSequence`, and compare log P of the labels by the
        loss of CTC with the sum of their scores in a search.
        """
        found: dict[str, float] = {}
        if self.has_decoder:
            found |= self.attention_task.checks(params["model"], batch)
        if self.has_ctc:
            loss, scores = jax.jit(self._log_p_by_loss_and_search)(params, batch)
            # all may be 0
            largest = jnp.maximum(jnp.abs(loss).max(), 1e-9)
            difference = jnp.abs(loss - scores).max() / largest
            found["scores of CTC = loss of CTC"] = float(difference)
        return found

    def _log_p_by_loss_and_search(
        self, params: Params, batch: DeviceArrays
    ) -> tuple[jax.Array, jax.Array]:
        """Return log P of the labels of each row (B,) by CTC, as computed by the loss
        and by a search. Both are 0 where there is no alignment.
        """
        target = jnp.asarray(batch["target"])
        target_valid = valid(batch, "target")
        posteriors = self._posteriors(params, batch)
        step, empty = ctc.prefixes(posteriors, self.blank)

        def add(
            before: tuple[ctc.Prefix, jax.Array], t: jax.Array
        ) -> tuple[tuple[ctc.Prefix, jax.Array], jax.Array]:
            prefix, newest = before
            logits, prefix = step(prefix, newest, t)
            token = target[:, t]
            scores = jax.nn.log_softmax(logits)
            score = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0]
            return (prefix, token), score * target_valid[:, t]

        _, scores = jax.lax.scan(
            add, (empty, target[:, 0]), jnp.arange(target.shape[1])
        )
        labels = jnp.pad(target_valid[:, 1:], ((0, 0), (0, 1)))
        of_source = self._encode(params, batch).valid
        each, defined = losses.ctc(posteriors, of_source, target, labels, self.blank)
        return -each, jnp.where(defined, scores.sum(axis=0), 0)


def aligned_positions(texts: Ragged) -> np.ndarray:
    """Return the fewest positions (n,) of an alignment of each text, whose last id is
    EOS: one for each label, and a blank between equal neighbours.
    """
    labels = texts.lengths - 1
    is_same = texts.values[1:] == texts.values[:-1]
    before = np.concatenate([[0], np.cumsum(is_same)])
    return labels + before[texts.offsets[1:] - 1] - before[texts.offsets[:-1]]
