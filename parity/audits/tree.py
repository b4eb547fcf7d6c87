"""Compare the tensors of a checkpoint with those that the model described by its config needs."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from ...analysis.named import LAYER
from ...components import ModelSpec
from ...components.ranges import number_ranges
from ...converter.dtypes import FLOATS
from ...converter.formats.gguf import special_ids, without_ones
from ...converter.formats.gguf_header import open_header
from ...converter.matching import Match
from ...converter.names import CONFIG
from ...errors import GptkitError
from .fields import LAYERS, FittingField, fitting_fields, restored_field, value_words
from .names import counted, folded, matched
from .subject import CONVERT_AGAIN, REWRITABLE, SAVE_AGAIN, Finding, Subject

_FEW = 4  # a layer is incomplete if this many times as many layers have its tensors and more


def check_tree(subject: Subject) -> Iterator[Finding]:
    """Compare the tensors with those that a known model family needs for this config.

    Report missing, additional and misnamed tensors, and wrong shapes and dtypes. Also report an unusable config.
    """
    files, spec, pairs = subject.files, subject.spec, subject.match
    fitting, subject.restored = fitting_fields(subject), restored_field(subject)
    correction = _correction(subject, fitting)
    if isinstance(spec, GptkitError) and not files.config_error:
        remedy = spec.hint or (f"Correct {CONFIG}." if files.config is not None else CONVERT_AGAIN)
        yield Finding("config", "error", spec.message, (), correction or remedy)
    elif spec is None and files.resolved.names is not None and CONFIG not in files.names and files.format != "gguf":
        message = f"there is no {CONFIG}, so no program knows which architecture these tensors belong to"
        yield Finding("no-config", "error", message, (), f"Copy the model's {CONFIG} into the folder.")
    if isinstance(pairs, GptkitError):
        yield Finding("config", "error", pairs.message, (), correction or pairs.hint or f"Correct {CONFIG}.")
    if not isinstance(pairs, Match) or not isinstance(spec, ModelSpec):
        return
    numbers = {name: int(index["index"]) for name in files.tensors if (index := LAYER.fullmatch(name))}
    missing, extra = pairs.missing, pairs.extra
    if subject.family is not None:
        renamed = _other_names(subject, pairs)
        yield from _other_class(subject, pairs, renamed)
        missing = [name for name in missing if name not in set(renamed.values())]
        extra = [name for name in extra if name not in renamed]
        if subject.family.other_class(files.config):
            missing = [name for name in missing if name != subject.family.head]
            extra = [name for name in extra if name not in pairs.own_head(subject.family)]
        subject.names |= renamed
        if renamed:
            shown = "; ".join(folded(f"{name} should be {known}" for name, known in renamed.items())[:3])
            message = f"{counted(renamed)} whose names are not those of {subject.family.name} checkpoints: {shown}"
            remedy = "Write a copy with the expected names: run this command with --fix OUT."
            yield Finding("other-name", "error", message, tuple(renamed), remedy)
    yield from _missing(subject, pairs, spec, missing, numbers, correction)
    yield from _extra(subject, spec, extra, numbers, correction)
    yield from _odd(subject, pairs, fitting, correction)


def _correction(subject: Subject, fitting: list[FittingField]) -> str:
    """Return the remedy for a field of config.json that contradicts the tensors, or ""."""
    values = " or ".join(f"{field.path} to {field.fits} instead of {field.value}" for field in fitting)
    return _restoring(subject) or (
        f"Set {values} in {CONFIG}: then the shapes of all tensors agree." if fitting else ""
    )


def _restoring(subject: Subject) -> str:
    """Return the remedy if all tensors fit with the source's value of one field of config.json, or ""."""
    if subject.restored is None or subject.source is None:
        return ""
    (path, value), source = subject.restored, subject.source.reference
    words = f"Restore the value of {path} in {source}, {value_words(value)}"
    return (
        f"{words}: run this command with --source {source} --fix OUT" if subject.files.format in REWRITABLE else words
    )


