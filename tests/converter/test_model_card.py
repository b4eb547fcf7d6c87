"""The card of a healed model, made from a gptkit.json that anyone may have written."""

import json
from typing import Any

import pytest
from helpers.covering import few

from gptkit.converter.model_card import model_card
from gptkit.converter.tree import Origin
from gptkit.errors import ConfigError

HELD = {"kl": 0.5, "loss": 2.0}
HEALED: dict[str, Any] = {
    "tokens": 1000,
    "train": "all",
    "trained": 50,
    "seeds": 1,
    "recovered": 0.5,
    "original": {"kl": 0.0, "loss": 1.0},
    "start": HELD,
    "healed": {**HELD, "runs": [HELD], "kl_spread": 0.0},
    "control": None,
}
HOSTILE = (
    "org/name\nlicense: evil",
    "org/name: evil",
    "org/name #",
    "---\nlicense: evil\n---",
    "a`\n\n# pwned\n",
    "`` ` ```",
    "<script>alert(1)</script>",
    "org/<img src=x>",
    "[x](javascript:alert(1))",
    "a|b|c",
    "\x1b[2J\x07",
    "\u202eevil\u2066",
    "a\r\n\u2028\u0085# pwned",
    "&lt;script&gt;",
    "../../etc",
    "~/x/y",
    "x" * 10**6,
    "",
    " ",
)


def card(reference: str | None = "org/name", revision: str | None = None, *history: dict[str, Any]) -> str:
    made = model_card(Origin(reference=reference, revision=revision, history=(*history, {"healed": HEALED})))
    assert made is not None
    return made.decode()


PLAIN = card("org/name", "main", {"swap": "norm", "norm": "rmsnorm", "guarantee": "exact"})


def test_what_a_card_says() -> None:
    front = "library_name: transformers\nbase_model: org/name\nbase_model_relation: finetune\ntags:\n- gptkit\n"
    assert PLAIN.startswith(f"---\n{front}---\n\n# org/name, changed and healed\n")
    assert "1. `norm = rmsnorm`: exact\n2. healed on 1,000 tokens; trained: all (50 parameters)" in PLAIN
    assert "Made of `org/name` at `main`" in PLAIN and "50.0 % of the KL divergence is gone" in PLAIN
    assert "| changed | 0.5000 |  | 2.0000 | 7.39 |" in PLAIN


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("field", ["reference", "revision", "swap", "value", "guarantee", "train"])
def test_no_string_leaves_its_place(field: str, text: str) -> None:
    """Front matter, headings and lines stay those of a plain card: nothing of the text is outside a span of code."""
    step = {"swap": "norm", "norm": "rmsnorm", "guarantee": "exact"}
    reference, revision, healed = "org/name", "main", dict(HEALED)
    if field == "reference":
        reference = text
    elif field == "revision":
        revision = text
    elif field == "train":
        healed["train"] = text
    else:
        step[{"value": "norm"}.get(field, field)] = text
    found = card(reference, revision, step, {"healed": healed})
    body = found.split("---\n", 2)
    known = "base_model: org/name\nbase_model_relation: finetune\n"
    assert body[1] in [f"library_name: transformers\n{base}tags:\n- gptkit\n" for base in (known, "")]
    assert all(c.isprintable() or c == "\n" for c in found) and "<" not in found and "](" not in outside_code(found)
    assert len(found) < 5000
    lines, plain = found.splitlines(), card("org/name", "main", step, {"healed": HEALED}).splitlines()
    assert sum(line.startswith("#") for line in lines) == sum(line.startswith("#") for line in plain)
    assert abs(len(lines) - len(plain)) <= 2
    assert all(line.count("`") % 2 == 0 for line in lines)


def outside_code(text: str) -> str:
    return "".join(text.split("`")[::2])


ODD: tuple[Any, ...] = (
    None,
    "x",
    [],
    {},
    [1],
    True,
    {"kl": "x"},
    {"kl": 1},
    10**400,
    {"kl": [], "loss": {}},
    HELD | {"runs": 5},
)


@few(6)
@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("field", [None, *HEALED, "floor", "unknown"])
def test_an_odd_record_is_refused_or_shown(field: str | None, odd: Any) -> None:
    record = odd if field is None else {**HEALED, field: odd}
    message = ""
    try:
        model_card(Origin(history=({"healed": record},)))
    except ConfigError as error:
        message = str(error)
    assert len(message) < 500 and message.count("\n") <= 1
    if field is None or (field in ("tokens", "train", "seeds") and type(odd) is not type(HEALED[field])):
        assert "gptkit.json: an entry of history with the key healed is not valid" in message


def test_nothing_healed_has_no_card() -> None:
    assert model_card(Origin(history=({"swap": "norm"},))) is None
    assert json.dumps(HEALED)
