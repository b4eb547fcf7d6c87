"""Commands that need a known family say what to do about a model of none: `extract text`, or `draft`."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.command import call
from safetensors.numpy import save_file

COMPOSITE = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}}
UNKNOWN = {"model_type": "nobody_knows", "hidden_size": 8}
OF_UNKNOWN_TEXT = {"model_type": "llava", "text_config": {"model_type": "nobody_knows"}}
WAYS_ON = [
    (COMPOSITE, "gptkit extract text MODEL OUT"),
    (UNKNOWN, "gptkit draft MODEL"),
    (OF_UNKNOWN_TEXT, "gptkit draft MODEL"),
]
COMMANDS = [
    "verify {model}",
    "verify sample:llama {model}",
    "swaps {model}",
    "convert {model} {out}",
    "swap {model} {out} --norm rmsnorm",
    "generate {model} hello",
    "eval {model} --data {text}",
]


@pytest.mark.parametrize(("config", "way_on"), WAYS_ON, ids=["composite", "unknown", "composite of unknown"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_way_on_is_named(command: str, config: dict[str, object], way_on: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    save_file({"a.weight": np.zeros((8, 8), np.float32)}, model / "model.safetensors")
    (tmp_path / "text.txt").write_text("To be, or not to be\n" * 100)
    places = {"model": model, "out": tmp_path / "out", "text": tmp_path / "text.txt"}
    run = call(*command.format(**places).split())
    assert run.exit_code == 4, run.output
    assert way_on in run.stderr
    assert "bug in gptkit" not in run.stderr
    assert not (tmp_path / "out").exists()
