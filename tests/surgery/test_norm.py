"""LayerNorm -> RMSNorm: exact on any pre-norm tree through the written files; a wrong formula is not published."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from helpers.covering import examples, few
from helpers.exactness import caught, exactly, saved
from helpers.families import BLOOM, CONFIGS, FALCON, FALCON_40B, GPT2, save_hf, spec_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import gptkit
from gptkit.components import Head, LayerNorm, ModelSpec, RMSNorm
from gptkit.errors import GptkitError, SwapRefused
from gptkit.modules import Decoder
from gptkit.parity.probe import probe
from gptkit.surgery.base import Model
from gptkit.surgery.guarantee import EXACT_FP32, EXACT_FP64
from gptkit.surgery.swaps import basis
from gptkit.surgery.swaps import norm as module
from gptkit.surgery.swaps.norm import layernorm_to_rmsnorm, replace_layernorm, why_not_exact


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A tiny config of a family with LayerNorms: its variants, biases, tying, eps, sizes."""
    heads = draw(st.sampled_from([1, 2, 3, 4]))
    hidden = heads * draw(st.sampled_from([4, 6, 8]))
    tied = {"tie_word_embeddings": draw(st.booleans()), "vocab_size": draw(st.integers(2, 60))}
    eps = {"layer_norm_epsilon": draw(st.sampled_from([1e-6, 1e-5, 1e-3]))}
    layers = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["gpt2", "bloom", "falcon"]))
    if kind == "gpt2":
        return {
            **GPT2,
            **tied,
            **eps,
            "n_embd": hidden,
            "n_head": heads,
            "n_layer": layers,
            "n_positions": draw(st.integers(1, 40)),
            "n_inner": draw(st.sampled_from([None, 5])),
            "activation_function": draw(st.sampled_from(["gelu_new", "relu", "silu"])),
            "scale_attn_by_inverse_layer_idx": draw(st.booleans()),
        }
    if kind == "bloom":
        return {**BLOOM, **tied, **eps, "hidden_size": hidden, "n_head": heads, "n_layer": layers}
    common = {
        **FALCON,
        **tied,
        **eps,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "bias": draw(st.booleans()),
    }
    if draw(st.booleans()):  # 40b, or 11b with one norm
        groups = draw(st.sampled_from([n for n in (1, 2, 3, 4) if heads % n == 0]))
        norms = draw(st.sampled_from([1, 2]))
        return {**common, **FALCON_40B, **tied, "hidden_size": hidden, "num_attention_heads": heads} | {
            "num_hidden_layers": layers,
            "num_kv_heads": groups,
            "num_ln_in_parallel_attn": norms,
            "bias": draw(st.booleans()),
        }
    return {  # 7b, rw, and between
        **common,
        "multi_query": draw(st.booleans()),
        "parallel_attn": draw(st.booleans()),
        "alibi": draw(st.booleans()),
    }


def logits(model: Decoder, spec: ModelSpec) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [batch.valid(model(batch.input_ids, batch.attention_mask)) for batch in probe(spec)]


