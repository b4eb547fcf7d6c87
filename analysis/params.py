"""params: the parameters of a model known by name or by its config, without weights, network (for presets) or torch.

What is stored, dtypes and bytes, is told from the headers of the weight files, which of a hub repository are a few
kilobytes.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..architectures import ARCHITECTURES
from ..architectures.config import read_config_file
from ..components import ModelSpec, Parameter
from ..converter.outline import Outline, outline
from ..converter.resolve import Reference, identify, resolve
from ..converter.tree import Quantised
from ..display import Record, Shown, plain
from ..errors import GptkitError, UnknownFamily
from .costs import usual_context
from .figures import CostFigures, Scenario, common_context, figures_of, fits
from .named import Named, by_class, by_names
from .parameters import ParameterCount, buffers, count
from .sizes import check_sizes

if TYPE_CHECKING:
    from ..converter.index import WeightFiles

_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth)\Z")  # what the names of Hugging Face's weight files end in


@dataclass(frozen=True)
class StoredTensor(Record):
    """A tensor as it lies in its file: its dtype by safetensors' name (a quantised one's by its format's), its shape
    there, its bytes.
    """

    JSON = "name dtype shape bytes=nbytes"

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Stored(Record):
    """What a checkpoint's weight files hold of the model: the names of the files, and the tensors in their order."""

    JSON = "bytes=nbytes files dtypes tensors"

    files: tuple[str, ...]
    tensors: tuple[StoredTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def by_dtype(self) -> dict[str, tuple[int, int, int]]:
        """For each dtype (tensors, parameters, bytes), the one with most bytes first."""
        found: dict[str, tuple[int, int, int]] = {}
        for each in self.tensors:
            tensors, parameters, nbytes = found.get(each.dtype, (0, 0, 0))
            found[each.dtype] = (tensors + 1, parameters + math.prod(each.shape), nbytes + each.nbytes)
        return dict(sorted(found.items(), key=lambda item: -item[1][2]))

    @property
    def dtypes(self) -> dict[str, dict[str, int]]:
        names = ("tensors", "parameters", "bytes")
        return {dtype: dict(zip(names, sizes, strict=True)) for dtype, sizes in self.by_dtype().items()}


@dataclass(frozen=True)
class ModelCount(Shown):
    """A model's name as it was given, its family ("" for a tree that never had one), tree and count.

    A model of a family that is not known has no tree: `named` has its tensors, and what needs a tree raises UsageError.
    `revision` is the hub's commit, where it came from there; `stored` what its files hold and `figures` what it costs,
    where these were asked for; `swap` how a tree that is only thought of came about, as JSON values; `folder` the local
    folder that it lies in, where it was named by it.
    """

    name: str
    family: str
    tree: ModelSpec | None
    revision: str | None = None
    notes: tuple[str, ...] = ()
    stored: Stored | None = None
    figures: CostFigures | None = None
    swap: Mapping[str, Any] | None = None
    folder: Path | None = None
    named: Named | None = None

    @property
    def spec(self) -> ModelSpec:
        """The tree. Raises UsageError: the family is unknown."""
        if self.tree is None:
            assert self.named is not None
            raise self.named.refusal(self.name)
        return self.tree

    @property
    def parameters(self) -> Iterable[Parameter]:
        """Every tensor: by its shared name, or by its own where the family is unknown."""
        return self.spec.parameters() if self.named is None else self.named.parameters

    @cached_property
    def count(self) -> ParameterCount:
        """Raises UsageError: the family is unknown, and `named` has what there is to count."""
        return count(self.spec)

    @cached_property
    def buffers(self) -> int:
        """How many of these numbers transformers stores as buffers and does not count as parameters.

        For example the biases of the choice of experts of DeepSeek-V3. 0 for a model of no family.
        """
        return 0 if self.tree is None else buffers(self.tree, ARCHITECTURES.get(self.family))

    def __repr__(self) -> str:
        return f"<{self.name}: {repr(self.count if self.named is None else self.named.count)[1:]}"

    def as_json(self, tensors: bool = False) -> dict[str, Any]:
        """Plain JSON values; every figure is an integer, of parameters where nothing else is said, or of bytes.

        Always: model, family ("" for none), total, active (what one token meets of a mixture), embedding_positions_head
        (the three components together, a tied head once), non_embedding (all others), tied, layers, components,
        by_layer, buffers (those of the total that transformers does not count), revision, notes. With `tensors`, each
        by its shared name: name, component, layer (null outside), shape, parameters. Where it was asked for: stored
        (dtypes and bytes in the files); swap (of, steps, guarantee, notes); weights (dtype, bytes by component and in
        total); kv_cache, a list as `CacheSize`; flops: next_token by component, prefill and training_step as `Flops`
        and `TrainingFlops`; memory: inference and training as `Memory` and `TrainingMemory`, and formats, bytes of the
        weights by format; explained as `Explained`, gpu as `Fits`, parallel as `Split`. In place of what a table of
        positions is too short for stands {"context": …, "impossible": why}.
        """
        counted = self.count if self.named is None else self.named
        data = {"model": self.name, "family": self.family, **counted.as_json()}
        data |= {"buffers": self.buffers, "revision": self.revision, "notes": list(self.notes)}
        if tensors:
            names = {**dict.fromkeys(("name", "component", "layer", "shape")), "parameters": "count"}
            data["tensors"] = [
                {name: plain(getattr(each, of or name)) for name, of in names.items()} for each in self.parameters
            ]
        if self.swap is not None:
            data["swap"] = dict(self.swap)
        if self.stored is not None:
            data["stored"] = self.stored.as_json()
        if self.named is not None and self.named.cache:
            data["kv_cache"] = [each.as_json() for each in self.named.cache]
        return data if self.figures is None else {**data, **self.figures.as_json()}


class Counts(list[ModelCount], Shown):
    """Models as `params` counts them: a list, which a notebook shows side by side."""


def params(
    *models: str | Path,
    offline: bool = False,
    stored: bool = False,
    asked: Scenario | None = None,
    allow_pickle: bool = False,
) -> Counts:
    """Count the parameters of each model, tied weights once; of one whose family is unknown by its tensors' names.

    Args:
        models: presets (`qwen3-8b`), samples, folders, config.json files, hub repositories.
        offline: use local files and the hub's cache only.
        stored: tell also what the weight files hold, from their headers, which must fit the config unless it says that
            they are quantised; of a preset, those of its repository. No weight is fetched.
        asked: tell also what the models cost, all at one context.
        allow_pickle: read a pickle that nothing describes but itself (nanoGPT's ckpt.pt), its weights too.

    Raises:
        InvalidInput: nothing of that name, or a broken config; with `stored` also what `open_checkpoint` raises.
        UsageError: a context that none of the models has positions for.
        Offline: a repository whose config is not in the cache, and no network.
    """
    counts = Counts()
    for model in models:
        with _naming(str(model), len(models) > 1):
            found, files = identify(model), None
            try:
                if stored:
                    tree, files = _stored(found, offline, allow_pickle)
                else:
                    tree = outline(found, offline=offline, allow_pickle=allow_pickle)
            except UnknownFamily as error:
                counts.append(_named(found, error, offline, allow_pickle, stored))
                continue
        notes = (*tree.notes, *tree.assumed)
        folder = found.path if found.kind == "path" and found.names is not None else None
        counts.append(ModelCount(found.text, tree.family, tree.spec, tree.revision, notes, files, folder=folder))
    return counts if asked is None else Counts(with_figures(counts, asked))


@contextmanager
def _naming(model: str, one_of_several: bool) -> Iterator[None]:
    """Let an error say which model it is of, where it does not and there are others."""
    try:
        yield
    except GptkitError as error:
        if one_of_several and model not in error.message:
            error.message = f"{model}: {error.message}"
        raise


def _named(found: Reference, error: UnknownFamily, offline: bool, allow_pickle: bool, stored: bool) -> ModelCount:
    """A model of an unknown family, by the headers of its weights where there are any, else by transformers' class."""
    from ..converter.checkpoint import weight_headers_of  # here, because it imports numpy

    if found.kind == "hub file":
        raise error
    here = resolve(found, offline=offline, weights=False, allow_pickle=allow_pickle)
    if here.format != "hf":  # others say in their own words what they hold
        raise error
    assert here.path is not None and here.source is not None
    config = read_config_file(here.source)[0] if here.source.is_file() else {}
    kind, files = config.get("model_type", ""), None
    if here.repository is not None or any(map(_WEIGHTS.search, here.names or [here.path.name])):
        files = weight_headers_of(here, offline=offline, allow_pickle=allow_pickle)
        parameters = by_names((name, each.shape) for name, each in files.tensors.items())
        source = "the headers of its weight files"
    elif config and not stored:
        name, parameters = by_class(config, error)
        source = f"transformers' {name}, without weights"
    else:
        raise error
    held = _stored_files(files) if stored and files is not None else None
    told = Named(kind if isinstance(kind, str) else "", source, parameters, config)
    folder = here.path if here.kind == "path" and here.names is not None else None
    notes = (*here.notes, error.message if config else "there is no config.json next to its weights")
    return ModelCount(found.text, "", None, here.revision, notes, held, folder=folder, named=told)


def with_figures(counts: Sequence[ModelCount], asked: Scenario) -> list[ModelCount]:
    """Counts with what they cost, all at one context.

    Raises:
        UsageError: none of them has positions for the context; heads or layers that GPUs cannot share.
        CannotExpress: a format of GGUF, and llama.cpp has no type for a tensor of one of them.
    """
    if any(each.named for each in counts) and not (asked.at_context or asked.explain or asked.dtype):
        return [_with_cache(each, asked) if each.named else with_figures([each], asked)[0] for each in counts]
    specs = [each.spec for each in counts]
    context = asked.context or common_context(specs)
    longest = [*asked.kv, *([context] if asked.at_context else [])]
    if longest and not any(fits(spec, min(longest)) for spec in specs):
        check_sizes(max(specs, key=usual_context), min(longest), 1)
    found = []
    for each in counts:
        with _naming(each.name, len(counts) > 1):
            found.append(replace(each, figures=figures_of(each.spec, asked, context, each.family)))
    return found


def _stored(found: Reference, offline: bool, allow_pickle: bool) -> tuple[Outline, Stored]:
    """The tree, and what the weight files hold, from their headers alone."""
    from ..converter.checkpoint import open_checkpoint, weight_headers_of  # here, because it imports numpy

    options = {"offline": offline, "allow_pickle": allow_pickle}
    try:
        checkpoint = open_checkpoint(found, headers_only=True, **options)
    except Quantised:
        files = weight_headers_of(found, **options)
        return outline(found, **options), _stored_files(files)
    tensors = tuple(
        StoredTensor(leaf.checkpoint, dtype, leaf.shape, nbytes)
        for leaf in (*checkpoint.leaves, *checkpoint.beside)
        for dtype, nbytes in (checkpoint.stored_of(leaf),)
    )
    tree = Outline(checkpoint.spec, checkpoint.origin, revision=checkpoint.revision, notes=tuple(checkpoint.notes))
    return tree, Stored(tuple(path.name for path in checkpoint.files), tensors)


def _with_cache(model: ModelCount, asked: Scenario) -> ModelCount:
    """A model of an unknown family with its key-value cache, where that is asked for. Raises UnknownFamily."""
    from .kept import cache_of_layers, layers_of_config

    if model.named is None or not asked.kv:
        return model
    layers = layers_of_config(model.named.config, ((each.name, each.shape) for each in model.named.parameters))
    sizes = tuple(cache_of_layers(layers, each, asked.cached, asked.batch) for each in asked.kv)
    return replace(model, named=replace(model.named, cache=sizes))


def _stored_files(files: "WeightFiles") -> Stored:
    """Files whose tensors have names of their own."""
    tensors = (StoredTensor(name, each.dtype, each.shape, each.nbytes) for name, each in files.tensors.items())
    return Stored(tuple(path.name for path in files.files), tuple(tensors))
