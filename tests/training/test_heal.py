"""gptkit heal: what a change cost comes back, beside a control and a floor; what is told is what was written."""

import errno
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers.command import call
from helpers.covering import exhaustive, few
from helpers.processes import python

import gptkit
from gptkit.components import Attention
from gptkit.converter.files import locked
from gptkit.converter.manifest import check_manifest, manifest_of
from gptkit.errors import CannotExpress, GptkitError, InvalidInput, SwapRefused, UsageError
from gptkit.modules import Decoder
from gptkit.modules.load import load
from gptkit.parity.diff import diff
from gptkit.surgery.recipe import read_recipe
from gptkit.training import distillation, state
from gptkit.training.data import Stretch, Windows
from gptkit.training.distillation import TeacherLogits, block_local, distilled, divergence
from gptkit.training.heal import heal
from gptkit.training.loop import Batch, TrainingStep
from gptkit.training.rates import first_guess
from gptkit.training.runs import HeldOutFigures
from gptkit.training.trainable import changed_layers, touched

PLAY = Path(gptkit.__file__).parent / "samples" / "play.txt"
TEACHER = "sample:gpt2"
BUDGET: dict[str, Any] = {"tokens": 8 * 256, "context": 64, "batch": 256, "held_out": 0.005}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healing") / "rms"
    assert call("swap", TEACHER, folder, "--norm", "rmsnorm", "--approximate", "-q").exit_code == 0
    return folder


def batch(count: int = 2) -> Batch:
    ids = torch.randint(0, 512, (count, 16), generator=torch.Generator().manual_seed(1))
    return Batch(ids, ids.roll(-1, 1), None)


@exhaustive
def test_it_gives_back_what_the_change_cost(changed: Path, tmp_path: Path) -> None:
    told: list[tuple[str, TrainingStep]] = []
    how: dict[str, Any] = {**BUDGET, "local": 0.25, "seeds": 2}
    done = heal(changed, TEACHER, [PLAY], tmp_path / "out", **how, tell=lambda *each: told.append(each))
    assert done.original.kl == 0 < done.healed.kl < 0.5 * done.start.kl
    assert done.recovered == 1 - done.healed.kl / done.start.kl
    assert done.control is not None and done.floor is not None
    assert done.control.loss < done.original.loss  # the text alone makes even the original better on it
    assert done.floor.kl > done.start.kl  # so few steps from random weights are no way
    assert done.local == (0, 1, 2, 3) and done.steps == 8
    kinds = {name for name, _ in told}
    assert {"healed-layers-0", "healed-1", "control-0", "floor-1"} <= kinds
    # What was measured is what was written, in files for transformers' class or in gptkit's own.
    assert check_manifest(tmp_path / "out") == []
    record = manifest_of(tmp_path / "out")["history"][-1]["healed"]
    assert record["recovered"] == done.recovered and record["seeds"] == 2
    original, healed = (load(each, "float32") for each in (TEACHER, tmp_path / "out"))
    with torch.no_grad():
        near, far = (float(distilled(original)(each, batch())) for each in (healed, load(changed, "float32")))
    assert near < 0.9 * far  # on ids that no text has, too
    assert not list((tmp_path / "out.healing").rglob("step-*"))


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_a_healed_model_and_its_control_read_the_same_windows(
    changed: Path, tmp_path: Path, monkeypatch, steps: int
) -> None:
    """Layers by themselves the first of them, and the whole model the rest."""
    read: list[int] = []
    step = Stretch.step

    def noted(self: Stretch, number: int, count: int, seed: int) -> Windows:
        read.append(number)
        return step(self, number, count, seed)

    monkeypatch.setattr(Stretch, "step", noted)
    options = {**BUDGET, "tokens": steps * BUDGET["batch"], "local": 0.3, "seeds": 1, "beside": "control"}
    done = heal(changed, TEACHER, [PLAY], tmp_path / "out", **options, rate=1e-3)
    trials = [*range(5)] * len(done.control.tried) if done.control else []
    assert read == [*range(steps), *trials, *range(steps)] and done.steps == steps
    assert bool(done.local) is (steps > 1)


@exhaustive
def test_few_tokens_are_many_steps_where_nobody_says_how_large_a_step_is(changed: Path, tmp_path: Path) -> None:
    budget = {**BUDGET, "tokens": 1024}
    large = heal(changed, TEACHER, [PLAY], tmp_path / "large", **budget, beside="floor")
    assert large.floor is not None and large.control is None
    small = heal(changed, TEACHER, [PLAY], tmp_path / "small", **{**budget, "batch": None}, beside=False)
    assert (small.steps, large.steps) == (16, 4) and small.healed.kl < large.healed.kl


