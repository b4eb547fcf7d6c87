"""Every parameter's gradient is that of transformers' model, in fp64, for all families and their variants.

transformers rounds to fp32 in many places whatever the model's dtype, and says so by name; here that name means fp64
for both sides, so that gradients agree to what fp64 rounds.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.covering import covered, few, functions, slow_unless_new
from helpers.families import (
    CONFIGS,
    VARIANTS,
    VOCAB,
    Variant,
    decoder_from,
    randomised_reference,
    shared_weights,
    spec_of,
)
from torch.overrides import TorchFunctionMode

from gptkit.architectures import architecture_of
from gptkit.modules.load import load_random
from gptkit.parity.outputs import outputs_of
from gptkit.parity.sides import default_dtype
from gptkit.testing import Probe, probes

LENGTH = 48
"""Past every window and original context of the variants."""
RELATIVE = 1e-10
NOTHING = 1e-14
"""Of the largest gradient: what is less is rounding of one that is zero, as of a key's bias without rotation."""
FLOAT32 = torch.float32


class _Wide(TorchFunctionMode):
    """Operations that are asked for fp32 compute in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if each is FLOAT32 else each for each in args]
        kwargs = {name: torch.float64 if each is FLOAT32 else each for name, each in (kwargs or {}).items()}
        return func(*args, **kwargs)


@pytest.fixture
def in_fp64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "float32", torch.float64)  # GPT-2 asks whether its scores are of that dtype
    with default_dtype(torch.float64), _Wide():
        yield


CASES = [
    pytest.param(
        *(variant, attention, padding),
        id=f"{variant}-{attention}-{padding or 'whole'}",
        marks=slow_unless_new(variant.name),
    )
    for variant in VARIANTS
    if variant.family != "marian"  # whose sines transformers rounds to fp32 in a model of any dtype
    if variant.name != "rwkv-rescaled"  # of which transformers trains another function than it computes
    for attention in architecture_of(variant.config).reference(spec_of(variant.config))
    for padding in ((), ("left",))
    if not (padding and "padding" in architecture_of(variant.config).wrong_batches)
]


@covered("variant", "attention", "padding", by=lambda variant, *rest: {*functions(spec_of(variant.config)), rest})
@pytest.mark.parametrize(("variant", "attention", "padding"), CASES)
@pytest.mark.usefixtures("in_fp64")
def test_gradients_are_those_of_transformers(variant: Variant, attention: str, padding: tuple[str, ...]) -> None:
    reference = randomised_reference(variant.config, torch.float64, attention)
    reference.set_experts_implementation("eager")  # its grouped product has no fp64
    decoder = decoder_from(reference, variant.config, attention)
    head = reference.get_output_embeddings()
    if head is not None and not decoder.spec.tied:  # T5's class ties every head until files hold another
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    if "state" in inspect.signature(reference.forward).parameters:  # which RWKV's class writes in place
        reference.config.use_cache = False
    *_, probe = probes(LENGTH, 2, padding, VOCAB)
    avoid = reference.get_input_embeddings().padding_idx  # transformers lets a padding token's row learn nothing
    ids = (
        probe.input_ids if avoid is None else torch.where(probe.input_ids == avoid, avoid - 1, probe.input_ids) % VOCAB
    )
    if decoder.spec.layer_inputs is not None:  # a token beyond its rows has the first, which is that of padding
        ids = ids.clamp(max=decoder.spec.layer_inputs.table.vocab_size - 1)
    probe = Probe(probe.name, ids, probe.attention_mask)
    width = 2 * decoder.spec.hidden_size if decoder.spec.head is None else VOCAB
    weights = torch.randn(*ids.shape, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if probe.attention_mask is not None:
        weights *= probe.attention_mask[..., None]
    for model in (reference, decoder):
        (outputs_of(model, probe) * weights).sum().backward()
    found = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    with torch.no_grad():  # a gradient lies in a checkpoint as its parameter does
        for parameter in reference.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for buffer in reference.buffers():  # which nothing flows back to: what the choice of experts is moved by
            buffer.zero_()
    wrong, wanted = {}, shared_weights(reference, variant.config)
    largest = max(each.abs().max().item() for each in wanted.values())
    assert largest > 1
    if decoder.spec.encoder is not None:  # BART's bias of logits is a buffer, which nobody trains there
        wanted.pop("head.bias", None)
        found.pop("head.bias", None)
    for name, theirs in wanted.items():
        ours = torch.zeros_like(theirs) if found[name] is None else found[name]  # of an expert that no token took
        gap, size = (each.abs().max().item() for each in (ours - theirs, theirs))
        if not gap <= RELATIVE * size + NOTHING * largest:
            wrong[name] = (gap, size)
    assert found.keys() == wanted.keys()
    assert wrong == {}


@few(1)
@pytest.mark.parametrize("name", ["gpt2", "llama-3", "gemma2", "bloom"])
def test_a_training_step_is_one_graph(name: str) -> None:
    """torch.compile traces forward without a break, and gradients come through as without it."""
    torch.compiler.reset()
    spec = spec_of(CONFIGS[name])
    model = load_random(spec).train()
    ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    found = []
    for forward in (model, torch.compile(model, backend="eager", fullgraph=True)):
        model.zero_grad()
        forward(ids).square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@few(1)
@pytest.mark.parametrize("name", ["gpt2", "llama-3", "gemma2", "bloom"])
def test_a_pass_without_gradients_is_one_graph(name: str) -> None:
    """Where parameters lie, which joins projections when nothing is compiled, breaks no graph."""
    torch.compiler.reset()
    model = load_random(spec_of(CONFIGS[name])).eval().requires_grad_(False)
    ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids), model(ids))
    torch.testing.assert_close(compiled(ids), model(ids))  # its parameters are views of one matrix by now
