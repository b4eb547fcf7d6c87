"""gptkit train: it learns, goes on to the same bytes wherever it was stopped, and refuses what it cannot do."""

import errno
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import covering
from helpers.command import call
from helpers.covering import exhaustive, few, others_slow
from helpers.families import ONE_STACK, Variant, spec_of
from helpers.hubserver import Hub, Repo
from helpers.processes import python
from helpers.training import BUDGET, made, trained

import gptkit
from gptkit import generate, load, open_checkpoint
from gptkit.analysis.memory import training_memory
from gptkit.components import operations as ops
from gptkit.converter.files import locked
from gptkit.converter.manifest import check_manifest, manifest_of
from gptkit.errors import GptkitError, InvalidInput, MissingComponent, UsageError
from gptkit.modules.load import load_random
from gptkit.report.training import Watched
from gptkit.training import loop, state
from gptkit.training.ablate import ablate
from gptkit.training.data import Stretch, Windows, open_tokens, tokenize
from gptkit.training.heal import heal
from gptkit.training.options import FURTHER, STEPS, WINDOWS, windows_of
from gptkit.training.parallel import Group
from gptkit.training.train import peak_flops, require_trainable


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def bigram(tokens: np.ndarray, vocabulary: int, held: int) -> float:
    """The loss that a table of pairs reaches on the last `held` tokens."""
    counts = np.full((vocabulary, vocabulary), 0.01)
    np.add.at(counts, (tokens[:-held][:-1], tokens[:-held][1:]), 1)
    chances = counts / counts.sum(1, keepdims=True)
    return float(-np.log(chances[tokens[-held:][:-1], tokens[-held:][1:]]).mean())