@pytest.mark.parametrize("hidden", [0.0, pytest.param(1.0, marks=exhaustive)])
def test_compiled_it_is_the_same(hidden: float, changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    compiled: list[object] = []

    def traced(model: torch.nn.Module) -> object:  # without what takes a C++ compiler half a minute
        compiled.append(type(model))
        return compile_it(model, backend="aot_eager", fullgraph=True)

    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", traced)
    how: dict[str, Any] = {**BUDGET, "tokens": 1024, "beside": False, "local": 0, "hidden": hidden}
    plain, done = (heal(changed, TEACHER, [PLAY], tmp_path / f"{c}", **how, compiled=c) for c in (False, True))
    assert done.healed.kl == pytest.approx(plain.healed.kl, rel=1e-4) and done.healed.kl < 0.9 * done.start.kl
    assert compiled == [Decoder] * (1 if hidden else 2)  # both models; where streams are compared, what learns alone


def test_beside_an_original_in_gguf(tmp_path: Path) -> None:
    """Its tokenizer lies in the mapped file, which the control, a copy of the model, has too."""
    teacher = tmp_path / "llama.gguf"
    gptkit.convert("sample:llama", teacher, "gguf")
    gptkit.swap(teacher, tmp_path / "mqa", attention="mqa", approximate=True, measured=False)
    done = heal(tmp_path / "mqa", teacher, [PLAY], tmp_path / "out", **BUDGET, beside="control")
    assert done.control is not None and done.control.loss < done.original.loss
    assert 0 < done.healed.kl < done.start.kl


@few(1)
@pytest.mark.parametrize("trained", ["changed", "norms", "lora:2"])
def test_only_what_is_chosen_changes(trained: str, changed: Path, tmp_path: Path) -> None:
    heal(changed, TEACHER, [PLAY], tmp_path / "out", **{**BUDGET, "tokens": 1024}, trained=trained, beside=False)
    moved = {each.name for each in diff(changed, tmp_path / "out", rank=False).changed}
    assert moved
    before = load(changed, "float32")
    matrices = {each.name for each in before.spec.parameters() if len(each.shape) > 1 and each.role != "table"}
    expected = {
        "changed": touched(load(TEACHER, "float32"), before),
        "norms": {name for name, _ in before.named_parameters() if "norm" in name},
        "lora:2": matrices,
    }[trained]
    assert moved <= expected
    if trained == "lora:2":
        figures = [each.figures for each in diff(changed, tmp_path / "out").changed]
        assert {each.rank.rank for each in figures if each and each.rank} <= {0, 1, 2}


def test_what_is_trained_whole_has_not_the_rate_of_low_ranks(changed: Path, tmp_path: Path) -> None:
    options = {**BUDGET, "tokens": 512, "trained": "lora:2", "beside": "floor"}
    done = heal(changed, TEACHER, PLAY, tmp_path / "out", **options)
    assert done.floor is not None and done.healed.tried == ()  # two steps are too few for trials
    assert done.healed.rate == pytest.approx(3 * first_guess(done.floor.rate, done.start.kl))


@exhaustive
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(changed: Path, tmp_path: Path) -> None:
    options = {**BUDGET, "every": 2, "tokens": 4 * 256}
    heal(changed, TEACHER, [PLAY], tmp_path / "whole", **options)
    seen = 0

    def stop(name: str, step: TrainingStep) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heal(changed, TEACHER, [PLAY], tmp_path / "parts", **options, tell=stop)
    assert not (tmp_path / "parts").exists()
    with pytest.raises(UsageError, match="--resume"):
        heal(changed, TEACHER, [PLAY], tmp_path / "parts", **options)
    heal(changed, TEACHER, [PLAY], tmp_path / "parts", **options, resume=True)
    assert diff(tmp_path / "whole", tmp_path / "parts", rank=False).same_bytes


def test_the_teachers_logits_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same ids, shape, documents and dtype of products, as far as the memory for them goes."""
    teacher, calls = load(TEACHER, "float32"), list[int]()
    teacher.register_forward_hook(lambda *_: calls.append(1))
    answers, some = TeacherLogits(teacher), batch()
    wanted = teacher(some.ids)
    assert all(torch.equal(answers(some), wanted) for _ in range(3)) and len(calls) == 2
    flat = Batch(some.ids.reshape(1, -1), some.targets.reshape(1, -1), None)
    apart = Batch(flat.ids, flat.targets, torch.arange(2).repeat_interleave(16)[None])
    assert torch.equal(answers(apart).reshape(wanted.shape)[0], answers(flat)[0, :16])
    assert not torch.allclose(answers(apart), answers(flat)) and len(calls) == 4
    with torch.autocast("cpu", torch.bfloat16):
        narrow = answers(some)
    assert len(calls) == 5 and not torch.equal(narrow.float(), wanted)
    monkeypatch.setattr(distillation, "_REMEMBERED", wanted.nbytes - 1)
    small = TeacherLogits(teacher)
    assert torch.equal(small(some), wanted) and torch.equal(small(some), wanted) and len(calls) == 7
    student = load(TEACHER, "float32")
    student.embedding.weight.data *= 1.1
    with torch.no_grad():  # an evaluation has the same loss with them
        assert distilled(teacher, answers=answers)(student, some) == distilled(teacher)(student, some)


@torch.no_grad()
def test_losses_are_what_they_are_called() -> None:
    teacher = load(TEACHER, "float32")
    some = batch()
    assert float(distilled(teacher)(teacher, some)) == pytest.approx(0, abs=1e-6)
    assert float(block_local(teacher, (0, 2))(teacher, some)) == 0
    with torch.enable_grad():
        assert float(distilled(teacher, hidden=1.0)(teacher, some).detach()) == pytest.approx(0, abs=1e-6)
        student = load(TEACHER, "float32")
        student.blocks[3].feed_forward.down_proj.bias.data += 0.5
        plain, more = (float(distilled(teacher, hidden=weight)(student, some).detach()) for weight in (0.0, 2.0))
        # Behind the last of four layers alone, and by what was added: Σ 112 · ½² over the mean of |x|², over 4 layers.
        stream: list[torch.Tensor] = []
        hook = teacher.blocks[3].register_forward_hook(lambda _, __, output: stream.append(output.detach()))
        teacher(some.ids)
        hook.remove()
        far = some.ids.numel() * 112 * 0.25 / float(stream[0].square().sum(dim=-1).mean())
        assert more - plain == pytest.approx(2.0 * far / 4, rel=1e-3)
    wanted, given = (torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    counted = torch.tensor([[True, False, True], [False, True, True]])
    p, q = wanted.softmax(-1), given.softmax(-1)
    plain = sum(float((p[i, j] * (p[i, j] / q[i, j]).log()).sum()) for i, j in counted.nonzero())
    assert float(divergence(wanted, given, counted)) == pytest.approx(plain, rel=1e-5)
    # Another vocabulary: what it has more takes probability from the others, what it lacks is left out.
    more = torch.cat([given, torch.full((2, 3, 2), 1.0)], dim=-1)
    lost = sum(float(more[i, j].logsumexp(-1) - given[i, j].logsumexp(-1)) for i, j in counted.nonzero())
    assert float(divergence(wanted, more, counted)) == pytest.approx(plain + lost, rel=1e-5)
    fewer = divergence(wanted, given[..., :5], counted)
    assert float(fewer) == pytest.approx(float(divergence(wanted[..., :5], given[..., :5], counted)), rel=1e-5)
    assert HeldOutFigures(0.0, math.log(8)).perplexity == pytest.approx(8)


def test_what_a_change_touched(changed: Path) -> None:
    before, after = load(TEACHER, "float32"), load(changed, "float32")
    assert changed_layers(before, after) == (0, 1, 2, 3)
    names = touched(before, after)
    assert {"blocks.0.attention_norm.weight", "final_norm.weight"} <= names
    assert touched(before, before) == set() and changed_layers(before, before) == ()


@torch.no_grad()
def test_a_block_is_trained_on_what_the_original_was_given(changed: Path) -> None:
    """One layer's loss does not move where another layer of the student is broken."""
    teacher, student = load(TEACHER, "float32"), load(changed, "float32")
    loss = block_local(teacher, (2,))
    before = float(loss(student, batch()))
    next(student.blocks[0].parameters()).add_(1)
    assert float(loss(student, batch())) == before > 0


def test_bad_input_is_told(changed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def unread(*_: int) -> None:
        raise AssertionError("a text was read")

    for options, why in (
        ({"trained": "everything"}, "--train must be all, changed, norms or lora:RANK, not 'everything'"),
        ({"trained": "lora:0"}, "not 'lora:0'(.|\n)*a whole number of 1 or more"),
        ({"trained": "lora:10000"}, "lora:10000: the rank must not be larger"),
        ({"seeds": 0}, "seeds must be 1 or more"),
        ({"beside": "ceiling"}, "beside must be .*, not 'ceiling'"),
        ({"context": 10**6}, "--batch is smaller than one window"),
        ({"context": 0}, "--context must be 1 or more, not 0"),
        ({"rate": 0}, "--lr, the learning rate, must be more than 0"),
        ({"dtype": "int8"}, "dtype must be float32 or bfloat16, not 'int8'"),
        ({"out": Path(), "force": False}, "exists"),
    ):
        with pytest.raises(UsageError, match=why):
            heal(changed, TEACHER, PLAY, **{"out": out, **BUDGET, **options}, progress=unread)
    other = shutil.copytree(changed, tmp_path / "other")
    data = json.loads((other / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    vocab["q"], vocab["u"] = vocab["u"], vocab["q"]
    (other / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="encode the same text differently"):
        heal(other, TEACHER, [PLAY], out, **BUDGET)
    for words in (["heal", changed, out, "--teacher", TEACHER], ["train", TEACHER, out]):
        before = set(tmp_path.iterdir())
        assert call(*words, "--data", tmp_path / "nope.txt", "--tokens", "1k").exit_code == 4
        assert set(tmp_path.iterdir()) == before  # nothing is left of a run that never began
    assert not out.exists()


def test_tokens_of_another_tokenizer_are_refused(changed: Path, tmp_path: Path) -> None:
    gptkit.tokenize([PLAY], tmp_path / "other", vocabulary=512)  # as many as the models have, and other ones
    with pytest.raises(UsageError, match="was not tokenised with the tokenizer of"):
        heal(changed, TEACHER, [tmp_path / "other"], tmp_path / "out", **BUDGET)
    gptkit.tokenize([PLAY], tmp_path / "own", tokenizer=TEACHER)
    done = heal(changed, TEACHER, [tmp_path / "own"], tmp_path / "out", **{**BUDGET, "tokens": 512}, beside=False)
    assert done.healed.kl < done.start.kl
    gptkit.convert(TEACHER, tmp_path / "teacher.gguf", "gguf")
    options: Any = {**BUDGET, "tokens": 512, "beside": False, "held_out": tmp_path / "own"}
    heal(changed, tmp_path / "teacher.gguf", [tmp_path / "own"], tmp_path / "by-gguf", **options)


def test_a_run_that_still_loads_loses_nothing_to_a_second_call(changed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out.healing"
    folder.mkdir()
    with locked(folder):
        with pytest.raises(GptkitError, match=r"another gptkit process .* is writing .*out\.healing"):
            heal(changed, TEACHER, PLAY, tmp_path / "out", **BUDGET)
        assert folder.is_dir()


def test_what_cannot_be_written_is_refused_before_anything_is_trained(changed: Path, tmp_path: Path) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it began")

    before = set(tmp_path.iterdir())
    for form, kind in (("bogus", UsageError), ("hf:auto", CannotExpress), ("hf:llama", CannotExpress)):
        with pytest.raises(kind):
            heal(changed, TEACHER, [PLAY], tmp_path / "out", **BUDGET, to=form, on_start=never)
        assert set(tmp_path.iterdir()) == before
    # Biases of zeros are nothing that a family lacks, until they are trained.
    llama = load("sample:llama", "float32")

    def biased(each: Any, _: str) -> Any:
        return msgspec.structs.replace(each, output_bias=True) if isinstance(each, Attention) else each

    zeros = Decoder(llama.spec.mapped(biased))
    zeros.load_state_dict({**{n: torch.zeros_like(p) for n, p in zeros.named_parameters()}, **llama.state_dict()})
    gptkit.save(zeros, tmp_path / "zeros")
    options = {**BUDGET, "tokens": 256, "beside": False, "to": "hf:llama", "local": 0}
    with pytest.raises(CannotExpress, match="output_bias"):
        heal(tmp_path / "zeros", "sample:llama", [PLAY], tmp_path / "out", **options, on_start=never)
    heal(tmp_path / "zeros", "sample:llama", [PLAY], tmp_path / "out", **options, trained="norms")
    assert gptkit.open_checkpoint(tmp_path / "out").origin.family == "llama"


def test_the_command_tells_all_of_it(changed: Path, tmp_path: Path) -> None:
    words = ["heal", changed, tmp_path / "out", "--teacher", TEACHER, "--data", PLAY, "--tokens", "512"]
    words += ["--context", "64", "--batch", "256", "--held-out", "0.005"]
    told = call(*words)
    assert told.exit_code == 0, told.output
    assert "of the gap in KL is closed" in told.stdout and "control" in told.stdout and "floor" in told.stdout
    assert max(map(len, told.stdout.replace(str(tmp_path), "").splitlines())) <= 80
    data = json.loads(call(*words, "--force", "--json", "--alone").stdout)
    assert data["control"] is None and 0 < data["healed"]["kl"] < data["start"]["kl"]


@exhaustive
def test_what_a_family_has_leaves_as_its_files(tmp_path: Path) -> None:
    assert call("swap", "sample:llama", tmp_path / "mqa", "--attention", "mqa", "--approximate", "-q").exit_code == 0
    options = {**BUDGET, "tokens": 512}
    heal(tmp_path / "mqa", "sample:llama", [PLAY], tmp_path / "out", **options, beside=False)
    opened = gptkit.open_checkpoint(tmp_path / "out")
    assert (opened.format, opened.origin.family) == ("hf", "llama")
    assert opened.spec.blocks[0].attention.kv_heads == 1


def test_a_recipe_heals_at_its_end(tmp_path: Path) -> None:
    play, recipe = tmp_path / "play.txt", tmp_path / "mqa.toml"
    play.write_bytes(PLAY.read_bytes()[:20_000])  # of which a share is held out
    settings = "tokens = 1024, train = 'changed', context = 64, batch = 256, beside = false"
    text = "as = 'auto'\n[[step]]\nattention = 'mqa'\napproximate = true\n"
    recipe.write_text(f"{text}[[step]]\nheal = '{play}'\nsettings = {{ {settings} }}\n")
    changed = tmp_path / "out.healing" / "changed"  # as a run leaves it that was killed
    changed.parent.mkdir()
    gptkit.convert("sample:gpt2", changed, to="local")
    told = call("swap", "sample:llama", tmp_path / "out", "--recipe", recipe, "--no-measure")
    assert told.exit_code == 0, told.output
    assert "of the gap in KL is closed" in told.stdout and "healing " in told.stdout
    manifest = manifest_of(tmp_path / "out")
    healed = manifest["history"][-1]["healed"]
    assert healed["train"] == "changed" and healed["tokens"] == 1024 and "seconds" not in healed["healed"]
    assert healed["texts"][0]["bytes"] == play.stat().st_size
    # What leaves as Hugging Face files says so on its card, in the very figures.
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| changed, healed | {healed['healed']['kl']:.4f} |" in card
    assert "1. `attention = mqa`: approximate" in card
    # What it wrote is the recipe, healing and all: the same bytes again.
    assert [each.option for each in read_recipe(tmp_path / "out").every] == ["attention", "heal"]
    again = call("swap", "sample:llama", tmp_path / "again", "--recipe", tmp_path / "out", "--no-measure", "-q")
    assert again.exit_code == 0, again.output
    assert diff(tmp_path / "out", tmp_path / "again", rank=False).same_bytes
    assert changed.parent.is_dir() and not list(tmp_path.rglob("*changed*"))


@few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"held_out": 0.01, "decay": 0.2, "warmup": 0.3, "clip": 0.1, "accumulate": 2},
        {"held_out": "other.txt", "every": 1, "patience": 1, "dtype": "bfloat16", "trained": "lora:2"},
    ],
)
def test_what_was_healed_is_its_recipe(options: dict[str, Any], changed: Path, tmp_path: Path, monkeypatch) -> None:
    """Of the same bytes: whatever moves them is in the manifest."""
    monkeypatch.chdir(tmp_path)
    Path("other.txt").write_text(PLAY.read_text()[:5000])
    heal(changed, TEACHER, PLAY, "out", **{**BUDGET, "tokens": 1024, **options}, beside=False)
    gptkit.swap(TEACHER, "again", recipe="out", measured=False)
    assert diff("out", "again", rank=False).same_bytes
    healing = read_recipe("out").heal
    assert healing is not None and healing.settings["rate"] > 0  # the one that was chosen
    # A second healing would be one of the swap alone.
    heal("out", TEACHER, PLAY, "twice", **{**BUDGET, "tokens": 256, "local": 0}, beside=False)
    assert "swap" not in manifest_of(Path("twice"))


def test_a_recipe_whose_swap_is_refused_leaves_nothing(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(f"[[step]]\nattention = 'gqa:7'\n[[step]]\nheal = '{PLAY}'\nsettings = {{ tokens = 512 }}\n")
    with pytest.raises(SwapRefused):
        gptkit.swap("sample:llama", tmp_path / "out", recipe=recipe)
    assert list(tmp_path.iterdir()) == [recipe]


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ("[[step]]\nheal = 'a.txt'\n[[step]]\nattention = 'mqa'", "heal must be the last step"),
        ("[[step]]\nheal = 'a.txt'", "heal must be the last step"),
        ("[[step]]\nattention = 'mqa'\n[[step]]\nheal = 'a.txt'\nblocks = '1'", "cannot have the keys blocks"),
        ("[[step]]\nattention = 'mqa'\n[[step]]\nheal = 'a.txt'\nsettings = { steps = 3 }", "no setting 'steps'"),
        ("[[step]]\nattention = 'mqa'\n[[step]]\nheal = 'a.txt'\nsettings = { rate = 'x' }", "must be a number"),
        ("[[step]]\nattention = 'mqa'\n[[step]]\nheal = 'a.txt'\nsettings = { held_out = true }", "a number or text"),
    ],
)
def test_what_no_recipe_heals(steps: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(steps)
    with pytest.raises(InvalidInput, match=why):
        gptkit.swap("sample:llama", tmp_path / "out", recipe=tmp_path / "r.toml")


# --- several processes, and what goes wrong ---------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_heal_as_one(changed: Path, tmp_path: Path) -> None:
    words = ["-m", "gptkit", "heal", str(changed), "--teacher", TEACHER, "--data", str(PLAY), "--tokens", "3k"]
    words += ["--context", "64", "--batch", "512", "--held-out", "0.02", "--lr", "0.001", "--alone"]
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    env = {"OMP_NUM_THREADS": "1"}
    one = python(*words, "one", cwd=tmp_path, env=env)
    two = python(*ranks, *words, "two", cwd=tmp_path, env=env)
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert two.stdout.count("of the gap in KL is closed") == 1
    for run in ("healed-0",):
        first, second = (
            [json.loads(line) for line in (tmp_path / f"{name}.healing/{run}/metrics.jsonl").read_text().splitlines()]
            for name in ("one", "two")
        )
        assert len(first) == len(second) > 0
        for a, b in zip(first, second, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    # Biases of keys have no gradient but rounding, of which AdamW makes whole steps; they are in no logit.
    with torch.no_grad():
        first, second = (load(tmp_path / name)(batch().ids) for name in ("one", "two"))
    assert float((first - second).abs().max()) < 1e-3 * float(first.abs().max())
    lora = python(*ranks, *words, "no", "--train", "lora:2", cwd=tmp_path, env=env)
    assert (
        lora.returncode == 1
        and lora.stderr.count("gptkit: ") == 1
        and "lora:RANK does not work with several processes" in lora.stderr
    )


def stopped_at(name: str, number: int, do: Callable[[], object]) -> Callable[[str, TrainingStep], None]:
    """Something that is done once a run has come to a step."""

    def tell(told: str, step: TrainingStep) -> None:
        if (told, step.step) == (name, number):
            do()

    return tell


PARTS: dict[str, Any] = {**BUDGET, "every": 2, "tokens": 6 * 256, "beside": False, "local": 0.0}


@pytest.fixture(scope="module")
def whole(changed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of these parts gives that nothing stops."""
    return heal(changed, TEACHER, [PLAY], tmp_path_factory.mktemp("whole") / "out", **PARTS).folder


@pytest.mark.exhaustive
def test_no_number_stops_it_and_names_the_tensor(changed: Path, whole: Path, tmp_path: Path, monkeypatch) -> None:
    count: list[int] = []

    def broken(wanted: torch.Tensor, given: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        count.extend([1] * given.requires_grad)
        return divergence(wanted, given, counted) * (math.nan if len(count) == 5 else 1)

    monkeypatch.setattr(distillation, "divergence", broken)
    with pytest.raises(GptkitError, match=r"stopped at step \d+: the \S.* is NaN or infinite"):
        heal(changed, TEACHER, [PLAY], tmp_path / "out", **PARTS)
    assert len(list((tmp_path / "out.healing" / "healed-0").glob("step-*"))) == 1
    monkeypatch.undo()
    heal(changed, TEACHER, [PLAY], tmp_path / "out", **PARTS, resume=True)
    assert diff(whole, tmp_path / "out", rank=False).same_bytes


@pytest.mark.exhaustive
def test_a_full_disk_costs_no_checkpoint(changed: Path, whole: Path, tmp_path: Path, monkeypatch) -> None:
    write, calls = state.Store._write_alone, list[int]()

    def full(self: state.Store, path: Path, tensors: Any) -> None:
        calls.append(1)
        if len(calls) == 3:  # the first is of the start, which may turn out to be the best
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, path, tensors)

    monkeypatch.setattr(state.Store, "_write_alone", full)
    with pytest.raises(GptkitError, match="No space left"):
        heal(changed, TEACHER, [PLAY], tmp_path / "out", **PARTS)
    (kept,) = (tmp_path / "out.healing" / "healed-0").glob("step-*")
    assert kept.name == "step-00000002" and not (tmp_path / "out").exists()
    heal(changed, TEACHER, [PLAY], tmp_path / "out", **PARTS, resume=True)
    assert diff(whole, tmp_path / "out", rank=False).same_bytes


@pytest.mark.exhaustive
def test_a_text_that_changed_is_told(changed: Path, tmp_path: Path) -> None:
    text = Path(shutil.copy(PLAY, tmp_path / "play.txt"))
    tokens = tmp_path / "out.healing" / "data" / "tokens.bin"
    cut = stopped_at("healed-0", 3, lambda: tokens.write_bytes(tokens.read_bytes()[:-2]))
    with pytest.raises(InvalidInput, match="changed since it was opened"):
        heal(changed, TEACHER, [text], tmp_path / "out", **PARTS, tell=cut)
    with pytest.raises(InvalidInput, match="do not match its manifest"):
        heal(changed, TEACHER, [text], tmp_path / "out", **PARTS, resume=True)

    def enough() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        heal(changed, TEACHER, [text], tmp_path / "out", **PARTS, force=True, tell=stopped_at("healed-0", 3, enough))
    text.write_text(text.read_text() + "more")
    with pytest.raises(InvalidInput, match="the texts differ from those at the start of the run in"):
        heal(changed, TEACHER, [text], tmp_path / "out", **PARTS, resume=True)
    assert not (tmp_path / "out").exists()


def test_an_interruption_loses_nothing(changed: Path, whole: Path, tmp_path: Path) -> None:
    """Ctrl-C: the step is ended and kept, and the same call goes on to the same bytes."""
    stop = stopped_at("healed-0", 3, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as caught:
        heal(changed, TEACHER, [PLAY], tmp_path / "out", **PARTS, tell=stop)
    assert any("with --resume to continue" in note for note in caught.value.__notes__)
    assert len(list((tmp_path / "out.healing" / "healed-0").glob("step-*"))) == 1
    heal(changed, TEACHER, [PLAY], tmp_path / "out", **PARTS, resume=True)
    # Every file, for nothing of what is written says how long it took.
    first, second = ({each.name: each.read_bytes() for each in out.iterdir()} for out in (whole, tmp_path / "out"))
    assert first == second


def stopped(changed: Path, out: Path, text: Path = PLAY, name: str = "healed-0", **options: Any) -> None:
    """A run that was stopped in its third step."""
    stop = stopped_at(name, 3, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        heal(changed, TEACHER, [text], out, **{**PARTS, **options}, tell=stop)


@exhaustive
def test_only_the_same_call_goes_on(changed: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped(changed, out)
    for model in (TEACHER, changed):
        loaded = load(model, "float32")
        loaded.final_norm.weight.data.mul_(1.01)
        gptkit.save(loaded, tmp_path / f"other-{Path(model).name}")
    for another, what in (
        ({"trained": "norms"}, "train was 'all', and is now 'norms'"),
        ({"held_out": 0.01}, "the held-out text is different"),
        ({"decay": 0.1}, "decay was 0.0, and is now 0.1"),
        ({"teacher": tmp_path / "other-sample:gpt2"}, "the teacher is different"),
        ({"changed": tmp_path / "other-rms"}, "the changed model is different"),
    ):
        call_of: dict[str, Any] = {"changed": changed, "teacher": TEACHER, **PARTS, **another}
        with pytest.raises(UsageError, match=what):
            heal(data=[PLAY], out=out, **call_of, resume=True)
    assert not out.exists()
    # A call that does not go on spoils nothing, whatever it is given.
    (tmp_path / "other.txt").write_text(PLAY.read_text()[1000:])
    with pytest.raises(UsageError, match="contains an unfinished run"):
        heal(changed, TEACHER, [tmp_path / "other.txt"], out, **PARTS)
    heal(changed, TEACHER, [PLAY], out, **PARTS, resume=True)
    assert diff(whole, out, rank=False).same_bytes
    # One that begins anew leaves no half of it, where it fails.
    stopped(changed, out, force=True)
    (tmp_path / "other.txt").write_text("Once upon a time.")
    with pytest.raises(UsageError, match="shorter than one window"):
        heal(changed, TEACHER, [tmp_path / "other.txt"], out, **PARTS, force=True)
    assert not out.with_name("out.healing").exists()


def test_the_tokenizer_may_be_the_changed_models(changed: Path, tmp_path: Path) -> None:
    gptkit.convert(TEACHER, tmp_path / "bare")
    for path in tmp_path.glob("bare/*token*"):
        path.unlink()
    done = heal(changed, tmp_path / "bare", [PLAY], tmp_path / "out", **{**BUDGET, "tokens": 256}, beside=False)
    assert done.steps == 1


def test_what_is_begun_anew_does_not_meet_the_run_before(changed: Path, tmp_path: Path) -> None:
    """Its last runs would be those of another call, met when all others have ended."""
    out, options = tmp_path / "out", {"beside": "control", "tokens": 4 * 256}
    stopped(changed, out, name="control-0", **options)
    options |= {"decay": 0.1, "force": True}
    stopped(changed, out, **options)
    assert {each.parent.name for each in out.with_name("out.healing").rglob("step-*")} == {"healed-0"}
    done = heal(changed, TEACHER, [PLAY], out, **{**PARTS, **options, "force": False}, resume=True)
    assert done.control is not None


def test_a_run_that_never_began_leaves_nothing(changed: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time.")
    before = set(tmp_path.iterdir())
    for text in (tmp_path / "text.txt", tmp_path / "none.txt"):
        with pytest.raises((UsageError, InvalidInput)):
            heal(changed, TEACHER, [text], tmp_path / "out", **PARTS)
        assert set(tmp_path.iterdir()) == before
    # Nor is it a run to go on from, of another text.
    heal(changed, TEACHER, [PLAY], tmp_path / "out", **{**PARTS, "tokens": 512}, resume=True)


def test_a_text_that_is_too_short_is_refused(changed: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(PLAY.read_text()[:300])
    with pytest.raises(UsageError, match=r"a training step needs 4 windows of 64 tokens|shorter than one window"):
        heal(changed, TEACHER, [tmp_path / "short.txt"], tmp_path / "out", **PARTS)
    assert not (tmp_path / "out").exists()


def test_a_larger_vocabulary_has_a_gap(tmp_path: Path) -> None:
    """Rows that no token has take probability from those that have one."""
    gptkit.swap(TEACHER, tmp_path / "more", vocab="multiple:100", measured=False)
    done = heal(tmp_path / "more", TEACHER, [PLAY], tmp_path / "out", **{**BUDGET, "tokens": 512}, beside=False)
    assert done.start.kl == pytest.approx(done.start.loss - done.original.loss, rel=1e-2) and done.start.kl > 1e-3
    assert done.recovered is not None  # there is a gap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_divergence_and_its_gradient_are_those_of_the_formula(dtype: torch.dtype) -> None:
    wanted, given = torch.randn(3, 40, 5000).to(dtype), torch.randn(3, 40, 5003).to(dtype)  # more than fits at once
    counted = torch.rand(3, 40) > 0.3
    p = wanted.double().softmax(dim=-1)
    plain = given.double().requires_grad_()
    formula = (p * (p.log() - plain.log_softmax(dim=-1)[..., :5000])).sum(dim=-1)[counted].sum()
    (formula / 7).backward()
    given.requires_grad_()
    found = divergence(wanted, given, counted)
    (found / 7).backward()
    assert float(found.detach()) == pytest.approx(float(formula.detach()), rel=1e-6)
    assert given.grad is not None and plain.grad is not None and given.grad[..., 5000:].any()
    torch.testing.assert_close(
        given.grad.double(), plain.grad, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-8
    )
