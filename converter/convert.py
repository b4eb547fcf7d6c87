"""convert: a checkpoint from one format to another, bytes unchanged wherever the formats allow."""

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..architectures import ARCHITECTURES, Architecture, BoundLeaf, named
from ..architectures.base import CARRIED, OUTSIDE, TOKEN_IDS
from ..architectures.obstacles import OWN_FORMAT, first_of, never
from ..components import ModelSpec, differences, without_rounding
from ..display import Shown
from ..errors import UsageError, shown
from ..version import __version__
from . import fp8
from .checkpoint import Checkpoint, identity_leaves, open_checkpoint, stated_dtype
from .companions import companions_in
from .distributed import team, together
from .dtypes import HF_NAMES, parse_dtype, to_float64, widest
from .formats import Request, format_named
from .model_card import CARD, model_card
from .names import CONFIG, LOCAL_CONFIG, json_bytes
from .resolve import Reference, identify
from .targets import FORMATS, Target
from .targets import target as parsed
from .transfer import Transferred, jobs_of, memory_of
from .tree import Origin, described_tree
from .weights import Stored, own_leaves
from .write import DEFAULT_SHARD_BYTES, FolderPlan, as_it_was, plan


@dataclass(frozen=True)
class Conversion(Shown):
    """What a conversion did, or would do. memory: bytes of tensors at once; transferred: None for a dry run."""

    source: Checkpoint
    target: Path
    to: str
    plan: FolderPlan
    memory: int
    transferred: Transferred | None = None

    def __repr__(self) -> str:
        done = "converted to" if self.published else "would be"
        return f"<{self.source.reference} {done} {self.target} ({self.to}), {len(self.plan.shards):,} weight files>"

    @property
    def published(self) -> bool:
        return self.transferred is not None


