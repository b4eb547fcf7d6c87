"""What is wrong with a checkpoint: its files against its index, its tensors against its config, its tokenizer, a source
that it was made from, and the program that is to load it. Headers say most of it; values are read where asked for.

A rule is a function from a subject to findings; `RULES` lists them. What a family declares is held to it exactly, and a
model of an unknown family to what its names say of one another.
"""

import importlib.util
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from ..analysis.named import LAYER
from ..architectures import Architecture, BoundLeaf, architecture_of
from ..architectures.config import quantisation
from ..architectures.gguf import expressed
from ..architectures.layout import Shape
from ..components import ModelSpec
from ..components.ranges import number_ranges
from ..converter.checkpoint import open_checkpoint
from ..converter.confinement import Confined, libraries
from ..converter.dtypes import FLOATS, HF_NAMES, to_float64
from ..converter.files import read_small
from ..converter.formats.gguf import declared, special_ids, without_ones
from ..converter.formats.gguf_header import open_header
from ..converter.names import CONFIG
from ..converter.resolve import Reference
from ..converter.rewrite import rewrite
from ..converter.scan import Scan, scan
from ..display import Record, Shown
from ..errors import CannotExpress, InvalidInput, UnknownFamily, UsageError
from .surroundings import MOST_BYTES

Severity = Literal["error", "warning", "note"]
_LOADERS = ("transformers", "llama.cpp", "vllm")
"""What `loader` may name: programs whose own code tells here what they would do."""
_SUFFIXES = (".weight", ".bias")
_FP16 = 65504.0
_PART = 2**20
"""Elements that are read at a time."""
_FEW = 4  # a layer lacks what so many times as many layers have
_QUANTISED = re.compile(
    r"\.(weight_scale(_inv)?|scales|qweight|qzeros|weight_packed|absmax|quant_map)$|_(scales|blocks)$"
)
"""Names of what quantised weights have beside them, or instead: transformers' quantizers, gpt-oss' MXFP4."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Finding(Record):
    """Something that is wrong, or worth knowing ("note"). rule: its name, for programs. tensors: those it is of, by the
    names in the files. remedy: what to do.
    """

    rule: str
    severity: Severity
    message: str
    tensors: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True)
class Audit(Shown):
    """All that was found of a checkpoint. tensors: how many it has; looked: what they were held against, in words."""

    reference: str
    revision: str | None
    tensors: int
    nbytes: int
    looked: tuple[str, ...]
    findings: tuple[Finding, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are to have another name, and which."""

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong; what is only worth knowing does not count."""
        return all(each.severity == "note" for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        data = {"schema_version": 1, "model": self.reference, "revision": self.revision, "clean": self.clean}
        data |= {"tensors": self.tensors, "bytes": self.nbytes, "held_against": list(self.looked)}
        return {**data, "findings": [each.as_json() for each in self.findings]}

    def as_sarif(self) -> dict[str, Any]:
        """The same in the Static Analysis Results Interchange Format, version 2.1.0."""
        from ..version import __version__

        rules = [{"id": rule} for rule in dict.fromkeys(each.rule for each in self.findings)]
        driver = {"name": "gptkit", "version": __version__, "rules": rules}
        results = [
            {
                "ruleId": each.rule,
                "level": each.severity,
                "message": {"text": " ".join(filter(None, [f"{each.message}.", each.remedy]))},
                "locations": [{"logicalLocations": [{"fullyQualifiedName": name} for name in each.tensors]}]
                if each.tensors
                else [],
            }
            for each in self.findings
        ]
        run = {"tool": {"driver": driver}, "results": results}
        schema = "https://json.schemastore.org/sarif-2.1.0.json"
        return {"$schema": schema, "version": "2.1.0", "runs": [run]}


def fix(
    new: str | Path | Reference,
    out: str | Path,
    *,
    force: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    **options: Any,
) -> Audit:
    """Write a checkpoint again with what is wrong and can be mended without loss: names, index, shards that nobody
    lists, tensors that are there twice. Published as every conversion is. Returns the audit of what was written.

    Args:
        new: the checkpoint, as everywhere.
        out: the folder to make.
        force: replace an existing checkpoint folder.
        offline: look in local files and the hub's cache alone.
        allow_pickle: read pickles too; what is written are safetensors.
        options: the others of `audit`.

    Raises:
        InvalidInput: as `audit`; a weight file cannot be read, so that its tensors would be lost.
        UsageError: `out` exists or cannot be made.
    """
    found = scan(new, offline=offline, allow_pickle=allow_pickle)
    if found.format == "gguf":
        raise InvalidInput(f"{found.reference} is a GGUF, which is not written again", "Convert its source again.")
    if found.broken or not found.fetched:
        why = next(iter(found.broken.values()), f"{found.reference} is on the hub, and its weights are not here")
        raise InvalidInput(f"{why}: nothing is written", "Fetch it first.")
    more: dict[str, Any] = {"offline": offline, "allow_pickle": allow_pickle}
    names = audit(new, **more, **{**options, "values": False}).names
    rewrite(found, {name: names.get(name, name) for name in found.tensors}, out, force)
    return audit(out, **more, **options)


def audit(
    new: str | Path | Reference,
    *,
    source: str | Path | Reference | None = None,
    loader: str | None = None,
    values: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Find what is wrong with a checkpoint of safetensors files, a GGUF or pickles, of whatever family.

    Args:
        new: the checkpoint, as everywhere.
        source: another one that it was made from: what it lacks, and what is different in it, is told.
        loader: a program of `_LOADERS` that is to load it: what it would ignore, rename or draw at random.
        values: read the weights: NaN, infinities, zeros, repetitions, and with a source every difference.
        offline: look in local files and the hub's cache alone.
        allow_pickle: read pickles too (weights only).
        progress: called with the bytes that were read just now, and of all.

    Raises:
        InvalidInput: there is nothing to audit: no such files, no tensor in them, none in common with the source.
        UsageError: an unknown loader; values of a repository, which are not here.
        Offline: one is not here and there is no network.
    """
    if loader is not None and loader not in _LOADERS:
        raise UsageError(f"there is no rule for {loader!r:.40}", f"known: {', '.join(_LOADERS)}")
    opening = {"offline": offline, "allow_pickle": allow_pickle}
    found = scan(new, **opening)
    other = None if source is None else scan(source, **opening)
    for each in (found, other):
        if each is not None and values and not each.fetched:
            raise UsageError(f"{each.reference} is on the hub: its values are not here", "Leave --values out.")
        if each is not None and not each.tensors and not each.broken:
            raise InvalidInput(f"{each.reference} holds no tensor: there is nothing to audit")
    subject = _Subject(found, other, loader, values, opening, progress or (lambda done, total: None))
    findings = [finding for rule in RULES for finding in rule(subject)]
    order = {"error": 0, "warning": 1, "note": 2}
    findings.sort(key=lambda finding: order[finding.severity])
    sizes = sum(info.nbytes for info in found.tensors.values())
    looked = subject.looked()
    return Audit(
        found.reference, found.revision, len(found.tensors), sizes, tuple(looked), tuple(findings), subject.names
    )


