"""Convert a checkpoint from one format to another, with the same bytes if both formats allow it."""

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from ..architectures import ARCHITECTURES, Architecture, BoundLeaf, named
from ..architectures.base import CARRIED, OUTSIDE, TOKEN_IDS
from ..architectures.obstacles import OWN_FORMAT, first_of, never
from ..components import ModelSpec, differences, without_rounding
from ..display import Shown
from ..errors import UsageError, shown
from ..signatures import takes
from ..version import __version__
from . import fp8
from .checkpoint import Checkpoint, identity_leaves, open_checkpoint, stated_dtype
from .companions import companions_in
from .compatibility import compatible_files
from .distributed import team, together
from .dtypes import HF_NAMES, parse_dtype, to_float64, widest
from .formats import Request, format_named
from .model_card import CARD, model_card
from .names import CONFIG, LOCAL_CONFIG, json_bytes
from .opening import Opening
from .resolve import Reference, identify
from .targets import FORMATS, Target, with_config
from .targets import target as parsed
from .transfer import Transferred, jobs_of, memory_of
from .tree import Origin, described_tree
from .weights import Stored, own_leaves
from .write import DEFAULT_SHARD_BYTES, FolderPlan, as_it_was, plan


@dataclass(frozen=True)
class Conversion(Shown):
    """The result of a conversion, or the plan of a dry run."""

    source: Checkpoint
    target: Path
    """The output folder, or the output file."""
    to: str
    """The name of the output's format."""
    plan: FolderPlan
    memory: int
    """The largest number of bytes of tensors in memory at once."""
    transferred: Transferred | None = None
    """What was written; None for a dry run."""

    def __repr__(self) -> str:
        done = "converted to" if self.published else "would be"
        return f"<{self.source.reference} {done} {self.target} ({self.to}), {len(self.plan.shards):,} weight files>"

    @property
    def published(self) -> bool:
        return self.transferred is not None


def default_output(reference: str, to: str | Target) -> Path:
    """Return the default output: gpt2, org/gpt2@main, sample:gpt2, ./gpt2/ -> gpt2-local in the working directory."""
    name = reference.rstrip("/").split("/")[-1].split(":")[-1].split("@")[0]
    if name in (".", "..", "~"):  # a relative path without the folder's name
        name = os.path.basename(os.path.abspath(os.path.expanduser(reference)))  # noqa: PTH100, PTH111, PTH119
    for suffix in ("-local", "-hf", ".safetensors", ".json", ".gguf", ".bin", ".pt"):
        name = name.removesuffix(suffix)
    return Path(f"{name or 'model'}-{str(to).replace(':', '-').replace('@', '-')}")