def _other_names(subject: Subject, pairs: Match) -> dict[str, str]:
    """Return tensors that are probably stored under a wrong name: name in the files -> expected name.

    `pairs` says which tensors in the files fit the model's parameters, and which do not.
    """
    ours = {name: subject.files.tensors[name].shape for name in pairs.extra}
    shapes = {name: pairs.declared[name].shape for name in pairs.missing}
    # Layouts were tried when the names were bound, so unmatched tensors may have another name.
    return {name: theirs[0] for name, (theirs, how) in matched(ours, shapes, lambda *_: True).items() if not how}


def _other_class(subject: Subject, pairs: Match, renamed: Mapping[str, str]) -> Iterator[Finding]:
    """Report if the class named in config.json has no language model head, or another kind of head.

    Args:
        subject: the audited checkpoint.
        pairs: which tensors fit the model's parameters, and which do not.
        renamed: tensors that are stored under a wrong name. They are not taken for tensors of a head.
    """
    family = subject.family
    name = None if family is None else family.other_class(subject.files.config)
    if family is None or name is None:
        return
    head_tensors = tuple(tensor for tensor in pairs.own_head(family) if tensor not in renamed)
    if head_tensors:
        message = (
            f"config.json names the class {name}, whose head is not a language model's: the shape of the head "
            "was not checked"
        )
        yield Finding("other-head", "note", message, head_tensors)
    elif name.endswith("Model"):
        yield Finding("other-head", "note", f"config.json names the class {name}, which has no language model head")
    else:
        message = f"config.json names the class {name}, but the tensors of its head are missing"
        yield Finding("missing-tensor", "error", message, (), SAVE_AGAIN)


def _missing(
    subject: Subject, pairs: Match, spec: ModelSpec, missing: list[str], numbers: Mapping[str, int], correction: str
) -> Iterator[Finding]:
    """Report tensors that the model needs and no file has.

    Args:
        subject: the audited checkpoint.
        pairs: which tensors fit the model's parameters, and which do not.
        spec: the component tree.
        missing: the names of the missing tensors.
        numbers: the layer number of each stored tensor.
        correction: a remedy for a wrong field of config.json, or "".
    """
    if subject.family is not None and missing == [subject.family.head]:
        remedy = (
            'Set "tie_word_embeddings": true if the head is tied to the embedding; otherwise add the tensor '
            "of the head."
        )
        has, repair = _in_source(subject, pairs, missing)
        message = f"the tensor of the language model head is missing{has}"
        yield Finding("missing-tensor", "error", message, tuple(missing), repair or _restoring(subject) or remedy)
    elif missing:
        missing_layers = (
            [layer for layer in range(len(spec.blocks)) if layer not in numbers.values()] if not subject.names else []
        )
        where = f", including all tensors of layer {number_ranges(missing_layers)}" if missing_layers else ""
        message = f"missing: {counted(missing)} of the {len(pairs.declared):,} that {subject.says} requires{where}"
        has, repair = _in_source(subject, pairs, missing)
        other = f"{correction} Or: {SAVE_AGAIN}" if missing_layers and correction else SAVE_AGAIN
        remedy = repair or _restoring(subject) or other
        yield Finding("missing-tensor", "error", message + has, tuple(missing), remedy)


def _in_source(subject: Subject, pairs: Match, missing: list[str]) -> tuple[str, str]:
    """Add the missing tensors that the source has with the required shape to `subject.in_source`.

    Return a sentence for the message, and a remedy if the source has all of them and `--fix` can repair the checkpoint.
    """
    if subject.source is None:
        return "", ""
    stored = subject.source.tensors
    usable = [
        name
        for name in missing
        if name in stored and stored[name].shape == pairs.declared[name].shape and stored[name].dtype in FLOATS
    ]
    subject.in_source += usable
    if not usable:
        return "", ""
    several, source = len(missing) > 1, subject.source.reference
    if len(usable) < len(missing):
        return f". {source} has {len(usable):,} of them with the required shape", ""
    words = f". {source} has {'them' if several else 'it'} with the required shape"
    if subject.files.format not in REWRITABLE or subject.files.resolved.is_own:
        return words, ""
    return words, f"Copy {'them' if several else 'it'} from {source}: run this command with --source {source} --fix OUT"


