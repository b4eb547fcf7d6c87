"""The `params` command: count a model's parameters from its name or config, without weights or torch.

Presets, the well-known models that gptkit knows by name, need no network. To report the dtypes and bytes of stored
tensors, gptkit reads the headers of the weight files, a few kilobytes per repository.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..architectures import ARCHITECTURES
from ..architectures.config import read_config_file
from ..components import ModelSpec, Parameter
from ..converter.opening import Opening
from ..converter.outline import Outline, outline
from ..converter.resolve import Reference, identify, resolve
from ..converter.tree import Quantised
from ..display import Record, Shown, plain
from ..errors import GptkitError, UnknownFamily
from ..signatures import takes
from .costs import usual_context
from .figures import CostFigures, Scenario, common_context, figures_of, fits
from .named import Named, by_class, by_names
from .parameters import ParameterCount, buffers, count
from .sizes import check_sizes

if TYPE_CHECKING:
    from ..converter.index import WeightFiles

_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth)\Z")  # the endings of Hugging Face's weight files


@dataclass(frozen=True)
class StoredTensor(Record):
    """A tensor as its file stores it. `dtype` is the name that safetensors uses, or the name of a quantised format."""

    JSON = "name dtype shape bytes=nbytes"

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class StoredTensors(Record):
    """The contents of a checkpoint's weight files: the names of the files, and the tensors in all of them."""

    JSON = "bytes=nbytes files dtypes tensors"

    files: tuple[str, ...]
    tensors: tuple[StoredTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def by_dtype(self) -> dict[str, tuple[int, int, int]]:
        """Return the numbers of tensors, parameters and bytes by dtype, the dtype with most bytes first."""
        sums: dict[str, tuple[int, int, int]] = {}
        for tensor in self.tensors:
            tensors, parameters, nbytes = sums.get(tensor.dtype, (0, 0, 0))
            sums[tensor.dtype] = (tensors + 1, parameters + math.prod(tensor.shape), nbytes + tensor.nbytes)
        return dict(sorted(sums.items(), key=lambda item: -item[1][2]))

    @property
    def dtypes(self) -> dict[str, dict[str, int]]:
        names = ("tensors", "parameters", "bytes")
        return {dtype: dict(zip(names, sizes, strict=True)) for dtype, sizes in self.by_dtype().items()}


@dataclass(frozen=True)
class ModelCount(Shown):
    """A model with its architecture and counts. If its family is unknown, it only has names and shapes (`named`)."""

    name: str
    """The name that the user gave."""
    family: str
    """The model family, such as "llama". It is "" if gptkit does not know the family."""
    tree: ModelSpec | None
    """The architecture; None if the family is unknown."""
    revision: str | None = None
    """The commit on the hub, if the model comes from there."""
    notes: tuple[str, ...] = ()
    stored: StoredTensors | None = None
    """The contents of the weight files, if the user asked for them."""
    figures: CostFigures | None = None
    """The costs, if the user asked for them."""
    swap: Mapping[str, Any] | None = None
    """The component swaps that turned the named model into this architecture, as JSON values. None without swaps."""
    folder: Path | None = None
    """The local folder, if the user gave one."""
    named: Named | None = None
    """The names and shapes of the tensors, if the family is unknown. Attributes that need `tree` then raise UsageError.
    """

    @property
    def spec(self) -> ModelSpec:
        """Return the architecture. Raises UsageError if the family is unknown."""
        if self.tree is None:
            assert self.named is not None
            raise self.named.refusal(self.name)
        return self.tree

    @property
    def parameters(self) -> Iterable[Parameter]:
        """Return all tensors, with gptkit's names, or with the checkpoint's names if the family is unknown."""
        return self.spec.parameters() if self.named is None else self.named.parameters

    @cached_property
    def count(self) -> ParameterCount:
        """Return the parameters by component and layer. Raises UsageError if the family is unknown; see `named`."""
        return count(self.spec)

    @cached_property
    def buffers(self) -> int:
        """Return the number of parameters that transformers stores as buffers and does not count as parameters.

        The router biases of DeepSeek-V3 are an example. The number is 0 for a model of an unknown family.
        """
        return 0 if self.tree is None else buffers(self.tree, ARCHITECTURES.get(self.family))

    def __repr__(self) -> str:
        return f"<{self.name}: {repr(self.count if self.named is None else self.named.count)[1:]}"

    def as_json(self, tensors: bool = False) -> dict[str, Any]:
        """Return plain JSON values. Figures are integers: numbers of parameters, unless the key says bytes or FLOPs.

        These keys always exist: model, family ("" for none), total, active (the parameters that one token uses),
        embedding_positions_head (these three components, with a tied head once), non_embedding (all others), tied,
        layers, components, by_layer, buffers (parameters that transformers does not count), revision, notes.

        With `tensors`, there is a list of all tensors, with the keys name (gptkit's), component, layer (null outside
        of layers), shape and parameters.

        Other keys exist if the user asked for them: stored (dtypes and bytes in the files); swap (of, steps, guarantee,
        notes); weights (dtype, bytes by component and in total); kv_cache (a list of `CacheSize`); flops (next_token by
        component, prefill as `Flops`, training_step as `TrainingFlops`); memory (inference as `Memory`, training as
        `TrainingMemory`, formats with the bytes of the weights by format); explained (as `Explained`), gpu (as `Fits`),
        parallel (as `Split`). A figure for which the position table is too short is {"context": …, "impossible": the
        reason}.
        """
        counted = self.count if self.named is None else self.named
        data = {"model": self.name, "family": self.family, **counted.as_json()}
        data |= {"buffers": self.buffers, "revision": self.revision, "notes": list(self.notes)}
        if tensors:
            names = {**dict.fromkeys(("name", "component", "layer", "shape")), "parameters": "count"}
            data["tensors"] = [
                {name: plain(getattr(tensor, of or name)) for name, of in names.items()} for tensor in self.parameters
            ]
        if self.swap is not None:
            data["swap"] = dict(self.swap)
        if self.stored is not None:
            data["stored"] = self.stored.as_json()
        if self.named is not None and self.named.cache:
            data["kv_cache"] = [size.as_json() for size in self.named.cache]
        return data if self.figures is None else {**data, **self.figures.as_json()}


class Counts(list[ModelCount], Shown):
    """The list of models that `params` returns. A notebook shows it as one table."""


@takes(Opening)
def params(
    *models: str | Path, stored: bool = False, asked: Scenario | None = None, **opening: Unpack[Opening]
) -> Counts:
    """Count the parameters of models. Tied weights count once.

    If gptkit does not know a model's family, it counts the tensors that the weight files or transformers name.

    Args:
        models: presets (`qwen3-8b`), samples, folders, config.json files, hub repositories.
        stored: also report the tensors in the weight files, from their headers. They must match the config, unless it
            declares them quantised. For a preset, the files are those of its repository. No weights are downloaded.
        asked: the figures to report besides the number of parameters, such as FLOPs or the KV cache. They are computed
            at the same context for all models.
        offline, allow_pickle: see `Opening`.

    Raises:
        InvalidInput: no model has this name, or its config is broken; with `stored` also the errors of
            `open_checkpoint`.
        UsageError: the context is longer than the position tables of all models.
        Offline: there is no network, and the repository's config is not in the cache.
    """
    counts = Counts()
    for model in models:
        with _naming(str(model), len(models) > 1):
            reference, files = identify(model), None
            try:
                if stored:
                    tree, files = _stored(reference, opening)
                else:
                    tree = outline(reference, **opening)
            except UnknownFamily as error:
                counts.append(_named(reference, error, opening, stored))
                continue
        notes = (*tree.notes, *tree.assumed)
        folder = reference.path if reference.kind == "path" and reference.names is not None else None
        counts.append(ModelCount(reference.text, tree.family, tree.spec, tree.revision, notes, files, folder=folder))
    return counts if asked is None else Counts(with_figures(counts, asked))


@contextmanager
def _naming(model: str, one_of_several: bool) -> Iterator[None]:
    """Add the model's name to an error's message, if there are several models and the message does not name it."""
    try:
        yield
    except GptkitError as error:
        if one_of_several and model not in error.message:
            error.message = f"{model}: {error.message}"
        raise


def _named(reference: Reference, error: UnknownFamily, opening: Opening, stored: bool) -> ModelCount:
    """Return a model of an unknown family, with the names and shapes of its tensors.

    They come from the headers of its weight files, or else from transformers' class for its config.json. If there is
    neither, `error` is raised.
    """
    from ..converter.checkpoint import weight_headers_of  # here, because it imports numpy

    if reference.kind == "hub file":
        raise error
    here = resolve(reference, weights=False, **opening)
    if here.format != "hf":  # the error already describes other formats
        raise error
    assert here.path is not None and here.source is not None
    config = read_config_file(here.source)[0] if here.source.is_file() else {}
    kind, files = config.get("model_type", ""), None
    if here.repository is not None or any(map(_WEIGHTS.search, here.names or [here.path.name])):
        files = weight_headers_of(here, **opening)
        parameters = by_names((name, tensor.shape) for name, tensor in files.tensors.items())
        source = "the headers of its weight files"
    elif config and not stored:
        name, parameters = by_class(config, error)
        source = f"transformers' {name}, without weights"
    else:
        raise error
    contents = _stored_files(files) if stored and files is not None else None
    named = Named(kind if isinstance(kind, str) else "", source, parameters, config)
    folder = here.path if here.kind == "path" and here.names is not None else None
    notes = (*here.notes, error.message if config else "there is no config.json next to its weights")
    return ModelCount(reference.text, "", None, here.revision, notes, contents, folder=folder, named=named)


def with_figures(counts: Sequence[ModelCount], asked: Scenario) -> list[ModelCount]:
    """Return the models with the figures that `asked` wants, all at one context.

    Raises:
        UsageError: the context is longer than the position tables of all models; or the heads or layers of a model
            cannot be split over the number of GPUs in `asked`.
        CannotExpress: the dtype is a GGUF format, and llama.cpp has no type for a tensor of one model.
    """
    if any(model.named for model in counts) and not (asked.at_context or asked.explain or asked.dtype):
        return [_with_cache(model, asked) if model.named else with_figures([model], asked)[0] for model in counts]
    specs = [model.spec for model in counts]
    context = asked.context or common_context(specs)
    longest = [*asked.kv, *([context] if asked.at_context else [])]
    if longest and not any(fits(spec, min(longest)) for spec in specs):
        check_sizes(max(specs, key=usual_context), min(longest), 1)
    models = []
    for model in counts:
        with _naming(model.name, len(counts) > 1):
            models.append(replace(model, figures=figures_of(model.spec, asked, context, model.family)))
    return models


def _stored(reference: Reference, opening: Opening) -> tuple[Outline, StoredTensors]:
    """Return a model's architecture, and the names, dtypes and shapes in its weight files, from their headers alone."""
    from ..converter.checkpoint import open_checkpoint, weight_headers_of  # here, because it imports numpy

    try:
        checkpoint = open_checkpoint(reference, headers_only=True, **opening)
    except Quantised:
        files = weight_headers_of(reference, **opening)
        return outline(reference, **opening), _stored_files(files)
    tensors = tuple(
        StoredTensor(leaf.checkpoint, dtype, leaf.shape, nbytes)
        for leaf in (*checkpoint.leaves, *checkpoint.carried_leaves)
        for dtype, nbytes in (checkpoint.stored_of(leaf),)
    )
    tree = Outline(checkpoint.spec, checkpoint.origin, revision=checkpoint.revision, notes=tuple(checkpoint.notes))
    return tree, StoredTensors(tuple(path.name for path in checkpoint.files), tensors)


def _with_cache(model: ModelCount, asked: Scenario) -> ModelCount:
    """Return a model of an unknown family with the size of its KV cache, if `asked` wants it. Raises UnknownFamily."""
    from .config_cache import cache_of_layers, layers_of_config

    if model.named is None or not asked.kv:
        return model
    shapes = ((parameter.name, parameter.shape) for parameter in model.named.parameters)
    layers = layers_of_config(model.named.config, shapes)
    sizes = tuple(cache_of_layers(layers, context, asked.cached, asked.batch) for context in asked.kv)
    return replace(model, named=replace(model.named, cache=sizes))


def _stored_files(files: "WeightFiles") -> StoredTensors:
    """Return the names, dtypes and shapes of the tensors in weight files, with the names in the files."""
    headers = files.tensors.items()
    tensors = (StoredTensor(name, header.dtype, header.shape, header.nbytes) for name, header in headers)
    return StoredTensors(tuple(path.name for path in files.files), tuple(tensors))
