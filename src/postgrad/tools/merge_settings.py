"""What `postgrad merge` is asked for: a method, models and their parameters, from the command line
or from a file in mergekit's format (github.com/arcee-ai/mergekit).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.core.text import nearest
from postgrad.core.untrusted import shown
from postgrad.models.images import image_part
from postgrad.translate.files import config_table

OF_DELTAS = ("task_arithmetic", "ties", "dare_linear", "dare_ties")  # what models add to a base
METHODS = ("linear", "slerp", *OF_DELTAS, "adapter")
NORMALIZED = ("linear", "ties", "dare_ties")  # unless told otherwise, as in mergekit
DTYPES = ("float32", "bfloat16", "float16")
LAYER = re.compile(r"\.layers\.(\d+)\.")
# keys of mergekit's format that are read, at the top and below `parameters`
KEYS = ("merge_method", "models", "slices", "base_model", "parameters", "dtype", "out_dtype",
        "tokenizer_source", "name")  # fmt: skip
PARAMETERS = ("weight", "density", "t", "normalize", "lambda", "int8_mask", "rescale")
AS_IT_IS = {"int8_mask": (True, False), "rescale": (True,)}  # what cannot be chosen here

PartValues = tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number for every tensor: of the first part whose text is in the tensor's name ("" is in
    all). Several numbers of a part are spread evenly over the layers, with straight lines between
    them; what stands before the layers has the first, as all of a tower that reads images and its
    projector, and what stands behind them the last.
    """

    parts: PartValues

    @classmethod
    def of(cls, value: float) -> "Parameter":
        """The same number everywhere."""
        return cls((("", (value,)),))

    def at(self, name: str, layers: int) -> float:
        """The number of the tensor `name` of a model with so many layers."""
        values = next((values for text, values in self.parts if text in name), None)
        if values is None:
            raise UsageError(
                f"no value is given for {name}: add one without a filter, for all other tensors"
            )
        before = "embed" in name or image_part(f".{name}") is not None
        depth = 0.0 if before else 1.0
        if not before and (layer := LAYER.search(name)):
            depth = int(layer[1]) / max(1, layers - 1)
        place = depth * (len(values) - 1)
        left = min(int(place), max(0, len(values) - 2))
        right = min(left + 1, len(values) - 1)
        return values[left] + (place - left) * (values[right] - values[left])

    def numbers(self) -> list[float]:
        """All that are stated."""
        return [value for _, values in self.parts for value in values]


