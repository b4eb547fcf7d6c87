"""The command compare, which compares models by their configs."""

import sys

from ..errors import UsageError
from ..terminal import console, print_json
from .base import JSON, MODELS, QUIET, ForTree, Pictures, command, flag, option, reshaped, tokens


@command(
    "gptkit compare gpt2 llama-2-7b bloom-7b1 falcon-7b",
    "gptkit compare llama-2-7b llama-3.1-8b --only-differences --context 4k",
    "gptkit compare gpt2 qwen3-8b --markdown",
    "gptkit compare llama-2-7b --swap attention=gqa:8",
)
def compare(
    models: list[str] = MODELS,
    context: str | None = option(
        "TOKENS",
        "The context length in tokens at which costs are compared, such as 4k (1k is 1,024). The default is the "
        "shortest of the models' contexts.",
    ),
    dtype: str = option(
        "DTYPE", "The dtype of the weights and the KV cache, such as float32 or bfloat16.", default="bfloat16"
    ),
    only_differences: bool = flag("--only-differences", "Show only the rows in which the models differ."),
    everything: bool = flag(
        "--all", "Show all rows. By default, gptkit leaves out the rows of details that are equal in all models."
    ),
    swap: list[str] | None = option(
        "OPTION=VALUE",
        "Also show each model after this change: an option of gptkit swap and its value, such as "
        "attention=gqa:8. Repeat --swap to make several changes together.",
    ),
    recipe: str | None = option(
        "NAME | FILE",
        "Also show each model after the changes of a recipe: a TOML file, or a name from gptkit swaps --recipes.",
    ),
    markdown: bool = flag("--markdown", "Print a Markdown table, for a README or a paper."),
    csv: bool = flag("--csv", "Print CSV instead of a table."),
    json: bool = JSON,
    *,
    drawn: Pictures,
    opening: ForTree,
    quiet: bool = QUIET,
) -> None:
    """Compare the components and costs of several models side by side."""
    from ..analysis.compare import comparison
    from ..analysis.figures import Scenario
    from ..analysis.params import ModelCount, params

    if sum((markdown, csv, json)) > 1:
        raise UsageError("--markdown, --csv and --json cannot be combined", "Give only one of them.")
    if only_differences and everything:
        raise UsageError("--only-differences and --all cannot be combined", "Give only one of them.")
    asked = Scenario(dtype=dtype, context=None if context is None else tokens("--context", context))
    counts: list[ModelCount] = params(*models, **opening)
    if swap or recipe is not None:
        from ..surgery.options import guarantee_in_words

        pairs = []
        for model, result, family in reshaped(counts, swap, recipe, opening):
            notes = (f"{', '.join(map(str, result.steps))}: {guarantee_in_words(result.guarantee)}", *result.notes)
            pairs += [model, ModelCount(f"{model.name} swapped", family, result.spec, notes=notes)]
        counts = pairs
    table = comparison(counts, asked)
    rows = table.shown(everything=everything, only_differences=only_differences)
    from ..report import comparison as report

    if json:
        print_json(table.as_json())
    elif csv or markdown:
        sys.stdout.write(report.comparison_csv(table, rows) if csv else report.comparison_markdown(table, rows))
    elif not quiet:
        console().print(report.comparison_table(table, rows))
    drawn.write(lambda: report.comparison_page(table, rows), quiet or json or csv or markdown)
