"""An option that is given twice applies in order or is refused: every option of every command, as the app has them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gptkit import swap
from gptkit.cli import app
from gptkit.errors import UsageError, meant
from gptkit.surgery.registry import all_options, option_of, options, steps_of
from gptkit.surgery.shapes import steps_from

ROOT: Any = typer.main.get_command(app)


def _every_option() -> Iterator[Any]:
    """(name of the command, command, option) for the app itself and for each of its commands."""
    for name, each in [("", ROOT), *ROOT.commands.items()]:
        context = each.make_context(name or "gptkit", [], resilient_parsing=True)
        for option in each.get_params(context):
            if option.param_type_name == "option":
                yield pytest.param(name, each, option, id=f"{name or 'gptkit'}-{option.name}")


EVERY_OPTION = list(_every_option())


def twice(option: Any, spelled: str) -> list[str]:
    return [spelled, spelled] if option.is_flag or option.count else [spelled, "1", spelled, "2"]


@pytest.mark.parametrize(("name", "command", "option"), EVERY_OPTION)
def test_given_twice_it_gathers_or_is_refused(name: str, command: Any, option: Any) -> None:
    """An option that gathers its values has all of them, in order. Any other names itself and is refused with code 2,
    before anything is read: no argument of the command is given here.
    """
    for spelled in (*option.opts, *option.secondary_opts):
        if option.multiple or option.count:
            context = command.make_context(name or "gptkit", twice(option, spelled), resilient_parsing=True)
            given = context.params[option.name]
            assert given == 2 if option.count else [float(str(each)) for each in given] == [1, 2]
            continue
        done = CliRunner().invoke(app, [*([name] if name else []), *twice(option, spelled)], prog_name="gptkit")
        assert done.exit_code == 2 and done.stdout == "", done.output
        assert "was given 2 times" in done.stderr and f"'{option.opts[0]}'" in done.stderr, done.stderr


def test_on_and_off_at_once_is_refused() -> None:
    done = CliRunner().invoke(app, ["diff", "a", "b", "--rank", "--no-rank"], prog_name="gptkit")
    assert done.exit_code == 2 and "'--rank'" in done.stderr


@pytest.mark.parametrize("option", list(options()))
def test_a_swap_asked_for_twice_is_two_steps(option: str) -> None:
    """As a recipe's two steps are, in the order given, on the command line and with --swap of params and compare."""
    known = option_of(option)
    assert known is not None
    values = ["", ""] if known.flag else ["first", "second"]
    forms = [swap.form for swap in options()[option]]
    if not known.flag and not any(form.isupper() for form in forms):  # no form that takes any word
        values = ["".join(digit if letter.isupper() else letter for letter in forms[0]) for digit in "78"]
    steps = steps_of({option: values})
    assert [(step.option, step.value) for step in steps] == [(option, value) for value in values]
    assert steps == steps_from([f"{option}={value}" if value else option for value in values])


def test_every_option_of_a_swap_may_be_repeated() -> None:
    found = {option.values[2].name: option.values[2] for option in EVERY_OPTION if option.values[0] == "swap"}
    for option in all_options():
        assert found[option.name].count if option.flag else found[option.name].multiple


def test_the_order_of_the_values_is_the_order_of_the_steps(tmp_path: Path) -> None:
    call = ["swap", "sample:gpt2", str(tmp_path / "out"), "--layers", "0-2", "--layers", "0-1", "--no-measure"]
    done = CliRunner().invoke(app, [*call, "--approximate"], prog_name="gptkit")
    assert done.exit_code == 0, done.output
    python = swap("sample:gpt2", tmp_path / "again", layers=["0-2", "0-1"], approximate=True, measured=False)
    steps = swap("sample:gpt2", tmp_path / "last", layers="0-1", approximate=True, measured=False)
    for name in ("out", "again", "last"):
        assert (tmp_path / name / "model.safetensors").read_bytes() == (
            tmp_path / "last/model.safetensors"
        ).read_bytes()
    assert len(python.spec.blocks) == len(steps.spec.blocks) == 2
    backwards = CliRunner().invoke(app, [*call[:2], str(tmp_path / "x"), "--layers", "0-1", "--layers", "0-2"])
    assert backwards.exit_code == 1 and "step 2 (--layers 0-2)" in backwards.stderr and not (tmp_path / "x").exists()


def test_two_options_that_ask_for_one_thing_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be combined"):
        steps_of({"mlp": "swiglu", "activation": "gelu"})


@pytest.mark.parametrize(("name", "command", "option"), EVERY_OPTION)
def test_a_slip_in_an_option_is_understood(name: str, command: Any, option: Any) -> None:
    """With one letter lost, in a long name, the suggestion is the option itself, or one that is as near."""
    for spelled in [each for each in option.opts if each.startswith("--") and len(each) > 7]:
        done = CliRunner().invoke(app, [*([name] if name else []), spelled[:4] + spelled[5:]], prog_name="gptkit")
        assert "Did you mean '--" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "word",
    ["prune", "distill", "freeze", "expand", "rank", "depth", "merge-experts", "slice", "sparsity", "rename", "bits"],
)
def test_another_word_is_not_taken_for_an_option(word: str) -> None:
    """`--prune` is no slip of `--untie`: a word that is only a little alike gets no suggestion."""
    done = CliRunner().invoke(app, ["swap", "a", "b", f"--{word}", "x"], prog_name="gptkit")
    assert done.exit_code == 2 and "Did you mean" not in done.stderr, done.stderr
    assert meant(word, [option.name for option in all_options()]) is None
