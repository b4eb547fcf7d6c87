"""The tour: every proof holds, in 80 columns, and it says so where one does not."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from helpers.covering import exhaustive
from rich.console import Console

import gptkit
from gptkit.converter.manifest import check_manifest
from gptkit.converter.resolve import SAMPLES, SAMPLES_DIR
from gptkit.parity.bisect import Divergence, Part
from gptkit.parity.compare import LogitDifference
from gptkit.parity.stored import BytesVerdict
from gptkit.parity.verify import Noise, Verification
from gptkit.report import demo
from gptkit.report.demo import tour
from gptkit.report.sheets import whole_words
from gptkit.report.verification import verdict_lines, verification_report

pytestmark = pytest.mark.skipif(
    not all((SAMPLES_DIR / name).is_dir() for name in SAMPLES), reason=f"not all samples are in {SAMPLES_DIR}"
)


def console(width: int = 80) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, highlight=False), out


@pytest.fixture(scope="module")
def toured(tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, str, Path]:
    keep = tmp_path_factory.mktemp("tour") / "kept"
    screen, out = console()
    return tour(screen, keep), out.getvalue(), keep


def test_every_proof_holds(toured: tuple[bool, str, Path]) -> None:
    held, text, _ = toured
    proofs = text.count("proved: ")
    assert held and proofs >= 8
    assert "FAILED" not in text
    assert f"{proofs} of {proofs} proofs succeeded." in text
    assert text.count("\n$ gptkit ") == 10


def test_it_fits_in_80_columns(toured: tuple[bool, str, Path]) -> None:
    _, text, _ = toured
    assert max(len(line) for line in text.splitlines()) <= 80


def test_what_it_keeps(toured: tuple[bool, str, Path]) -> None:
    _, _, keep = toured
    names = {path.name for path in keep.iterdir()}
    assert {"gpt2-local", "gpt2-hf", "gpt2-rms", "gpt2-naive"} == names
    assert not any(check_manifest(keep / name) for name in names)


@exhaustive
def test_a_proof_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def worse(*arguments: Any, **options: Any) -> Verification:
        result = gptkit.verify(*arguments, **options)
        first, *rest = result.prompts
        noise = Noise(reference=1.0, candidate=1.0, paths=None, functions=9.0, errors={"float32": (1.0, 1.0)})
        return dataclasses.replace(result, prompts=(dataclasses.replace(first, maximum=9.0), *rest), noise=noise)

    monkeypatch.setattr(demo, "verify", worse)
    screen, out = console()
    assert not tour(screen)
    text = out.getvalue()
    assert "FAILED: every logit has the same bits" in text
    assert "DIFFERENT" in text
    assert "proofs succeeded." in text and "proved: token for token the same text" in text


# --- the report of a verification -------------------------------------------------------------------------------------


def verification(**fields: Any) -> Verification:
    prompt = LogitDifference(name="past the window of 16", positions=28, maximum=0.5, mean=0.1, kl=0.01, top1=0.75)
    noise = Noise(reference=2e-6, candidate=1e-6, paths=3e-6, functions=0.5, errors={"bfloat16": (1e-3, 9e-3)})
    given: dict[str, Any] = {
        "model": "a",
        "other": "b",
        "dtype": "bfloat16",
        "attention": "sdpa",
        "prompts": (prompt,),
        "bytes": BytesVerdict(9, "a", tuple(f"blocks.{layer}.attention.q_proj.weight" for layer in range(9))),
        "noise": noise,
        "notes": ("the architectures differ: blocks.*.attention.window 16 -> null",),
    }
    return Verification(**{**given, **fields})


def test_the_report_has_all_figures() -> None:
    screen, out = console()
    screen.print(verification_report(verification()))
    text = out.getvalue()
    for figure in ("past the window of 16", "28", "5.0e-01", "1.0e-01", "1.0e-02", "75.0%"):
        assert figure in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_verdicts_in_words() -> None:
    lines = "\n".join(verdict_lines(verification()))
    assert "bytes     0 of 9 tensors equal a" in lines
    assert "differs: blocks.0.attention.q_proj.weight" in lines
    assert "… (4 more)" in lines
    assert "DIFFERENT: transformers, bfloat16, sdpa attention, max Δ 5.0e-01" in lines
    assert "in float64 they differ by 5.0e-01; rounding explains up to 4.0e-06" in lines
    assert "float32 against float64: transformers 2.0e-06, gptkit 1.0e-06" in lines
    assert "sdpa against eager in float32: transformers 3.0e-06" in lines
    assert max(len(line) for line in verdict_lines(verification())) <= 80
    assert "bfloat16 rounds worse: mean error 9.0e-03, transformers' own 1.0e-03" in lines
    assert "note: the architectures differ" in lines
    same = dataclasses.replace(verification().prompts[0], maximum=0.0)
    good = verdict_lines(verification(prompts=(same,), noise=None, bytes=None, notes=()))
    assert good == ["function  identical to the last bit: transformers, bfloat16, sdpa attention"]
    # A page lays models side by side that are the same too: nothing is to be put right there.
    beside = Divergence(())
    assert verdict_lines(verification(prompts=(same,), noise=None, bytes=None, notes=(), divergence=beside)) == good
    head = (Part("head", "head", None, 0.5, 1e-7),)
    searched = Divergence(head, undone=("swapping q and k",) * 1200, copied=("the reference's base",) * 2)
    for divergence, said in (
        (beside, "not searched for: no component differs by more than rounding"),
        (Divergence(head), "not found: none of the known repairs applies"),
        (
            searched,
            "not found: gptkit tried 1,200 repairs of known mistakes and 2 parts copied from the reference, one at a "
            "time; --json lists them (undone, copied)",
        ),
    ):
        told = verdict_lines(verification(divergence=divergence))
        assert max(map(len, told)) <= 80 and f"cause {said}" in " ".join(" ".join(told).split())
    small = Noise(reference=2e-6, candidate=1e-6, paths=None, functions=1e-9, errors={"float32": (1.0, 1.0)})
    assert "function  the same: transformers" in "\n".join(verdict_lines(verification(noise=small)))


def test_names_out_of_files_are_plain_text() -> None:
    screen, out = console()
    prompts = tuple(
        LogitDifference(name=name, positions=1, maximum=0, mean=0, kl=0, top1=1)
        for name in ("[bold]x[/]", "a\nb\x1b[31m")
    )
    screen.print(verification_report(verification(prompts=prompts, notes=("[red]n[/]",))))
    text = out.getvalue()
    assert "[bold]x[/]" in text and "[red]n[/]" in text
    assert "\x1b" not in text


def test_a_long_line_goes_on_below_its_words() -> None:
    names = ", ".join(f"attention.{part}_proj.weight" for part in "qkvo")
    words = f"the reference's values of {names} restore parity"
    first, *more = whole_words(f"cause     {words}", 80, 0, 10)
    assert first.startswith("cause     the") and more and all(line.startswith(" " * 10) for line in more)
    assert max(map(len, (first, *more))) <= 80
    assert " ".join(part.strip() for part in (first.removeprefix("cause"), *more)) == words
    assert whole_words("place     here", 80, 0, 10) == ["place     here"]
