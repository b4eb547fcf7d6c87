"""Calls that are wrong: what is said names the option as it was typed, and the help that says more."""

import pytest
from typer.testing import CliRunner

from gptkit.cli import app


def wrong(*args: str) -> str:
    done = CliRunner().invoke(app, args, prog_name="gptkit")
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("call", "said", "way_on"),
    [
        ("params gpt2 --jsn", "no such option '--jsn'. Did you mean '--json'?", "gptkit params -h"),
        ("params gpt2 --hml x", "no such option '--hml'. Did you mean '--html'?", "gptkit params -h"),
        ("params gpt2 --nothing-near", "no such option '--nothing-near'", "gptkit params -h"),
        ("compare gpt2 llama-7b --html", "option '--html' requires an argument", "gptkit compare -h"),
        ("params gpt2 --swap", "option '--swap' requires an argument", "gptkit params -h"),
        ("params gpt2 --json=1", "option '--json' does not take a value", "gptkit params -h"),
        ("recommend --goal quality", "missing option '--params'", "gptkit recommend -h"),
        ("--jsn", "no such option '--jsn'", "gptkit -h"),
        ("parms gpt2", "no such command 'parms'. Did you mean 'params'?", "gptkit -h"),
    ],
)
def test_the_help_that_says_more_is_that_of_the_command(call: str, said: str, way_on: str) -> None:
    assert wrong(*call.split()).splitlines() == [f"gptkit: {said}", f"  Run {way_on} for help."]


@pytest.mark.parametrize(("word", "called"), [("version", "gptkit --version"), ("help", "gptkit -h")])
def test_words_that_are_commands_elsewhere(word: str, called: str) -> None:
    assert wrong(word).splitlines() == [f"gptkit: no such command {word!r}", f"  Use {called} instead."]
    assert CliRunner().invoke(app, called.split()[1:]).exit_code == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("-n", "-5"), ("--top-p", "2"), ("--top-p", "-0.1"), ("--top-k", "0"), ("--temperature", "-1"), ("--seed", "-1")],
)
def test_a_number_out_of_range_names_its_option(option: str, value: str) -> None:
    assert f"'{option}'" in wrong("generate", "sample:gpt2", "a", option, value)


@pytest.mark.parametrize("option", ["--top-k", "--top-p"])
def test_a_filter_of_greedy_decoding_names_its_option(option: str) -> None:
    said = wrong("generate", "sample:gpt2", "a", "--temperature", "0", option, "1")
    assert said.startswith(f"gptkit: {option} has no effect at --temperature 0")


def test_ids_that_were_typed_are_not_blamed_on_a_tokenizer() -> None:
    said = wrong("generate", "sample:gpt2", "--ids", "1 600")
    assert "outside the vocabulary of 512 tokens: 600" in said and "0 to 511" in said and "tokenizer" not in said