def plan_output(
    spec: ModelSpec,
    origin: Origin,
    to: str | Target,
    dtypes: Mapping[str, str],
    compute_dtype: str,
    folder: Path | None,
    max_shard_bytes: int | None = None,
    texts: Mapping[str, bytes] | None = None,
    homes: Mapping[str, Path] | None = None,
    carried: Mapping[str, Sequence[BoundLeaf]] | None = None,
    in_fp8: bool = False,
) -> FolderPlan:
    """Plan the files of a model in the format "local", "hf" or "hf:FAMILY".

    Args:
        spec: the model's tree of components.
        origin: where the tree came from, with its config.json.
        to: the format.
        dtypes: the dtype of every parameter, by gptkit's name of the parameter (shared name).
        compute_dtype: the dtype in which the model runs.
        folder: the folder with the tokenizer's files.
        max_shard_bytes: the largest size of a weight file in bytes. By default the tensors are divided into files as
            in the original, or else into files of 5 GB.
        texts: the content of small files by name, such as those of a tokenizer.
        homes: the original's weight file of every parameter, by shared name.
        carried: groups of tensors that are only copied, because gptkit does not compute with them.
        in_fp8: quantise the matrices of layers to fp8.

    Raises:
        CannotExpress: the family cannot store the model. UsageError: "hf" for a model without a family.
    """
    to, more = parsed(to), [leaf for leaves in (carried or {}).values() for leaf in leaves]
    beside = companions_in(folder) if folder is not None else []
    if to.kind == "local":
        data = described_tree(spec, origin, HF_NAMES[compute_dtype])
        small = {**(texts or {}), LOCAL_CONFIG: json_bytes(data)}
        own = homes if max_shard_bytes is None else None
        leaves = [*identity_leaves(spec), *more]
        return plan(leaves, dtypes, small, beside, max_shard_bytes or DEFAULT_SHARD_BYTES, own)
    family = to.family or origin.family
    if family is None:
        raise UsageError(
            "--to hf writes the files of the model's own family, but gptkit does not know the family of this model",
            "Use --to hf:FAMILY (gptkit families lists all), or --to hf:auto for the first family that can store the "
            "model.",
        )
    architecture = named(family)
    whole = not {*OUTSIDE}.isdisjoint(carried or ())
    quantised = "scales" in (carried or ())
    stored = compute_dtype if quantised else main_dtype(spec, dtypes)
    standard = to.family is not None
    config = _hf_config(architecture, spec, origin, stored, compute_dtype, whole, quantised, standard)
    card = model_card(origin)
    small = {**(texts or {}), CONFIG: config, **({} if card is None else {CARD: card})}
    if to.config is not None:
        small, beside = compatible_files(small, beside, architecture)
    leaves = [*architecture.bind(spec), *more]
    merged = [*architecture.bind_modules(spec), *more] if architecture.stacked else leaves

    def canonical(name: str, known: Mapping[str, Any]) -> str | None:
        return architecture.canonical_name(name, known, len(spec.blocks))

    for candidates in (leaves, merged) if max_shard_bytes is None and not in_fp8 else ():
        shards_and_texts = as_it_was(candidates, dtypes, origin.files, canonical)
        if shards_and_texts is not None:
            return FolderPlan(shards_and_texts[0], {**small, **shards_and_texts[1]}, tuple(beside))
    if whole:
        outside = [leaf for group in OUTSIDE for leaf in (carried or {}).get(group, ())]
        leaves = _as_composite(architecture, leaves, outside, origin.files.values())
    otherwise = {}
    if in_fp8:
        matrices = fp8.quantised_leaves(spec, leaves)
        if not matrices:
            raise UsageError(
                f"{architecture.name} has no matrices that transformers can store as fp8",
                "Use another dtype: --dtype bfloat16.",
            )
        settings = {"quantization_config": fp8.settings(leaves, matrices, architecture.head)}
        small[CONFIG] = json_bytes({**json.loads(small[CONFIG]), **settings})
        otherwise = {leaf.checkpoint: fp8.stored(leaf) for leaf in leaves if leaf.checkpoint in matrices}
    size = max_shard_bytes or DEFAULT_SHARD_BYTES
    unwritten = architecture.unwritten(spec)
    return plan(leaves, dtypes, small, beside, size, otherwise=otherwise, unwritten=unwritten)


def _as_composite(
    architecture: Architecture, leaves: Sequence[BoundLeaf], outside: Sequence[BoundLeaf], headers: Collection[str]
) -> list[BoundLeaf]:
    """Give a language model's tensors their names in a composite checkpoint, such as that of a vision-language model.

    Tensors in `outside` are not part of the language model. They keep their names and come last. If the family knows
    several prefixes for the language model, the `headers` of the original files show which one to use.
    """
    names = {leaf.checkpoint for leaf in outside}
    inside = [leaf for leaf in leaves if leaf.checkpoint not in names]
    return [replace(x, checkpoint=architecture.as_composite(x.checkpoint, headers)) for x in inside] + [*outside]


def main_dtype(spec: ModelSpec, dtypes: Mapping[str, str]) -> str:
    """Return the dtype that most elements of the layers' matrices have. `dtypes` has every parameter's dtype by name.

    config.json can name only one dtype. transformers computes in it, even if some tensors are stored in another dtype.
    """
    values: Counter[str] = Counter()
    for parameter in spec.parameters():
        if parameter.layer is not None and len(parameter.shape) > 1:
            values[dtypes[parameter.name]] += parameter.count
    return widest([dtype for dtype, count in values.items() if count == max(values.values())])


def _hf_config(
    architecture: Architecture,
    spec: ModelSpec,
    origin: Origin,
    stored: str,
    compute: str,
    whole: bool,
    quantised: bool,
    standard: bool,
) -> bytes:
    """Return config.json for a Hugging Face checkpoint: the original text if it is still right, or else a new one.

    Args:
        architecture: the family of the output.
        spec: the tree of components.
        origin: where the tree came from, with the original config.json.
        stored: the dtype of most weights in the output.
        compute: the dtype in which the model runs.
        whole: whether the output has all tensors of a composite model.
        quantised: whether the output has quantised weights as they were stored.
        standard: whether transformers' class of the family must be able to read the config.
    """
    original = origin.config
    config: dict[str, Any] | None = architecture.export_config(spec, original, whole, quantised, standard)
    if config is None and origin.config_text is not None:
        # After a swap, the dtype in the original's config may be wrong.
        if stated_dtype(original) in (None, stored if origin.history else compute):
            return origin.config_text.encode()
        config = dict(original or {})
    assert config is not None
    if original is not None and origin.family not in (None, architecture.name):
        # The ids of special tokens, with those that the original leaves to transformers' defaults.
        usual = named(str(origin.family)).token_ids
        config |= {name: original.get(name, usual.get(name)) for name in TOKEN_IDS}
    config.pop("torch_dtype", None)
    return json_bytes({**config, "dtype": HF_NAMES[stored]})