def relative(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    gap = max((x.double() - y.double()).abs().max().item() for x, y in zip(a, b, strict=True))
    return gap / max(x.abs().max().item() for x in a)


@settings(max_examples=examples(60), deadline=None)
@given(config=configs(), seed=st.integers(0, 2**31), stored=st.sampled_from([torch.float32, torch.bfloat16]))
def test_exact_for_any_tree_through_the_files(config: dict[str, Any], seed: int, stored: torch.dtype) -> None:
    with TemporaryDirectory() as parent:
        source, out, naive = (Path(parent) / name for name in ("hf", "rms", "naive"))
        save_hf(config, source, stored, seed)
        spec = gptkit.open_checkpoint(source).spec
        # A checkpoint that itself rounds by about the bound in fp32 is refused, see test_swap.
        rounding = relative(*(logits(gptkit.load(source, dtype), spec) for dtype in (torch.float64, torch.float32)))
        assume(4 * rounding < EXACT_FP32)
        result = gptkit.swap(source, out, norm="rmsnorm")
        assert result.guarantee == "exact"
        assert result.measured is not None
        assert result.measured.relative["float64"] <= EXACT_FP64 == 1e-12
        assert result.measured.relative["float32"] <= EXACT_FP32 == 1e-5
        # The same again, from outside: nothing of the measurement inside is trusted.
        swapped = gptkit.open_checkpoint(out).spec
        assert not [path for path, node in swapped.nodes() if isinstance(node, LayerNorm)]
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            before, after = (logits(gptkit.load(folder, dtype), spec) for folder in (source, out))
            assert relative(before, after) <= bound
        gptkit.swap(source, naive, norm="rmsnorm", approximate=True, measured=False)
        before, after = (logits(gptkit.load(folder, torch.float64), spec) for folder in (source, naive))
        assert relative(before, after) > 1e-3


# --- the formulas -----------------------------------------------------------------------------------------------------


class Tensors:
    """A reader of given tensors."""

    def __init__(self, **values: np.ndarray) -> None:
        self.values = {name.replace("__", "."): value for name, value in values.items()}

    def wide(self, name: str) -> np.ndarray:
        return self.values[name]


def test_centring_takes_the_mean_over_outputs() -> None:
    rng = np.random.default_rng(0)
    weight, bias, x = rng.normal(size=(5, 3)), rng.normal(size=5), rng.normal(size=3)
    reader = Tensors(weight=weight, bias=bias)
    centred_weight, centred_bias = module._centred("weight")(reader), module._centred("bias")(reader)
    whole = weight @ x + bias
    np.testing.assert_allclose(centred_weight @ x + centred_bias, whole - whole.mean(), atol=1e-14)


def test_tables_are_centred_row_by_row() -> None:
    table = np.random.default_rng(0).normal(size=(7, 4))
    rows = module._centred("table", 1)(Tensors(table=table))
    np.testing.assert_allclose(rows.mean(axis=1), 0, atol=1e-15)
    np.testing.assert_allclose(rows - table, np.broadcast_to((rows - table)[:, :1], table.shape))


def test_beta_moves_into_the_reader() -> None:
    rng = np.random.default_rng(0)
    weight, bias, beta, x = rng.normal(size=(5, 3)), rng.normal(size=5), rng.normal(size=3), rng.normal(size=3)
    reader = Tensors(weight=weight, bias=bias, beta=beta)
    np.testing.assert_allclose(
        weight @ x + module._shifted("weight", "bias", "beta")(reader), weight @ (x + beta) + bias
    )
    np.testing.assert_allclose(weight @ x + module._shifted("weight", None, "beta")(reader), weight @ (x + beta))


@pytest.mark.parametrize("bias", [True, False])
def test_the_rows_of_a_normed_table(bias: bool) -> None:
    rng = np.random.default_rng(0)
    table, weight, beta = rng.normal(size=(7, 4)), rng.normal(size=4), rng.normal(size=4)
    reader = Tensors(embedding__weight=table, embedding__norm__weight=weight, embedding__norm__bias=beta)
    expected = torch.nn.functional.layer_norm(
        torch.tensor(table), (4,), torch.tensor(weight), torch.tensor(beta) if bias else None, 1e-3
    )
    found = basis.table_rows(reader, LayerNorm(size=4, eps=1e-3, bias=bias))
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-14)


def test_the_tree_that_comes_out() -> None:
    spec = spec_of(CONFIGS["bloom"])
    new = layernorm_to_rmsnorm(spec).spec
    assert new.embedding.norm is None
    assert new.head == Head(vocab_size=97, hidden_size=48, tied=False, bias=True)
    assert all(isinstance(block.attention_norm, RMSNorm) for block in new.blocks)
    assert new.final_norm == RMSNorm(size=48, eps=1e-5)
    falcon = layernorm_to_rmsnorm(spec_of(CONFIGS["falcon-7b"])).spec.blocks[0]
    assert falcon.attention.qkv_bias and falcon.feed_forward.up_bias
    assert not falcon.attention.output_bias and not falcon.feed_forward.down_bias
    assert falcon.feed_forward_norm is None


def test_a_norm_without_bias_adds_none() -> None:
    spec = spec_of(CONFIGS["falcon-7b"])
    bare = with_norm(spec, LayerNorm(size=48, eps=1e-5, bias=False))
    swapped = layernorm_to_rmsnorm(bare)
    assert not [parameter.name for parameter in swapped.spec.parameters() if parameter.name.endswith(".bias")]
    assert not swapped.spec.head.bias


def with_norm(spec: ModelSpec, norm: LayerNorm | RMSNorm, only_final: bool = False) -> ModelSpec:
    replace = module.replace
    blocks = spec.blocks if only_final else tuple(block.replaced(attention_norm=norm) for block in spec.blocks)
    return replace(spec, final_norm=norm, blocks=blocks)


