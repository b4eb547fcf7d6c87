"""Hostile files and situations, each given to the command line in a process of its own.

    python tests/hostile.py [NAME…]     all cases, or those whose name holds one of these

What holds for every case: at most 10 seconds of processor time and 600 MB of memory in any of its processes; one of the
exit codes that the case names; no traceback, and of an error at most two lines on stderr; and nothing in its folder
that was not there before, but for what the command was asked to write.
"""

import argparse
import base64
import gzip
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.hubserver import Big, Hub, Repo

SECONDS = 10.0
MEMORY = 600 * 10**6
HANGS = 120.0
"""Seconds on the wall after which a case is taken to wait for something that never comes."""

SAMPLES = Path(__file__).parents[1] / "samples"
HIDDEN, ROWS, CONTEXT = 8, 8, 32
MILLION = 1_000_000


@dataclass(frozen=True)
class Case:
    """A command: `make` prepares a folder, in which it runs, and returns its arguments.

    codes: the exit codes that are right.   told: a pattern that stderr holds.   leaves: what it may write, by name.
    around: what has to run meanwhile.
    """

    name: str
    make: Callable[[Path], list[str]]
    codes: tuple[int, ...] = (4,)
    told: str = ""
    leaves: tuple[str, ...] = ()
    around: Callable[[Path], Any] | None = None
    closed: tuple[int, ...] = ()


@dataclass
class Outcome:
    """What a case came to."""

    code: int
    seconds: float
    memory: int
    stdout: bytes
    stderr: str
    problems: list[str] = field(default_factory=list)


CASES: list[Case] = []


def case(name: str, **options: Any) -> Callable[[Callable[[Path], list[str]]], Callable[[Path], list[str]]]:
    """Make a case of a function that prepares a folder."""

    def add(make: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
        CASES.append(Case(name, make, **options))
        return make

    return add


# --- running one -----------------------------------------------------------------------------------------------------


def run(case: Case, folder: Path) -> Outcome:
    """Run a case in an empty folder, and find what does not hold."""
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "HF_HOME": str(home / "hf"), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_ETAG_TIMEOUT": "5", "NO_COLOR": "1"}
    for name in ("GPTKIT_DEBUG", "HF_HUB_OFFLINE"):
        environment.pop(name, None)
    arguments = case.make(work)
    before = listing(work)
    around = case.around(work) if case.around is not None else contextmanager(lambda: iter(({},)))()
    with around as added:
        outcome = measured(case, arguments, work, {**environment, **added})
    new = sorted(name for name in listing(work) - before if name.split("/")[0] not in case.leaves)
    gone = sorted(before - listing(work))
    outcome.problems += complaints(case, outcome) + [f"left behind: {name}" for name in new]
    outcome.problems += [f"is gone: {name}" for name in gone]
    return outcome


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


LAUNCHER = """
import json, os, resource, sys

closed, command, told = json.loads(sys.argv[1])
child = os.fork()
if not child:
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for fd in closed:
        os.close(fd)
    os.execv(command[0], command)
_, status, usage = os.wait4(child, 0)
with open(told, "w") as file:
    json.dump([os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024], file)
"""
"""A small process between: a child's largest memory is at least that of the process which started it."""


def measured(case: Case, arguments: list[str], work: Path, environment: Mapping[str, str]) -> Outcome:
    figures = work.parent / "figures.json"
    asked = json.dumps([case.closed, [sys.executable, "-m", "gptkit", *arguments], str(figures)])
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LAUNCHER, asked],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        problems = []
        try:
            process.wait(HANGS)
            code, seconds, memory = json.loads(figures.read_text())
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            problems.append(f"waits for something: it was ended after {HANGS:.0f} seconds")
            code, seconds, memory = -signal.SIGKILL, 0.0, 0
        out.seek(0)
        err.seek(0)
        told = err.read(1 << 20).decode(errors="replace")
        return Outcome(code, seconds, memory, out.read(1 << 20), told, problems)


