"""gptkit on a GPU, against transformers and a plain training loop: parity, decoding, prefill, training and healing.

    python benchmarks/gpu.py [--out FILE] [--small] [--seconds 450] [--only SECTION ...]

The script needs no network and takes at most `--seconds`. Every figure is a ratio to a peer that took turns with gptkit
in the same process; above 1 gptkit is faster. Models are random: small ones of eight families for parity, a GPT-2 with
124 M parameters, and a llama with 1.2 B parameters in bfloat16. TF32 is off.

Parity compares logits with transformers' on the same device. It divides the largest difference by the largest one that
transformers has with itself: eager against sdpa, a batch against a single text, the cache against the whole text. It
fails where the difference is more than `LIMIT` times that, and more than the rounding of the largest logit. The column
"error" has the distance from transformers' logits in float64, as a ratio of gptkit's to transformers'.

A share is of what the device did in this run: a copy of 4 GB, or a bfloat16 product of two matrices of 8192 x 8192.

Decoding has three rows per model: both with a cache that grows, gptkit with its CUDA graph against that cache of
transformers, and against transformers' static cache with torch.compile(mode="reduce-overhead"). gptkit records its
graph again in every call, and this time is part of all its figures. The columns "first" have the seconds that the first
call took longer than later ones: gptkit's recording, transformers' compilation (its first two calls).

Each section prints its rows as they are measured. A section that fails prints the end of its traceback, and the next
one goes on. The exit status is 1 if parity failed or a section failed. `--small` shrinks everything so that a CPU needs
less than a minute. It leaves out the compiled sections unless `--only` names them, and does not compile the decoding.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.families import decoder_from, randomised_reference, spec_of  # noqa: E402

import gptkit  # noqa: E402
from gptkit.analysis.costs import cache_bytes, forward_flops, training_flops  # noqa: E402
from gptkit.architectures import architecture_of  # noqa: E402
from gptkit.architectures.presets import presets  # noqa: E402
from gptkit.components import ModelSpec  # noqa: E402
from gptkit.modules import Cache, Decoder  # noqa: E402
from gptkit.modules.generate import generate  # noqa: E402
from gptkit.modules.load import load_random  # noqa: E402
from gptkit.modules.steps import _RECORDABLE, Caching  # noqa: E402
from gptkit.training.data import Windows  # noqa: E402
from gptkit.training.distillation import distilled  # noqa: E402
from gptkit.training.loop import Abandoned, Loss, Settings, _Engine, adamw, fit, next_token  # noqa: E402
from gptkit.training.loop import Run as Progress  # noqa: E402
from gptkit.training.parallel import Group  # noqa: E402
from gptkit.training.state import Store  # noqa: E402

LIMIT = 2.0
"""The largest ratio of gptkit's difference from transformers to transformers' difference from itself."""
PROFILED = 16  # tokens that are written while kernels are counted

_WIDE = {"vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
_LLAMA = {**_WIDE, "intermediate_size": 512, "max_position_embeddings": 1024}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 1024, "n_positions": 1024, "n_embd": 256, "n_layer": 4, "n_head": 8
    },
    "llama": {**_LLAMA, "model_type": "llama", "num_key_value_heads": 2, "rope_theta": 5e5},
    "bloom": {"model_type": "bloom", "vocab_size": 1024, "hidden_size": 256, "n_layer": 4, "n_head": 8},
    "falcon": {**_LLAMA, "model_type": "falcon", "multi_query": True, "parallel_attn": True, "bias": False},
    "gpt_neox": {**_LLAMA, "model_type": "gpt_neox", "rotary_pct": 0.25},
    "mistral": {**_LLAMA, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 64},
    "qwen3": {**_LLAMA, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32},
    "gemma": {**_LLAMA, "model_type": "gemma", "num_key_value_heads": 2, "head_dim": 32},
}  # fmt: skip

_SHALLOW = {name: {"n_layer" if "n_layer" in config else "num_hidden_layers": 2} for name, config in FAMILIES.items()}


@dataclass(frozen=True)
class Size:
    """What is measured, for a GPU or shrunk for a test."""

    length: int = 640  # tokens of a text, in parity
    steps: int = 16  # cached steps, in parity
    copied: int = 4 << 30  # bytes
    side: int = 8192  # of the matrices
    prompt: int = 16
    decoded: int = 128
    prefilled: int = 1000  # tokens
    batch: int = 8  # texts of a forward pass
    windows: int = 16  # texts of a training step
    healed: int = 8  # texts of a healing step
    context: int = 1024  # tokens of a text, in training
    block: int = 8  # training steps in a turn
    rounds: int = 3


SMALL = Size(
    length=90, steps=3, copied=1 << 24, side=256, prompt=4, decoded=6, prefilled=24, batch=2, windows=2, healed=2,
    context=32, block=2, rounds=2,
)  # fmt: skip
_SMALL_GPT2 = {"vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
_SMALL_LLAMA = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_SMALL_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@dataclass
class Bench:
    """One run of this script: where it computes, how large it is, what it measured, and how much time is left."""

    device: torch.device
    small: bool
    end: float
    """By `time.monotonic`."""
    out: Path | None
    result: dict[str, Any] = field(default_factory=dict)
    copied: float = math.nan
    """Bytes a second, read and written, of a copy on the device."""
    multiplied: float = math.nan
    """FLOPs a second of a large bfloat16 product."""

    @property
    def size(self) -> Size:
        return SMALL if self.small else Size()

    def config(self, name: str) -> dict[str, Any]:
        """The config of "gpt2" or "llama"."""
        preset, small = {"gpt2": ("gpt2", _SMALL_GPT2), "llama": ("llama-3.2-1b", _SMALL_LLAMA)}[name]
        return {**presets()[preset].config, **(small if self.small else {})}

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def keep(self) -> None:
        """Write what was measured so far."""
        if self.out is not None:
            self.out.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")

    def row(
        self,
        section: str,
        name: str,
        ours: float,
        theirs: float,
        share: float | None = None,
        first: tuple[float, float] | None = None,
    ) -> None:
        """Print and keep two speeds in tokens per second, the share of the peak, and the seconds of the first calls."""
        shown = f"{'':>7}" if share is None else f"{share:>7.1%}"
        calls = "" if first is None else f"{first[0]:>7.2f}{first[1]:>7.2f}"
        print(f"{name:<31}{_short(ours):>9}{_short(theirs):>9}{ours / theirs:>8.2f}{shown}{calls}".rstrip(), flush=True)
        about: dict[str, Any] = {"section": section, "name": name, "gptkit": ours, "peer": theirs, "unit": "tok/s"}
        about |= {} if first is None else {"first_call_seconds": {"gptkit": first[0], "peer": first[1]}}
        peer_share = None if share is None else share * theirs / ours  # for the work of both is the same
        self.result["rows"].append({**about, "ratio": ours / theirs, "share": share, "peer_share": peer_share})
        self.keep()


def _short(value: float) -> str:
    """Three digits and a power of a thousand."""
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            return f"{value / power:.3g} {letter}"
    return f"{value:.3g}"


def seconds_of(bench: Bench, *work: Callable[[], Any], rounds: int, warm: int = 2) -> list[float]:
    """Return the median seconds of the functions, which take turns after some rounds of warm-up."""
    times: list[list[float]] = [[] for _ in work]
    for number in range(rounds + warm):
        for which in range(len(work)) if number % 2 else reversed(range(len(work))):
            bench.wait()
            start = time.perf_counter()
            work[which]()
            bench.wait()
            if number >= warm:
                times[which].append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


# --- the device ------------------------------------------------------------------------------------------------------


def ceilings(bench: Bench) -> None:
    """Measure what the device can copy and multiply."""
    source = torch.randint(0, 255, (bench.size.copied,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    (took,) = seconds_of(bench, partial(target.copy_, source), rounds=10)
    bench.copied = 2 * bench.size.copied / took
    del source, target
    a, b = (torch.randn(2, bench.size.side, bench.size.side, device=bench.device)).bfloat16()
    (took,) = seconds_of(bench, lambda: a @ b, rounds=20)
    bench.multiplied = 2 * bench.size.side**3 / took
    bench.result["copy_bytes_per_second"], bench.result["matmul_flops_per_second"] = bench.copied, bench.multiplied
    print(f"copy {bench.copied / 1e12:.3f} TB/s, product {bench.multiplied / 1e12:.1f} TFLOP/s", flush=True)
    bench.keep()


# --- parity ----------------------------------------------------------------------------------------------------------


def parity(bench: Bench) -> None:
    """Compare logits with transformers' on the device, family by family."""
    print(f"{'':<26}{'difference':>11}{'own noise':>11}{'ratio':>7}{'exact':>7}{'error':>7}", flush=True)
    failed = []
    for family in FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            for row in _parity_rows(bench, family, dtype):
                exact = f"{row['exact']}/{row['cases']}"
                figures = f"{row['difference']:>11.1e}{row['noise']:>11.1e}{row['ratio']:>7.2f}{exact:>7}"
                bad = "" if row["passed"] else "  FAILED"
                print(f"{row['name']:<26}{figures}{row['error']:>7.2f}{bad}", flush=True)
                bench.result["parity"].append(row)
                bench.keep()
                if not row["passed"]:
                    failed.append(row["name"])
    if failed:
        raise AssertionError(f"parity failed: {', '.join(failed)}")


