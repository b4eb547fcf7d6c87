"""load, convert and check: checkpoints as they lie on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal import console, progress_bar, say
from .base import (
    AllowExtra,
    AllowPickle,
    Force,
    Json,
    ModelArgument,
    Offline,
    Quiet,
    app,
    examples,
    guarded,
    parse_size,
)


@app.command(epilog=examples("gptkit load sample:llama"))
@guarded
def load(
    model: ModelArgument,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64.")] = None,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
    allow_extra: AllowExtra = False,
    json: Json = False,
) -> None:
    """Open, map and build a checkpoint; report what it is and anything unexpected."""
    from ..converter.checkpoint import open_checkpoint
    from ..report.summaries import load_json, load_summary
    from ..report.tables import print_json

    checkpoint = open_checkpoint(model, offline=offline, allow_pickle=allow_pickle, allow_extra=allow_extra)
    from ..modules.load import load_checkpoint, torch_dtype

    total = sum(path.stat().st_size for path in checkpoint.files)
    with progress_bar("loading") as advance:
        module = load_checkpoint(checkpoint, dtype, progress=lambda done: advance(done, total))
    for name, parameter in module.named_parameters():
        if bad := int((~parameter.isfinite()).sum()):
            checkpoint.notes.append(f"{name}: {bad:,} of its values are NaN or infinite")
    built = f"{sum(p.numel() for p in module.parameters()):,} parameters as {torch_dtype(dtype, checkpoint.dtype)}"
    if json:
        print_json(load_json(checkpoint))
        return
    console().print(load_summary(checkpoint))
    console().print(f"built          {built}", soft_wrap=True)


@app.command(epilog=examples("gptkit convert gpt2 --to local", "gptkit convert gpt2-local gpt2-again --to hf"))
@guarded
def convert(
    model: ModelArgument,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="The folder to make [MODEL-FORMAT].")] = None,
    to: Annotated[
        str, typer.Option(help="local (gptkit's own), hf, hf:FAMILY, hf:auto, gguf, llama2c, nanogpt or dcp.")
    ] = "local",
    dtype: Annotated[
        str | None, typer.Option(help="Store every tensor as this: float32, bfloat16, …; q8_0 in a gguf.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Start another file beyond it: 2GB, 500MB.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads, by default one a core.")] = None,
    max_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of tensors held at once: 500MB.")] = None,
    force: Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; read no weight.")] = False,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
    allow_extra: AllowExtra = False,
    quiet: Quiet = False,
) -> None:
    """Convert to gptkit's own format, back to Hugging Face files, or to another format."""
    from ..converter.convert import Conversion
    from ..converter.convert import convert as run
    from ..converter.distributed import leads
    from ..report.summaries import conversion_lines

    quiet = quiet or not leads()
    total = 0

    def planned(conversion: Conversion) -> None:
        nonlocal total
        total = sum(shard.nbytes for shard in conversion.plan.shards)

    with progress_bar("converting", quiet) as advance:
        done = run(
            model,
            out,
            to,
            force=force,
            dry_run=dry_run,
            offline=offline,
            allow_pickle=allow_pickle,
            allow_extra=allow_extra,
            dtype=dtype,
            max_shard_bytes=parse_size("--max-shard-size", max_shard_size),
            workers=workers,
            max_memory=parse_size("--max-memory", max_memory),
            progress=lambda nbytes: advance(nbytes, total),
            on_plan=planned,
        )
    say(conversion_lines(done), quiet)


@app.command(epilog=examples("gptkit check gpt2-local"))
@guarded
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that gptkit wrote.")], quiet: Quiet = False
) -> None:
    """Hash a folder's files again and compare with its manifest; say which tensor changed, and where."""
    from ..converter.publish import MANIFEST, check_manifest
    from ..errors import CheckpointError, InvalidInput

    if not folder.is_dir():
        raise InvalidInput(f"no such folder: {folder}", "Name a folder that gptkit wrote.")
    if not (folder / MANIFEST).exists():
        raise InvalidInput(f"{folder} has no {MANIFEST}: gptkit did not write it", "gptkit load checks any checkpoint.")
    problems = check_manifest(folder)
    if problems:
        some = [*problems[:10], *([f"… and {len(problems) - 10} more"] if len(problems) > 10 else [])]
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise CheckpointError(f"{folder}: {count}", "\n".join(some))
    say([f"{folder}: every file has the bytes that its manifest says"], quiet)
