"""Random weights: drawn as is said, the same for the same seed, and files that every other command takes."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command import call
from helpers.covering import few
from helpers.families import CONFIGS, spec_of
from helpers.generation import generate_ids
from helpers.hubserver import Hub
from helpers.trees import TREES
from typer.testing import Result

import gptkit
from gptkit.components import RGLRU, LinearAttention, Mamba, ModelSpec, Norm, TimeMixing
from gptkit.converter.manifest import check_manifest
from gptkit.converter.outline import outline
from gptkit.converter.tree import write_spec
from gptkit.errors import CheckpointError, GptkitError, UsageError
from gptkit.modules import Decoder, initialise
from gptkit.modules.initialise import DEVIATION, finite_logits, initialised, write_random

SPECS: dict[str, ModelSpec] = {**{name: spec_of(config) for name, config in CONFIGS.items()}, **TREES}

XIELU = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3)), "beta": 0.5, "eps": -1e-6}
"""Where its numbers start, so that both sides curve by 0.8 (2411.13010)."""


def arrays(spec: ModelSpec, seed: int = 0, dtype: str = "F32") -> dict[str, np.ndarray]:
    return {name: array for name, array, _ in initialised(spec, seed, dtype)}


@pytest.mark.parametrize("name", SPECS)
def test_as_is_said(name: str) -> None:
    """Every tensor of every tree, by its deviation and by its values."""
    spec = SPECS[name]
    found = arrays(spec)
    assert {name: array.shape for name, array in found.items()} == {p.name: p.shape for p in spec.parameters()}
    small = DEVIATION / math.sqrt(2 * len(spec.blocks))
    norms = {f"{path}.{name}": node for path, node in spec.nodes() if isinstance(node, Norm) for name in node.weights()}
    norms = {name: node for name, node in norms.items() if name.endswith("weight")}
    latent = [path for path, node in spec.nodes() if getattr(node, "latent", None) is not None]
    inside = tuple(f"{path}.{part}" for path in latent for part in ("experts.", "latent.down_proj"))
    linear = [path for path, node in spec.nodes() if isinstance(node, LinearAttention)]
    gates = {f"{path}.gate_proj.{name}": each for path in linear for name, each in (("weight", 0), ("bias", -3))}
    mamba = [path for path, node in spec.nodes() if isinstance(node, Mamba)]
    gates |= {f"{path}.dt_proj.bias": math.log(math.expm1(0.01)) for path in mamba}  # the mean of Mamba's steps
    decays = {f"{path}.decay": (0.001, 0.1) for path, node in spec.nodes() if isinstance(node, RGLRU)}
    time = [path for path, node in spec.nodes() if isinstance(node, TimeMixing)]
    decays |= {f"{path}.decay": (math.exp(-5), math.exp(3)) for path in time}
    gates |= {f"{path}.bonus": math.log(0.3) for path in time}
    drawn = {each.name for each in spec.parameters() if each.initial is None}  # sinks too
    for name, array in found.items():
        if name.endswith(("A_log", "dt_bias")):  # half-lives of all lengths
            size = array.shape[-1]
            least, most = (1, size) if name[: -len("A_log")] + "D" in found else (0.01, 16)
            logs = np.log(np.linspace(least, most, size))
            assert np.allclose(array, logs if name.endswith("A_log") else 1), name
            continue
        if name in decays:
            assert np.allclose(np.exp(array), np.linspace(*decays[name], array.size)), name
            continue
        if name not in drawn:
            zero = name.endswith(("bias", "altup.scale.weight"))
            starts = {"1 + weight": 0, "weight": 1}.get(getattr(norms.get(name), "gain", ""))
            begins = 0 if zero else 1 if name.endswith(("scale.weight", ".D")) else starts
            begins = 0.5 if name.endswith("_mix") else gates.get(name, begins)
            assert (array == np.float32(XIELU.get(name.rpartition(".activation.")[2], begins))).all(), name
            continue
        wrote = (
            "o_proj.weight",
            "down_proj.weight",
            "right_proj.weight",
            "embedding.projection.weight",
            "stream_proj.weight",
            "latent.up_proj.weight",
        )
        inner = ("v_down", "q_down", "blocks.shared.o_proj", "blocks.shared.down_proj")  # within what layers share
        writes = name.endswith(wrote) and not any(each in re.sub(r"\d+\.", "", name) for each in inner)
        writes &= not name.startswith(inside)
        expected, error = small if writes else DEVIATION, 5 / math.sqrt(array.size)
        assert abs(array.std() / expected - 1) < error and abs(array.mean() / expected) < error, name
    values = np.concatenate([array.ravel() for name, array in found.items() if name in drawn])
    assert len(np.unique(values)) > 0.9 * len(values)  # no tensor has another's values


def test_the_seed_the_name_and_the_shape_decide() -> None:
    spec = SPECS["gpt2"]
    first, again, other = arrays(spec), arrays(spec), arrays(spec, 1)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first if first[name].ndim > 1)
    fewer = arrays(spec_of({**CONFIGS["gpt2"], "n_layer": 1}))
    same = [name for name in fewer if "o_proj" not in name and "down_proj" not in name]
    assert all(np.array_equal(first[name], fewer[name]) for name in same)
    with pytest.raises(UsageError, match="not -1"):
        arrays(spec, -1)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "falcon"])
def test_nothing_is_known_before_training(name: str) -> None:
    """The loss of a model that has learnt nothing is the logarithm of its vocabulary."""
    model = gptkit.load(f"sample:{name}", random=True)
    ids = torch.randint(0, model.spec.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(float(loss) - math.log(model.spec.vocab_size)) < 0.1
    assert not model.training and finite_logits(model)


@pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float16, "float64"])
def test_dtypes(dtype: torch.dtype | str | None) -> None:
    model, plain = gptkit.load("sample:llama", dtype, random=True, seed=5), arrays(outline("sample:llama").spec, 5)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, torch.from_numpy(plain[name]).to(parameter.dtype))


def parameters(model: Decoder) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def test_no_weights_and_no_network_are_needed(hub: Hub, tmp_path: Path) -> None:
    """A preset, a config.json, a tree that no family has."""
    small = {**CONFIGS["qwen3"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(small))
    odd = write_spec(TREES["both"], tmp_path / "odd.json")
    assert gptkit.load(tmp_path / "config.json", random=True).spec == spec_of(small)
    assert gptkit.load(odd, random=True, offline=True).spec == TREES["both"]
    assert outline("smollm2-135m").path is None and hub.asked == []


# --- written ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_what_is_loaded(dtype: str, tmp_path: Path) -> None:
    written = write_random(outline("sample:llama"), tmp_path / "out", seed=7, dtype=dtype)
    assert not check_manifest(tmp_path / "out") and written.nbytes > 10**6
    there, here = gptkit.load(tmp_path / "out"), gptkit.load("sample:llama", dtype, random=True, seed=7)
    assert all(torch.equal(value, parameters(here)[name]) for name, value in parameters(there).items())
    opened = gptkit.open_checkpoint(tmp_path / "out")
    (record,) = opened.origin.history
    assert (record["seed"], record["dtype"], opened.origin.reference) == (7, dtype, "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@few(1)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bloom", "falcon-rw"])
def test_every_command_takes_it(name: str, tmp_path: Path) -> None:
    """To the family's own files, where transformers computes the same; ids are generated; a swap is exact."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    write_random(outline(str(tmp_path / "config.json")), tmp_path / "out")
    gptkit.convert(tmp_path / "out", tmp_path / "hf", to="hf:auto")
    assert gptkit.verify(tmp_path / "hf", mutations=False).passed
    assert len(generate_ids(gptkit.load(tmp_path / "out"), [1, 2, 3], 4)) == 4
    swapped = gptkit.swap(tmp_path / "out", tmp_path / "swapped", layers="+1")
    assert swapped.guarantee == "exact"


