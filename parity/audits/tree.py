"""Rules about the tensors that a model has to have."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...analysis.named import LAYER
from ...architectures import Architecture, BoundLeaf
from ...components import ModelSpec
from ...components.ranges import number_ranges
from ...converter.formats.gguf import special_ids, without_ones
from ...converter.formats.gguf_header import open_header
from ...converter.names import CONFIG
from .names import counted, folded, matched
from .subject import Finding, Subject

_FEW = 4  # a layer lacks what so many times as many layers have
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass
class _Pairs:
    """Tensors of a known family beside those that its tree declares, by name. found: declared name -> ours."""

    declared: dict[str, BoundLeaf]
    found: dict[str, str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    shaped: list[tuple[str, str]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)


def _pairs(subject: Subject, spec: ModelSpec, family: Architecture) -> _Pairs:
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


def check_tree(subject: Subject) -> Iterator[Finding]:
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
    other = {name: theirs[0] for name, (theirs, how) in matched(ours, shapes, lambda *_: True).items() if not how}
    subject.names |= other
    if other:
        shown = "; ".join(folded(f"{name} is {known}" for name, known in other.items())[:3])
        message = f"{counted(other)} that a {family.name} has under another name: {shown}"
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
        message = f"{counted(missing)} of {len(pairs.declared):,} that config.json asks for missing{where}"
        yield Finding("missing-tensor", "error", message, tuple(missing), "Export them again from the source.")
    if left := tuple(name for name in extra if name not in behind):
        message = f"{counted(left)} without a place in a {family.name}"
        yield Finding("extra-tensor", "error", message, left, "Find which model they are of, or remove them.")
    for name, known in pairs.shaped:
        leaf, shape = pairs.declared[known], list(files.tensors[name].shape)
        rule = "config-vocabulary" if "embedding.weight" in leaf.shared else "shape"
        rule, remedy = ("config-head", 'Set "tie_word_embeddings": false.') if name in pairs.heads else (rule, "")
        message = f"is {shape}, and config.json says {list(leaf.shape)}"
        yield Finding(rule, "error", message, (name,), remedy or f"Correct {CONFIG} or the tensor.")


def check_gguf(subject: Subject) -> Iterator[Finding]:
    """The tensors of a GGUF, held to what its metadata say."""
    files = subject.files
    if files.format != "gguf" or not isinstance(subject.spec, ModelSpec):
        return
    assert subject.gguf is not None
    spec, wanted, dropped = subject.gguf
    missing = tuple(name for name in wanted if name not in files.tensors)
    extra = tuple(name for name in files.tensors if name not in wanted and name not in dropped)
    if missing:
        message = f"{counted(missing)} of {len(wanted):,} that its metadata ask for missing"
        yield Finding("missing-tensor", "error", message, missing, "Convert its source again.")
    if extra:
        message = f"{counted(extra)} without a place in the model that its metadata say"
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


def check_layers(subject: Subject) -> Iterator[Finding]:
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
                message = f"layer {number} of {stack} lacks {counted(lacking)} that layers like it have"
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
