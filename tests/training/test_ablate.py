"""gptkit ablate: what a plan means, runs that are not run twice, differences seed by seed, and bad plans told."""

import itertools
import json
import math
import os
import re
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.command import call
from helpers.covering import exhaustive, few
from helpers.families import spec_of
from helpers.training import made

import gptkit
from gptkit.analysis.costs import forward_flops, training_flops
from gptkit.components import to_json
from gptkit.errors import ConfigError, GptkitError, InvalidInput, NoNumber, UsageError
from gptkit.modules.initialise import finite_logits
from gptkit.modules.load import load_random
from gptkit.training import loop
from gptkit.training.ablate import Ablation, RunResult, ablate, paired, student
from gptkit.training.plan import arms_of, edited, planned_variants, read_plan, shipped
from gptkit.training.train import size_of

ROOT = Path(gptkit.__file__).parent

HOW = 'tokens = 1024\nseeds = 2\ncontext = 32\nbatch = 256\nrate = 3e-3\nevery = 2\nbase = "{folder}/tree.json"\n'
VARIANTS = """
[[variant]]
name = "MHA"
swap = ["attention=mha"]

[[variant]]
name = "no positions"
set = { "blocks.*.attention.position" = { type = "ALiBi" } }
remove = ["blocks.*.attention.position"]

[[variant]]
name = "both"
include = ["MHA", "no positions"]
"""


def plan(folder: Path, text: str = VARIANTS, **changes: str) -> Path:
    """A plan of a tree and a text in a folder; changes are keys of its head, in TOML."""
    if not (folder / "tree.json").exists():
        made(folder, lines=800)
    head = [line for line in HOW.format(folder=folder).splitlines() if line.split(" ")[0] not in changes]
    head += [f"{key} = {value}" for key, value in changes.items() if value]
    (folder / "plan.toml").write_text("\n".join([*head, text]))
    return folder / "plan.toml"


def ran(folder: Path, path: Path, out: str = "out", **options: Any) -> Ablation:
    return ablate(path, folder / out, data=str(folder / "text.jsonl"), **options)


def test_every_variant_is_run_with_every_seed_and_none_twice(tmp_path: Path) -> None:
    path, seen = plan(tmp_path), []
    table = ran(tmp_path, path, ended=lambda name, tokens, result: seen.append((name, result.seed)))
    assert [row.name for row in table.rows] == ["base", "MHA", "no positions", "both"] and table.left == 0
    assert sorted(seen) == sorted((row.name, seed) for row in table.rows for seed in (0, 1))
    base = table.rows[0]
    for row in table.rows[1:]:
        found = [one.loss - other.loss for one, other in zip(row.runs, base.runs, strict=True)]
        assert row.difference is not None and row.difference.mean == pytest.approx(statistics.mean(found))
        assert row.tokens == 1024 and [len(run.curve) for run in row.runs] == [2, 2]
    assert base.difference is None
    assert table.rows[1].costs.cache_bytes() == 2 * base.costs.cache_bytes() == table.rows[3].costs.cache_bytes()
    assert json.loads((tmp_path / "out/ablation.json").read_text()) == table.as_json()
    assert {each.suffix for each in (tmp_path / "out/runs").iterdir()} == {".json"}  # no checkpoint is left
    (tmp_path / "out/ablation.json").write_text('{"rows": []}')  # as an older gptkit wrote it, or somebody spoilt it
    # Again: nothing is run. One seed more: that alone. Another rate is another plan.
    seen.clear()
    assert ran(tmp_path, path, resume=True, ended=lambda *each: seen.append(each)).as_json() == table.as_json()
    assert json.loads((tmp_path / "out/ablation.json").read_text()) == table.as_json() and not seen
    more = ran(tmp_path, plan(tmp_path, seeds="3"), resume=True, ended=lambda *each: seen.append(each[2].seed))
    assert seen == [2] * 4 and more.rows[1].runs[:2] == table.rows[1].runs
    with pytest.raises(InvalidInput, match=r"belongs to another plan: its rate is 0.003, not 0.002"):
        ran(tmp_path, plan(tmp_path, rate="2e-3"), resume=True)
    with pytest.raises(UsageError, match="Continue it with --resume"):
        ran(tmp_path, path)


