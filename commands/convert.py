"""The commands load, convert, extract and check, for checkpoints on disk."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..converter.targets import targets
from ..errors import GptkitError, UsageError
from ..terminal import answer, console, progress_bar, say
from . import base
from .base import FORCE, JSON, MODEL, QUIET, ForWeights, argument, command, device_option, flag, option
from .completion import FLOATS, complete_target, one_of

if TYPE_CHECKING:
    from ..report.checkpoints import RandomModel


@command("gptkit inspect sample:llama", name="inspect", words="Another name of load.")
@command("gptkit load sample:llama", "gptkit load --random gpt2 --out fresh")
def load(
    model: str = MODEL,
    *,
    dtype: str | None = option(
        "DTYPE",
        "The dtype of the weights after loading: float32, bfloat16, float16 or float64. The default is the "
        "dtype in the files, or float32 with --random.",
        complete=one_of(FLOATS),
    ),
    random: bool = flag(
        "--random",
        "Use random weights instead of stored ones. MODEL may then be a preset or a config.json without weights.",
    ),
    seed: int | None = option("N", "With --random: the seed of the weights. The default is 0.", min=0),
    out: Path | None = option("FOLDER", "With --random: write the weights to this folder, in gptkit's own format."),
    device: str = device_option(several=True, what="build the model"),
    force: bool = FORCE,
    opening: ForWeights,
    json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Load a checkpoint, or random weights, and report its family, components, files and anything unexpected."""
    if random:
        drawn = _random(model, dtype, seed or 0, out, force, device, opening, quiet)
        answer(json, drawn.as_json, drawn.summary, quiet)
        if drawn.out is not None:
            say([f"{drawn.out}: gptkit's own format"], quiet or json)
        return
    for name, value in (("--seed", seed), ("--out", out), ("--force", force or None)):
        if value is not None:
            raise UsageError(
                f"{name} works only with --random",
                "Add --random, or use gptkit convert to write a checkpoint's own weights.",
            )
    from ..converter.checkpoint import open_checkpoint
    from ..report.checkpoints import load_json, load_summary

    checkpoint = open_checkpoint(model, **opening)
    from ..modules.devices import devices_of, in_words
    from ..modules.load import load_checkpoint, torch_dtype

    total = sum(path.stat().st_size for path in checkpoint.files)
    with progress_bar("loading", quiet) as advance:
        places = devices_of(device)
        module = load_checkpoint(checkpoint, dtype, device=places, progress=lambda done: advance(done, total))
    for name, parameter in module.named_parameters():
        if bad := int((~parameter.isfinite()).sum()):
            checkpoint.notes.append(f"{name}: {bad:,} of its values are NaN or infinite")
    built = f"{sum(p.numel() for p in module.parameters()):,} parameters as {torch_dtype(dtype, checkpoint.dtype)}"
    if any(place.type != "cpu" for place in places):
        built += f" on {', '.join(map(in_words, places))}"
    answer(json, lambda: load_json(checkpoint), lambda: load_summary(checkpoint), quiet)
    if not (json or quiet):
        console().print(f"built          {built}", soft_wrap=True)


def _random(
    model: str,
    dtype: str | None,
    seed: int,
    out: Path | None,
    force: bool,
    device: str,
    opening: dict[str, Any],
    quiet: bool,
) -> RandomModel:
    """Draw random weights, write them to the folder `out` if given, and run a forward pass if memory suffices."""
    from ..analysis.parameters import count
    from ..converter.dtypes import HF_NAMES, parse_dtype
    from ..converter.outline import outline
    from ..converter.publish import Staging
    from ..converter.safetensors import DTYPES
    from ..modules.devices import devices_of
    from ..modules.initialise import INITIALISATION, finite_logits, write_random
    from ..modules.load import load_random
    from ..report.checkpoints import RandomModel

    stored, places = parse_dtype(dtype or "float32"), devices_of(device)
    if out is not None:
        Staging(out, force).check()
    tree = outline(model, offline=opening["offline"], allow_pickle=opening["allow_pickle"], companions=True)
    notes, written, finite = list(tree.notes), None, None
    total = count(tree.spec).total * DTYPES[stored].itemsize
    if out is not None:
        with progress_bar("writing", quiet) as advance:
            written = write_random(
                tree, out, seed=seed, dtype=HF_NAMES[stored], force=force, progress=lambda done: advance(done, total)
            )
    try:
        with progress_bar("drawing", quiet) as advance:
            building: Any = {"device": places, "name": model, "progress": lambda done: advance(done, total)}
            module = load_random(tree.spec, HF_NAMES[stored], seed=seed, **building)
    except GptkitError as error:
        if written is None:
            raise
        notes.append(f"the forward pass was skipped: {error.message}")
    else:
        finite = finite_logits(module)
    where = None if written is None else str(written.folder)
    nbytes = 0 if written is None else written.nbytes
    return RandomModel(model, tree, HF_NAMES[stored], seed, INITIALISATION, finite, where, nbytes, tuple(notes))