def default_output(reference: str, to: str | Target) -> Path:
    """gpt2, org/gpt2@main, sample:gpt2, ./gpt2/ -> gpt2-local in the working directory."""
    name = reference.rstrip("/").split("/")[-1].split(":")[-1].split("@")[0]
    if name in (".", "..", "~"):  # a folder that does not say its name
        name = os.path.basename(os.path.abspath(os.path.expanduser(reference)))  # noqa: PTH100, PTH111, PTH119
    for suffix in ("-local", "-hf", ".safetensors", ".json", ".gguf", ".bin", ".pt"):
        name = name.removesuffix(suffix)
    return Path(f"{name or 'model'}-{str(to).replace(':', '-')}")


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
    """The plan for a tree as "local", "hf" or "hf:FAMILY". `dtypes` by shared name; `compute_dtype` is what it runs in;
    tokenizer files lie in `folder` or are `texts`; by default files are as many as the original's (`homes`), or of 5
    GB; `carried` go along, by their group; `in_fp8`: matrices of layers are quantised. Raises CannotExpress; UsageError
    for "hf" of a tree that never had a family.
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
        hint = (
            "Use --to hf:auto for the first architecture that can express the model, or --to hf:NAME "
            "(see gptkit families)."
        )
        raise UsageError(
            "--to hf needs the name of a transformers architecture, because this model was not read from one", hint
        )
    architecture = named(family)
    whole = not {*OUTSIDE}.isdisjoint(carried or ())
    quantised = "scales" in (carried or ())
    stored = compute_dtype if quantised else main_dtype(spec, dtypes)
    standard = to.family is not None
    config = _hf_config(architecture, spec, origin, stored, compute_dtype, whole, quantised, standard)
    card = model_card(origin)
    small = {**(texts or {}), CONFIG: config, **({} if card is None else {CARD: card})}
    leaves = [*architecture.bind(spec), *more]
    merged = [*architecture.bind_modules(spec), *more] if architecture.stacked else leaves

    def canonical(name: str, known: Mapping[str, Any]) -> str | None:
        return architecture.canonical_name(name, known, len(spec.blocks))

    for each in (leaves, merged) if max_shard_bytes is None and not in_fp8 else ():
        again = as_it_was(each, dtypes, origin.files, canonical)
        if again is not None:
            return FolderPlan(again[0], {**small, **again[1]}, tuple(beside))
    if whole:
        apart = [leaf for group in OUTSIDE for leaf in (carried or {}).get(group, ())]
        theirs = {leaf.checkpoint for leaf in apart}
        headers = origin.files.values()
        inside = [leaf for leaf in leaves if leaf.checkpoint not in theirs]
        names = [architecture.as_composite(leaf.checkpoint, headers) for leaf in inside]
        leaves = [replace(leaf, checkpoint=name) for leaf, name in zip(inside, names, strict=True)] + apart
    otherwise = {}
    if in_fp8:
        few = fp8.quantised_leaves(spec, leaves)
        if not few:
            raise UsageError(
                f"{architecture.name} has no matrices that transformers can store as fp8", "Use --dtype bfloat16."
            )
        settings = {"quantization_config": fp8.settings(leaves, few, architecture.head)}
        small[CONFIG] = json_bytes({**json.loads(small[CONFIG]), **settings})
        otherwise = {leaf.checkpoint: fp8.stored(leaf) for leaf in leaves if leaf.checkpoint in few}
    size = max_shard_bytes or DEFAULT_SHARD_BYTES
    unwritten = architecture.unwritten(spec)
    return plan(leaves, dtypes, small, beside, size, otherwise=otherwise, unwritten=unwritten)


def main_dtype(spec: ModelSpec, dtypes: Mapping[str, str]) -> str:
    """What the tensors of a tree are stored in, `dtypes` by shared name. Where they differ it is the dtype of most
    values of the blocks' matrices: transformers computes in the one dtype that config.json names, whatever the others.
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
    """Return the original config.json where it still describes the tree and its dtype, else one that names the stored
    dtype. For `whole`, `quantised` and `standard` see `Architecture.export_config`.
    """
    original = origin.config
    config: dict[str, Any] | None = architecture.export_config(spec, original, whole, quantised, standard)
    if config is None and origin.config_text is not None:
        # Of what a swap has changed the original's word on dtypes is out of date.
        if stated_dtype(original) in (None, stored if origin.history else compute):
            return origin.config_text.encode()
        config = dict(original or {})
    assert config is not None
    if original is not None and origin.family not in (None, architecture.name):
        # The ids of special tokens, those too that the original leaves for transformers to know.
        usual = named(str(origin.family)).token_ids
        config |= {name: original.get(name, usual.get(name)) for name in TOKEN_IDS}
    config.pop("torch_dtype", None)
    return json_bytes({**config, "dtype": HF_NAMES[stored]})


def plan_conversion(
    source: Checkpoint, to: str | Target, dtype: str | None = None, max_shard_bytes: int | None = None
) -> FolderPlan:
    """The plan for a checkpoint, every tensor as `dtype` (see `convert`) or as it is; raises as `plan_output`."""
    to, folder = parsed(to), companions(source)
    if to.kind in FORMATS:
        fmt = format_named(to.kind)
        assert fmt.plan is not None
        beside = () if folder is None else tuple(companions_in(folder))
        return fmt.plan(Request(source, dtype, beside, max_shard_bytes or DEFAULT_SHARD_BYTES))
    if dtype is not None and dtype.lower() == "q8_0":
        raise UsageError(
            f"--to {to} cannot store the dtype {dtype}", "Only GGUF files can have this dtype: --to gguf --dtype q8_0"
        )
    in_fp8 = dtype is not None and dtype.lower() == "fp8"
    if in_fp8 and to.kind != "hf":
        raise UsageError(
            f"--to {to} cannot store the dtype fp8",
            "Only Hugging Face checkpoints can have this dtype: --to hf --dtype fp8",
        )
    dtype = None if in_fp8 else dtype
    dtypes, compute = source.shared_dtypes(dtype), source.dtype if dtype is None else parse_dtype(dtype)
    spans = [(leaf, source.span(leaf)) for leaf in source.leaves]
    homes = {name: span[0] for leaf, span in spans if span is not None for name in leaf.shared}
    if len(set(homes.values())) < 2 or not all(span for _, span in spans):
        homes = {}
    kept = {group: leaves for group, leaves in source.carried.items() if leaves[0] in source.leaves}
    origin = _with_dtype(source, dtype) if to.kind == "hf" and source.format == "gguf" else source.origin
    given = source.spec, origin, to, dtypes, compute, folder, max_shard_bytes, source.texts, homes, kept
    return plan_output(*given, in_fp8)