def complaints(case: Case, outcome: Outcome) -> list[str]:
    """What does not hold of an outcome."""
    found = []
    if outcome.code not in case.codes:
        found.append(f"exit code {outcome.code}, not one of {case.codes}")
    if outcome.seconds > SECONDS:
        found.append(f"{outcome.seconds:.1f} seconds of processor time")
    if outcome.memory > MEMORY:
        found.append(f"{outcome.memory / 1e6:.0f} MB of memory")
    lines = outcome.stderr.splitlines()
    for word in ("Traceback", "panicked", "a bug in gptkit", "Warning:"):
        if word in outcome.stderr:
            found.append(f"{word!r} on stderr")
    if outcome.code and 2 not in case.closed and (not lines or len(lines) > 2 or not lines[0].startswith("gptkit: ")):
        found.append(f"{len(lines)} lines on stderr, not one or two of gptkit's")
    if case.told and not re.search(case.told, outcome.stderr):
        found.append(f"stderr does not hold {case.told!r}")
    return found


# --- GGUF ------------------------------------------------------------------------------------------------------------

U8, I32, U32, F32, STRING, ARRAY = 0, 5, 4, 6, 8, 9
WIDTHS = {U8: 1, I32: 4, F32: 4}


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def number(value: int) -> bytes:
    return struct.pack("<II", U32, value)


def strings(values: list[bytes]) -> bytes:
    return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(text, values))


def numbers(kind: int, count: int) -> bytes:
    """An array's beginning alone: its zeros are a hole in the file (see `gguf`)."""
    return struct.pack("<IIQ", ARRAY, kind, count)


