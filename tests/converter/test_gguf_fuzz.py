"""Broken GGUF headers: whatever the bytes are, only gptkit's own errors, in little time and memory.

Twenty thousand mutations a run, and five million (FUZZ=…) in `make soak`.
"""

import contextlib
import os
import random
import resource
import struct
import time
from pathlib import Path

import pytest
from helpers.covering import examples

pytest.importorskip("gguf", reason='GGUF needs pip install "gptkit[gguf]"')

from helpers.families import CONFIGS, randomised_reference
from helpers.gguf_files import write_gguf

from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.formats.gguf_header import parse_header
from gptkit.errors import CheckpointError, GptkitError

TINY = {**CONFIGS["llama-2"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
NUMBERS = (0, 1, 2, 3, 7, 8, 9, 12, 13, 31, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
PARSED = 100
"""Of so many mutated headers one is opened whole: config, tree and tokenizer."""


def sample(folder: Path) -> bytes:
    """A small file with every kind of metadata, a tokenizer and a tensor of divisors."""
    from gguf import GGUFValueType as V

    def change(tensors, writer):
        writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ab", "<s>"])
        writer.add_array("tokenizer.ggml.merges", ["a b"])
        writer.add_array("tokenizer.ggml.token_type", [1, 1, 1, 3])
        writer.add_array("tokenizer.ggml.scores", [0.0, -1.0, -2.0, 0.0])
        writer.add_string("tokenizer.ggml.model", "gpt2")
        writer.add_string("tokenizer.ggml.pre", "gpt-2")
        writer.add_bool("tokenizer.ggml.add_bos_token", True)
        writer.add_uint32("tokenizer.ggml.bos_token_id", 3)
        for kind in (V.UINT8, V.INT8, V.UINT16, V.INT16, V.INT32, V.UINT64, V.INT64, V.FLOAT64):
            writer.add_key_value(f"extra.{kind.name}", 1, kind)
        tensors["rope_freqs.weight"] = tensors["blk.0.attn_norm.weight"][:2] * 0 + 1

    path = folder / "sample.gguf"
    write_gguf(path, "llama", randomised_reference({**TINY, "head_dim": 4}), change=change)
    return path.read_bytes()


def mutated(raw: bytes, end: int, rng: random.Random) -> bytes:
    """One to three changes to the header's `end` bytes: bits, numbers, pieces left out, doubled, exchanged, cut off."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(end)
        kind = rng.randrange(8)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind in (2, 3):
            width = rng.choice("IQ")
            number = rng.choice(NUMBERS) % 2 ** (32 if width == "I" else 64)
            data[at : at + struct.calcsize(width)] = struct.pack(f"<{width}", number)
        elif kind == 4:
            del data[at : at + rng.randrange(1, 64)]
        elif kind == 5:
            piece = data[at : at + rng.randrange(1, 64)]
            data[at:at] = piece * rng.randrange(1, 4)
        elif kind == 6:
            other, length = rng.randrange(end), rng.randrange(1, 32)
            data[at : at + length] = data[other : other + length]
        else:
            del data[rng.randrange(len(data)) :]
        end = min(end, len(data))
        if not end:
            break
    return bytes(data)


def fuzz(folder: Path, count: int, seed: int) -> dict[str, float]:
    raw = sample(folder)
    header = parse_header("sample", raw)
    end = min(tensor.start for tensor in header.tensors.values())
    rng = random.Random(seed)
    path = folder / "mutated.gguf"
    counts = {"refused": 0, "accepted": 0, "opened": 0, "slowest": 0.0}
    for number in range(count):
        data = mutated(raw, end, rng)
        began = time.process_time()
        try:
            found = parse_header("mutated", data)
            for key in found.metadata:
                if isinstance(found.metadata[key], list) or key.startswith("tokenizer.ggml.tok"):
                    found.values(key, 2**20)
            counts["accepted"] += 1
            accepted = True
        except CheckpointError:
            counts["refused"] += 1
            accepted = False
        if (accepted and number % 5 == 0) or number % PARSED == 0:
            path.write_bytes(data)
            with contextlib.suppress(GptkitError):
                checkpoint = open_checkpoint(path, allow_extra=bool(number % 2))
                dict(checkpoint.texts)
                counts["opened"] += 1
        counts["slowest"] = max(counts["slowest"], time.process_time() - began)
    return counts


def check(folder: Path, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int.from_bytes(os.urandom(4))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        counts = fuzz(folder, count, seed)
    except BaseException:
        print(f"seed {seed}")
        raise
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    with capsys.disabled():
        if count > 100_000:
            print(f"\n{count:,} mutations, seed {seed}: {counts}, {grown:.0f} MB more")
    assert counts["slowest"] < 1 and grown < 512, (seed, counts, grown)
    # What the test is worth: it reaches behind the header, and most of what it makes is broken.
    assert counts["opened"] and counts["refused"] > count / 2, (seed, counts)


def test_mutations_raise_typed_errors_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(tmp_path, examples(10_000), capsys)


@pytest.mark.soak
def test_millions_of_mutations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(tmp_path, int(os.environ.get("FUZZ", "5000000")), capsys)
