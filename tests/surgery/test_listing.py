"""The listing: it says what the swap then does, it computes nothing, and the command line offers what is registered."""

import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.covering import exhaustive, few, functions, rest_slow
from helpers.exactness import saved
from helpers.families import CONFIGS, REPRESENTATIVES, save_hf, spec_of
from helpers.weights import error
from rich.console import Console

import gptkit
from gptkit.analysis.costs import costs
from gptkit.converter.resolve import SAMPLES
from gptkit.errors import GptkitError, SwapRefused, UsageError
from gptkit.parity.probe import ProbeBatch
from gptkit.parity.rows import states
from gptkit.report.surgery import listing_report
from gptkit.surgery.base import Promise, StoredModel, SwappedModel
from gptkit.surgery.fits.calibration import Calibration
from gptkit.surgery.fits.text import CalibrationText
from gptkit.surgery.guarantee import EXACT_FP32, EXACT_FP64
from gptkit.surgery.listing import Listed, Listing, limits_of, listing, values_of
from gptkit.surgery.options import spelled
from gptkit.surgery.registry import Step, all_options, all_swaps, apply, options, steps_named


def test_the_command_line_offers_every_swap_and_no_other() -> None:
    assert {option.name for option in all_options()} == set(options())
    for option in all_options():
        forms = [swap.form for swap in options()[option.name]]
        assert option.flag == (forms == [""]), option.name
        assert bool(option.metavar) != option.flag and option.help.endswith((".", "…"))
    assert [spelled(option.name) for option in all_options()][:2] == ["--norm", "--block"]


def test_forms_that_the_help_names_exist() -> None:
    """An example in the help's metavar is a value that some swap takes."""
    for option in all_options():
        for form in option.metavar.split(" | "):
            if form not in ("…", ""):
                assert form in [swap.form for swap in options()[option.name]] or steps_named(option.name, form)


@few(2)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "falcon-40b", "qwen3-windowed"])
def test_what_is_listed_is_what_happens(name: str, tmp_path: Path) -> None:
    """On a tiny model without a tokenizer: the same verdict, reason and costs as the swap itself."""
    save_hf(CONFIGS[name], tmp_path / "hf")
    found = listing(gptkit.open_checkpoint(tmp_path / "hf"))
    assert len(found.entries) > 20
    assert found.before == costs(gptkit.open_checkpoint(tmp_path / "hf").spec)
    for entry in found.entries:
        step = Step(entry.swap.option, entry.value)
        if entry.verdict == "refused":
            assert entry.said and entry.costs is None
            with pytest.raises((SwapRefused, UsageError)) as caught:
                gptkit.swap(tmp_path / "hf", tmp_path / "out", [step], dry_run=True)
            assert caught.value.message == entry.said and (caught.value.hint or "") == entry.hint
        elif entry.verdict == "needs a text":
            assert entry.swap.calibrated and "--calibrate FILE" in entry.said
            with pytest.raises(UsageError, match="needs a text to fit on"):
                gptkit.swap(tmp_path / "hf", tmp_path / "out", [step], dry_run=True)
        else:
            done = gptkit.swap(tmp_path / "hf", tmp_path / "out", [step], dry_run=True)
            assert done.guarantee == entry.verdict
            assert costs(done.spec, found.before.context) == entry.costs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


SHARED = Path(__file__).parents[2].parent / "shared"
STORIES = SHARED / "checkpoints" / "stories260K-llama"


def shown(thing: Any) -> str:
    """What is printed."""
    file = io.StringIO()
    Console(file=file, width=80).print(thing)
    return file.getvalue()


def computed_once(model: StoredModel) -> Callable[..., Any]:
    """`states` in which this model's are computed once for all that are compared with it on the same batches."""
    known: dict[Any, Any] = {}

    def found(tree: Any, batches: Sequence[ProbeBatch], dtype: torch.dtype, **options: Any) -> Any:
        if tree is not model:
            return states(tree, batches, dtype, **options)
        key = (dtype, *(repr((each.input_ids.tolist(), each.attention_mask)) for each in batches))
        if key not in known:
            known[key] = states(tree, batches, dtype, **options)
        return known[key]

    return found