def _parity_rows(bench: Bench, family: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    config = {**FAMILIES[family], **(_SHALLOW[family] if bench.small else {})}
    kernels = architecture_of(config).reference(spec_of(config))
    references = {kernel: randomised_reference(config, dtype, kernel).to(bench.device) for kernel in kernels}
    exact = randomised_reference(config, torch.float32, kernels[0])
    exact.load_state_dict({name: value.float() for name, value in references[kernels[0]].state_dict().items()})
    exact = exact.double().to(bench.device)
    with torch.inference_mode():
        theirs = {kernel: _logits(bench, reference) for kernel, reference in references.items()}
        truth = _logits(bench, exact)
        for kernel, reference in references.items():
            model = decoder_from(reference, config, kernel).to(bench.device)
            ours = _logits(bench, model)
            noise = [_far(theirs[kernel][case], theirs[other][case]) for other in kernels for case in ours]
            whole = theirs[kernel]
            noise += [_far(whole["single"], whole["batch"][:1]), _far(whole["cached"], whole["continued"])]
            differences = {case: _far(ours[case], whole[case]) for case in ours}
            known = [case for case in ours if not truth[case].isnan().any()]  # BLOOM's padding overflows in float64
            errors = (max(_far(outputs[case], truth[case]) for case in known) for outputs in (ours, whole))
            difference, most = max(differences.values()), max(noise)
            yield {
                "name": f"{family} {str(dtype).removeprefix('torch.')} {kernel}", "difference": difference,
                "noise": most, "ratio": difference / most if most else (0.0 if not difference else math.inf),
                "exact": sum(not gap for gap in differences.values()), "cases": len(differences),
                "differences": differences, "error": next(errors) / max(next(errors), 1e-30),
                "passed": difference <= max(LIMIT * most, torch.finfo(dtype).eps * whole["batch"].abs().max().item()),
            }  # fmt: skip


def _far(first: Tensor, second: Tensor) -> float:
    gap = (first.double() - second.double()).abs().max().item()
    return math.inf if math.isnan(gap) else gap


def _logits(bench: Bench, model: Any) -> dict[str, Tensor]:
    """The logits of a text, of a batch of three that begins with it, of padded texts, and of cached steps; those of the
    steps' tokens without a cache are not compared, but show the noise.
    """
    length, steps = bench.size.length, bench.size.steps
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1024, (3, length), generator=generator).to(bench.device)
    mask = torch.ones_like(ids)
    mask[1, : length // 4] = mask[2, : length // 2] = 0
    ours = isinstance(model, Decoder)
    call: Callable[..., Tensor] = model if ours else lambda ids, mask=None: model(ids, attention_mask=mask).logits
    outputs = {"single": call(ids[:1]), "batch": call(ids), "padded": call(ids, mask)[mask.bool()]}
    first = length - steps
    if ours:
        cache = Cache(model.spec)
        parts = [model(part, cache=cache) for part in (ids[:1, :first], *ids[:1, first:].split(1, dim=1))]
        return {**outputs, "cached": torch.cat([part[:, -1] for part in parts[1:]])}
    kept, parts = transformers.DynamicCache(config=model.config), []
    for part in (ids[:1, :first], *ids[:1, first:].split(1, dim=1)):
        parts.append(model(part, past_key_values=kept, use_cache=True).logits[:, -1])
    return {**outputs, "cached": torch.cat(parts[1:]), "continued": outputs["single"][0, first:]}


# --- decoding and prefill --------------------------------------------------------------------------------------------


def pair(bench: Bench, name: str) -> tuple[Decoder, Any]:
    """gptkit's and transformers' model with the same random bfloat16 weights; GPT-2's by way of a checkpoint."""
    config = bench.config(name)
    torch.manual_seed(0)
    with torch.device(bench.device):
        reference = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    reference.generation_config.eos_token_id, reference.generation_config.pad_token_id = None, 0
    if name == "gpt2":
        with tempfile.TemporaryDirectory() as folder:
            reference.save_pretrained(folder)
            model = gptkit.load(folder, "bfloat16", device=bench.device)
    else:
        with torch.device(bench.device):
            model = decoder_from(reference, config)
    return model, reference


def _continue(
    model: Decoder, reference: Any, ids: Tensor, count: int, cache: Caching = "auto", **how: Any
) -> list[Callable[[], list[int]]]:
    """Return the functions that generate `count` tokens with gptkit and with the peer.

    `cache` is gptkit's, and `how` are options of the peer.
    """
    mask = torch.ones_like(ids)

    def theirs() -> list[int]:
        written = reference.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **how)
        tokens: list[int] = written[0, ids.shape[1] :].tolist()
        return tokens

    def refuse(line: str) -> None:
        raise AssertionError(line)  # such as: the step could not be recorded

    return [lambda: list(generate(model, ids, count, cache=cache, tell=refuse)), theirs]