@exhaustive
def test_it_learns_more_than_pairs(tmp_path: Path) -> None:
    made(tmp_path)
    lines: list[loop.TrainingStep] = []
    steps, share = (200, 0.9) if covering.quick else (300, 0.6)
    done = trained(tmp_path, tokens=512 * steps, every=100, rate=5e-3, tell=lines.append, sample="abc")
    found = open_tokens(tmp_path / "out.training/data")
    bound = bigram(found.read(0, found.tokens), found.vocabulary, found.tokens // 20)
    assert done.held_out < share * bound, (done.held_out, bound)
    assert done.steps == len(lines) == steps and done.loss == lines[-1].loss
    told = [each.step for each in lines if each.held_out]
    assert told == [*range(100, steps + 1, 100)] == [each["step"] for each in done.curve]
    assert all((each.sample or "").startswith("abc") for each in lines if each.held_out)
    # What is written is what was measured.
    assert check_manifest(tmp_path / "out") == [] and done.to == "hf:llama"
    assert "".join(generate(tmp_path / "out", "ab", 5))
    record = manifest_of(tmp_path / "out")["history"][-1]["trained"]
    assert (
        record["curve"] == done.curve
        and record["seed"] == 1
        and record["tokens"] == manifest_of(found.folder)["files"]["tokens.bin"]["sha256"]
    )
    kept = [json.loads(line) for line in (tmp_path / "out.training/metrics.jsonl").read_text().splitlines()]
    assert kept == [each.as_json() for each in lines]
    assert list((tmp_path / "out.training").glob("step-*")) == []


@pytest.mark.slow
def test_few_tokens_are_many_steps_where_nobody_says_how_large_a_step_is(tmp_path: Path) -> None:
    made(tmp_path)
    small = trained(tmp_path, batch=None, tokens=6400)
    large = trained(tmp_path, "large", tokens=6400)
    assert (small.steps, large.steps) == (200, 13) and small.held_out < large.held_out - 0.5
    assert trained(tmp_path, "further", model="sample:gpt2", batch=None, tokens=3200).steps == 100


@pytest.mark.parametrize(
    ("budget", "parts", "steps", "windows"),
    [
        (1, 1, STEPS, 1),
        (32 * STEPS, 1, STEPS, 1),
        (32 * STEPS + 1, 1, STEPS, 2),
        (32 * FURTHER * 3, 1, FURTHER, 3),
        (32 * FURTHER, 4, FURTHER, 4),  # a window for each of four processes
        (10**9, 1, STEPS, WINDOWS),
        (None, 1, STEPS, WINDOWS),  # of a time nobody knows how many steps it is
    ],
)
def test_windows_of_a_budget(budget: int | None, parts: int, steps: int, windows: int) -> None:
    assert windows_of(None, 32, budget, parts, steps) == windows
    assert windows_of(512, 32, budget, parts, steps) == 16


def test_a_checkpoint_is_trained_further(tmp_path: Path) -> None:
    made(tmp_path)
    done = trained(tmp_path, model="sample:gpt2", tokens=4096, rate=1e-3, every=2)
    assert done.to == "hf:gpt2" and done.held_out < done.curve[0]["held_out"]
    opened = open_checkpoint(tmp_path / "out")
    assert opened.spec == open_checkpoint("sample:gpt2").spec and opened.dtype == "F32"
    own = Path(state.__file__).parents[1] / "samples/gpt2/tokenizer.json"
    assert (tmp_path / "out/tokenizer.json").read_bytes() == own.read_bytes()


@pytest.mark.exhaustive
def test_a_tree_of_no_family_is_trained(tmp_path: Path) -> None:
    made(tmp_path)
    assert call("swap", "sample:gpt2", tmp_path / "rms", "--norm", "rmsnorm", "-q").exit_code == 0
    done = trained(tmp_path, model=tmp_path / "rms", tokens=1024, random=True)
    assert done.to == "local" and open_checkpoint(tmp_path / "out").format == "local"


@pytest.mark.exhaustive
def test_kinds_of_computing_agree(tmp_path: Path) -> None:
    made(tmp_path)
    tokens = tokenize([tmp_path / "text.jsonl"], tmp_path / "tokens", vocabulary=257)
    data = [tokens.folder]
    whole = trained(tmp_path, data=data)
    parts = trained(tmp_path, "parts", data=data, accumulate=4)
    narrow = trained(tmp_path, "narrow", data=data, dtype="bfloat16")
    assert parts.held_out == pytest.approx(whole.held_out, rel=1e-4)
    assert narrow.held_out == pytest.approx(whole.held_out, rel=0.02) and narrow.held_out != whole.held_out
    mixed = trained(tmp_path, "mixed", data=data, documents_apart=False)
    assert mixed.held_out != whole.held_out
    timed = trained(tmp_path, "timed", data=data, tokens=None, seconds=0.5)
    assert timed.seconds >= 0.5 and timed.steps >= 1


@few(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", others_slow(ONE_STACK))
def test_every_family_takes_a_step(tmp_path: Path, variant: Variant, dtype: str) -> None:
    """On documents that lie in one row, where no state is carried from one into the next; and what it leaves is read
    again into another's memory.
    """
    spec = spec_of(variant.config)
    if not spec.causal:
        with pytest.raises(MissingComponent, match="bidirectional attention"):
            require_trainable(spec, True, False)
        return
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, (2, 17))
    windows = Windows(ids[:, :-1].copy(), ids[:, 1:].copy(), np.repeat([[0] * 5 + [1] * 7 + [2] * 4], 2, 0))
    if any(isinstance(each, ops.Scan | ops.Convolve) for b in spec.blocks for each in spec.block_operations(b)):
        with pytest.raises(UsageError, match="carry a state from one document into the next"):
            load_random(spec, "float32")(torch.from_numpy(windows.ids), documents=torch.from_numpy(windows.documents))
        windows = windows._replace(documents=None)
    alone = Group(0, 1, torch.device("cpu"))
    store, found = state.Store(tmp_path, alone), []
    for seed in (0, 1):
        model = load_random(spec, "float32", seed=seed).train()
        descent = loop.adamw(model, spec.parameters(), 1e-3, 0.1)
        if seed:
            assert store.read(model, descent) == {"step": 1}
        engine = loop._Engine(model, loop.next_token, descent, loop.Settings(2, 16, steps=2, dtype=dtype), alone)
        if not seed:
            engine.step(0, windows, 1e-3)
            store.write(1, {"step": 1}, model, descent)
        found.append((engine.step(1, windows, 1e-3), {n: p.detach().clone() for n, p in model.named_parameters()}))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(each, found[1][1][name]) for name, each in found[0][1].items())


# --- stopped, and gone on ------------------------------------------------------------------------------------------


