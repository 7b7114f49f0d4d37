"""Pre-training of BERT: masked language modelling and next-sentence prediction (Devlin et al. 2019, Section 3.1)."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import losses, metrics
from transformer_jax.data import masking
from transformer_jax.data.annotated import documents_file
from transformer_jax.data.batching import Batch, Batches, BatchPlan, ladder_lengths, padded_arrays
from transformer_jax.data.examples import columns_of
from transformer_jax.data.masking import Documents, MaskingConfig, Segments
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.text import Corpus, Stream, TextData, cut
from transformer_jax.data.tokenizers import TokenizerError
from transformer_jax.models.bert import BertConfig, Pretraining
from transformer_jax.tasks.text import SegmentTask, TextTaskConfig
from transformer_jax.training.task import Arrays, Mean, Outputs, Params, Record, Work

log = logging.getLogger(__name__)

MASK = "[MASK]"  # stands for a masked token in text to predict from
SHOWN = 5  # most probable tokens shown for each


@dataclasses.dataclass(frozen=True)
class PretrainingConfig(TextTaskConfig):
    """The config sections of pre-training. `data.max_length` is the length of a sequence, including special tokens."""

    model: BertConfig
    data: TextData
    masking: MaskingConfig

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with each other."""
        yield from super().problems()
        if self.data.max_length < 5:
            yield "data.max_length", "must be at least 5: two segments and three special tokens"
        if self.model.causal and self.masking.next_sentence:
            yield "masking.next_sentence", "must be False with model.causal, as in the paper's left-to-right model"
        if self.data.source != "files":
            yield "data.source", "must be 'files': a tfds data set has no documents of sentences"