def _decoded_bytes(spec: ModelSpec, tokens: int) -> float:
    """Return the bytes that a step of decoding reads in bfloat16: the cache, and all weights but lookup tables."""
    read = sum(
        parameter.count
        for parameter in spec.parameters()
        if not parameter.name.startswith("positions.")
        and (spec.head is None or spec.head.tied or "embedding" not in parameter.name)
    )
    return 2 * read + cache_bytes(spec, tokens).nbytes


def _drawn(bench: Bench, model: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.spec.vocab_size, (1, bench.size.prefilled), generator=generator)
    return ids.to(bench.device)


def decoding(bench: Bench, name: str) -> None:
    """Decode one text, with caches that grow, with gptkit's graph, and with transformers' compiled step."""
    size, on_gpu = bench.size, bench.device.type == "cuda"
    model, reference = pair(bench, name)
    prompt = _drawn(bench, model)[:, : size.prompt]
    how: dict[str, Any] = {"cache_implementation": "static"}
    if on_gpu:
        how["compile_config"] = transformers.CompileConfig(mode="reduce-overhead")
    dynamic, peer = _continue(model, reference, prompt, size.decoded, "dynamic")
    graphs, compiled = _continue(model, reference, prompt, size.decoded, "auto" if on_gpu else "static", **how)
    ours, theirs = ("graphs", "compiled") if on_gpu else ("static", "static")
    texts = {"dynamic": dynamic(), "peer": peer()}
    first = _seconds(bench, graphs, 1), _seconds(bench, compiled, 2)
    texts["graphs"] = graphs()
    if on_gpu and not _RECORDABLE.get(model):
        raise AssertionError("gptkit recorded no graph")
    bench.result["same_tokens"][name] = {
        " and ".join(both): sum(a == b for a, b in zip(*map(texts.get, both), strict=True)) / size.decoded
        for both in (("dynamic", "peer"), ("graphs", "peer"), ("graphs", "dynamic"))
    }
    took = seconds_of(bench, dynamic, peer, graphs, compiled, rounds=size.rounds, warm=1)
    longer = (max(first[0] - took[2], 0), max(first[1] - 2 * took[3], 0))
    least = _decoded_bytes(model.spec, size.prompt + size.decoded // 2) * size.decoded / bench.copied  # seconds
    pace = [size.decoded / seconds for seconds in took]
    rows: list[Any] = [("dynamic, dynamic", 0, 1), (f"{ours}, dynamic", 2, 1), (f"{ours}, {theirs}", 2, 3)]
    for label, mine, other in rows:
        calls = longer if other == 3 else None
        bench.row("decode", f"{name} decode: {label}", pace[mine], pace[other], least / took[mine], calls)
    if on_gpu:
        _launched(bench, name, _continue(model, reference, prompt, PROFILED, "dynamic"))
        kernels, busy = (
            figure / PROFILED for figure in profiled(bench, lambda: list(generate(model, prompt, PROFILED)))
        )
        bench.result["launched"][name] |= {"recorded": [kernels, busy]}
        print(f"    with the graph, and the prompt's share: {kernels:.0f}, {busy * 1e3:.2f} ms", flush=True)
        bench.keep()


def _seconds(bench: Bench, work: Callable[[], Any], times: int) -> float:
    """Return the seconds of the first calls."""
    bench.wait()
    start = time.perf_counter()
    for _ in range(times):
        work()
    bench.wait()
    return time.perf_counter() - start


def prefilling(bench: Bench, name: str) -> None:
    """Read a prompt, and compute a batch, with transformers as the peer."""
    size = bench.size
    model, reference = pair(bench, name)
    ids = _drawn(bench, model)
    took = seconds_of(bench, *_continue(model, reference, ids, 1), rounds=2 * size.rounds)
    flops = forward_flops(model.spec, size.prefilled)
    needed = flops.causal - flops.products["head"] + flops.head_of_last
    pace = [size.prefilled / seconds for seconds in took]
    share = needed / took[0] / bench.multiplied
    bench.row("prefill", f"{name} prefill, 1 x {size.prefilled}", *pace, share)

    batch = ids.repeat(size.batch, 1)
    _whole_size(bench, name, model, reference, ids)
    with torch.inference_mode():
        both = (lambda: model(batch)), (lambda: reference(batch, use_cache=False).logits)
        took = seconds_of(bench, *both, rounds=size.rounds)
    pace = [batch.numel() / seconds for seconds in took]
    share = forward_flops(model.spec, size.prefilled, size.batch).causal / took[0] / bench.multiplied
    bench.row("forward", f"{name} forward, {size.batch} x {size.prefilled}", *pace, share)


@torch.inference_mode()
def _whole_size(bench: Bench, name: str, model: Decoder, reference: Any, ids: Tensor) -> None:
    """Compare the logits of one text, and transformers' of the text alone and in a batch. Raises AssertionError."""
    theirs = reference(ids, use_cache=False).logits
    noise = _far(theirs, reference(ids.repeat(2, 1), use_cache=False).logits[:1])
    difference = _far(model(ids), theirs)
    rounding = torch.finfo(theirs.dtype).eps * theirs.abs().max().item()
    passed = difference <= max(LIMIT * noise, rounding)
    bench.result["whole_size"][name] = {
        "difference": difference, "noise": noise, "rounding": rounding, "passed": passed
    }  # fmt: skip
    print(f"    logits differ by {difference:.2g}, transformers' own by {noise:.2g}", flush=True)
    if not passed:
        raise AssertionError(f"parity failed: {name} of the whole size")


def profiled(bench: Bench, work: Callable[[], Any]) -> tuple[int, float]:
    """Return the number of kernels that are launched, and the seconds that the device computes them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        bench.wait()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(kernels), sum(event.time_range.elapsed_us() for event in kernels) / 1e6


def _launched(bench: Bench, name: str, work: list[Callable[[], Any]]) -> None:
    """Count the kernels of a decoded token, and how long the device computes them; `work` writes `PROFILED` tokens."""
    figures = [tuple(figure / PROFILED for figure in profiled(bench, one)) for one in work]
    _tell_launched(bench, name, "token", figures)


def _tell_launched(bench: Bench, name: str, what: str, figures: list[Any]) -> None:
    (ours, busy), (theirs, peer_busy) = figures
    bench.result["launched"][name] = {"kernels": [ours, theirs], "busy_seconds": [busy, peer_busy]}
    shown = f"{ours:.0f}, {busy * 1e3:.2f} ms; {theirs:.0f}, {peer_busy * 1e3:.2f} ms"
    print(f"    kernels of a {what}, and the device's time for them: {shown}", flush=True)
    bench.keep()


# --- training and healing --------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, as nanoGPT's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Plain(nn.Module):
    """GPT-2 with learned positions and a tied head: token ids -> logits."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["n_embd"]
        self.tokens = nn.Embedding(config["vocab_size"], width)
        self.places = nn.Embedding(config["n_positions"], width)
        self.layers = nn.ModuleList(Layer(width, config["n_head"]) for _ in range(config["n_layer"]))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


def plain_steps(bench: Bench, config: dict[str, Any], teaches: bool, compiled: bool) -> Callable[[Windows], None]:
    """What makes a step of a plain loop: autocast to bfloat16, fused AdamW, clipping; with a teacher the KL divergence
    from its predictions in the place of the next tokens' cross entropy.
    """
    torch.manual_seed(0)
    model = Plain(config).to(bench.device)
    teacher = Plain(config).to(bench.device).eval().requires_grad_(False) if teaches else None
    call: Any = torch.compile(model) if compiled else model
    teach: Any = torch.compile(teacher) if compiled and teacher is not None else teacher
    groups = [[value for value in model.parameters() if (value.dim() > 1) is wide] for wide in (True, False)]
    kinds = [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(kinds, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def moved(array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        tensor = tensor.pin_memory() if bench.device.type == "cuda" else tensor
        return tensor.to(bench.device, non_blocking=True)

    def step(windows: Windows) -> None:
        ids, targets = moved(windows.ids), moved(windows.targets)
        with torch.autocast(bench.device.type, torch.bfloat16):
            logits = call(ids).flatten(0, 1)
            if teach is None:
                loss = F.cross_entropy(logits, targets.flatten())
            else:
                with torch.no_grad():
                    wanted = F.log_softmax(teach(ids).flatten(0, 1).float(), dim=-1)
                given = F.log_softmax(logits.float(), dim=-1)
                loss = F.kl_div(given, wanted, log_target=True, reduction="batchmean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


class Turns:
    """Run blocks of steps of gptkit's loop and of another in turn. Their first blocks warm up."""

    def __init__(self, bench: Bench, other: Callable[[Windows], None], windows: int) -> None:
        self.bench, self.other, self.windows = bench, other, windows
        self.steps = bench.size.block * (bench.size.rounds + 1)
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.peaks: list[list[int]] = [[], []]
        self.random = np.random.default_rng(0)
        self.vocabulary = bench.config("gpt2")["vocab_size"]

    def drawn(self) -> Windows:
        """Random windows."""
        rows = self.random.integers(0, self.vocabulary, (self.windows, self.bench.size.context + 1))
        return Windows(rows[:, :-1].copy(), rows[:, 1:].copy(), None)

    def batches(self, step: int) -> Windows:
        """Return the windows of a step of gptkit. Before a block, let the other loop make one."""
        if step % self.bench.size.block == 0:
            self.end()
            windows = [self.drawn() for _ in range(self.bench.size.block)]
            self._begin()
            for window in windows:
                self.other(window)
            self._note(self.theirs, 1)
            self.given = iter([self.drawn() for _ in range(self.bench.size.block)])
            self._begin()
        return next(self.given)

    def continues(self, run: Progress) -> bool:
        """Whether there is another step; ends the last block."""
        if run.step < self.steps:
            return True
        self.end()
        return False

    def end(self) -> None:
        """End a block of gptkit's, if there is one."""
        if len(self.ours) < len(self.theirs):
            self._note(self.ours, 0)

    def _begin(self) -> None:
        self.bench.wait()
        if self.bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        self.began = time.perf_counter()

    def _note(self, times: list[float], which: int) -> None:
        self.bench.wait()
        times.append(time.perf_counter() - self.began)
        if self.bench.device.type == "cuda":
            self.peaks[which].append(torch.cuda.max_memory_allocated() - self.before)

    def paces(self) -> tuple[float, float]:
        """Tokens a second of both, by the median block."""
        tokens = self.windows * self.bench.size.context * self.bench.size.block
        return tokens / statistics.median(self.ours[1:]), tokens / statistics.median(self.theirs[1:])


def training(bench: Bench, heals: bool, compiled: bool) -> None:
    """Train or heal a GPT-2 by `fit`, as the commands do, and a plain loop in turn."""
    config, size = {**bench.config("gpt2"), "activation_function": "gelu"}, bench.size
    spec = architecture_of(config).spec(config)
    model = load_random(spec, "float32", device=bench.device)
    windows = size.healed if heals else size.windows
    turns = Turns(bench, plain_steps(bench, config, heals, compiled), windows)
    loss: Loss = next_token
    how: dict[str, Any] = {}
    if heals:
        teacher = load_random(spec, "float32", seed=1, device=bench.device).requires_grad_(False)
        loss = distilled(torch.compile(teacher) if compiled else teacher)  # type: ignore[arg-type]
        # As a healing has it: with the average of the last steps, which needs a held-out text.
        how = {"keep_best": True, "held_out": turns.drawn(), "start_loss": 0.0}
    settings = Settings(
        windows, size.context, turns.steps + 1, rate=1e-4, every=turns.steps + 1, dtype="bfloat16", compiled=compiled,
        averaged=heals,
    )  # fmt: skip
    alone = Group(0, 1, bench.device)
    with tempfile.TemporaryDirectory() as folder:
        try:
            store = Store(Path(folder), alone)
            fit(
                model, turns.batches, settings=settings, group=alone, store=store, loss=loss, continues=turns.continues,
                **{"held_out": None, **how},
            )  # fmt: skip
        except Abandoned:
            pass
    pace = turns.paces()
    cost = training_flops(spec, size.context, windows)
    flops = cost.causal + (cost.forward.causal if heals else 0)
    share = flops / (windows * size.context) * pace[0] / bench.multiplied
    name = f"{'heal' if heals else 'train'} gpt2, {windows} x {size.context}{', compiled' if compiled else ''}"
    bench.row("heal" if heals else "train", name, *pace, share)
    row = bench.result["rows"][-1]
    row["first_block_seconds"] = {"gptkit": turns.ours[0], "peer": turns.theirs[0]}
    if turns.peaks[0]:
        row["step_memory"] = {"gptkit": max(turns.peaks[0][1:]), "peer": max(turns.peaks[1][1:])}
        ours, theirs = (max(peak[1:]) / 1e9 for peak in turns.peaks)
        print(f"    memory that a step adds: {ours:.2f} GB and {theirs:.2f} GB, {ours / theirs:.2f}", flush=True)
    bench.keep()
    if bench.device.type == "cuda" and not compiled:
        engine = _Engine(model, loss, adamw(model, spec.parameters(), 1e-4, 0.1), settings, alone)
        drawn = turns.drawn()
        engine.step(0, drawn, 1e-4)
        steps = partial(engine.step, 1, drawn, 1e-4), partial(turns.other, drawn)
        _tell_launched(bench, "heal" if heals else "train", "step", [profiled(bench, step) for step in steps])


# --- the run ---------------------------------------------------------------------------------------------------------

COMPILED = ("train-compiled", "heal-compiled")
SECTIONS: dict[str, tuple[float, Callable[[Bench], object]]] = {
    "ceilings": (30, ceilings),
    "parity": (120, parity),
    "decode": (180, lambda bench: [decoding(bench, name) for name in ("gpt2", "llama")]),
    "prefill": (60, lambda bench: [prefilling(bench, name) for name in ("gpt2", "llama")]),
    "train": (60, lambda bench: training(bench, heals=False, compiled=False)),
    "heal": (60, lambda bench: training(bench, heals=True, compiled=False)),
    "train-compiled": (150, lambda bench: training(bench, heals=False, compiled=True)),
    "heal-compiled": (150, lambda bench: training(bench, heals=True, compiled=True)),
}
"""Seconds at most, and the work, most important first."""


class TooLong(BaseException):
    """A section's time is over. No handler of `Exception` in what it runs may take it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooLong in the block after so many seconds."""

    def over(_: int, __: FrameType | None) -> None:
        raise TooLong(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(bench: Bench, names: list[str]) -> bool:
    """Run sections; return whether none failed."""
    errors = bench.result["errors"]
    for name in names:
        limit, work = SECTIONS[name]
        left = bench.end - time.monotonic()
        if left < 10:
            print(f"{name}: left out, for the time is over", flush=True)
            bench.result["left_out"].append(name)
            continue
        start = time.monotonic()
        try:
            with at_most(min(limit, left)):
                work(bench)
        except (Exception, TooLong) as error:
            trace = traceback.format_exc().strip().splitlines()[-12:]
            errors[name] = trace
            print(f"{name} failed: {type(error).__name__}", *trace, sep="\n    ", flush=True)
        torch.compiler.reset()
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        bench.result["seconds"][name] = round(time.monotonic() - start, 1)
        bench.keep()
    return not errors


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures to this file, as JSON")
    parser.add_argument("--small", action="store_true", help="small models and few tokens, for a CPU")
    parser.add_argument("--seconds", type=float, default=450.0, help="the time for everything (default: 450)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="run these sections only")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, given.small, time.monotonic() + given.seconds, given.out)
    card = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    bench.result |= {
        "device": card, "cuda": torch.version.cuda, "torch": torch.__version__, "python": platform.python_version(),
        "transformers": transformers.__version__, "gptkit": gptkit.__version__, "date": time.strftime("%Y-%m-%d"),
        "small": given.small, "limit": LIMIT, "parity": [], "rows": [], "same_tokens": {},
        "launched": {}, "whole_size": {},
        "errors": {}, "left_out": [], "seconds": {},
    }  # fmt: skip
    print(f"{card}, torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    print(
        f"{'tokens per second':<31}{'gptkit':>9}{'peer':>9}{'ratio':>8}{'share':>7}{'first':>7}{'peer':>7}", flush=True
    )
    names = [name for name in SECTIONS if name == "ceilings" or name in (given.only or SECTIONS)]
    if given.small and not given.only:
        names = [name for name in names if name not in COMPILED]
    good = run(bench, names)
    if not good:
        print("failed:", ", ".join(bench.result["errors"]))
        sys.exit(1)


if __name__ == "__main__":
    main()
