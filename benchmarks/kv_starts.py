"""Compare five closed forms of one key-value head before and after the same healing, for docs/kv-healing.md.

    python benchmarks/kv_starts.py [--model sample:llama] [--tokens 60000] [--rates R …] [--seeds 3] [--out PAGE]

- mean: the new key and value are the mean of their group (GQA, Ainslie et al. 2305.13245).
- SVD: the best keys and the best values of the stacked weights, fitted independently.
- joint SVD: the best approximation of the products q·k and O·V of the weights.
- covariance: the same products, weighted by the inputs on a text.
- gptkit: `--attention mqa`, which starts from there, and fits the scores and then the outputs layer by layer.

Queries and outputs are changed to match the new heads, except in the first form. All forms are healed in the same way.
"""

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gptkit
from gptkit.components import Attention, Rotary
from gptkit.modules import Decoder
from gptkit.surgery.base import StoredModel
from gptkit.surgery.fits.calibration import Calibration
from gptkit.surgery.fits.regression import Moment, augment, balanced, fit_keys, fit_values
from gptkit.surgery.fits.text import TOKENS, read_text
from gptkit.training.heal import heal

PLAY = Path(gptkit.__file__).parent / "samples" / "play.txt"
FORMS = ("mean", "SVD", "joint SVD", "covariance", "gptkit")
MARKS = "<!-- key-value starts -->", "<!-- end of key-value starts -->"
PAGE = """{begin}
The table compares five closed forms, that is, formulas that compute the new key-value head from the old weights
without training. The model is `sample:{model}`, a small trained model that comes with gptkit, with one key-value
head for all query heads. Healing then trains it to predict what the original predicts, with {tokens:,} tokens per
run, {seeds} seeds, and two learning rates. The columns "healed at" name the learning rate and have the KL after
healing. KL is the KL divergence from the original. ± is the largest minus the smallest KL over seeds.

{table}

`make healing-starts` writes this table.
{end}"""

Four = tuple[Tensor, Tensor, Tensor, Tensor]  # queries (n, d, e), key (d, e), value (d, e), outputs (n, hidden, d)


def by_weights(q: Tensor, k: Tensor, v: Tensor, o: Tensor, rotary: int) -> Four:
    """The best rows of stacked keys, a rotary pair a complex number, and of stacked values, each by itself."""
    heads, size, _ = k.shape
    readers, half = len(q) // heads, rotary // 2
    pairs = torch.complex(k[:, :half], k[:, half:rotary]).transpose(0, 1)  # (pairs, heads, e)
    u, s, vh = torch.linalg.svd(pairs, full_matrices=False)
    row = s[:, :1] * vh[:, 0] / heads**0.5
    factor = (u[:, :, 0] * heads**0.5).T.repeat_interleave(readers, dim=0)  # (n, pairs): K_h is near factor_h · row
    turned = torch.complex(q[:, :half], q[:, half:rotary]) * factor.conj()[..., None]
    queries, key = q.clone(), k.mean(dim=0)
    queries[:, :rotary] = torch.cat([turned.real, turned.imag], dim=1)
    key[:rotary] = torch.cat([row.real, row.imag])
    u, s, vh = torch.linalg.svd(v.reshape(heads * size, -1), full_matrices=False)
    maps = u[:, :size].reshape(heads, size, size).repeat_interleave(readers, dim=0)
    return queries, key, s[:size, None] * vh[:size], o @ maps


def by_products(q: Tensor, k: Tensor, v: Tensor, o: Tensor, rotary: int, covariance: Tensor) -> Four:
    """The best products on inputs of a covariance."""
    queries, key = fit_keys(q, k, covariance, rotary)
    value, outputs = fit_values(v, o, covariance)
    value, wide = balanced(value, outputs.flatten(0, 1))
    return queries, key, value, wide.unflatten(0, outputs.shape[:2])


def by_mean(q: Tensor, k: Tensor, v: Tensor, o: Tensor, _: int) -> Four:
    """Queries and outputs as they are."""
    return q, k.mean(dim=0), v.mean(dim=0), o


def covariances(model: str, text: Path | None, tokens: int) -> Iterator[Tensor]:
    """Of what comes to each layer's attention on the text, with a 1 for the biases."""
    opened = gptkit.open_checkpoint(model)
    calibration = Calibration(read_text(opened, text, tokens), opened.spec)
    for layer in calibration.walk(StoredModel(opened)):
        x = layer.run("attention_norm")[1]["attention_norm"][1]
        yield Moment.of(torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)).covariance