class BertPretraining(SegmentTask):
    """Prediction of masked tokens, and of whether one segment follows another.

    A batch holds "text" (B, T), "text_length" (B,), "second" (B,), the place where the second segment starts, "paired"
    and "follows" (B,), which are 0 or 1, and "index" (B,); "positions" and "label" (B, P) are the places and ids of the
    predicted tokens, of which row b has "masked" (B,). A causal model predicts every next token instead.

    In prediction, [MASK] in a text stands for a token to predict.
    """

    Config = PretrainingConfig
    metrics: ClassVar = {name: name for name in ("loss", "perplexity", "masked_accuracy", "next_sentence_accuracy")}

    def __init__(self, config: PretrainingConfig, workdir: epath.PathLike | None):
        super().__init__(config, workdir)
        self.model = Pretraining(config.model)
        streams = {"text": Stream("text", "tokenizer.json", config.model.vocab_size, "model.vocab_size")}
        self.corpus = Corpus(
            config.data, streams, workdir, documents_file, ("document",), start=config.init_from or None
        )

    def _forward(self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array | None = None) -> Any:
        """Return the vectors of masked positions, their map to logits, and the next-sentence logits."""
        rngs = None if key is None else {"dropout": key}
        return self.model.apply({"params": params}, *self.arguments(batch), batch["positions"], rngs=rngs)

    def _means(self, outputs: Any, batch: Mapping[str, jax.Array], counted: jax.Array) -> dict[str, Mean]:
        (vectors, lm_head, follows), model = outputs, self.config.model
        masked = losses.next_token(lm_head, vectors, batch["label"], counted, model.vocab_size, model.dtype)
        means = {"masked_lm": Mean(*masked)}
        if self.config.masking.next_sentence:
            paired, label = (batch["paired"] > 0) & (batch["text_length"] > 0), batch["follows"]
            pairs, right = paired.sum().astype(jnp.float32), (follows.argmax(axis=-1) == label) & paired
            loss, _ = losses.cross_entropy(follows[:, None], label[:, None], paired[:, None], vocab_size=2)
            means["next_sentence"] = Mean(loss, pairs)
            means["next_sentence_accuracy"] = Mean(right.sum().astype(jnp.float32), pairs, scale=0)
        return means

    @staticmethod
    def _counted(batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return (B, P), True at the positions to predict."""
        count = jnp.where(batch["text_length"] > 0, batch["masked"], 0)
        return jnp.arange(batch["positions"].shape[1])[None] < count[:, None]

    def loss(
        self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array, step: jax.Array | int
    ) -> dict[str, Mean]:
        return self._means(self._forward(params, batch, key), batch, self._counted(batch))

    def evaluate(self, params: Params, batch: Mapping[str, jax.Array], greedy: bool) -> tuple[dict[str, Mean], Outputs]:
        """Return the means with the accuracy, or for text to predict from, the most probable tokens (B, P, SHOWN)."""
        outputs, counted, model = self._forward(params, batch), self._counted(batch), self.config.model
        vectors, lm_head, _ = outputs
        if "label" not in batch:
            known = min(SHOWN, model.vocab_size)
            probabilities, ids = jax.lax.top_k(jax.nn.softmax(lm_head(vectors, model.vocab_size, model.dtype)), known)
            return {}, {"probabilities": probabilities, "ids": ids}

        def right(lm_head: Any, x: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
            found = lm_head(x, model.vocab_size, model.dtype).argmax(axis=-1)
            return ((found == labels) & weights).sum().astype(jnp.float32)

        means = self._means(outputs, batch, counted)
        found = losses.sum_in_chunks(right, lm_head, vectors, batch["label"], counted)
        return means | {"masked_accuracy": Mean(found, means["masked_lm"].weight, scale=0)}, {}

    def batches(self, split: str, seed: int | None) -> Batches:
        """Return one example per chunk. Without a seed, segments and masks are the same every time."""
        data, config, tokenizer = self.config.data, self.config.masking, self._tokenizer()
        table = self.corpus.open(split)
        sentences = tokenizer.encode(table.column("text"))
        if (cut := int((sentences.lengths > data.max_length - 3).sum())) > 0:
            log.warning("%s: %d of %d sentences cut to %d tokens", split, cut, len(sentences), data.max_length - 3)
        numbers = np.array(list(map(int, table.column("document"))))
        documents = Documents(sentences, numbers, data.max_length - 3, config)
        lengths = (documents.sizes + 2 + documents.paired)[:, None]
        if seed is None:
            plan = BatchPlan.ladder(lengths, ladder_lengths(data.max_length), self.config.evaluation.batch_size)
        else:
            plan = self.corpus.plan(lengths, seed)
        paired = int(documents.paired.sum())
        log.info("%s: %d documents, %d chunks, %d with pairs", split, len(np.unique(numbers)), len(lengths), paired)

        def load(batch: Batch) -> Arrays:
            draw = np.random.default_rng((seed or 0, batch.number, 1))
            rows = [documents.draw(i, draw) if i >= 0 else None for i in batch.indices]
            return self._arrays(rows, batch, draw, tokenizer)

        return Batches(plan, load)

    def _arrays(
        self, rows: Sequence[Segments | None], batch: Batch, draw: np.random.Generator, tokenizer: Any
    ) -> Arrays:
        """Return the arrays of a batch, with masks, or for a causal model with every next token as a label."""
        config, (length,) = self.config.masking, batch.shape
        text, lengths, second, candidates = masking.assemble(rows, length, tokenizer.bos_id, tokenizer.eos_id)
        if self.config.model.causal:
            place = np.arange(length - 1, dtype=np.int32)
            found = masking.Masked(text, np.tile(place, (len(text), 1)), text[:, 1:], np.maximum(lengths - 1, 0))
        else:
            special = [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.mask_id]
            others = np.setdiff1d(np.arange(tokenizer.size), [i for i in special if i is not None])
            continues = tokenizer.continues if config.whole_word else None
            found = masking.mask(text, candidates, draw, config, tokenizer.mask_id, others, continues)
        return {
            "text": found.text,
            "text_length": lengths,
            "second": second,
            "paired": np.array([row is not None and row.second is not None for row in rows], np.int32),
            "follows": np.array([row is not None and row.follows for row in rows], np.int32),
            "positions": found.positions,
            "label": found.labels,
            "masked": found.counts,
            "index": batch.indices.astype(np.int32),
        }

    def _tokenizer(self) -> Any:
        """Return the tokenizer. Raises TokenizerError if it has no [CLS], [SEP] or [MASK]."""
        tokenizer = self.corpus.tokenizers["text"]
        if None in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id):
            raise TokenizerError(
                f"config.data.tokenizer = {self.config.data.tokenizer!r}: pre-training needs a tokenizer with the "
                "special tokens [CLS], [SEP] and [MASK]; set it to 'bert'"
            )
        return tokenizer

    def batches_of(self, records: Sequence[Record]) -> Batches:
        """Return batches of texts in which [MASK] stands for a token to predict. Long texts are cut."""
        (text,), tokenizer = columns_of(records, self.columns), self._tokenizer()
        parts = [line.split(MASK) for line in text or ()]
        pieces = iter(tokenizer.encode_batch([part for line in parts for part in line]))
        rows = []
        for line in parts:
            found = [tokenizer.bos_id]
            for i in range(len(line)):
                found += [*([tokenizer.mask_id] if i else []), *next(pieces)]
            rows.append([*found, tokenizer.eos_id])
        ids = cut(Ragged.of(rows), self.config.model.max_length, "input")
        most = max(max(line.count(MASK) for line in text or [""]), 1)
        rows_at_once = self.config.evaluation.batch_size
        plan = BatchPlan.ladder(ids.lengths, ladder_lengths(self.config.model.max_length), rows_at_once)

        def load(batch: Batch) -> Arrays:
            arrays = padded_arrays({"text": ids}, {}, batch)
            masked = arrays["text"] == tokenizer.mask_id
            first = np.argsort(~masked, axis=1, kind="stable")[:, :most].astype(np.int32)
            positions = np.pad(first, ((0, 0), (0, most - first.shape[1])))
            count = masked.sum(axis=1, dtype=np.int32)
            return arrays | {"second": arrays["text_length"], "positions": positions, "masked": count}

        return Batches(plan, load, text or ())

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"masks": for each [MASK], the most probable tokens with their probabilities}; {} for a split."""
        if "ids" not in outputs:
            return [{} for _ in batch["index"]]
        shown = self.corpus.tokenizers["text"].shown
        found = zip(outputs["ids"], outputs["probabilities"], batch["masked"], strict=True)
        return [
            {
                "masks": [
                    dict(zip(shown(tokens), map(float, probability), strict=True))
                    for tokens, probability in zip(ids[:count], probabilities, strict=False)
                ]
            }
            for ids, probabilities, count in found
        ]

    def score(
        self, means: Mapping[str, float], predictions: Sequence[dict[str, Any]], references: Sequence[Any]
    ) -> dict[str, float | str]:
        """Return the objective as "loss", the perplexity of masked tokens, and the accuracies."""
        if not means:
            return {}
        perplexity = metrics.loss_and_perplexity({"loss": means["masked_lm"]})["perplexity"]
        accuracies = {name: value for name, value in means.items() if name.endswith("accuracy")}
        return {"loss": means["masked_lm"] + means.get("next_sentence", 0.0), "perplexity": perplexity, **accuracies}

    def dummy_batch(self, rows: int, length: int, seed: int | None = None) -> Arrays:
        draw, model = np.random.default_rng(seed or 0), self.config.model
        lengths = np.full(rows, length) if seed is None else draw.integers(1, length + 1, rows)
        most = length - 1 if model.causal else masking.most_masked(length, self.config.masking.rate)
        count = np.minimum(lengths, most)
        arrays = {
            "text": draw.integers(0, model.vocab_size, (rows, length)),
            "text_length": lengths,
            "second": draw.integers(0, lengths + 1),
            "paired": draw.integers(0, 2, rows),
            "follows": draw.integers(0, 2, rows),
            "positions": draw.integers(0, lengths[:, None], (rows, most)),
            "label": draw.integers(0, model.vocab_size, (rows, most)),
            "masked": count,
            "index": np.arange(rows),
        }
        return {name: array.astype(np.int32) for name, array in arrays.items()}

    def work(self, batch: Arrays) -> Work:
        """Add the head of masked LM, a D × D and a D × V product at each predicted position."""
        tokens, flops = super().work(batch)
        d, v = self.config.model.d_model, self.config.model.vocab_size
        return Work(tokens, flops + 3 * 2 * float(batch["masked"].sum()) * (d * d + d * v))

    def preview(self, arrays: Arrays) -> list[str]:
        tokens, _ = self.tokens("text", arrays["text"][0, : arrays["text_length"][0]])
        labels, _ = self.tokens("text", arrays["label"][0, : arrays["masked"][0]])
        return ["the first example of the first batch:", f"  {' '.join(tokens)}", f"  to predict: {' '.join(labels)}"]
