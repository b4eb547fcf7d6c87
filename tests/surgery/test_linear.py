"""Linear attention in attention's place: what is carried over, what is fitted, what is refused, what training gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.covering import exhaustive
from helpers.families import CONFIGS, save_hf, spec_of

import gptkit
from gptkit.architectures import ARCHITECTURES
from gptkit.architectures.obstacles import express
from gptkit.components import LinearAttention
from gptkit.errors import SwapRefused
from gptkit.surgery.base import StoredModel
from gptkit.surgery.chain import chain
from gptkit.surgery.fits.text import read_text
from gptkit.surgery.measure import measure
from gptkit.surgery.registry import Step
from gptkit.surgery.shapes import swapped
from gptkit.training.heal import heal

PLAY = Path(gptkit.__file__).parent / "samples" / "play.txt"


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_what_was_there_is_carried_over(name: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path, torch.bfloat16)
    source = gptkit.open_checkpoint(tmp_path)
    done = chain(source, [Step("attention", "linear", blocks="1", approximate=True)])
    old, new = StoredModel(source), done.models[-1]
    assert done.guarantee == "retrained" and new.spec.blocks[0] == old.spec.blocks[0]
    assert isinstance(new.spec.blocks[1].mixer("recurrence"), LinearAttention)
    gates = {f"blocks.1.recurrence.gate_proj.{each}": value for each, value in (("weight", 0.0), ("bias", -3.0))}
    for parameter in new.spec.parameters():
        if parameter.name in gates:
            assert (new.wide(parameter.name) == gates.pop(parameter.name)).all()
            continue
        before = old.tensor(parameter.name.replace(".recurrence", ".attention", 1))[0]
        assert new.tensor(parameter.name)[0].tobytes() == before.tobytes(), parameter.name
    assert not gates


def test_a_text_brings_it_nearer() -> None:
    source = gptkit.open_checkpoint("sample:llama")
    text, found = read_text(source, None, 256), []
    for plain in (False, True):
        done = chain(source, [Step("attention", "linear", "3", plain)], text=lambda: text)
        ids = text.held_out[-256:]
        found.append(measure(done.against, done.models[-1], promise=done.promise, text=ids, dtypes=("float32",)))
    fitted, alone = (each.kl_text for each in found)
    assert fitted is not None and alone is not None and 2 * fitted < alone


def test_no_family_has_it() -> None:
    done = swapped(spec_of(CONFIGS["llama"]), [Step("attention", "linear", "1")])
    found = express(ARCHITECTURES["qwen3_next"], done.spec)
    assert found.sentences == ["qwen3_next has no blocks.1.recurrence (LinearAttention)"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bloom", "layer 0: linear attention supports only rotary positions"),
        ("mistral", "layer 0: the component Attention uses window, which LinearAttention does not support"),
        ("deepseek_v3", "layer 0 has no softmax attention to replace: it has attention (LatentAttention)"),
        ("qwen3_next", "layer 0 has no softmax attention to replace: it has recurrence (GatedDeltaNet)"),
        ("gpt_oss", ", which LinearAttention does not support"),
        ("gemma2", ", which LinearAttention does not support"),
    ],
)
def test_what_it_cannot_be_made_of(name: str, words: str) -> None:
    with pytest.raises(SwapRefused) as refused:
        swapped(spec_of(CONFIGS[name]), [Step("attention", "linear")])
    assert words in refused.value.message


@exhaustive
def test_healing_takes_documents_as_one_text(tmp_path: Path) -> None:
    gptkit.swap("sample:llama", tmp_path / "out", attention="linear", blocks="3", approximate=True)
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(PLAY.read_text()[number * 4000 :][:4000])
    texts = [tmp_path / "0.txt", tmp_path / "1.txt"]
    budget: dict[str, Any] = {
        "tokens": 4 * 256,
        "context": 64,
        "batch": 256,
        "held_out": 0.1,
        "beside": False,
        "local": 0.25,
    }
    done = heal(tmp_path / "out", "sample:llama", texts, tmp_path / "healed", **budget)
    assert done.healed.kl < done.start.kl and done.local == (3,)


@pytest.mark.slow
def test_training_gives_most_of_it_back(tmp_path: Path) -> None:
    gptkit.swap("sample:llama", tmp_path / "out", attention="linear", blocks="1,3")
    done = heal(tmp_path / "out", "sample:llama", [PLAY], tmp_path / "healed", tokens=200_000)
    assert done.recovered is not None and done.recovered > 0.5
    assert done.floor is not None and done.floor.kl > 4 * done.healed.kl
    assert max(done.healed.perplexities) < 1.1 * done.original.perplexity
