"""Folders of a checkpoint with some bytes of a file changed, or its end cut off."""

import random
import resource
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

from gptkit import open_checkpoint
from gptkit.converter import pickles
from gptkit.converter.confinement import Confined
from gptkit.errors import GptkitError

MEMORY = 200 * 2**20
"""Bytes that thousands of mutations may take."""


def mutated(folder: Path, out: Path, count: int) -> tuple[int, int]:
    """How many of so many mutations of a folder's files were opened and read whole, and how many refused, by our own
    errors of a bounded length, in bounded memory, and without a file anywhere else. One confined process reads all of
    the pickles, until it dies: to start one takes longer than all of the rest.
    """
    generator, opened, long = random.Random(0), 0, 0
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    shutil.copytree(folder, out)
    kept: list[Any] = []

    def confined(worker: str, _: float | None = None) -> Confined:
        if not kept or kept[0]._process.poll() is not None:
            kept[:] = [Confined(worker)]
        return kept[0]

    beside, before = set(out.parent.iterdir()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with mock.patch.object(pickles, "Confined", confined):
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
    assert set(out.parent.iterdir()) == beside
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY
    return opened, count - opened
