"""Weights in torch's pickled files (pytorch_model.bin), read only where the caller said that they are trusted.

`weights_only` keeps the pickle from running code, but not from lying about sizes: a compressed archive of a megabyte
may expand to gigabytes, and a view with stride 0 may claim any shape. Both are refused before anything is allocated.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError

__all__ = ["PickleWeights"]


class PickleWeights:
    """The tensors of one or several pickled files, memory-mapped by torch; `read` copies one."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises CheckpointError for a file that is not a torch archive, or claims more bytes than it has."""
        self._tensors: dict[str, Any] = {}
        self.info: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path in files:
            self._add(path)

    def _add(self, path: Path) -> None:
        import torch

        names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
        except (OSError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} is not an archive that torch.save writes: {error}") from error
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise CheckpointError(f"{path} is compressed: torch.save never does that, and it hides the real size")
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # mutated pickles raise of every kind
            lines = [line for line in str(error).splitlines() if line.strip()]
            # Of a refusal the first line is torch's advice how to load it all the same; the second says what it met.
            refused = len(lines) > 1 and lines[0].startswith("Weights only load failed")
            reason = next(iter(lines[1:] if refused else lines), type(error).__name__)
            raise CheckpointError(
                f"torch cannot read {path} as plain weights: {reason:.200}",
                "Do not use this file: it is damaged, or holds more than tensors.",
            ) from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} holds a {type(state).__name__}, not a dictionary of tensors")
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise CheckpointError(f"{path}: {name!r:.80} is not a named tensor")
            # Before the storage is asked for, which the others have not.
            if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
                raise CheckpointError(f"{path}: {name!r:.80} is not a plain tensor (sparse, quantised or without data)")
            if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
                raise CheckpointError(
                    f"{path}: {name!r:.80} claims {tensor.numel():,} elements that are not in the file"
                )
            if name in self._tensors:
                raise CheckpointError(f"{name!r:.80} is in two of the files")
            self._tensors[name] = tensor
            self.info[name] = (names.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))

    def span(self, name: str) -> tuple[Path, int] | None:  # noqa: ARG002
        """None: a pickle may hold a tensor in any order."""
        return None

    def read(self, name: str) -> np.ndarray:
        """The tensor in its carrier dtype (bf16 as uint16), contiguous."""
        import torch

        tensor = self._tensors[name].detach().contiguous()
        if tensor.dtype == torch.bfloat16:
            carried: np.ndarray = tensor.view(torch.int16).numpy().view(np.uint16)
            return carried
        array: np.ndarray = tensor.numpy()
        return array
