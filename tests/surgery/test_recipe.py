"""Recipes: what is read and refused, numbers that depend on the model, what is recorded, and the same bytes again."""

import json
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers.families import CONFIGS, save_hf, spec_of
from hypothesis import given
from hypothesis import strategies as st

import gptkit
from gptkit.converter.manifest import check_manifest
from gptkit.errors import GptkitError, InvalidInput, SwapRefused, UsageError
from gptkit.surgery.recipe import FOLDER, plain, read_recipe, shipped, step_json
from gptkit.surgery.registry import Step, parts, swap_for

replace = msgspec.structs.replace


def written(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text)
    return path


CHAIN = """
name = "mine"
description = "Norms, then layers."
[[step]]
norm = "rmsnorm"
comment = "exact"
[[step]]
layers = "+1"
[[step]]
quantize = "int8"
blocks = "0-1"
"""


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_recipe_is_read(tmp_path: Path) -> None:
    text = (
        'description = "d"\n[[step]]\nhead-dim = 8\napproximate = true\n'
        '[[step]]\nmlp = "moe:4x2"\nsettings = { seed = 3 }\n[[step]]\ntie = true\n'
    )
    recipe = read_recipe(written(tmp_path, text))
    assert recipe.steps == (
        Step("head_dim", "8", None, True),
        Step("mlp", "moe:4x2", settings={"seed": 3}),
        Step("tie", ""),
    )
    assert (recipe.name, recipe.description) == ("my", "d")
    assert [step_json(step) for step in recipe.steps] == [
        {"head_dim": "8", "approximate": True},
        {"mlp": "moe:4x2", "settings": {"seed": 3}},
        {"tie": True},
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 3\n[[step]]\nnorm='rmsnorm'", "name must be a string"),
        ("nmae = 'x'\n[[step]]\nnorm='rmsnorm'", "unknown key 'nmae'"),
        ("norm = 'rmsnorm'", "unknown key 'norm'"),
        ("", "the recipe has no steps"),
        ("step = 3", "the recipe has no steps"),
        ("step = [3]", "the recipe has no steps"),
        ("[[step]]", "step 1 has no swap option"),
        ("[[step]]\nnorm='rmsnorm'\n[[step]]\nnrom='rmsnorm'", "step 2: unknown option 'nrom'\ndid you mean norm"),
        ("[[step]]\nnorm='rmsnorm'\nmlp='gated'", r"step 1 has 2 swap options \(norm, mlp\)"),
        ("[[step]]\nnorm='rmsnorm'\nblocks=3", "step 1: blocks must be text, not 3"),
        ("[[step]]\nnorm='rmsnorm'\napproximate='yes'", "step 1: approximate must be true or false"),
        ("[[step]]\nnorm='rmsnorm'\nsettings=1", "step 1: settings must be a table"),
        ("[[step]]\nnorm='rmsnorm'\nsettings={seed=1}", "step 1: norm has no setting 'seed'"),
        ("[[step]]\nmlp='moe:4x2'\nsettings={sed=1}", "mlp has no setting 'sed'\nknown: seed, drop_zero_bias"),
        ("[[step]]\nmlp='moe:4x2'\nsettings={seed=true}", "the setting seed must be a whole number, not True"),
        ("[[step]]\nnorm=true", "step 1: norm must be text or a whole number, not True"),
        ("[[step]]\nnorm=1.5", "norm must be text or a whole number"),
        ("[[step]]\nnorm=''", "norm must be text or a whole number"),
        ("[[step]]\ntie=false", "tie must be true, not False"),
        ("[[step]]\ntie='yes'", "tie must be true"),
        ("[[step]\n", "not valid TOML: "),
        ("[[step]]\nnorm='a'\nnorm='b'", "not valid TOML: "),
        ("sources = 3\n[[step]]\nnorm='rmsnorm'", "field sources has a value of the wrong type"),
        (
            "[sources]\n[calibration]\ntokens='x'\n[[step]]\nnorm='rmsnorm'",
            "recipe's field calibration has a value of the wrong type",
        ),
    ],
)
def test_what_is_no_recipe(text: str, words: str, hf: Path, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidInput, match=words) as caught:
        gptkit.swap(hf, tmp_path / "out", recipe=path)
    assert str(path) in caught.value.message
    assert sorted(each.name for each in tmp_path.iterdir()) == ["my.toml"]


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("[[step]]\nnorm='rmsnorm'\n[[step]]\nnorm='batchnorm'", UsageError, "step 2: --norm 'batchnorm' is unknown"),
        ("[[step]]\nnorm='rmsnorm'\n[[step]]\nnorm='rmsnorm'", SwapRefused, "step 2: .*all its norms are RMSNorm"),
        ("[[step]]\nlayers='0-1'\n[[step]]\nquantize='int8'\nblocks='1-2'", SwapRefused, "2: .*layer 2, but the model"),
        ("[[step]]\nlayers='0-9'", SwapRefused, "step 1: .*layer 9, but the model has only"),
        ("[[step]]\nattention='gqa:1/3'", SwapRefused, "step 1: 1/3 of 4 key-value heads is 1.33333"),
        ("[[step]]\nrotary_dim='50%'", SwapRefused, "step 1: .*no rotary dimensions"),
    ],
)  # fmt: skip
def test_a_step_that_is_impossible_is_named(
    text: str, kind: type[GptkitError], words: str, hf: Path, tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    for dry_run in (True, False):
        with pytest.raises(kind, match=words) as caught:
            gptkit.swap(hf, tmp_path / "out", recipe=path, dry_run=dry_run)
        assert caught.value.message.startswith(str(path)) and str(caught.value).startswith(str(path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["my.toml"]


def test_steps_of_the_call_are_numbered(hf: Path, tmp_path: Path) -> None:
    steps = [Step("norm", "rmsnorm"), Step("layers", "0-9")]
    with pytest.raises(SwapRefused, match=r"^step 2 \(--layers 0-9\): '0-9' names layer 9"):
        gptkit.swap(hf, tmp_path / "out", steps)


def test_no_such_recipe(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean llama-pro"):
        read_recipe("llama-por")
    with pytest.raises(UsageError, match="one of context-x4, dense-to-moe"):
        read_recipe("zzzzzz")
    with pytest.raises(UsageError, match=r"has no manifest.json"):
        read_recipe(hf)
    gptkit.convert(hf, tmp_path / "local")
    with pytest.raises(UsageError, match="was not written by gptkit swap"):
        read_recipe(tmp_path / "local")
    (tmp_path / "local" / "manifest.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"its manifest.json is damaged"):
        read_recipe(tmp_path / "local" / "gptkit.json")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(InvalidInput, match="not a UTF-8 text"):
        read_recipe(tmp_path / "latin.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * 2_000_000)
    with pytest.raises(InvalidInput, match="is too large for a recipe"):
        read_recipe(tmp_path / "large.toml")


# --- those that come along --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_are_what_the_registry_knows(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe.name == name and len(recipe.description) > 40
    for step in recipe.steps:
        assert swap_for(step.option, step.value)
    assert read_recipe(FOLDER / f"{name}.toml").steps == recipe.steps


def test_shipped_recipes_are_in_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "recipes/*.toml" in project["tool"]["setuptools"]["package-data"]["gptkit.surgery"]
    assert len(shipped()) == 7


# --- numbers that depend on the model ---------------------------------------------------------------------------------

LLAMA = spec_of(CONFIGS["llama"])


@pytest.mark.parametrize(
    ("option", "asked", "found"),
    [
        ("layers", "auto:75%", "auto:2"),  # 2.25 of 3
        ("layers", "+50%", "+2"),  # 1.5, rounded up
        ("layers", "+1%", "+1"),  # one at least
        ("attention", "gqa:1/2", "gqa:1"),
        ("attention", "gqa:3/2", "gqa:3"),
        ("attention", "mla:50%", "mla:40"),  # of 2 · 2 · 20
        ("heads", "2/1", "12"),
        ("head_dim", "120%", "24"),
        ("hidden", "1/2", "24"),
        ("intermediate", "150%", "108"),
        ("rotary_dim", "50%", "10"),
        ("context", "4/1", "1024"),
        ("vocab", "99.5%", "97"),
        ("layers", "0-1", "0-1"),
        ("attention", "gqa:2", "gqa:2"),
        ("vocab", "prune:1/2", "prune:1/2"),  # a file
        ("norm", "50%", "50%"),  # left to the swap to refuse
    ],
)
def test_parts_of_a_model(option: str, asked: str, found: str) -> None:
    assert plain(Step(option, asked, "0-1", True), LLAMA) == Step(option, found, "0-1", True)


@given(
    layers=st.integers(1, 9), above=st.integers(0, 400), below=st.integers(1, 40), kind=st.sampled_from(sorted(parts()))
)
def test_a_fraction_is_exact_or_refused(layers: int, above: int, below: int, kind: tuple[str, str]) -> None:
    spec = replace(LLAMA, blocks=LLAMA.blocks[:1] * layers)
    (whole,) = parts()[kind][1](spec)
    assert whole is not None
    option, before = kind
    wanted = Fraction(above, below) * whole
    if wanted.denominator == 1 and wanted >= 1:
        assert plain(Step(option, f"{before}{above}/{below}"), spec).value == f"{before}{wanted}"
    else:
        with pytest.raises(SwapRefused, match=f"{above}/{below} of {whole} "):
            plain(Step(option, f"{before}{above}/{below}"), spec)
    if not above:
        with pytest.raises(SwapRefused, match=f"0% of {whole} "):
            plain(Step(option, f"{before}0%"), spec)
        return
    share = int(plain(Step(option, f"{before}{above}%"), spec).value.removeprefix(before))
    assert share >= 1 and (abs(share - above * whole / 100) <= 0.5 or share == 1)


def test_layers_that_differ() -> None:
    first, *others = LLAMA.blocks
    narrow = first.replaced(feed_forward=replace(first.feed_forward, intermediate_size=8))
    with pytest.raises(SwapRefused, match=r"the layers have different numbers of .* \(8, 72\)"):
        plain(Step("intermediate", "50%"), replace(LLAMA, blocks=(narrow, *others)))


# --- what is recorded, and the same bytes again -----------------------------------------------------------------------


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_bytes())


def test_the_same_bytes_again(hf: Path, tmp_path: Path) -> None:
    path = written(tmp_path, CHAIN)
    first = gptkit.swap(hf, tmp_path / "first", recipe=path, dtype="float32")
    assert first.same_source is None
    second = gptkit.swap(hf, tmp_path / "second", recipe=tmp_path / "first")
    third = gptkit.swap(hf, tmp_path / "third", recipe=tmp_path / "second" / "gptkit.json")
    assert second.same_source and third.same_source
    assert bytes_of(tmp_path / "first") == bytes_of(tmp_path / "second") == bytes_of(tmp_path / "third")
    assert not check_manifest(tmp_path / "third")
    other = gptkit.swap(hf, tmp_path / "other", recipe=tmp_path / "first", dtype="bfloat16")
    assert other.same_source and other.dtype == "bfloat16"
    assert bytes_of(tmp_path / "other")["model.safetensors"] != bytes_of(tmp_path / "first")["model.safetensors"]


def test_another_source_is_noticed(hf: Path, tmp_path: Path) -> None:
    gptkit.swap(hf, tmp_path / "first", norm="rmsnorm", measured=False)
    save_hf(CONFIGS["gpt2"], tmp_path / "another", torch.bfloat16, seed=1)
    result = gptkit.swap(tmp_path / "another", tmp_path / "second", recipe=tmp_path / "first", measured=False)
    assert result.same_source is False
    assert gptkit.swap(hf, tmp_path / "x", recipe=tmp_path / "first", dry_run=True).same_source is None


def test_the_record(hf: Path, tmp_path: Path) -> None:
    path = written(tmp_path, CHAIN)
    result = gptkit.swap(hf, tmp_path / "out", recipe=path, fold="value-bias")
    found = manifest(tmp_path / "out")["swap"]
    assert found["recipe"]["name"] == "mine" and found["recipe"]["description"] == "Norms, then layers."
    assert found["recipe"]["step"] == [
        {"norm": "rmsnorm", "comment": "exact"},
        {"layers": "+1"},
        {"quantize": "int8", "blocks": "0-1"},
        {"fold": "value-bias"},
    ]
    assert set(found["recipe"]["sources"]) == {"model.safetensors", "config.json"}
    assert all(len(digest) == 64 for digest in found["recipe"]["sources"].values())
    assert [each["guarantee"] for each in found["steps"]] == ["exact", "exact", "approximate", "exact"]
    assert found["measured_steps"] == json.loads(json.dumps([each.as_json() for each in result.each]))
    again = read_recipe(tmp_path / "out")
    assert again.steps == result.recipe.steps if result.recipe else False
    assert [step.comment for step in again.steps] == ["exact", "", "", ""]


@pytest.mark.exhaustive
def test_every_step_of_a_chain_by_itself(hf: Path, tmp_path: Path) -> None:
    path = written(tmp_path, CHAIN)
    result = gptkit.swap(hf, tmp_path / "out", recipe=path, dtype="float64")
    norm, layers, rounded = result.each
    for exact in (norm, layers):
        assert exact.relative["float64"] <= 1e-12 and exact.kl < 1e-12 and exact.top1 == 1
    assert result.measured is not None
    # The exact ones cost nothing, so that all of the damage is the last one's.
    assert rounded.kl == pytest.approx(result.measured.kl, rel=1e-6) and rounded.kl > 1e-6
    assert not gptkit.swap(hf, tmp_path / "one", norm="rmsnorm").each
    assert len(gptkit.swap(hf, tmp_path / "asked", norm="rmsnorm", each_step=True).each) == 1
    assert not gptkit.swap(hf, tmp_path / "not", recipe=path, each_step=False).each
    assert not gptkit.swap(hf, tmp_path / "at-all", recipe=path, measured=False).each


def test_a_relative_step_is_recorded_as_it_was_asked(hf: Path, tmp_path: Path) -> None:
    result = gptkit.swap(hf, tmp_path / "out", layers="+67%", measured=False)
    assert result.chain.steps[0].value == "+2" and len(result.spec.blocks) == 5
    found = manifest(tmp_path / "out")["swap"]
    assert found["recipe"]["step"] == [{"layers": "+67%"}] and found["steps"][0]["layers"] == "+2"


@pytest.mark.exhaustive
def test_the_text_that_was_fitted_on(tmp_path: Path) -> None:
    """A sample's own text comes along; a file must be there as it was."""
    play = FOLDER.parents[1] / "samples" / "play.txt"
    text = tmp_path / "text.txt"
    text.write_bytes(play.read_bytes()[:30_000])
    options: dict[str, Any] = {"layers": "auto:3", "measured": False}
    gptkit.swap("sample:gpt2", tmp_path / "play", calibrate_tokens=300, **options)
    gptkit.swap("sample:gpt2", tmp_path / "again", recipe=tmp_path / "play", measured=False)
    assert bytes_of(tmp_path / "play") == bytes_of(tmp_path / "again")
    assert manifest(tmp_path / "play")["swap"]["recipe"]["calibration"]["tokens"] == 300
    gptkit.swap("sample:gpt2", tmp_path / "file", calibrate=text, calibrate_tokens=300, **options)
    gptkit.swap("sample:gpt2", tmp_path / "file-again", recipe=tmp_path / "file", measured=False)
    assert bytes_of(tmp_path / "file") == bytes_of(tmp_path / "file-again")
    text.write_bytes(play.read_bytes()[:20_000])
    for _ in range(2):
        with pytest.raises(UsageError, match="missing or has changed"):
            gptkit.swap("sample:gpt2", tmp_path / "no", recipe=tmp_path / "file", measured=False)
        text.unlink(missing_ok=True)
    gptkit.swap("sample:gpt2", tmp_path / "other", recipe=tmp_path / "file", calibrate=play, measured=False)
    assert not (tmp_path / "no").exists()
