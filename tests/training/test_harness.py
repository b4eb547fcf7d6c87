"""lm-evaluation-harness: the same answers as its own class gives for transformers' model of the same files."""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import gptkit
from gptkit.errors import UsageError

SAMPLES = Path(gptkit.__file__).parent / "samples"
PLAY = (SAMPLES / "play.txt").read_text()[:3000]


def asked(*arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    kinds: Any = {"request_type": "loglikelihood", "doc": {}, "idx": 0}
    return [Instance(arguments=each, **kinds) for each in arguments]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def both(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    harness = pytest.importorskip("lm_eval.models.huggingface", reason='pip install "gptkit[lm-eval]"')
    from gptkit.training.harness import HarnessModel

    theirs = harness.HFLM(pretrained=str(SAMPLES / request.param), dtype="float32", device="cpu", batch_size=1)
    return HarnessModel(f"sample:{request.param}"), theirs


def test_continuations_are_as_likely(both: tuple[Any, Any]) -> None:
    pairs = [("ROMEO:", "\nI am"), ("", "The king"), ("What is ", "this"), (PLAY, " and"), ("KING HENRY", ":")]
    pairs += [(PLAY[: word.start()], word[0]) for word in islice(re.finditer(r" \w+", PLAY), 20)]
    ours, theirs = (each.loglikelihood(asked(*pairs), disable_tqdm=True) for each in both)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert any(greedy for _, greedy in ours) and not all(greedy for _, greedy in ours)
    assert [each for each, _ in ours] == pytest.approx([each for each, _ in theirs], rel=1e-5)


def test_texts_are_as_likely(both: tuple[Any, Any]) -> None:
    ours, theirs = (each.loglikelihood_rolling(asked((PLAY,), ("Hark!",)), disable_tqdm=True) for each in both)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_prompts_are_continued_alike(both: tuple[Any, Any]) -> None:
    greedy = {"until": ["\n\n"], "max_gen_toks": 40, "do_sample": False}
    prompts = asked(("ROMEO:", greedy), (PLAY, {**greedy, "until": [","]}), ("The", {**greedy, "until": []}))
    ours, theirs = (each.generate_until(prompts, disable_tqdm=True) for each in both)
    assert ours == theirs


def test_more_than_the_model_takes_is_refused(both: tuple[Any, Any]) -> None:
    with pytest.raises(UsageError, match="300 tokens, but the model's longest sequence \\(max_length\\) is 256"):
        both[0].generate_until(asked(("a", {"max_gen_toks": 300})))
    with pytest.raises(UsageError, match="tokens, but the model's longest sequence \\(max_length\\) is 256"):
        both[0].loglikelihood(asked(("a", PLAY)), disable_tqdm=True)
