"""generate: text from a checkpoint."""

from __future__ import annotations

import sys
from itertools import chain
from typing import Annotated

import typer

from ..errors import UsageError
from ..terminal import complain
from .base import ForWeights, ModelArgument, app, examples, guarded, option
from .completion import FLOATS, one_of


@app.command(epilog=examples("gptkit generate sample:gpt2 'ROMEO:' -n 80 --temperature 0.8 --seed 1"))
@guarded
def generate(
    model: ModelArgument,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The prompt to continue; - reads standard input.")
    ] = None,
    *,
    ids: Annotated[str | None, option("IDS", "Token ids instead of a text: '1 5 9'.")] = None,
    max_new_tokens: Annotated[int, option("-n --max-new-tokens N", "Stop after so many tokens.", min=0)] = 100,
    temperature: Annotated[
        float | None,
        option("T", "Sample at this temperature. 0 is greedy, the default unless --top-k or --top-p is given.", min=0),
    ] = None,
    top_k: Annotated[int | None, option("K", "Sample from the k likeliest tokens.", min=1)] = None,
    top_p: Annotated[
        float | None, option("P", "Sample from the likeliest tokens whose probabilities add up to p.", min=0, max=1)
    ] = None,
    seed: Annotated[int | None, option("N", "The seed of sampling, for the same text twice.", min=0)] = None,
    dtype: Annotated[
        str | None, option("DTYPE", "The dtype to compute in; by default the checkpoint's.", complete=one_of(FLOATS))
    ] = None,
    attention: Annotated[
        str, option("sdpa | eager", "How attention is computed.", complete=one_of(("sdpa", "eager")))
    ] = "sdpa",
    opening: ForWeights,
) -> None:
    """Continue a prompt."""
    from ..converter.checkpoint import open_checkpoint
    from ..converter.threads import suit
    from ..modules.attention import Kernel
    from ..modules.text import generate as run

    if (text is None) == (ids is None):
        raise UsageError("give a prompt: either TEXT or --ids", "gptkit generate sample:gpt2 'ROMEO:'")
    if attention not in ("sdpa", "eager"):
        raise UsageError(f"unknown attention {attention!r}", "known: sdpa, eager")
    if temperature == 0 and (top_k is not None or top_p is not None):
        option = "--top-k" if top_k is not None else "--top-p"
        raise UsageError(f"{option} does nothing at --temperature 0, which is greedy", "Give a temperature above 0.")
    kernel: Kernel = "eager" if attention == "eager" else "sdpa"
    prompt: str | list[int]
    if ids is not None:
        prompt = parse_ids(ids)
    else:
        prompt = read_stdin() if text == "-" else text or ""
    limits: list[str] = []
    opened = open_checkpoint(model, **opening)
    suit(opened.spec)
    pieces = run(
        opened,
        prompt,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        dtype=dtype,
        attention=kernel,
        tell=limits.append,
    )
    watched = sys.stdout.isatty()
    try:
        for piece in chain([prompt] if isinstance(prompt, str) else [], pieces):
            # What a model says is somebody else's text. A program gets all of it, a terminal what it can show.
            shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in piece) if watched else piece
            sys.stdout.write(shown)  # not typer.echo, which drops what looks like a colour
            sys.stdout.flush()
    finally:
        typer.echo()  # after an interruption too: what is said about it gets a line of its own
        for line in limits:
            complain(line)


def parse_ids(text: str) -> list[int]:
    """'1 5 9' or '1,5,9' as numbers.

    Raises:
        UsageError: something in it is not a number.

    """
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(f"--ids takes numbers, not {text!r:.60}") from error


def read_stdin() -> str:
    """Standard input.

    Raises:
        UsageError: it is not text.

    """
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not text: {error}") from error
