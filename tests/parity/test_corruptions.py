"""Corruptions of every kind, each with an edit of the tree beside that excuses nothing: none passes."""

import json
import random
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import covering
from helpers.edited import Tensors, setting, with_spec
from helpers.families import CONFIGS, save_hf

import gptkit
from gptkit.errors import GptkitError
from gptkit.parity.verify import Verification, verify

Draw = random.Random

SMALL = {"vocab_size": 700, "num_hidden_layers": 2, "n_layer": 2}
NAMES = ("llama", "gpt2", "gpt2-untied", "qwen2", "qwen3", "bloom", "falcon-40b", "falcon-rw", "mixtral")
MODELS: dict[str, dict[str, Any]] = {
    name: {**CONFIGS[name], **{key: value for key, value in SMALL.items() if key in CONFIGS[name]}} for name in NAMES
}
MODELS["mistral"] = {**CONFIGS["mistral-default-window"], "vocab_size": 700, "max_position_embeddings": 8192}

# --- edits of the tree ------------------------------------------------------------------------------------------------

OTHERWISE = {"gelu_new": "gelu_tanh", "gelu_tanh": "gelu_bloom", "gelu_bloom": "gelu_new"}
EDITS: dict[str, Callable[[Any], None]] = {
    "context_length": setting(context_length=lambda length: (length or 100) + 1),
    "cast": setting(
        cast=lambda cast: {"before_weight": "after_weight", "after_weight": "before_weight"}.get(cast, cast)
    ),
    "activation": setting(activation=lambda name: OTHERWISE.get(name, name)),
    "kv_expansion": setting(kv_expansion=lambda how: "repeat" if how == "projection" else "projection"),
    "fused": setting(fused=lambda fused: not fused),
    "arithmetic": setting(arithmetic=lambda how: "matmul_add" if how == "linear" else "linear"),
    "softmax": setting(softmax=lambda how: "input" if how == "float32" else "float32"),
    "rounding": setting(rounding=lambda how: {"float32": "bfloat16", "bfloat16": "float32"}.get(how, how)),
    "window": setting(window=lambda window: 5000 if window is None or window > 1000 else window),
    "base": setting(base=lambda base: base * (1 + 1e-8)),
    "eps": setting(eps=lambda eps: eps * (1 + 1e-9)),
    "scale": setting(scale=lambda scale: None if scale is None else scale * (1 + 1e-9)),
}

# --- corruptions of a tensor ------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim > 1 else tensor[:, None]


def garbage_row(tensors: Tensors, name: str, draw: Draw) -> None:
    rows = rows_of(tensors[name])
    noise = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(draw.randrange(2**31)))
    rows[draw.randrange(len(rows))] = noise.to(rows)


def garbage_column(tensors: Tensors, name: str, draw: Draw) -> None:
    columns = rows_of(tensors[name]).T
    columns[draw.randrange(len(columns))] *= -1.5


def two_rows_exchanged(tensors: Tensors, name: str, draw: Draw) -> None:
    rows = rows_of(tensors[name])
    a, b = draw.sample(range(len(rows)), 2)
    rows[[a, b]] = rows[[b, a]]


def rows_shifted(tensors: Tensors, name: str, draw: Draw) -> None:
    tensors[name] = tensors[name].roll(draw.choice((-1, 1)), 0)


def cut_off(tensors: Tensors, name: str, draw: Draw) -> None:
    rows = rows_of(tensors[name])
    rows[draw.randrange(len(rows)) :] = 0


def one_bit(tensors: Tensors, name: str, draw: Draw) -> None:
    """Of one value, the sign and what makes infinities aside."""
    values = bits(tensors[name]).reshape(-1)
    values[draw.randrange(len(values))] ^= 1 << draw.randrange(30)


def one_sign(tensors: Tensors, name: str, draw: Draw) -> None:
    values = tensors[name].reshape(-1)
    values[draw.randrange(len(values))] *= -1


