"""The devices that gptkit computes on: their names, and the errors if a device is missing or its memory is full.

Every command and function that computes resolves its device here. A name is "cpu", "cuda" (the first GPU, also an AMD
one), "cuda:1", "mps" (the GPU of a Mac), or "auto": a GPU of the kind "cuda" if PyTorch can use one, and otherwise the
CPU. "auto" never chooses "mps", because "mps" has no float64 and gptkit is not tested on it.

A computation runs on the device of its inputs. Functions that compare (`verify`, `swap`, `eval`, `diff`, `audit`)
switch TF32 off while they run (`in_float32`), because TF32 rounds the factors of float32 products to 10 bits. `load`,
`generate` and `train` do not change PyTorch's settings of TF32.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import GptkitError, UsageError, shown

AUTO = "auto"
_KNOWN = "Use cpu, cuda (the first GPU), cuda:1 (the second one), mps (the GPU of a Mac) or auto."

Device = str | torch.device
Devices = Device | Sequence[Device]
"""One device, or several over which the layers of a model are divided: "cuda:0,cuda:1", or a list of devices."""


def device_of(device: Device | None = AUTO, exact: str | None = None) -> torch.device:
    """Return the device with this name. None means "auto".

    Args:
        device: the name.
        exact: the name of a computation that needs float64, for the message if the device has none.

    Raises:
        UsageError: there is no such device, PyTorch cannot compute on it, or it has no float64.
    """
    name = AUTO if device is None else str(device).strip()
    if name == AUTO:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if "," in name:
        raise UsageError(f"this command computes on one device, not on several ({name:.60})", "Name one of them.")
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device {shown(name, 40)}", _KNOWN) from error
    if chosen.type == "cpu":
        return torch.device("cpu")
    if chosen.type == "cuda":
        return _gpu(chosen)
    if chosen.type == "mps" and exact is not None:
        raise UsageError(f"{exact} computes in float64, which the device mps does not have", "Use --device cpu.")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError(
            "the device mps is the GPU of a Mac with Apple silicon, and PyTorch finds none on this machine",
            "Use --device auto or --device cpu.",
        )
    try:
        torch.ones(1, device=chosen).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"PyTorch cannot compute on the device {shown(name, 40)}: {reason:.200}", _KNOWN) from error
    return chosen


def _gpu(device: torch.device) -> torch.device:
    """Return a GPU with its number. Raise UsageError if there is none, or none with this number."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            raise UsageError(
                f"the device {device} is a GPU, but the installed PyTorch is a build without GPUs",
                "Use --device cpu, or install a build with CUDA: https://pytorch.org/get-started/locally",
            )
        raise UsageError(
            f"the device {device} is a GPU, but PyTorch finds none on this machine",
            "Use --device cpu. If there is a GPU, check the driver: nvidia-smi",
        )
    index, count = torch.cuda.current_device() if device.index is None else device.index, torch.cuda.device_count()
    if index >= count:
        known = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise UsageError(f"there is no device cuda:{index}; the GPUs of this machine are {known}", "Use one of these.")
    return torch.device("cuda", index)


def devices_of(devices: Devices | None, exact: str | None = None) -> tuple[torch.device, ...]:
    """Return one or several devices, from a list, or from names that are separated by commas.

    A device may occur several times. `exact` is as in `device_of`.

    Raises:
        UsageError: as `device_of`; also for an empty list.
    """
    if devices is None or isinstance(devices, str | torch.device):
        devices = [AUTO] if devices is None else str(devices).split(",")
    if not devices:
        raise UsageError("the list of devices is empty", _KNOWN)
    return tuple(device_of(device, exact) for device in devices)


def hardware(device: torch.device) -> str | None:
    """Return the name of a GPU, such as "NVIDIA H100 80GB HBM3". Return None for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def in_words(device: Device) -> str:
    """Return a device with the name of its hardware, such as "cuda:0 (NVIDIA H100 80GB HBM3)"."""
    name = hardware(torch.device(device))
    return str(device) if name is None else f"{device} ({name})"


# --- TF32 -------------------------------------------------------------------------------------------------------------


def _tf32() -> list[tuple[Any, str, Any, Any]]:
    """Return PyTorch's settings of TF32: the object, its attribute, the value now, and the value that means "off".

    PyTorch 2.9 has new names for them. The old names raise an error if a program has set one of the new ones.
    """
    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    try:
        return [(owner, "allow_tf32", owner.allow_tf32, False) for owner in (cuda, cudnn)]
    except RuntimeError:
        return [(owner, "fp32_precision", owner.fp32_precision, "ieee") for owner in (cuda, cudnn.conv, cudnn.rnn)]


@contextmanager
def in_float32() -> Iterator[None]:
    """Compute float32 products in float32, not in TF32, inside a `with` or a decorated function.

    PyTorch's default is TF32 for convolutions only.
    """
    settings = _tf32()
    try:
        for owner, name, _, off in settings:
            setattr(owner, name, off)
        yield
    finally:
        for owner, name, before, _ in settings:
            setattr(owner, name, before)


# --- memory -----------------------------------------------------------------------------------------------------------

_REQUEST = re.compile(
    r"Tried to allocate ([\d.]+ \w+)\. GPU (\d+) has a total capacity of ([\d.]+) (\w+) of which ([\d.]+ \w+) is free"
)
_ALLOWED = re.compile(r"([\d.]+ \w+) allowed")
_FULL = ("CUDA out of memory", "HIP out of memory", "MPS backend out of memory", "CUDA error: out of memory")
_FULL_LIBRARY = re.compile(r"CU\w+_STATUS_ALLOC_FAILED")


def memory_error(error: BaseException | None, model: str | None = None) -> GptkitError | None:
    """Return the error for the user if `error`, or an error that caused it, says that a GPU's memory is full.

    `model` is the name of the model, for the advice. Return None for other errors.
    """
    while error is not None:
        words = str(error)
        full = isinstance(error, torch.OutOfMemoryError) or any(text in words for text in _FULL)
        if full or _FULL_LIBRARY.search(words):
            return _memory_error(words, model or "MODEL")
        error = error.__cause__ or error.__context__
    return None


def _memory_error(words: str, model: str) -> GptkitError:
    """Return the error for a full GPU. `words` is PyTorch's message, and `model` the name of the model."""
    request = _REQUEST.search(words)
    if request is None:
        message, size = "the memory of the GPU is full", "24GB"
    else:
        wanted, index, total, unit, free = request.groups()
        device = torch.device("cuda", int(index))
        name = in_words(device) if int(index) < torch.cuda.device_count() else str(device)
        message = f"the memory of {name} is full: PyTorch needs {wanted} more, and {free} of {total} {unit} are free"
        if allowed := _ALLOWED.search(words):  # torch.cuda.set_per_process_memory_fraction
            message += f"; this process may use {allowed[1]}"
        size = f"{max(1, round(float(total)))}GB" if unit == "GiB" else "24GB"
    advice = f"To see what fits: gptkit params {model} --gpu {size}. Or compute on the CPU: --device cpu"
    return GptkitError(message, advice)


@contextmanager
def reported_memory(model: str | None = None) -> Iterator[None]:
    """Raise GptkitError instead of PyTorch's error if a GPU's memory is full. `model` is the model's name."""
    try:
        yield
    except RuntimeError as error:
        full = memory_error(error, model)
        if full is None:
            raise
        raise full from error