@dataclass
class _Subject:
    """What the rules look at: the files, the family that config.json names, the source."""

    files: Scan
    source: Scan | None
    loader: str | None
    values: bool
    opening: Mapping[str, bool]
    progress: Callable[[int, int], None]
    names: dict[str, str] = field(default_factory=dict)
    """Tensors by their names in the files, each with the name that it is to have."""

    @cached_property
    def family(self) -> Architecture | None:
        try:
            return None if self.files.config is None else architecture_of(self.files.config)
        except InvalidInput:
            return None

    @cached_property
    def gguf(self) -> tuple[ModelSpec, dict[str, Shape], frozenset[str]] | None:
        """What a GGUF's metadata say of its tensors; None of other files, and of architectures that are not known.
        Raises InvalidInput, CannotExpress.
        """
        if self.files.format != "gguf" or self.files.broken:
            return None
        try:
            return declared(self.files.folder / next(iter(self.files.names)))
        except UnknownFamily:
            return None

    @cached_property
    def spec(self) -> ModelSpec | str | None:
        """The tree that config.json says; in words why it says none; None of a family that is not known."""
        try:
            if self.gguf is not None:
                return self.gguf[0]
        except (CannotExpress, InvalidInput) as error:
            return error.message
        if self.family is None or self.files.config is None:
            return None
        try:
            return self.family.spec(self.files.config)
        except InvalidInput as error:
            return error.message

    @cached_property
    def quantised(self) -> bool:
        return quantisation(self.files.config) is not None

    def looked(self) -> list[str]:
        files = self.files
        words = ["its headers", *(["its index"] if files.index is not None else [])]
        words += ["its metadata"] if files.format == "gguf" and isinstance(self.spec, ModelSpec) else []
        if files.config is not None:
            known = isinstance(self.spec, ModelSpec) and not self.quantised
            words.append("config.json" if known else "config.json as far as names tell")
        words += ["its values"] if self.values else []
        words += [] if self.source is None else [self.source.reference]
        told = {"transformers": "the class in transformers", "llama.cpp": "llama.cpp's tables", "vllm": "vLLM's source"}
        return words + ([told[self.loader]] if self.loader else [])


# --- files and index -------------------------------------------------------------------------------------------------


def _files(subject: _Subject) -> Iterator[Finding]:
    files, (single, index) = subject.files, subject.files.own
    for name, why in files.broken.items():
        yield Finding("broken-file", "error", why, (), f"Fetch or write {name} again.")
    if files.index_error:
        yield Finding("broken-index", "error", files.index_error, (), "Write the index again.")
    if files.config_error:
        yield Finding("broken-config", "error", files.config_error, (), f"Write {CONFIG} again.")
    twice = [name for name, holders in files.holders.items() if len(holders) > 1]
    if twice:
        where = ", ".join(sorted({file for name in twice for file in files.holders[name]}))
        yield Finding("duplicate-tensor", "error", f"in more than one file: {where}", tuple(twice), "Keep one of each.")
    weights = [*files.headers, *files.broken]
    if files.index is None:
        if len(weights) > 1 and single not in weights:
            yield Finding("no-index", "error", f"{len(weights)} weight files and no {index}", (), "Write the index.")
        return
    lost: dict[str, list[str]] = defaultdict(list)
    for name, file in files.index.items():
        if file not in files.broken and name not in getattr(files.headers.get(file), "tensors", ()):
            lost[file].append(name)
    for file, names in lost.items():
        what = "does not hold" if file in files.headers else "is not there to hold"
        message = f"{file} {what} what the index says lies in it"
        yield Finding("dangling-index", "error", message, tuple(names), f"Fetch or write {file} again.")
    listed = set(files.index.values())
    for file, header in files.headers.items():
        unlisted = tuple(name for name in header.tensors if name not in files.index)
        if file not in listed and file != single:
            message = f"the index names no tensor of {file}: no loader opens it"
            yield Finding("unlisted-file", "warning", message, unlisted, "Add it to the index, or remove it.")
        elif unlisted:
            message = f"in {file} and not in the index: no loader finds them"
            yield Finding("unlisted-tensor", "error", message, unlisted, "Add them to the index.")
    held = sum(info.nbytes for header in files.headers.values() for info in header.tensors.values())
    if files.total_size is not None and files.total_size != held and not files.broken and not lost:
        message = f"the index says {files.total_size:,} bytes in all, the tensors have {held:,}"
        yield Finding("index-size", "warning", message, (), "Write the index again.")


