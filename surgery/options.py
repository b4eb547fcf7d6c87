"""The options that ask for swaps, for the command line, recipes and Python. No torch, no numpy.

The file of a swap declares its option in its `OPTIONS`; `registry.all_options` returns all of them.
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
    """An option that asks for swaps."""

    name: str
    """The name in Python and recipes."""
    group: str
    """The heading in the help."""
    place: int
    """The number of the option under its heading."""
    help: str
    metavar: str = ""
    """The form of its values. An option without one takes no value."""
    words: str = ""
    """gptkit's words that begin a value, with their synonyms: "yarn; ntk = ntk-aware; linear = pi". Case, hyphens,
    underscores and blanks do not matter.
    """
    two: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """Names in papers that are several steps here."""
    parts: Parts = field(default_factory=dict)
    """The quantities of which a part may be requested ("auto:75%"), by the text before the number: the name, and a
    function that returns the numbers in a model's layers.
    """
    settings: Mapping[str, type | UnionType] = field(default_factory=dict)
    """Additional keys of a recipe's step, and their types."""

    @property
    def flag(self) -> bool:
        """Return whether it takes no value."""
        return not self.metavar

    @property
    def spelled(self) -> str:
        """Return the option as it is written on the command line."""
        return spelled(self.name)

    def synonyms(self) -> dict[str, list[str]]:
        """Return the synonyms of gptkit's words."""
        parts = (entry.partition("=") for entry in self.words.split(";") if entry)
        return {ours.strip(): [name.strip() for name in names.split(",") if name] for ours, _, names in parts}

    def known(self) -> dict[str, str]:
        """Return gptkit's words by all understood words, which are squashed."""
        pairs = [(word, ours) for ours, more in self.synonyms().items() for word in (ours, *more)]
        return {squashed(word): ours for word, ours in (*pairs, *((word, word) for word in self.two))}


def spelled(name: str) -> str:
    """Write an option as on the command line: merge_lora becomes --merge-lora."""
    return f"--{name.replace('_', '-')}"


def declared(path: Path) -> list[Option]:
    """Read the options that a file of swaps declares, without importing it, since the import would need numpy.

    The file's `OPTIONS` is made of constants and of this module's names. `parts`, which are functions, are left out.
    """
    declaration = re.search(r"^OPTIONS = (\(.*?\))$(?=\n\S|\n*\Z)", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    if declaration is None:
        return []
    tree = ast.parse(declaration[1], str(path), "eval")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != "parts"]
    return list(eval(compile(tree, str(path), "eval"), globals()))  # noqa: S307 - our own file, which is imported next


def squashed(word: str) -> str:
    """Return a word without case, hyphens, underscores and blanks."""
    return re.sub(r"[-_ ]", "", word).lower()


def guarantee_in_words(guarantee: str) -> str:
    """Return a guarantee for people: data says "retrained" for a model that is useless until it is trained."""
    return "needs training" if guarantee == "retrained" else guarantee