def _extra(
    subject: Subject, spec: ModelSpec, extra: list[str], numbers: Mapping[str, int], correction: str
) -> Iterator[Finding]:
    """Report stored tensors that the model does not have (`extra`). `numbers` has the layer number of each stored
    tensor, and `correction` is a remedy for a wrong field of config.json, or "".
    """
    layers = len(spec.blocks)
    beyond = tuple(name for name in extra if numbers.get(name, 0) >= layers)
    if beyond:
        where = number_ranges(sorted({numbers[name] for name in beyond}))
        message = f"{subject.says} says {layers} layers, but there are tensors of layer {where}"
        remedy = correction or f"Correct the number of layers in {subject.says}, or remove these tensors."
        yield Finding("config-layers", "error", message, beyond, remedy)
    if unexpected := tuple(name for name in extra if name not in beyond):
        model = (
            "the model" if subject.family is None else f"the {subject.family.name} model that {subject.says} describes"
        )
        message = f"{counted(unexpected)} not part of {model}"
        remedy = _restoring(subject) or f"Remove these tensors, or correct {subject.says} if they belong to the model."
        yield Finding("extra-tensor", "error", message, unexpected, remedy)


def _odd(subject: Subject, pairs: Match, fitting: list[FittingField], correction: str) -> Iterator[Finding]:
    """Report stored tensors that do not fit the model.

    They have a wrong shape or dtype, are stored under two names, or are copies of shared weights with other values. If
    the shapes prove which field of config.json is wrong (`fitting`), one finding names it, with its tensors.
    """
    tensors = subject.files.tensors
    if pairs.shaped and fitting:
        names = tuple(pairs.matched[name] for name in pairs.shaped)
        shared = [name for expected in pairs.shaped for name in pairs.declared[expected].shared]
        is_vocabulary = all(name.startswith(("embedding.", "head.")) for name in shared)
        values = " or ".join(f"{field.path} is {field.value}, but should be {field.fits}" for field in fitting)
        message = f"{CONFIG}: {values} according to the shapes of all tensors"
        yield Finding("config-vocabulary" if is_vocabulary else "shape", "error", message, names, correction)
    for expected in pairs.shaped if not fitting else ():
        name, leaf = pairs.matched[expected], pairs.declared[expected]
        rule = "config-vocabulary" if "embedding.weight" in leaf.shared else "shape"
        rule, remedy = ("config-head", 'Set "tie_word_embeddings": false.') if name == pairs.stands_in else (rule, "")
        message = f"has the shape {list(tensors[name].shape)}, but {subject.says} says {list(leaf.shape)}"
        yield Finding(
            rule, "error", message, (name,), remedy or f"Correct the size in {subject.says}, or replace the tensor."
        )
    if typed := tuple(name for name in pairs.typed if name not in pairs.carried.get("scales", {}).values()):
        kinds = ", ".join(sorted({tensors[name].dtype for name in typed}))
        message = f"weights are stored as {kinds}, but {subject.says} has no quantization_config"
        remedy = "Add the quantization_config of the quantised model, or store the weights as bfloat16 or float32."
        yield Finding("dtype", "error", message, typed, remedy)
    if pairs.untied:
        message = f"{subject.says} ties the head to the embedding, but the files have a head with other values"
        remedy = 'Set "tie_word_embeddings": false if the head should not be tied, or remove the head.'
        yield Finding("tied-head", "error", message, tuple(pairs.untied), _restoring(subject) or remedy)
    elif pairs.heads and not subject.files.fetched:
        message = (
            f"{subject.says} ties the head to the embedding, and the files have a head too; gptkit has not "
            "compared their values"
        )
        yield Finding("tied-head", "note", message, tuple(pairs.heads))
    if pairs.altered:
        message = (
            "transformers would load these stored values, which differ from the values that follow from config.json"
        )
        remedy = "Remove these tensors if they were left over from another model."
        yield Finding("altered-tensor", "error", message, tuple(pairs.altered), remedy)
    if pairs.parted:
        message = "several layers share these weights, but their stored copies have different values"
        yield Finding("altered-tensor", "error", message, tuple(pairs.parted), SAVE_AGAIN)
    for pair in pairs.twice:
        yield Finding(
            "two-names", "error", "the same tensor is stored under two names", pair, "Remove one of the two tensors."
        )


