"""The commands params, presets and families, which need only configs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..terminal import answer, console, print_json, say
from . import base
from .base import JSON, MODELS, QUIET, ForTree, Pictures, argument, command, flag, option
from .completion import FLOATS, one_of

if TYPE_CHECKING:
    from ..analysis.figures import Scenario

WEIGHTS, COSTS, SWAPS = "Parameters", "Costs", "What if"


_DTYPE = option(
    "DTYPE",
    "Add the bytes of the weights in this dtype: float32, bfloat16, float8, int8, int4, nf4, or a GGUF "
    "type such as q8_0, q4_k_m or q4_0. --memory and --gpu also use this dtype.",
    WEIGHTS,
    complete=one_of((*FLOATS, "float8", "int8", "int4", "q8_0", "q4_k_m", "q4_0", "nf4")),
)
_EXPLAIN = flag(
    "--explain", "Show how the total number of parameters follows from the sizes in the config, as a formula.", WEIGHTS
)
_STORED = flag(
    "--stored",
    "Add the dtypes and bytes of the tensors in the weight files. gptkit reads only the headers of the files.",
    WEIGHTS,
)
_KV = option(
    "--kv TOKENS",
    "Add the size of the KV cache at these context lengths, in tokens: 8192, or several such as 2k,128k (1k is 1,024).",
    COSTS,
)
_KV_DTYPE = option(
    "DTYPE",
    "The dtype of the KV cache, such as float32. The default is the dtype of the activations, which is "
    "bfloat16 unless --dtype is float32 or float16.",
    COSTS,
)
_FLOPS = flag(
    "--flops",
    "Add the FLOPs of generating one token, of processing a whole prompt (prefill) and of one training step.",
    COSTS,
)
_CONTEXT = option(
    "TOKENS",
    "The number of tokens per sequence for --flops, --memory, --tp and --pp, such as 8k (1k is 1,024). The default is "
    "the model's longest context. With --gpu: the sequence length for which the largest batch is "
    "reported. The default is then 8,192, or the model's longest context if that is shorter.",
    COSTS,
)
_BATCH = option(
    "N",
    "The number of sequences in a batch, for --kv, --flops, --memory, --tp and --pp. With --gpu: the "
    "batch size for which the longest context is reported.",
    COSTS,
    default=1,
)
_GPU = option(
    "--gpu SIZE",
    "Report for several dtypes the longest context and the largest batch that fit in a GPU with this "
    "much memory, such as 24GB. In this option GB means GiB (1024³ bytes), as in the names of GPUs.",
    COSTS,
)
_TP = option(
    "--tp N",
    "Report the memory per GPU if every layer is split over N GPUs (tensor parallelism).",
    COSTS,
    default=1,
    show_default=False,
)
_PP = option(
    "--pp N",
    "Report the memory per GPU if the layers are divided into N pipeline stages, with one GPU per stage.",
    COSTS,
    default=1,
    show_default=False,
)
_FSDP = option(
    "--fsdp N",
    "With --memory: report the training memory per process if N processes shard weights, gradients and "
    "optimizer states (FSDP).",
    COSTS,
    default=1,
    show_default=False,
)
_SWAP = option(
    "OPTION=VALUE",
    "Also count each model after this change: an option of gptkit swap and its value, such as "
    "attention=gqa:4. Repeat --swap to make several changes together.",
    SWAPS,
)
_RECIPE = option(
    "NAME | FILE",
    "Also count each model after the changes of a recipe: a TOML file, or a name from gptkit swaps --recipes.",
    SWAPS,
)
_CSV = flag(
    "--csv",
    "Print CSV instead of text, with a row per component, layer or tensor (see --by). With an option for "
    "costs, such as --kv, the CSV has a row per model instead.",
)


@command(
    "gptkit params qwen3-8b",
    "gptkit params gpt2 llama-3-8b bloom-7b1 falcon-7b",
    "gptkit params mixtral-8x7b --by tensor --dtype int4",
    "gptkit params llama-3-8b --kv 8192,131072 --flops --memory --context 8192",
    "gptkit params llama-3-8b --gpu 24GB",
    "gptkit params gpt2 --explain",
    "gptkit params llama-2-7b --swap attention=gqa:4 --kv 4096",
)
def params(
    models: list[str] = MODELS,
    by: str = base.by_option(WEIGHTS),
    by_layer: bool = flag("--by-layer", "", hidden=True),
    dtype: str | None = _DTYPE,
    explain: bool = _EXPLAIN,
    stored: bool = _STORED,
    kv: list[str] | None = _KV,
    kv_dtype: str | None = _KV_DTYPE,
    flops: bool = _FLOPS,
    memory: bool = flag(
        "--memory", "Add the memory that inference needs, and the memory that training with Adam needs.", COSTS
    ),
    context: str | None = _CONTEXT,
    batch: int = _BATCH,
    gpu: str | None = _GPU,
    tp: int = _TP,
    pp: int = _PP,
    fsdp: int = _FSDP,
    swap: list[str] | None = _SWAP,
    recipe: str | None = _RECIPE,
    json: bool = JSON,
    csv: bool = _CSV,
    *,
    drawn: Pictures,
    opening: ForTree,
    quiet: bool = QUIET,
) -> None:
    """Count parameters, memory and FLOPs from a config, without weights."""
    from ..analysis.figures import Scenario
    from ..analysis.params import ModelCount, with_figures
    from ..analysis.params import params as count_params

    contexts = tuple(dict.fromkeys(base.tokens("--kv", part) for text in kv or () for part in text.split(",")))
    length = None if context is None else base.tokens("--context", context)
    nbytes = base.parse_size("--gpu", gpu, of_a_card=True)
    asked = Scenario(dtype, contexts, kv_dtype, flops, memory, length, batch, explain, nbytes, tp, pp, fsdp)
    rows = base.rows_by("layer" if by_layer else by)
    if json and csv:
        raise UsageError("--json and --csv cannot be combined", "Give only one of them.")
    if csv and stored:
        raise UsageError("--csv cannot show the stored tensors (--stored)", "Use --json to list each stored tensor.")
    if csv and rows != "component" and asked.more:
        raise UsageError(
            f"--csv prints only one table: the parameters by {rows}, or the costs",
            "Run the command once with --by and once with the options for costs.",
        )
    _refuse_options_without_effect(models, asked)
    counts: list[ModelCount] = count_params(*models, stored=stored, **opening)
    swapped = bool(swap or recipe)
    if swapped:
        pairs = []
        for model, result, family in base.reshaped(counts, swap, recipe, opening):
            name = f"{model.name} {' '.join(map(str, result.steps))}"
            pairs += [model, ModelCount(name, family, result.spec, swap={"of": model.name, **result.as_json()})]
        counts = pairs
    counts = with_figures(counts, asked)
    if json:
        print_json({"schema_version": 1, "models": [model.as_json(tensors=rows == "tensor") for model in counts]})
    elif csv:
        from ..report.rows import count_rows, model_rows, write_csv

        write_csv(model_rows(counts) if asked.more else count_rows(counts, rows, asked.dtype))
    elif not quiet:
        from ..report.counts import tables

        out = console()
        for part in tables(counts, asked, rows, swapped):
            say(part, quiet=False) if isinstance(part, list) else out.print(part)
        if any(model.revision or model.notes or model.stored for model in counts):
            from ..report.checkpoints import source_lines

            say(["", *source_lines(counts)], quiet=False)
    if drawn:
        from ..report.counts_page import counts_page

        drawn.write(lambda: counts_page(counts, asked), quiet or json or csv)


def _refuse_options_without_effect(models: list[str], asked: Scenario) -> None:
    """Raise UsageError if an option has no effect on any of the requested figures."""
    number = next((name for name in models if re.fullmatch("[0-9]+k?", name) and not Path(name).exists()), None)
    if number is not None and (asked.flops or asked.memory):
        raise UsageError(
            f"{number} is not a model; --flops and --memory take no value", f"Give the context as --context {number}."
        )
    where = "--flops, --memory, --gpu, --tp or --pp"
    if asked.fsdp != 1 and not asked.memory:
        raise UsageError("--fsdp works only with --memory", "Add --memory.")
    if asked.context is not None and not asked.at_context:
        raise UsageError(
            f"--context works only with {where}", "For --kv, give the contexts as its value: --kv 4096,8192."
        )
    if asked.batch != 1 and not (asked.kv or asked.at_context):
        raise UsageError(
            f"--batch works only with --kv, {where}",
            "Leave out --batch: the number of parameters does not depend on it.",
        )
    if asked.kv_dtype is not None and not (asked.kv or asked.memory or asked.gpu or asked.spread):
        raise UsageError(
            "--kv-dtype works only with --kv, --memory, --gpu, --tp or --pp", "--dtype sets the dtype of the weights."
        )


@command("gptkit presets", "gptkit presets qwen", "gptkit presets llama-2 --names   (one name per line, for a script)")
def presets(
    words: list[str] | None = argument(
        "[WORD]...",
        "List only the presets that have all of these words in their names, such as qwen. Without words, "
        "all presets are listed.",
        None,
    ),
    names: bool = flag("-n --names", "Print only the names, one per line."),
    json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """List the presets: models that gptkit knows by name, such as qwen3-8b."""
    from ..architectures.presets import nearest
    from ..architectures.presets import presets as known
    from ..report.families import preset_json, preset_table

    wanted = [word.lower() for word in words or ()]
    matching = [
        preset
        for preset in known().values()
        if all(any(word in name.lower() for name in (*preset.known_as, preset.config["model_type"])) for word in wanted)
    ]
    if not matching:
        near = nearest(" ".join(wanted))
        raise UsageError(
            f"no preset has {' and '.join(map(repr, wanted)):.80} in its name",
            f"Did you mean {', '.join(near[:4])}?" if near else "Run gptkit presets to list all presets.",
        )
    if names and not json:
        say([preset.name for preset in matching], quiet)
    else:
        rows = [preset_json(preset) for preset in matching]
        answer(json, lambda: {"schema_version": 1, "presets": rows}, lambda: preset_table(rows), quiet)


@command("gptkit families", "gptkit families olmo", "gptkit families --all --json")
def families(
    words: list[str] | None = argument(
        "[WORD]...",
        "List only the families that have all of these words in their names, such as olmo. Without words, "
        "all families are listed.",
        None,
    ),
    everything: bool = flag(
        "--all", "Also list the causal language models of transformers that gptkit does not support."
    ),
    json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """List the model families that gptkit supports."""
    from ..report.families import families_json, families_table

    listed = families_json([word.lower() for word in words or ()], everything=everything)
    if not listed["families"] and not listed["others"]:
        raise UsageError(
            f"no family has {' and '.join(map(repr, words or ())):.80} in its name",
            "Run gptkit families to list all families.",
        )
    answer(json, lambda: listed, lambda: families_table(listed), quiet)
