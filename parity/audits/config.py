"""Compare the fields of config.json about storage with the tensors: quantisation, experts and dtype."""

import re
from collections.abc import Iterator, Mapping

from ...components import ModelSpec
from ...converter.dtypes import FLOATS, HF_NAMES
from ...converter.names import CONFIG
from ...converter.safetensors import TensorInfo
from .subject import Finding, Subject

_QUANTISED = re.compile(
    r"\.(weight_scale(_inv)?|scales|qweight|qzeros|weight_packed|absmax|quant_map)$|_(scales|blocks)$"
)
"""Names of the additional tensors of quantised weights: transformers' quantizers, gpt-oss' MXFP4."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def check_config(subject: Subject) -> Iterator[Finding]:
    """Report where quantisation, number of experts or dtype in config.json contradict the tensors."""
    files = subject.files
    if files.config is None:
        return
    scaled = tuple(_scaled(files.tensors))
    if scaled and not subject.quantised:
        message = "config.json has no quantization_config, but these tensors belong to quantised weights"
        remedy = "Add the quantization_config of the quantised model to config.json, or use the unquantised model."
        yield Finding("config-quantisation", "error", message, scaled, remedy)
    elif subject.quantised and not scaled and {info.dtype for info in files.tensors.values()} <= {*FLOATS}:
        message = "config.json says that the weights are quantised, but every tensor has a floating-point dtype"
        yield Finding("config-quantisation", "error", message, (), "Remove the quantization_config from config.json.")
    if not isinstance(subject.spec, ModelSpec):
        experts = [int(match[1]) for name in files.tensors if (match := re.search(r"\.experts\.(\d+)\.", name))]
        stated_count = next((files.config[key] for key in _EXPERTS if type(files.config.get(key)) is int), None)
        if experts and stated_count is not None and max(experts) + 1 < stated_count:
            last = f"the last expert among the tensor names is {max(experts)}"
            message = f"config.json says {stated_count:,} experts, but {last}"
            remedy = f"Correct the number of experts in {CONFIG}, or add the tensors of the missing experts."
            yield Finding("config-experts", "error", message, (), remedy)
    stated = files.config.get("dtype") or files.config.get("torch_dtype")
    floats = {info.dtype for info in files.tensors.values() if info.dtype in FLOATS}
    if (
        isinstance(stated, str)
        and floats
        and stated.removeprefix("torch.") not in {HF_NAMES[dtype] for dtype in floats}
    ):
        message = f"the dtype in config.json is {stated}, but the tensors are stored as {', '.join(sorted(floats))}"
        yield Finding(
            "config-dtype", "note", message, (), "Programs that use this field convert the tensors when they load them."
        )


def _scaled(tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield the names of tensors that belong to quantised weights, such as scales and packed values.

    Such a tensor has a typical name ("….qweight"), and a tensor of the same module has a low-bit dtype.
    """
    low_bit_modules = {_module(name) for name, info in tensors.items() if info.dtype not in (*FLOATS, "BOOL", "I64")}
    return (name for name in tensors if _QUANTISED.search(name) and _module(name) in low_bit_modules)


def _module(name: str) -> str:
    """Return the module's name, given the name of its weight or of a tensor of its quantised weight (`….absmax`)."""
    return _QUANTISED.sub("", name).removesuffix(".weight")
