"""The command generate, which generates text with a checkpoint."""

import sys
from itertools import chain
from typing import Any

import typer

from ..errors import UsageError
from ..terminal import complain
from .base import MODEL, ForWeights, argument, command, device_option, flag, option
from .completion import FLOATS, one_of


@command("gptkit generate sample:gpt2 'ROMEO:' -n 80 --temperature 0.8 --seed 1")
def generate(
    model: str = MODEL,
    text: str | None = argument(
        "TEXT", "The prompt, such as 'ROMEO:'. A dash (-) means that gptkit reads it from standard input.", None
    ),
    *,
    ids: str | None = option("IDS", "The token ids of the prompt, to use instead of TEXT, such as '1 5 9'."),
    max_new_tokens: int = option(
        "-n --max-new-tokens N", "The largest number of tokens to generate.", default=100, min=0
    ),
    temperature: float | None = option(
        "T",
        "Sample at this temperature, such as 0.8. The default is 0, which always chooses the most likely "
        "token (greedy), or 1 with --top-k or --top-p.",
        min=0,
    ),
    top_k: int | None = option("K", "Sample only from the K most likely tokens, such as 50.", min=1),
    top_p: float | None = option(
        "P",
        "Sample only from the most likely tokens whose probabilities together reach P, such as 0.9 (nucleus sampling).",
        min=0,
        max=1,
    ),
    seed: int | None = option("N", "The seed of sampling, such as 1. The same seed gives the same text.", min=0),
    beams: int | None = option(
        "N", "Use beam search with this number of beams, such as 4, instead of greedy decoding or sampling.", min=2
    ),
    length_penalty: float | None = option(
        "P",
        "With --beams: divide the log-probability of a text by its length to the power P. A larger P "
        "favours longer texts. The default is 1.",
    ),
    early_stopping: bool = flag(
        "--early-stopping",
        "With --beams N: stop as soon as N texts have ended, even if others could still become more likely.",
    ),
    dtype: str | None = option(
        "DTYPE",
        "The dtype of the computation, such as bfloat16. The default is the dtype of the checkpoint.",
        complete=one_of(FLOATS),
    ),
    attention: str = option(
        "sdpa | eager",
        "The attention implementation, named as in transformers.",
        default="sdpa",
        complete=one_of(("sdpa", "eager")),
    ),
    device: str = device_option(several=True),
    opening: ForWeights,
    quiet: bool = flag("-q --quiet", "Print only the generated text, and errors."),
) -> None:
    """Generate text from a prompt."""
    from ..converter.checkpoint import open_checkpoint
    from ..converter.threads import suit
    from ..modules.text import generate as run

    if (text is None) == (ids is None):
        raise UsageError(
            "generate needs exactly one prompt: either TEXT or --ids",
            "For example: gptkit generate sample:gpt2 'ROMEO:'",
        )
    if attention not in ("sdpa", "eager"):
        raise UsageError(f"--attention must be sdpa or eager, not {attention!r}")
    _check_choice(temperature, top_k, top_p, beams, length_penalty, early_stopping)
    prompt = _read_prompt(text, ids)
    messages: list[str] = []
    opened = open_checkpoint(model, **opening)
    suit(opened.spec)
    sampling: Any = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    computing: Any = {"dtype": dtype, "attention": attention, "device": device, "tell": messages.append}
    if beams is not None:
        penalty = 1.0 if length_penalty is None else length_penalty
        sampling |= {"beams": beams, "length_penalty": penalty, "early_stopping": early_stopping}
    pieces = run(opened, prompt, max_new_tokens, **sampling, **computing)
    terminal = sys.stdout.isatty()
    try:
        printed = [prompt] if isinstance(prompt, str) and opened.spec.encoder is None and not quiet else []
        for piece in chain(printed, pieces):
            # A model's text may contain control characters. A program gets all of them, a terminal only printable ones.
            shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in piece) if terminal else piece
            sys.stdout.write(shown)  # not typer.echo, which removes text that looks like a colour code
            sys.stdout.flush()
    finally:
        typer.echo()  # also after an interruption, so that its message begins a new line
        for line in () if quiet else messages:
            complain(line)


def _check_choice(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    beams: int | None,
    length_penalty: float | None,
    early_stopping: bool,
) -> None:
    """Raise UsageError if options for sampling or beam search have no effect, or contradict each other."""
    if temperature == 0 and (top_k is not None or top_p is not None):
        name = "--top-k" if top_k is not None else "--top-p"
        raise UsageError(
            f"{name} has no effect at --temperature 0, which decodes greedily", "Give a temperature above 0."
        )
    if beams is None and (length_penalty is not None or early_stopping):
        name = "--early-stopping" if length_penalty is None else "--length-penalty"
        raise UsageError(f"{name} works only with --beams", "Add --beams N.")
    if beams is not None and (temperature or top_k is not None or top_p is not None):
        raise UsageError(
            "beam search does not sample, so --beams excludes --temperature, --top-k and --top-p",
            "Leave those options out.",
        )


def _read_prompt(text: str | None, ids: str | None) -> str | list[int]:
    """Return the prompt: TEXT, or standard input if TEXT is a dash, or the token ids of --ids ('1 5 9' or '1,5,9').

    Raises:
        UsageError: --ids are not integers, or standard input is not UTF-8.
    """
    if ids is not None:
        try:
            return [int(part) for part in ids.replace(",", " ").split()]
        except ValueError as error:
            raise UsageError(f"--ids must be token ids separated by spaces or commas, not {ids!r:.60}") from error
    try:
        return sys.stdin.read() if text == "-" else text or ""
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not text in UTF-8: {error}") from error
