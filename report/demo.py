"""The tour of `gptkit demo`: it runs commands on gptkit's sample models, and checks their results."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ..analysis.params import params
from ..converter.checkpoint import open_checkpoint
from ..converter.convert import convert
from ..converter.files import sha256_file
from ..converter.resolve import SAMPLES
from ..modules.text import generate
from ..parity.verify import verify
from ..surgery.swap import swap
from .checkpoints import conversion_lines
from .counts import parameter_table
from .quantities import scientific
from .surgery import swap_lines
from .verification import verification_report

_PROMPT = "ROMEO:\n"
_SAMPLED = {"temperature": 0.8, "top_k": 40, "seed": 7}


def tour(console: Console, keep: Path | None = None) -> bool:
    """Run the tour. Return whether all its checks succeeded.

    Checkpoints are written to the folder `keep`, or by default to a temporary folder that is deleted at the end.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="gptkit-demo-") as folder:
            return tour(console, Path(folder))
    keep.mkdir(parents=True, exist_ok=True)
    say: Callable[..., None] = console.print
    proofs: list[bool] = []

    def step(title: str, command: str) -> None:
        say()
        say(f"[bold]{title}[/]")
        say(f"[dim]$ {command}[/]")

    def prove(succeeded: bool, what: str) -> None:
        proofs.append(succeeded)
        say(f"[{'green' if succeeded else 'red'}]{'proved' if succeeded else 'FAILED'}[/]: {what}")

    def lines(words: list[str]) -> None:
        say("\n".join(words), markup=False)

    step("1. Count, without weights or torch", "gptkit params qwen3-8b")
    say(parameter_table(params("qwen3-8b")))

    step("2. Four trained checkpoints come along", "gptkit params sample:gpt2 sample:llama sample:bloom sample:falcon")
    say(parameter_table(params(*(f"sample:{name}" for name in SAMPLES))))

    step("3. Take one apart", "gptkit convert sample:gpt2 gpt2-local --to local")
    local = keep / "gpt2-local"
    lines(conversion_lines(convert("sample:gpt2", local, force=True)))

    step("4. Prove that it still computes what transformers computes", "gptkit verify sample:gpt2 gpt2-local")
    say(verification_report(result := verify("sample:gpt2", local)))
    prove(result.verdict == "identical", "every logit has the same bits as transformers' own")

    step("5. And back", "gptkit convert gpt2-local gpt2-hf --to hf")
    back = keep / "gpt2-hf"
    lines(conversion_lines(convert(local, back, "hf", force=True)))
    source = open_checkpoint("sample:gpt2").path
    same = all(sha256_file(source / n) == sha256_file(back / n) for n in ("model.safetensors", "config.json"))
    prove(same, "model.safetensors and config.json came back byte for byte")

    step("6. The other three families, the same way", "gptkit verify sample:llama   (and bloom, falcon)")
    for name in SAMPLES[1:]:
        result = verify(f"sample:{name}")
        worst = max(prompt.maximum for prompt in result.prompts)
        tokens = sum(prompt.positions for prompt in result.prompts)
        tensors = "" if result.bytes is None else f"; {result.bytes.compared} tensors to the same bytes"
        words = f"{name}: max Δ {scientific(worst)}, {tokens:,} positions, {result.attention}{tensors}"
        prove(result.verdict == "identical" and result.passed, words)

    step("7. Change a component: LayerNorm -> RMSNorm", "gptkit swap sample:gpt2 gpt2-rms --norm rmsnorm")
    swapped = keep / "gpt2-rms"
    lines(swap_lines(swap("sample:gpt2", swapped, norm="rmsnorm", force=True)))

    step("8. Prove that this changed nothing", "gptkit verify sample:gpt2 gpt2-rms")
    result = verify("sample:gpt2", swapped)
    say(verification_report(result))
    prove(result.verdict == "equal", "the same function: the logits differ by less than the rounding of either model")

    step("9. The naive replacement, for comparison", "gptkit swap sample:gpt2 gpt2-naive --norm rmsnorm --approximate")
    naive = swap("sample:gpt2", keep / "gpt2-naive", norm="rmsnorm", approximate=True, force=True)
    assert naive.measured is not None
    worst = naive.measured.maximum["float32"]
    prove(worst > 1, f"it is caught: logits off by {worst:.1f}, KL {naive.measured.kl:.2f} nats per token")

    step("10. Generate from both", "gptkit generate gpt2-rms 'ROMEO:' --temperature 0.8 --top-k 40 --seed 7")
    texts = []
    for name, model in (("the original", "sample:gpt2"), ("the swapped one", swapped)):
        # Both in float32: in bf16 a near tie may be decided differently.
        texts.append("".join(generate(model, _PROMPT, 90, dtype="float32", **_SAMPLED)))  # type: ignore[arg-type]
        say(f"[bold]{name}[/]")
        say(_PROMPT + texts[-1].rstrip(), markup=False)
    prove(texts[0] == texts[1], "token for token the same text")

    say()
    say(f"[bold]{sum(proofs)} of {len(proofs)} proofs succeeded.[/]")
    return all(proofs)