@exhaustive
def test_all_runs_have_steps_of_one_size_where_the_plan_names_none(tmp_path: Path) -> None:
    sizes = set[tuple[str, int]]()
    path = plan(tmp_path, VARIANTS.partition('[[variant]]\nname = "no')[0], batch="", tokens="[320, 640]", seeds="1")
    table = ran(tmp_path, path, tell=lambda name, _, step: sizes.add((name, step.tokens // step.step)))
    assert sizes == {("base", 32), ("MHA", 32)}  # a window: what suits the smaller budget
    assert [row.tokens for row in table.rows] == [320, 320, 640, 640]


def test_a_killed_ablation_goes_on_where_it_was(tmp_path: Path) -> None:
    path = plan(tmp_path, VARIANTS.partition('[[variant]]\nname = "no')[0], seeds="1", tokens="10240", every="10")
    whole = ran(tmp_path, path, "whole")
    pid = os.fork()
    if not pid:
        try:
            ran(tmp_path, path)
        finally:
            os._exit(0)
    runs = tmp_path / "out/runs"
    while not (runs.is_dir() and any(runs.glob("mha-*.training/step-*[0-9]"))):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    (finished,) = runs.glob("*.json")
    before, steps = finished.stat(), list[int]()
    table = ran(tmp_path, path, resume=True, tell=lambda name, seed, step: steps.append(step.step))
    after = finished.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert finished.name == "base-10240-0.json" and steps[0] > 10 and steps[-1] == 40
    losses = [[run.loss for row in each.rows for run in row.runs] for each in (whole, table)]
    assert losses[0] == losses[1]


@pytest.mark.exhaustive
def test_a_budget_of_flops_and_of_parameters(tmp_path: Path) -> None:
    wide = '[[variant]]\nname = "MHA"\nswap = ["attention=mha"]\n[[variant]]\nname = "half"\nset = '
    wide += '{ "blocks.*.feed_forward.intermediate_size" = 24 }\n'
    table = ran(tmp_path, plan(tmp_path, wide, tokens="", flops="2e8", seeds="1"))
    for row in table.rows:
        assert abs(row.flops / 2e8 - 1) < 0.1
    assert table.rows[2].tokens > table.rows[0].tokens
    equal = ran(tmp_path, plan(tmp_path, wide, parameters='"equal"', seeds="1", tokens="256"), "equal")
    sizes = [row.costs.parameters for row in equal.rows]
    assert max(sizes) - min(sizes) <= 2 * 3 * 32  # a unit of each layer
    several = ran(tmp_path, plan(tmp_path, wide, tokens="[256, 512]", seeds="1"), "several")
    assert [row.tokens for row in several.rows] == [256] * 3 + [512] * 3
    assert all(row.difference is not None for row in several.rows if row.name != "base")


@pytest.mark.exhaustive
def test_what_is_healed_is_laid_beside_the_base_that_went_on_learning(tmp_path: Path) -> None:
    play = tmp_path / "play.txt"
    play.write_text((ROOT / "samples" / "play.txt").read_text()[:12_000])
    text = '[[variant]]\nname = "MQA"\nswap = ["attention=mqa"]\n'
    path = plan(tmp_path, text, how='"heal"', base='"sample:gpt2"', seeds="1", tokens="1024")
    table = ablate(path, tmp_path / "out", data=[play])
    base, changed = table.rows
    assert base.runs[0].kl is None and changed.runs[0].kl is not None and 0 < changed.runs[0].kl < 1
    assert changed.costs.cache_bytes() * 4 == base.costs.cache_bytes()
    # The original's answers are counted too, and the curve's tokens from the first, in which layers are healed alone.
    original, mqa = (each.spec for each in arms_of(read_plan(path), {"offline": True, "allow_pickle": False}))
    windows = changed.tokens // table.context
    answers = forward_flops(original, table.context, windows).dense
    assert base.flops == training_flops(original, table.context, windows).dense
    assert changed.flops == training_flops(mqa, table.context, windows).dense + answers
    assert [each["tokens"] for each in changed.runs[0].curve][-1] == changed.tokens == base.tokens
    with pytest.raises(InvalidInput, match=r"how = 'heal' needs a base with weights, but .*tree\.json has none"):
        ran(tmp_path, plan(tmp_path, text, how='"heal"'), "no")
    recipe = tmp_path / "mqa.toml"
    recipe.write_text(f"[[step]]\nattention = 'mqa'\n[[step]]\nheal = '{play}'\nsettings = {{ tokens = 256 }}\n")
    healed = f'[[variant]]\nname = "MQA"\nrecipe = "{recipe}"\n'
    for how in ("heal", "train"):
        with pytest.raises(InvalidInput, match=r"variant 'MQA': .*mqa\.toml has a heal step"):
            ran(tmp_path, plan(tmp_path, healed, how=f'"{how}"', base='"sample:gpt2"'), "none")


@few(2)
@pytest.mark.parametrize("name", shipped())
def test_a_plan_that_comes_along_is_one(name: str, tmp_path: Path) -> None:
    """Its trees are what it says, each computes, and where parameters are to be equal they nearly are."""
    asked = read_plan(name)
    found = arms_of(asked, {"offline": True, "allow_pickle": False})
    assert asked.description and len({json.dumps(to_json(each.spec)) for each in found}) == len(found)
    for each in found:
        assert finite_logits(load_random(each.spec, "float32"))
        if asked.parameters == "equal":
            assert abs(size_of(each.spec) / size_of(found[0].spec) - 1) < 1e-3


BAD: dict[str, tuple[dict[str, str], str, str]] = {
    "seeds": ({"seeds": '"two"'}, VARIANTS, r"plan\.toml: seeds must be a whole number, not text"),
    "a word for a number": ({"tokens": '"1M"'}, VARIANTS, "tokens must be a whole number or a list, not text"),
    "a word": ({"how": '"heel"'}, VARIANTS, "how cannot be 'heel'; did you mean heal"),
    "unknown key": ({"sedes": "2"}, VARIANTS, "no key is called sedes; did you mean seeds"),
    "another key": ({"steps": "2"}, VARIANTS, "no key is called steps; known: base, variant, name, .*, keep"),
    "no base": ({"base": ""}, VARIANTS, r"plan\.toml: base is missing"),
    "endless": ({"tokens": "", "flops": "inf"}, VARIANTS, "flops is inf"),
    "no budget": ({"tokens": ""}, VARIANTS, "tokens or flops"),
    "two budgets": ({"flops": "1e9"}, VARIANTS, "tokens or flops"),
    "no seeds": ({"seeds": "0"}, VARIANTS, "seeds is 0"),
    "no variants": ({}, "variant = []", "variant is empty"),
    "two of a name": ({}, VARIANTS + '[[variant]]\nname = "mha"\nswap = ["tie"]', "two variants have this name"),
    "nothing changed": ({}, '[[variant]]\nname = "x"', "variant 'x' changes nothing"),
    "include": ({}, '[[variant]]\nname = "x"\ninclude = ["y"]', "variant 'x': include names 'y'"),
    "key of a variant": ({}, '[[variant]]\nname = "x"\nswaps = ["tie"]', "no key is called swaps; did you mean swap"),
    "swap": ({}, '[[variant]]\nname = "x"\nswap = ["nrom=rmsnorm"]', "variant 'x': .*nrom"),
    "path": ({}, '[[variant]]\nname = "x"\nset = { "blocks.*.attn.heads" = 2 }', "heads' matches no field"),
    "field": ({}, '[[variant]]\nname = "x"\nset = { "head.colour" = 2 }', r"`colour` - at `\$\.head`; known: "),
    "field of a layer": (
        {}, '[[variant]]\nname = "x"\nset = { "blocks.*.feed_forward.activatoin" = "gelu" }',
        r"FeedForward: Object contains unknown field `activatoin`; did you mean activation\?$"
    ),
    "word of a layer": (
        {}, '[[variant]]\nname = "x"\nset = { "blocks.*.feed_forward.activation" = "gelo" }', "did you mean gelu"
    ),
    "component": (
        {}, '[[variant]]\nname = "x"\nset = { "blocks.*.attention.position" = { type = "ALiBy" } }',
        "no component 'ALiBy'.*did you mean ALiBi"
    ),
    "remove": ({}, '[[variant]]\nname = "x"\nremove = ["final_nrom"]', "the model has no final_nrom at this path"),
    "vocabulary": (
        {}, '[[variant]]\nname = "x"\nmodel = "sample:llama"', "'x': the variant's vocabulary has 512 tokens, but"
    ),
    "context": (
        {"base": '"sample:gpt2"', "context": "512", "batch": "512"}, '[[variant]]\nname = "x"\nswap = ["norm=rmsnorm"]',
        "512, but the position table of variant 'base' has only [0-9]+ rows"
    ),
    "rate": ({"rate": "20"}, VARIANTS, "--lr, the learning rate, must be more than 0 and at most 10, not 20"),
    "one budget twice": (
        {"tokens": "[1000, 1001]"}, VARIANTS, "the budgets 1,000 and 1,001 both come to 1,024 tokens for variant 'base'"
    ),
    "no rate": ({"rate": "0"}, VARIANTS, "--lr, the learning rate, must be more than 0"),
    "batch": ({"batch": "8"}, VARIANTS, "--batch is smaller than one window"),
    "a table is healed": (
        {"how": '"heal"', "base": '{ model_type = "gpt2" }'}, '[[variant]]\nname = "x"\nswap = ["norm=rmsnorm"]',
        "base: how = 'heal' needs a base with weights, but this plan"
    ),
    "set of a healed one": ({"how": '"heal"'}, VARIANTS, "'no positions': the keys set and remove need"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_plan_is_told_before_anything_is_trained(case: str, tmp_path: Path) -> None:
    changes, text, why = BAD[case]
    path = plan(tmp_path, text, **changes)
    before = set(tmp_path.iterdir())
    with pytest.raises(GptkitError, match=why):
        ran(tmp_path, path)
    assert set(tmp_path.iterdir()) == before


def test_a_context_is_limited_by_a_table_of_positions_alone(tmp_path: Path) -> None:
    """A model with RoPE trains on windows of any length: 2,048 tokens are more than `train`'s default."""
    content = read_plan(plan(tmp_path, base='"qwen3-0.6b"', context="2048", batch="2048"))
    assert all(each.tokens % 2048 == 0 for each in planned_variants(content, arms_of(content, {"offline": True}), 2048))


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    path = plan(tmp_path)
    with pytest.raises(UsageError, match=r"no file nope\.toml"):
        ablate("nope.toml", tmp_path / "out", data=[tmp_path / "text.jsonl"])
    with pytest.raises(UsageError, match="the plan does not name a training text"):
        ablate(path, tmp_path / "out")
    told = call("ablate", path, tmp_path / "nod/ir", "--data", tmp_path / "text.jsonl")
    assert told.exit_code == 2 and "nod does not exist\n  Create the parent folder first." in told.stderr
    (tmp_path / "mine/runs").mkdir(parents=True)
    (tmp_path / "mine/file").write_text("kept")
    with pytest.raises(UsageError, match="but gptkit ablate did not write it"):
        ran(tmp_path, path, "mine", force=True)
    assert (tmp_path / "mine/file").read_text() == "kept"
    with pytest.raises(InvalidInput, match="cannot read"):
        ablate(path, tmp_path / "out", data=[tmp_path / "nope.txt"])
    assert not (tmp_path / "out").exists()


def test_an_ablation_is_lost_only_for_one_that_can_run(tmp_path: Path) -> None:
    one = VARIANTS.partition('[[variant]]\nname = "no')[0]
    path, text = plan(tmp_path, one, seeds="1", tokens="256"), tmp_path / "text.jsonl"
    ran(tmp_path, path)
    (tmp_path / "out/note").write_text("kept")
    before = {each: each.read_bytes() for each in (tmp_path / "out").rglob("*") if each.is_file()}
    (tmp_path / "short.txt").write_text("Two words. " * 12)
    for data, changes, why in (
        (tmp_path / "nofile.txt", {}, "cannot read"),
        (tmp_path / "short.txt", {}, "a training step needs 8 windows"),
        (text, {"held_out": "2.0"}, "held-out share must be between 0 and 1, not 2"),
        (text, {"held_out": '"nofile.txt"'}, "cannot read"),
        (text, {"batch": "1_000_000"}, "a training step needs 31,250 windows"),
    ):
        other = plan(tmp_path, one, seeds="1", tokens="256", **changes)
        with pytest.raises(GptkitError, match=why):
            ablate(other, tmp_path / "out", data=[data], force=True)
        assert {each: each.read_bytes() for each in (tmp_path / "out").rglob("*") if each.is_file()} == before
        with pytest.raises(GptkitError, match=why):
            ablate(other, tmp_path / "new", data=[data])
        assert not (tmp_path / "new").exists()
    # One that was killed while it was prepared is nothing to go on from, and nothing in the way.
    (tmp_path / "new/.ablation-begun/data").mkdir(parents=True)
    new = ran(tmp_path, plan(tmp_path, one, seeds="1", tokens="512"), "new")
    table = ran(tmp_path, plan(tmp_path, one, seeds="1", tokens="512"), force=True)
    assert [row.loss for row in table.rows] == [row.loss for row in new.rows]
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [
        *("ablation.json", "data", "note", "runs", "trees")
    ]
    assert len(list((tmp_path / "out/runs").iterdir())) == 2


def test_a_run_of_another_plan_is_told_in_words(tmp_path: Path) -> None:
    one, seen = '[[variant]]\nname = "x"\nset = {{ "blocks.*.feed_forward.activation" = "{}" }}\n', list[str]()
    other = tmp_path / "other.txt"
    other.write_text("Another text is held out. " * 40)
    ran(tmp_path, plan(tmp_path, one.format("relu"), seeds="1", tokens="256"))
    for changes, activation, why in (
        ({}, "gelu", "x-256-0.json belongs to another plan: the architecture of the variant changed"),
        ({"held_out": "0.1"}, "relu", "another share or text was held out"),
        ({"held_out": f'"{other}"'}, "relu", "another share or text was held out"),
    ):
        with pytest.raises(InvalidInput, match=why):
            ran(tmp_path, plan(tmp_path, one.format(activation), seeds="1", tokens="256", **changes), resume=True)
    # The same text under another name of OUT is the same.
    path = plan(tmp_path, one.format("relu"), seeds="1", tokens="256", held_out=f'"{other}"')
    ran(tmp_path, path, "held")
    (tmp_path / "held").rename(tmp_path / "moved")
    ran(tmp_path, path, "moved", resume=True, ended=lambda *each: seen.append(each[0]))
    assert not seen


@exhaustive
def test_a_run_of_no_number_is_not_gone_on_with_at_another_rate(tmp_path: Path, monkeypatch) -> None:
    """It would be a run of two rates beside runs of one."""
    lost, called = loop._Engine._loss_of, itertools.count()
    broken = lambda self, windows: lost(self, windows) * (math.nan if next(called) == 4 else 1)  # noqa: E731
    path = plan(tmp_path, rate="9.0", every="1")
    with monkeypatch.context() as patched:
        patched.setattr(loop._Engine, "_loss_of", broken)
        with pytest.raises(NoNumber, match=r"Try a smaller rate .* in the plan") as caught:
            ran(tmp_path, path)
    assert "--lr" not in str(caught.value) and not list(tmp_path.glob("out/runs/*"))
    ablation = ran(tmp_path, plan(tmp_path, every="1"), resume=True)
    fresh = ran(tmp_path, plan(tmp_path, every="1"), "fresh")
    assert [row.loss for row in ablation.rows] == [row.loss for row in fresh.rows]


def test_edits_go_by_paths() -> None:
    spec = spec_of({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8})
    found = edited(spec, {"blocks.1.attention.kv_heads": 1, "*_norm": {"eps": 1e-3}}, ["positions"])
    assert [block.attention.kv_heads for block in found.blocks] == [2, 1]
    assert found.final_norm is not None and found.final_norm.eps == 1e-3 and found.positions is None
    assert (
        edited(found, {"positions": to_json(spec)["positions"], "*_norm.eps": 1e-5, "blocks.1.attention.kv_heads": 2})
        == spec
    )
    with pytest.raises(ConfigError, match="not a valid model spec"):
        edited(spec, {"blocks.*.attention": {"type": "Attention"}})
    with pytest.raises(InvalidInput, match="matches no field of the model"):
        edited(spec, {"blocks.7.attention.heads": 1})


def test_differences_are_of_the_same_seed() -> None:
    def runs(*losses: float) -> list[RunResult]:
        return [RunResult(seed, loss, None, 1.0, 1.0, []) for seed, loss in enumerate(losses)]

    found = paired(runs(1.0, 2.0, 3.0), runs(1.5, 2.4, 3.6, 9.0))
    assert found is not None and found.seeds == 3 and found.significant
    assert found.mean == pytest.approx(-0.5) and found.low == pytest.approx(-0.5 - 4.303 * 0.1 / math.sqrt(3))
    assert paired(runs(1.0), runs(2.0)).low is None and paired((), runs(1.0)) is None  # type: ignore[union-attr]
    assert student(2) == 4.303 and student(10) == pytest.approx(2.2281, abs=5e-4)
    assert student(30) == pytest.approx(2.0423, abs=1e-4) and student(10**6) == pytest.approx(1.95996, abs=1e-4)


def test_the_command_tells_the_table(tmp_path: Path) -> None:
    path = plan(tmp_path, seeds="1", tokens="512")
    words = ["ablate", path, tmp_path / "out", "--data", tmp_path / "text.jsonl"]
    told = call(*words, "--html", tmp_path / "page.html")
    assert told.exit_code == 0, told.output
    assert "no positions, 512 tokens, seed 0: held-out loss" in told.stdout and "minus base" in told.stdout
    page = (tmp_path / "page.html").read_text()
    assert "Difference from the base" in page and "Held-out loss" in page
    data = json.loads(call(*words, "--resume", "--json").stdout)
    assert [row["name"] for row in data["rows"]] == ["base", "MHA", "no positions", "both"]
    _, _, section = (ROOT / "docs/reference/json.md").read_text().partition("## ablate\n")
    told_of = set(re.findall(r"`([\w.\[\]]+)`", section.partition("\n## ")[0])) - {"params"}
    keys = {"mean", "low", "high", "seed", "loss", "kl", "seconds", "pace", "curve"}  # of what was named before them
    row = data["rows"][1]
    assert keys <= told_of and keys == (row["difference"].keys() | row["runs"][0].keys()) - {"seeds"}
    there = {*data, "rows[]", "rows[].runs[]", *(f"rows[].{key}" for key in row)}
    assert told_of - keys <= there
    assert call(*words).exit_code == 2
