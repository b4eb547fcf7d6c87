"""eval: held to transformers' own logits and torch's cross entropy, and what its standard errors and pairs say."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers.covering import few
from helpers.families import edited

import gptkit
from gptkit.errors import GptkitError, InvalidInput, SwapRefused, UsageError
from gptkit.training.data import tokenize
from gptkit.training.evaluate import Bin, Estimate, evaluate, ratio

SAMPLES = Path(gptkit.__file__).parent / "samples"
PLAY = (SAMPLES / "play.txt").read_text()[:3600]
samples = pytest.mark.parametrize("sample", ["gpt2", "llama", "bloom", "falcon"])


@pytest.fixture
def play(tmp_path: Path) -> Path:
    return text_file(tmp_path / "play.txt", PLAY)


def text_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def copied(sample: str, folder: Path) -> Path:
    """A sample as a folder of its own."""
    shutil.copytree(SAMPLES / sample, folder)
    return folder


def plainly(
    sample: Path, texts: list[str], width: int, stride: int | None = None, **config: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By transformers' model: of every predicted token what is lost, its rank and its position in its window."""
    model = transformers.AutoModelForCausalLM.from_pretrained(sample, dtype=torch.float32, **config).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(sample)
    lost, ranks, positions = [], [], []
    for text in texts:
        ids, done = torch.tensor(tokenizer(text)["input_ids"]), 0
        for start in range(0, len(ids) - 1, stride or width):
            if start + width <= done or done == len(ids) - 1:
                continue
            window = ids[start : start + width + 1]
            with torch.inference_mode():
                logits = model(input_ids=window[None, :-1]).logits[0].double()
            new = slice(done - start, None)
            lost.append(F.cross_entropy(logits[new], window[1:][new], reduction="none"))
            order = logits[new].argsort(dim=-1, descending=True)
            ranks.append((order == window[1:][new][:, None]).nonzero()[:, 1])
            positions.append(torch.arange(done - start, len(window) - 1))
            done = start + len(window) - 1
    return tuple(torch.cat(each).numpy() for each in (lost, ranks, positions))  # type: ignore[return-value]


