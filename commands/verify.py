"""verify: logits held against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from ..terminal import answer, say, status
from .base import ForWeights, HeatMap, Json, ModelArgument, Quiet, app, examples, guarded, option, tokens
from .drawn import Drawn

if TYPE_CHECKING:
    from ..converter.checkpoint import Checkpoint


@app.command(
    epilog=examples(
        "gptkit verify sample:llama", "gptkit verify sample:gpt2 gpt2-local   (exit 0: the same, 3: different)"
    )
)
@guarded
def verify(
    model: ModelArgument,
    local: Annotated[
        str | None, typer.Argument(metavar="LOCAL", help="The checkpoint to compare with it; by default MODEL itself.")
    ] = None,
    *,
    dtype: Annotated[str, option("DTYPE", "The dtype that both sides compute in.")] = "float32",
    attention: Annotated[str | None, option("sdpa | eager", "How both sides compute attention.")] = None,
    prompt: Annotated[list[str] | None, option("TEXT", "Also compare on this text, beside the probe.")] = None,
    long: Annotated[bool, option("--long", "Also probe past windows of more than 1,024 tokens.")] = False,
    up_to: Annotated[str | None, option("--up-to TOKENS", "The longest sequence that matters.")] = None,
    mutations: Annotated[
        bool | None, option("--mutations/--no-mutations", "Make mistakes on purpose and count those that are caught.")
    ] = None,
    against: Annotated[
        str | None,
        option("MODULE:CALLABLE", "Compare with a port of your own: a callable that returns your torch module."),
    ] = None,
    card: Annotated[Path | None, option("FILE", "Write the verdict as a card, FILE.json and FILE.md.")] = None,
    drawn: HeatMap,
    damage: Annotated[
        bool | None, option("--damage/--no-damage", "Tell what LOCAL loses by position, layer and component.")
    ] = None,
    text: Annotated[Path | None, option("FILE", "Measure perplexity on this text.")] = None,
    stream: Annotated[bool, option("--stream", "Run a layer at a time, for models larger than memory.")] = False,
    json: Json = False,
    opening: ForWeights,
    quiet: Quiet = False,
) -> None:
    """Compare logits with transformers."""
    if against is not None:
        if local is not None or card is not None:
            raise UsageError("--against takes a MODEL alone", "gptkit verify sample:llama --against my_port:build")
        verify_against(model, against, drawn, long, json, quiet, opening["offline"])
        return
    from ..parity.verify import verify as run
    from ..report.summaries import verification_report

    with status("verifying", quiet or json) as tell:
        result = run(
            model,
            local,
            dtype=dtype,
            attention=attention,
            prompts=prompt or (),
            long=long,
            up_to=None if up_to is None else tokens("--up-to", up_to),
            mutations=mutations,
            stream=stream,
            bisected=True if drawn else None,
            damaged=True if damage is None and text is not None else damage,
            text=lambda source: measured_text(source, text),
            **opening,
            progress=tell,
        )
    answer(json, result.as_json, lambda: verification_report(result), quiet)
    if card is not None:
        from ..parity.card import write_card

        written = write_card(result, card, **opening)
        if not json:
            say([f"card: {', '.join(str(path) for path in written)}"], quiet)
    if drawn:
        from ..report.verification import verification_page

        drawn.write(lambda: verification_page(result), quiet or json)
    if not result.passed:
        raise typer.Exit(result.exit_code)


def measured_text(source: Checkpoint, file: Path | None) -> tuple[int, ...] | None:
    """The end of a text, or of the bundled play for the samples."""
    from ..surgery.fits.calibration import read_text

    if file is None and not (source.origin.reference or "").startswith("sample:"):
        return None
    return read_text(source, file, tokens=0).held_out


def verify_against(model: str, against: str, drawn: Drawn, long: bool, json: bool, quiet: bool, offline: bool) -> None:
    """`verify --against`: exit 3 where the port is not the model."""
    from ..parity.port import verify_port
    from ..report.summaries import port_report

    with status("verifying", quiet or json) as tell:
        result = verify_port(model, against, long=long, offline=offline, progress=tell)
    answer(json, result.as_json, lambda: port_report(result), quiet)
    if drawn:
        from ..report.verification import port_page

        drawn.write(lambda: port_page(result), quiet or json)
    if not result.passed:
        raise typer.Exit(3)