ONE = Parameter.of(1.0)


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge that can be made, as `requested` or `from_mergekit` gives it."""

    method: str
    models: tuple[str, ...]  # directories, hub ids, directories of adapters
    base: str | None  # what deltas are taken from, or adapters are merged into
    weights: tuple[Parameter, ...]  # of each model
    densities: tuple[Parameter, ...]  # TIES, DARE: the share of each model's delta that stays
    t: Parameter  # slerp: 0 is the first model, 1 the second
    scale: Parameter  # of what is added to the base (lambda)
    normalize: bool  # weights are divided by their sum
    dtype: str | None = None  # None: of the base's files, or else of the first model's
    seed: int = 0  # of DARE
    layers: int | None = None  # that every model must have; None: whatever they have

    def __post_init__(self) -> None:
        """Raises UsageError where the method cannot be used so."""
        if self.method not in METHODS:
            hint = nearest(self.method, METHODS)
            hint = f"did you mean {hint}?" if hint else f"there are {', '.join(METHODS)}"
            raise UsageError(f"no way to merge is called {shown(self.method)}: {hint}")
        based = self.method in OF_DELTAS or self.method == "adapter"
        if based and self.base is None:
            raise UsageError(f"{self.method} changes a base model: name it with --base")
        if not based and self.base is not None:
            raise UsageError(f"{self.method} has no base: leave out --base, or name it as a model")
        least = 2 if self.method == "slerp" else 1
        if len(self.models) < least or (self.method == "slerp" and len(self.models) > 2):
            wanted = "exactly two models" if self.method == "slerp" else "at least one model"
            raise UsageError(f"{self.method} merges {wanted}, and {len(self.models)} are named")
        for flag, numbers in (("weights", self.weights), ("density", self.densities)):
            if len(numbers) != len(self.models):
                raise UsageError(
                    f"--{flag} has {len(numbers)} numbers for {len(self.models)} models: give each "
                    "model its own"
                )
        wrong = [n for p in self.densities for n in p.numbers() if not 0 < n <= 1]
        if wrong:
            raise UsageError(f"a density is {wrong[0]:g}; it is a share, above 0 and up to 1")
        wrong = [n for n in self.t.numbers() if not 0 <= n <= 1]
        if wrong:
            raise UsageError(f"t is {wrong[0]:g}; it is between 0 (first model) and 1 (second)")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"dtype {shown(self.dtype)} is not written: {', '.join(DTYPES)} are")


def requested(
    method: str,
    models: Sequence[str],
    *,
    base: str | None = None,
    weights: Sequence[float] | None = None,
    density: Sequence[float] | None = None,
    t: float = 0.5,
    scale: float = 1.0,
    normalize: bool | None = None,
    dtype: str | None = None,
    seed: int = 0,
) -> Merge:
    """The merge of command-line flags. One density is that of all models. Raises UsageError where a
    value is wrong.
    """
    density = [1.0] if density is None else density
    densities = list(density) * (len(models) if len(density) == 1 else 1)
    return Merge(
        method,
        tuple(models),
        base,
        tuple(map(Parameter.of, [1.0] * len(models) if weights is None else weights)),
        tuple(map(Parameter.of, densities)),
        Parameter.of(t),
        Parameter.of(scale),
        method in NORMALIZED if normalize is None else normalize,
        dtype,
        seed,
    )


def from_mergekit(path: Path, *, dtype: str | None = None, seed: int = 0) -> Merge:
    """The merge of a file in mergekit's format: `models`, or one slice of whole models.

    dtype: in place of the file's. Raises UsageError for what is not merged here (slices of layers,
    other methods, tokenizers that are put together) and for keys that nobody knows.
    """
    table = config_table(path)
    _require_known(table, KEYS, f"{path}")
    if table.get("tokenizer_source") not in (None, "base"):
        raise UsageError(
            f"{path}: tokenizer_source {shown(table['tokenizer_source'])}: vocabularies are not "
            "joined here; all models have to have one tokenizer"
        )
    method = str(table.get("merge_method"))
    shared = _parameters(table.get("parameters"), f"{path}: parameters")
    entries = _entries(table, path)
    models = [str(entry["model"]) for entry in entries]
    of_models: list[dict[str, Parameter]] = [
        _parameters(entry.get("parameters"), f"{path}: {entry['model']}") for entry in entries
    ]
    base = None if table.get("base_model") is None else str(table["base_model"])
    if base is not None and method in OF_DELTAS and base in models:  # its delta is zero
        place = models.index(base)
        del models[place], of_models[place]
    if base is not None and method == "slerp":
        models = [base, *(model for model in models if model != base)]
        of_models = [{} for _ in models]
        base = None
    elif base is not None and method == "linear":
        base = None  # mergekit takes the tokenizer from there; all models have one here
    every = [shared | parameters for parameters in of_models]
    normalize = shared.get("normalize", Parameter.of(float(method in NORMALIZED)))
    return Merge(
        method,
        tuple(models),
        base,
        tuple(parameters.get("weight", ONE) for parameters in every),
        tuple(parameters.get("density", ONE) for parameters in every),
        shared.get("t", Parameter.of(0.5)),
        shared.get("lambda", ONE),
        any(normalize.numbers()),
        dtype or table.get("out_dtype") or table.get("dtype"),
        seed,
        _layers(entries, path),
    )


def _entries(table: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """The entries of `models`, or the sources of a single slice without a range of layers."""
    entries: Any = table.get("models")
    if entries is None and isinstance(table.get("slices"), list):
        slices = cast(list[Any], table["slices"])
        single: Any = slices[0] if len(slices) == 1 else None
        entries = cast(dict[str, Any], single).get("sources") if isinstance(single, dict) else None
        if entries is None:
            raise UsageError(
                f"{path}: {len(slices)} slices put layers of several models on top of each other, "
                "which postgrad does not do: it merges complete models only; use mergekit for it"
            )
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path}: models is missing: a list of entries `- model: PATH`")
    listed: list[dict[str, Any]] = []
    for entry in cast(list[Any], entries):
        named = cast(dict[str, Any], entry if isinstance(entry, dict) else {})
        if not isinstance(named.get("model"), str):
            raise UsageError(f"{path}: an entry of models is {shown(entry)}: `- model: PATH`")
        _require_known(named, ("model", "parameters", "layer_range"), f"{path}: {named['model']}")
        listed.append(named)
    return listed


def _layers(entries: Sequence[Mapping[str, Any]], path: Path) -> int | None:
    """How many layers a slice of whole models has; None where no range is stated."""
    ranges: list[Any] = [entry["layer_range"] for entry in entries if "layer_range" in entry]
    if not ranges:
        return None
    match ranges[0]:
        case [0, int(layers)] if all(other == ranges[0] for other in ranges):
            return layers
        case _:
            raise UsageError(
                f"{path}: layer_range {ranges[0]} takes parts of models; only whole models are "
                "merged"
            )


def _parameters(table: Any, where: str) -> dict[str, Parameter]:
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise UsageError(f"{where} is {shown(table)}: a table of name: value is wanted")
    values = cast(dict[str, Any], table)
    _require_known(values, PARAMETERS, where)
    for name, allowed in AS_IT_IS.items():
        if values.get(name, allowed[0]) not in allowed:
            raise UsageError(f"{where}: {name} = {shown(values[name])} is not done here")
    return {
        name: Parameter(_parts(value, f"{where}: {name}"))
        for name, value in values.items()
        if name not in AS_IT_IS
    }


def _parts(value: Any, where: str) -> PartValues:
    """A number, a list of numbers, or a list of {filter, value} tables."""
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in cast(list[Any], value)):
        tables = cast(list[Any], value)
        parts: list[tuple[str, tuple[float, ...]]] = []
        for entry in tables:
            if not isinstance(entry, dict) or "value" not in entry:
                raise UsageError(f"{where}: {shown(entry)} has no value")
            part = cast(dict[str, Any], entry)
            _require_known(part, ("filter", "value"), where)
            text = str(part.get("filter", ""))
            parts.append(("" if text == "*" else text, _numbers(part["value"], where)))
        return tuple(parts)
    return (("", _numbers(value, where)),)


def _numbers(value: Any, where: str) -> tuple[float, ...]:
    values = cast(list[Any], value) if isinstance(value, list) else [value]
    if not values or not all(isinstance(number, int | float) for number in values):
        raise UsageError(f"{where} = {shown(value)}: a number or a list of numbers is wanted")
    return tuple(float(number) for number in values)


def _require_known(table: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in table:
        if key not in keys:
            close = nearest(str(key), keys)
            hint = f"did you mean {close}?" if close else f"known: {', '.join(keys)}"
            raise UsageError(f"{where}: {shown(key)} is not read here: {hint}")