def plan_conversion(
    source: Checkpoint, to: str | Target, dtype: str | None = None, max_shard_bytes: int | None = None
) -> FolderPlan:
    """Plan the files of a checkpoint in the format `to`. For the options see `convert`.

    Raises the errors of `plan_output`.
    """
    to, folder = parsed(to), companions(source)
    if to.kind in FORMATS:
        fmt = format_named(to.kind)
        assert fmt.plan is not None
        beside = () if folder is None else tuple(companions_in(folder))
        return fmt.plan(Request(source, dtype, beside, max_shard_bytes or DEFAULT_SHARD_BYTES))
    if dtype is not None and dtype.lower() == "q8_0":
        raise UsageError(
            f"--to {to} cannot store the dtype {dtype}",
            "gptkit writes this dtype only to GGUF files: --to gguf --dtype q8_0",
        )
    in_fp8 = dtype is not None and dtype.lower() == "fp8"
    if in_fp8 and to.kind != "hf":
        raise UsageError(
            f"--to {to} cannot store the dtype fp8",
            "gptkit writes this dtype only to Hugging Face checkpoints: --to hf --dtype fp8",
        )
    dtype = None if in_fp8 else dtype
    dtypes, compute = source.shared_dtypes(dtype), source.dtype if dtype is None else parse_dtype(dtype)
    spans = [(leaf, source.span(leaf)) for leaf in source.leaves]
    homes = {name: span[0] for leaf, span in spans if span is not None for name in leaf.shared}
    if len(set(homes.values())) < 2 or not all(span for _, span in spans):
        homes = {}
    carried = {group: leaves for group, leaves in source.carried.items() if leaves[0] in source.leaves}
    origin = _with_dtype(source, dtype) if to.kind == "hf" and source.format == "gguf" else source.origin
    given = source.spec, origin, to, dtypes, compute, folder, max_shard_bytes, source.texts, homes, carried
    return plan_output(*given, in_fp8)


def _with_dtype(source: Checkpoint, asked: str | None) -> Origin:
    """Return the origin of a GGUF's model, with a dtype in its config.json, which GGUF files do not state.

    The dtype is `asked` (the value of --dtype). By default it is the dtype of the GGUF's matrices, if all have the same
    one. Norms do not count, because they are F32 in every GGUF.
    """
    from ..architectures.gguf_architecture import ALWAYS_FP32  # with tables that nothing else needs

    matrices = [x for x in source.leaves if len(x.shape) > 1 and not x.checkpoint.endswith(ALWAYS_FP32)]
    kinds = sorted({source.stored_of(leaf)[0] for leaf in matrices})
    dtype = parse_dtype(asked) if asked is not None else kinds[0] if len(kinds) == 1 else ""
    if dtype not in HF_NAMES:
        note = f"config.json has no dtype, because the GGUF stores its matrices as {', '.join(kinds)}"
        source.notes += [note] if note not in source.notes else []
        return source.origin
    config = {**(source.origin.config or {}), "dtype": HF_NAMES[dtype]}
    return replace(source.origin, config_text=json_bytes(config).decode())


def companions(source: Checkpoint) -> Path | None:
    """Return the folder with a checkpoint's tokenizer, or None for a single file, which may be in any folder."""
    return source.folder if source.home or source.format in ("hf", "local", "dcp") else None


