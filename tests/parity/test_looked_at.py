"""A verdict is never better than what was looked at: bytes whatever else differs, each row of a table, each length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import call
from helpers.covering import exhaustive, few
from helpers.edited import Tensors, damaged, exit_code, pairs, setting, with_spec
from helpers.families import CONFIGS, edited, save_hf

import gptkit
from gptkit.parity import stored
from gptkit.parity.card import card, markdown
from gptkit.parity.verify import Verification, verify

WIDE = {"vocab_size": 5000, "num_hidden_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**CONFIGS["llama-2"], **WIDE},
    "gpt2": {**CONFIGS["gpt2"], "vocab_size": 5000, "n_layer": 1, "n_positions": 2048},
    "mistral": {**CONFIGS["mistral-default-window"], "num_hidden_layers": 1, "max_position_embeddings": 8192},
    "mistral-1100": {**CONFIGS["mistral"], "num_hidden_layers": 1, "sliding_window": 1100, "head_dim": 4},
    "llama-dynamic": {**CONFIGS["llama-dynamic"], "max_position_embeddings": 2048, "num_hidden_layers": 1},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A checkpoint as HF files, and in gptkit's own format; made once."""
    return pairs(MODELS, tmp_path_factory)


def quick(*folders: Path, **options: Any) -> Verification:
    """A verification without mistakes made on purpose, and without looking for a cause."""
    return verify(*folders, mutations=False, bisected=False, **options)


def garbage(name: str, row: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors[name][row].normal_(generator=torch.Generator().manual_seed(7)).mul_(3)


def context(length: Callable[[int], int]) -> Callable[[Any], None]:
    return setting(context_length=length)


EDITS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "context_length by one": ("llama", context(lambda length: length + 1)),
    "a norm's cast": ("llama", setting(cast="after_weight")),
    "gelu_tanh for gelu_new": ("gpt2", setting(activation="gelu_tanh")),
    "kv_expansion": ("llama", setting(kv_expansion="projection")),
    "context_length by one, gpt2": ("gpt2", context(lambda length: length - 1)),
}


