"""Folders of a checkpoint with some bytes of a file changed, or its end cut off."""

import random
import shutil
from pathlib import Path

from gptkit import open_checkpoint
from gptkit.errors import GptkitError


def mutated(folder: Path, out: Path, count: int) -> tuple[int, int]:
    """How many of so many mutations of a folder's files were opened and read whole, and how many refused."""
    generator, opened, long = random.Random(0), 0, 0
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    shutil.copytree(folder, out)
    for _ in range(count):
        path = generator.choice(files)
        target, data = out / path.relative_to(folder), bytearray(path.read_bytes())
        low = 0 if generator.random() < 0.7 else max(len(data) - 3000, 0)
        for _ in range(generator.choice((1, 1, 2, 4))):
            data[generator.randrange(low, min(low + 6000, len(data)))] = generator.randrange(256)
        target.write_bytes(data[: generator.randrange(len(data))] if generator.random() < 0.1 else data)
        try:
            for _ in open_checkpoint(out, allow_pickle=True).tensors():
                pass
            opened += 1
        except GptkitError as error:
            long += len(str(error)) > 4000
        target.write_bytes(path.read_bytes())
    assert not long
    return opened, count - opened
