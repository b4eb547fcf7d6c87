"""One conversion by several processes: the same bytes, and one that fails ends all of them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.covering import covered
from helpers.processes import HANGS
from helpers.writing import SafetensorsWriter
from safetensors.torch import load_file, save_file

from gptkit.architectures import named
from gptkit.converter.convert import convert
from gptkit.converter.distributed import deal_out, leads
from gptkit.converter.manifest import check_manifest
from gptkit.converter.write import Shard

TESTS = Path(__file__).parents[1]
SHARD = "250KB"
ENVIRONMENT = {
    **{
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "COVERAGE_PROCESS_START")
    },
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@dataclass
class Ended:
    """How a run ended, by rank."""

    codes: list[int]
    stdout: list[str]
    stderr: list[str]


class Ranks:
    """Runs `gptkit` in several processes (tests/ranks.py)."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "ranks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
        )

    def run(self, folder: Path, *argv: str, size: int = 2, **faults: list[str]) -> Ended:
        """`argv` in `folder`; faults as rank1=["slow"]."""
        assert self.process.stdin is not None and self.process.stdout is not None
        by_rank = {name.removeprefix("rank"): names for name, names in faults.items()}
        request = {"argv": argv, "size": size, "folder": str(folder), "faults": by_rank}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Ended(**json.loads(self.process.stdout.readline()))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """One process for all tests here, since it takes seconds to begin."""
    ranks = Ranks()
    yield ranks
    assert ranks.process.stdin is not None and ranks.process.stdout is not None
    ranks.process.stdin.close()
    ranks.process.wait(30)
    ranks.process.stdout.close()


