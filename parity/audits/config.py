"""Rules about config.json and the tokenizer."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...components import ModelSpec
from ...converter.dtypes import FLOATS, HF_NAMES
from ...converter.files import read_small
from ...converter.names import CONFIG
from ...converter.safetensors import TensorInfo
from ..surroundings import MOST_BYTES
from .subject import Finding, Subject

_QUANTISED = re.compile(
    r"\.(weight_scale(_inv)?|scales|qweight|qzeros|weight_packed|absmax|quant_map)$|_(scales|blocks)$"
)
"""Names of what quantised weights have beside them, or instead: transformers' quantizers, gpt-oss' MXFP4."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def check_config(subject: Subject) -> Iterator[Finding]:
    """What config.json says of quantisation, experts and dtype, and what the tensors say."""
    files = subject.files
    if files.config is None:
        return
    scaled = tuple(_scaled(files.tensors))
    if scaled and not subject.quantised:
        message = "config.json says of no quantisation, and these are, or belong to, quantised weights"
        remedy = "Add the quantization_config, or dequantise them."
        yield Finding("config-quantisation", "error", message, scaled, remedy)
    elif subject.quantised and not scaled and {info.dtype for info in files.tensors.values()} <= {*FLOATS}:
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


def _scaled(tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Return the tensors that are called as parts of quantised weights are, in a module that holds few bits: neither
    a name nor a dtype alone says so.
    """
    few = {_module(name) for name, info in tensors.items() if info.dtype not in (*FLOATS, "BOOL", "I64")}
    return (name for name in tensors if _QUANTISED.search(name) and _module(name) in few)


def _module(name: str) -> str:
    """Return the module that a tensor belongs to, or of a part of a quantised weight (`W.absmax`) the weight's."""
    return _QUANTISED.sub("", name).removesuffix(".weight")


def check_vocabulary(subject: Subject) -> Iterator[Finding]:
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