def check_gguf(subject: Subject) -> Iterator[Finding]:
    """Compare the tensors, tokens and special token ids of a GGUF file with its metadata."""
    files = subject.files
    if files.format != "gguf" or not isinstance(subject.spec, ModelSpec):
        return
    assert subject.gguf is not None
    spec, wanted, dropped = subject.gguf
    missing = tuple(name for name in wanted if name not in files.tensors)
    extra = tuple(name for name in files.tensors if name not in wanted and name not in dropped)
    if missing:
        message = f"missing: {counted(missing)} of the {len(wanted):,} that the metadata of the GGUF file require"
        yield Finding("missing-tensor", "error", message, missing, CONVERT_AGAIN)
    if extra:
        message = f"{counted(extra)} not part of the model that the metadata of the GGUF file describe"
        yield Finding("extra-tensor", "error", message, extra, CONVERT_AGAIN)
    for name in wanted.keys() & files.tensors.keys():
        shape = files.tensors[name].shape
        if without_ones(shape) != without_ones(wanted[name]):
            message = f"has the shape {list(shape)}, but the metadata of the GGUF file say {list(wanted[name])}"
            yield Finding("shape", "error", message, (name,), CONVERT_AGAIN)
    path = files.folder / next(iter(files.names))
    tokens = open_header(path).metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else getattr(tokens, "count", 0)
    if count > spec.vocab_size:
        message = f"its tokenizer has {count:,} tokens, but the embedding has {spec.vocab_size:,} rows"
        yield Finding("tokenizer-vocabulary", "error", message, (), CONVERT_AGAIN)
    for name, ids in special_ids(open_header(path)).items():
        if max(ids) >= spec.vocab_size:
            message = (
                f"{name}_token_id in the GGUF metadata is {max(ids):,}, but the embedding has {spec.vocab_size:,} rows"
            )
            remedy = f"Set it to a token id below {spec.vocab_size} (llama.cpp's gguf_set_metadata.py)."
            yield Finding("special-token", "error", message, (), remedy)


def check_layers(subject: Subject) -> Iterator[Finding]:
    """Check a model of an unknown family: no layer may be missing, and similar layers must have the same tensors.

    Also compare the number of layers with config.json.
    """
    files = subject.files
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in files.tensors:
        if match := LAYER.fullmatch(name):
            stacks[match["stack"]][int(match["index"])].add(match["inside"])
    if isinstance(subject.spec, ModelSpec) and not subject.quantised:
        return  # check_tree compares these tensors with their own tree
    for stack, layers in stacks.items():
        missing_layers = sorted(set(range(max(layers) + 1)) - set(layers))
        if missing_layers and len(missing_layers) < len(layers) > 2:
            message = f"{stack} has layers {number_ranges(sorted(layers))}, but not {number_ranges(missing_layers)}"
            yield Finding("layer-gap", "error", message, (), SAVE_AGAIN)
        kinds = Counter(frozenset(names) for names in layers.values())
        for number, names in layers.items():
            whole = [kind for kind, count in kinds.items() if names < kind and count >= _FEW * kinds[frozenset(names)]]
            if whole:
                lacking = sorted(min(whole, key=len) - names)
                tensors = tuple(f"{stack}.{number}.{inside}" for inside in lacking)
                message = f"layer {number} of {stack} lacks {counted(lacking)} that similar layers have"
                yield Finding("layer-incomplete", "error", message, tensors, SAVE_AGAIN)
    stated = (
        {key: files.config[key] for key in LAYERS if type((files.config or {}).get(key)) is int} if files.config else {}
    )
    longest = max((max(layers) + 1 for layers in stacks.values()), default=0)
    if stated and longest and longest < min(stated.values()):
        (key, number), *_ = stated.items()
        message = f"config.json: {key} is {number}, but the last layer is {longest - 1}"
        yield Finding("config-layers", "error", message, (), SAVE_AGAIN)