@torch.no_grad()
def merged(model: str, out: Path, form: str, text: Path | None, tokens: int) -> None:
    """The model with one key-value head, by a closed form."""
    gptkit.swap(model, out.with_name("mqa"), attention="mqa", approximate=True, measured=False, dtype="float32")
    old, new = gptkit.load(model, "float32"), gptkit.load(out.with_name("mqa"), "float32")
    seen = list(covariances(model, text, tokens)) if form == "covariance" else []
    for layer in range(len(old.spec.blocks)):
        change(old, new, layer, form, seen[layer] if seen else None)
    gptkit.save(new, out, "local")


def change(old: Decoder, new: Decoder, layer: int, form: str, covariance: Tensor | None) -> None:
    """The tensors of one layer."""
    record = old.spec.blocks[layer].attention
    assert isinstance(record, Attention) and isinstance(record.position, Rotary)
    assert record.position.pairs == "halves"
    size, before = record.head_dim, dict(old.blocks[layer].attention.named_parameters())

    def heads(name: str) -> Tensor:
        weight, bias = (before.get(f"{name}_proj.{part}") for part in ("weight", "bias"))
        assert weight is not None
        return augment(weight.double(), None if bias is None else bias.double()).unflatten(0, (-1, size))

    o = before["o_proj.weight"].double().unflatten(1, (-1, size)).transpose(0, 1)
    width = heads("q").shape[-1]
    given = heads("q"), heads("k"), heads("v"), o, record.position.dim
    by: dict[str, Callable[[], Four]] = {
        "mean": lambda: by_mean(*given),
        "SVD": lambda: by_weights(*given),
        "joint SVD": lambda: by_products(*given, torch.eye(width, dtype=torch.float64)),
        "covariance": lambda: by_products(*given, torch.eye(width) if covariance is None else covariance),
    }
    q, k, v, outputs = by[form]()
    for name, parameter in new.blocks[layer].attention.named_parameters():
        if name == "o_proj.weight":
            parameter.copy_(outputs.transpose(0, 1).flatten(1))
        elif name[0] in "qkv":
            made = {"q": q.flatten(0, 1), "k": k, "v": v}[name[0]]
            parameter.copy_(made[:, -1] if name.endswith("bias") else made[:, :-1])


def started(model: str, form: str, folder: Path, text: Path | None = None, tokens: int = TOKENS) -> Path:
    """The model with one key-value head, fitted on a text; a sample's on its own."""
    if form == "gptkit":
        fitted: dict[str, Any] = {"calibrate": text, "calibrate_tokens": tokens}
        gptkit.swap(model, folder / "start", attention="mqa", **fitted, measured=False, dtype="float32")
    else:
        merged(model, folder / "start", form, text, tokens)
    return folder / "start"


def written(page: Path, text: str, begin: str, end: str) -> None:
    """Put a text with its marks in the place of what stands between them in a page, or at its end."""
    before = page.read_text()
    before = before if begin in before else f"{before}\n{begin}{end}\n"
    page.write_text(re.sub(f"{begin}.*{end}", lambda _: text, before, flags=re.DOTALL))


def main() -> None:
    """Run them all, and put the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sample:llama")
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--rates", type=float, nargs="+", default=(1.4e-3, 3e-4))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    how: dict[str, Any] = {
        "tokens": options.tokens,
        "context": 128,
        "batch": 2048,
        "seeds": options.seeds,
        "local": 0.25,
        "beside": False,
    }
    columns = ["start", "KL before", "perplexity"]
    for rate in options.rates:
        columns += [f"healed at {rate:g}", "±", "perplexity"]
    rows = [columns, ["---"] * len(columns)]
    for form in FORMS:
        with tempfile.TemporaryDirectory() as folder:
            start = started(options.model, form, Path(folder))
            runs = [
                heal(start, options.model, [PLAY], Path(folder) / f"{rate:g}", rate=rate, **how)
                for rate in options.rates
            ]
        row = [form, f"{runs[0].start.kl:.3f}", f"{runs[0].start.perplexity:.2f}"]
        for done in runs:
            perplexity = sum(done.healed.perplexities) / len(done.healed.perplexities)
            row += [f"{done.healed.kl:.3f}", f"{done.healed.kl_spread:.3f}", f"{perplexity:.2f}"]
        rows.append(row)
        print("  ".join(row), flush=True)
    table, (begin, end) = "\n".join(f"| {' | '.join(row)} |" for row in rows), MARKS
    model = options.model.removeprefix("sample:")
    about = {"model": model, "tokens": runs[0].tokens, "seeds": options.seeds}
    page = PAGE.format(begin=begin, end=end, table=table, **about)
    print(page)
    if options.out is not None:
        written(options.out, page, begin, end)


if __name__ == "__main__":
    main()
