"""A package outside the tree: a norm, a mixer and a family of its own, found by its entry point, and every command.

Nothing of gptkit names it; what stands in `tidal/` is all there is of it.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import covering
from helpers.browser import system_browser
from helpers.command import call
from helpers.covering import exhaustive, few
from helpers.processes import gptkit as gptkit_alone

import gptkit
from gptkit import plugins
from gptkit.testing import (
    decoder_of,
    elements_land_once,
    fields_are_accounted_for,
    logits_agree,
    names_and_shapes_agree,
    probes,
    randomised,
    reference,
)

HERE = Path(__file__).parent
ROOT = Path(gptkit.__file__).parent
WORDS_OF_KINDS = pytest.mark.skipif(
    not (ROOT / "components" / "words.py").is_file(), reason="waits for the words that stand with their component"
)
NAMES = re.compile(r"tidal|scale_?norm|gated_?recurrence", re.IGNORECASE)


def run_alone(plugged: Path, *words: object) -> str:
    """What gptkit prints in a process that has the package installed."""
    done = gptkit_alone(*map(str, words), env={"PYTHONPATH": str(plugged), "COLUMNS": "100"}, cwd=plugged)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def plugged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with this one as pip leaves it: its files, and what its pyproject says of entry points."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(HERE / "tidal", site / "tidal", ignore=shutil.ignore_patterns("__pycache__"))
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in of.items()) for group, of in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site


@pytest.fixture(scope="module")
def here(plugged: Path) -> Iterator[Path]:
    """The folder, with the package in this process, found by its entry point, as long as the module's tests run; what
    it registered goes with it.
    """
    from gptkit import architectures, components
    from gptkit.converter import targets
    from gptkit.surgery import registry

    def forget() -> None:
        plugins._installed.cache_clear()
        plugins._import.cache_clear()

    before = [dict(each) for each in (architectures.ARCHITECTURES, architectures.BY_MODEL_TYPE, components.KINDS)]
    sys.path.insert(0, str(plugged))
    forget()
    try:
        plugins.load()
        assert "tidal" in sys.modules
        yield plugged
    finally:
        sys.path.remove(str(plugged))
        forget()
        for known, old in zip(
            (architectures.ARCHITECTURES, architectures.BY_MODEL_TYPE, components.KINDS), before, strict=True
        ):
            known.clear()
            known.update(old)
        targets.FORMATS.pop("tide")
        registry.PLUGINS.clear()
        for each in (registry._modules, registry.all_swaps, registry.all_options):
            each.cache_clear()


def run(here: Path, *words: object, ok: int = 0) -> str:
    """What gptkit prints in this process, which has the package installed."""
    with contextlib.chdir(here):
        done = call(*map(str, words), env={"COLUMNS": "100"})
    assert done.exit_code == ok, done.output
    return done.output


CONFIGS = (
    {},
    {"tie_word_embeddings": True, "num_hidden_layers": 3, "recurrence_size": 40, "intermediate_size": 100},
    {"num_attention_heads": 2, "norm_eps": 1e-3, "rope_theta": 500.0, "max_position_embeddings": 64},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, here) -> Path:
    """A checkpoint with random weights, as the family's own code saves it."""
    from tidal.family import TIDAL
    from tidal.reference import FIELDS

    made = tmp_path_factory.mktemp("model") / "m"
    made.mkdir()
    config = {"model_type": "tidal", "architectures": ["TidalForCausalLM"], "dtype": "float32", **FIELDS}
    (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = sharp(randomised(reference(TIDAL, {}))).state_dict()
    safetensors.torch.save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made


def sharp(model: torch.nn.Module) -> torch.nn.Module:
    """The model with gains such as training leaves: of √size."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".g"):
                parameter.mul_(8)
    return model


# --- the four proofs ---


def test_fields(here) -> None:
    from tidal.family import TIDAL
    from tidal.reference import FIELDS

    fields_are_accounted_for(TIDAL, CONFIGS, FIELDS)
    with pytest.raises(AssertionError, match="another"):
        fields_are_accounted_for(TIDAL, CONFIGS, [*FIELDS, "another"])


@pytest.mark.parametrize("config", CONFIGS)
def test_elements(here, config) -> None:
    from tidal.family import TIDAL

    elements_land_once(TIDAL, config)


@pytest.mark.parametrize("config", CONFIGS)
def test_names_and_shapes(here, config) -> None:
    from tidal.family import TIDAL

    with torch.device("meta"):
        theirs = {name: tuple(tensor.shape) for name, tensor in reference(TIDAL, config).state_dict().items()}
    names_and_shapes_agree(TIDAL, config, theirs)
    with pytest.raises(AssertionError):
        names_and_shapes_agree(TIDAL, config, {**theirs, "norm.g": (2,)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
def test_logits(here, config, dtype) -> None:
    from tidal.family import TIDAL

    model = sharp(randomised(reference(TIDAL, config, dtype)))
    decoder = decoder_of(TIDAL, config, model.state_dict())
    batches = [probe for length in (1, 7, 64) for probe in probes(length, 3, ("left", "right"), 97)]
    logits_agree(model, decoder, batches)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.5)
    with pytest.raises(AssertionError):
        logits_agree(model, decoder, batches)


# --- commands ---


FLAGS = pytest.mark.parametrize(
    "flags",
    [
        *([], ["--json"], ["--csv"], ["--by", "layer"], ["--explain"], ["--kv", 1000], ["--flops", "--context", 64]),
        *(["--memory", "--context", 64], ["--dtype", "float16"], ["--tp", 2], ["--pp", 2], ["--gpu", "24GB"]),
        *(
            ["--memory", "--batch", 2],
            ["--stored"],
            ["--kv", 64, "--kv-dtype", "int8"],
            ["--swap", "norm=equal-rmsnorm"],
        ),
        ["--html", "p.html"],
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)


@few(6)
@WORDS_OF_KINDS
@FLAGS
def test_params(here, folder, flags) -> None:
    assert run(here, "params", folder, *flags)


@WORDS_OF_KINDS
def test_in_a_process_that_finds_the_entry_point_itself(plugged, folder) -> None:
    told = run_alone(plugged, "params", folder)
    assert "recurrence" in told
    assert "180,361" in told
    assert "identical" in run_alone(plugged, "verify", folder, "--no-mutations")


@WORDS_OF_KINDS
def test_compare(here, folder) -> None:
    told = run(here, "compare", folder, "sample:llama")
    assert "ScaleNorm" in told


@WORDS_OF_KINDS
def test_show(here, folder) -> None:
    assert "ScaleNorm" in run(here, "show", folder)
    assert "gated recurrence" in run(here, "show", folder, "--layer", 1)


@WORDS_OF_KINDS
@pytest.mark.skipif(system_browser() is None, reason="no Chromium on the PATH")
def test_show_as_a_picture(here, folder, tmp_path) -> None:
    run(here, "show", folder, "--svg", tmp_path / "p.svg")
    assert "ScaleNorm" in (tmp_path / "p.svg").read_text()


@WORDS_OF_KINDS
def test_load(here, folder) -> None:
    assert "180,361" in run(here, "load", folder)


def test_there_and_back(here, folder, tmp_path) -> None:
    run(here, "convert", folder, tmp_path / "local", "--to", "local")
    run(here, "convert", tmp_path / "local", tmp_path / "back", "--to", "hf")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert "The same" in run(here, "diff", folder, tmp_path / "local")


def test_diff_finds_one_number(here, folder, tmp_path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    weights = safetensors.torch.load_file(other / "model.safetensors")
    weights["layers.1.recurrence.gate.weight"][0, 0] += 1
    safetensors.torch.save_file(weights, other / "model.safetensors", {"format": "pt"})
    assert "recurrence.gate_proj" in run(here, "diff", folder, other, ok=3)


def test_a_state_is_carried(here, folder) -> None:
    model = gptkit.load(str(folder), attention="eager")
    from helpers.generation import generate_ids

    from gptkit.modules import Cache

    ids = torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    cache = Cache(model.spec)
    with torch.inference_mode():
        whole = model(ids)
        parts = [model(ids[:, :5], cache=cache), *(model(ids[:, t : t + 1], cache=cache) for t in range(5, 40))]
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-4)
    assert cache.layers[1]["recurrence"].h.shape == (1, 96)
    prompt = ids[0, :8].tolist()
    recomputed = list(prompt)
    with torch.inference_mode():
        for _ in range(16):
            recomputed.append(int(model(torch.tensor([recomputed]))[0, -1].argmax()))
    assert generate_ids(model, prompt, 16) == recomputed[8:]


def test_verify(here, folder, tmp_path) -> None:
    told = run(here, "verify", folder)
    assert "identical to the last bit" in told
    made = re.search(r"(\d+) of (\d+) mistakes made on purpose were caught", told)
    assert made is not None
    assert made[1] == made[2]
    assert int(made[1]) > 10
    assert "identical to the last bit" in run(here, "verify", folder, "--stream")
    run(here, "convert", folder, tmp_path / "local")
    assert "identical" in run(here, "verify", folder, tmp_path / "local")


def test_verify_against_the_familys_own_code(here, folder) -> None:
    lines = ["import safetensors.torch", "from tidal.reference import Tidal", "class Port(Tidal):"]
    lines += ["    def forward(self, input_ids, attention_mask=None):"]
    lines += ["        return super().forward(input_ids, attention_mask).logits"]
    lines += ["def build():", "    model = Port({})"]
    lines += [f"    model.load_state_dict(safetensors.torch.load_file({str(folder / 'model.safetensors')!r}))"]
    (here / "tidal_port.py").write_text("\n".join([*lines, "    return model.eval()", ""]))
    assert "identical" in run(here, "verify", folder, "--against", "tidal_port:build")


@pytest.mark.exhaustive
def test_verify_names_the_first_component_that_parts(here, folder, tmp_path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    weights = safetensors.torch.load_file(other / "model.safetensors")
    weights["layers.1.recurrence.value.weight"].mul_(1.1)
    safetensors.torch.save_file(weights, other / "model.safetensors", {"format": "pt"})
    told = run(here, "verify", folder, other, ok=3)
    assert "recurrence" in told


def test_swaps_apply_or_refuse_by_name(here, folder, tmp_path) -> None:
    from gptkit.components import LayerNorm, RMSNorm
    from gptkit.errors import SwapRefused, UsageError
    from gptkit.surgery.facts import Assumed
    from gptkit.surgery.listing import values_of
    from gptkit.surgery.registry import Step, all_swaps, reshape

    spec = gptkit.open_checkpoint(str(folder)).spec
    assert RMSNorm not in {type(each) for each in spec.components()}
    applied, refused = [], {}
    for swap in all_swaps():
        for value in values_of(swap, spec):
            step = Step(swap.option, value)
            try:
                new = reshape(spec, step, Assumed()).spec
            except SwapRefused as error:
                refused[str(step)] = error.message
            except UsageError:  # it wants a text or a file, of which there is none here
                continue
            else:
                assert LayerNorm not in {type(each) for each in new.components()}
                applied.append(step)
    assert {"norm", "tie"} <= {step.option for step in applied}
    assert any("ScaleNorm" in message for message in refused.values())
    assert any("GatedRecurrence" in message for message in refused.values())
    if covering.quick:
        applied = [*{step.option: step for step in applied}.values()]
    for index, step in enumerate(applied):  # each is measured from the files that it writes
        gptkit.swap(str(folder), str(tmp_path / f"out{index}"), **{step.option: step.value})
    told = run(here, "swaps", folder)
    assert "equal-rmsnorm" in told
    assert "ScaleNorm" in told


def test_an_option_of_its_own(here, folder, tmp_path) -> None:
    """A swap's file declares the option that asks for it: on the command line, in its help, and of shapes alone."""
    told = run(here, "swap", folder, tmp_path / "wide", "--recurrence-width", "400")
    assert "exact swap" in told
    found = run(here, "swap", "--help")
    assert "─ Recurrence ─" in found and "How many channels a recurrence has." in found
    assert "recurrence-width" not in run_alone(HERE, "swap", "--help")
    assert "exact" in run(here, "params", folder, "--swap", "recurrence_width=400")
    assert "a width must be a whole number" in run(
        here, "swap", folder, tmp_path / "out", "--recurrence-width", "x", ok=2
    )


@WORDS_OF_KINDS
def test_a_format(here, tmp_path) -> None:
    (tmp_path / "small.tide").write_text(json.dumps({"hidden_size": 32, "num_hidden_layers": 2}))
    assert "hidden size 32" in run(here, "params", tmp_path / "small.tide")


def test_a_position(here) -> None:
    """A kind of position that the package brings: counted, drawn and computed where rotary ones stood."""
    from tidal.components import OneSlope
    from tidal.family import TIDAL

    from gptkit.analysis.costs import costs
    from gptkit.components import Rotary, from_json, to_json
    from gptkit.modules import Cache, Decoder
    from gptkit.report.structure import structure

    rotary = TIDAL.spec({})
    spec = rotary.mapped(lambda node, _: OneSlope(slope=0.5) if isinstance(node, Rotary) else node)
    assert from_json(to_json(spec)) == spec
    assert costs(spec) is not None
    assert "one slope" in repr(structure(spec))
    model, plain = (Decoder(each, attention="eager").eval() for each in (spec, rotary))
    randomised(model)
    plain.load_state_dict(model.state_dict())
    ids = torch.arange(12)[None]
    cache = Cache(spec)
    with torch.inference_mode():
        whole = model(ids)
        parts = torch.cat([model(ids[:, t : t + 1], cache=cache) for t in range(12)], dim=1)
        assert torch.allclose(whole, parts, atol=1e-5)
        assert not torch.allclose(whole, plain(ids), atol=1e-3)
        fused = Decoder(spec).eval()
        fused.load_state_dict(model.state_dict())
        assert torch.allclose(whole, fused(ids), atol=1e-5)


# --- where plugins come from ---


def test_it_is_named_in_no_product_file() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.toml", "*.json"], cwd=ROOT, capture_output=True, text=True)
    product = [name for name in listed.stdout.split() if not name.startswith(("tests/", "docs/"))]
    assert len(product) > 100
    assert [name for name in product if NAMES.search((ROOT / name).read_text())] == []


@exhaustive
@WORDS_OF_KINDS
def test_by_name(tmp_path, folder) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    for words, extra in ((["--plugin", "tidal"], {}), ([], {"GPTKIT_PLUGINS": "tidal"})):
        command = [sys.executable, "-m", "gptkit", *words, "params", str(folder)]
        assert subprocess.run(command, env={**env, **extra}, capture_output=True).returncode == 0
    unknown = subprocess.run(
        [sys.executable, "-m", "gptkit", "load", str(folder)], env=env, capture_output=True, text=True
    )
    assert unknown.returncode == 4
    assert "tidal" in unknown.stderr
    counted = subprocess.run([*unknown.args[:3], "params", str(folder)], env=env, capture_output=True, text=True)
    assert (counted.returncode, "by names" in counted.stdout) == (0, True), counted.stderr


def test_one_that_fails_is_told_and_ignored(tmp_path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such moon')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "GPTKIT_PLUGINS": "broken, missing"}
    command = [sys.executable, "-m", "gptkit", "--plugin", "broken", "params", "gpt2"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "gptkit: the plugin broken is ignored: RuntimeError: no such moon",
        "gptkit: the plugin missing is ignored: ModuleNotFoundError: No module named 'missing'",
    ]
    assert "gpt2" in done.stdout


def test_counting_imports_no_torch(plugged, folder) -> None:
    code = f"import sys, gptkit\ngptkit.params({str(folder)!r})\nprint('torch' in sys.modules, 'tidal' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(plugged)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