@command("gptkit convert gpt2 --to local", "gptkit convert gpt2-local gpt2-again --to hf")
def convert(
    model: str = MODEL,
    out: Path | None = argument(
        "OUT",
        "The folder to write, or with --to gguf a .gguf file. The default is a folder named MODEL-FORMAT, "
        "such as gpt2-local.",
        None,
    ),
    *,
    to: str = option(
        "FORMAT",
        f"The format to write: {', '.join(targets())}. local is gptkit's own format. hf is Hugging Face "
        "files of the model's own family, hf:FAMILY those of another family (such as hf:llama), and hf:auto "
        "those of the first family that supports the model. nanogpt_tanh is for the older nanoGPT that "
        "computes GELU with tanh, llama2c_v1 is version 1 of llama2.c's format, and dcp is a distributed "
        "checkpoint of PyTorch.",
        default="local",
        complete=complete_target,
    ),
    config: str | None = base.CONFIG,
    dtype: str | None = option(
        "DTYPE",
        "Store every tensor in this dtype, such as float32 or bfloat16. --to gguf also accepts q8_0, and "
        "--to hf also fp8 (for the matrices of the layers only). By default, every tensor keeps its dtype.",
        complete=one_of((*FLOATS, "q8_0", "fp8")),
    ),
    max_shard_size: str | None = option(
        "SIZE",
        "The largest size of one weight file, such as 2GB or 500MB. By default, gptkit divides the weights "
        "into files as the original does, or if that is not possible, into files of up to 5 GB.",
    ),
    drop: list[str] | None = option(
        "--drop GROUP",
        "Leave out a group of tensors that the language model does not use, such as mtp or vision. The "
        "output of convert lists the groups. Repeatable.",
    ),
    workers: int | None = base.WORKERS,
    max_memory: str | None = option(
        "SIZE",
        "The largest memory for tensors during the conversion, such as 500MB. gptkit then converts fewer "
        "tensors at the same time.",
    ),
    force: bool = FORCE,
    dry_run: bool = flag(
        "--dry-run",
        "Report the files, the disk space and the memory that the conversion would need, and write nothing.",
    ),
    opening: ForWeights,
    quiet: bool = QUIET,
) -> None:
    """Convert a checkpoint to gptkit's format, to Hugging Face files, GGUF and others."""
    from ..converter.convert import Conversion
    from ..converter.convert import convert as run
    from ..converter.distributed import leads
    from ..report.checkpoints import conversion_lines

    quiet = quiet or not leads()
    total = 0

    def planned(conversion: Conversion) -> None:
        nonlocal total
        total = sum(shard.nbytes for shard in conversion.plan.shards)

    with progress_bar("converting", quiet) as advance:
        written: Any = {"force": force, "dry_run": dry_run, "dtype": dtype, "workers": workers, "drop": drop or ()}
        written["config"] = config
        written["max_shard_bytes"] = base.parse_size("--max-shard-size", max_shard_size)
        written["max_memory"] = base.parse_size("--max-memory", max_memory)
        done = run(model, out, to, **written, **opening, progress=lambda n: advance(n, total), on_plan=planned)
    say(conversion_lines(done), quiet)


@command("gptkit extract text org/vision-model text-model")
def extract(
    part: str = argument(
        "PART", "The part of the model to write. The only possible value is text, which means the language model."
    ),
    model: str = MODEL,
    out: Path = argument("OUT", "The folder to write the checkpoint to."),
    *,
    config: str | None = base.CONFIG,
    force: bool = FORCE,
    offline: bool = flag(
        "--offline", "Download nothing: use only local files and files already in the Hugging Face cache."
    ),
    quiet: bool = QUIET,
) -> None:
    """Write the language model of a multimodal model as a checkpoint."""
    from ..converter.extract import extract as run
    from ..report.quantities import counted

    done = run(part, model, out, config=config, force=force, offline=offline)
    lines = [f"wrote {done.out}: {done.family}, {counted(len(done.names), 'tensor')}"]
    lines += [f"left out: {line}" for line in sorted({name.split(".layers.")[0] for name in done.left})[:8]]
    say(lines, quiet)


