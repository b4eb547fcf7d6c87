"""gptkit train beside a plain loop, as nanoGPT's train.py is one: tokens a second, and loss on the same held-out text.

    python benchmarks/train.py --text tinyshakespeare.txt [--nanogpt FOLDER | --same] [--tokens N] [--seeds N]

Both train GPT-2 of the same size (exact GELU, learned positions, tied head) on the same tokens with the same rates,
decay and clipping, and are evaluated on the same windows. The plain one is written here; with --nanogpt its model is
that of nanoGPT's own model.py in FOLDER, with AdamW as its `configure_optimizers` makes it. First values and windows
are each one's own, which alone makes losses of two runs differ by their spread; with --same the plain one begins with
gptkit's values and reads its windows, so that what is left is the loops' own. Both run in one process and take turns,
a step each, so that what slows the machine down slows both. Seconds are the processor's, so that other programs do not
count (with OMP_NUM_THREADS=1, for threads wait actively): those of steps, their batches counted in, without
evaluations. Fails where gptkit is slower by more than noise in the median of the ratios, or its mean loss is above the
other's by more than their spread.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptkit.architectures import architecture_of
from gptkit.modules.decoder import Decoder
from gptkit.modules.load import load_random
from gptkit.training.ablate import RunResult, paired
from gptkit.training.data import Stretch, TokenFile, Windows, tokenize
from gptkit.training.loop import Settings, fit, rate_at
from gptkit.training.parallel import Group
from gptkit.training.state import Store

LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY = 4, 4, 128, 128, 512
NOISE = 0.97
"""The ratio below which it is slower."""
RATE, WARMUP, DECAY, CLIP, BETAS = 3e-3, 0.05, 0.1, 1.0, (0.9, 0.95)


class Layer(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Plain(nn.Module):
    """GPT-2, called as nanoGPT's model is: ids and targets -> logits and their mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        for name, each in self.named_parameters():
            if each.dim() > 1:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(each, std=0.02 / (math.sqrt(2 * LAYERS) if deep else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(each)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, decay: float, rate: float, betas: tuple[float, float], _: str) -> Any:
        groups = [[p for p in self.parameters() if (p.dim() > 1) is wide] for wide in (True, False)]
        kinds = [{"params": groups[0], "weight_decay": decay}, {"params": groups[1], "weight_decay": 0.0}]
        return torch.optim.AdamW(kinds, lr=rate, betas=betas)


def nanogpt(folder: Path) -> Callable[[], Any]:
    """What makes nanoGPT's own model."""
    about = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert about is not None and about.loader is not None
    module = importlib.util.module_from_spec(about)
    sys.modules[about.name] = module
    about.loader.exec_module(module)
    config = module.GPTConfig(CONTEXT, VOCABULARY, LAYERS, HEADS, WIDTH, 0.0, True)
    return lambda: module.GPT(config)


def alike(seed: int) -> Plain:
    """The plain model with the values that gptkit's begins with."""
    given, model = dict(random_model(seed).named_parameters()), Plain()
    with torch.no_grad():
        model.tokens.weight.copy_(given["embedding.weight"])
        model.places.weight.copy_(given["positions.weight"])
        for number, layer in enumerate(model.layers):
            at = {name.split(".", 2)[-1]: each for name, each in given.items() if name.startswith(f"blocks.{number}.")}
            layer.qkv.weight.copy_(torch.cat([at[f"attention.{part}_proj.weight"] for part in "qkv"]))
            layer.out.weight.copy_(at["attention.o_proj.weight"])
            layer.up.weight.copy_(at["feed_forward.up_proj.weight"])
            layer.down.weight.copy_(at["feed_forward.down_proj.weight"])
    return model


def other(
    make: Callable[[], Any], training: Stretch, held: Windows, steps: int, windows: int, seed: int, same: bool
) -> Iterator[tuple[float, float]]:
    """The plain loop, a step each time; in the end (loss, seconds of a step)."""
    torch.manual_seed(seed)
    model = alike(seed) if same else make()
    optimiser = model.configure_optimizers(DECAY, RATE, BETAS, "cpu")
    data = torch.from_numpy(training.tokens.read(0, training.end))
    generator, seconds = torch.Generator().manual_seed(seed), 0.0
    for step in range(steps):
        began = time.process_time()
        if same:
            ids, targets = map(torch.from_numpy, training.step(step, windows, seed)[:2])
        else:
            starts = torch.randint(len(data) - CONTEXT, (windows,), generator=generator)
            ids = torch.stack([data[at : at + CONTEXT] for at in starts])
            targets = torch.stack([data[at + 1 : at + 1 + CONTEXT] for at in starts])
        for group in optimiser.param_groups:
            group["lr"] = rate_at((step + 1) / steps, RATE, WARMUP)
        _, loss = model(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        float(loss.detach())
        seconds += time.process_time() - began
        yield math.nan, math.nan
    with torch.no_grad():
        rows = zip(
            torch.from_numpy(held.ids).split(windows), torch.from_numpy(held.targets).split(windows), strict=True
        )
        lost = sum(float(model(ids, targets)[1]) * targets.numel() for ids, targets in rows)
    yield lost / held.targets.size, seconds / steps


def random_model(seed: int) -> Decoder:
    """gptkit's model."""
    config = {
        "model_type": "gpt2", "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": CONTEXT,
        "vocab_size": VOCABULARY, "activation_function": "gelu",
    }  # fmt: skip
    return load_random(architecture_of(config).spec(config), "float32", seed=seed)


def taking_turns(
    theirs: Iterator[tuple[float, float]], training: Stretch, held: Windows, steps: int, windows: int, seed: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """gptkit's loop, and a step of the other before each of its own: (loss, seconds of a step) of both."""
    model = random_model(seed)
    settings = Settings(
        windows, CONTEXT, steps, rate=RATE, warmup=WARMUP, decay=DECAY, clip=CLIP, seed=seed, every=steps
    )
    alone, taken, begun = Group(0, 1, torch.device("cpu")), list[float](), 0.0

    def step_of(number: int) -> Windows:
        nonlocal begun
        if number:  # from one step's beginning to its end; behind the last lies the evaluation
            taken.append(time.process_time() - begun)
        next(theirs)
        begun = time.process_time()
        return training.step(number, windows, seed)

    with tempfile.TemporaryDirectory() as folder:
        run = fit(model, step_of, held, settings, group=alone, store=Store(Path(folder), alone))
    return (run.curve[-1]["held_out"], statistics.mean(taken)), next(theirs)


def main() -> None:
    """Run both in turn, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--nanogpt", type=Path, help="a folder with nanoGPT's model.py")
    parser.add_argument("--same", action="store_true", help="the plain model with gptkit's first values and windows")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if given.same and given.nanogpt is not None:
        parser.error("--same is for the plain model")
    make, name = (Plain, "plain") if given.nanogpt is None else (nanogpt(given.nanogpt), "nanoGPT")
    with tempfile.TemporaryDirectory() as folder:
        found: TokenFile = tokenize([given.text], Path(folder) / "tokens", vocabulary=VOCABULARY)
        cut = found.tokens * 9 // 10
        training, held = Stretch(found, 0, cut, CONTEXT), Stretch(found, cut, found.tokens, CONTEXT).spread(512)
        steps = -(-given.tokens // (given.windows * CONTEXT))
        print(f"{steps:,} steps of {given.windows * CONTEXT:,} tokens, {torch.get_num_threads()} threads")
        print(f"{'seed':>4}{'gptkit':>10}{name:>10}{'tokens/s':>12}{name:>12}{'ratio':>8}", flush=True)
        losses: tuple[list[float], list[float]] = ([], [])
        ratios = []
        for seed in range(given.seeds):
            theirs = other(make, training, held, steps, given.windows, seed, given.same)
            done = taking_turns(theirs, training, held, steps, given.windows, seed)
            pace = [given.windows * CONTEXT / seconds for _, seconds in done]
            for each in (0, 1):
                losses[each].append(done[each][0])
            ratios.append(pace[0] / pace[1])
            row = f"{seed:>4}{done[0][0]:>10.4f}{done[1][0]:>10.4f}{pace[0]:>12,.0f}{pace[1]:>12,.0f}{ratios[-1]:>8.2f}"
            print(row, flush=True)
    mean = [statistics.mean(each) for each in losses]
    spread = max(max(each) - min(each) for each in losses)
    middle = statistics.median(ratios)
    runs = ([RunResult(seed, loss, None, 0.0, 0.0, []) for seed, loss in enumerate(each)] for each in losses)
    if (beside := paired(*runs)) is not None and beside.low is not None:
        print(f"gptkit less {name}: {beside.mean:+.4f}, from {beside.low:+.4f} to {beside.high:+.4f} in 95 of 100")
    print(f"mean{mean[0]:>10.4f}{mean[1]:>10.4f}   spread {spread:.4f}      median ratio{middle:>8.2f}")
    if middle < NOISE or mean[0] > mean[1] + spread:
        sys.exit("gptkit is slower, or its loss is higher")


if __name__ == "__main__":
    main()