def run_apart(folder: Path) -> int:
    """A run with --resume in a forked process; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        trained(folder, tokens=60 * 512, resume=True)
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def kill(folder: Path, kills: int) -> Counter[str]:
    """Kill runs at random moments until so many were, each resumed until it has ended with the same bytes."""
    made(folder)
    began = time.monotonic()
    _, status = os.waitpid(run_apart(folder), 0)
    assert status == 0
    wanted, span = contents(folder / "out"), time.monotonic() - began
    moments, counts = random.Random(kills), Counter[str]()
    while counts["kills"] < kills:
        for path in (folder / "out", folder / "out.training"):
            shutil.rmtree(path, ignore_errors=True)
        while not (folder / "out").exists():
            pid = run_apart(folder)
            time.sleep(moments.uniform(0.1, 1) * span)
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
            counts["kills"] += status == signal.SIGKILL
            assert status in (0, signal.SIGKILL)
            counts["with a checkpoint"] += bool(status and list((folder / "out.training").glob("step-*[0-9]")))
        assert contents(folder / "out") == wanted, "another result than without the kill"
        # A kill between the two leaves the last checkpoint beside the result.
        assert status == signal.SIGKILL or list((folder / "out.training").glob("step-*")) == []
    return counts


@exhaustive
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    kill(tmp_path, 3)


@pytest.mark.slow
def test_many_killed_runs_go_on_to_the_same_bytes(tmp_path: Path) -> None:
    assert kill(tmp_path, 50)["with a checkpoint"] > 10


@few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_its_step(tmp_path: Path, number: signal.Signals) -> None:
    made(tmp_path)
    trained(tmp_path, "whole")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def interrupt(step: loop.TrainingStep) -> None:
        if step.step == 5:
            os.kill(os.getpid(), number)

    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            trained(tmp_path, tell=interrupt)
    finally:
        signal.signal(signal.SIGTERM, before)
    (note,) = caught.value.__notes__
    assert "step 6 is saved" in note and "--resume" in note
    assert [path.name for path in (tmp_path / "out.training").glob("step-*")] == ["step-00000006"]
    with pytest.raises(UsageError, match="contains an unfinished run"):
        trained(tmp_path)
    with pytest.raises(UsageError, match="seed was 1, and is now 2"):
        trained(tmp_path, seed=2, resume=True)
    with pytest.raises(UsageError, match="differs from this command: the held-out text is different"):
        trained(tmp_path, held_out=0.1, resume=True)
    (tmp_path / "other.txt").write_text("abc abb " * 200)
    with pytest.raises(UsageError, match="differs from this command: the held-out text is different"):
        trained(tmp_path, held_out=tmp_path / "other.txt", resume=True)
    with pytest.raises(UsageError, match="context was 32, and is now 16"):
        trained(tmp_path, context=16, resume=True)
    trained(tmp_path, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_run_that_has_ended_is_not_to_be_replaced(tmp_path: Path) -> None:
    """--resume behind the end keeps what is there, and does not suggest --force, which would throw it away."""
    made(tmp_path)
    trained(tmp_path)
    before = contents(tmp_path / "out")
    with pytest.raises(UsageError, match="there is no unfinished run, and") as caught:
        trained(tmp_path, resume=True)
    assert "force" not in str(caught.value)

    def stop(step: loop.TrainingStep) -> None:
        if step.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, force=True, every=1, tell=stop)
    with pytest.raises(UsageError, match="Give --resume and --force"):
        trained(tmp_path, resume=True, every=1)
    assert contents(tmp_path / "out") == before
    trained(tmp_path, resume=True, force=True, every=1)
    assert contents(tmp_path / "out")["model.safetensors"] == before["model.safetensors"]


@few(2)
@pytest.mark.parametrize(("at", "where"), [(7, "step"), (11, "step"), (8, "evaluation"), (12, "evaluation")])
def test_a_step_that_is_evaluated_is_so_where_it_is_stopped_too(
    tmp_path: Path, monkeypatch, at: int, where: str
) -> None:
    """Where the signal comes in that step, or while it is evaluated: of the last one too."""
    made(tmp_path)
    trained(tmp_path, "whole")
    evaluate, told = loop._Engine.evaluate, list[loop.TrainingStep]()

    def slow(self: loop._Engine, number: int, windows: Windows) -> float:
        if where == "evaluation" and len(told) + 1 == at:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, number, windows)

    def tell(step: loop.TrainingStep) -> None:
        told.append(step)
        if where == "step" and step.step == at:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop._Engine, "evaluate", slow)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, tell=tell)
    assert not (tmp_path / "out").exists()
    trained(tmp_path, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_have_the_curve_of_one(tmp_path: Path) -> None:
    made(tmp_path)
    words = ["-m", "gptkit", "train", "tree.json", "--data", "text.jsonl", "--tokens", "6144", "--context", "32"]
    words += ["--batch", "512", "--every", "4", "--lr", "0.003", "--seed", "1"]
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    env = {"OMP_NUM_THREADS": "1"}
    one = python(*words, "one", cwd=tmp_path, env=env)
    two = python(*ranks, *words, "two", cwd=tmp_path, env=env)
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    first, second = (
        [json.loads(line) for line in (tmp_path / f"{name}.training/metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(first) == len(second) == 12
    for a, b in zip(first, second, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["norm"] == pytest.approx(b["norm"], rel=1e-3)
    for a, b in zip(load(tmp_path / "one").parameters(), load(tmp_path / "two").parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


RANK = """
import sys
from pathlib import Path
import torch.distributed
from gptkit.training.train import train
def bytes_of(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
torch.nn.Linear(64, 64)(torch.randn(4, 64)).sum().backward()
before, peaks = bytes_of("RssAnon"), []
def tell(step):
    peaks.append(bytes_of("VmHWM") - bytes_of("RssFile") - bytes_of("RssShmem") - before)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
train("tree.json", ["text.jsonl"], "out", tokens=384, context=64, batch=128, rate=1e-4, tell=tell)
print(max(peaks))
"""


@pytest.mark.slow
def test_a_process_of_two_takes_its_share_of_memory(tmp_path: Path) -> None:
    """What `training_memory` counts for one of two ranks, and a few layers that gloo's buffers hold."""
    sizes = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 12, "num_attention_heads": 10}
    tree, _ = made(tmp_path, **sizes, num_key_value_heads=10)
    (tmp_path / "rank.py").write_text(RANK)
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "rank.py"]
    done = python(*ranks, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    spec = spec_of(json.loads(tree.read_text()))
    alone, share = training_memory(spec, "float32", 64, 1), training_memory(spec, "float32", 64, 1, ranks=2)
    for peak in map(int, done.stdout.split()):
        assert share.total < peak < 1.25 * share.total < 0.8 * alone.total


# --- what cannot be done ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokens": None}, "needs exactly one of --tokens and --time"),
        ({"seconds": 1.0}, "needs exactly one of --tokens and --time"),
        ({"batch": 16}, "--batch is smaller than one window"),
        ({"accumulate": 32}, "but is divided into 32 parts"),
        ({"model": "sample:gpt2", "context": 300, "batch": 4800}, "300"),
        ({"batch": 10**6}, "a training step needs"),
        ({"held_out": 2.0}, "held-out share must be between 0 and 1, not 2"),
        ({"held_out": 0}, "held-out share must be between 0 and 1, not 0"),
        ({"held_out": 1}, "held-out share must be between 0 and 1, not 1"),
        ({"rate": -1.0}, "--lr, the learning rate, must be more than 0 and at most 10, not -1"),
        ({"rate": 0.0}, "--lr, the learning rate, must be more than 0 and at most 10, not 0"),
        ({"context": 0}, "--context must be 1 or more, not 0"),
        ({"tokens": None, "seconds": 0.0}, "--time must be more than 0 seconds, not 0"),
        ({"tokens": None, "seconds": math.nan}, "--time must be more than 0 seconds, not nan"),
        ({"dtype": "int8"}, "dtype must be float32 or bfloat16, not 'int8'"),
        ({"device": "nowhere"}, "unknown device .nowhere."),
        ({"model": "sample:nothing"}, "no such sample"),
        ({"data": ["missing.txt"]}, "cannot read"),
        ({"tokenizer": "sample:llama"}, "the tokenizer has 512 tokens"),
    ],
)
def test_a_wrong_call_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    made(tmp_path, lines=200)
    with pytest.raises(GptkitError, match=said) as caught:
        trained(tmp_path, **options)
    assert caught.value.exit_code in (2, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.jsonl", "tree.json"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch) -> None:
    made(tmp_path, lines=200)
    monkeypatch.chdir(tmp_path)
    for out, said in ((".", "exists"), ("..", "exists"), ("/", "cannot create the folder"), ("a/b", "a/b")):
        done = call("train", "tree.json", out, "--data", "text.jsonl", "--tokens", "1k")
        assert done.exit_code in (1, 2) and said in done.output and "bug" not in done.output, done.output
    Path("out.training").write_text("a file")
    with pytest.raises(GptkitError, match=r"out\.training"):
        trained(tmp_path)


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    made(tmp_path, lines=3)
    with pytest.raises(
        UsageError, match="a training step needs 16 windows of 32 tokens, but the training text has only"
    ):
        trained(tmp_path)
    with pytest.raises(UsageError, match=r"a training step needs|shorter than one window"):
        trained(tmp_path, context=64)


@few(1)
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_no_number_stops_it_and_names_the_tensor(tmp_path: Path, monkeypatch, where: str) -> None:
    made(tmp_path)

    def broken(model: loop.Logits, batch: loop.Batch) -> torch.Tensor:
        lost = plain(model, batch)
        count.append(1)
        # Of what has a gradient without end, and of what is no number itself, from some step on.
        late = len(count) > 9
        return lost * (torch.sqrt(lost * 0) + 1 if late and where == "gradient" else math.nan if late else 1)

    plain, count = loop.next_token, list[int]()
    monkeypatch.setattr(loop.fit, "__kwdefaults__", {**loop.fit.__kwdefaults__, "loss": broken})
    with pytest.raises(
        GptkitError, match=r"stopped at step \d+: the (gradient of \S+|loss) is NaN or infinite\nContinue from step 4"
    ):
        trained(tmp_path)
    (kept,) = (tmp_path / "out.training").glob("step-*")
    assert kept.name == "step-00000004" and not (tmp_path / "out").exists()
    # What would come to the same again is gone on with otherwise, in its rate alone, and the manifest says so.
    monkeypatch.undo()
    with pytest.raises(UsageError, match="seed was 1, and is now 2"):
        trained(tmp_path, rate=1e-3, seed=2, resume=True)
    trained(tmp_path, rate=1e-3, resume=True)
    record = manifest_of(tmp_path / "out")["history"][-1]["trained"]
    assert record["changes"] == [{"behind": 4, "rate": 1e-3}] and record["rate"] == 1e-3
    assert [each["step"] for each in record["curve"]] == [4, 8, 12]


def test_no_number_behind_the_last_step_is_not_written(tmp_path: Path, monkeypatch) -> None:
    """No further step would meet it."""
    made(tmp_path)
    step = loop._Engine.step

    def breaking(self: loop._Engine, number: int, windows: Windows, rate: float) -> tuple[float, float]:
        done = step(self, number, windows, rate)
        if number == 11:
            with torch.no_grad():
                self.model.final_norm.weight[0] = math.nan
        return done

    monkeypatch.setattr(loop._Engine, "step", breaking)
    said = r"stopped at step 12: the parameter final_norm.weight is NaN or infinite\nContinue from step 8"
    with pytest.raises(GptkitError, match=said):
        trained(tmp_path)
    assert not (tmp_path / "out").exists()


def test_another_rate_is_for_a_run_that_broke_alone(tmp_path: Path, monkeypatch) -> None:
    made(tmp_path)
    stopped(tmp_path)
    with pytest.raises(UsageError, match=r"rate was 0\.003, and is now 0\.001"):
        trained(tmp_path, rate=1e-3, resume=True)
    monkeypatch.setattr(loop.fit, "__kwdefaults__", {**loop.fit.__kwdefaults__, "loss": nowhere})
    with pytest.raises(GptkitError, match=r"is NaN or infinite\n.*start again with --force") as caught:
        trained(tmp_path, "first")
    assert "kept" not in str(caught.value) and not (tmp_path / "first.training").exists()


def nowhere(model: loop.Logits, batch: loop.Batch) -> torch.Tensor:
    return loop.next_token(model, batch) * math.nan


def test_an_output_that_is_no_number_is_named(tmp_path: Path) -> None:
    made(tmp_path)
    done = trained(tmp_path, tokens=512)
    model = load(done.folder)
    with torch.no_grad():
        model.blocks[1].feed_forward.down_proj.weight.fill_(math.inf)
    windows = open_tokens(tmp_path / "out.training/data")
    settings, alone = loop.Settings(4, 32, steps=1), Group(0, 1, torch.device("cpu"))
    engine = loop._Engine(model, loop.next_token, torch.optim.SGD(model.parameters()), settings, alone)
    with pytest.raises(
        GptkitError, match=r"the parameter blocks\.1.feed_forward\.down_proj\.weight is NaN or infinite"
    ):
        engine.step(0, Stretch(windows, 0, windows.tokens, 32).step(0, 4, 0), 0.1)
    with torch.no_grad():
        for each in (model.blocks[1].feed_forward.up_proj, model.blocks[1].feed_forward.down_proj):
            each.weight.fill_(1e30)
    with pytest.raises(GptkitError, match=r"the output of blocks\.1\.feed_forward\.down_proj is NaN or infinite"):
        engine.step(0, Stretch(windows, 0, windows.tokens, 32).step(0, 4, 0), 0.1)


def test_a_full_disk_costs_no_checkpoint(tmp_path: Path, monkeypatch) -> None:
    made(tmp_path)
    trained(tmp_path, "whole")
    write, calls = state.Store._write_alone, list[int]()

    def full(self: state.Store, path: Path, tensors: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, path, tensors)

    monkeypatch.setattr(state.Store, "_write_alone", full)
    with pytest.raises(GptkitError, match="No space left"):
        trained(tmp_path)
    assert [path.name for path in (tmp_path / "out.training").glob("step-*")] == ["step-00000004"]
    trained(tmp_path, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_full_disk_is_named_where_measurements_are_written(tmp_path: Path, monkeypatch) -> None:
    made(tmp_path)
    Path(tmp_path / "out.training").mkdir()
    (tmp_path / "out.training/metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(GptkitError, match=r"could not write .*/out\.training/metrics\.jsonl: No space left"):
        loop.append(tmp_path / "out.training/metrics.jsonl", "{}\n")
    monkeypatch.chdir(tmp_path)
    words = ["train", "tree.json", "out", "--data", "text.jsonl", "--tokens", "1k", "--context", "32"]
    done = call(*words, "--metrics", "/dev/full")
    assert done.exit_code == 1 and "could not write /dev/full: No space left" in done.output
    done = call(*words, "--metrics", "no/such/file", "--force")
    assert done.exit_code == 1 and "could not write no/such/file" in done.output


def test_a_text_that_changed_is_not_resumed(tmp_path: Path) -> None:
    made(tmp_path)
    tokens = tmp_path / "out.training/data/tokens.bin"

    def change(step: loop.TrainingStep) -> None:
        if step.step == 6:
            tokens.write_bytes(tokens.read_bytes()[:-2])

    with pytest.raises(InvalidInput, match="changed since it was opened"):
        trained(tmp_path, tell=change)
    assert [path.name for path in (tmp_path / "out.training").glob("step-*")] == ["step-00000008"]
    with pytest.raises(InvalidInput, match="do not match its manifest"):
        trained(tmp_path, resume=True)
    shutil.rmtree(tokens.parent)
    assert trained(tmp_path, resume=True).steps == 12  # tokenised again, to the same tokens


@pytest.mark.exhaustive
def test_another_text_is_not_gone_on_with(tmp_path: Path) -> None:
    _, text = made(tmp_path)

    def stop(step: loop.TrainingStep) -> None:
        if step.step == 6:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError):
        trained(tmp_path, tell=stop)
    text.write_text(text.read_text() + '{"text": "more"}\n')
    with pytest.raises(InvalidInput, match="the texts differ from those at the start of the run in"):
        trained(tmp_path, resume=True)
    before = open_tokens(tmp_path / "out.training/data").tokens
    trained(tmp_path, force=True)
    assert open_tokens(tmp_path / "out.training/data").tokens > before


def stopped(folder: Path, **options: Any) -> None:
    """A run that Ctrl-C ends at its fifth step."""

    def interrupt(step: loop.TrainingStep) -> None:
        if step.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trained(folder, tell=interrupt, **options)


def test_other_weights_are_not_gone_on_with(tmp_path: Path) -> None:
    made(tmp_path)
    half = load("sample:gpt2")
    with torch.no_grad():
        half.blocks[0].attention_norm.weight[0] *= 0.5
    gptkit.save(half, tmp_path / "half", "hf")
    shutil.copytree(Path(gptkit.__file__).parent / "samples/gpt2", tmp_path / "copy")
    stopped(tmp_path, model="sample:gpt2")
    with pytest.raises(UsageError, match="differs from this command: the initial weights are different"):
        trained(tmp_path, model=tmp_path / "half", resume=True)
    trained(tmp_path, model=tmp_path / "copy", resume=True)  # the same, wherever they lie


@pytest.mark.parametrize("tokens", [False, True])
def test_offline_nobody_is_asked_for_a_tokenizer(tmp_path: Path, hub: Hub, tokens: bool) -> None:
    made(tmp_path)
    sample = Path(gptkit.__file__).parent / "samples/gpt2"
    hub.repos["org/model"] = Repo({path.name: path.read_bytes() for path in sample.iterdir() if path.is_file()})
    load("org/model")
    data = tmp_path / "text.jsonl"
    if tokens:
        data = tokenize(data, tmp_path / "tokens", tokenizer="org/model").folder
    before = len(hub.asked)
    trained(tmp_path, model="org/model", data=data, tokens=512, offline=True)
    gptkit.swap("sample:gpt2", tmp_path / "rms", norm="rmsnorm", approximate=True, measured=False)
    budget: dict[str, Any] = {"context": 32, "batch": 256, "tokens": 256}
    heal(tmp_path / "rms", "org/model", data, tmp_path / "healed", **budget, local=0, beside=False, offline=True)
    plan = 'base = "org/model"\nhow = "heal"\ntokens = 256\ncontext = 32\nbatch = 256\nseeds = 1\n'
    (tmp_path / "plan.toml").write_text(f'{plan}[[variant]]\nname = "rms"\nswap = ["norm=rmsnorm"]\n')
    ablate(tmp_path / "plan.toml", tmp_path / "table", data=tmp_path / "text.jsonl", offline=True)
    assert hub.asked[before:] == []


def test_a_text_may_be_one_path_and_written_in_another_way(tmp_path: Path, monkeypatch) -> None:
    made(tmp_path)
    monkeypatch.chdir(tmp_path)
    stopped(tmp_path, data="./text.jsonl")
    trained(tmp_path, data="text.jsonl", resume=True)
    assert tokenize("text.jsonl", "tokens", vocabulary=300).tokens > 0


def test_a_prompt_that_is_too_long_is_refused_at_once(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(UsageError, match="the model's position table has only"):
        trained(tmp_path, model="sample:gpt2", sample="a b " * 300, tell=lambda step: pytest.fail("it began"))


def test_held_out_text_is_another(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "other.txt").write_text("abc abb " * 200)
    shares, other = trained(tmp_path), trained(tmp_path, "other", held_out=tmp_path / "other.txt")
    assert shares.held_out != other.held_out
    assert (
        open_tokens(tmp_path / "other.training/held-out").tokenizer
        == open_tokens(tmp_path / "other.training/data").tokenizer
    )
    tokenize([tmp_path / "other.txt"], tmp_path / "apart", vocabulary=257)
    with pytest.raises(UsageError, match="with another tokenizer"):
        trained(tmp_path, "third", model="sample:gpt2", held_out=tmp_path / "apart")


def test_tokens_are_of_the_checkpoints_tokenizer(tmp_path: Path) -> None:
    made(tmp_path)
    text = tmp_path / "text.jsonl"
    own, other = (
        [tokenize([text], tmp_path / name, tokenizer=each, vocabulary=None if each else 300).folder]
        for name, each in (("own", "sample:gpt2"), ("foreign", None))
    )
    options: dict[str, Any] = {"model": "sample:gpt2", "tokens": 512}
    with pytest.raises(UsageError, match=r"foreign was not tokenised with the tokenizer of sample:gpt2"):
        trained(tmp_path, data=other, **options)
    gptkit.convert("sample:gpt2", tmp_path / "model.gguf", "gguf")
    with pytest.raises(UsageError, match="was not tokenised with the tokenizer of"):
        trained(tmp_path, data=other, **{**options, "model": tmp_path / "model.gguf"})
    with pytest.raises(UsageError, match=r"own, a folder of tokens that already has a tokenizer\n.*--tokenizer"):
        trained(tmp_path, data=own, tokenizer="sample:gpt2", **options)
    assert not (tmp_path / "out").exists()
    trained(tmp_path, data=own, **options)
    trained(tmp_path, "anew", data=other, random=True, **options)


@few(1)
@pytest.mark.parametrize("sample", ["sample:gpt2", "sample:llama"])
def test_a_gguf_has_the_tokenizer_of_the_model_that_it_was_made_from(sample: str, tmp_path: Path) -> None:
    """It says the same in other words."""
    made(tmp_path)
    text, gguf = tmp_path / "text.jsonl", tmp_path / "model.gguf"
    gptkit.convert(sample, gguf, "gguf")
    plain, inside = (tokenize([text], tmp_path / str(i), tokenizer=each) for i, each in enumerate((sample, gguf)))
    assert plain.digest == inside.digest and plain.tokenizer != inside.tokenizer
    options: dict[str, Any] = {"tokens": 512, "held_out": inside.folder}
    trained(tmp_path, "one", model=gguf, data=[plain.folder], **options)
    trained(tmp_path, "other", model=sample, data=[inside.folder], **{**options, "held_out": plain.folder})
    ids, words = (json.loads((plain.folder / "tokenizer.json").read_text()) for _ in range(2))
    vocab = ids["model"]["vocab"]
    vocab["X"], vocab["Z"] = vocab["Z"], vocab["X"]  # which no sample shows
    words["pre_tokenizer"]["add_prefix_space"] = True
    for name, data in (("ids", ids), ("words", words)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
        foreign = tokenize([text], tmp_path / name, tokenizer=tmp_path / f"{name}.json").folder
        with pytest.raises(UsageError, match="was not tokenised with the tokenizer of"):
            trained(tmp_path, "third", model=gguf, data=[foreign], **options)
        with pytest.raises(UsageError, match="with another tokenizer"):
            trained(tmp_path, "third", model=gguf, data=[inside.folder], **{**options, "held_out": foreign})


def test_a_reader_of_measurements_sees_all_of_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with Watched(True, tmp_path / "pipe") as watched:
        watched.about = mock.Mock(settings={"windows": 1, "context": 8, "steps": 2}, flops=1, peak=1.0)
        for number in (1, 2):
            with pytest.raises(BlockingIOError):  # empty, and not at its end
                os.read(reader, 1)
            watched.step(loop.TrainingStep(number, 8, 1.0, 1.0, 3.0, 1e-3, 1.0))
            assert json.loads(os.read(reader, 2**16))["step"] == number
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_run_that_still_loads_loses_nothing_to_a_second_call(tmp_path: Path) -> None:
    made(tmp_path)
    folder = tmp_path / "out.training"
    folder.mkdir()
    with locked(folder):
        with pytest.raises(GptkitError, match=r"another gptkit process .* is writing .*out\.training"):
            trained(tmp_path)
        assert folder.is_dir()
    trained(tmp_path)


def test_tensorboard_is_told(tmp_path: Path, monkeypatch) -> None:
    made(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["train", "tree.json", "out", "--data", "text.jsonl", "--tokens", "1k", "--context", "32", "--batch", "512"]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    done = call(*words, "--tensorboard", "board")
    assert done.exit_code == 2 and "gptkit[tensorboard]" in done.output
    writer = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    assert call(*words, "--tensorboard", "board").exit_code == 0
    told = {(each.args[0], each.args[2]) for each in writer.SummaryWriter.return_value.add_scalar.call_args_list}
    assert {("loss", 1), ("loss", 2), ("held_out", 2)} <= told


def test_a_large_loss_keeps_its_column(capsys) -> None:
    watched = Watched(False)
    watched.about = mock.Mock(settings={"windows": 1, "context": 8, "steps": 2}, flops=1, peak=1.0)
    for loss in (999.9999, 3163.8079, 12345678.9):
        watched.step(loop.TrainingStep(1, 1280, 1.0, 1.0, loss, 1e-3, 1.0, loss * 2))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[1:4] for row in rows] == [
        ["1,280", "999.9999", "2.00e+03"],
        ["1,280", "3.16e+03", "6.33e+03"],
        ["1,280", "1.23e+07", "2.47e+07"],
    ]


def test_what_is_measured_is_said() -> None:
    peak, by = peak_flops(torch.device("cpu"), "float32")
    assert peak > 1e8 and "measured" in by


def test_the_command_says_what_it_does(tmp_path: Path, monkeypatch) -> None:
    made(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["train", "tree.json", "out", "--data", "text.jsonl", "--tokens", "2k", "--context", "32", "--batch", "512"]
    done = call(*words, "--sample", "abc", "--metrics", "all.jsonl", env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert "2 steps" in done.output or "4 steps of 512 tokens, 32 per window" in done.output
    assert "held-out loss" in done.output and max(map(len, done.output.splitlines())) <= 100
    assert Path("all.jsonl").read_text() == Path("out.training/metrics.jsonl").read_text()
    assert call(*words).exit_code == 2 and "exists" in call(*words).output
    done = call(*words[:2], "once", *words[3:5], "--tokens", "1k", "--batch", "1024", "--context", "32")
    assert "1 step of 1,024 tokens" in done.output and ", float32, 1 step in" in done.output
    assert "held-out loss" in done.output and "after step" not in done.output
    for share in ("-0.1", "1e1", "+2."):
        refused = call(*words[:2], "more", *words[3:], "--held-out", share)
        assert refused.exit_code == 2 and f"between 0 and 1, not {float(share):g}" in refused.output
    assert call(*words[:2], "tenth", *words[3:], "--held-out", "1e-1", "-q").exit_code == 0
    short = call(*words[:2], "more", *words[3:5], "--tokens", "1M", "--context", "100000")
    assert short.exit_code == 2 and "the text is shorter than one window (--context) of 100,000 tokens" in short.output
    assert call(*words[:4], "--time", "soon", "out").exit_code == 2
    assert BUDGET["context"] == 32


@pytest.mark.slow
def test_what_fails_in_several_processes_is_told_once(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "out").mkdir()
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gptkit", "train", "tree.json", "out"]
    done = python(*ranks, "--data", "text.jsonl", "--tokens", "1k", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1 and done.stderr.count("gptkit: ") == 1 and "out exists" in done.stderr


@pytest.mark.slow
def test_a_full_disk_is_told_once_by_several_processes(tmp_path: Path) -> None:
    made(tmp_path)
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gptkit", "train", "tree.json", "out"]
    words = ["--data", "text.jsonl", "--tokens", "1k", "--context", "32", "--metrics", "/dev/full"]
    done = python(*ranks, *words, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1 and "could not write /dev/full: No space left" in done.stderr
    assert done.stderr.count("gptkit: ") == 1 and "This is a bug" not in done.stderr
