"""The command recommend, which proposes components for a goal and a number of parameters."""

from collections.abc import Iterable
from pathlib import Path
from shlex import quote

from ..errors import UsageError
from ..terminal import answer, say
from .base import JSON, QUIET, command, flag, option, tokens
from .completion import one_of


def _known_goals() -> Iterable[str]:
    """Return the values of --goal, for completion in the shell."""
    from ..analysis.recommend import GOALS

    return GOALS


@command(
    "gptkit recommend --goal quality --params 7B",
    "gptkit recommend --goal context --params 1.5e9 --context 64k --vocab 128256",
    "gptkit recommend --goal balance --params 7B --loadable",
    "gptkit recommend --goal memory --params 124M --out small.json",
)
def recommend(
    goal: str = option(
        "GOAL",
        "The most important property of the architecture: quality, speed, memory, context (long contexts), "
        "simplicity or balance.",
        default=...,
        complete=one_of(_known_goals),
    ),
    params: str = option(
        "NUMBER", "The number of parameters of the model, such as 7B, 124M or 1.5e9, from 100k to 1T.", default=...
    ),
    vocab: int | None = option(
        "TOKENS",
        "The number of tokens in the vocabulary, such as 128256. The default is 32,000, or fewer for models "
        "below 10M parameters.",
    ),
    context: str | None = option(
        "TOKENS",
        "The context length in tokens, such as 64k (1k is 1,024). The default is 4,096, or 131,072 with "
        "--goal context.",
    ),
    loadable: bool = flag("--loadable", "Propose only an architecture that a model class of transformers supports."),
    out: Path | None = option(
        "FILE",
        "Write the architecture to this JSON file, such as small.json. The commands params, show, load "
        "--random and train read it.",
    ),
    force: bool = flag("--force", "Replace the file of --out if it exists."),
    json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Propose an architecture for a goal and a size, with the cost of each choice."""
    from ..analysis.recommend import recommend as run

    if quiet and out is None and not json:
        raise UsageError(
            "-q prints nothing, and without --out gptkit also writes nothing", "Add --out FILE.json, or leave out -q."
        )
    length = None if context is None else tokens("--context", context)
    result = run(goal, params, vocab=vocab, context=length, loadable=loadable)
    if out is not None:
        from ..converter.tree import Origin, write_spec

        write_spec(result.spec, out, origin=Origin(family=result.family), force=force)
    from ..report.recommendation import recommendation_table

    answer(json, result.as_json, lambda: recommendation_table(result), quiet)
    file = quote(str(out or f"{goal}.json"))
    lines = ["", "Next:", f"gptkit params {file} --flops --memory", f"gptkit load --random {file}"]
    if out is None:  # the same call, with --out
        call = ["gptkit recommend --goal", goal, "--params", quote(params)]
        call += [f"--vocab {vocab}"] if vocab is not None else []
        call += [f"--context {quote(context)}"] if context else []
        lines.insert(2, " ".join([*call, *(["--loadable"] if loadable else []), f"--out {file}"]))
    say(lines, quiet or json)
