"""Safetensors files of arrays, written as a conversion writes its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gptkit.converter.block_file import BlockFile, FileBlock
from gptkit.converter.safetensors import build_header


class SafetensorsWriter(BlockFile):
    """Takes every tensor that was declared (name, dtype, shape), whole, in any order."""

    def __init__(
        self, path: Path, tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
    ) -> None:
        header, infos = build_header(tensors, metadata)
        self.tensors = {info.name: info for info in infos}
        super().__init__(path, header, [FileBlock(info.name, info.start, info.end) for info in infos])

    def write(self, name: str, data: np.ndarray) -> None:
        super().write(name, np.ascontiguousarray(data).reshape(-1).view(np.uint8))