def _with_dtype(source: Checkpoint, asked: str | None) -> Origin:
    """Return where a GGUF comes from, with a config.json that names the dtype of its matrices if all have the same, or
    the dtype that was asked for. Norms are F32 in every GGUF, so they say nothing about the model's dtype.
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
    """The folder whose tokenizer files are this checkpoint's; a file of another format lies among anything."""
    return source.folder if source.home or source.format in ("hf", "local", "dcp") else None


@together
def convert(
    model: str | Path | Reference,
    out: str | Path | None = None,
    to: str = "local",
    *,
    force: bool = False,
    dry_run: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    allow_extra: bool = False,
    drop: Collection[str] = (),
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    workers: int | None = None,
    max_memory: int | None = None,
    progress: Callable[[int], None] | None = None,
    on_plan: Callable[[Conversion], None] | None = None,
) -> Conversion:
    """Convert a checkpoint to gptkit's own format, back to Hugging Face files of the same or another family, or to
    another format.

    Args:
        model: a reference; see `converter.resolve`.
        out: the folder to make; by default the model's name with the format behind it, in the working directory. With
            "gguf" a name that ends in .gguf is that of the file, which then stands alone, without a manifest.
        to: "local", "hf", "hf:FAMILY" for another family that can hold the tree, "hf:auto" for the first that
            can, its own before others, or a name of `converter.formats`.
        force: replace an existing checkpoint folder, in one step.
        dry_run: plan only.
        offline: use local files and the hub's cache only.
        allow_pickle: read .bin files too (weights only).
        allow_extra: leave out tensors that have no place in the model instead of refusing them.
        drop: groups of tensors that are not computed (mtp, vision, …), to be left out instead of carried along.
        dtype: store every tensor as this, rounded to nearest even where it is narrower; weights stored as integers are
            then taken for the numbers they are. By default nothing is cast. "fp8" (to "hf") stores the matrices of
            layers with a scale for each block of 128 x 128, as DeepSeek-V3 has them, and the rest as it is.
        max_shard_bytes: start another weight file beyond it; by default as the original was sharded, or 5 GB.
        workers: threads; by default one a core.
        max_memory: bytes of tensors held at once.
        progress: called with the bytes of every tensor written.
        on_plan: called once, before the first tensor is read.

    Raises:
        InvalidInput, Offline: as `open_checkpoint`; CheckpointError also where a value does not fit `dtype`.
        CannotExpress: the family or format cannot hold the tree; nothing was written.
        UsageError: `out` exists, its parent does not, or it is a weight file's name where a folder is made; an unknown
            format or dtype; too little memory allowed.
    """
    found, form = identify(model), parsed(to)
    target = Path(out) if out is not None else default_output(found.text, form)
    staging = team().staging(target, force)
    if (target.suffix, form.kind) == (".gguf", "gguf"):
        from .formats.gguf import begins  # with tables that nothing else needs

        staging.single = begins
    elif target.suffix in (".gguf", ".safetensors", ".bin", ".pt", ".pth"):
        way = f"Give the name of a folder, such as {target.with_suffix('')}" + (
            ", or pass --to gguf." if target.suffix == ".gguf" else "."
        )
        raise UsageError(f"{target} looks like a file name, but --to {form} writes a folder", way)
    # What cannot be written is refused before gigabytes are fetched, and from here on nobody else writes there.
    with nullcontext() if dry_run else staging.reserved():
        opening = {"offline": offline, "allow_pickle": allow_pickle, "allow_extra": allow_extra}
        stored = dtype is None and form.kind in ("local", "hf") and form.family is None and "scales" not in drop
        narrow = dtype is not None and dtype.lower().removeprefix("torch.") in ("bf16", "bfloat16", "fp8")
        opening |= {"integers": dtype not in (None, "fp8"), "dequantise": dtype is not None, "narrow": narrow}
        source = open_checkpoint(found, headers_only=dry_run, stored=stored, **opening)
        source, form = adapted(source, form)
        source = _with_carried(source, form, drop)
        planned = plan_conversion(source, form, dtype, max_shard_bytes)
        if staging.single is not None:
            planned = FolderPlan((replace(planned.shards[0], name=target.name),), {}, ())  # and nothing beside it
        conversion = Conversion(source, target, str(form), planned, memory_of(jobs_of(planned, source), max_memory))
        if dry_run:
            return conversion
        about = [(str(path), path.stat()) for path in source.files]  # as they are now
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
    """The checkpoint with what is carried along among its tensors, where what is written has names for it, without the
    groups to drop.
    """
    if unknown := [group for group in drop if group not in source.carried]:
        there = (
            f"This checkpoint has: {', '.join(source.carried)}."
            if source.carried
            else "Leave --drop out: all tensors belong to the language model."
        )
        raise UsageError(f"--drop {shown(unknown[0], 40)}: {source.reference} has no tensors of this group", there)
    placed = to.kind == "local" or (to.kind == "hf" and to.family in (None, source.origin.family))
    kept = [leaf for group, leaves in source.carried.items() if placed and group not in drop for leaf in leaves]
    lost = [group for group in source.carried if group not in drop and not placed]
    notes = [
        *source.notes,
        *(f"left out, because {to} cannot store them: the tensors that {CARRIED[group]}" for group in lost),
    ]
    notes += [
        f"left out by --drop {group}: the tensors that {CARRIED[group]}" for group in source.carried if group in drop
    ]
    return replace(source, leaves=[*source.leaves, *kept], notes=notes)


