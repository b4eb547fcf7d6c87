"""gptkit against transformers, alternating in one run: forward at T = 512, cached decoding, start of the command.

    python benchmarks/run.py [--rounds 7] [--threads 2] [--only forward|decode|startup]

Models are random: a 124M GPT-2 shape and a 135M llama shape (SmolLM2's), fp32, sdpa. Figures are medians; the ratio is
of medians, gptkit over its peer, so that 1.0 is as fast and less is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gptkit
from gptkit.architectures.presets import presets
from gptkit.modules import Cache, Decoder

FORWARD_TOKENS = 512
DECODED_TOKENS = 128
PROMPT_TOKENS = 16


def median_pair(rounds: int, ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, each a median over `rounds`, the two in turn after one warm-up of each."""
    functions, times = (ours, theirs), ([], [])
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            functions[which]()
            if number:  # the first round warms up
                times[which].append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def pair(preset: str, folder: Path) -> tuple[Decoder, Any]:
    """A randomly initialised transformers model of the preset's shape, and gptkit's of the same files."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(**presets()[preset].config)
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(folder)
    return gptkit.load(folder, dtype="float32"), reference


def decoders(ours: Decoder, theirs: Any) -> tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]:
    """One greedy, cached step of each, on a cache of its own: token ids in, the next one out."""
    import transformers

    # transformers' own cache, without the machinery of generate()
    cache, their_cache = Cache(ours.spec), transformers.DynamicCache(config=theirs.config)
    return (
        lambda ids: ours(ids, cache=cache, last_only=True)[:, -1:].argmax(-1),
        lambda ids: theirs(ids, past_key_values=their_cache, logits_to_keep=1).logits[:, -1:].argmax(-1),
    )


def decode_pair(rounds: int, ours: Decoder, theirs: Any, prompt: torch.Tensor) -> tuple[float, float]:
    """Seconds of a decode by the median token; the two in turn token by token, so that what else the machine does
    slows both alike.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        steps, ids = decoders(ours, theirs), [prompt, prompt]
        for token in range(DECODED_TOKENS):
            for which in (0, 1) if (number + token) % 2 else (1, 0):
                start = time.perf_counter()
                ids[which] = steps[which](ids[which])
                if number:  # the first round warms up
                    times[which].append(time.perf_counter() - start)
    return statistics.median(times[0]) * DECODED_TOKENS, statistics.median(times[1]) * DECODED_TOKENS


def model_rows(preset: str, rounds: int, only: str | None) -> None:
    """Forward and decode of one shape."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        ours, theirs = pair(preset, Path(folder))
        ids = torch.randint(ours.spec.vocab_size, (1, FORWARD_TOKENS))
        prompt = ids[:, :PROMPT_TOKENS]
        if only != "decode":
            times = median_pair(rounds, lambda: ours(ids), lambda: theirs(ids))
            row(f"{preset} forward, T = {FORWARD_TOKENS}", *times)
        if only != "forward":
            row(f"{preset} decode, {DECODED_TOKENS} tokens", *decode_pair(rounds, ours, theirs, prompt))


def startup(rounds: int) -> None:
    """`gptkit params` as a whole process against an interpreter that imports typer alone."""

    def run(*command: str) -> Callable[[], Any]:
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)

    ours = run(sys.executable, "-m", "gptkit", "params", "qwen3-8b")
    row("params qwen3-8b / import typer", *median_pair(rounds, ours, run(sys.executable, "-c", "import typer")))
    theirs = run(sys.executable, "-c", "import transformers")
    row("params qwen3-8b / import transformers", *median_pair(rounds, ours, theirs))


def row(what: str, ours: float, theirs: float) -> None:
    """One line of the table."""
    print(f"{what:<40} {ours * 1000:>9.1f} ms {theirs * 1000:>9.1f} ms   ratio {ours / theirs:.3f}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=("forward", "decode", "startup"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'':<40} {'gptkit':>12} {'peer':>12}")
    if arguments.only in (None, "startup"):
        startup(arguments.rounds)
    if arguments.only != "startup":
        for preset in ("gpt2", "smollm2-135m"):
            model_rows(preset, arguments.rounds, arguments.only)


if __name__ == "__main__":
    main()
