"""The options that request swaps, for the command line, recipes and Python. No torch, no numpy.

The file of a swap declares its option in its `OPTIONS`. `registry.all_options` returns all of them.
"""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType

from ..components import ModelSpec

NORMS, ATTENTION, POSITIONS = "Norms and layers", "Attention", "Positions"
FEED_FORWARD, VOCABULARY, WEIGHTS = "Feed-forward", "Vocabulary and head", "Weights"
Parts = Mapping[str, tuple[str, Callable[[ModelSpec], set[int | None]]]]
GROUPS = (NORMS, ATTENTION, POSITIONS, FEED_FORWARD, VOCABULARY, WEIGHTS)
"""The headings of the help, in order. Headings of plugins come after them."""


@dataclass(frozen=True)
class Option:
    """An option that requests swaps, such as --attention."""

    name: str
    """The name in Python and recipes."""
    group: str
    """The heading in the help."""
    place: int
    """The position of the option under its heading in the help."""
    help: str
    metavar: str = ""
    """The possible values as the help shows them, such as "mha | gqa:N". "" means that the option takes no value."""
    words: str = ""
    """The words with which a value may begin, with their synonyms: "yarn; ntk = ntk-aware; linear = pi".

    gptkit replaces a synonym by the word before it. Case, hyphens, underscores and blanks do not matter.
    """
    two: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """The values that stand for several steps, such as "swiglu", with these steps as pairs of option and value."""
    parts: Parts = field(default_factory=dict)
    """The quantities of which a share may be requested, as in "auto:75%", by the text before the number ("auto:").

    Each quantity has a name ("layers"), and a function that returns the model's number of it. If the layers of a model
    have different numbers, such as numbers of heads, the function returns all of them.
    """
    settings: Mapping[str, type | UnionType] = field(default_factory=dict)
    """The additional settings that a recipe may give for this option, with their types."""

    @property
    def flag(self) -> bool:
        """Return whether the option takes no value."""
        return not self.metavar

    @property
    def spelled(self) -> str:
        return spelled(self.name)

    def synonyms(self) -> dict[str, list[str]]:
        """Return the synonyms of the words with which a value may begin, by word."""
        parts = (entry.partition("=") for entry in self.words.split(";") if entry)
        return {ours.strip(): [name.strip() for name in names.split(",") if name] for ours, _, names in parts}

    def known(self) -> dict[str, str]:
        """Return every accepted word, normalised by `squashed`, with the word that gptkit uses for it."""
        pairs = [(word, ours) for ours, more in self.synonyms().items() for word in (ours, *more)]
        return {squashed(word): ours for word, ours in (*pairs, *((word, word) for word in self.two))}


def spelled(name: str) -> str:
    """Write an option as on the command line: merge_lora becomes --merge-lora."""
    return f"--{name.replace('_', '-')}"


def declared(path: Path) -> list[Option]:
    """Return the options that a file of swaps declares in `OPTIONS`.

    The file is not imported, since the import would need numpy. Only the declaration is evaluated, so it may use no
    names except those of this module. The field `Option.parts` contains functions of the file, and stays empty here.
    """
    declaration = re.search(r"^OPTIONS = (\(.*?\))$(?=\n\S|\n*\Z)", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    if declaration is None:
        return []
    tree = ast.parse(declaration[1], str(path), "eval")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != "parts"]
    return list(eval(compile(tree, str(path), "eval"), globals()))  # noqa: S307 - our own file, which is imported next


def squashed(word: str) -> str:
    """Normalise a word for comparisons: lower case, without hyphens, underscores and blanks."""
    return re.sub(r"[-_ ]", "", word).lower()


def guarantee_in_words(guarantee: str) -> str:
    """Return a guarantee as users read it: "needs training" for "retrained", and the others unchanged."""
    return "needs training" if guarantee == "retrained" else guarantee
