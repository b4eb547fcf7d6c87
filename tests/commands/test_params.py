"""params and presets as they are called: every option, every kind of output, and what is refused."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.covering import few
from helpers.processes import imported
from typer.testing import CliRunner, Result

from gptkit.architectures.presets import presets
from gptkit.cli import app
from gptkit.commands.base import tokens
from gptkit.errors import UsageError

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
TOTAL = 95_040
EVERYTHING = (
    *("--dtype", "int4", "--kv", "64,2k", "--flops", "--memory", "--context", "64", "--batch", "2"),
    *("--explain", "--gpu", "24GB", "--tp", "1"),
)
"""All that costs, at sizes that any model has."""


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "GPTKIT_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def call(*args: str, code: int = 0, columns: int = 80) -> Result:
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": str(columns)})
    assert result.exit_code == code, (result.output, result.exception)
    assert "bug in gptkit" not in result.stderr
    assert (result.stdout == "") == (code != 0)
    return result


def config(name: str = "config.json", **changed: Any) -> str:
    Path(name).write_text(json.dumps({**TINY, **changed}))
    return name


def models(*args: str) -> list[dict[str, Any]]:
    data = json.loads(call("params", "--json", *args).stdout)
    assert data["schema_version"] == 1
    return data["models"]


# --- what there is to ask


def test_everything_of_one_model() -> None:
    text = call("params", "qwen3-8b", "--by", "tensor", *EVERYTHING, columns=100).stdout
    assert re.search(r"^total +8,190,735,360 +4\.095 GB +100\.0 %$", text, re.M)
    assert re.search(r"^ +3\.814 GiB", text, re.M)
    assert "blocks.{0–35}.feed_forward.down_proj.weight" in text and "×36" in text
    assert "2 × 2,048 tokens" in text
    assert all(f"\n{title}" in text for title in ("KV cache, bfloat16", "FLOPs for 2 × 64", "Memory for 2 × 64"))


def test_the_table_alone_is_what_it_was() -> None:
    assert call("params", "gpt2").stdout.splitlines()[-1].split()[-3:] == ["7,087,872", "5.7", "%"]
    assert call("params", "gpt2", "--by-layer").stdout == call("params", "gpt2", "--by", "layers").stdout


def test_json_of_everything() -> None:
    gpt2, mixtral = models("gpt2", "mixtral-8x7b", "--by", "tensor", *EVERYTHING)
    assert gpt2["kv_cache"][1] == {
        "context": 2048,
        "impossible": "the context is longer than the model's table of positions",
    }
    assert mixtral["kv_cache"][1]["bytes"] == 2 * 2048 * 131_072
    assert mixtral["weights"] == {"dtype": "int4", "bytes": mixtral["weights"]["bytes"]}
    assert mixtral["weights"]["bytes"]["total"] == mixtral["memory"]["inference"]["weights"] == 46_702_792_704 // 2
    assert mixtral["flops"]["prefill"]["tokens"] == 64 and mixtral["flops"]["prefill"]["batch"] == 2
    assert (
        len(mixtral["tensors"]) == 3 + 32 * (7 + 8 * 3) and sum(t["parameters"] for t in gpt2["tensors"]) == 124439808
    )
    assert "tensors" not in models("gpt2")[0] and "flops" not in models("gpt2")[0]


def test_what_fits_and_what_each_gpu_holds() -> None:
    (found,) = models("llama-3-8b", "--gpu", "16GiB", "--tp", "4", "--pp", "2", "--explain")
    rows = found["gpu"]["dtypes"]
    assert found["gpu"]["bytes"] == 16 * 2**30 and list(rows) == ["bfloat16", "int8", "int4"]
    assert rows["bfloat16"]["longest_context"] == 8192 and rows["bfloat16"]["most_sequences"] > 1
    parallel = found["parallel"]
    assert [stage["layers"] for stage in parallel["stages"]] == [[0, 15], [16, 31]]
    assert parallel["weights_together"] == 4 * sum(stage["weights"] for stage in parallel["stages"])
    assert found["explained"]["symbols"]["L"]["value"] == 32
    text = call("params", "llama-3-8b", "--gpu", "4GB").stdout
    assert re.search(r"^bfloat16 +16\.06 GB +– +– +–$", text, re.M)
    assert "What fits in a 4 GB card (4 GiB = 4.295 GB)" in text
    for card in ("24GB", "24 gb", "24GiB", "24576MB"):  # sold by powers of two, whatever the letters say
        told = call("params", "gpt2", "--gpu", card).stdout
        assert "What fits in a 24 GB card (24 GiB = 25.77 GB)" in told and "--context sets another" in told
    assert "What fits in a 500.2 MB card (477.0 MiB)" in call("params", "gpt2", "--gpu", "477MB").stdout
    both = call("params", "llama-3-8b", "qwen3-8b", "--gpu", "24GB", "--pp", "2").stdout
    assert "The longest context that fits on 2 cards of 24 GB (24 GiB = 25.77 GB)" in both and "the fullest" in both
    both = call("params", "llama-3-8b", "qwen3-14b", "--gpu", "24GB", "--context", "4096").stdout
    assert "The most sequences of 4,096 tokens that fit in a 24 GB card" in both
    for name, place in (("llama-3-8b", 1), ("qwen3-14b", 2)):
        (alone,) = models(name, "--gpu", "24GB", "--context", "4096")
        shown = re.search(r"^q4_0 +(\S+) +(\S+)$", both, re.M)
        assert shown is not None and shown[place] == f"{alone['gpu']['dtypes']['q4_0']['most_sequences']:,}"
    (row,) = csv.DictReader(io.StringIO(call("params", "gpt2", "--csv", "--tp", "2", "--explain").stdout), strict=True)
    assert row["explained.formula"] == "V·d + T·d + L(12d² + 13d) + 2d"
    assert int(row["parallel.stages.0.total"]) > 0


def test_a_batch_leaves_too_little_for_one_more_sequence() -> None:
    """What one more sequence needs is the same for every batch, and what is left is less than that."""
    ((one,), (more,)) = (models("gpt2", "--gpu", card, "--context", "1024") for card in ("8GB", "16GB"))
    for dtype, row in one["gpu"]["dtypes"].items():
        other = more["gpu"]["dtypes"][dtype]
        used, total = (
            size - each["bytes_left"] - each["weights"] for size, each in ((8 * 2**30, row), (16 * 2**30, other))
        )
        per_sequence = (total - used) / (other["most_sequences"] - row["most_sequences"])
        assert 0 <= row["bytes_left"] < per_sequence + 1 and other["bytes_left"] < per_sequence + 1
    assert "(--context" not in call("params", "gpt2", "--gpu", "8GB", "--context", "1024").stdout


def test_formats_of_weights() -> None:
    (found,) = models("llama-3.1-8b", "--dtype", "Q4_K_M", "--memory")
    assert found["weights"]["bytes"]["total"] == found["memory"]["inference"]["weights"] == 4_912_898_048
    assert found["memory"]["formats"]["q4_k_m"] == 4_912_898_048
    text = call("params", "llama-3.1-8b", "--memory", "--dtype", "q4_k_m", "--by", "layer").stdout
    assert re.search(r"^q4_k_m +4\.913 GB +4\.575 GiB +4\.89$", text, re.M)
    by = {by: call("params", "gpt2", "--csv", "--by", by, "--dtype", "q4_k_m").stdout for by in ("tensor", "layer")}
    sums = {by: sum(int(row["bytes"]) for row in csv.DictReader(io.StringIO(text))) for by, text in by.items()}
    assert sums["tensor"] == sums["layer"] == models("gpt2", "--dtype", "q4_k_m")[0]["weights"]["bytes"]["total"]
    told = call("params", "gpt2", "--swap", "norm=rmsnorm", "--dtype", "q4_k_m", code=1).stderr
    assert (
        "gptkit does not know which quantisation types llama.cpp uses for the tensors of a model without a "
        "transformers architecture" in told
    )


def test_csv() -> None:
    def rows(*args: str) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(call("params", "--csv", *args).stdout), strict=True))

    names = ("gpt2", "qwen3-8b")
    for by in ("component", "layer", "tensor"):
        assert sum(int(row["parameters"]) for row in rows(*names, "--by", by)) == 124_439_808 + 8_190_735_360
    assert [row["model"] for row in rows(*names, *EVERYTHING)] == list(names)
    assert rows(*names, "--kv", "64")[1]["kv_cache.64.bytes"] == str(64 * 147_456)


def test_csv_of_a_swap_and_its_costs() -> None:
    told = call("params", "qwen3-8b", "--swap", "attention=mqa", "--csv", "--kv", "4k").stdout
    before, after = csv.DictReader(io.StringIO(told), strict=True)
    assert (before["swap.steps"], after["swap.steps"]) == ("", "attention=mqa")
    assert int(after["kv_cache.4096.bytes"]) * 8 == int(before["kv_cache.4096.bytes"])


def test_a_gpu_has_a_unit() -> None:
    assert "--gpu '24' has no unit" in call("params", "gpt2", "--gpu", "24", code=2).stderr


def test_contexts_are_written_in_several_ways() -> None:
    told = [each["context"] for each in models("qwen3-8b", "--kv", "8k,8192,100", "--kv", "2_000")[0]["kv_cache"]]
    assert told == [8192, 100, 2000]
    as_written = {"128k": 131_072, "1M": 1_048_576, "10m": 10_485_760, "1e3": 1000, "1.5e3": 1500, "0.5k": 512}
    assert {text: tokens("--kv", text) for text in as_written} == as_written
    for wrong in ("", "x", "0", "-1", "1e-3", "1.5", "0.3k", "8kb", "8__0", "8_", "1e99", "1B", "inf", "٣", "9" * 40):
        with pytest.raises(UsageError):
            tokens("--kv", wrong)


def test_a_page_and_what_is_on_it() -> None:
    call("params", "gpt2", "--kv", "64", "--memory", "--html", "page.html")
    page = Path("page.html").read_text()
    for told in ("gpt2", "124,439,808", "KV cache, bfloat16", "Memory for 1,024 tokens", "Adam"):
        assert told in page
    call("params", "gpt2", "--swap", "mlp=moe:4x1", "--kv", "64", "--html", "page.html")
    page = Path("page.html").read_text()
    assert "gpt2 --mlp moe:4x1" in page and "Guarantee: exact" in page and "difference" in page
    assert "gptkit: " in call("params", "gpt2", "--html", "no/such/page.html", code=2).stderr


# --- what swaps would make of it


def test_what_grouped_heads_would_save() -> None:
    before, after = models("llama-2-7b", "--swap", "attention=gqa:4", "--kv", "4096", "--flops")
    assert (before["model"], after["model"]) == ("llama-2-7b", "llama-2-7b --attention gqa:4")
    assert after["swap"]["of"] == "llama-2-7b" and "swap" not in before
    saved = 32 * 2 * (32 - 4) * 128 * 4096  # keys and values of 28 heads in 32 layers
    assert before["total"] - after["total"] == saved
    assert after["kv_cache"][0]["bytes"] * 8 == before["kv_cache"][0]["bytes"]
    text = call("params", "llama-2-7b", "--swap", "attention=gqa:4", "--kv", "4096").stdout
    assert re.search(rf"^total .* −{saved:,} +−13\.9 %$", text, re.M)
    text = " ".join(text.split())
    assert "guarantee: approximate on trained weights; gptkit swap MODEL OUT --dry-run" in text
    assert "approximate: fitted on a text (--calibrate); exact only where the heads of a group are equal" in text


def test_a_chain_and_a_recipe() -> None:
    after = models("gpt2", "--swap", "norm=rmsnorm", "--swap", "mlp=moe:4x1")[1]
    assert after["components"]["router"] and after["active"] < after["total"]
    assert models("sample:llama", "--recipe", "llama-to-mqa")[1]["total"] < models("sample:llama")[0]["total"]
    text = call("params", "gpt2", "gpt2-xl", "--swap", "mlp=moe:4x1").stdout
    assert text.count("guarantee: exact") == 2 and text.count("difference") == 2


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["--swap", "attention=foo"], 2, "known: mha, mqa, gqa:N"),
        (["--swap", "attention=gqa:5"], 1, "Possible here: 1, 2, 3, 4, 6, 12"),
        (["--swap", "nonsense=1"], 2, "nonsense"),
        (["--recipe", "nix"], 2, "gptkit has no recipe 'nix'"),
    ],
)
def test_swaps_that_are_none(args: list[str], code: int, told: str) -> None:
    assert told in call("params", "gpt2", *args, code=code).stderr


# --- what is refused


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--kv", "x"], "--kv 'x' is not a number of tokens"),
        (["--kv", "100,"], "--kv '' is not a number of tokens"),
        (["--context", "64"], "--context works only with --flops, --memory"),
        (["--batch", "3"], "--batch works only with"),
        (["--batch", "0", "--flops"], "--batch must be a whole number from 1"),
        (["--kv-dtype", "fp8"], "--kv-dtype works only with --kv, --memory"),
        (["--kv-dtype", "int4", "--kv", "8"], "unknown dtype 'int4'"),
        (["--dtype", "int3"], "unknown dtype 'int3'"),
        (["--by", "head"], "--by must be component, layer or tensor, not 'head'"),
        (["--by", "lay"], "Plurals work too: components, layers, tensors"),
        (["--json", "--csv"], "--json and --csv cannot be combined"),
        (["--gpu", "24 pounds"], "--gpu '24 pounds' is not a size"),
        (["--tp", "5"], "--tp 5: 12 query heads are not divisible by 5 GPUs"),
        (["--pp", "5"], "--pp 5: 12 layers cannot be split into 5 pipeline stages"),
        (["--tp", "0"], "--tp must be a whole number from 1"),
        (["--tp", "2", "--dtype", "q8_0"], "not split over several GPUs"),
        (["--explain", "--batch", "2"], "--batch works only with"),
        (["--csv", "--stored"], "Use --json"),
        (["--csv", "--by", "layer", "--flops"], "one table"),
        (["--flops", "4096"], "--context 4096"),
        (["--flops", "--context", "4096"], "4,096 tokens do not fit the model's table of 1,024 positions"),
        (["--kv", "4096"], "4,096 tokens do not fit the model's table of 1,024 positions"),
    ],
)
def test_wrong_calls(args: list[str], told: str) -> None:
    assert told in " ".join(call("params", "gpt2", *args, code=2, columns=200).stderr.split())


def test_which_of_several_failed() -> None:
    told = call("params", "gpt2", config("broken.json", num_hidden_layers=0), code=4).stderr
    assert "broken.json" in told and "num_hidden_layers is 0" in told
    assert "Did you mean llama-2-7b" in call("params", "gpt2", "lama-2-7b", code=4).stderr


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim")


@few(20)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2**31, 10**30, "x", 1.5, True, [1], float("nan"), float("inf")])
def test_sizes_that_no_model_has(name: str, value: Any) -> None:
    assert name in call("params", config(**{name: value}), code=4).stderr


def test_sizes_that_do_not_fit_and_layers_without_end() -> None:
    assert "hidden_size is 64, expected a multiple" in call("params", config(num_attention_heads=7), code=4).stderr
    assert "num_hidden_layers is 1000000000" in call("params", config(num_hidden_layers=10**9), code=4).stderr


def test_large_sizes_stay_numbers() -> None:
    found = models(config(vocab_size=2**31 - 1, intermediate_size=2**31 - 1), *EVERYTHING)[0]
    assert found["total"] == TOTAL + 2 * 64 * (2**31 - 101) + 2 * 3 * 64 * (2**31 - 129)
    assert isinstance(found["memory"]["training"]["total"], int)
    text = call("params", "config.json", *EVERYTHING, columns=60).stdout
    assert all(len(line) <= 60 for line in text.splitlines())


def test_sizes_that_are_not_stated_are_told() -> None:
    Path("config.json").write_text(json.dumps({key: TINY[key] for key in TINY if key not in ("vocab_size",)}))
    assert models("config.json")[0]["notes"] == ["not in config.json, so transformers' defaults: vocab_size 32,000"]
    assert "note: not in config.json" in call("params", "config.json").stdout
    assert models(config())[0]["notes"] == [] and models("gpt2")[0]["notes"] == []


# --- what reaches the terminal


@few(1)
@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("by", ["component", "layer", "tensor"])
@pytest.mark.parametrize(
    "names", [("mixtral-8x7b",), ("gpt2", "falcon-40b"), ("gpt2", "gpt3-175b", "bloom-176b", "yi-34b")]
)
def test_it_fits(names: tuple[str, ...], by: str, columns: int) -> None:
    text = call("params", *names, "--by", by, *EVERYTHING, columns=columns).stdout
    told = [line for line in text.splitlines() if not line.startswith("note: ")]
    assert max(map(len, told)) <= columns
    assert "…" not in text and "\x1b" not in text
    for name in names:
        (found,) = models(name)
        assert f"{found['total']:,}" in text


def test_long_names_are_folded_and_numbers_are_not(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 20)
    folder.mkdir()
    name = str(folder / "config.json")
    Path(name).write_text(json.dumps(TINY))
    for columns in (40, 80):
        for options in (EVERYTHING, ("--by", "tensor", "--kv", "64"), ("--swap", "mlp=moe:4x1", "--kv", "64")):
            text = call("params", name, "gpt2", *options, columns=columns).stdout
            table = [line for line in text.splitlines() if not line.startswith(str(tmp_path))]
            assert max(map(len, table)) <= columns
            assert f"{TOTAL:,}" in text and "…" not in text


def test_all_presets_at_once() -> None:
    lines = call("params", *presets()).stdout.splitlines()
    assert len(lines) == len(presets()) + 2
    assert "bloom-176b" in (line.split()[0] for line in lines)


@few(2)
@pytest.mark.parametrize("args", [EVERYTHING, ("--csv",), ("--by", "tensor"), ("--json", *EVERYTHING)])
def test_nothing_heavy_is_imported(args: tuple[str, ...]) -> None:
    code = f"from gptkit.cli import app; app({['params', 'gpt2', *args]!r}, prog_name='gptkit')"
    assert not imported(code, "torch", "transformers", "numpy", "huggingface_hub", "plotly")


# --- presets


def test_presets_by_word() -> None:
    def names(*args: str) -> list[str]:
        return call("presets", "--names", *args).stdout.split()

    assert names() == list(presets())
    assert names("qwen3") == [name for name in presets() if name.startswith("qwen3")]
    assert names("LLAMA", "70b") == [name for name in presets() if "llama" in name and name.endswith("70b")]
    assert "tinyllama-1.1b" in names("llama") and "mistral-7b" in names("mistralai/")
    data = json.loads(call("presets", "gpt2-xl", "--json").stdout)
    assert data["schema_version"] == 1
    (found,) = data["presets"]
    assert (found["name"], found["parameters"], found["family"]) == ("gpt2-xl", 1_557_611_200, "gpt2")
    assert found["repo"] and found["source"]


def test_a_word_that_no_preset_has() -> None:
    assert "Did you mean" in call("presets", "qwne3", code=2).stderr
    assert "Run gptkit presets to list" in call("presets", "zzzzzz", code=2).stderr


@few(1)
@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_the_list_of_presets_fits(columns: int) -> None:
    lines = call("presets", columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) == len(presets()) + 1  # a line each, nothing wrapped
    text = "\n".join(lines)
    assert "…" not in text and "174,604,259,328" in text
    assert ("TinyLlama/TinyLlama-1.1B-Chat-v1.0" in text) == (columns >= 80)
