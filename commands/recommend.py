"""recommend: components for a goal and a number of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import Annotated

from ..errors import UsageError
from ..terminal import answer, say
from .base import Json, Quiet, app, examples, guarded, option, tokens
from .completion import one_of

VOCABULARY = 32_000


def known_goals() -> Iterable[str]:
    """For the shell."""
    from ..analysis.recommend import GOALS

    return GOALS


@app.command(
    epilog=examples(
        "gptkit recommend --goal quality --params 7B",
        "gptkit recommend --goal context --params 1.5e9 --context 64k --vocab 128256",
        "gptkit recommend --goal balance --params 7B --loadable",
        "gptkit recommend --goal memory --params 124M --out small.json",
    )
)
@guarded
def recommend(
    goal: Annotated[
        str,
        option(
            "GOAL",
            "What matters most: quality, speed, memory, context, simplicity or balance.",
            complete=one_of(known_goals),
        ),
    ],
    params: Annotated[str, option("NUMBER", "How many parameters the model is to have: 7B, 124M, 1.5e9.")],
    vocab: Annotated[int, option("TOKENS", "The size of the vocabulary.")] = VOCABULARY,
    context: Annotated[
        str | None,
        option("TOKENS", "The context that the model is for; by default 4,096, or 131,072 for the goal context."),
    ] = None,
    loadable: Annotated[bool, option("--loadable", "Choose only what a transformers family can hold.")] = False,
    out: Annotated[Path | None, option("FILE", "Write the model as a spec, FILE.json.")] = None,
    force: Annotated[bool, option("--force", "Replace FILE where it exists.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose components for a goal and a size, with costs and papers."""
    from ..analysis.recommend import recommend as run

    if quiet and out is None and not json:
        raise UsageError(
            "-q prints nothing, and without --out nothing is written", "Add --out FILE.json, or leave out -q."
        )
    length = None if context is None else tokens("--context", context)
    found = run(goal, params, vocab=vocab, context=length, loadable=loadable)
    if out is not None:
        from ..converter.tree import Origin, write_spec

        write_spec(found.spec, out, origin=Origin(family=found.family), force=force)
    from ..report.recommendation import recommendation_table

    answer(json, found.as_json, lambda: recommendation_table(found), quiet)
    if json:
        return
    file = quote(str(out or f"{goal}.json"))
    again = [] if out is not None else [f"{asked(goal, params, vocab, context, loadable)} --out {file}"]
    say(["", "Next:", *again, f"gptkit params {file} --flops --memory", f"gptkit load --random {file}"], quiet)


def asked(goal: str, params: str, vocab: int, context: str | None, loadable: bool) -> str:
    """The call, as it was made."""
    more = [
        *([f"--vocab {vocab}"] if vocab != VOCABULARY else []),
        *([f"--context {quote(context)}"] if context else []),
        *(["--loadable"] if loadable else []),
    ]
    return " ".join(["gptkit recommend --goal", goal, "--params", quote(params), *more])