def _after_changes(folder: Path) -> str:
    """Say why a folder differs from its manifest, and what to do if the change was intended."""
    from ..converter.names import CONFIG, LOCAL_CONFIG

    formats = [to for name, to in ((LOCAL_CONFIG, "local"), (CONFIG, "hf")) if (folder / name).is_file()]
    why = "The folder changed after gptkit wrote it."
    if not formats:
        return f"{why} Write it again, or copy it again."
    copy = f"gptkit convert {shlex.quote(str(folder))} NEW --to {formats[0]}"
    return f"{why} If that was intended, write a copy with its own manifest: {copy}"


def _check_card(card: Path, folder: Path, quiet: bool) -> None:
    """Check that a folder has the files of a verification card, and print what the card says about them.

    Exit with code 3 if the verification failed.
    """
    from ..converter.card_check import check_card

    reference, described = check_card(card, folder)
    words = {
        "identical": "the same logits as transformers, to the last bit",
        "equal": "the same logits as transformers, within rounding",
        "different": "other logits than transformers",
    }
    versions = ", ".join(f"{name} {version}" for name, version in described.versions.items())
    lines = [
        f"{folder}: every file is the one that {card} describes ({reference:.200})",
        f"verified    {words[described.verdict.function]}, in {described.dtype:.40}",
        f"versions    {versions:.200}",
        f"repeat it   {described.command:.400}",
    ]
    say(lines, quiet)
    if not described.verdict.passed:
        raise typer.Exit(3)


@command("gptkit check gpt2-local", "gptkit check ./any-checkpoint", "gptkit check card.json ./downloaded")
def check(
    folder: Path = argument(
        "FOLDER", "The folder of the checkpoint to check, such as ./gpt2-local, or a verification card."
    ),
    described: Path | None = argument(
        "FOLDER",
        "The folder to compare with a card. A card is the JSON file that gptkit verify --card writes.",
        default=None,
    ),
    quiet: bool = QUIET,
    *,
    opening: ForWeights,
) -> None:
    """Check that the files of a checkpoint are complete and undamaged.

    It compares the hashes of the files with manifest.json. If the folder has no manifest.json, it compares the headers
    of the files with the index and the config. With a verification card, it checks that the folder has the files that
    were verified. Use check after copying or downloading; audit to find errors of an
    export; verify to prove that logits are right.
    """
    from ..converter.checkpoint import Checkpoint, open_files
    from ..converter.manifest import MANIFEST, check_manifest
    from ..errors import CheckpointError, InvalidInput
    from ..report.quantities import counted

    if described is not None:
        _check_card(folder, described, quiet)
        return
    if folder.is_file():
        raise InvalidInput(f"{folder} is a file, but gptkit check takes a folder", "Use gptkit load to check one file.")
    if not folder.is_dir():
        raise InvalidInput(f"no such folder: {folder}", "Give the folder of a checkpoint.")
    if not (folder / MANIFEST).exists():
        opened = open_files(folder, **opening)
        tensors = f"{counted(len(opened.leaves), 'tensor')} in {counted(len(opened.files), 'file')}"
        source = "config.json says" if isinstance(opened, Checkpoint) else "its headers and index say"
        notes = [f"note: {note}" for note in opened.notes]
        say(
            [f"{folder}: {tensors}, as {source}; bytes were not compared, because there is no {MANIFEST}", *notes],
            quiet,
        )
        return
    problems = check_manifest(folder)
    if problems:
        some = [*problems[:10], *([f"… and {len(problems) - 10} more"] if len(problems) > 10 else [])]
        lines = [f"  {line}" for line in some] + ([] if problems[0].startswith(MANIFEST) else [_after_changes(folder)])
        raise CheckpointError(
            f"{folder} does not match its {MANIFEST}: {counted(len(problems), 'problem')}", "\n".join(lines)
        )
    say([f"{folder}: every file is identical to its entry in {MANIFEST}"], quiet)