@together
@takes(Opening)
def convert(
    model: str | Path | Reference,
    out: str | Path | None = None,
    to: str = "local",
    *,
    config: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    allow_extra: bool = False,
    drop: Collection[str] = (),
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    workers: int | None = None,
    max_memory: int | None = None,
    progress: Callable[[int], None] | None = None,
    on_plan: Callable[[Conversion], None] | None = None,
    **opening: Unpack[Opening],
) -> Conversion:
    """Convert a checkpoint to gptkit's own format, back to Hugging Face files of the same or another family, or to
    another format.

    Args:
        model: a reference; see `converter.resolve`.
        out: the folder to make; by default the model's name and the format, in the working directory. With "gguf" a
            name that ends in .gguf is the name of a single file, without a manifest.
        to: "local", "hf", "hf:FAMILY" for another family that can store the model, "hf:auto" for the first that can
            (its own before others), or a name in `converter.formats`.
        config: "transformers4" for Hugging Face files whose config.json and tokenizer_config.json programs for
            transformers 4 read too (see `converter.compatibility`). By default transformers 5 has to read them.
        force: replace an existing checkpoint folder, in one step.
        dry_run: plan only.
        offline, allow_pickle: see `Opening`.
        allow_extra: leave out tensors that have no place in the model instead of refusing them.
        drop: groups of tensors to leave out (mtp, vision, …). By default gptkit copies these tensors unchanged,
            although it does not compute with them.
        dtype: the dtype of all tensors in the output, rounded to nearest, ties to even, if it is narrower. Integer
            weights are then read as numbers. By default nothing is cast. "fp8" (with "hf") stores the matrices of
            layers with a scale for every block of 128 x 128, as DeepSeek-V3 does, and does not change the rest.
        max_shard_bytes: the largest size of a weight file in bytes. By default the tensors are divided into files as
            in the original, or else into files of 5 GB.
        workers: the number of threads; by default one per core.
        max_memory: the largest number of bytes of tensors in memory at once.
        progress: called with the number of bytes of every tensor that was written.
        on_plan: called with the planned conversion, before the first tensor is read. It is not called in a dry run.

    Raises:
        InvalidInput, Offline: as `open_checkpoint`; CheckpointError also if a value does not fit `dtype`.
        CannotExpress: the family or format cannot store the model; nothing was written.
        UsageError: `out` exists, its parent does not, or it is a file name although the format is a folder; an unknown
            format or dtype; `max_memory` is too small.
    """
    reference, form = identify(model), parsed(with_config(to, config))
    target = Path(out) if out is not None else default_output(reference.text, form)
    staging = team().staging(target, force)
    if (target.suffix, form.kind) == (".gguf", "gguf"):
        from .formats.gguf import begins  # with tables that nothing else needs

        staging.single = begins
    elif target.suffix in (".gguf", ".safetensors", ".bin", ".pt", ".pth"):
        hint = f"Give the name of a folder, such as {target.with_suffix('')}" + (
            ", or pass --to gguf." if target.suffix == ".gguf" else "."
        )
        raise UsageError(f"{target} looks like a file name, but --to {form} writes a folder", hint)
    # Refuse an impossible output before gigabytes are fetched. From here on no other process can write there.
    with nullcontext() if dry_run else staging.reserved():
        stored = dtype is None and form.kind in ("local", "hf") and form.family is None and "scales" not in drop
        narrow = dtype is not None and dtype.lower().removeprefix("torch.") in ("bf16", "bfloat16", "fp8")
        source = open_checkpoint(
            reference, allow_extra=allow_extra, headers_only=dry_run, integers=dtype not in (None, "fp8"),
            stored=stored, dequantise=dtype is not None, narrow=narrow, **opening,
        )  # fmt: skip
        source, form = adapted(source, form)
        source = _with_carried(source, form, drop)
        planned = plan_conversion(source, form, dtype, max_shard_bytes)
        if staging.single is not None:
            planned = FolderPlan(
                (replace(planned.shards[0], name=target.name),), {}, ()
            )  # a single file has no companions
        conversion = Conversion(source, target, str(form), planned, memory_of(jobs_of(planned, source), max_memory))
        if dry_run:
            return conversion
        about = [(str(path), path.stat()) for path in source.files]
        staging.key = planned.digest(*((path, x.st_size, x.st_mtime_ns, x.st_ino) for path, x in about))
        with staging:
            if on_plan is not None:
                on_plan(conversion)
            options = {"workers": workers, "max_memory": max_memory, "progress": progress}
            done = team().transfer(planned, source, staging, **options)
            origin = {"reference": source.origin.reference, "revision": source.revision}
            staging.commit({"gptkit": __version__, "format": str(form), "source": origin}, files=done.files)
    return replace(conversion, transferred=done)


