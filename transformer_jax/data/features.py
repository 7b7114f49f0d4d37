"""Features of tfds data sets as text.

| feature | text |
|---|---|
| text | itself |
| label | its name, or "-1" if the label is withheld, e.g. in the test splits of GLUE |
| number | in its shortest form, e.g. "3.8" |
| sequence of texts or labels | separated by spaces, e.g. words and tags |
| answers, as in SQuAD | JSON list of objects with "text" and "start" |
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from transformer_jax.errors import UserError

# The values of an example, keyed by feature, in the order of the file. Nested features
# have keys like "answers/text".
Values = Mapping[str, Sequence[Any]]
Reader = Callable[[Values], str]

# Columns of `annotated.conll_file`, and the features that have the same content in
# conll2003.
SYNONYMS = {"words": "tokens", "tags": "ner"}


def readers(features: Mapping[str, Any]) -> dict[str, Reader]:
    """Return, for each feature that can be read as text, the function that does so.

    The functions raise UnicodeDecodeError if a text is not UTF-8, and ValueError if a
    text in a sequence is empty or contains white space.
    """
    by_key = {
        key: reader
        for key, feature in features.items()
        if (reader := _reader(key, feature))
    }
    by_synonym = {name: by_key[key] for name, key in SYNONYMS.items() if key in by_key}
    return by_synonym | by_key


def _reader(key: str, feature: Any) -> Reader | None:
    from tensorflow_datasets import features as kinds

    is_sequence = isinstance(feature, kinds.Sequence)
    inner = feature.feature if is_sequence else feature
    if (
        is_sequence
        and isinstance(inner, kinds.FeaturesDict)
        and inner.keys() >= {"text", "answer_start"}
    ):
        return lambda values: _answers(
            values[f"{key}/text"], values[f"{key}/answer_start"]
        )
    text = _scalar(inner)
    if text is None:
        return None
    return (
        (lambda values: _joined(map(text, values[key])))
        if is_sequence
        else (lambda values: text(values[key][0]))
    )


def _scalar(feature: Any) -> Callable[[Any], str] | None:
    """Return the function that turns a value of a feature into text, or None for
    images and other arrays.
    """
    from tensorflow_datasets import features as kinds

    if not isinstance(feature, kinds.Tensor) or feature.shape != ():
        return None
    if isinstance(feature, kinds.ClassLabel) and feature.num_classes:
        names = feature.names
        return lambda label: names[label] if label >= 0 else str(label)
    kind = np.dtype(feature.np_dtype).type
    # as a Python float, 3.8 has 17 digits
    return _text if kind is np.object_ else lambda number: str(kind(number))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _joined(texts: Iterator[str]) -> str:
    words = list(texts)
    line = " ".join(words)
    if line.split() != words:
        raise UserError(f"has empty texts or white space in {words}")
    return line


def _answers(texts: Sequence[bytes], starts: Sequence[int]) -> str:
    answers = [
        {"text": _text(text), "start": start}
        for text, start in zip(texts, starts, strict=True)
    ]
    return json.dumps(answers, ensure_ascii=False)


def foreign_class(folder: epath.Path) -> str | None:
    """Return a class in the features.json of a prepared data set whose module tfds
    would import, or None.

    The modules of tfds, and those that the user has imported, may be named there. No
    other module is imported because of a file.

    Args:
        folder: the folder of the data set, with a folder for each version, or for each
            configuration and version.
    """
    for path in (*folder.glob("*/features.json"), *folder.glob("*/*/features.json")):
        for name in _classes(json.loads(path.read_text())):
            module = name.rpartition(".")[0]
            if module not in sys.modules and not module.startswith(
                "tensorflow_datasets."
            ):
                return name
    return None


def _classes(content: Any) -> Iterator[str]:
    """Yield the names of classes in the content of a features.json, in its present
    and its former layout.
    """
    if isinstance(content, list):
        for item in content:
            yield from _classes(item)
    elif isinstance(content, dict):
        for key, value in content.items():
            if isinstance(value, str) and key in (
                "pythonClassName",
                "python_class_name",
                "type",
            ):
                yield value
            yield from _classes(value)