def test_refusals_and_reasons() -> None:
    for name in ("llama", "mistral", "qwen2", "qwen3"):
        for swap in (layernorm_to_rmsnorm, replace_layernorm, why_not_exact):
            with pytest.raises(SwapRefused, match="no LayerNorm"):
                swap(spec_of(CONFIGS[name]))
    post = spec_of(CONFIGS["bloom-post-norm"])
    reason = why_not_exact(post)
    assert reason is not None and "apply_residual_connection_post_layernorm" in reason
    with pytest.raises(SwapRefused, match="cannot be exact here: the residual is taken from the norm's output"):
        layernorm_to_rmsnorm(post)
    assert replace_layernorm(post).guarantee == "approximate"
    mixed = with_norm(spec_of(CONFIGS["gpt2"]), RMSNorm(size=48, eps=1e-5), only_final=True)
    assert "final_norm is an RMSNorm already" in str(why_not_exact(mixed))
    for name in ("gpt2", "bloom", "falcon-7b", "falcon-40b", "falcon-11b", "falcon-rw"):
        assert why_not_exact(spec_of(CONFIGS[name])) is None


# --- a wrong formula does not get through -----------------------------------------------------------------------------

Compute = Callable[[Model], np.ndarray]


def skip_the_fold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        module,
        "_shifted",
        lambda weight, bias, beta: lambda r: r.wide(bias) if bias else 0 * r.wide(weight).mean(axis=1),
    )


def forget_the_old_bias(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_shifted", lambda weight, bias, beta: lambda r: r.wide(weight) @ r.wide(beta))


def uncentred(*endings: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Leave what ends so as it is."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = module._centred

        def other(name: str, axis: int = 0) -> Compute:
            return (lambda reader: reader.wide(name)) if name.endswith(endings) else right(name, axis)

        patch.setattr(module, "_centred", other)

    return apply


def over_inputs(patch: pytest.MonkeyPatch) -> None:
    right = module._centred
    wrong = lambda name: lambda r: r.wide(name) - r.wide(name).mean(axis=-1, keepdims=True)  # noqa: E731
    patch.setattr(module, "_centred", lambda name, axis=0: right(name, 1) if axis else wrong(name))


def another_eps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_to_rms", lambda norm: RMSNorm(size=norm.size, eps=norm.eps * 1.01))


def keep_the_head_tied(patch: pytest.MonkeyPatch) -> None:
    right = module.layernorm_to_rmsnorm

    def tied(spec: ModelSpec, layers: Any = None) -> Any:
        swapped = right(spec, layers)
        head = module.replace(swapped.spec.head, tied=True)
        return dataclasses.replace(
            swapped,
            spec=module.replace(swapped.spec, head=head),
            tensors={name: how for name, how in swapped.tensors.items() if name != "head.weight"},
        )

    patch.setattr(module, "layernorm_to_rmsnorm", tied)


def drop_the_final_fold(patch: pytest.MonkeyPatch) -> None:
    right = module._shifted
    patch.setattr(
        module,
        "_shifted",
        lambda weight, bias, beta: (
            (lambda r: 0 * r.wide(weight).mean(axis=1)) if beta == "final_norm.bias" else right(weight, bias, beta)
        ),
    )


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]] = {
    "the bias fold skipped": (skip_the_fold, ("gpt2", "falcon-7b")),
    "the old bias forgotten": (forget_the_old_bias, ("gpt2", "bloom")),
    "the head's bias forgotten": (drop_the_final_fold, ("gpt2", "falcon-40b")),
    "the position table forgotten": (uncentred("positions.weight"), ("gpt2",)),
    "the embedding forgotten": (uncentred("embedding.weight"), ("gpt2", "falcon-7b")),
    "o_proj's bias forgotten": (uncentred("o_proj.bias"), ("gpt2", "bloom", "falcon-rw")),
    "o_proj's weight forgotten": (uncentred("o_proj.weight"), ("gpt2", "falcon-11b")),
    "down_proj's bias forgotten": (uncentred("down_proj.bias"), ("gpt2", "falcon-40b")),
    "one layer's down_proj forgotten": (uncentred("1.feed_forward.down_proj.weight"), ("gpt2", "bloom")),
    "the mean over inputs": (over_inputs, ("gpt2", "falcon-7b")),
    "eps a hundredth off": (another_eps, ("gpt2", "bloom", "falcon-7b")),
    "the head kept tied": (keep_the_head_tied, ("gpt2", "bloom", "falcon-7b")),
}