def left(folder: Path) -> list[str]:
    """What a run left beside its target."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".out.")]


# --- the same bytes


@covered("to", "size")
@pytest.mark.parametrize(
    ("model", "to", "size"),
    [
        ("sample:llama", "local", 2),
        ("sample:gpt2", "local", 3),
        ("sample:falcon", "hf", 2),
        ("sample:bloom", "gguf", 2),
    ],
)
def test_the_bytes_of_a_single_process(model: str, to: str, size: int, ranks: Ranks, tmp_path: Path) -> None:
    if to == "gguf":
        pytest.importorskip("gguf")
    ended = ranks.run(tmp_path, "convert", model, "out", "--to", to, "--max-shard-size", SHARD, size=size)
    assert ended.codes == [0] * size, ended.stderr
    convert(model, tmp_path / "alone", to, max_shard_bytes=250_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    assert ended.stdout[0].startswith("wrote out") and not any(ended.stdout[1:]) and not any(ended.stderr)
    assert ("had no file to write" in ended.stdout[0]) == (to == "gguf")
    assert left(tmp_path) == []


def test_dry_runs_and_refusals_are_told_once(ranks: Ranks, tmp_path: Path) -> None:
    dry = ranks.run(tmp_path, "convert", "sample:llama", "out", "--dry-run")
    assert dry.codes == [0, 0] and dry.stdout[0].startswith("would write out") and not dry.stdout[1]
    (tmp_path / "out").mkdir()
    ended = ranks.run(tmp_path, "convert", "sample:llama", "out")
    assert ended.codes == [2, 2]
    assert "out exists" in ended.stderr[0] and not ended.stderr[1]
    for argv, code in ((["nowhere/at/all"], 4), (["sample:llama", "other", "--to", "hf:nothing"], 4)):
        ended = ranks.run(tmp_path, "convert", *argv, "--dry-run")
        assert ended.codes[0] in (code, 2) and ended.codes[1] == ended.codes[0]
        assert len([text for text in ended.stderr if text]) == 1, ended.stderr


# --- one that fails ends all


@pytest.mark.parametrize(
    ("failing", "fault", "words", "code"),
    [
        (0, "full", "No space left on device", 1),
        (1, "full", "No space left", 1),
        (1, "bug", "nobody thought of this", 1),
    ],
)
def test_a_rank_that_fails(failing: int, fault: str, words: str, code: int, ranks: Ranks, tmp_path: Path) -> None:
    """The other would never end by itself."""
    ended = ranks.run(
        tmp_path,
        *("convert", "sample:gpt2", "out", "--max-shard-size", SHARD, "--workers", "1"),
        **{f"rank{failing}": [fault], f"rank{1 - failing}": ["slow"]},
    )
    assert ended.codes == [code, code]
    assert words in ended.stderr[failing] and not ended.stderr[1 - failing]
    assert not (tmp_path / "out").exists() and left(tmp_path) == []


def test_a_value_that_does_not_fit(ranks: Ranks, tmp_path: Path) -> None:
    """A damaged tensor that only one of them meets ends both with the exit code of bad input."""
    source = tmp_path / "source"
    convert("sample:llama", source, "hf")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"].fill_(1e6)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    ended = ranks.run(tmp_path, "convert", "source", "out", "--dtype", "float16", "--max-shard-size", "100KB")
    assert ended.codes == [4, 4]
    told = [text for text in ended.stderr if text]
    assert len(told) == 1 and "down_proj" in told[0], ended.stderr
    assert not (tmp_path / "out").exists() and left(tmp_path) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_is_killed(failing: int, ranks: Ranks, tmp_path: Path) -> None:
    command = ("convert", "sample:gpt2", "out", "--max-shard-size", SHARD, "--workers", "1")
    ended = ranks.run(tmp_path, *command, **{f"rank{failing}": ["killed"], f"rank{1 - failing}": ["slow"]})
    other = 1 - failing
    assert (ended.codes[failing], ended.codes[other]) == (-9, 1)
    assert f"rank {failing} ended without reporting an error" in ended.stderr[other]
    assert not (tmp_path / "out").exists()

    again = ranks.run(tmp_path, *command)
    assert again.codes == [0, 0], again.stderr
    assert "an earlier run" in again.stdout[0], again.stdout
    assert check_manifest(tmp_path / "out") == [] and left(tmp_path) == []
    convert("sample:gpt2", tmp_path / "alone", max_shard_bytes=250_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_a_rank_that_is_killed_before_it_begins(ranks: Ranks, tmp_path: Path) -> None:
    ended = ranks.run(
        tmp_path,
        *("convert", "sample:gpt2", "out", "--max-shard-size", SHARD, "--workers", "1"),
        size=3,
        rank0=["slow"],
        rank2=["killed_first"],
    )
    assert ended.codes == [1, 1, -9]
    assert "rank 2" in ended.stderr[0] and not ended.stderr[1]
    assert not (tmp_path / "out").exists()


def test_an_interruption_keeps_what_is_finished(ranks: Ranks, tmp_path: Path) -> None:
    command = ("convert", "sample:gpt2", "out", "--max-shard-size", SHARD, "--workers", "1")
    ended = ranks.run(tmp_path, *command, rank0=["slow"], rank1=["interrupted"])
    assert ended.codes == [130, 130]
    assert ended.stderr[1].startswith("gptkit: interrupted")
    assert not (tmp_path / "out").exists() and len(left(tmp_path)) == 1
    assert ranks.run(tmp_path, *command).codes == [0, 0]
    assert check_manifest(tmp_path / "out") == []


# --- the parts


def test_shares_are_even_and_complete() -> None:
    shards = [Shard(f"s{i}", b"", (), size) for i, size in enumerate([5, 9, 1, 7, 7, 3, 8, 2])]
    shares = deal_out(shards, 3)
    assert sorted(name for share in shares for name in share) == sorted(shard.name for shard in shards)
    sizes = {shard.name: shard.size for shard in shards}
    load = [sum(sizes[name] for name in share) for share in shares]
    assert max(load) - min(load) <= 2
    assert deal_out(shards, 1) == [sorted(sizes, key=lambda name: (-sizes[name], name))]
    assert deal_out(shards[:1], 3) == [["s0"], [], []]


@pytest.mark.exhaustive
def test_one_process_is_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert leads()
    for rank, size, speaks in (("0", "1", True), ("1", "2", False), ("0", "2", True)):
        for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("MASTER_ADDR", "127.0.0.1")):
            monkeypatch.setenv(name, value)
        assert leads() == speaks


# --- torchrun itself


def torchrun(folder: Path, *argv: str, **more: Any) -> subprocess.Popen[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gptkit", *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(run, cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, **more)


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    command = ("convert", "sample:llama", "out", "--max-shard-size", SHARD)
    process = torchrun(tmp_path, *command)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    assert out.count("wrote out") == 1
    convert("sample:llama", tmp_path / "alone", max_shard_bytes=250_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    again = torchrun(tmp_path, *command)
    out, err = again.communicate(timeout=HANGS)
    assert again.returncode != 0 and not out
    assert err.count("gptkit: ") == 1 and "out exists" in err and "exitcode  : 2" in err
    assert "Terminated" not in err and "Exception ignored" not in err


@pytest.mark.slow
def test_torchrun_and_a_killed_rank(tmp_path: Path) -> None:
    """Of a conversion large enough to be met at its work."""
    config = {"model_type": "llama", "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 8192}
    config |= {"num_hidden_layers": 6, "num_attention_heads": 16, "max_position_embeddings": 256, "dtype": "float32"}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    leaves = named("llama").bind(named("llama").spec(config))
    with SafetensorsWriter(source / "model.safetensors", [(x.checkpoint, "F32", x.shape) for x in leaves]) as writer:
        for leaf in leaves:
            writer.write(leaf.checkpoint, np.full(leaf.shape, 0.5, np.float32))
    command = ("convert", "source", "out", "--dtype", "float16", "--max-shard-size", "50MB", "--workers", "1")
    process = torchrun(tmp_path, *command)
    victim, journals = None, 0
    while process.poll() is None and not journals:
        journals = sum(path.stat().st_size > 500 for path in tmp_path.glob(".out.partial-*/.journal"))
        time.sleep(0.01)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            ours = stat.read_text().rsplit(")", 1)[1].split()[1] == str(process.pid)
            if ours and b"RANK=1\0" in (stat.parent / "environ").read_bytes().replace(b"LOCAL_RANK", b""):
                victim = int(stat.parent.name)
        except OSError:
            continue
    assert victim is not None
    os.kill(victim, 9)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode != 0
    assert not (tmp_path / "out").exists()
    assert err.count("gptkit: ") == 1, err
    again = torchrun(tmp_path, *command)
    _, err = again.communicate(timeout=HANGS)
    assert again.returncode == 0, err
    assert check_manifest(tmp_path / "out") == []