def adapted(source: Checkpoint, to: Target) -> tuple[Checkpoint, Target]:
    """The nearest tree of the family it is to be written as ("auto": the first that has one), and which that is."""
    if to.family is None:
        return source, to
    families = families_of(to.family, source.origin.family)

    def zero(name: str) -> bool:
        return not np.any(to_float64(*source.tensor(name)))

    found, refused = first_of(families, source.spec, cache(zero) if source.fetched else never)
    if found is None or found.found is None:
        nearest = min(refused, key=lambda each: each.weight)
        unread = len(refused) == 1 and not source.fetched and any(each.is_bias for each in nearest.standing)
        message = (
            "gptkit can leave out biases that are all zero, but --dry-run does not read them. Leave --dry-run out."
            if unread
            else OWN_FORMAT
        )
        raise nearest.refusal(message)
    family = families[len(refused)]
    return _as_tree(source, found.found, family), Target("hf", family.name)


def families_of(family: str | None, origin: str | None) -> list[Architecture]:
    """The family of that name; for none, and for "auto", all of them, the one that a checkpoint came from first."""
    if family not in (None, "auto"):
        return [named(str(family))]
    first = [] if origin is None else [named(origin)]
    return first + [each for each in ARCHITECTURES.values() if each.name != origin]


def _as_tree(source: Checkpoint, spec: ModelSpec, architecture: Architecture) -> Checkpoint:
    """The checkpoint under another tree: the tensors that it gains are zero, those that it loses are left."""
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
    weights, names = source._weights.with_more(zeros), {**source._found, **{name: name for name in zeros}}
    return replace(source, spec=spec, leaves=[*source.leaves, *leaves], notes=notes, _weights=weights, _found=names)


def _kinds(names: Iterable[str]) -> str:
    """Tensors of all layers told once: attention.q_proj.bias, …"""
    kinds = dict.fromkeys(name.split(".", 2)[-1] if name.startswith("blocks.") else name for name in names)
    return ", ".join(kinds)
