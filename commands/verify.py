"""The command verify, which compares logits with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import UsageError
from ..terminal import answer, say, status
from .base import JSON, MODEL, QUIET, ForWeights, HeatMap, argument, command, device_option, flag, option, tokens

if TYPE_CHECKING:
    from ..converter.checkpoint import Checkpoint


_LOCAL = argument(
    "LOCAL",
    "The checkpoint that gptkit loads, such as a converted copy of MODEL. transformers loads MODEL. The "
    "default is MODEL itself.",
    None,
)
_DTYPE = option("DTYPE", "The dtype in which both transformers and gptkit compute the logits.", default="float32")
_ATTENTION = option(
    "sdpa | eager",
    "The attention implementation that both transformers and gptkit use. The default is sdpa, or eager "
    "if transformers has no correct sdpa implementation for the model.",
)
_PROMPT = option("TEXT", "Also compare the logits on this text, such as 'To be or not to be'. Repeatable.")
_LONG = flag(
    "--long",
    "Also test sequences longer than 1,024 tokens, if the model has an attention window or RoPE scaling "
    "that changes only such long sequences.",
)
_UP_TO = option(
    "--up-to TOKENS",
    "The length in tokens of the longest sequence that you will use, such as 4096 or 4k (1k is 1,024). gptkit "
    "ignores differences that appear only in longer sequences.",
)
_MUTATIONS = option(
    "--mutations/--no-mutations",
    "Test the comparison: make mistakes in the model on purpose, and count those that the comparison "
    "detects. By default, gptkit makes the mistakes in the model itself if it has up to 50M parameters, "
    "and otherwise in a small copy with random weights. --mutations always uses the model itself.",
)
_AGAINST = option(
    "MODULE:CALLABLE",
    "Compare MODEL with your own PyTorch implementation. MODULE:CALLABLE, such as my_port:build, names "
    "a function that returns a torch.nn.Module.",
)
_DAMAGE = option(
    "--damage/--no-damage",
    "Report how much worse LOCAL predicts than MODEL, by position, layer and component. Use this option "
    "for two different models, such as before and after a swap. By default, gptkit does this if both the "
    "architectures and the logits differ, for models of up to 50M parameters.",
)
_STREAM = flag("--stream", "Load and compute one layer at a time. Use it for models that are larger than memory.")


@command("gptkit verify sample:llama", "gptkit verify sample:gpt2 gpt2-local   (exit 0: the same, 3: different)")
def verify(
    model: str = MODEL,
    local: str | None = _LOCAL,
    *,
    dtype: str = _DTYPE,
    attention: str | None = _ATTENTION,
    prompt: list[str] | None = _PROMPT,
    long: bool = _LONG,
    up_to: str | None = _UP_TO,
    mutations: bool | None = _MUTATIONS,
    against: str | None = _AGAINST,
    card: Path | None = option("FILE", "Write the checks and their results to FILE.json and FILE.md."),
    drawn: HeatMap,
    damage: bool | None = _DAMAGE,
    text: Path | None = option(
        "FILE",
        "Also report the perplexity of MODEL and LOCAL on this text file. The default for samples is a text "
        "that comes with gptkit. Other models have no default.",
    ),
    stream: bool = _STREAM,
    device: str = device_option(),
    json: bool = JSON,
    opening: ForWeights,
    quiet: bool = QUIET,
) -> None:
    """Prove that a checkpoint or your own code computes the same logits as transformers.

    Use verify after a conversion or an exact swap, or to test your own code (--against); diff to see which tensors
    differ; audit if a checkpoint does not load; check to find damaged files.
    """
    from ..report import verification as report

    if against is not None:
        given = {
            "LOCAL": local, "--card": card, "--dtype": None if dtype == "float32" else dtype, "--attention": attention,
            "--prompt": prompt, "--up-to": up_to, "--damage": damage, "--text": text, "--stream": stream or None,
            "--device": None if device == "auto" else device,
        }  # fmt: skip
        if others := [name for name, value in given.items() if value is not None]:
            raise UsageError(
                f"--against cannot be combined with {' or '.join(others)}",
                "For example: gptkit verify sample:llama --against my_port:build",
            )

    def measured_text(source: Checkpoint) -> tuple[int, ...] | None:
        """Return the token ids on which perplexity is measured: the end of the text that --text names.

        For gptkit's samples, the default is the bundled text. For other models without --text, return None.

        `source` is the model, whose tokenizer encodes the text.
        """
        from ..surgery.fits.text import read_text

        if text is None and not (source.origin.reference or "").startswith("sample:"):
            return None
        return read_text(source, text, tokens=0).held_out

    result: Any
    with status("verifying", quiet or json) as tell:
        if against is not None:
            from ..parity.port import verify_port

            how: Any = {"long": long, "offline": opening["offline"], "mutations": mutations}
            result = verify_port(model, against, **how, progress=tell)
        else:
            from ..parity.verify import verify as run

            length = None if up_to is None else tokens("--up-to", up_to)
            computing: Any = {"dtype": dtype, "attention": attention, "stream": stream, "device": device}
            probe: Any = {"prompts": prompt or (), "long": long, "up_to": length, "mutations": mutations}
            damaged = True if damage is None and text is not None else damage
            more: Any = {"bisected": True if drawn else None, "damaged": damaged, "text": measured_text}
            result = run(model, local, **computing, **probe, **more, **opening, progress=tell)
    terminal: Any = report.verification_report if against is None else report.port_report
    page: Any = report.verification_page if against is None else report.port_page
    answer(json, result.as_json, lambda: terminal(result), quiet)
    if card is not None:
        from ..parity.card import write_card

        written = write_card(result, card, **opening)
        say([f"card: {', '.join(str(path) for path in written)}"], quiet or json)
    drawn.write(lambda: page(result), quiet or json)
    if not result.passed:
        raise typer.Exit(3 if against is not None else result.exit_code)