def a_little_larger(tensors: Tensors, name: str, draw: Draw) -> None:
    tensors[name] *= 1 + 10 ** -draw.uniform(1, 6)


def of_another_tensor(tensors: Tensors, name: str, draw: Draw) -> None:
    others = [each for each in tensors if each != name and tensors[each].shape == tensors[name].shape]
    if others:
        other = draw.choice(others)
        tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()


def rounded(tensors: Tensors, name: str, draw: Draw) -> None:
    tensors[name] = tensors[name].bfloat16().float()


CORRUPTIONS = (
    garbage_row,
    garbage_column,
    two_rows_exchanged,
    rows_shifted,
    cut_off,
    one_bit,
    one_sign,
    a_little_larger,
    of_another_tensor,
    rounded,
)


class Folders:
    """Each model as HF files and in gptkit's own format, and with each edit that it has a field for; made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pair(self, model: str) -> tuple[Path, Path]:
        hf, local = self.folder / model / "hf", self.folder / model / "local"
        if not local.exists():
            save_hf(MODELS[model], hf)
            gptkit.convert(hf, local)
        return hf, local

    def edited(self, model: str, edit: str) -> Path:
        """The tree after an edit; the tree itself where it changes nothing."""
        _, local = self.pair(model)
        out = self.folder / model / edit
        if not out.exists():
            with_spec(local, out, EDITS[edit])
        same = json.loads((out / "gptkit.json").read_text()) == json.loads((local / "gptkit.json").read_text())
        return local if same else out

    def corrupted(self, model: str, edit: str, draw: Draw) -> tuple[Path, str]:
        """Of one tensor, and what it is."""
        source, out = self.edited(model, edit), self.folder / model / "corrupted"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(source, out)
        before = safetensors.torch.load_file(source / "model.safetensors")
        while True:
            name, change = draw.choice(sorted(before)), draw.choice(CORRUPTIONS)
            tensors = {each: tensor.clone() for each, tensor in before.items()}
            change(tensors, name, draw)
            finite = all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
            changed = any(not torch.equal(bits(before[each]), bits(tensor)) for each, tensor in tensors.items())
            if finite and changed:
                break
        tensors = {each: tensor.contiguous() for each, tensor in tensors.items()}
        safetensors.torch.save_file(tensors, out / "model.safetensors")
        return out, f"{change.__name__} of {name}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("corruptions"))


quick: Callable[..., Verification] = partial(verify, mutations=False, bisected=False, damaged=False)


def none_passes(folders: Folders, cases: Iterable[int]) -> None:
    models, edits = sorted(MODELS), sorted(EDITS)
    for case in cases:
        model, edit = models[case % len(models)], edits[case // len(models) % len(edits)]
        folder, what = folders.corrupted(model, edit, Draw(case))
        try:
            found = quick(folders.pair(model)[0], folder)
        except GptkitError:
            continue  # logits that overflow, say
        assert found.bytes is not None and found.bytes.required and found.bytes.different, (case, model, edit, what)
        assert not found.passed and found.exit_code == 3, (case, model, edit, what)


def test_no_corruption_passes_beside_an_edit(folders: Folders) -> None:
    """Every model, edit and kind of corruption is among them."""
    none_passes(folders, [1, 7, *range(8, 120, 14)] if covering.quick else range(0, 120, 3))


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(20))
def test_none_of_two_thousand_corruptions_passes(hundred: int, folders: Folders) -> None:
    none_passes(folders, range(100 * hundred, 100 * hundred + 100))


@pytest.mark.parametrize("edit", ["context_length", "cast", "window", "base"])
@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_an_edit_alone_passes_or_says_up_to_where(model: str, edit: str, folders: Folders) -> None:
    found = quick(folders.pair(model)[0], folders.edited(model, edit))
    assert found.verdict in ("identical", "equal")
    assert found.bytes is not None and not found.bytes.different
    assert found.passed == (found.up_to is None) == (edit not in ("window", "base"))
