"""Fused linears keep up with their parameters whatever is done to them; norms, activations and linears by formula."""

import copy
import io
import math
from collections.abc import Callable
from typing import get_args

import msgspec
import pytest
import torch
import torch.nn.functional as F
from helpers.families import CONFIGS, VOCAB, decoder_from, randomised_reference, spec_of
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import bloom_gelu_forward

from gptkit.architectures import architecture_of
from gptkit.architectures.fields import ACTIVATIONS as CONFIG_NAMES
from gptkit.components import FACTS, LEARNT, Activation, LayerNorm, ModelSpec, RMSNorm, function_of
from gptkit.modules import Decoder
from gptkit.modules.layers import ACTIVATIONS, FusedLinears, LayerNormModule, LinearModule, RMSNormModule, multiply
from gptkit.modules.registry import build_module

ARITHMETICS = ("linear", "conv1d", "matmul_add")
SIZES = (12, 4, 4)
INPUTS = 10


class Projections(nn.Module):
    """q, k and v as the attention module holds them."""

    def __init__(self, arithmetic: str, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (LinearModule(INPUTS, size, bias, arithmetic) for size in SIZES)  # type: ignore[arg-type]
        self.fused = FusedLinears()
        self.eval()  # in training nothing is fused
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.fused((self.q, self.k, self.v), x)

    def apart(self, x: Tensor) -> tuple[Tensor, ...]:
        """The same without fusing, from copies of the parameters."""
        return tuple(
            multiply(
                x, each.weight.detach().clone(), None if each.bias is None else each.bias.detach().clone(), "linear"
            )
            for each in (self.q, self.k, self.v)
        )


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_current(module: Projections, dtype: torch.dtype = torch.float32) -> None:
    """The fused product is that of the parameters as they are now, twice over (the second from the kept matrix)."""
    x = inputs(dtype)
    tolerance = {"rtol": 2e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    with torch.no_grad():
        for _ in range(2):
            outputs = module(x)
            assert [out.shape for out in outputs] == [(2, 3, size) for size in SIZES]
            for ours, expected in zip(outputs, module.apart(x), strict=True):
                assert ours.dtype == dtype
                torch.testing.assert_close(ours, expected, **tolerance)


@pytest.fixture(params=[(a, b) for a in ARITHMETICS for b in (True, False)], ids=lambda p: f"{p[0]}-bias-{p[1]}")
def module(request: pytest.FixtureRequest) -> Projections:
    """Already fused once, so that what follows has something stale to trip over."""
    projections = Projections(*request.param)
    assert_current(projections)
    return projections


def fresh_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(tensor).contiguous() for name, tensor in module.state_dict().items()}


def test_nothing_is_held_twice(module):
    whole = module.fused.weight.untyped_storage()
    assert {each.weight.untyped_storage().data_ptr() for each in (module.q, module.k, module.v)} == {whole.data_ptr()}
    assert whole.nbytes() == sum(SIZES) * INPUTS * 4


def test_the_matrix_is_made_once(module):
    before = module.fused.weight
    assert_current(module)
    assert module.fused.weight is before


def test_fusing_changes_no_parameter(module):
    again = Projections(module.q.arithmetic, module.q.bias is not None)
    for (name, ours), (_, fresh) in zip(module.named_parameters(), again.named_parameters(), strict=True):
        assert isinstance(ours, nn.Parameter)
        assert ours.requires_grad, name
        assert torch.equal(ours, fresh)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_after_another_dtype(module, dtype):
    module.to(dtype)
    assert_current(module, dtype)
    module.to(torch.float32)
    assert_current(module)


def test_after_load_state_dict(module):
    weights = fresh_weights(module)
    module.load_state_dict(weights)
    assert_current(module)
    assert torch.equal(module.k.weight, weights["k.weight"])


def test_after_load_state_dict_with_assign(module):
    weights = fresh_weights(module)
    module.load_state_dict(weights, assign=True)
    assert_current(module)
    assert torch.equal(module.k.weight, weights["k.weight"])


def test_after_one_parameter_was_replaced(module):
    module.v.weight = nn.Parameter(torch.randn_like(module.v.weight))
    assert_current(module)
    module.k.weight.data = torch.randn_like(module.k.weight)
    assert_current(module)
    if module.q.bias is not None:
        module.q.bias = nn.Parameter(torch.randn_like(module.q.bias))
        assert_current(module)


def test_after_changes_in_place(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2).add_(0.5)
    assert_current(module)


def test_after_swapping_two_parameters(module):
    """The same memory in another order."""
    module.k.weight, module.v.weight = module.v.weight, module.k.weight
    assert_current(module)


def test_deepcopies_are_independent(module):
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.q.weight.zero_()
    assert_current(copied)
    assert_current(module)
    assert bool((module.q.weight != 0).any())
    with torch.no_grad():
        module.k.weight.zero_()
    assert_current(module)
    assert_current(copied)
    assert bool((copied.k.weight != 0).any())


def test_saving_and_loading_whole(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        loaded.q.weight.neg_()
    assert_current(loaded)
    assert_current(module)


def test_after_meta_and_to_empty(module):
    """How a checkpoint is loaded: shapes first, memory later."""
    weights = fresh_weights(module)
    module.to("meta").to_empty(device="cpu").load_state_dict(weights)
    assert_current(module)
    assert torch.equal(module.v.weight, weights["v.weight"])


# --- rows in groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("arithmetic", ["linear", "matmul_add"])
def test_rows_in_groups_lie_as_in_the_familys_matrix(arithmetic, bias):
    """Bit for bit its product, which sums in another order than one with the same rows elsewhere; nothing is stale."""
    module = Projections(arithmetic, bias)
    module.fused = FusedLinears(groups=4)
    x = torch.randn(1, 2, INPUTS, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        parts = (module.q, module.k, module.v)
        with torch.no_grad():
            whole = torch.cat([p.weight.unflatten(0, (4, -1)) for p in parts], 1).flatten(0, 1)
            vector = torch.cat([p.bias.unflatten(0, (4, -1)) for p in parts], 1).flatten() if bias else None
            expected = multiply(x, whole, vector, arithmetic).unflatten(-1, (4, -1)).split([3, 1, 1], dim=-1)
            outputs = module(x)
            for ours, theirs, apart in zip(outputs, expected, module.apart(x), strict=True):
                assert torch.equal(ours, theirs)
                assert ours.stride() == theirs.stride()
                torch.testing.assert_close(ours.flatten(-2), apart, rtol=1e-5, atol=1e-5)
            module.k.weight.mul_(2)
    torch.cat([each.flatten(-2) for each in module(x)], dim=-1).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_rows_of_whole_vectors_need_no_groups():
    module = Projections("linear", bias=True)
    module.q, module.k, module.v = (LinearModule(INPUTS, size, True) for size in (64, 32, 32))
    module.fused = FusedLinears(groups=2)
    module.eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
        outputs = module(inputs())
    assert [out.shape for out in outputs] == [(2, 3, 64), (2, 3, 32), (2, 3, 32)]
    assert module.fused.weight is not None
    assert module.q.weight.data_ptr() == module.fused.weight.data_ptr()


@pytest.mark.parametrize(
    ("name", "heads", "head_dim"),
    [
        ("bloom", 9, 17),
        ("bloom", 3, 5),
        ("bloom", 5, 1),
        ("falcon-rw", 9, 18),
        ("falcon-rw", 5, 1),
        ("falcon-rw", 9, 3),
    ],
)
def test_odd_heads_are_transformers_to_the_bit(name, heads, head_dim):
    key = "n_head" if name == "bloom" else "num_attention_heads"
    config = {**CONFIGS[name], "hidden_size": heads * head_dim, key: heads}
    attention = architecture_of(config).reference(spec_of(config))[0]
    reference = randomised_reference(config, torch.float32, attention)
    decoder = decoder_from(reference, config, attention)
    with torch.inference_mode():
        for length in (1, 2, 5, 7, 9, 33):
            ids = torch.arange(length)[None]
            assert torch.equal(decoder(ids), reference(ids).logits), length


# --- gradients -------------------------------------------------------------------------------------------------------


def gradients(module: Projections, outputs: tuple[Tensor, ...], x: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    x.grad = None
    sum((out * torch.arange(out.numel()).view_as(out).cos()).sum() for out in outputs).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    return {"x": x.grad.clone(), **{name: p.grad.clone() for name, p in module.named_parameters()}}


def test_gradients_are_those_of_three_linears(module):
    x = inputs().requires_grad_()
    fused = gradients(module, module(x), x)
    apart = gradients(module, (module.q(x), module.k(x), module.v(x)), x)
    assert fused.keys() == apart.keys()
    for name, gradient in fused.items():
        torch.testing.assert_close(gradient, apart[name], rtol=1e-5, atol=1e-5)


def test_the_next_pass_sees_an_optimiser_step(module):
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    before = [p.detach().clone() for p in module.parameters()]
    for _ in range(2):
        optimiser.zero_grad()
        torch.cat(module(inputs()), dim=-1).square().mean().backward()
        optimiser.step()
        assert_current(module)
    assert all(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_frozen_weights_pass_gradients_on_to_their_input(module):
    module.requires_grad_(False)
    x = inputs().requires_grad_()
    torch.cat(module(x), dim=-1).sum().backward()
    expected = sum(each.weight.sum(0) for each in (module.q, module.k, module.v))
    torch.testing.assert_close(x.grad, expected.expand_as(x), rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [f"{each}.{kind}" for each in "qkv" for kind in ("weight", "bias")])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_one_trainable_parameter_among_frozen_ones_gets_its_gradient(arithmetic, name):
    module = Projections(arithmetic, bias=True)
    assert_current(module)
    module.requires_grad_(False)
    parameter = dict(module.named_parameters())[name]
    parameter.requires_grad_()
    torch.cat(module(inputs()), dim=-1).sum().backward()
    assert parameter.grad is not None
    assert bool((parameter.grad != 0).all())


def test_training_after_inference_mode(module):
    """Generate, then train."""
    module.to(torch.float64)  # nothing fused in this dtype yet
    with torch.inference_mode():
        module(inputs(torch.float64))
    torch.cat(module(inputs(torch.float64)), dim=-1).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    with torch.no_grad():
        module.q.weight.mul_(2)
    assert_current(module, torch.float64)


# --- the whole decoder, fused ----------------------------------------------------------------------------------------

FUSED = ("gpt2", "bloom", "falcon-7b", "falcon-40b", "falcon-rw")


def random_decoder(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    config = CONFIGS[name]
    attention = architecture_of(config).reference(spec_of(config))[0]
    return decoder_from(randomised_reference(config, dtype, attention, seed), config, attention)


def unfused(spec: ModelSpec) -> ModelSpec:
    blocks = tuple(
        block.replaced(attention=msgspec.structs.replace(block.attention, fused=False)) for block in spec.blocks
    )
    return msgspec.structs.replace(spec, blocks=blocks)


@pytest.mark.parametrize("name", FUSED)
def test_fused_and_unfused_decoders_agree_and_so_do_their_gradients(name):
    fused = random_decoder(name)
    assert fused.spec.blocks[0].attention.fused
    apart = Decoder(unfused(fused.spec), fused.blocks[0].attention.kernel).eval()
    apart.load_state_dict(fused.state_dict())
    ids = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(fused(ids), apart(ids), rtol=1e-4, atol=1e-4)
    for decoder in (fused, apart):
        F.cross_entropy(decoder(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for (path, ours), (_, theirs) in zip(fused.named_parameters(), apart.named_parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=lambda m, path=path: f"{path}: {m}"
        )
        if not path.endswith("k_proj.bias"):  # whose gradient is zero without rotation
            assert bool(ours.grad.any()), path


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_decoder_is_exact_after_every_way_of_loading(name):
    """bf16 from fp32, a deepcopy, a second load: the logits of a decoder made anew, to the bit."""
    ids = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    right = random_decoder(name, torch.bfloat16, seed=3)
    used = random_decoder(name, torch.float32, seed=4)
    with torch.no_grad():
        expected = right(ids)
        used(ids)
        used.to(torch.bfloat16)
        used(ids)
        used.load_state_dict(right.state_dict())
        assert torch.equal(used(ids), expected)
        assert torch.equal(copy.deepcopy(used)(ids), expected)
        used.load_state_dict({key: value.clone() for key, value in right.state_dict().items()}, assign=True)
        assert torch.equal(used(ids), expected)
        assert torch.equal(right(ids), expected)


def test_every_tensor_of_a_fused_decoder_can_be_changed_in_place():
    decoder = random_decoder("gpt2")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = decoder(ids)
        for projection in ("q_proj", "v_proj"):
            for suffix in ("weight", "bias"):
                parameter = decoder.get_parameter(f"blocks.1.attention.{projection}.{suffix}")
                parameter.neg_()
                assert not torch.equal(decoder(ids), before), (projection, suffix)
                parameter.neg_()
        assert torch.equal(decoder(ids), before)


def test_another_module_in_a_projections_place_is_used():
    """LoRA adapters, quantised linears, hooks: what others put there."""
    decoder = random_decoder("gpt2")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = decoder(ids)
        decoder.blocks[1].attention.v_proj = nn.Linear(48, 48)
        assert not torch.equal(decoder(ids), before)


def test_hooks_on_a_projection_fire():
    decoder = random_decoder("gpt2")
    seen = []
    decoder.blocks[1].attention.k_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    with torch.no_grad():
        decoder(torch.arange(12)[None])
    assert seen == [(1, 12, 48)]


# --- linears, norms, activations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_every_arithmetic_is_the_same_function(arithmetic, bias):
    linear = LinearModule(7, 5, bias, arithmetic).double()
    assert linear.weight.shape == (5, 7)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_()
        x = torch.randn(2, 3, 7, dtype=torch.float64)
        torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias))


def test_matmul_add_rounds_twice():
    """bf16: 256 + 1 + 1 is 258 in one rounding and 256 in two, since 257 is no bf16 number."""
    x, weight, bias = (torch.tensor(v, dtype=torch.bfloat16) for v in ([[256.0, 1.0]], [[1.0, 1.0]], [1.0]))
    assert multiply(x, weight, bias, "matmul_add").item() == 256
    assert multiply(x, weight, bias, "linear").item() == 258


def test_a_layer_norm_is_torchs():
    norm = build_module(LayerNorm(size=6, eps=0.1))
    assert isinstance(norm, LayerNormModule)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()  # type: ignore[union-attr]
        x = torch.randn(3, 6)
        centred = x - x.mean(-1, keepdim=True)
        expected = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight + norm.bias
        torch.testing.assert_close(norm(x), expected)
    assert build_module(LayerNorm(size=6, eps=0.1, bias=False)).bias is None  # type: ignore[union-attr]


@pytest.mark.parametrize("cast", ["before_weight", "after_weight"])
def test_an_rms_norm_rounds_where_it_says(cast):
    norm = build_module(RMSNorm(size=64, eps=0.1, cast=cast)).bfloat16()
    assert isinstance(norm, RMSNormModule)
    with torch.no_grad():
        norm.weight.normal_(1, 0.3)
        x = torch.randn(50, 64).bfloat16()
        wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 0.1)
        before, after = norm.weight * wide.bfloat16(), (norm.weight.float() * wide).bfloat16()
        assert not torch.equal(before, after)
        assert torch.equal(norm(x), before if cast == "before_weight" else after)
        double = norm.double()(x.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), norm.weight.float() * wide, rtol=1e-5, atol=1e-5)


GRID = torch.cat([torch.linspace(-12, 12, 20_001), torch.randn(1000, generator=torch.Generator().manual_seed(0))])

THEIRS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: ACT2FN[name] for name in ACTIVATIONS if name in ACT2FN},
    "gelu_tanh": ACT2FN["gelu_pytorch_tanh"],
    "gelu_bloom": bloom_gelu_forward,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_transformers_to_the_bit(name, dtype):
    x = GRID.to(dtype)
    assert torch.equal(ACTIVATIONS[name](x), THEIRS[name](x))


def test_every_activation_of_transformers_without_parameters_has_a_name_here():
    without = {name for name in ACT2FN if not list(getattr(ACT2FN[name], "parameters", list)())}
    assert set(CONFIG_NAMES) == without


@pytest.mark.parametrize("theirs", CONFIG_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_name_in_a_config_is_that_function_to_the_bit(theirs, dtype):
    x = GRID.to(dtype)
    assert torch.equal(ACTIVATIONS[CONFIG_NAMES[theirs]](x), ACT2FN[theirs](x))


def test_what_is_said_of_activations_is_so():
    """Which are 0 at 0, and which are one function: to 1e-8, and not to 1e-4."""
    wide, zero = GRID.double(), torch.zeros(1, dtype=torch.float64)
    assert FACTS.keys() == ACTIVATIONS.keys() | LEARNT.keys() == set(get_args(Activation))
    for name, function in ACTIVATIONS.items():
        assert (function(zero).item() == 0) == FACTS[name].zero, name
        for other in ACTIVATIONS:
            apart = (function(wide) - ACTIVATIONS[other](wide)).abs().max().item()
            assert apart < 1e-8 if function_of(name) == function_of(other) else apart > 1e-4, (name, other)


def test_the_four_gelus_are_one_function_to_a_thousandth():
    wide = GRID.double()
    exact = 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
    for name in ("gelu", "gelu_new", "gelu_tanh", "gelu_bloom"):
        assert (ACTIVATIONS[name](wide) - exact).abs().max().item() < 1e-3


def test_trees_that_differ_in_fusing_alone_have_the_same_parameters():
    spec = spec_of(CONFIGS["falcon-40b"])
    assert list(unfused(spec).parameters()) == list(spec.parameters())