@few(2)
@samples
@pytest.mark.parametrize("stride", [None, 24])
def test_numbers_are_those_of_transformers_and_cross_entropy(sample: str, stride: int | None, play: Path) -> None:
    found = evaluate(f"sample:{sample}", play, context=64, stride=stride).score
    lost, ranks, positions = plainly(SAMPLES / sample, [PLAY], 64, stride)
    assert found.tokens == len(lost)
    assert found.nats.value == pytest.approx(lost.mean(), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(lost.mean()), rel=1e-6)
    assert found.top_k[1].value == (ranks < 1).mean()
    assert found.top_k[5].value == (ranks < 5).mean()
    for each in found.curve.bins:
        here = (positions >= each.first) & (positions <= each.last)
        assert each.tokens == here.sum()
        assert each.nats.value == pytest.approx(lost[here].mean(), rel=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(SAMPLES / sample)
    first = len(tokenizer.decode(tokenizer(PLAY)["input_ids"][:1]).encode())
    assert found.bytes == len(PLAY.encode()) - first
    assert found.bits_per_byte.value == pytest.approx(lost.sum() / math.log(2) / found.bytes, rel=1e-6)


def test_positions_sum_to_the_whole(play: Path) -> None:
    score = evaluate("sample:llama", play, past=3).score
    bins = score.curve.bins
    assert sum(each.tokens for each in bins) == score.tokens
    assert sum(each.nats.value * each.tokens for each in bins) / score.tokens == pytest.approx(score.nats.value, 1e-12)
    assert [each.first for each in bins] == [0, *(each.last + 1 for each in bins[:-1])]


def test_documents_are_apart(tmp_path: Path) -> None:
    texts = [PLAY[:1500], PLAY[1500:2100], "ä" * 40]
    paths = [text_file(tmp_path / f"{number}.txt", text) for number, text in enumerate(texts)]
    together, apart = evaluate("sample:gpt2", paths), [evaluate("sample:gpt2", path).score for path in paths]
    assert together.documents == 3
    assert together.score.tokens == sum(each.tokens for each in apart)
    assert together.score.bytes == sum(each.bytes for each in apart)
    assert together.score.nats.value == pytest.approx(plainly(SAMPLES / "gpt2", texts, 256)[0].mean(), rel=1e-6)


def test_characters_of_several_bytes_are_counted_as_bytes(tmp_path: Path) -> None:
    text = "ä€𝄞 ÄÖ\nx"
    score = evaluate("sample:gpt2", text_file(tmp_path / "t.txt", text)).score
    assert score.bytes in (len(text.encode()), len(text.encode()) - 2)  # its first token may be half a character


def test_folders_of_tokens_are_read(tmp_path: Path, play: Path) -> None:
    tokens = tokenize([play], tmp_path / "tokens", tokenizer="sample:llama")
    found, plain = evaluate("sample:llama", tmp_path / "tokens"), evaluate("sample:llama", play)
    assert found.score.tokens == tokens.tokens - 1
    assert found.score.curve.bins[0] == plain.score.curve.bins[0]
    gptkit.convert("sample:llama", tmp_path / "model.gguf", "gguf")
    assert evaluate(tmp_path / "model.gguf", tmp_path / "tokens").score.tokens == found.score.tokens
    other = tokenize([play], tmp_path / "other", vocabulary=300)
    with pytest.raises(UsageError, match="was not tokenised with the tokenizer of"):
        evaluate("sample:llama", other.folder)


# --- standard errors and pairs ----------------------------------------------------------------------------------------


def test_errors_are_over_windows() -> None:
    sums = np.array([3.0, 5.0, 4.0, 8.0])
    equal = ratio(sums, np.full(4, 2.0))
    assert equal.value == 2.5
    assert equal.error == pytest.approx((sums / 2).std(ddof=1) / 2)
    assert ratio(np.append(sums, 7.0), np.array([2.0] * 4 + [0.0])) == equal
    assert ratio(sums[:1], np.array([2.0])) == Estimate(1.5, None)


def test_errors_are_those_of_many_texts() -> None:
    """Texts drawn again and again, of windows of all sizes that are hard or easy as a whole."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        sizes = random.integers(1, 100, 40)
        found.append(ratio(sizes * (3 + random.normal(size=40)) + random.normal(size=40) * sizes**0.5, sizes))
    spread = np.std([each.value for each in found])
    assert np.mean([each.error for each in found]) == pytest.approx(spread, rel=0.05)


@few(1)
@samples
def test_a_model_less_itself_is_nothing(sample: str, play: Path) -> None:
    paired = evaluate(f"sample:{sample}", play, against=f"sample:{sample}").paired
    assert paired is not None
    assert (paired.difference, paired.better, paired.worse) == (Estimate(0.0, 0.0), 0.0, 0.0)


def test_pairs_are_by_window(play: Path) -> None:
    found = evaluate("sample:llama", play, against="sample:gpt2", context=64)
    assert found.against is not None and found.paired is not None
    ours, theirs = (plainly(SAMPLES / name, [PLAY], 64)[0] for name in ("llama", "gpt2"))
    windows = np.arange(len(ours)) // 64
    by_window = np.bincount(windows, ours - theirs)
    assert found.paired.unit == "nats a token"
    assert found.paired.windows == windows[-1] + 1
    assert found.paired.difference.value == pytest.approx(found.score.nats.value - found.against.nats.value)
    assert found.paired.better == (by_window < 0).mean()
    expected = ratio(by_window, np.bincount(windows)).error
    assert found.paired.difference.error == pytest.approx(expected, rel=1e-4)
    assert expected is not None and found.score.nats.error is not None
    assert expected < found.score.nats.error  # what makes a text hard is hard for both


def test_other_tokens_are_compared_by_bytes(tmp_path: Path, play: Path) -> None:
    """The same model with a tokenizer of bytes: what it reads is nonsense to it, and is compared all the same."""
    other = copied("gpt2", tmp_path / "bytes")
    tokenize([play], tmp_path / "tokens", vocabulary=300)
    shutil.copy(tmp_path / "tokens" / "tokenizer.json", other / "tokenizer.json")
    found = evaluate("sample:gpt2", [play, play], against=other, context=128)
    assert found.against is not None and found.paired is not None
    assert found.paired.unit == "bits a byte"
    assert any("bits per byte" in note for note in found.notes)
    assert found.against.tokens > found.score.tokens
    expected = found.score.bits_per_byte.value - found.against.bits_per_byte.value
    assert found.paired.difference.value == pytest.approx(expected, rel=2e-2)
    assert found.paired.better == 1
    turned = evaluate(other, [play, play], against="sample:gpt2", context=128).paired
    assert turned is not None
    assert turned.difference.value == pytest.approx(-found.paired.difference.value, rel=1e-2)


# --- past the context -------------------------------------------------------------------------------------------------


def mean(bins: list[Bin]) -> float:
    return sum(each.nats.value * each.tokens for each in bins) / sum(each.tokens for each in bins)


@pytest.mark.exhaustive
def test_the_curve_goes_past_the_context_with_and_without_scaling(tmp_path: Path) -> None:
    text = (SAMPLES / "play.txt").read_text()[:8000]
    path = text_file(tmp_path / "t.txt", text)
    found = evaluate("sample:llama", path, past=2, rope="yarn:2")
    plain, scaled = found.extrapolation
    assert (plain.context, scaled.context) == (256, 512)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
    for curve, config in ((plain, {}), (scaled, {"rope_parameters": yarn})):
        lost, _, positions = plainly(SAMPLES / "llama", [text], 512, **config)
        for past in (False, True):
            bins = [each for each in curve.bins if (each.first >= 256) == past]
            assert mean(bins) == pytest.approx(lost[(positions >= 256) == past].mean(), rel=1e-6)
    behind = [mean([each for each in curve.bins if each.first >= 256]) for curve in (plain, scaled)]
    assert behind[1] < behind[0] - 0.5  # which is what scaling is for


@pytest.mark.exhaustive
def test_alibi_goes_past_its_context(tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.txt", (SAMPLES / "play.txt").read_text()[:6000])
    (curve,) = evaluate("sample:bloom", path, context=256, past=4).extrapolation
    within, behind = (mean([each for each in curve.bins if (each.first >= 256) == past]) for past in (False, True))
    assert behind < within + 0.3
    assert curve.bins[-1].last == 1023


def test_a_short_document_ends_the_curve(tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.txt", PLAY[:2000])
    found = evaluate("sample:llama", path, past=64)
    assert any("nothing was measured at larger positions" in note for note in found.notes)


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(kind: type[GptkitError], match: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(kind, match=match) as caught:
        evaluate(*args, **kwargs)
    assert type(caught.value) is kind


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    refused(InvalidInput, "there is no file or folder", "sample:gpt2", tmp_path / "none.txt")
    refused(InvalidInput, "every text has fewer than two tokens", "sample:gpt2", text_file(tmp_path / "empty.txt", ""))
    refused(InvalidInput, "every text has fewer than two tokens", "sample:gpt2", text_file(tmp_path / "one.txt", "a"))
    refused(InvalidInput, "was not written by gptkit tokenize", "sample:gpt2", tmp_path)
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    refused(InvalidInput, "not text in UTF-8", "sample:gpt2", tmp_path / "binary")
    refused(UsageError, "no text to measure on", "sample:gpt2", [])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"context": 0}, "--context must be 1 or more, not 0"),
        ({"context": 257}, "has only 256 rows"),
        ({"past": 2}, "has only 256 rows"),
        ({"past": 0}, "--past must be 1 or more, not 0"),
        ({"stride": 0}, "--stride must be from 1 to .*, not 0"),
        ({"context": 8, "stride": 9}, "--stride must be from 1 to .*, not 9"),
        ({"top_k": (0,)}, "--top-k must be whole numbers of 1 or more, not 0"),
        ({"rope": "yarn:4"}, "--past 4"),
        ({"context": 32, "past": 2, "rope": "spiral:4"}, "spiral"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], match: str, play: Path) -> None:
    refused(UsageError, match, "sample:gpt2", play, **options)


def test_no_rotary_positions_to_scale(play: Path) -> None:
    refused(SwapRefused, "rotary", "sample:gpt2", play, context=32, past=2, rope="yarn:4")


def test_a_vocabulary_that_lacks_the_tokens(tmp_path: Path, play: Path) -> None:
    folder = copied("gpt2", tmp_path / "model")
    tokenize([play], tmp_path / "tokens", vocabulary=600)
    shutil.copy(tmp_path / "tokens" / "tokenizer.json", folder / "tokenizer.json")
    refused(UsageError, "outside the vocabulary of 512", folder, play)


def test_no_tokenizer(tmp_path: Path, play: Path) -> None:
    folder = copied("gpt2", tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    refused(UsageError, "no tokenizer", folder, play)


def test_logits_that_are_nan(tmp_path: Path, play: Path) -> None:
    folder = copied("gpt2", tmp_path / "model")
    edited(folder, lambda weights: [each.fill_(math.nan) for name, each in weights.items() if "ln_f" in name])
    refused(GptkitError, "are NaN", folder, play)
