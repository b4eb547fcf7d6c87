"""The card holds what a reader needs to repeat and trust a verification."""

import hashlib
import json
import shlex
from dataclasses import replace
from pathlib import Path

from helpers.command import call

from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.parity.card import card, command, markdown
from gptkit.parity.verify import resolved, verify

SAMPLE = Path(__file__).parents[2] / "samples" / "llama"


def test_a_card_says_what_was_checked(tmp_path):
    convert("sample:llama", tmp_path / "local")
    run = call("verify", "sample:llama", str(tmp_path / "local"), "--card", str(tmp_path / "card"))
    assert run.exit_code == 0, run.output
    data = json.loads((tmp_path / "card.json").read_text())
    assert data["verdict"] == {"function": "identical", "bytes": "equal", "passed": True}
    digest = hashlib.sha256((SAMPLE / "model.safetensors").read_bytes()).hexdigest()
    assert data["checkpoints"]["model"]["sha256"] == {"model.safetensors": digest}
    assert data["mutations"]["tried"] == len(data["mutations"]["caught"]) >= 10
    assert set(data["versions"]) == {"gptkit", "transformers", "torch", "python"}
    assert data["command"].startswith("gptkit verify sample:llama")
    page = (tmp_path / "card.md").read_text()
    assert "identical to transformers to the last bit" in page
    assert digest in page
    assert data["command"] in page
    # The command repeats it.
    assert call(*data["command"].split()[1:], "-q").exit_code == 0


def test_the_command_repeats_everything_that_was_asked():
    prompt = '--long \'tis; "so"'
    asked = {"long": True, "stream": True, "mutations": False, "allow_pickle": True, "allow_extra": True}
    result = verify("sample:llama", "sample:llama", dtype="bfloat16", attention="eager", prompts=[prompt], **asked)
    words = shlex.split(command(result))
    assert words[:4] == ["gptkit", "verify", "sample:llama", "sample:llama"]
    for option in ("--long", "--stream", "--no-mutations", "--allow-pickle", "--allow-extra", f"--prompt={prompt}"):
        assert option in words
    again = call(*words[1:], "--json")
    assert again.exit_code == 0, again.output
    data = json.loads(again.stdout)
    assert data["arguments"] == list(result.arguments)
    assert [each["name"] for each in data["prompts"]] == [each.name for each in result.prompts]


def test_the_command_names_the_commit():
    checkpoint = open_checkpoint("sample:llama")
    for reference in ("org/name", "org/name@main", "hf://org/name@main", "llama-3-8b"):
        found = resolved(replace(checkpoint, reference=reference, revision="c0ffee"))
        assert found == f"{reference.partition('@')[0]}@c0ffee"
    assert resolved(checkpoint) == "sample:llama"


def test_a_card_tells_a_failure(tmp_path):
    result = verify("sample:gpt2", "sample:falcon", mutations=False)
    data = card(result)
    assert data["verdict"]["function"] == "different"
    assert not data["verdict"]["passed"]
    assert "**different from transformers**" in markdown(data)


def test_a_card_that_cannot_be_written_is_refused(tmp_path):
    run = call("verify", "sample:llama", "--no-mutations", "--card", str(tmp_path / "no" / "card"))
    assert run.exit_code == 2
    assert "cannot write" in run.stderr
