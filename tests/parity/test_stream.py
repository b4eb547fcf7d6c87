"""A layer at a time gives the same bits as all at once, in the memory of a layer."""

import warnings
from importlib import import_module

import pytest
import torch
from helpers import covering
from helpers.covering import exhaustive, few, rest_slow
from helpers.families import CONFIGS, VARIANTS, save_hf

from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.errors import GptkitError
from gptkit.modules.load import load_checkpoint
from gptkit.parity.probe import ProbeBatch, probe
from gptkit.parity.sides import StreamedModel, sides, stream_candidate, stream_reference, units_of
from gptkit.parity.verify import verify

QUICK = [variant for variant in VARIANTS if variant.name != "mistral-default-window"]


@few(4)
@pytest.mark.parametrize("variant", rest_slow(QUICK))
def test_streamed_logits_are_those_in_memory(variant, tmp_path):
    save_hf(variant.config, tmp_path / "hf", torch.bfloat16)
    checkpoint = open_checkpoint(tmp_path / "hf")
    path = checkpoint.architecture.reference(checkpoint.spec)[0]  # type: ignore[union-attr]
    batches = probe(checkpoint.spec)
    found = []
    for stream in (False, True):
        with sides(checkpoint, checkpoint, stream) as both:
            found.append(both.reference(batches, torch.float32, path) + both.candidate(batches, torch.float32, path))  # type: ignore[arg-type]
    for whole, streamed in zip(*found, strict=True):
        assert torch.equal(whole, streamed)


def test_a_head_that_has_another_name_in_files_than_in_transformers(tmp_path):
    save_hf(CONFIGS["gpt_neox"], tmp_path / "hf")
    assert verify(tmp_path / "hf", stream=True, mutations=False).verdict == "identical"


@exhaustive
def test_verdicts_are_the_same(tmp_path):
    convert("sample:gpt2", tmp_path / "local")
    cases = ((None, "identical"), (tmp_path / "local", "identical"), ("sample:falcon", "different"))
    for other, verdict in cases[1:] if covering.quick else cases:
        result = verify("sample:gpt2", other, stream=True)
        assert result.verdict == verify("sample:gpt2", other, mutations=False).verdict == verdict
        assert any("the mistakes were made on purpose in a small copy" in note for note in result.notes)
        assert result.score is not None
        assert result.score.small_copy
        assert result.score.missed == ()
        assert result.score.tried >= 10


@few(2)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "falcon"])
def test_one_unit_is_present_at_a_time(name):
    checkpoint = open_checkpoint(f"sample:{name}")
    batches = probe(checkpoint.spec)
    for stream in (
        stream_reference(checkpoint, torch.float32, "eager"),
        stream_candidate(checkpoint, torch.float32, "eager"),
    ):
        units = [unit for unit, _ in units_of(stream.model)]
        sizes = [sum(p.nbytes for p in unit.parameters()) for unit in units]
        present: set[int] = set()

        def look(*_, model=stream.model, present=present):
            present.add(sum(p.nbytes for p in model.parameters() if not p.is_meta))

        for unit in units:
            unit.register_forward_hook(look)
        stream.run(batches)
        assert present == set(sizes)
        assert all(parameter.is_meta for parameter in stream.model.parameters())


def test_a_failure_in_one_pass_ends_all():
    checkpoint = open_checkpoint("sample:gpt2")
    stream = stream_candidate(checkpoint, torch.float32, "sdpa")
    wrong = ProbeBatch("beyond the vocabulary", torch.tensor([[5000]]))
    with pytest.raises(IndexError):
        stream.run([*probe(checkpoint.spec), wrong])


def test_a_missing_tensor_is_no_deadlock(monkeypatch):
    checkpoint = open_checkpoint("sample:gpt2")
    stream = stream_candidate(checkpoint, torch.float32, "sdpa")

    def broken(name):
        raise OSError(f"{name} went away")

    monkeypatch.setattr(stream, "read", broken)
    with pytest.raises(OSError, match="went away"):
        stream.run(probe(checkpoint.spec))


def test_streaming_can_be_repeated():
    checkpoint = open_checkpoint("sample:llama")
    stream = stream_candidate(checkpoint, torch.float32, "sdpa")
    batches = probe(checkpoint.spec)[:3]
    model = load_checkpoint(checkpoint, torch.float32)
    with torch.inference_mode():
        expected = [batch.valid(model(batch.input_ids, batch.attention_mask)) for batch in batches]
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(stream.run(batches), expected, strict=True))


class Reader(torch.nn.Module):
    """A model that computes with a weight of a module that it never calls."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.spare = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
        self.how = how

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        x = self.embed(input_ids)
        if self.how == "product":  # which torch computes, from whatever lies in memory
            return x @ self.spare.weight.T
        if self.how == "sum":  # which torch refuses
            return x + self.spare.weight[0]
        return self.spare(x).to(self.spare.weight.dtype) * self.spare.weight.shape[1]


@pytest.mark.parametrize("how", ["product", "sum", "dtype and shape alone"])
def test_a_weight_that_is_used_without_its_module_is_refused_by_name(how):
    values = {"embed.weight": torch.ones(8, 4), "spare.weight": torch.ones(8, 4)}
    stream = StreamedModel(Reader(how), values.__getitem__)
    batches = [ProbeBatch("some", torch.tensor([[1, 2]]))]
    if how == "dtype and shape alone":
        assert stream.run(batches)[0].tolist() == torch.full((2, 8), 16.0).tolist()
        return
    with pytest.raises(GptkitError, match=r"uses the weights of spare\.weight without calling"):
        stream.run(batches)


@pytest.mark.parametrize("stream", [False, True])
def test_progress_bars_forbidden_by_the_environment_are_no_warning(stream, monkeypatch):
    """huggingface_hub warns where somebody turns on what HF_HUB_DISABLE_PROGRESS_BARS turns off."""
    monkeypatch.setattr(import_module("huggingface_hub.utils.tqdm"), "HF_HUB_DISABLE_PROGRESS_BARS", True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        verify("sample:llama", stream=stream, mutations=False)
    assert [str(each.message) for each in told if "progress bars" in str(each.message)] == []
