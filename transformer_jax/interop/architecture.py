"""A class of transformers: its counterpart here, its config and the outputs of its
head.
"""

import abc
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
from jax import Array

from transformer_jax.data.words import PREFIXES
from transformer_jax.interop.layouts import Entry
from transformer_jax.interop.tensors import InteropError

Json = Mapping[str, Any]
NOTHING: Mapping[str, Any] = types.MappingProxyType({})
# Fields of ours that few classes have, and their values in all others.
PLAIN = {
    "attention_output_bias": True,
    "attention_window": 0,
    "qk_norm": False,
    "rotary_scaling": "none",
}
# What torch.compile, DistributedDataParallel, FSDP and PEFT put into names of tensors.
INSIDE = r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
WRAPPERS = re.compile(rf"^(module\.|base_model\.model\.|{INSIDE})+|{INSIDE}")


class FieldError(InteropError):
    """Raised for a field of our model config whose value breaks a rule."""

    def __init__(self, field: str, value: Any, rule: str):
        super().__init__(f"config.model.{field} = {value!r}: {rule}")
        self.field = field
        self.value = value
        self.rule = rule


def widths(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the widths of heads that share d_model. Raises FieldError if they
    cannot.
    """
    width = fields["d_model"]
    heads = fields["num_heads"]
    if heads < 1:
        raise FieldError("num_heads", heads, "must be at least 1")
    if width % heads:
        raise FieldError(
            "d_model", width, f"must be a multiple of the number of heads, {heads}"
        )
    return {"head_dim": width // heads, "value_dim": width // heads}


@dataclasses.dataclass(frozen=True)
class ConfigMap:
    """The keys of their config.json that describe a model, and the fields of our model
    config, in both directions.

    model: our class of the model config.
    names: their key → (our field, transformers' default).
    choices: their key → (our field, transformers' default, {value of theirs: value of
        ours}). The first of several equal values of ours is the one that is written.
    theirs: keys of theirs that must have these values. They are transformers' defaults,
        and are not written.
    ours: fields of ours that have these values.
    free: fields of `PLAIN` that a subclass reads and writes.
    derived: fields of ours that follow from the others, by default the width of heads.
    aliases: other names of their keys, which transformers reads as well.
    more: further keys of theirs that are read, or that have no effect.
    """

    model: type
    names: Mapping[str, tuple[str, Any]]
    choices: Mapping[str, tuple[str, Any, Mapping[Any, Any]]] = dataclasses.field(
        default_factory=dict
    )
    theirs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ours: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = widths
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: Collection[str] = ()
    free: Collection[str] = ()

    @property
    def fixed(self) -> dict[str, Any]:
        """The fields of ours that have the same values in every model."""
        known = {field for field, *_ in [*self.names.values(), *self.choices.values()]}
        plain = {
            field: value
            for field, value in PLAIN.items()
            if field not in known and field not in self.free
        }
        return plain | dict(self.ours)

    @property
    def supported(self) -> set[str]:
        """The keys of theirs that are read."""
        return {*self.names, *self.choices, *self.theirs, *self.aliases, *self.more}

    def _with_names(self, config: Json) -> Json:
        """Return the config without aliases.

        Raises InteropError if a key and its alias have different values.
        """
        renamed = dict(config)
        for alias, key in self.aliases.items():
            value = renamed.pop(alias, None)
            if value is not None and renamed.setdefault(key, value) != value:
                raise InteropError(
                    f"config.json: {alias} = {value!r} "
                    f"and {key} = {renamed[key]!r} mean the same and differ: remove one"
                )
        return renamed

    def read(self, config: Json) -> dict[str, Any]:
        """Return fields of our model config.

        Raises InteropError for values that are invalid or not supported.
        """
        try:
            fields = self.fields(self._with_names(config))
            for field, rule in self.model(**fields).problems():
                raise FieldError(field, fields.get(field), rule)
        except FieldError as error:
            keys = {
                field: key
                for key, (field, *_) in {**self.names, **self.choices}.items()
            }
            key = keys.get(error.field, error.field)
            raise InteropError(
                f"config.json: {key} = {error.value!r} (here, "
                f"config.model.{error.field}): {error.rule}"
            ) from error
        return fields

    def fields(self, config: Json) -> dict[str, Any]:
        """Return fields of our model config.

        Raises InteropError for values that we do not support.

        The values of single fields are checked in `read`.
        """
        for key, value in self.theirs.items():
            if config.get(key, value) != value:
                raise InteropError(
                    "config.json: "
                    f"{key} = {config[key]!r} is not supported, only {value!r}"
                )
        kinds = typing.get_type_hints(self.model)
        fields = {
            field: typed(config, key, default, kinds[field])
            for key, (field, default) in self.names.items()
        }
        for key, (field, default, values) in self.choices.items():
            if (value := config.get(key, default)) not in list(values):
                raise InteropError(
                    f"config.json: {key} = {value!r} is not supported: "
                    f"choose from {', '.join(map(str, values))}"
                )
            fields[field] = values[value]
        return self.fixed | fields | dict(self.derived(fields))

    def write(self, model: Any) -> dict[str, Any]:
        """Return keys of config.json.

        Raises InteropError for a model that transformers does not have.
        """
        derived = self.derived(dataclasses.asdict(model))
        for field, value in (self.fixed | dict(derived)).items():
            if (ours := getattr(model, field)) != value:
                raise InteropError(
                    f"config.model.{field} = {ours!r}: "
                    f"transformers' model has only {value!r}"
                )
        config = {key: getattr(model, field) for key, (field, _) in self.names.items()}
        for key, (field, _, values) in self.choices.items():
            written = {ours: theirs for theirs, ours in reversed(list(values.items()))}
            if (value := getattr(model, field)) not in written:
                raise InteropError(
                    f"config.model.{field} = {value!r}: "
                    f"transformers has only {', '.join(map(str, written))}"
                )
            config[key] = written[value]
        return config


def typed(config: Json, key: str, default: Any, kind: type) -> Any:
    """Return the value of a key, with integers for float as floats.

    Raises InteropError if it has another type.
    """
    value = config.get(key, default)
    if value is not default and type(value) not in (
        (int, float) if kind is float else (kind,)
    ):
        raise InteropError(
            f"config.json: {key} = {value!r} must be of type {kind.__name__}: "
            "copy the file again"
        )
    return float(value) if kind is float and value is not default else value


class Outputs(NamedTuple):
    """The outputs of a head, from config.json.

    size: their number.
    settings: dotted keys of our config that they determine.
    order: output i of ours is output order[i] of theirs, or -1 if theirs lacks it; ()
        if the order is the same.
    names: what each output of ours means.
    """

    size: int = 0
    settings: Mapping[str, Any] = NOTHING
    order: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def present(self) -> tuple[str, ...]:
        """The names, without those that theirs lacks."""
        return tuple(
            name
            for i, name in enumerate(self.names)
            if not self.order or self.order[i] >= 0
        )


class Head(abc.ABC):
    """A kind of head: which of our config keys determine its outputs, and which keys
    of config.json.
    """

    @abc.abstractmethod
    def read(self, config: Json) -> Outputs | None:
        """Return the outputs that config.json describes, or None if it describes
        another kind of head.
        """

    def write(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return keys of config.json, given all keys of our config, or None for
        another kind of head.
        """
        return {}

    def generation(
        self, settings: Mapping[str, Any], special_ids: Mapping[str, int | None]
    ) -> dict[str, Any]:
        """Return the content of generation_config.json, given all keys of our config.

        Empty: there is no such file.
        """
        return {}


@dataclasses.dataclass(frozen=True)
class Fixed(Head):
    """A head with outputs called `names`, which has the same `settings` in every
    model.
    """

    names: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def read(self, config: Json) -> Outputs:
        return Outputs(len(self.names), self.settings, names=self.names)

    def write(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        same = all(
            settings.get(key, value) == value for key, value in self.settings.items()
        )
        return {} if same else None


class Classes(Head):
    """A head with an output for each label, of which one is right."""

    def read(self, config: Json) -> Outputs | None:
        labels = labels_of(config)
        if len(labels) < 2 or config.get("problem_type") not in (
            None,
            "single_label_classification",
        ):
            return None
        return Outputs(len(labels), {"data.labels": labels}, names=labels)

    def write(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return label_keys(settings["data.labels"]) | {
            "problem_type": "single_label_classification"
        }


class Value(Head):
    """A head with one output, a number."""

    def read(self, config: Json) -> Outputs | None:
        fits = len(labels_of(config)) == 1 and config.get("problem_type") in (
            None,
            "regression",
        )
        return Outputs(1, names=("value",)) if fits else None

    def write(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return label_keys(["LABEL_0"]) | {"problem_type": "regression"}


class Tags(Head):
    """A head with an output for each tag of a word, e.g. O, B-PER and I-PER.

    It may lack tags, e.g. B-PER after training on IOB1, where B only separates an
    entity from one of the same type.
    """

    def read(self, config: Json) -> Outputs:
        theirs = labels_of(config)
        kinds = tuple(
            dict.fromkeys(tag.partition("-")[2] for tag in theirs if tag != "O")
        )
        for scheme, prefixes in PREFIXES.items():
            ours = ["O", *(f"{prefix}-{kind}" for kind in kinds for prefix in prefixes)]
            if {"O", *theirs} <= set(ours) and len(set(theirs)) == len(theirs) > 1:
                order = tuple(
                    theirs.index(tag) if tag in theirs else -1 for tag in ours
                )
                identity = order == tuple(range(len(ours)))
                settings = {"data.types": kinds, "data.scheme": scheme}
                return Outputs(
                    len(ours), settings, () if identity else order, tuple(ours)
                )
        raise InteropError(
            f"config.json: id2label has {', '.join(theirs)}: supported are different "
            "tags among O and, for each type of entity, B and I, or B, I, E and S"
        )

    def write(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        tags = ["O"]
        for kind in settings["data.types"]:
            for prefix in PREFIXES[settings["data.scheme"]]:
                tags.append(f"{prefix}-{kind}")
        return label_keys(tags)


def labels_of(config: Json) -> tuple[str, ...]:
    """Return the labels that config.json lists.

    Raises InteropError if their numbers are not 0, 1, 2, …
    """
    labels = config.get("id2label")
    if not labels:
        count = typed(config, "num_labels", 2, int)
        labels = {i: f"LABEL_{i}" for i in range(count)}
    if not isinstance(labels, Mapping):
        raise InteropError(
            "config.json: "
            f"id2label = {labels!r:.80} must be an object of numbers and labels"
        )
    numbers = {str(number): str(label) for number, label in labels.items()}
    if numbers.keys() != set(map(str, range(len(numbers)))):
        raise InteropError(
            f"config.json: id2label has the numbers {', '.join(numbers)}: "
            "they must be 0, 1, 2, …"
        )
    return tuple(numbers[str(i)] for i in range(len(numbers)))


def label_keys(labels: Sequence[str]) -> dict[str, Any]:
    """Return the keys of config.json for a list of labels."""
    numbers = dict(enumerate(labels))
    return {
        "id2label": {str(i): label for i, label in numbers.items()},
        "label2id": {label: i for i, label in numbers.items()},
    }


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A class of transformers.

    name: its name, as in "architectures" of config.json. Several entries may share it;
        the first whose head fits is taken.
    model_type: its "model_type" in config.json.
    task: our task.
    config: the map between the model configs.
    module: (our model config, number of outputs) → our module, for the shapes of its
        parameters.
    table: (our model config, outputs) → where each of our parameters is.
    head: what its outputs are.
    lacks: modules of ours that it does not have, e.g. "bert/pooler". A file may have
        them nevertheless.
    optional: modules or parameters of ours that it has and a file may lack.
    prefix: the part of names that a file of the model without a head lacks, e.g.
        "bert.".
    bare: it is the model without a head, and is written without the prefix.
    ends: the key of our config for ids that end an output, besides the end id of the
        tokenizer. "": there is none.
    begins: the key of our config that is True if the begin id precedes a text. "":
        `around` decides alone.
    special_ids: "pad_id", "bos_id" and "eos_id" → keys of config.json. By default,
        there are none.
    example: tokens (B, T) → arguments with which the module is initialized.
    around: (begin, end): which special ids the tokenizer of transformers puts around a
        text.
    segments: the tokenizer of transformers says to which text of a pair a token
        belongs.
    framed: further special tokens may be around source and target: our keys
        data.source_frame and data.target_frame.
    renamed: (old, new) ends of names, which files of older versions have.
    ties: other name of a tensor → its name here. A file may hold a tied tensor under
        either.
    copies: name of a tensor that a file may lack → the tensor whose values it then has.
    unused: regular expression of names that need no place here.
    more: further keys of config.json.
    generates: keys of `generate` that are read, or that leave a choice to
        config.decoding. (): it writes no text.
    """

    name: str
    model_type: str
    task: str
    config: ConfigMap
    module: Callable[[Any, int], nn.Module]
    table: Callable[[Any, Outputs], list[Entry]]
    head: Head = dataclasses.field(default_factory=Fixed)
    lacks: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    prefix: str = ""
    bare: bool = False
    around: tuple[bool, bool] = (False, False)
    segments: bool = True
    framed: bool = False
    ends: str = ""
    begins: str = ""
    special_ids: Callable[[Mapping[str, int | None]], dict[str, Any]] = lambda ids: {}
    example: Callable[[Array], tuple[Array, ...]] = lambda tokens: (tokens, tokens == 0)
    renamed: Sequence[tuple[str, str]] = ()
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: str = "(?!)"
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    generates: Collection[str] = ()

    def names(self, theirs: Sequence[str]) -> dict[str, str]:
        """Return the name in the table of each tensor of a file → its name in the
        file.
        """
        unwrapped = {name: WRAPPERS.sub("", name) for name in theirs}
        headless = not any(name.startswith(self.prefix) for name in unwrapped.values())
        names = {}
        for name, inner in unwrapped.items():
            name_in_table = f"{self.prefix}{inner}" if headless else inner
            for old, new in self.renamed:
                if name_in_table.endswith(old):
                    name_in_table = name_in_table.removesuffix(old) + new
            names[name_in_table] = name
        return names