@few(1)
@pytest.mark.parametrize("name", EDITS)
def test_a_field_that_changes_no_function_excuses_no_row(
    name: str, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """The edit alone passes, and is told; a row that the probe's regions do not have fails it, and is named."""
    model, edit = EDITS[name]
    hf, local = pair(model)
    changed = with_spec(local, tmp_path / "edited", edit)
    right = quick(hf, changed)
    assert right.passed and right.up_to is None
    assert any(note.startswith("the architectures differ: ") for note in right.notes)
    bad = damaged(changed, tmp_path / "bad", garbage("embedding.weight", 1234))
    wrong = quick(hf, bad)
    assert wrong.bytes is not None and wrong.bytes.required and wrong.bytes.different == ("embedding.weight",)
    assert (wrong.verdict, wrong.passed) == ("different", False)
    assert "rows of the embedding" in {prompt.name for prompt in wrong.prompts if not prompt.identical}
    assert wrong.exit_code == 3


def test_a_row_of_positions_beyond_the_probe_is_seen(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("gpt2")
    changed = with_spec(local, tmp_path / "edited", setting(activation="gelu_tanh"))
    bad = damaged(changed, tmp_path / "bad", garbage("positions.weight", 1500))
    found = quick(hf, bad)
    assert found.bytes is not None and found.bytes.different == ("positions.weight",)
    assert not found.passed and found.exit_code == 3
    near = quick(hf, damaged(changed, tmp_path / "near", garbage("positions.weight", 700)))
    assert (near.verdict, near.passed) == ("different", False)
    assert quick(hf, bad, long=True).exit_code == 3


# --- where trees give weights a reason to differ ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def swapped(pair: Callable[[str], tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """GPT-2 and what it is with RMSNorm: centred tables, and a head of its own."""
    folder = tmp_path_factory.mktemp("swapped") / "rms"
    gptkit.swap(pair("gpt2")[0], folder, norm="rmsnorm", measured=False)
    return pair("gpt2")[0], folder


def test_every_row_of_tables_that_a_swap_changes_is_looked_at(swapped: tuple[Path, Path]) -> None:
    found = quick(*swapped)
    assert (found.verdict, found.passed, found.limited) == ("equal", True, ())
    assert found.bytes is not None and not found.bytes.required
    assert {"embedding.weight", "positions.weight"} <= set(found.bytes.different)
    assert set(found.bytes.alone) == {"head.bias", "head.weight"} | {n for n in found.bytes.alone if "norm.bias" in n}
    assert not any(prompt.name.startswith("rows of") for prompt in found.prompts)  # the ends alone show it
    run = call("verify", *swapped, "--no-mutations")
    assert run.exit_code == 0
    assert "the architectures differ, so the other" in run.stdout


@few(1)
@pytest.mark.parametrize("change", ["garbage", "another row", "twice as large", "one value"])
@pytest.mark.parametrize("table", ["embedding.weight", "positions.weight"])
def test_a_wrong_row_in_a_swapped_table_is_seen(
    table: str, change: str, swapped: tuple[Path, Path], tmp_path: Path
) -> None:
    def wrong(tensors: Tensors) -> None:
        rows = tensors[table]
        if change == "garbage":
            rows[1234] = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(1)).to(rows)
        elif change == "another row":
            rows[1234] = rows[1235]
        elif change == "twice as large":
            rows[1234] *= 2
        else:
            rows[1234, 5] += 0.01

    hf, folder = swapped
    found = quick(hf, damaged(folder, tmp_path / "bad", wrong))
    assert not found.passed
    if table == "embedding.weight":  # one row is read
        assert found.verdict == "different"
    else:  # 1,235 tokens are more than a probe has unasked
        assert found.limited == (
            "row 1,234 of positions.weight, which holds other values and which no batch reads: --long has it read",
        )
        assert quick(hf, tmp_path / "bad", long=True).verdict == "different"
        assert quick(hf, tmp_path / "bad", up_to=1000).passed


@exhaustive
def test_a_row_of_a_table_whose_width_changed_is_seen(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, _ = pair("llama")
    gptkit.swap(hf, tmp_path / "wider", norm="layernorm", measured=False)
    assert quick(hf, tmp_path / "wider").passed
    bad = damaged(tmp_path / "wider", tmp_path / "bad", garbage("embedding.weight", 4321))
    assert quick(hf, bad).verdict == "different"


def test_a_loud_row_excuses_no_other(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    loud = damaged(pair("gpt2")[1], tmp_path / "loud", lambda t: t["positions.weight"][1900].fill_(1e7))
    gptkit.swap(loud, tmp_path / "rms", norm="rmsnorm", measured=False)
    bad = damaged(tmp_path / "rms", tmp_path / "bad", garbage("positions.weight", 1500))
    assert quick(loud, bad).limited[0].startswith("row 1,500 of positions.weight")


@pytest.mark.exhaustive
def test_more_rows_than_are_read_unasked_limit_the_verdict(
    swapped: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, folder = swapped
    bad = damaged(folder, tmp_path / "bad", lambda t: t["embedding.weight"][1234:1240].mul_(2))
    monkeypatch.setattr(stored, "AFFORDABLE", 2)
    assert quick(hf, bad).verdict == "different"  # two of them are read
    monkeypatch.setattr(stored, "AFFORDABLE", 0)
    found = quick(hf, bad)
    assert (found.verdict, found.passed, found.exit_code) == ("equal", False, 3)
    assert found.limited == (
        "6 rows of embedding.weight, 1,234 the first, which have other values and which the probe does "
        "not read; --long includes them",
    )


def test_an_expert_that_no_token_is_sent_to_is_not_looked_at(tmp_path: Path) -> None:
    """An expert whose router's row is the mean of two others' is never the likeliest."""
    save_hf({**CONFIGS["mixtral"], "num_hidden_layers": 1, "num_experts_per_tok": 1}, tmp_path / "hf")
    edited(
        tmp_path / "hf",
        lambda tensors: [
            rows[2].copy_(rows[:2].mean(0)) for name, rows in tensors.items() if name.endswith("gate.weight")
        ],
    )
    gptkit.convert(tmp_path / "hf", tmp_path / "local")
    other = with_spec(tmp_path / "local", tmp_path / "other", setting(eps=lambda eps: eps * 1.0001))
    assert quick(tmp_path / "hf", other).passed
    path = "blocks.0.feed_forward.experts.2"
    bad = damaged(other, tmp_path / "bad", lambda t: t[f"{path}.up_proj.weight"].mul_(3))
    for stream in (False, True):
        found = quick(tmp_path / "hf", bad, stream=stream)
        assert (found.verdict in ("identical", "equal"), found.passed) == (True, False)
        assert found.limited == (f"{path}, which have other values and receive no token of the probe",)
    gptkit.swap(tmp_path / "hf", tmp_path / "wide", intermediate="96", measured=False)
    wide = damaged(tmp_path / "wide", tmp_path / "bad-wide", lambda t: t[f"{path}.up_proj.weight"].mul_(3))
    assert quick(tmp_path / "hf", wide).limited[0].startswith(path)
    seen = quick(
        tmp_path / "hf", damaged(other, tmp_path / "seen", lambda t: t[f"{path[:-1]}0.up_proj.weight"].mul_(3))
    )
    assert (seen.verdict, seen.limited) == ("different", ())


# --- lengths ----------------------------------------------------------------------------------------------------------


def stretched(factor: float) -> Callable[[Any], None]:
    """Rotary positions with linear scaling."""
    scaling = {"type": "LinearScaling", "factor": factor}
    return lambda node: node.update(scaling=scaling) if "base" in node else None


LENGTHS: dict[str, tuple[str, Callable[[Any], None], int]] = {
    "no window": ("mistral", setting(window=None), 4096),
    "a shorter window": ("mistral", setting(window=2000), 2000),
    "a longer window": ("mistral", setting(window=5000), 4096),
    "another original context": ("llama-dynamic", setting(original_context=1500), 1500),
    "a base that no short text shows": ("llama", setting(base=lambda base: base * (1 + 1e-8)), 200),
    "a scaling that no short text shows": ("llama", stretched(1 + 1e-8), 200),
}


@few(2)
@pytest.mark.parametrize("name", LENGTHS)
def test_a_field_that_acts_beyond_the_probe_limits_the_verdict(
    name: str, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, edit, length = LENGTHS[name]
    hf, local = pair(model)
    other = with_spec(local, tmp_path / "other", edit)
    found = quick(hf, other)
    assert (found.verdict in ("identical", "equal"), found.passed, found.up_to) == (True, False, length)
    assert f"more than {length:,} tokens" in found.limited[0]
    assert f"up to {length:,} tokens" in markdown(card(found))
    asked = quick(hf, other, up_to=150)
    assert (asked.passed, asked.up_to, asked.limited) == (True, 150, ())
    assert max(prompt.positions for prompt in asked.prompts) <= 150
    bad = damaged(other, tmp_path / "bad", lambda t: t["final_norm.weight"][0].mul_(1 + 1e-6))
    assert not quick(hf, bad, up_to=150).passed  # a window gives no tensor a reason to differ


def test_the_command_says_how_far_it_holds(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("mistral")
    other = with_spec(local, tmp_path / "other", setting(window=2000))
    run = call("verify", str(hf), str(other), "--no-mutations")
    said = " ".join(run.stdout.split())
    assert run.exit_code == 3
    assert "identical to the last bit up to 2,000 tokens" in said
    assert "not looked at: sequences of more than 2,000 tokens (windows of 4,096 and 2,000 tokens)" in said
    assert "--long goes past that, --up-to 2000 asks for no more" in said
    assert exit_code(hf, other, "--no-mutations", "--up-to", "1k") == 0


def test_the_length_that_is_asked_for_is_probed(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("mistral-1100")
    other = with_spec(local, tmp_path / "other", setting(window=1050))
    assert quick(hf, other, up_to=1050).passed
    assert quick(hf, other, up_to=1060).verdict == "different"


def test_long_goes_past_what_differs(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("mistral-1100")
    other = with_spec(local, tmp_path / "other", setting(window=1050))
    assert quick(hf, other).up_to == 1050
    found = quick(hf, other, long=True)
    assert (found.verdict, found.up_to) == ("different", None)
    assert [prompt.name for prompt in found.prompts if not prompt.identical] == [
        "past the window of 1,050",
        "past the window of 1,100",
    ]


def test_a_scaling_by_one_is_none(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("llama")
    other = with_spec(local, tmp_path / "other", stretched(1.0))
    found = quick(hf, other)
    assert (found.passed, found.up_to) == (True, None)


@pytest.mark.parametrize("tokens", ["0", "-5", "2049", "many"])
def test_lengths_that_cannot_be(tokens: str, pair: Callable[[str], tuple[Path, Path]]) -> None:
    assert exit_code(pair("gpt2")[0], "--up-to", tokens) == 2
