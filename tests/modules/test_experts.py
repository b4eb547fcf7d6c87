"""A mixture of experts: the sum that it is, whatever way it is computed, and what becomes of a tree that has one."""

import msgspec
import pytest
import torch
import torch.nn.functional as F
from helpers.families import VOCAB
from helpers.trees import EXPERTS, GATED, HIDDEN, PLAIN, TREES, filled, random_weights, with_blocks
from torch import Tensor

from gptkit.components import GatedFeedForward, MixtureOfExperts
from gptkit.errors import ConfigError
from gptkit.modules import Cache
from gptkit.modules.feed_forward import MixtureOfExpertsModule
from gptkit.modules.generate import generate
from gptkit.parity.compare import largest_gap

replace = msgspec.structs.replace
mixtures = pytest.mark.parametrize("name", EXPERTS)
trees = pytest.mark.parametrize("name", [name for name in TREES if name.startswith(("experts", "both"))])


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


def relative(a: Tensor, b: Tensor) -> float:
    return largest_gap([a], [b]) / a.abs().max().item()


def random_module(name: str, dtype: torch.dtype = torch.float64) -> MixtureOfExpertsModule:
    module = MixtureOfExpertsModule(EXPERTS[name]).to(dtype).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / (HIDDEN**0.5 if parameter.ndim == 2 else 3))
    return module


def by_formula(module: MixtureOfExpertsModule, x: Tensor) -> Tensor:
    """Token by token, all experts computed."""
    spec, out = module.spec, torch.zeros_like(x)
    for at in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])):
        token = x[at[0], at[1]]
        p = torch.softmax(F.linear(token, module.router.weight), dim=-1)
        best = p.argsort(descending=True)[: spec.top_k].tolist()
        total = sum(p[e] for e in best) if spec.normalise else 1.0
        for e in best:
            expert = module.experts[e]
            up = expert.up_proj(token)
            if isinstance(spec.expert, GatedFeedForward):
                inner = F.silu(expert.gate_proj(token)) * up
            else:
                inner = F.gelu(up)
            out[at[0], at[1]] += p[e] / total * expert.down_proj(inner)
    return out


@mixtures
@pytest.mark.parametrize("shape", [(1, 1), (2, 17)])
def test_it_is_the_weighted_sum_of_the_experts_taken(name, shape):
    module, x = random_module(name), torch.randn(*shape, HIDDEN, dtype=torch.float64)
    with torch.inference_mode():
        assert relative(by_formula(module, x), module(x)) <= 1e-13


@mixtures
def test_gradients_are_those_of_the_formula(name):
    module, x = random_module(name), torch.randn(1, 9, HIDDEN, dtype=torch.float64)
    found = torch.autograd.grad(module(x).square().sum(), list(module.parameters()), allow_unused=True)
    wanted = torch.autograd.grad(by_formula(module, x).square().sum(), list(module.parameters()), allow_unused=True)
    for (path, parameter), a, b in zip(module.named_parameters(), wanted, found, strict=True):
        a, b = (torch.zeros_like(parameter) if each is None else each for each in (a, b))
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10, msg=path)


@mixtures
def test_equal_experts_are_one_where_weights_sum_to_one(name):
    """What makes a dense model a mixture without loss."""
    module, x = random_module(name), torch.randn(2, 11, HIDDEN, dtype=torch.float64)
    spec = replace(EXPERTS[name], normalise=True)
    alike = MixtureOfExpertsModule(spec).double().eval()
    with torch.no_grad():
        alike.load_state_dict(module.state_dict())
        for expert in alike.experts:
            expert.load_state_dict(module.experts[0].state_dict())
        assert relative(module.experts[0](x), alike(x)) <= 1e-13


@mixtures
def test_weights_come_in_fp32_at_least(name):
    """In bf16 a router's softmax would give weights of three digits."""
    module = random_module(name, torch.bfloat16)
    with torch.inference_mode():
        weights, chosen = module.route(torch.randn(5, HIDDEN, dtype=torch.bfloat16))
    assert weights.dtype == torch.float32
    assert chosen.shape == weights.shape == (5, EXPERTS[name].top_k)
    if EXPERTS[name].normalise:
        torch.testing.assert_close(weights.sum(-1), torch.ones(5))


@trees
def test_cached_tokens_give_the_logits_of_a_whole_pass(name):
    decoder, ids, cache, found = filled(TREES[name], random_weights(TREES[name])), tokens(2, 30), Cache(TREES[name]), []
    with torch.inference_mode():
        for start, end in ((0, 7), (7, 8), (8, 19), *((n, n + 1) for n in range(19, 30))):
            found.append(decoder(ids[:, start:end], cache=cache))
        assert relative(decoder(ids), torch.cat(found, dim=1)) <= 1e-12


@pytest.mark.parametrize("side", ["left", "right"])
@trees
def test_padding_changes_nothing(name, side):
    decoder = filled(TREES[name], random_weights(TREES[name]))
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    real = slice(12, None) if side == "left" else slice(None, 18)
    mask[1] = 0
    mask[1, real] = 1
    with torch.inference_mode():
        assert relative(decoder(ids[1:, real]), decoder(ids, mask)[1:, real]) <= 1e-12


@trees
def test_fp32_is_fp64_rounded(name):
    """Nothing but rounding between them: no token of these changes its experts."""
    weights = random_weights(TREES[name])
    with torch.inference_mode():
        wide, narrow = (filled(TREES[name], weights, dtype)(tokens(2, 20)) for dtype in (torch.float64, torch.float32))
    assert relative(wide, narrow.double()) <= 1e-5


@trees
def test_generation_is_greedy_over_whole_passes(name):
    decoder, ids = filled(TREES[name], random_weights(TREES[name])), tokens(1, 5)[0].tolist()
    expected = list(ids)
    with torch.inference_mode():
        for _ in range(12):
            expected.append(int(decoder(torch.tensor([expected]))[0, -1].argmax()))
    assert list(generate(decoder, ids, 12)) == expected[5:]


def test_gate_and_up_in_one_product_are_the_same_function():
    apart = TREES["experts-gated"]
    weights = random_weights(apart)
    with torch.inference_mode():
        a, b = (filled(spec, weights)(tokens(2, 20)) for spec in (apart, TREES["experts-gated-fused"]))
    assert relative(a, b) <= 1e-12
    dense = with_blocks(apart, feed_forward=GATED)
    fused = with_blocks(apart, feed_forward=replace(GATED, fused=True))
    weights = random_weights(dense)
    with torch.inference_mode():
        assert relative(filled(dense, weights)(tokens(2, 20)), filled(fused, weights)(tokens(2, 20))) <= 1e-12


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_k": 6}, "top_k is 6, but there are only 5 experts"),
        ({"expert": replace(PLAIN, hidden_size=24)}, "the experts have hidden_size 24, but the input has size 48"),
    ],
)
def test_a_mixture_that_is_none_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        replace(EXPERTS["gated"], **changes)


def test_a_mixture_knows_how_wide_its_experts_are():
    mixture = MixtureOfExperts(hidden_size=HIDDEN, experts=3, top_k=2, expert=PLAIN)
    assert mixture.intermediate_size == PLAIN.intermediate_size
    assert mixture.shapes() == {"router.weight": (3, HIDDEN)}