def gguf(path: Path, keys: Mapping[str, bytes], hole: tuple[str, int] = ("", 0), rows: int = ROWS) -> Path:
    """A llama of one layer with random weights, and these keys of a tokenizer; behind the key `hole` so many zeros."""
    basic = {
        "general.architecture": struct.pack("<I", STRING) + text(b"llama"),
        **{f"llama.{name}": number(value) for name, value in SIZES.items()},
        "llama.attention.layer_norm_rms_epsilon": struct.pack("<If", F32, 1e-5),
        "llama.vocab_size": number(rows),
    }
    every = {**basic, **{f"tokenizer.ggml.{name}": value for name, value in keys.items()}}
    if hole[0] in keys:  # the last one, so that what follows is known
        every[f"tokenizer.ggml.{hole[0]}"] = every.pop(f"tokenizer.ggml.{hole[0]}")
    shapes = tensors(rows)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(every))
    head += b"".join(text(key.encode()) + value for key, value in every.items())
    infos, at = b"", 0
    for name, shape in shapes.items():
        infos += text(name.encode()) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, at)
        at += -(-4 * count(shape) // 32) * 32
    generator = random.Random(0)
    with path.open("wb") as file:
        file.write(head)
        file.seek(hole[1], 1)
        file.write(infos)
        file.seek(-(-file.tell() // 32) * 32)
        for shape in shapes.values():
            if count(shape) > 10_000:
                file.seek(-(-4 * count(shape) // 32) * 32, 1)
                continue
            values = struct.pack(f"<{count(shape)}f", *(generator.gauss(0, 1) for _ in range(count(shape))))
            file.write(values.ljust(-(-len(values) // 32) * 32, b"\0"))
        file.truncate(file.tell())
    return path


SIZES = {
    "block_count": 1,
    "context_length": CONTEXT,
    "embedding_length": HIDDEN,
    "feed_forward_length": HIDDEN,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
}


def count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def tensors(rows: int) -> dict[str, tuple[int, ...]]:
    square = (HIDDEN, HIDDEN)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return {
        "token_embd.weight": (rows, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        **{f"blk.0.{name}.weight": square for name in names},
    }


TOKENS = [b"<unk>", b"<s>", b"</s>", b"\xe2\x96\x81", b"a", b"b", b"ab", b"c"]
LLAMA = {
    "model": struct.pack("<I", STRING) + text(b"llama"),
    "tokens": strings(TOKENS),
    "scores": numbers(F32, ROWS) + bytes(4 * ROWS),
    "token_type": numbers(I32, ROWS) + struct.pack(f"<{ROWS}i", 2, 3, 3, *[1] * (ROWS - 3)),
}
"""A vocabulary of SentencePiece's kind that is right."""
BYTES = {
    "model": struct.pack("<I", STRING) + text(b"gpt2"),
    "pre": struct.pack("<I", STRING) + text(b"gpt-2"),
    "tokens": strings(TOKENS),
    "merges": strings([b"a b"]),
    "token_type": LLAMA["token_type"],
}
UNIGRAM = {**LLAMA, "model": struct.pack("<I", STRING) + text(b"t5")}
GENERATE = ["generate", "x.gguf", "abc", "-n", "2"]


@case("gguf: what is right", codes=(0,))
def _(folder: Path) -> list[str]:
    gguf(folder / "x.gguf", LLAMA)
    return GENERATE


for _kind, _keys in {"llama": LLAMA, "gpt2": BYTES, "t5": UNIGRAM}.items():
    for _what, _tokens in {
        "a token of a million characters": [*TOKENS[:-1], b"a" * MILLION],
        "every length of token up to 3,000": [b"a" * (1 + at) for at in range(3000)],
        "tokens an empty array of strings": [],
    }.items():

        def _make(folder: Path, keys: Any = _keys, tokens: Any = _tokens) -> list[str]:
            rows = max(len(tokens), ROWS)
            changed = {**keys, "tokens": strings(tokens)}
            changed["token_type"] = numbers(I32, len(tokens)) + struct.pack("<i", 1) * len(tokens)
            if "scores" in keys:
                changed["scores"] = numbers(F32, len(tokens)) + bytes(4 * len(tokens))
            gguf(folder / "x.gguf", changed, rows=rows)
            return GENERATE

        CASES.append(Case(f"gguf {_kind}: {_what}", _make, codes=(0, 2, 4)))
    for _what, _field, _type, _count in (
        ("u8 token types x 5e7", "token_type", U8, 50 * MILLION),
        ("u8 token types x 2e8", "token_type", U8, 200 * MILLION),
        ("f32 scores x 5e7", "scores", F32, 50 * MILLION),
        ("i32 tokens x 5e7", "tokens", I32, 50 * MILLION),
        ("f32 merges x 5e7", "merges", F32, 50 * MILLION),
        ("u8 charsmap x 2e8", "precompiled_charsmap", U8, 200 * MILLION),
        ("tokens an empty array of numbers", "tokens", U8, 0),
        ("token types an empty array", "token_type", U8, 0),
    ):

        def _make(
            folder: Path, keys: Any = _keys, field: str = _field, kind: int = _type, many: int = _count
        ) -> list[str]:
            gguf(folder / "x.gguf", {**keys, field: numbers(kind, many)}, (field, WIDTHS[kind] * many))
            return GENERATE

        CASES.append(Case(f"gguf {_kind}: {_what}", _make, codes=(0, 2, 4)))


@case("gguf: strings x 2e8 in a hole")
def _(folder: Path) -> list[str]:
    gguf(folder / "x.gguf", {"tokens": numbers(STRING, 200 * MILLION)}, ("tokens", 1600 * MILLION))
    return ["load", "x.gguf"]


@case("gguf: a chat template of 2 GB in a hole")
def _(folder: Path) -> list[str]:
    gguf(folder / "x.gguf", {**LLAMA, "chat": struct.pack("<IQ", STRING, 2**31)}, ("chat", 2**31))
    return ["load", "x.gguf"]


@case("gguf: 500 arrays of 65,536 numbers", codes=(0,))
def _(folder: Path) -> list[str]:
    array = numbers(U8, 2**16) + bytes(2**16)
    gguf(folder / "x.gguf", {**LLAMA, **{f"extra.{at}": array for at in range(500)}})
    return ["load", "x.gguf"]


for _many, _codes in ((MILLION // 2, (2,)), (MILLION, (4,))):

    def _make(folder: Path, many: int = _many) -> list[str]:
        keys = {
            **LLAMA,
            "tokens": strings([b"t%d" % at for at in range(many)]),
            "scores": numbers(F32, many) + bytes(4 * many),
            "token_type": numbers(I32, many) + struct.pack("<i", 1) * many,
        }
        gguf(folder / "x.gguf", keys, rows=many)
        return GENERATE

    CASES.append(Case(f"gguf: {_many:,} tokens", _make, codes=_codes))


# --- tokenizers ------------------------------------------------------------------------------------------------------


def sample(folder: Path, name: str = "gpt2") -> Path:
    """A copy of a sample, which may be spoilt."""
    shutil.copytree(SAMPLES / name, folder / "model")
    return folder / "model"


def spoilt(**changes: Any) -> Callable[[Path], list[str]]:
    """A sample whose tokenizer.json has other parts; `vocab` are tokens instead of its own."""

    def make(folder: Path) -> list[str]:
        path = sample(folder) / "tokenizer.json"
        data = json.loads(path.read_text())
        model = changes.get("model")
        data |= changes
        if model is not None:
            data["model"] = {**json.loads(path.read_text())["model"], **model}
        path.write_text(json.dumps(data))
        return ["generate", "model", "a" * 60, "-n", "2"]

    return make


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
EXPLODES = {
    "type": "Split",
    "pattern": {"Regex": "(a|aa)+$b|(a*)*c|((a+)+)+d"},
    "behavior": "Isolated",
    "invert": False,
}
for _name, _changes in {
    "normalizers that double 22 times": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 22}},
    "normalizers that double 40 times": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 40}},
    "normalizers that double 8 times": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 8}},
    "a regex that explodes": {"pre_tokenizer": EXPLODES},
    "a broken charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a charsmap of garbage": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(struct.pack("<I", 400) + random.Random(0).randbytes(900)).decode(),
        }
    },
    "sequences in sequences": {
        "normalizer": json.loads('{"type":"Sequence","normalizers":[' * 90 + '{"type":"NFC"}' + "]}" * 90)
    },
    "a vocabulary of one token": {"model": {"vocab": {"a": 0}, "merges": []}},
    "ids beyond the table": {"model": {"vocab": {"a": 2**32 - 1}, "merges": []}},
    "no unknown token": {"model": {"type": "Unigram", "unk_id": None, "vocab": [["b", 0.0]]}},
    "a token of a million characters": {"model": {"vocab": {"a": 0, "b" * MILLION: 1}, "merges": []}},
}.items():
    CASES.append(Case(f"tokenizer: {_name}", spoilt(**_changes), codes=(0, 2, 4)))


@case("tokenizer: 2 GB of zeros")
def _(folder: Path) -> list[str]:
    os.truncate(sample(folder) / "tokenizer.json", 2**31)
    return ["generate", "model", "abc", "-n", "2"]


@case("tokenizer: without an end", codes=(2, 4))
def _(folder: Path) -> list[str]:
    path = sample(folder) / "tokenizer.json"
    path.unlink()
    path.symlink_to("/dev/zero")
    return ["generate", "model", "abc", "-n", "2"]


def byte_fallback(tokens: list[str]) -> dict[str, Any]:
    """A tokenizer.json of SentencePiece's kind."""
    vocab = {token: at for at, token in enumerate([f"<0x{value:02X}>" for value in range(256)] + tokens)}
    model = {"type": "BPE", "byte_fallback": True, "fuse_unk": True, "vocab": vocab, "merges": []}
    return {"version": "1.0", "added_tokens": [], "model": model}


@case("sentencepiece: to GGUF, a token of a million characters", leaves=("out",))
def _(folder: Path) -> list[str]:
    (sample(folder, "llama") / "tokenizer.json").write_text(json.dumps(byte_fallback(["a", "b", "a" * MILLION])))
    return ["convert", "model", "out", "--to", "gguf"]


@case("sentencepiece: to GGUF, two tokens written the same", codes=(0, 1, 4), leaves=("out",))
def _(folder: Path) -> list[str]:
    data = byte_fallback([f"t{at}" for at in range(100_000)])
    data["added_tokens"] = [{"id": 256, "content": "t99999", "special": False}]
    (sample(folder, "llama") / "tokenizer.json").write_text(json.dumps(data))
    return ["convert", "model", "out", "--to", "gguf"]


def piece(token: bytes) -> bytes:
    """A piece of a SentencePiece model, as protobuf has it."""

    def field(number: int, value: bytes) -> bytes:
        length, size = b"", len(value)
        while True:
            length += bytes([size & 0x7F | (0x80 if size > 0x7F else 0)])
            size >>= 7
            if not size:
                return bytes([number << 3 | 2]) + length + value

    return field(1, field(1, token) + b"\x15" + struct.pack("<f", -1.0))


@case("sentencepiece: a token of a million bytes, to GGUF", codes=(0, 1, 4), leaves=("out",))
def _(folder: Path) -> list[str]:
    model = sample(folder, "llama")
    (model / "tokenizer.json").unlink()
    tokens = [b"<unk>", b"<s>", b"</s>", b"a" * MILLION, *(b"t%d" % at for at in range(500))]
    (model / "tokenizer.model").write_bytes(b"".join(map(piece, tokens)))
    return ["convert", "model", "out", "--to", "gguf"]


@case("sentencepiece: a token of a million bytes", codes=(0, 2, 4))
def _(folder: Path) -> list[str]:
    model = sample(folder, "llama")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.model").write_bytes(b"".join(map(piece, [b"<unk>", b"<s>", b"</s>", b"a" * MILLION])))
    return ["generate", "model", "abc", "-n", "2"]


@case("older files: a token of a million characters in a vocabulary without merges", codes=(0, 2, 4))
def _(folder: Path) -> list[str]:
    model = sample(folder, "llama")
    (model / "tokenizer.json").unlink()
    (model / "vocab.json").write_text(json.dumps({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "a" * MILLION: 4}))
    (model / "merges.txt").write_text("#version: 0.2\n")
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    return ["generate", "model", "abc", "-n", "2"]


# --- pickles ---------------------------------------------------------------------------------------------------------

TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpuK\x04tQK\x00(K\x04t(K\x01t\x89ccollections\nOrderedDict\n)RtR"
)


def pickled(content: bytes) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        model = sample(folder)
        (model / "model.safetensors").unlink()
        with zipfile.ZipFile(model / "pytorch_model.bin", "w") as file:
            file.writestr("archive/data.pkl", b"\x80\x02" + content)
            file.writestr("archive/data/0", bytes(16))
        return ["load", "model", "--allow-pickle"]

    return make


for _name, _content in {
    "a million references in a list": b"}X\x01\x00\x00\x00l](" + TENSOR + b"q\x01" + b"h\x01" * MILLION + b"es.",
    "a million names of one tensor": TENSOR
    + b"q\x010}("
    + b"".join(b"X\x06\x00\x00\x00%06dh\x01" % at for at in range(MILLION))
    + b"u.",
    "400,000 tensors": b"}(" + b"".join(b"X\x06\x00\x00\x00%06d" % at + TENSOR for at in range(100_000)) + b"u.",
    "a million lists in lists": b"]" * MILLION + b"a" * (MILLION - 1) + b".",
    "a list that doubles 40 times": b"]q\x00" + b"(h\x00h\x00lq\x00" * 40 + b".",
}.items():
    CASES.append(Case(f"pickle: {_name}", pickled(_content)))


# --- configs, manifests, journals ------------------------------------------------------------------------------------

ODD: dict[str, Callable[[Path], None]] = {
    "a fifo": os.mkfifo,
    "without an end": lambda path: path.symlink_to("/dev/zero"),
    "2 GB of zeros": lambda path: (path.touch(), os.truncate(path, 2**31))[0],
    "30 MB of lists": lambda path: path.write_text("[" + "[]," * (10 * MILLION) + "[]]") and None,
    "deep": lambda path: path.write_text("[" * MILLION) and None,
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
}
FILES = {
    "config.json": ["load", "model"],
    "manifest.json": ["check", "model"],
    "model.safetensors.index.json": ["load", "model"],
    "generation_config.json": ["generate", "model", "abc", "-n", "2"],
    "tokenizer_config.json": ["generate", "model", "abc", "-n", "2"],
    "gptkit.json": ["load", "model"],
}
for _file, _command in FILES.items():
    for _name, _odd in ODD.items():

        def _make(
            folder: Path, file: str = _file, odd: Callable[[Path], None] = _odd, command: list[str] = _command
        ) -> list[str]:
            path = sample(folder) / file
            path.unlink(missing_ok=True)
            if file.endswith("index.json"):
                (folder / "model" / "model.safetensors").unlink()
            odd(path)
            return command

        CASES.append(Case(f"{_file}: {_name}", _make, codes=(0, 2, 4)))

for _name, _odd in ODD.items():

    def _make(folder: Path, odd: Callable[[Path], None] = _odd) -> list[str]:
        (folder / "out").mkdir()
        odd(folder / "out" / "manifest.json")
        return ["convert", "sample:gpt2", "out", "--force"]

    CASES.append(Case(f"--force over a manifest: {_name}", _make, codes=(2,)))


@case("a folder of the user's, called as ours are", codes=(0,), leaves=("out",))
def _(folder: Path) -> list[str]:
    for name in (".out.old-1-00ff00ff", ".out.partial-1-00ff00ff", ".out.old-1-x"):
        (folder / name).mkdir()
        (folder / name / "thesis.txt").write_text("mine")
    return ["convert", "sample:gpt2", "out", "-q"]


@case("stdout is closed", codes=(0,), closed=(1,))
def _(folder: Path) -> list[str]:
    return ["params", "gpt2"]


# --- the hub ---------------------------------------------------------------------------------------------------------


def hub(files: Mapping[str, Big] | None = None, **about: Any) -> Callable[[Path], Any]:
    """The server of the tests with the repository org/model: a sample, and what is said of it here."""

    @contextmanager
    def serving(folder: Path) -> Iterator[dict[str, str]]:
        whole = {path.name: path.read_bytes() for path in (SAMPLES / "gpt2").iterdir()}
        server = Hub({"org/model": Repo({**whole, **(files or {})}, **about)})
        server.start()
        try:
            yield {"HF_ENDPOINT": server.url}
        finally:
            server.stop()

    return serving


ENDLESS = Big(b'{"siblings": [', 2**32)
for _name, _about, _command in (
    ("a listing of 4 GB", {"listing": ENDLESS}, ["load", "org/model"]),
    ("a listing of 4 GB, of GGUF", {"listing": ENDLESS, "without": "config.json"}, ["params", "org/model"]),
    (
        "a listing that unpacks to 2 GB",
        {"listing": gzip.compress(bytes(2**21)) * 1000, "packed": True},
        ["load", "org/model"],
    ),
    ("a config.json of 4 GB", {"files": {"config.json": Big(b"{", 2**32)}}, ["params", "org/model"]),
    ("a config.json of an exabyte", {"files": {"config.json": Big(b"{", 2**60)}}, ["params", "org/model"]),
    ("a tokenizer.json of 4 GB", {"files": {"tokenizer.json": Big(b"{", 2**32)}}, ["load", "org/model"]),
    (
        "a header of 4 GB",
        {"files": {"model.safetensors": Big(b"\0\0\0\0\1", 2**33)}},
        ["params", "org/model", "--stored"],
    ),
    ("a refusal of 4 GB", {"refusal": ENDLESS}, ["load", "org/model"]),
):
    CASES.append(
        Case(f"hub: {_name}", lambda folder, command=_command: command, codes=(0, 1, 4, 5), around=hub(**_about))
    )


# --- the command -----------------------------------------------------------------------------------------------------


def main() -> int:
    """Run the cases; returns how many did not hold, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    wanted = parser.parse_args().names
    failed = 0
    for case in CASES:
        if wanted and not any(name in case.name for name in wanted):
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(case, Path(folder))
        failed += bool(outcome.problems)
        state = "FAILED" if outcome.problems else "ok"
        print(f"{state:6} {outcome.seconds:5.1f} s {outcome.memory / 1e6:5.0f} MB  exit {outcome.code:3}  {case.name}")
        for line in outcome.problems + (outcome.stderr.splitlines()[-3:] if outcome.problems else []):
            print(f"         {line:.150}")
        sys.stdout.flush()
    print(f"{failed} of them did not hold")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
