"""The command eval, which measures perplexity: by position, past the context, and compared with another model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..terminal import answer, status
from .base import JSON, MODEL, QUIET, ForWeights, Pictures, command, device_option, option, tokens
from .completion import FLOATS, one_of


@command(
    "gptkit eval sample:llama --data play.txt",
    "gptkit eval sample:llama --data play.txt --past 4 --rope yarn:4",
    "gptkit eval changed --data play.txt --against sample:gpt2",
    name="eval",
)
def evaluate(
    model: str = MODEL,
    *,
    data: list[Path] = option(
        "--data FILE",
        "The text to evaluate on: a text file, or a folder written by gptkit tokenize. Repeatable.",
        default=...,
    ),
    against: str | None = option(
        "MODEL",
        "A second model, such as sample:gpt2. gptkit evaluates both on the same text and reports the difference.",
    ),
    context: str | None = option(
        "TOKENS",
        "The number of tokens per window (evaluated sequence), such as 512 or 4k (1k is 1,024). The default is "
        "the model's context, but at most 2,048.",
    ),
    past: int = option(
        "M",
        "Also evaluate sequences of up to M times the model's context, such as 4. With the value 1, gptkit "
        "evaluates only sequences within the context.",
        default=1,
        min=1,
    ),
    rope: str | None = option(
        "KIND:FACTOR",
        "With --past: also evaluate the model with scaled RoPE. Give the method and the factor, such as "
        "yarn:4, linear:2 or ntk:4.",
    ),
    stride: str | None = option(
        "TOKENS",
        "The number of tokens from the start of one window to the start of the next, such as 256 or 1k (1k is 1,024). "
        "If it is less than --context, windows overlap, and predictions have more context. The default is a whole "
        "window, without overlap.",
    ),
    top_k: str = option(
        "K,K",
        "Report how often the correct token is among the K most likely ones, for each K of this list.",
        default="1,5",
    ),
    dtype: str = option(
        "DTYPE",
        "The dtype of the computation, such as float32 or bfloat16.",
        default="float32",
        complete=one_of(FLOATS),
    ),
    attention: str = option(
        "sdpa | eager",
        "The attention implementation, named as in transformers.",
        default="sdpa",
        complete=one_of(("sdpa", "eager")),
    ),
    device: str = device_option(several=True),
    drawn: Pictures,
    json: bool = JSON,
    opening: ForWeights,
    quiet: bool = QUIET,
) -> None:
    """Measure perplexity, bits per byte and accuracy on texts."""
    from ..report.evaluation import evaluation_page, evaluation_report
    from ..training.evaluate import evaluate as run

    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", top_k):
        raise UsageError(f"--top-k must be numbers separated by commas, not {top_k!r:.40}", "For example: --top-k 1,5")
    if attention not in ("sdpa", "eager"):
        raise UsageError(f"--attention must be sdpa or eager, not {attention!r:.40}")
    lengths = {"context": context, "stride": stride}
    windows: Any = {name: None if length is None else tokens(f"--{name}", length) for name, length in lengths.items()}
    computing: Any = {"dtype": dtype, "attention": attention, "device": device, **opening}
    with status("measuring", quiet or json) as tell:
        evaluation = run(
            model,
            data,
            against=against,
            past=past,
            rope=rope,
            top_k=tuple(map(int, top_k.split(","))),
            **windows,
            **computing,
            progress=tell,
        )
    answer(json, evaluation.as_json, lambda: evaluation_report(evaluation), quiet)
    drawn.write(lambda: evaluation_page(evaluation), quiet or json)
