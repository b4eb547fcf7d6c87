"""Values of swaps in other people's spelling and words: understood for every option, or the nearest is suggested."""

import re
from pathlib import Path

import pytest

from gptkit.errors import UsageError
from gptkit.surgery.recipe import read_recipe
from gptkit.surgery.registry import Step, all_options, options, steps_of, swap_for
from gptkit.surgery.shapes import steps_from
from gptkit.surgery.swaps.folds import NAMES


def words_of(option: str) -> set[str]:
    """The fixed words that its values begin with: of "gqa:N" gqa, of "N" none; names of biases are values too."""
    forms = {swap.form.partition(":")[0] for swap in options()[option]}
    return {form for form in forms if re.fullmatch(r"[a-z][a-z0-9_-]*", form)} | (
        set(NAMES) if option == "drop" else set()
    )


FIXED = [(option, word) for option in options() for word in sorted(words_of(option))]


def filled(option: str, word: str) -> list[str]:
    """What is behind the word in each form that begins with it."""
    forms = [swap.form for swap in options()[option] if swap.form.partition(":")[0] == word]
    return [re.sub("[A-Z]+", "4", form.removeprefix(word)) for form in forms] or [""]


@pytest.mark.parametrize(("option", "word"), FIXED)
def test_case_and_hyphens_do_not_matter(option: str, word: str) -> None:
    spellings = [
        word,
        word.upper(),
        word.title(),
        word.replace("_", "-"),
        word.replace("-", "_"),
        word.replace("_", " "),
    ]
    for rest in filled(option, word):
        for spelling in spellings:
            step = Step(option, spelling + (rest if word.startswith("prune") else rest.upper()))
            assert step.value == word + rest, spelling
            assert swap_for(option, step.value).matches(word + rest)


def test_every_synonym_stands_for_a_value_that_there_is() -> None:
    for option, words in ((each.name, each.synonyms()) for each in all_options() if each.words):
        known = words_of(option) | ({"auto"} if option == "layers" else set())
        known |= {word for word in words if option == "quantize" and re.fullmatch("int[2-8]", word)}
        assert set(words) == known, option
        for word, more in words.items():
            for synonym in more:
                for spelling in (synonym, synonym.upper(), synonym.replace(" ", "-")):
                    assert Step(option, spelling).value == word


@pytest.mark.parametrize(
    ("option", "theirs", "ours"),
    [
        ("norm", "RMSNorm", "rmsnorm"),
        ("position", "RoPE", "rope"),
        ("position", "RoPE:1e4", "rope:1e4"),
        ("attention", "GQA:2", "gqa:2"),
        ("attention", "Multi-Query", "mqa"),
        ("rope_scaling", "YaRN:4", "yarn:4"),
        ("mlp", "MoE:8X2", "moe:8x2"),
        ("vocab", "prune:Tokens.txt", "prune:Tokens.txt"),
        ("merge_lora", "My-Adapter", "My-Adapter"),
    ],
)
def test_papers_words(option: str, theirs: str, ours: str) -> None:
    assert steps_of({option: theirs}) == [Step(option, ours)] == steps_from([f"{option}={theirs}"])


def test_a_name_of_two_steps(tmp_path: Path) -> None:
    two = [Step("mlp", "gated"), Step("activation", "silu")]
    assert steps_of({"mlp": "SwiGLU"}) == two == steps_from(["mlp=swiglu"])
    assert steps_of({"mlp": "GEGLU"}, blocks="1")[1] == Step("activation", "gelu", blocks="1")
    for name, word in ((option.name, word) for option in all_options() for word in option.two):
        assert len(steps_of({name: word})) == 2
    with pytest.raises(UsageError, match="--activation silu and --activation relu cannot be combined"):
        steps_of({"mlp": "swiglu", "activation": "relu"})
    (tmp_path / "one.toml").write_text("[[step]]\nmlp = 'SwiGLU'")
    (step,) = read_recipe(tmp_path / "one.toml").steps
    with pytest.raises(UsageError) as caught:  # a step of a recipe is one step, and its number is that of the file
        swap_for(step.option, step.value)
    assert caught.value.hint == "Request it as two steps: mlp = gated, then activation = silu"


@pytest.mark.parametrize(
    ("option", "typed", "meant"),
    [
        ("norm", "rmsnrm", "rmsnorm"),
        ("mlp", "swigl", "swiglu"),
        ("mlp", "moe", "moe:ExK"),
        ("attention", "gqa", "gqa:N"),
        ("rope_scaling", "Yarn", "yarn:FACTOR"),
        ("rope_pairs", "interleavd", "adjacent"),
    ],
)
def test_the_nearest_is_suggested(option: str, typed: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        steps_of({option: typed})
    assert str(caught.value.hint).startswith(f"did you mean {meant}? known: ")