# --- names and config ------------------------------------------------------------------------------------------------


@dataclass
class _Pairs:
    """Tensors of a known family beside those that its tree declares, by name. found: declared name -> ours."""

    declared: dict[str, BoundLeaf]
    found: dict[str, str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    shaped: list[tuple[str, str]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)


def _pairs(subject: _Subject, spec: ModelSpec, family: Architecture) -> _Pairs:
    tensors, layers = subject.files.tensors, len(spec.blocks)
    pairs = _Pairs({leaf.checkpoint: leaf for leaf in family.bind_files(spec, tensors)})
    for name, info in tensors.items():
        known = family.canonical_name(name, pairs.declared, layers)
        if known is None or (known not in pairs.declared and family.carries(name, layers)):
            continue
        if known == family.head and spec.tied:
            pairs.heads.append(name)
        elif known not in pairs.declared:
            pairs.extra.append(name)
        else:
            pairs.found[known] = name
            if info.shape != pairs.declared[known].shape:
                pairs.shaped.append((name, known))
    embedding = next(name for name, leaf in pairs.declared.items() if "embedding.weight" in leaf.shared)
    for name in pairs.heads:
        pairs.found.setdefault(embedding, name)  # as safetensors' save_model leaves it
        if tensors[name].shape != pairs.declared[embedding].shape:
            pairs.shaped.append((name, embedding))
    return pairs


def _tree(subject: _Subject) -> Iterator[Finding]:
    """The tensors of a known family, held to what config.json says, one by one."""
    files, spec, family = subject.files, subject.spec, subject.family
    if isinstance(spec, str):
        remedy = f"Correct {CONFIG}." if files.config is not None else "Convert its source again."
        yield Finding("config", "error", spec, (), remedy)
    if not isinstance(spec, ModelSpec) or family is None or subject.quantised:
        return
    pairs, layers = _pairs(subject, spec, family), len(spec.blocks)
    shapes = {name: leaf.shape for name, leaf in pairs.declared.items() if name not in pairs.found}
    # Layouts were tried when the names were bound: what is left may have another name.
    ours = {name: files.tensors[name].shape for name in pairs.extra}
    other = {name: theirs[0] for name, (theirs, how) in _matched(ours, shapes, lambda *_: True).items() if not how}
    subject.names |= other
    if other:
        shown = "; ".join(_folded(f"{name} is {known}" for name, known in other.items())[:3])
        message = f"{_count(other)} that a {family.name} has under another name: {shown}"
        yield Finding("other-name", "error", message, tuple(other), "Rename them: --fix OUT does.")
    extra = [name for name in pairs.extra if name not in other]
    missing = [name for name in shapes if name not in set(other.values())]
    numbers = {name: int(match["index"]) for name in files.tensors if (match := LAYER.fullmatch(name))}
    behind = tuple(name for name in extra if numbers.get(name, 0) >= layers)
    if behind:
        where = number_ranges(sorted({numbers[name] for name in behind}))
        message = f"config.json says {layers} layers, and there are tensors of layer {where}"
        yield Finding("config-layers", "error", message, behind, "Correct the number of layers, or remove these.")
    if missing == [family.head]:
        remedy = 'Set "tie_word_embeddings": true if the head is the embedding; else find it.'
        yield Finding("missing-tensor", "error", "the head is missing", tuple(missing), remedy)
    elif missing:
        gone = [layer for layer in range(layers) if layer not in numbers.values()] if not other else []
        where = f", all of layer {number_ranges(gone)} among them" if gone else ""
        message = f"{_count(missing)} of {len(pairs.declared):,} that config.json asks for missing{where}"
        yield Finding("missing-tensor", "error", message, tuple(missing), "Export them again from the source.")
    if left := tuple(name for name in extra if name not in behind):
        message = f"{_count(left)} without a place in a {family.name}"
        yield Finding("extra-tensor", "error", message, left, "Find which model they are of, or remove them.")
    for name, known in pairs.shaped:
        leaf, shape = pairs.declared[known], list(files.tensors[name].shape)
        rule = "config-vocabulary" if "embedding.weight" in leaf.shared else "shape"
        rule, remedy = ("config-head", 'Set "tie_word_embeddings": false.') if name in pairs.heads else (rule, "")
        message = f"is {shape}, and config.json says {list(leaf.shape)}"
        yield Finding(rule, "error", message, (name,), remedy or f"Correct {CONFIG} or the tensor.")


def _gguf(subject: _Subject) -> Iterator[Finding]:
    """The tensors of a GGUF, held to what its metadata say."""
    files = subject.files
    if files.format != "gguf" or not isinstance(subject.spec, ModelSpec):
        return
    assert subject.gguf is not None
    spec, wanted, dropped = subject.gguf
    missing = tuple(name for name in wanted if name not in files.tensors)
    extra = tuple(name for name in files.tensors if name not in wanted and name not in dropped)
    if missing:
        message = f"{_count(missing)} of {len(wanted):,} that its metadata ask for missing"
        yield Finding("missing-tensor", "error", message, missing, "Convert its source again.")
    if extra:
        message = f"{_count(extra)} without a place in the model that its metadata say"
        yield Finding("extra-tensor", "error", message, extra, "Convert its source again.")
    for name in wanted.keys() & files.tensors.keys():
        shape = files.tensors[name].shape
        if without_ones(shape) != without_ones(wanted[name]):
            message = f"is {list(shape)}, and its metadata say {list(wanted[name])}"
            yield Finding("shape", "error", message, (name,), "Convert its source again.")
    path = files.folder / next(iter(files.names))
    tokens = open_header(path).metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else getattr(tokens, "count", 0)
    if count > spec.vocab_size:
        message = f"its tokenizer has {count:,} tokens, and the model {spec.vocab_size:,} rows"
        yield Finding("tokenizer-vocabulary", "error", message, (), "Convert its source again.")
    for name, ids in special_ids(open_header(path)).items():
        if max(ids) >= spec.vocab_size:
            message = f"{name}_token_id is {max(ids):,}, and the model has {spec.vocab_size:,} rows"
            yield Finding("special-token", "error", message, (), "Correct the metadata.")


def _stacks(subject: _Subject) -> Iterator[Finding]:
    """The layers of an unknown family, held against one another and against how many config.json says."""
    files = subject.files
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in files.tensors:
        if match := LAYER.fullmatch(name):
            stacks[match["stack"]][int(match["index"])].add(match["inside"])
    if isinstance(subject.spec, ModelSpec) and not subject.quantised:
        return  # held to its own tree, which says more
    for stack, layers in stacks.items():
        gone = sorted(set(range(max(layers) + 1)) - set(layers))
        if gone and len(gone) < len(layers) > 2:
            message = f"{stack} has layers {number_ranges(sorted(layers))} and lacks {number_ranges(gone)}"
            yield Finding("layer-gap", "error", message, (), "Export them again from the source.")
        kinds = Counter(frozenset(names) for names in layers.values())
        for number, names in layers.items():
            whole = [kind for kind, many in kinds.items() if names < kind and many >= _FEW * kinds[frozenset(names)]]
            if whole:
                lacking = sorted(min(whole, key=len) - names)
                tensors = tuple(f"{stack}.{number}.{inside}" for inside in lacking)
                message = f"layer {number} of {stack} lacks {_count(lacking)} that layers like it have"
                yield Finding("layer-incomplete", "error", message, tensors, "Export them again from the source.")
    said = (
        {key: files.config[key] for key in _LAYERS if type((files.config or {}).get(key)) is int}
        if files.config
        else {}
    )
    longest = max((max(layers) + 1 for layers in stacks.values()), default=0)
    if said and longest and longest < min(said.values()):
        (key, number), *_ = said.items()
        message = f"config.json says {key} {number}, the longest run of layers ends at {longest - 1}"
        yield Finding("config-layers", "error", message, (), "Export the others again from the source.")


def _config(subject: _Subject) -> Iterator[Finding]:
    """What config.json says of quantisation, experts and dtype, and what the tensors say."""
    files = subject.files
    if files.config is None:
        return
    scales = tuple(name for name in files.tensors if _QUANTISED.search(name))
    few = tuple(name for name, info in files.tensors.items() if info.dtype not in (*FLOATS, "BOOL", "I64"))
    if (scales or few) and not subject.quantised:
        message = "config.json says of no quantisation, and these are, or belong to, quantised weights"
        remedy = "Add the quantization_config, or dequantise them."
        yield Finding("config-quantisation", "error", message, scales or few, remedy)
    elif subject.quantised and not scales and not few:
        message = "config.json says that the weights are quantised, and every tensor is of plain floating point"
        yield Finding("config-quantisation", "error", message, (), "Remove the quantization_config.")
    if not isinstance(subject.spec, ModelSpec):
        experts = [int(match[1]) for name in files.tensors if (match := re.search(r"\.experts\.(\d+)\.", name))]
        said = next((files.config[key] for key in _EXPERTS if type(files.config.get(key)) is int), None)
        if experts and said is not None and max(experts) + 1 < said:
            message = f"config.json says {said:,} experts, and the names end at {max(experts)}"
            yield Finding("config-experts", "error", message, (), f"Correct {CONFIG}, or find the others.")
    stated = files.config.get("dtype") or files.config.get("torch_dtype")
    floats = {info.dtype for info in files.tensors.values() if info.dtype in FLOATS}
    if isinstance(stated, str) and floats and stated.removeprefix("torch.") not in {HF_NAMES[each] for each in floats}:
        message = f"config.json says {stated}, the tensors are {', '.join(sorted(floats))}"
        yield Finding("config-dtype", "note", message, (), "Loaders convert them as they load.")


def _vocabulary(subject: _Subject) -> Iterator[Finding]:
    """Tokens and special ids, held against the rows that the model has for them."""
    files = subject.files
    config = files.config or {}
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    rows = text.get("vocab_size") if isinstance(text, dict) else None
    if isinstance(subject.spec, ModelSpec):
        rows = subject.spec.vocab_size
    if type(rows) is not int:
        return
    for name in (CONFIG, "generation_config.json"):
        try:
            given = config if name == CONFIG else _json(files.folder / name)
        except (OSError, ValueError):
            continue
        for key, value in given.items() if isinstance(given, dict) else ():
            ids = [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]
            if re.fullmatch(r"\w*_token_ids?", key) and any(each >= rows for each in ids):
                message = f"{name}: {key} is {max(ids):,}, and the model has {rows:,} rows"
                if subject.family is not None and subject.family.token_ids.get(key) == value:
                    message += ", as config classes have it where nobody sets it"
                    yield Finding("special-token", "note", message)
                else:
                    yield Finding("special-token", "error", message, (), f"Correct {name}.")
    try:
        tokenizer = _json(files.folder / "tokenizer.json")
        vocab = tokenizer["model"]["vocab"]
        ids = list(range(len(vocab))) if isinstance(vocab, list) else list(vocab.values())
        ids += [each["id"] for each in tokenizer.get("added_tokens") or ()]
        largest = max(each for each in ids if type(each) is int)
    except (AttributeError, LookupError, OSError, TypeError, ValueError):  # none, or none of a form known here
        return
    if largest >= rows:
        message = f"tokenizer.json has ids up to {largest:,}, and the model has {rows:,} rows"
        yield Finding("tokenizer-vocabulary", "error", message, (), "Add rows, or use the tokenizer of this model.")


def _json(path: Path) -> Any:
    """Raises OSError, ValueError: there is none to be read."""
    try:
        return json.loads(read_small(path, MOST_BYTES))
    except RecursionError as error:
        raise ValueError(str(error)) from error


# --- values ----------------------------------------------------------------------------------------------------------


def _values(subject: _Subject) -> Iterator[Finding]:
    if not subject.values:
        return
    files = subject.files
    kinds_of = {name: dtype for name, (dtype, _) in files.weights.info.items()}  # of a GGUF's blocks, as they are read
    readable = {name: info for name, info in files.tensors.items() if kinds_of[name] in FLOATS}
    total = sum(info.nbytes for info in readable.values())
    odd: dict[str, list[str]] = defaultdict(list)
    alike: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, info in readable.items():
        kinds, digest = _look(files.weights.read(name), kinds_of[name])
        for kind in kinds:
            odd[kind].append(name)
        if not kinds and len(info.shape) > 1:
            alike[digest, info.nbytes].append(name)
        files.weights.release()
        subject.progress(info.nbytes, total)
    messages: dict[str, tuple[Severity, str, str]] = {
        "not-finite": ("error", "NaN or infinite values", "Export them again: no training ends so."),
        "zero-tensor": ("warning", "a matrix of zeros alone", "See whether it was ever filled."),
        "constant-tensor": ("warning", "a matrix of one value", "See whether it was ever filled."),
        "fp16-range": ("note", "values that fp16 does not hold", "Load it in bfloat16 or float32."),
    }
    for kind, (severity, message, remedy) in messages.items():
        if odd[kind]:
            yield Finding(kind, severity, message, tuple(odd[kind]), remedy)
    for names in alike.values():
        layers = {match["index"] for name in names if (match := LAYER.fullmatch(name))}
        if len(names) > 1 and layers:
            message = "the same bytes at several places"
            yield Finding(
                "repeated-tensor", "warning", message, tuple(names), "See whether one was copied over another."
            )


def _look(array: np.ndarray[Any, Any], dtype: str) -> tuple[list[str], str]:
    """What is odd about a tensor's values, and a hash of its bytes."""
    flat, digest = array.reshape(-1), xxhash.xxh3_128()
    low, high, finite = np.inf, -np.inf, True
    for start in range(0, flat.size, _PART):
        part = flat[start : start + _PART]
        digest.update(np.ascontiguousarray(part).tobytes())
        wide = to_float64(part, dtype)
        finite = finite and bool(np.isfinite(wide).all())
        low, high = min(low, float(np.fmin.reduce(wide))), max(high, float(np.fmax.reduce(wide)))
    kinds = [] if finite else ["not-finite"]
    if array.ndim > 1 and flat.size > 1 and low == high:
        kinds.append("constant-tensor" if high else "zero-tensor")
    if finite and dtype != "F16" and max(abs(low), abs(high)) > _FP16 and flat.size:
        kinds.append("fp16-range")
    return kinds, digest.hexdigest()


# --- the source ------------------------------------------------------------------------------------------------------


def _source(subject: _Subject) -> Iterator[Finding]:
    """What the source has and the checkpoint has not, or has otherwise; what is there under another name is matched."""
    if subject.source is None:
        return
    if "gguf" in (formats := {subject.files.format, subject.source.format}) and len(formats) > 1:
        yield from _across(subject, subject.source)
        return
    ours, theirs = subject.files.tensors, subject.source.tensors

    def same(name: str, other: str) -> bool:
        return not subject.values or _same(subject, name, other)

    shapes = [{name: info.shape for name, info in side.items()} for side in (ours, theirs)]
    moved = _matched(shapes[0], shapes[1], same)
    whole = [name for names, _ in moved.values() for name in names]
    missing = [name for name in theirs if name not in ours and name not in whole]
    extra = [name for name in ours if name not in theirs and name not in moved]
    both = [name for name in theirs if name in ours]
    if not both and not moved:
        raise InvalidInput(f"{subject.files.reference} and {subject.source.reference} have no tensor in common")
    if missing:
        message = f"{_count(missing)} of the source's {len(theirs):,} lost"
        yield Finding("lost-tensor", "error", message, tuple(missing), "Export them again.")
    if extra:
        message = f"{_count(extra)} that the source does not have"
        yield Finding("added-tensor", "warning", message, tuple(extra), "See where they come from.")
    if moved:
        shown = [f"{' + '.join(names)} → {name}{f' ({how})' if how else ''}" for name, (names, how) in moved.items()]
        pairs = "; ".join(_folded(shown)[:3])
        yield Finding("renamed-tensor", "note", f"under another name: {pairs}", tuple(moved))
    shaped = [name for name in both if ours[name].shape != theirs[name].shape]
    for name in shaped:
        message = f"is {list(ours[name].shape)}, in the source {list(theirs[name].shape)}"
        yield Finding("source-shape", "error", message, (name,), "Export it again.")
    typed = defaultdict(list)
    for name in both:
        if ours[name].dtype != theirs[name].dtype:
            typed[theirs[name].dtype, ours[name].dtype].append(name)
    for (before, after), names in typed.items():
        narrower = FLOATS.index(after) < FLOATS.index(before) if {before, after} <= {*FLOATS} else True
        severity: Severity = "warning" if narrower else "note"
        yield Finding("source-dtype", severity, f"{before} in the source, {after} here", tuple(names))
    if subject.values:
        alike = [name for name in both if name not in shaped and ours[name].dtype == theirs[name].dtype]
        changed = [name for name in alike if not _same(subject, name, name)]
        if changed:
            message = f"{_count(changed)} of other values than in the source"
            yield Finding("source-value", "error", message, tuple(changed), "gptkit diff tells by how much.")


def _across(subject: _Subject, source: Scan) -> Iterator[Finding]:
    """The same of a GGUF and a checkpoint of another format, by the names and shapes that both trees share."""
    shapes = []
    for side in (source.reference, subject.files.reference):
        try:
            opened = open_checkpoint(side, headers_only=True, partial=True, **subject.opening)
        except InvalidInput as error:
            if side == source.reference:
                raise
            yield Finding("not-compared", "error", f"not held against its source: {error.message}")
            return
        pairs = [pair for leaf in opened.leaves for pair in zip(leaf.shared, leaf.shared_shapes, strict=True)]
        shapes.append(dict(pairs))
    theirs, ours = shapes
    lost = tuple(name for name in theirs if name not in ours)
    if lost:
        message = f"{_count(lost)} of the source's {len(theirs):,} lost, by the names that both share"
        yield Finding("lost-tensor", "error", message, lost, "Convert the source again.")
    for name in theirs.keys() & ours.keys():
        if ours[name] != theirs[name]:
            message = f"is {list(ours[name])}, in the source {list(theirs[name])}"
            yield Finding("source-shape", "error", message, (name,), "Convert the source again.")


def _same(subject: _Subject, name: str, other: str) -> bool:
    assert subject.source is not None
    x, y = (side.weights.read(each).reshape(-1) for side, each in ((subject.files, name), (subject.source, other)))
    equal = all(
        np.array_equal(x[at : at + _PART].view(np.uint8), y[at : at + _PART].view(np.uint8))
        for at in range(0, x.size, _PART)
    )
    subject.files.weights.release()
    subject.source.weights.release()
    return equal


_Names = Mapping[str, tuple[int, ...]]  # tensors' names, each with its shape


def _matched(ours: _Names, theirs: _Names, same: Callable[[str, str], bool]) -> dict[str, tuple[tuple[str, ...], str]]:
    """Tensors that are there under another name: ours -> theirs, and how several of theirs lie in one.

    By the end of the name and the shape, where only one fits and `same` allows it; else experts stacked, and
    projections joined, of one module, by their numbers of elements.
    """
    left = {name: shape for name, shape in theirs.items() if name not in ours}
    free = {name: shape for name, shape in ours.items() if name not in theirs}
    found: dict[str, tuple[tuple[str, ...], str]] = {}
    ends: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for name, shape in left.items():
        for end in _ends(name):
            ends[end, shape].append(name)
    taken: set[str] = set()
    for name, shape in free.items():
        # The longest end that one name of theirs has.
        candidates = next((some for end in _ends(name) if (some := ends[end, shape])), [])
        candidates = [each for each in candidates if each not in taken]
        if len(candidates) == 1 and same(name, candidates[0]):
            found[name] = ((candidates[0],), "")
            taken.add(candidates[0])
    for name, shape in free.items():
        if name not in found:
            parts = _parts_of(name, shape, {each: left[each] for each in left if each not in taken})
            if parts:
                found[name] = (parts, "stacked" if len(shape) > len(left[parts[0]]) else "joined")
                taken.update(parts)
    return found


def _ends(name: str) -> Iterator[str]:
    """The name and its ends at dots, the longest first; a layer's number stays."""
    parts = name.split(".")
    for start in range(max(len(parts) - 1, 1)):
        if any(part.isdecimal() for part in parts[start:]) == any(part.isdecimal() for part in parts):
            yield ".".join(parts[start:])


def _parts_of(name: str, shape: tuple[int, ...], left: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Those of the source's tensors in the same module that make up one of ours, by their numbers of elements."""
    wanted, module = int(np.prod(shape)), name.rpartition(".")[0]
    module = module.rpartition(".")[0] if name.endswith((".weight", ".bias")) else module
    inside = {each: int(np.prod(size)) for each, size in left.items() if each.startswith(f"{module}.")}
    groups: dict[str, list[str]] = defaultdict(list)
    for each in inside:
        groups[re.sub(r"\.\d+\.", ".*.", each[len(module) :])].append(each)
    words = set(re.findall(r"[a-z]+", name.rsplit(".", 1)[-1] if not name.endswith(".weight") else name.split(".")[-2]))
    kinds = [kind for kind in groups if words & set(re.findall(r"[a-z]+", kind)) - {"proj", "weight", "bias"}] or [
        *groups
    ]
    parts = tuple(each for kind in kinds for each in groups[kind])
    return parts if len(parts) > 1 and sum(inside[each] for each in parts) == wanted else ()


# --- the loader ------------------------------------------------------------------------------------------------------


def _loader(subject: _Subject) -> Iterator[Finding]:
    """What the program does with these names: transformers' own class tells it, without weights; llama.cpp's tables;
    vLLM's source.
    """
    files = subject.files
    if subject.loader in ("llama.cpp", "vllm"):
        yield from (_for_vllm if subject.loader == "vllm" else _for_llama_cpp)(subject)
    if subject.loader != "transformers":
        return
    if files.config is None:
        raise InvalidInput(f"{files.reference} has no {CONFIG}: transformers does not load it")
    tensors = [[name, list(info.shape)] for name, info in files.tensors.items()]
    question = {"config": dict(files.config), "libraries": libraries(), "tensors": tensors}
    reply = Confined("transformers_process").ask(question)
    if reply is None or "error" in reply:
        why = "it takes more time or memory than a model does" if reply is None else reply["error"]
        words = "".join(sign if sign.isprintable() else " " for sign in why)
        raise UnknownFamily(f"transformers makes no model of {files.reference}: {words:.300}")
    told, kind = reply["answer"]["loading"], reply["answer"]["class"]
    rules: tuple[tuple[str, str, Severity, str, str], ...] = (
        ("ignored", "loader-ignores", "warning", "leaves these out without a word", "They are lost when it saves."),
        ("unexpected", "loader-ignores", "error", "has no place for these, and leaves them out", "Correct the names."),
        ("missing", "loader-draws", "error", "finds nothing for these, and draws them at random", "Export them again."),
        ("unneeded", "loader-draws", "note", "makes these by itself", ""),
        ("mismatched", "loader-shape", "error", "expects another shape of these", f"Correct {CONFIG}."),
    )
    for key, rule, severity, message, remedy in rules:
        if told[key]:
            yield Finding(rule, severity, f"transformers' {kind} {message}", tuple(told[key]), remedy)
    if told["renamed"]:
        shown = "; ".join(_folded([f"{x} → {y}" for x, y in told["renamed"].items()])[:3])
        yield Finding("loader-renames", "note", f"transformers' {kind} renames: {shown}", tuple(told["renamed"]))


def _for_llama_cpp(subject: _Subject) -> Iterator[Finding]:
    """What llama.cpp's tables, those of the gguf package and ours, say of these names."""
    if importlib.util.find_spec("gguf") is None:
        raise UsageError("llama.cpp's tables are in the gguf package, which is not installed", "pip install gguf")
    import gguf

    files = subject.files
    names = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = max((int(match["index"]) + 1 for name in files.tensors if (match := LAYER.fullmatch(name))), default=0)
    if files.format == "gguf":
        kind = open_header(files.folder / next(iter(files.names))).metadata.get("general.architecture")
        if kind not in names:
            raise UnknownFamily(f"the gguf package has no architecture called {kind!r:.60}")
        known = gguf.get_tensor_name_map(names[kind], layers)
        left = tuple(name for name in files.tensors if known.get_name(name, _SUFFIXES) is None)
        if left:
            message = f"llama.cpp's {kind} has no place for these, and does not load a file with others than its own"
            yield Finding("loader-ignores", "error", message, left, "Convert its source again.")
        return
    if subject.family is not None and isinstance(subject.spec, ModelSpec):
        try:
            found = expressed(subject.spec, subject.family.name)
        except CannotExpress as error:
            yield Finding("loader-refuses", "error", f"no architecture of llama.cpp's computes this: {error.message}")
            return
        beside = tuple(name for name in files.tensors if subject.family.carries(name, len(subject.spec.blocks)))
        if beside:
            message = "what convert --to gguf writes has no place for these, and leaves them out"
            yield Finding("loader-ignores", "warning", message, beside)
        yield Finding("loader-architecture", "note", f"llama.cpp computes it as its {found.architecture.name}")
        return
    said = (files.config or {}).get("model_type")
    kind = next((each for each in names if re.sub(r"[^a-z0-9]", "", each) == re.sub(r"[^a-z0-9]", "", str(said))), None)
    if kind is None:
        raise UnknownFamily(f"the gguf package has no architecture called as the model_type {said!r:.60}")
    known = gguf.get_tensor_name_map(names[kind], layers)
    left = tuple(name for name in files.tensors if known.get_name(name, _SUFFIXES) is None)
    if left:
        message = f"the gguf package has no name for these in its {kind}, and converters say so: can not map tensor"
        remedy = "Where convert_hf_to_gguf.py renames them before it asks, they are right."
        yield Finding("loader-unmapped", "warning", message, left, remedy)
    yield Finding("loader-architecture", "note", f"llama.cpp has an architecture called {kind}")


def _for_vllm(subject: _Subject) -> Iterator[Finding]:
    """What vLLM does with these names, by its models' source, which is run without the rest of it."""
    folder = _installed("vllm")
    if folder is None or not Path(folder, "model_executor", "models", "registry.py").is_file():
        why = "what vLLM does is told by the source of its models, which is not installed"
        raise UsageError(why, "pip install --no-deps vllm: nothing else of it is run.")
    files, config = subject.files, subject.files.config
    if config is None:
        raise InvalidInput(f"{files.reference} has no {CONFIG}, by which vLLM finds a model's class")
    named = config.get("architectures")
    name = next((each for each in named if isinstance(each, str)), None) if isinstance(named, list) else None
    if name is None:
        yield Finding("loader-refuses", "error", f"{CONFIG} names no architecture, which vLLM asks for")
        return
    asked = Confined("transformers_process").ask({"config": dict(config), "libraries": libraries(), "fields": True})
    fields = (asked or {}).get("answer", {}).get("fields")
    tensors = [[tensor, list(info.shape)] for tensor, info in files.tensors.items()]
    question = {"source": folder, "architecture": name, "tensors": tensors, "quantised": subject.quantised}
    question |= {"config": fields or dict(config), "complete": fields is not None}
    reply = Confined("vllm_process").ask(question)
    if reply is None or "error" in reply:
        why = "it takes more time or memory than a model does" if reply is None else reply["error"]
        raise UnknownFamily(f"vLLM's source is not read for {name:.60}: {why:.300}")
    told = reply["answer"]
    yield from _vllm_knows(config, name, told)
    kind, loading = f"vLLM's {told['class']}", told.get("loading", {})
    if "refuses" in told:
        yield Finding("loader-refuses", "error", f"{kind} refuses this {CONFIG}: {told['refuses']}")
    if "unread" in told:
        yield Finding("loader-unread", "note", f"{kind} is not read, for what it asks for: {told['unread']}")
    if loading.get("ignored"):
        message = f"{kind} has no place for these, and leaves them out without a word"
        yield Finding("loader-ignores", "warning", message, tuple(loading["ignored"]))
    if loading.get("unexpected"):
        message = f"{kind} has no place for these, and does not load a checkpoint that has them"
        yield Finding("loader-ignores", "error", message, tuple(loading["unexpected"]), "Correct the names.")
    for checked, does in ((False, "computes with whatever lies in memory"), (True, "does not load the checkpoint")):
        missing = [each for each, looks in loading.get("missing", {}).items() if looks is checked]
        missing += [] if checked else loading.get("halves", [])
        if missing:
            message = f"{kind} finds nothing for these, and {does}"
            yield Finding("loader-draws", "error", message, tuple(missing), "Export them again.")
    for why, names in loading.get("unread", {}).items():
        yield Finding("loader-unread", "note", f"not held against {kind}: {why}", tuple(names))


def _installed(package: str) -> str | None:
    """The folder of a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    return next(iter(spec.submodule_search_locations or []), None) if spec is not None else None


def _vllm_knows(config: Mapping[str, Any], name: str, told: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether vLLM has a class for an architecture, and loads weights that are quantised like these."""
    given = config.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method is not None and method not in told["quantisations"]:
        yield Finding("loader-refuses", "error", f"vLLM loads no weights that are quantised by {method!r:.40}")
    if told["module"] == "transformers":
        message = f"vLLM has no class of its own for {name}, and runs transformers'"
        yield Finding("loader-architecture", "note", message, (), "--for transformers tells what that takes.")
    elif told["module"] is None:
        until = f": version {told['last']} was the last that did" if told["last"] else ""
        folder, kind = _installed("transformers"), re.sub(r"[^a-z0-9_]", "", str(config.get("model_type")))
        code = [] if folder is None else [*Path(folder).glob(f"models/{kind}/modeling_{kind}.py")]
        if any(f"class {name}(" in file.read_text() for file in code):
            message = (
                f"vLLM has no class for {name}{until}; it runs transformers' if that lets others compute attention"
            )
            yield Finding("loader-architecture", "warning", message, (), "--for transformers tells what that takes.")
        else:
            yield Finding("loader-refuses", "error", f"vLLM has no class for {name}, nor has transformers{until}")


RULES: tuple[Callable[[_Subject], Iterable[Finding]], ...] = (
    _files,
    _tree,
    _gguf,
    _stacks,
    _config,
    _vocabulary,
    _values,
    _source,
    _loader,
)


def _count(names: Collection[str]) -> str:
    return f"{len(names):,} tensor{'' if len(names) == 1 else 's'}"


def _folded(lines: Iterable[str]) -> list[str]:
    """Lines that differ by numbers alone, told once with stars."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", line) for line in lines))
