"""The card holds what a reader needs to repeat and trust a verification."""

import hashlib
import json
from pathlib import Path

from typer.testing import CliRunner

from gptkit.cli import app
from gptkit.converter.convert import convert
from gptkit.parity.card import card, markdown
from gptkit.parity.verify import verify

SAMPLE = Path(__file__).parents[2] / "samples" / "llama"


def test_a_card_says_what_was_checked(tmp_path):
    convert("sample:llama", tmp_path / "local")
    run = CliRunner().invoke(app, ["verify", "sample:llama", str(tmp_path / "local"), "--card", str(tmp_path / "card")])
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
    assert CliRunner().invoke(app, [*data["command"].split()[1:], "-q"]).exit_code == 0


def test_a_card_tells_a_failure(tmp_path):
    result = verify("sample:gpt2", "sample:falcon", mutations=False)
    data = card(result)
    assert data["verdict"]["function"] == "different"
    assert not data["verdict"]["passed"]
    assert "**different from transformers**" in markdown(data)


def test_a_card_that_cannot_be_written_is_refused(tmp_path):
    run = CliRunner().invoke(app, ["verify", "sample:llama", "--no-mutations", "--card", str(tmp_path / "no" / "card")])
    assert run.exit_code == 2
    assert "cannot write" in run.stderr
