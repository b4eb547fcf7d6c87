"""What an option that asks for swaps is, as the command line, recipes and Python have it. No torch, no numpy.

The file of a swap declares its option, in its `OPTIONS`; `registry.all_options` has all of them.
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
"""The headings of the help, in order; those of plugins come after them."""


@dataclass(frozen=True)
class Option:
    """An option.

    name: as in Python and recipes. group: the heading that it stands under, as the `place`-th. metavar: what its values
    look like; one without takes none. words: each word of ours that a value begins with, and what else it is called, as
    "yarn; ntk = ntk-aware; linear = pi, position interpolation"; case, hyphens, underscores and blanks do not matter.
    two: what has one name in papers and is several steps here. parts: of what a part may be asked for ("auto:75%"), by
    what stands before the number: its name, and the numbers that a tree's layers have of it. settings: what a recipe's
    step may set beside it, and the type of each.
    """

    name: str
    group: str
    place: int
    help: str
    metavar: str = ""
    words: str = ""
    two: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)
    settings: Mapping[str, type | UnionType] = field(default_factory=dict)

    @property
    def flag(self) -> bool:
        """Whether it takes no value."""
        return not self.metavar

    @property
    def spelled(self) -> str:
        """On the command line."""
        return spelled(self.name)

    def synonyms(self) -> dict[str, list[str]]:
        """The other names of each word of ours."""
        parts = (each.partition("=") for each in self.words.split(";") if each)
        return {ours.strip(): [name.strip() for name in more.split(",") if name] for ours, _, more in parts}

    def known(self) -> dict[str, str]:
        """Our word by each that is understood, squashed."""
        pairs = [(word, ours) for ours, more in self.synonyms().items() for word in (ours, *more)]
        return {squashed(word): ours for word, ours in (*pairs, *((word, word) for word in self.two))}


def spelled(name: str) -> str:
    """merge_lora -> --merge-lora."""
    return f"--{name.replace('_', '-')}"


def declared(path: Path) -> list[Option]:
    """The options that a file of swaps declares, of which numpy and all that swaps need is not imported: its `OPTIONS`,
    made of constants and of this module's names, without their `parts`, which are functions.
    """
    found = re.search(r"^OPTIONS = (\(.*?\))$(?=\n\S|\n*\Z)", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    if found is None:
        return []
    tree = ast.parse(found[1], str(path), "eval")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != "parts"]
    return list(eval(compile(tree, str(path), "eval"), globals()))  # noqa: S307 - our own file, which is imported next


def squashed(word: str) -> str:
    """A word without what people write differently."""
    return re.sub(r"[-_ ]", "", word).lower()


def guarantee_in_words(guarantee: str) -> str:
    """What people read: data says "retrained" of what is of no use until it is trained on."""
    return "needs training" if guarantee == "retrained" else guarantee