def test_a_disk_that_is_full_and_a_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = outline("sample:gpt2")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(UsageError):
        write_random(tree, tmp_path / "out")

    def broken(*_: object) -> object:
        raise CheckpointError("broken")

    monkeypatch.setattr(initialise, "_drawn", broken)
    with pytest.raises(CheckpointError):
        write_random(tree, tmp_path / "other")
    assert not (tmp_path / "other").exists()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_anything_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialise, "_drawn", lambda *_: pytest.fail("drawn"))
    with pytest.raises(GptkitError, match=r"llama-3\.1-405b: 405,853,388,800 parameters take 1,623\.4 GB as float32"):
        gptkit.load("llama-3.1-405b", random=True)


def test_available_memory_is_the_least_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"/proc/meminfo": ["MemTotal: 9 kB", "MemAvailable:     2000 kB"]}
    monkeypatch.setattr(initialise, "_lines", lambda path: told.get(str(path), []))
    assert initialise._available_memory() == 2_048_000
    told["/sys/fs/cgroup/memory.max"], told["/sys/fs/cgroup/memory.current"] = ["1000000"], ["900000"]
    assert initialise._available_memory() == 100_000
    told["/sys/fs/cgroup/memory.max"] = ["max"]
    assert initialise._available_memory() == 2_048_000
    told.clear()
    assert initialise._available_memory() is None
    initialise.require_memory(spec_of(CONFIGS["gpt2"]), "F32")


# --- on the command line ----------------------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return call(*arguments)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    done = run("load", "--random", "sample:gpt2", "--out", str(out), "--seed", "3", "--json")
    told = json.loads(done.stdout)
    assert (told["seed"], told["finite_logits"], told["out"]) == (3, True, str(out))
    assert told["parameters"] == sum(value.numel() for value in parameters(gptkit.load(out)).values())
    there = run("load", "--random", "sample:gpt2", "--out", str(out))
    assert there.exit_code == 2 and "exists" in there.stderr
    seed = run("load", "sample:gpt2", "--seed", "3")
    assert seed.exit_code == 2 and "--seed works only with --random" in seed.stderr
    monkeypatch.setattr(initialise, "_available_memory", lambda: 1000)
    large = run("load", "--random", "sample:gpt2")
    assert large.exit_code == 1 and "694,176 parameters take 2.8 MB as float32, but only 0.0 MB" in large.stderr
    # Writing needs no more than a tensor, and the forward pass is left out.
    written = run("load", "--random", "sample:gpt2", "--out", str(out), "--force")
    assert written.exit_code == 0
    assert "the forward pass was skipped: sample:gpt2: 694,176 parameters" in " ".join(written.stdout.split())
