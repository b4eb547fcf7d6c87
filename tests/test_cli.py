"""The commands as they are called: exit codes, what is said where, and nothing that a terminal would obey."""

import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from helpers import covering
from helpers.covering import few
from helpers.families import CONFIGS, save_hf
from helpers.processes import HANGS, imported
from helpers.processes import gptkit as command
from safetensors.torch import load_file, save_file
from typer.main import get_command
from typer.testing import CliRunner, Result

import gptkit
from gptkit.cli import app
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.surgery.registry import all_options

runner = CliRunner()
SAMPLE = Path(gptkit.__file__).parent / "samples" / "gpt2"
HEAVY = ("torch", "transformers", "numpy", "huggingface_hub", "tokenizers")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")
PLAIN = {"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": None, "GPTKIT_DEBUG": None, "TERM": "xterm-256color"}


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory of its own, no network, no cache, no settings of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)
    for name, value in PLAIN.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_hf(CONFIGS["gpt2"], folder)
    return folder


@pytest.fixture
def tiny(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of it that may be spoilt."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def run(*args: str | Path, code: int = 0, **options: Any) -> Result:
    """A command in this process, which must exit with `code` and keep stdout and stderr apart."""
    result = runner.invoke(app, [str(arg) for arg in args], **options)
    assert result.exit_code == code, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not CONTROL.search(result.output)
    if code not in (0, 3):
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        told = [line for line in lines if not line.startswith("    ")]  # what is in the way is listed, a line each
        assert 1 <= len(told) <= 2, result.stderr
        assert lines[0].startswith("gptkit: ") and all(line.startswith("  ") for line in lines[1:])
        assert "Traceback" not in result.stderr and "bug in gptkit" not in result.stderr
    else:
        assert result.stderr == ""
    return result


def on_terminal(*args: str | Path, env: dict[str, str] | None = None) -> str:
    """What the real command writes on a terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gptkit", *map(str, args)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, **(env or {})},
    )
    os.close(follower)
    written = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        written += part
    os.close(leader)
    assert process.wait(HANGS) == 0, written
    return written.decode()


# --- the real command ---


def test_version_and_help() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"gptkit {gptkit.__version__}\n", "")
    done = command("-h")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    for name in ("params", "presets", "load", "convert", "swap", "swaps", "verify", "generate", "check", "demo"):
        assert name in done.stdout


@few(4)
@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["convert", "--help"],
        ["swap", "--help"],
        ["swaps", "--recipes"],
        ["params", "qwen3-8b"],
        ["params", "--json", "gpt2"],
        ["presets"],
    ],
)
def test_nothing_heavy_is_imported(args: list[str]) -> None:
    assert not imported(f"from gptkit.cli import app; app({args!r}, prog_name='gptkit')", *HEAVY)


def test_a_command_that_does_not_exist_is_told_once_what_was_meant() -> None:
    done = command("parms")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "gptkit: no such command 'parms'. Did you mean 'params'?"


@pytest.mark.parametrize("name", typer.main.get_group(app).commands)
def test_help_ends_with_examples_of_the_command(name: str) -> None:
    told = runner.invoke(app, [name, "--help"], env={"COLUMNS": "80"}).stdout
    last = [line.strip() for line in told.split("Examples:")[1].strip().splitlines()]
    names = {name, {"inspect": "load"}.get(name, name)}  # an alias has the examples of what it stands for
    assert last and all(line.split()[:1] == ["gptkit"] and line.split()[1] in names for line in last)
    assert max(map(len, told.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("train", {"--tokens", "--batch", "--context"}),
        ("heal", {"--tokens", "--batch", "--context"}),
        ("eval", {"--context", "--stride"}),
        ("verify", {"--up-to"}),
        ("compare", {"--context"}),
        ("recommend", {"--context"}),
        ("params", {"--kv", "--context"}),
    ],
)
def test_help_says_what_1k_tokens_are(name: str, options: set[str]) -> None:
    """The help of every option that is read as a number of tokens."""
    params = {
        param.opts[-1]: param.help or ""
        for param in get_command(app).commands[name].params
        if param.opts[-1].startswith("--")
    }
    assert {option for option, words in params.items() if "1k is 1,024" in words} == options
    in_k = [words for words in params.values() if "tokens" in words and re.search(r"\b\d+k\b", words)]
    assert in_k and all("1k is 1,024" in words for words in in_k)
    assert max(map(len, runner.invoke(app, [name, "--help"], env={"COLUMNS": "80"}).stdout.splitlines())) <= 80


def test_a_traceback_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = command("load", "empty")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("gptkit: empty is not a checkpoint") and "Traceback" not in done.stderr
    done = command("load", "empty", env={"GPTKIT_DEBUG": "1"})
    assert done.returncode == 4
    assert "Traceback" in done.stderr and "UnknownFamily" in done.stderr and "gptkit: empty is not" in done.stderr


def test_interrupted() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gptkit", "generate", "sample:gpt2", "ROMEO:", "-n", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(12).startswith("ROMEO:")  # the prompt, and what came after
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=HANGS)
    assert process.returncode == 130
    assert said == "gptkit: interrupted\n"


def test_interrupted_while_converting_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("gptkit.converter.weights.Weights.read", interrupt)
    result = run("convert", "sample:gpt2", "out", code=130)
    assert result.stderr == "gptkit: interrupted\n"
    assert list(tmp_path.iterdir()) == []


@few(1)
@pytest.mark.parametrize(
    "args", [["generate", "sample:gpt2", "a", "-n", "9"], ["presets", "--json"], ["params", "gpt2"]]
)
def test_a_reader_that_has_gone(args: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "gptkit", *args], stdout=writing, stderr=subprocess.PIPE, timeout=HANGS, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gptkit", "presets"], stdout=full, stderr=subprocess.PIPE, timeout=HANGS, check=False
        )
    assert done.returncode == 1
    assert done.stderr == b"gptkit: No space left on device\n"


@pytest.mark.exhaustive
def test_a_terminal_that_lacks_characters(tiny: Path) -> None:
    done = command("swap", str(tiny), "out", "--norm", "rmsnorm", env={"PYTHONIOENCODING": "iso8859-1"})
    assert done.returncode == 0, done.stderr
    assert "max \\u0394" in done.stdout


# --- exit codes ---


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["convert"], "missing argument"),
        (["frobnicate"], "no such command"),
        (["--frobnicate"], "no such option"),
        (["load", "sample:gpt2", "--dtype"], "requires an argument"),
        (["convert", "a", "b", "c"], "unexpected extra argument"),
        (["generate", "sample:gpt2", "a", "-n", "many"], "--max-new-tokens"),
        (["generate", "sample:gpt2"], "generate needs exactly one prompt"),
        (["generate", "sample:gpt2", "a", "--ids", "1"], "generate needs exactly one prompt"),
        (["generate", "sample:gpt2", "--ids", "1 x"], "must be token ids"),
        (["generate", "sample:gpt2", "--ids", "1 99999"], "outside the vocabulary"),
        (["generate", "sample:gpt2", "--ids", "-1"], "outside the vocabulary"),
        (["generate", "sample:gpt2", ""], "empty"),
        (["generate", "sample:gpt2", "a", "--attention", "flash"], "--attention must be sdpa or eager"),
        (["generate", "sample:gpt2", "a", "--dtype", "int8"], "unknown dtype"),
        (["generate", "sample:gpt2", "a", "-n", "-1"], "--max-new-tokens"),
        (["generate", "sample:gpt2", "a", "--temperature", "nan"], "temperature"),
        (["generate", "sample:gpt2", "a", "--temperature", "1", "--seed", "-1"], "seed"),
        (["load", "sample:gpt2", "--dtype", "float8"], "unknown dtype"),
        (["verify", "sample:gpt2", "--attention", "flash"], "unknown attention"),
        (["verify", "sample:gpt2", "--dtype", "int8"], "unknown dtype"),
        (["verify", "sample:bloom", "--attention", "sdpa"], "--attention eager"),
        (["swap", "sample:gpt2", "out"], "--norm rmsnorm"),
        (["swap", "sample:gpt2", "out", "--norm", "batchnorm"], "--norm 'batchnorm' is unknown"),
        (["swap", "sample:gpt2", "out", "--norm", "rmsnorm", "--dtype", "int8"], "unknown dtype"),
        (["swap", "sample:gpt2", "out", "--norm"], "requires an argument"),
        (["swap", "sample:gpt2", "out", "--recipe", "nope"], "no recipe 'nope'"),
        (["swap", "sample:gpt2", "out", "--norm", "rmsnorm", "--calibrate", "nope.txt"], "no text file nope.txt"),
        (["swaps", "sample:gpt2", "--recipes"], "takes no MODEL"),
        (["convert", "sample:gpt2", "--to", "onnx"], "Choose one of local, hf, hf:FAMILY"),
        (["convert", "sample:gpt2", "no/such/parent"], "does not exist"),
    ],
)
def test_usage_is_2(args: list[str], message: str, tmp_path: Path) -> None:
    assert re.search(message, run(*args, code=2).stderr)
    assert list(tmp_path.iterdir()) == []


def test_no_arguments_are_help_and_2() -> None:
    result = runner.invoke(app, [])
    assert result.exit_code == 2 and "Usage" in result.output and result.stderr == ""


@pytest.mark.parametrize("command", ["convert", "swap"])
def test_an_output_that_exists(command: str, tmp_path: Path) -> None:
    args = ["--norm", "rmsnorm", "--no-measure"] if command == "swap" else []
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to("folder")
    for out in ("file", "link"):
        for force in ([], ["--force"]):
            assert "exists and is" in run(command, "sample:gpt2", out, *args, *force, code=2).stderr
    assert "--force" in run(command, "sample:gpt2", "folder", *args, code=2).stderr
    assert "only a checkpoint" in run(command, "sample:gpt2", "folder", *args, "--force", code=2).stderr
    assert (tmp_path / "folder" / "notes.txt").read_text() == "mine" and (tmp_path / "file").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["swap", "sample:llama", "out", "--norm", "rmsnorm"], 1, "has no LayerNorm"),
        (["swap", "sample:gpt2", "out", "--tie", "--untie"], 1, r"step 1 \(--tie\): the head is tied"),
        (["convert", "sample:gpt2", "--to", "hf:llama"], 1, "cannot express"),
        (["convert", "sample:gpt2", "--to", "hf:nope"], 4, "gptkit families lists"),
        (["convert", "sample:nope"], 4, "sample:llama"),
        (["load", "no/such/folder"], 4, "no such file or folder"),
        (["load", "https://huggingface.co/gpt2"], 4, "web address"),
        (["load", "no-such.safetensors"], 4, "no such file"),
        (["load", ""], 4, "is not the name of a model"),
        (["params", "no-such-folder/"], 4, "no such file or folder"),
        (["check", "no-such-folder"], 4, "no such folder"),
        (["check", str(SAMPLE / "config.json")], 4, "is a file"),
        (["convert", str(SAMPLE / "config.json"), "out"], 4, "not a weight file"),
        (["load", "org/name"], 5, "sample:gpt2"),
        (["convert", "org/name"], 5, "sample:gpt2"),
        (["params", "org/name"], 5, "sample:gpt2"),
        (["verify", "sample:gpt2", "org/name"], 5, "sample:gpt2"),
    ],
)
def test_other_exit_codes(args: list[str], code: int, message: str, tmp_path: Path) -> None:
    assert re.search(message, run(*args, code=code).stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_typo_is_helped() -> None:
    assert "Did you mean qwen3-8b" in run("params", "qwne3-8b", code=4).stderr


def test_offline_by_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert "sample:gpt2" in run("load", "org/name", "--offline", code=5).stderr


def test_a_bug_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("some \x1b[31mreason")

    monkeypatch.setattr("gptkit.analysis.params.params", broken)
    result = runner.invoke(app, ["params", "gpt2"])
    assert result.exit_code == 1
    assert result.stderr == (
        "gptkit: ZeroDivisionError: some \\x1b[31mreason\n"
        "  This is a bug in gptkit. Set GPTKIT_DEBUG=1 to see the traceback.\n"
    )


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("gptkit.analysis.params.params", hungry)
    assert "not enough memory" in run("params", "gpt2", code=1).stderr


# --- each command ---


def test_params() -> None:
    data = json.loads(run("params", "--json", "qwen3-8b", "sample:gpt2", SAMPLE, SAMPLE / "config.json").stdout)
    assert data["schema_version"] == 1
    totals = [model["total"] for model in data["models"]]
    assert totals[0] == 8_190_735_360 and type(totals[0]) is int
    assert (
        totals[1] == totals[2] == totals[3] == sum(t.numel() for t in load_file(SAMPLE / "model.safetensors").values())
    )
    assert "8,190,735,360" in run("params", "qwen3-8b").stdout


def test_presets() -> None:
    names = [preset["name"] for preset in json.loads(run("presets", "--json").stdout)["presets"]]
    shown = run("presets").stdout
    assert len(names) > 20 and all(name in shown for name in names)


def test_load() -> None:
    text = run("load", "sample:gpt2").stdout
    data = json.loads(run("load", "sample:gpt2", "--json", "--dtype", "bf16").stdout)
    assert (data["family"], data["format"], data["files"]) == ("gpt2", "hf", ["model.safetensors"])
    assert f"{data['parameters']:,} parameters as torch.float" in text


def test_convert_there_and_back(tmp_path: Path) -> None:
    assert "would write gpt2-local" in run("convert", "sample:gpt2", "--dry-run").stdout
    assert list(tmp_path.iterdir()) == []
    assert "wrote gpt2-local" in run("convert", "sample:gpt2").stdout
    assert "wrote gpt2-hf" in run("convert", "gpt2-local", "--to", "hf").stdout
    for path in SAMPLE.iterdir():
        if path.suffix in (".json", ".safetensors"):
            assert (tmp_path / "gpt2-hf" / path.name).read_bytes() == path.read_bytes()
    assert "exists" in run("convert", "sample:gpt2", code=2).stderr
    assert run("convert", "sample:gpt2", "--force", "--quiet").stdout == ""
    assert "every file" in run("check", "gpt2-local").stdout
    run("verify", "sample:gpt2", "gpt2-local", "-q", "--no-mutations")


@few(3)
@pytest.mark.parametrize(
    "name", ["with space", "mödèl 你好", "-dash", "a'quote\"", "[bold]x", "100%", "{x}", ":smile:"]
)
def test_odd_names(name: str, tiny: Path, tmp_path: Path) -> None:
    home = tiny.rename(tmp_path / name)
    local = f"./{name}-out"
    assert f"wrote {name}-out" in run("convert", f"./{name}", local).stdout
    assert f"./{name}-out" in run("load", local).stdout
    assert f"{name}-out: every file" in run("check", local).stdout
    run("convert", f"{local}/model.safetensors", "--to", "hf", "--", f"./{name}-back")
    assert (tmp_path / f"{name}-back" / "model.safetensors").read_bytes() == (home / "model.safetensors").read_bytes()


def test_here(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    assert "would write tiny-local" in run("convert", ".", "--dry-run").stdout


def test_swap_and_verify(tmp_path: Path) -> None:
    text = run("swap", "sample:gpt2", "rms", "--norm", "rmsnorm").stdout
    assert "exact swap" in text and "top-1 100.0%" in text
    assert "function  the same" in run("verify", "sample:gpt2", "rms", "--no-mutations").stdout
    assert "history" in run("load", "rms").stdout
    run("swap", "sample:gpt2", "naive", "--norm", "rmsnorm", "--approximate", "--no-measure", "-q")
    quick = ("--no-mutations", "--no-damage")
    if not covering.quick:
        assert "DIFFERENT" in run("verify", "sample:gpt2", "naive", *quick, code=3).stdout
    data = json.loads(run("verify", "sample:gpt2", "naive", *quick, "--json", code=3).stdout)
    assert (data["verdict"], data["passed"]) == ("different", False)


def test_help_of_swap_has_every_option_under_a_heading() -> None:
    text = run("swap", "--help").stdout
    headings = re.findall(r"^╭─ (.+?) ─", text, re.MULTILINE)
    groups = dict.fromkeys(option.group for option in all_options())
    assert headings == ["Arguments", "How to swap", *groups, "General"]
    for option in all_options():
        assert f"│ {option.spelled} " in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_recipes_and_dry_runs(tmp_path: Path) -> None:
    text = run("swap", "sample:llama", "out", "--recipe", "llama-pro", "--dry-run").stdout
    assert text.startswith("would write out: exact swap") and "recipe      llama-pro" in text
    assert "FLOPs per token at 256" in text and "1      --layers +1   exact" in text
    assert not (tmp_path / "out").exists()
    run("swap", "sample:llama", "out", "--layers", "+1", "--untie", code=1)
    text = run("swap", "sample:llama", "out", "--norm", "layernorm", "--layers", "+20%").stdout
    assert "each step compared with the one before" in text and "2      --norm layernorm   exact" in text
    if not covering.quick:  # as tests/surgery/test_recipe.py says without the command
        run("swap", "sample:llama", "again", "--recipe", "out", "-q")
        for path in (tmp_path / "out").iterdir():
            assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    (tmp_path / "bad.toml").write_text("[[step]]\nlayers = '0-9'\n")
    told = run("swap", "sample:llama", "not", "--recipe", "bad.toml", code=1).stderr
    assert told.startswith("gptkit: bad.toml, step 1: '0-9' names layer 9") and not (tmp_path / "not").exists()


def test_swaps(tiny: Path) -> None:
    text = run("swaps", "sample:gpt2").stdout
    assert "Possible and exact here" in text and "--norm rmsnorm" in text
    told = json.loads(run("swaps", tiny, "--json").stdout)
    verdicts = {"exact", "approximate", "retrained", "needs a text", "refused"}
    assert {each["verdict"] for each in told["swaps"]} == verdicts
    assert "LayerNorm -> RMSNorm" in run("swaps").stdout
    known = json.loads(run("swaps", "--json").stdout)["swaps"]
    assert {each["option"] for each in known} == {option.name for option in all_options()}
    assert "gpt2-to-llama" in run("swaps", "--recipes").stdout
    recipes = json.loads(run("swaps", "--recipes", "--json").stdout)["recipes"]
    assert len(recipes) == 7 and recipes[0]["step"]
    assert "no such file" in run("swaps", "no/such/folder", code=4).stderr


def test_verify_counts_bytes(tiny: Path) -> None:
    run("convert", tiny, "local")
    tensors = load_file("local/model.safetensors")
    tensors["blocks.0.attention.k_proj.bias"] += 1.0  # which no logit shows: softmax cancels it
    save_file(tensors, "local/model.safetensors", {"format": "pt"})
    text = run("verify", tiny, "local", code=3).stdout
    assert "differs: blocks.0.attention.k_proj.bias" in text
    told = run("check", "local", code=4).stderr
    assert "model.safetensors: tensor blocks.0.attention.k_proj.bias changed (bytes " in told and "1 problem" in told


def test_generate(tiny: Path) -> None:
    args = ["-n", "20", "--temperature", "0.8", "--top-k", "40", "--seed", "7"]
    text = run("generate", "sample:gpt2", "ROMEO:", *args).stdout
    assert text.startswith("ROMEO:") and len(text) > 20
    assert run("generate", "sample:gpt2", "-", *args, input="ROMEO:").stdout == text
    assert run("generate", "sample:gpt2", "ROMEO:", "-n", "0").stdout == "ROMEO:\n"
    ids = run("generate", tiny, "--ids", "1, 5 9", "-n", "4").stdout.split()
    assert len(ids) == 4 and all(0 <= int(token) < 97 for token in ids)
    assert "--ids" in run("generate", tiny, "a text", code=2).stderr
    assert "not text" in run("generate", "sample:gpt2", "-", code=2, input=b"\xff\xfe").stderr


def test_check(tiny: Path) -> None:
    run("convert", tiny, "out")
    Path("out/gptkit.json").unlink()
    assert "1 problem\n    gptkit.json is missing" in run("check", "out", code=4).stderr
    for number in range(20):
        Path(f"out/{number}").write_text("")
    result = runner.invoke(app, ["check", "out"])
    assert result.exit_code == 4
    assert "21 problems" in result.stderr and "and 11 more" in result.stderr
    Path("out/manifest.json").write_text("{")
    assert "cannot be read" in run("check", "out", code=4).stderr


@pytest.mark.parametrize(("to", "file"), [("hf", "config.json"), ("local", "gptkit.json")])
def test_check_says_how_to_keep_a_change_that_was_intended(to: str, file: str, tiny: Path) -> None:
    """The command that it names writes a folder with the change, which check accepts."""
    run("convert", tiny, "an out", "--to", to)
    path = Path("an out", file)
    text = path.read_text()
    name = "layer_norm_epsilon" if to == "hf" else "eps"
    changed = re.sub(rf'"{name}": [^,\n]+', f'"{name}": 0.0625', text)
    assert changed != text
    path.write_text(changed)
    told = run("check", "an out", code=4).stderr
    assert f"{file}: its bytes changed" in told or f"{file}: {len(text)} bytes expected" in told
    *_, last = told.splitlines()
    why, _, copy = last.strip().partition(": ")
    assert why == "The folder changed after gptkit wrote it. If that was intended, write a copy with its own manifest"
    assert copy == f"gptkit convert 'an out' NEW --to {to}"
    run(*shlex.split(copy)[1:])
    assert "every file" in run("check", "NEW").stdout
    specs = [open_checkpoint(folder).spec for folder in ("an out", "NEW", tiny)]
    assert specs[0] == specs[1] != specs[2]
    assert Path("NEW", file).read_text() == changed or to == "local"


def test_pickles(tiny: Path) -> None:
    torch.save(load_file(tiny / "model.safetensors"), tiny / "pytorch_model.bin")
    (tiny / "model.safetensors").unlink()
    swap, generate = ["swap", tiny, "rms", "--norm", "rmsnorm"], ["generate", tiny, "--ids", "1 5 9", "-n", "2"]
    for args in (["load", tiny], ["convert", tiny, "out"], ["verify", tiny], swap, generate):
        assert "--allow-pickle" in run(*args, code=4).stderr
        run(*args, "--allow-pickle")


def test_extra_tensors(tiny: Path) -> None:
    save_file({**load_file(tiny / "model.safetensors"), "score": torch.ones(1)}, tiny / "model.safetensors")
    assert "--allow-extra" in run("load", tiny, code=4).stderr
    assert "note: left out, because they are not part of the model: score" in run("load", tiny, "--allow-extra").stdout
    assert (
        "note: left out, because they are not part of the model: "
        "score" in run("convert", tiny, "out", "--allow-extra").stdout
    )
    for args in (["swap", tiny, "rms", "--norm", "rmsnorm"], ["generate", tiny, "--ids", "1 5 9", "-n", "2"]):
        assert "--allow-extra" in run(*args, code=4).stderr
        run(*args, "--allow-extra")


def test_weights_that_are_no_numbers(tiny: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    weights["transformer.h.1.ln_1.weight"][:3] = torch.tensor([float("nan"), float("inf"), 1.0])
    save_file(weights, tiny / "model.safetensors")
    said = "blocks.1.attention_norm.weight: 2 of its values are NaN or infinite"
    assert said in " ".join(run("load", tiny).stdout.split())
    assert json.loads(run("load", tiny, "--json").stdout)["notes"] == [said]


def test_help_keeps_its_words() -> None:
    """Small letters in brackets are markup to rich, and gone."""
    for name in ("load", "convert", "swap", "swaps", "params", "verify", "generate", "check", "demo", "presets"):
        assert not re.search(r"\w \.(\s|$)", run(name, "--help").stdout), name


# --- what reaches the terminal ---


HOSTILE = "x\x1b[31m\x1b]0;title\x07\x9b2J\u202e[/bold]:smile:"


@pytest.fixture
def hostile(tiny: Path) -> Path:
    """A checkpoint with terminal commands and markup wherever a file may hold words."""
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, HOSTILE: HOSTILE, "half \ud800": 1}))
    save_file({**load_file(tiny / "model.safetensors"), HOSTILE: torch.ones(1)}, tiny / "model.safetensors")
    return tiny


def test_control_characters_of_files_stay_there(hostile: Path, tmp_path: Path) -> None:
    run("load", hostile, code=4)  # which all look for control characters
    run("load", hostile, "--allow-extra")
    run("load", hostile, "--allow-extra", "--json")
    run("convert", hostile, "out", "--allow-extra")
    run("convert", hostile, "--allow-extra", "--dry-run")
    data = json.loads((tmp_path / "out" / "gptkit.json").read_text())
    data["history"] = [{HOSTILE: HOSTILE, "swap": [HOSTILE]}]
    (tmp_path / "out" / "gptkit.json").write_text(json.dumps(data))
    run("load", "out")
    run("load", "out", "--json")
    Path("out", "a\x1b[31m\n").write_text("")
    result = runner.invoke(app, ["check", "out"])
    assert result.exit_code == 4 and not CONTROL.search(result.output)


@pytest.mark.parametrize(
    ("field", "value"), [("model_type", HOSTILE), ("activation_function", HOSTILE), ("n_layer", HOSTILE)]
)
def test_control_characters_in_errors(field: str, value: str, hostile: Path) -> None:
    config = json.loads((hostile / "config.json").read_text())
    (hostile / "config.json").write_text(json.dumps({**config, field: value}))
    run("load", hostile, code=4)
    run("params", hostile, code=0 if field == "model_type" else 4)  # by the names of its tensors


@pytest.mark.parametrize("args", [["load"], ["params"], ["convert"], ["check"], ["generate", "--ids", "1"], ["verify"]])
def test_control_characters_in_arguments(args: list[str]) -> None:
    run(*args, "no\x1b[31msuch", code=4)


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are Unicode")
def test_names_that_are_not_utf8(tiny: Path) -> None:
    out = os.fsdecode(b"out-\xff")
    assert "wrote out-\\udcff" in run("convert", tiny, out).stdout
    assert "out-\\udcff: every file" in run("check", out).stdout


def test_a_models_own_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    def speak(*_: Any, **__: Any) -> Iterator[str]:
        yield from ("a\n", "\x1b[31m", "b\tü")

    monkeypatch.setattr("gptkit.modules.text.generate", speak)
    result = runner.invoke(app, ["generate", "sample:gpt2", "p"])
    assert result.stdout == "pa\n\x1b[31mb\tü\n", "a program gets every character"

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(SystemExit, match="0"):
        typer.main.get_command(app).main(["generate", "sample:gpt2", "p"])
    assert terminal.getvalue() == "pa\n�[31mb\tü\n"


@few(1)
@pytest.mark.parametrize(
    "args", [["params", "gpt2", "--by-layer"], ["presets"], ["load", "sample:gpt2"], ["verify", "sample:gpt2"]]
)
def test_no_escape_codes_where_nobody_looks(args: list[str]) -> None:
    done = command(*args)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr


def test_escape_codes_on_a_terminal_unless_no_color() -> None:
    assert "\x1b[1m" in on_terminal("params", "gpt2")
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in on_terminal("params", "gpt2", env=env)
    assert "\x1b[3" not in on_terminal("convert", "sample:gpt2", env={"NO_COLOR": "1"})


@few(3)
@pytest.mark.parametrize(
    "args",
    [
        ["-h"],
        ["convert", "-h"],
        ["presets"],
        ["params", "qwen3-8b", "--by-layer"],
        ["params", "gpt2", "gpt2-xl", "llama-3-8b", "qwen3-8b", "bloom-560m"],
        ["load", "sample:llama"],
        ["verify", "sample:bloom"],
        ["swap", "sample:gpt2", "rms", "--norm", "rmsnorm"],
    ],
)
def test_80_columns(args: list[str]) -> None:
    for line in run(*args).stdout.splitlines():
        assert len(line) <= 80, line