@few(1)
@pytest.mark.parametrize("stored", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_formula_is_not_published(
    name: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate, models = MUTATIONS[name]
    mutate(monkeypatch)
    for model in models:
        save_hf(CONFIGS[model], tmp_path / model)
        with pytest.raises(GptkitError, match="the swap is not exact on this checkpoint"):
            gptkit.swap(tmp_path / model, tmp_path / "out", norm="rmsnorm", dtype=stored)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            {model, *(m for m in models if (tmp_path / m).exists())}
        )


# --- the other way, and some layers alone -----------------------------------------------------------------------------

RMS_TREES = ("llama", "llama-yarn", "mixtral", "qwen2", "qwen3-windowed")


@few(1)
@pytest.mark.parametrize("name", RMS_TREES)
def test_rmsnorm_becomes_layernorm_with_one_more_dimension(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path)
    result = exactly(source, tmp_path / "ln", norm="layernorm")
    assert result.spec.hidden_size == 49 and not result.spec.head.tied
    assert all(isinstance(norm, LayerNorm) and not norm.bias for _, norm in module.stream_norms(result.spec))
    naive = gptkit.swap(source, tmp_path / "naive", norm="layernorm", approximate=True)
    assert naive.guarantee == "approximate" and naive.measured is not None and naive.measured.relative["float64"] > 1e-3


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize("name", ["gpt2", "bloom", "falcon-7b", "llama"])
def test_some_layers_alone_and_back(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path)
    there, back = ("layernorm", "rmsnorm") if name == "llama" else ("rmsnorm", "layernorm")
    spec = exactly(source, tmp_path / "some", norm=there, blocks="1").spec
    kinds = [type(block.attention_norm) is type(spec.final_norm) for block in spec.blocks]
    assert kinds == [layer != 1 for layer in range(len(kinds))]
    exactly(source, tmp_path / "all", norm=there)
    width = gptkit.open_checkpoint(tmp_path / "all").spec.hidden_size
    # A stream without a mean needs no other dimension on the way back.
    assert exactly(tmp_path / "all", tmp_path / "back", norm=back).spec.hidden_size == width


@given(rows=st.integers(1, 6), size=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_the_isometry(rows: int, size: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(rows, size))
    y = module._off_the_mean(x)
    np.testing.assert_allclose(y.mean(axis=1), 0, atol=1e-14)
    np.testing.assert_allclose(y @ y.T, x @ x.T, atol=1e-12)


def test_what_is_left_of_post_norm(tmp_path: Path) -> None:
    source = saved("bloom-post-norm", tmp_path)
    result = gptkit.swap(source, tmp_path / "out", norm="rmsnorm", approximate=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_centred_tree", lambda spec, layers: (replace_layernorm(spec).spec, {}))
        naive = gptkit.swap(source, tmp_path / "naive", norm="rmsnorm", approximate=True)
    assert result.guarantee == "approximate" and result.measured is not None and naive.measured is not None
    assert result.measured.kl < naive.measured.kl / 10


def ratio_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(basis, "length_ratio", lambda old, new: 1.0)


def eps_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "eps_for", lambda eps, old, new: eps)


def gamma_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(basis, "_reader", lambda weight, gamma, ratio, into: lambda m: into(m, m.wide(weight)) * ratio)


def not_turned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_off_the_mean", lambda rows: np.pad(rows, ((0, 0), (0, 1))))


def a_table_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = basis._written_in
    wrong = lambda table: lambda m: np.pad(m.wide(table), ((0, 0), (0, 1)))  # noqa: E731
    patch.setattr(basis, "_written_in", lambda name, axis, into: wrong(name) if axis else right(name, axis, into))


def a_bias_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = basis._written_in
    wrong = lambda bias: lambda m: np.pad(m.wide(bias), (0, 1))  # noqa: E731
    patch.setattr(basis, "_written_in", lambda n, axis, into: wrong(n) if n.endswith("bias") else right(n, axis, into))


@few(1)
@pytest.mark.parametrize(
    "mutate", [ratio_forgotten, eps_forgotten, gamma_forgotten, not_turned, a_table_forgotten, a_bias_forgotten]
)
def test_a_wrong_isometry_is_not_published(
    mutate: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved("llama", tmp_path)
    mutate(monkeypatch)
    caught(source, tmp_path / "out", norm="layernorm")


def test_the_way_back_is_refused_with_reasons() -> None:
    with pytest.raises(SwapRefused, match="no RMSNorm on its residual stream"):
        module.why_not_layernorm(spec_of(CONFIGS["gpt2"]))
    mixed = with_norm(spec_of(CONFIGS["gpt2"]), RMSNorm(size=48, eps=1e-5), only_final=True)
    assert "blocks.0.attention_norm is a LayerNorm already" in str(module.why_not_layernorm(mixed))
