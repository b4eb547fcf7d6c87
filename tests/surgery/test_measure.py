"""Measuring from files by rows gives the numbers of whole modules, in little memory, and sees what it should."""

import math
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.covering import exhaustive, few, rest_slow
from helpers.families import CONFIGS, VARIANTS, save_hf, spec_of
from helpers.held import Held, fewer_tokens, held
from helpers.trees import TREES, random_weights
from torch import Tensor

from gptkit.converter.checkpoint import open_checkpoint
from gptkit.errors import GptkitError
from gptkit.modules.load import as_array, tensor_of
from gptkit.parity import compare, rows
from gptkit.parity.compare import kl_divergence, perplexity
from gptkit.parity.outputs import outputs_of
from gptkit.parity.probe import ProbeBatch, Scope, probe
from gptkit.parity.rows import states
from gptkit.surgery import measure as module
from gptkit.surgery.base import Promise, StoredModel
from gptkit.surgery.measure import affordable, measure


def plainly(before: Held, after: Held, dtype: torch.dtype) -> tuple[float, float, float, float]:
    """(largest difference, that over the largest logit, KL, top-1) of whole modules."""
    a, b = ([], [])
    batches = probe(before.spec, after.spec)
    with torch.inference_mode():
        for found, tree in ((a, before), (b, after)):
            model = tree.decoder(dtype)
            found += [batch.valid(outputs_of(model, batch)) for batch in batches]
    x, y = torch.cat(a), torch.cat(b)
    gap = (x - y).abs().max().item()
    same = (x.argmax(-1) == y.argmax(-1)).double().mean().item()
    return gap, gap / x.abs().max().item(), kl_divergence(x, y).mean().item(), same


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a few thousand bytes come in many pieces."""
    monkeypatch.setattr(rows, "_CHUNK_BYTES", 3000)
    monkeypatch.setattr(rows, "_MAPPED_BYTES", 2000)
    monkeypatch.setattr(compare, "_CHUNK_BYTES", 5000)
    monkeypatch.setattr(compare, "_ROWS", 100)


QUICK = [variant.name for variant in VARIANTS if variant.name != "mistral-default-window"]


@few(2)
@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("name", rest_slow(QUICK))
def test_states_by_rows_are_those_of_the_module(name: str) -> None:
    """Or as near as its own two kernels are to one another: norms of activations that are nearly all cut off, as Gemma
    3n's are, make much of every rounding.
    """
    tree = held(name, dtype=torch.bfloat16)
    batches = probe(tree.spec)
    for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 2e-5)):
        models = [tree.decoder(dtype, "sdpa"), tree.decoder(dtype, "eager")]
        for model in models:
            model.head = rows._Ends()  # type: ignore[assignment]
        found = states(tree, batches, dtype)
        assert len(found) == len(batches)
        for batch, x in zip(batches, found, strict=True):
            with torch.inference_mode():
                whole, other = (outputs_of(model, batch) for model in models)
            assert x.dtype == dtype
            assert x.shape == whole.shape
            gap, noise = ((batch.valid(each) - batch.valid(whole)).abs().max().item() for each in (x, other))
            assert gap <= max(bound * whole.abs().max().item(), 4 * noise)


@few(2)
@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("name", TREES)
def test_mixtures_and_latents_are_run_by_rows(name: str) -> None:
    spec = TREES[name]
    tree = Held(spec, random_weights(spec))
    batches = probe(spec)
    model = tree.decoder(torch.float64)
    model.head = rows._Ends()  # type: ignore[assignment]
    with torch.inference_mode():
        whole = [model(batch.input_ids, batch.attention_mask) for batch in batches]
    for batch, x, y in zip(batches, whole, states(tree, batches, torch.float64), strict=True):
        assert (batch.valid(x) - batch.valid(y)).abs().max().item() < 1e-12


@few(2)
@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("name", ["gpt2", "llama-v5", "qwen2", "bloom", "bloom-old-names", "falcon-40b"])
def test_a_measurement_is_that_of_whole_modules(name: str) -> None:
    before, after = held(name), held(name, seed=1)
    found = measure(before, after)
    for dtype, bound in (("float64", 1e-9), ("float32", 1e-4)):
        gap, relative, kl, same = plainly(before, after, getattr(torch, dtype))
        assert found.maximum[dtype] == pytest.approx(gap, rel=bound)
        assert found.relative[dtype] == pytest.approx(relative, rel=bound)
    gap, relative, kl, same = plainly(before, after, torch.float64)
    assert found.kl == pytest.approx(kl, rel=1e-9)
    assert found.kl > 0.1
    assert found.top1 == same
    assert found.positions == sum(len(b.valid(b.input_ids[..., None])) for b in probe(before.spec))


def test_a_tree_against_itself_differs_by_nothing() -> None:
    tree = held("gpt2")
    found = measure(tree, tree, text=[3, 5, 7] * 30)
    assert set(found.maximum.values()) == {0.0}
    assert found.kl < 1e-15
    assert found.top1 == found.top1_text == 1
    assert found.perplexity is not None
    assert found.perplexity[0] == found.perplexity[1]


def test_each_weight_is_read_once_a_dtype_and_side() -> None:
    before, after = held("llama"), held("llama", seed=1)
    told: list[int] = []
    measure(before, after, dtypes=("float64",), progress=told.append)
    for tree in (before, after):
        linears = [name for name in tree.reads if name.endswith("_proj.weight")]
        assert len(linears) == len(set(linears)) == sum(p.endswith("_proj.weight") for p in tree.weights)
        assert tree.releases >= len(linears)
    assert sum(told) == 2 * sum(w.nbytes for name, w in before.weights.items() if name.endswith("_proj.weight"))


@few(3)
@pytest.mark.parametrize(
    "name",
    [
        "embedding.weight",
        "positions.weight",
        "blocks.0.attention_norm.bias",
        "blocks.1.attention.q_proj.weight",
        "blocks.1.attention.v_proj.bias",
        "blocks.2.feed_forward.down_proj.bias",
        "final_norm.weight",
    ],
)
def test_a_change_anywhere_is_seen(name: str) -> None:
    before = held("gpt2")
    found = measure(before, before.changed(name, lambda w: w * 1.01))
    assert found.relative["float64"] > 1e-6
    assert found.relative["float32"] > 1e-6


@few(3)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", ["blocks.0.attention.o_proj.weight", "final_norm.weight", "head.weight"])
def test_nan_is_never_lost(name: str, side: int) -> None:
    def spoil(weight: Tensor) -> Tensor:
        weight[(0,) * weight.ndim] = math.nan
        return weight

    good = held("gpt2-untied")
    sides = [good, good]
    sides[side] = good.changed(name, spoil)
    found = measure(*sides, text=[1, 2, 3, 4])
    assert all(math.isnan(value) for value in (*found.maximum.values(), *found.relative.values(), found.kl))
    assert found.perplexity is not None
    assert math.isnan(found.perplexity[side])
    assert found.kl_text is not None
    assert math.isnan(found.kl_text)


# --- what a swap promises ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tokens_that_are_kept_are_compared_under_both_ids(name: str) -> None:
    before = held(name)
    kept = torch.randperm(before.spec.vocab_size, generator=torch.Generator().manual_seed(1))[:40].tolist()
    after = fewer_tokens(before, kept)
    promise = Promise((tuple(kept), tuple(range(40))))
    text = [kept[i] for i in (3, 4, 5)] + [next(t for t in range(97) if t not in kept)] + kept[:9]
    found = measure(before, after, promise=promise, text=text)
    assert found.relative["float64"] < 1e-14
    assert found.kl < 1e-14
    assert found.text_positions == 2 + 8
    assert found.perplexity is not None
    assert found.perplexity[0] == pytest.approx(found.perplexity[1], rel=1e-5)
    wrong = Promise((tuple(kept), tuple(reversed(range(40)))))
    assert measure(before, after, promise=wrong).relative["float64"] > 0.1
    ids = {
        int(i) for batch in Scope(before.spec, after.spec, promise.tokens).probe() for i in batch.input_ids.flatten()
    }
    assert ids <= set(kept)
    assert len(ids) > 30


def test_vocabularies_of_different_sizes_need_a_promise() -> None:
    before = held("llama")
    with pytest.raises(GptkitError, match="97 tokens in the first model, 40 in the second"):
        measure(before, fewer_tokens(before, list(range(40))))


def test_a_promise_of_a_length_is_compared_up_to_it() -> None:
    before = held("gpt2")
    after = before.changed("positions.weight", lambda w: torch.cat([w[:20], w[20:].flip(0)]))
    assert measure(before, after, promise=Promise(length=20), text=range(60)).relative["float64"] == 0
    assert measure(before, after, promise=Promise(length=21)).relative["float64"] > 1e-3


def test_tables_of_different_lengths_are_compared_as_far_as_both_go() -> None:
    import msgspec

    before = held("gpt2")
    positions = msgspec.structs.replace(before.spec.positions, length=300)
    spec = msgspec.structs.replace(before.spec, positions=positions, context_length=300)
    table = before.weights["positions.weight"]
    after = Held(spec, {**before.weights, "positions.weight": torch.cat([table, torch.randn(44, table.shape[1])])})
    assert measure(before, after, text=[i % 97 for i in range(400)]).maximum["float64"] == 0


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny_chunks")
def test_perplexity_is_that_of_whole_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptkit.parity.probe.WINDOW", 24)
    monkeypatch.setattr("gptkit.parity.probe.TOGETHER", 60)
    before, after = held("llama"), held("llama", seed=1)
    text = torch.randint(97, (101,), generator=torch.Generator().manual_seed(0)).tolist()
    found = measure(before, after, text=text)
    lost: list[list[Tensor]] = [[], []]
    kl = []
    for start in range(0, 100, 24):
        window = torch.tensor([text[start : start + 25]])
        with torch.inference_mode():
            logits = [tree.decoder(torch.float32)(window[:, :-1])[0] for tree in (before, after)]
        for losses, each in zip(lost, logits, strict=True):
            losses.append(F.cross_entropy(each, window[0, 1:], reduction="none"))
        kl.append(kl_divergence(*logits))
    assert found.text_positions == 100
    assert found.perplexity is not None
    for value, losses in zip(found.perplexity, lost, strict=True):
        assert value == pytest.approx(torch.cat(losses).mean().exp().item(), rel=1e-4)
    assert found.kl_text == pytest.approx(torch.cat(kl).mean().item(), rel=1e-4)
    data = found.as_json()["text"]
    assert data["perplexity"] == {"before": found.perplexity[0], "after": found.perplexity[1]}
    assert "text" not in measure(before, after).as_json()


def test_windows_predict_every_token_but_the_first() -> None:
    spec = spec_of(CONFIGS["gpt2"])  # 256 positions
    text = [i % 97 for i in range(1000)]
    windows = Scope(spec, spec).windows(text)
    assert max(map(len, windows)) == 257
    assert [token for window in windows for token in window[1:]] == text[1:]
    assert max(map(len, Scope(spec, spec, most=10).windows(text))) == 11
    assert Scope(spec, spec).windows([5]) == []


def test_text_without_two_tokens_says_so() -> None:
    tree = held("llama")
    found = measure(tree, tree, text=[4])
    assert found.perplexity is None
    assert any("not measured on the text" in note for note in found.as_json()["notes"])


def test_perplexity_of_a_ruined_model_is_no_error() -> None:
    assert perplexity(torch.tensor([5e3, 5e3])) == math.inf
    assert math.isnan(perplexity(torch.tensor([math.nan, 1.0])))


# --- large models -----------------------------------------------------------------------------------------------------


def test_a_large_model_is_measured_on_less_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(CONFIGS["mistral"])  # a window of 16
    batches = probe(spec)
    size = sum(p.count for p in spec.parameters())
    assert affordable(batches, spec, spec) == (batches, ())
    monkeypatch.setattr(module, "_WORK", 250 * size)
    monkeypatch.setattr(module, "_WORK_LIMIT", 1000 * size)
    some, (note,) = affordable(batches, spec, spec)
    names = [batch.name for batch in some]
    assert names == ["one token", "random tokens", "one token repeated", "left padding", "past the window of 16"]
    assert "long" in note
    assert "right padding" in note
    monkeypatch.setattr(module, "_WORK_LIMIT", 10 * size)
    some, (note,) = affordable(batches, spec, spec)
    assert "past the window of 16" in note
    monkeypatch.setattr(module, "_WORK", 0)
    assert len(affordable(batches, spec, spec)[0]) == 1


@exhaustive
def test_memory_is_not_that_of_the_model(tmp_path: Path) -> None:
    """115 MB in fp64, of which a process that measures it takes a fraction beyond what a small one takes."""
    config = {**CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    save_hf({**config, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 4000}, tmp_path / "big", torch.bfloat16)
    save_hf(CONFIGS["llama"], tmp_path / "small", torch.bfloat16)
    code = (
        "import sys, torch, resource; torch.set_num_threads(1)\n"
        "from gptkit.converter.checkpoint import open_checkpoint\n"
        "from gptkit.surgery.base import StoredModel\n"
        "from gptkit.surgery.measure import measure\n"
        "tree = StoredModel(open_checkpoint(sys.argv[1]))\n"
        "assert measure(tree, tree, text=range(90)).kl < 1e-9\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    peaks = []
    for name in ("small", "big"):
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * 1024)
    size = 8 * sum(p.count for p in open_checkpoint(tmp_path / "big").spec.parameters())
    assert size > 110e6
    assert peaks[1] - peaks[0] < 70e6, (peaks, resource.getpagesize())


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_ends_every_pass() -> None:
    import threading

    tree = held("gpt2")
    there = threading.active_count()
    wrong = ProbeBatch("beyond the vocabulary", torch.tensor([[5000]]))
    with pytest.raises(IndexError):
        states(tree, [*probe(tree.spec), wrong], torch.float32)

    def broken(name: str) -> tuple[np.ndarray, str]:
        if name == "blocks.1.attention.q_proj.weight":
            raise OSError(f"{name} went away")
        return as_array(tree.weights[name])

    tree.tensor = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="went away"):
        states(tree, probe(tree.spec), torch.float32)
    assert threading.active_count() == there


def test_files_are_measured_as_memory_is(tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf", torch.bfloat16)
    stored = StoredModel(open_checkpoint(tmp_path / "hf"))
    weights = {p.name: tensor_of(stored, p.name).clone() for p in stored.spec.parameters()}
    assert measure(stored, Held(stored.spec, weights)).maximum == {"float32": 0.0, "float64": 0.0}
