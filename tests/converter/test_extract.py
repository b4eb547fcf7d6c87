"""extract: the language model of a model of images and text, by itself, computes what it did within."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from helpers.command import call
from helpers.covering import few
from helpers.unknown import COMPOSITES, composite
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gptkit.architectures import ARCHITECTURES
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.extract import extract
from gptkit.errors import InvalidInput, UsageError
from gptkit.parity.audit import audit

TEXTS = [(family, kind) for family in ARCHITECTURES.values() for kind in family.texts if kind.endswith("_text")]
_STATED_ELSEWHERE = {"model_type", "layer_types", "tie_word_embeddings", "use_sliding_window", "rope_parameters"}


@few(4)
@pytest.mark.parametrize("kind", COMPOSITES)
def test_the_language_model_computes_by_itself_what_it_did_within(kind: str, tmp_path: Path) -> None:
    model = composite(kind)
    model.save_pretrained(tmp_path / "whole", max_shard_size=100_000)
    done = extract("text", tmp_path / "whole", tmp_path / "text")
    alone, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(info.values()), info
    assert not any("vision" in name or "visual" in name for name in alone.state_dict())
    ids = torch.arange(6, 46).reshape(2, 20)
    with torch.inference_mode():
        assert torch.equal(alone.eval()(ids).logits, model(ids).logits)
    assert {*done.names, *done.left} == {
        name for file in (tmp_path / "whole").glob("*.safetensors") for name in load_file(file)
    }
    assert audit(tmp_path / "text").clean


@pytest.mark.parametrize(("family", "kind"), TEXTS, ids=[kind for _, kind in TEXTS])
def test_what_a_class_takes_where_nothing_is_stated_is_declared(family: object, kind: str) -> None:
    within, alone = (CONFIG_MAPPING[each]().to_dict() for each in (kind, family.name))
    other = {name for name, value in within.items() if value is not None and value != alone.get(name)}
    assert other - _STATED_ELSEWHERE <= family.texts[kind].keys()
    assert {name: within[name] for name in family.texts[kind]} == dict(family.texts[kind])


def test_what_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    composite("llava").save_pretrained(tmp_path / "whole")
    path = tmp_path / "whole" / "config.json"
    config = json.loads(path.read_text())

    def refused(why: str, **fields: object) -> None:
        path.write_text(json.dumps({**config, **fields}))
        with pytest.raises(InvalidInput, match=why):
            extract("text", tmp_path / "whole", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    text = config["text_config"]
    refused("does not support the model_type 'opera'", text_config={**text, "model_type": "opera"})
    refused("is not a multimodal model", text_config=None, vision_config=None)
    refused("quantised", quantization_config={"quant_method": "gptq"})
    refused("have names that llama does not have", text_config={**text, "num_hidden_layers": 1})
    refused("are missing", text_config={**text, "num_hidden_layers": 3})
    with pytest.raises(UsageError, match="'sight' is not a part"):
        extract("sight", tmp_path / "whole", tmp_path / "out")


def test_a_config_that_says_the_text_beside_the_images_is_one_too(tmp_path: Path) -> None:
    """As the files of Qwen2-VL were published: without a text_config, and positions of the type mrope."""
    composite("qwen2_vl").save_pretrained(tmp_path / "whole")
    extract("text", tmp_path / "whole", tmp_path / "text")
    path = tmp_path / "whole" / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    more = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    path.write_text(json.dumps({**text, **config, **more}))
    extract("text", tmp_path / "whole", tmp_path / "again")
    trees = [open_checkpoint(tmp_path / name) for name in ("text", "again")]
    assert trees[0].spec == trees[1].spec
    assert not any("rope" in note for each in trees for note in each.notes)


def test_the_command_says_what_it_wrote_and_left(tmp_path: Path) -> None:
    composite("llava").save_pretrained(tmp_path / "whole")
    said = call("extract", "text", tmp_path / "whole", tmp_path / "out")
    assert said.exit_code == 0
    assert "llama, 21 tensors" in said.stdout + said.stderr
    assert "vision_tower" in said.stdout + said.stderr
