"""The command tokenize, which converts texts to a folder of tokens for training and evaluation."""

from pathlib import Path

from ..errors import UsageError
from ..terminal import progress_bar, say
from .base import FORCE, QUIET, argument, command, option


@command("gptkit tokenize play.txt play-tokens", "gptkit tokenize a.txt b.jsonl tokens --tokenizer sample:gpt2")
def tokenize(
    files: list[Path] = argument(
        "FILE… OUT",
        "One or more text files, and last the folder to write. A text file is one document; a .jsonl file "
        "has one document per line.",
    ),
    *,
    tokenizer: str | None = option(
        "MODEL",
        "The tokenizer: a model such as sample:gpt2, a tokenizer.json file, or bytes (one token per byte). "
        "Without this option, gptkit trains a byte-level BPE on the texts.",
    ),
    vocabulary: int | None = option(
        "N",
        "The largest number of tokens in the vocabulary, such as 8192, if gptkit trains a tokenizer. The "
        "default is 4,096.",
    ),
    force: bool = FORCE,
    quiet: bool = QUIET,
) -> None:
    """Convert texts to a folder of tokens for the commands train, heal and eval."""
    from ..training.data import tokenize as run

    *texts, out = files
    if not texts:
        raise UsageError(
            "tokenize needs at least one text file, and the folder to write",
            "For example: gptkit tokenize play.txt play-tokens",
        )
    with progress_bar("tokenizing", quiet) as advance:
        done = run(texts, out, tokenizer=tokenizer, vocabulary=vocabulary, force=force, progress=advance)
    documents = f"{done.documents:,} document{'' if done.documents == 1 else 's'}"
    say(
        [
            f"{out}: {done.tokens:,} tokens of {documents}, {done.bytes / done.tokens:.2f} bytes a token",
            f"vocabulary of {done.vocabulary:,}, stored as uint{8 * int(done.dtype[-1])}",
        ],
        quiet,
    )