def _with_carried(source: Checkpoint, to: Target, drop: Collection[str]) -> Checkpoint:
    """Return the checkpoint with the tensors that are only copied (`Checkpoint.carried`) among those to write.

    They are left out if the output format has no names for them, or if their group is in `drop`. Raises UsageError for
    a group that the checkpoint does not have.
    """
    if unknown := [group for group in drop if group not in source.carried]:
        hint = (
            f"This checkpoint has: {', '.join(source.carried)}."
            if source.carried
            else "Leave --drop out: all tensors belong to the language model."
        )
        raise UsageError(f"--drop {shown(unknown[0], 40)}: {source.reference} has no tensors of this group", hint)
    placed = to.kind == "local" or (to.kind == "hf" and to.family in (None, source.origin.family))
    added = [leaf for group, leaves in source.carried.items() if placed and group not in drop for leaf in leaves]
    lost = [group for group in source.carried if group not in drop and not placed]
    notes = [
        *source.notes,
        *(f"left out, because {to} cannot store them: the tensors that {CARRIED[group]}" for group in lost),
    ]
    notes += [
        f"left out by --drop {group}: the tensors that {CARRIED[group]}" for group in source.carried if group in drop
    ]
    return replace(source, leaves=[*source.leaves, *added], notes=notes)


def adapted(source: Checkpoint, to: Target) -> tuple[Checkpoint, Target]:
    """Change a checkpoint so that the output's model family can store it. The model computes the same function.

    For example, biases that are all zero are removed or added.

    Returns:
        The changed checkpoint, and the output format. The family "auto" is replaced by the first family that can store
        the model.

    Raises:
        CannotExpress: the family, or every family, cannot store the model.
    """
    if to.family is None:
        return source, to
    families = families_of(to.family, source.origin.family)

    def zero(name: str) -> bool:
        return not np.any(to_float64(*source.tensor(name)))

    reached, refused = first_of(families, source.spec, cache(zero) if source.fetched else never)
    if reached is None or reached.tree is None:
        nearest = min(refused, key=lambda refusal: refusal.weight)
        unread = len(refused) == 1 and not source.fetched and any(obstacle.is_bias for obstacle in nearest.standing)
        message = (
            "gptkit can leave out biases that are all zero, but --dry-run does not read them. Leave --dry-run out."
            if unread
            else OWN_FORMAT
        )
        raise nearest.refusal(message)
    family = families[len(refused)]
    return _as_tree(source, reached.tree, family), replace(to, family=family.name)


def families_of(family: str | None, origin: str | None) -> list[Architecture]:
    """Return the model family called `family`. If it is None or "auto", return all families.

    The family called `origin`, from which the model came, is then the first.
    """
    if family not in (None, "auto"):
        return [named(str(family))]
    first = [] if origin is None else [named(origin)]
    return first + [architecture for architecture in ARCHITECTURES.values() if architecture.name != origin]


def _as_tree(source: Checkpoint, spec: ModelSpec, architecture: Architecture) -> Checkpoint:
    """Return the checkpoint with `spec` as its tree of components.

    Parameters that only `spec` has are zeros. Parameters that `spec` does not have are left out.
    """
    if spec == source.spec:
        return source
    shapes, theirs = ({parameter.name: parameter.shape for parameter in x.parameters()} for x in (source.spec, spec))
    gained, lost = theirs.keys() - shapes.keys(), sorted(shapes.keys() - theirs.keys())
    dtype = widest([source.dtype_of(leaf) for leaf in source.leaves])
    zeros = {name: Stored(None, dtype, shape) for name, shape in theirs.items() if name in gained}
    leaves = own_leaves((name, zero.shape) for name, zero in zeros.items())
    notes = list(source.notes)
    if gained:
        notes.append(f"added as zeros, which change nothing, because {architecture.name} needs them: {_kinds(zeros)}")
    if lost:
        notes.append(
            f"left out, because they are all zero and {architecture.name} has no such parameters: {_kinds(lost)}"
        )
    rounding = differences(spec, without_rounding(spec)) != differences(source.spec, without_rounding(source.spec))
    if rounding:
        notes.append(
            f"{architecture.name} computes the same function but rounds differently, so logits may differ "
            "in their last bits"
        )
    weights, names = source._weights.with_more(zeros), {**source._names, **{name: name for name in zeros}}
    return replace(source, spec=spec, leaves=[*source.leaves, *leaves], notes=notes, _weights=weights, _names=names)


def _kinds(names: Iterable[str]) -> str:
    """Join tensor names to a text, without layer numbers and duplicates: "attention.q_proj.bias, …"."""
    kinds = dict.fromkeys(name.split(".", 2)[-1] if name.startswith("blocks.") else name for name in names)
    return ", ".join(kinds)