def hold(source: Path, every: bool = False) -> Listing:
    """Apply the first value of each swap that is listed, or every value, and check the list: an exact swap keeps the
    logits, any other swap, fitted on a text where it needs one, has finite logits, and a refused one gives a reason.
    """
    checkpoint = gptkit.open_checkpoint(source)
    found, model = listing(checkpoint), StoredModel(checkpoint)
    # To most of them: fields of its components, layers without attention, an encoder beside them; to nearly all, shared
    # blocks, and what is added to each layer's input or scales all of its output.
    reasons = ("does not support", "attention in every", "needs a decoder-only model")
    unknown = any(reason in entry.said for entry in found.entries for reason in reasons)
    nearly = sum(reasons[0] in entry.said for entry in found.entries) > len(found.entries) / 2
    assert sum(entry.verdict != "refused" for entry in found.entries) >= 3
    assert len(found.of("exact")) >= (1 if checkpoint.spec.has_shared_blocks else 0 if nearly else 4 if unknown else 9)
    continues = checkpoint.spec.encoder is None and checkpoint.spec.causal and checkpoint.spec.head is not None
    if not nearly:
        assert bool(found.of("needs a text")) == (continues and not checkpoint.spec.has_shared_blocks)
    ids = torch.randint(checkpoint.spec.vocab_size, (320,), generator=torch.Generator().manual_seed(0)).tolist()
    text = Calibration(CalibrationText(tuple(ids[:256]), tuple(ids[256:]), "random tokens", ""), checkpoint.spec)
    held: set[tuple[str, str]] = set()
    computed = computed_once(model)
    for entry in found.entries:
        if entry.verdict == "refused":
            assert entry.said and "bug" not in entry.said, entry.asked
            continue
        form = (entry.swap.option, entry.swap.form)
        if form in held and not every:
            continue
        held.add(form)
        step = Step(entry.swap.option, entry.value)
        swapped = apply(model, step, calibration=(lambda: text) if entry.verdict == "needs a text" else None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gptkit.surgery.measure.states", computed)
            gap = error(model, SwappedModel(model, swapped), swapped)
        assert swapped.guarantee == entry.verdict or entry.verdict == "needs a text", entry.asked
        assert gap <= EXACT_FP64 if swapped.guarantee == "exact" else math.isfinite(gap), (entry.asked, gap)
    return found


@few(1)
@pytest.mark.parametrize("family", rest_slow(REPRESENTATIVES, lambda name: functions(spec_of(CONFIGS[name]))))
def test_every_swap_is_what_it_is_listed_as(family: str, tmp_path: Path) -> None:
    hold(saved(REPRESENTATIVES[family].name, tmp_path))


@torch.no_grad()
def rounding(source: Path) -> float:
    """How far a checkpoint's logits in fp32 are from its own in fp64, relative to the largest."""
    ids = torch.randint(0, 97, (4, 60), generator=torch.Generator().manual_seed(0))
    narrow, wide = (gptkit.load(source, dtype)(ids).double() for dtype in ("float32", "float64"))
    return float((narrow - wide).abs().max() / wide.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_what_is_listed_as_exact_is_in_the_files(name: str, tmp_path: Path) -> None:
    for entry in hold(saved(name, tmp_path), every=True).of("exact"):
        step = Step(entry.swap.option, entry.value)
        try:
            done = gptkit.swap(tmp_path / name, tmp_path / "out", [step], dtype="float64", force=True)
        except GptkitError as refused:  # of a checkpoint that rounds by more in fp32 than the bound allows
            if "in float32" not in refused.message or rounding(tmp_path / name) <= EXACT_FP32:
                raise
            continue
        assert done.guarantee == "exact" and done.measured is not None, entry.asked
        found = done.measured.relative
        assert found["float64"] <= EXACT_FP64 and found["float32"] <= EXACT_FP32, entry.asked


@exhaustive
@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the project's shared checkpoints")
def test_of_a_trained_model_without_a_text_nothing_in_use_goes_exactly() -> None:
    found = hold(STORIES, every=True)
    fitted = {
        "--heads 4",
        "--attention mqa",
        "--attention gqa:2",
        "--attention mla:16",
        "--mlp plain",
        "--attention linear",
    }
    assert {entry.asked for entry in found.of("needs a text")} == fitted | {
        *("--layers auto:4", "--intermediate 129", "--intermediate 129:active", "--heads 4:active")
    }
    assert all(entry.costs is not None for entry in found.entries if entry.verdict != "refused")
    told = {each["value"]: each for each in found.as_json()["swaps"]}
    assert told["mqa"]["verdict"] == "needs a text" and told["mqa"]["costs"]["parameters"] < 260_032
    assert "Possible, needs a text to be fitted on (--calibrate FILE) (10)" in shown(listing_report(found))


@pytest.mark.exhaustive
def test_what_the_weights_decide_is_tried_on_them(tmp_path: Path) -> None:
    """Heads that are equal merge exactly, and units that are dead go exactly, without a text."""
    gptkit.swap(saved("falcon-7b", tmp_path), tmp_path / "wide", attention="mha", intermediate="288")
    found = {entry.asked: entry.verdict for entry in hold(tmp_path / "wide", every=True).entries}
    assert found["--attention gqa:3"] == found["--attention mqa"] == found["--intermediate 216"] == "exact"
    assert found["--heads 5"] == "needs a text"


@few(1)
@pytest.mark.parametrize("sample", SAMPLES)
def test_samples_compute_no_tensor(sample: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(*_: Any) -> None:
        pytest.fail("a tensor was computed")

    monkeypatch.setattr(SwappedModel, "tensor", computed)
    monkeypatch.setattr(SwappedModel, "wide", computed)
    found = listing(gptkit.open_checkpoint(f"sample:{sample}"))
    for verdict in ("exact", "approximate", "refused"):
        assert len(found.of(verdict)) >= 5, verdict  # type: ignore[arg-type]
    assert all(entry.costs is not None for entry in found.entries if entry.verdict != "refused")
    unsaid = set(options()) - {entry.swap.option for entry in found.entries}
    # Which need a value and have none to try, or, of experts, a mixture.
    assert unsaid <= {"merge_lora", "rotary_dim", "context", "drop", "experts"}


def test_json(tmp_path: Path) -> None:
    found = listing(gptkit.open_checkpoint("sample:llama"))
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["schema_version"] == 1 and len(told["swaps"]) == len(found.entries)
    mha = next(each for each in told["swaps"] if each["option"] == "attention" and each["value"] == "mha")
    assert mha["verdict"] == "exact" and mha["by_layer"] is True
    assert mha["costs"]["cache_bytes_a_token"]["bfloat16"] == 3 * told["costs"]["cache_bytes_a_token"]["bfloat16"]


def test_values_without_examples() -> None:
    """A form that is a value says why it does not apply; a variant or a pattern keeps quiet."""
    spec = gptkit.open_checkpoint("sample:llama").spec
    by_form = {(swap.option, swap.form): list(values_of(swap, spec)) for swap in all_swaps()}
    assert by_form["norm", "rmsnorm"] == ["rmsnorm"]
    assert all("N" not in values for values in by_form.values())
    for (option, form), values in by_form.items():
        for value in values:
            assert any(swap.matches(value) for swap in options()[option]), (option, form, value)


def test_limits_in_words() -> None:
    spec = gptkit.open_checkpoint("sample:gpt2").spec
    assert limits_of(Promise(), spec) == limits_of(Promise(length=256), spec) == ""
    assert limits_of(Promise(length=128), spec) == "up to 128 tokens"
    assert limits_of(Promise(tokens=((0, 1), (0, 1)), length=8), spec) == "up to 8 tokens, for the 2 tokens kept"
    every = tuple(range(spec.vocab_size))
    assert limits_of(Promise(tokens=(every, every)), spec) == ""


def test_asked_as_on_the_command_line() -> None:
    swaps = {(swap.option, swap.form): swap for swap in all_swaps()}
    assert Listed(swaps["untie", ""], "", "exact").asked == "--untie"
    assert Listed(swaps["norm", "rmsnorm"], "rmsnorm", "exact").asked == "--norm rmsnorm"
