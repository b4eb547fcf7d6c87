"""LayerNorm <-> RMSNorm.

LayerNorm -> RMSNorm, exact for a pre-norm model (SliceGPT 2401.15024, section 3; Jiang et al. 2305.14858;
TransformerLens' centering): if every vector in the residual stream has mean zero, LayerNorm(x) = RMSNorm(x) + β. So

- whatever writes into the stream is centred: W -= mean over outputs, b -= mean(b), the token and position tables too;
- β moves into what reads the norm: R.bias += R·β, for the last norm into a bias of the head;
- γ and eps stay.

The mean of the stream reaches nothing but the norms, so subtracting it changes nothing else. A tied head reads the
same matrix that must be centred on the embedding's side, so it is untied first. Where a norm sits on the embedding
(BLOOM) the table becomes centre(LayerNorm(table)) and the norm goes. Where the norm's *output* is the residual the
mean is not free, and no exact form is known: what is left of it is the mean of γ⊙n, n being the normed vector.

RMSNorm -> LayerNorm, exact with one more dimension: an isometry takes the stream to where its mean is zero (`basis`),
and there the two norms are one function. A stream that is centred already needs no more than the exchange. For the same
reason both ways hold for some layers alone: in a centred stream either kind of norm may stand anywhere.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...components import Block, LatentAttention, LayerNorm, MixtureOfExperts, ModelSpec, Norm, RMSNorm
from ...errors import SwapRefused
from ..base import Computed, Model, Moved, Swapped, Tensor, Wide
from ..basis import CENTRED, Compute, chosen_norms, eps_for, exchanged, in_basis, normed_row, with_norms
from ..layerwise import weighed, with_blocks
from ..options import NORMS, Option
from ..registry import Asked, Clears, Step, Swap
from ..stream import every_norm, head_weight, known, norms, readers, stream_norms, writers, written
from .mlp import dense_of, with_dense


def _require_exact(way: str, reason: str | None) -> None:
    """Raise SwapRefused where there is a reason why it cannot be exact."""
    if reason is not None:
        hint = "--approximate replaces the norms all the same and measures the damage."
        raise SwapRefused(f"{way} cannot be exact here: {reason}", hint)


def in_layers(path: str, layers: tuple[int, ...]) -> bool:
    """Whether a path is in one of these layers."""
    return path.startswith("blocks.") and int(path.split(".")[1]) in layers


def _layer_norms(spec: ModelSpec) -> list[str]:
    """The paths of the LayerNorms in a tree."""
    return [path for path, node in spec.nodes() if isinstance(node, LayerNorm)]


def why_not_exact(spec: ModelSpec) -> str | None:
    """The reason why LayerNorm -> RMSNorm cannot be exact for this tree, or None."""
    if not _layer_norms(spec):
        raise SwapRefused("this model has no LayerNorm: its norms are RMSNorm already")
    if any(block.residual == "normed" for block in spec.blocks):
        return (
            "its residual is taken from the norm's output (apply_residual_connection_post_layernorm), so the mean that"
            " LayerNorm removes is part of what the model computes"
        )
    kept = [path for path, norm in stream_norms(spec) if not norm.centred]
    if kept:
        return f"{kept[0]} is an RMSNorm already and would see the centred stream, of which it sees the mean today"
    return None


def to_rms(norm: Norm) -> Norm:
    """The RMSNorm in a LayerNorm's place; one that is there stays."""
    return RMSNorm(size=norm.size, eps=norm.eps, gain=norm.gain) if norm.centred else norm


def _without_mean(values: Wide, axis: int) -> Wide:
    """Values less their mean along an axis."""
    result: Wide = values - values.mean(axis=axis, keepdims=True)
    return result


def centred(name: str) -> Compute:
    """A writer's weight [out, in] or bias [out], with the mean over its outputs taken off."""
    return lambda model: _without_mean(model.wide(name), 0)


def centred_rows(name: str) -> Compute:
    """A table whose rows go into the stream."""
    return lambda model: _without_mean(model.wide(name), 1)


def normed_rows(table: str, norm: str, eps: float, bias: bool) -> Compute:
    """centre(LayerNorm(row)) for every row of a table."""

    def compute(model: Model) -> Wide:
        rows = normed_row(_without_mean(model.wide(table), 1), eps) * model.wide(f"{norm}.weight")
        return _without_mean(rows + model.wide(f"{norm}.bias") if bias else rows, 1)

    return compute


def shifted(weight: str, bias: str | None, beta: str) -> Compute:
    """A reader's bias after β moved into it: bias + W·β."""
    if bias is None:
        return lambda model: model.wide(weight) @ model.wide(beta)
    return lambda model: model.wide(weight) @ model.wide(beta) + model.wide(bias)


# --- LayerNorm -> RMSNorm ---------------------------------------------------------------------------------------------


def layernorm_to_rmsnorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """The exact swap, for all norms or those of some layers."""
    _require_exact("LayerNorm -> RMSNorm", why_not_exact(spec))
    new, tensors = centred_tree(spec, layers)
    notes = ("the head was untied from the embedding: it needs the table uncentred",) if spec.head.tied else ()
    return Swapped(new, "exact", tensors, summary(spec, layers), notes)


def centred_tree(spec: ModelSpec, layers: tuple[int, ...] | None) -> tuple[ModelSpec, dict[str, Tensor]]:
    """A tree with a stream of mean zero, as far as it is not a norm's output, and RMSNorms for LayerNorms."""
    computed: dict[str, Compute] = {}
    moved: dict[str, Tensor] = {}
    blocks = {
        layer: _block(block, f"blocks.{layer}", layers is None or layer in layers, computed)
        for layer, block in enumerate(spec.blocks)
    }
    head, final, embedding = spec.head, spec.final_norm, spec.embedding
    if layers is None:
        if has_bias(final):
            old = "head.bias" if head.bias else None
            computed["head.bias"] = shifted(head_weight(spec), old, "final_norm.bias")
            head = replace(head, bias=True)
        final = to_rms(known("final_norm", final)[1])
    if head.tied:
        head = replace(head, tied=False)
        moved["head.weight"] = Moved("embedding.weight")
    if embedding.norm is None:
        computed["embedding.weight"] = centred_rows("embedding.weight")
    else:
        norm = embedding.norm
        assert norm.centred
        weighed("embedding.norm", norm)
        computed["embedding.weight"] = normed_rows("embedding.weight", "embedding.norm", norm.eps, has_bias(norm))
        embedding = replace(embedding, norm=None)
    if spec.positions is not None:
        computed["positions.weight"] = centred_rows("positions.weight")
    new = with_blocks(spec, blocks, embedding=embedding, final_norm=final, head=head)
    return new, {name: Computed(make) for name, make in computed.items()} | moved


def _block(block: Block, path: str, chosen: bool, computed: dict[str, Compute]) -> Block:
    """The block with its writers centred and, where chosen, its norms exchanged; tensors go into `computed`."""
    gone = dict(norms(block, path)) if chosen else {}
    shifting = {name for name, norm in gone.items() if has_bias(norm)}
    for each in readers(block, path):
        if each.norm in shifting and each.may_have_bias:
            old = each.bias_name if each.bias else None
            computed[each.bias_name] = shifted(each.weight, old, f"{each.norm}.bias")
    for each in writers(block, path):
        computed |= {name: centred(name) for name in each.names}
        beta = f"{path}.{each.slot}_norm"
        if block.residual == "normed" and beta in shifting:  # β is part of the residual too

            def with_beta(model: Model, name: str = each.bias_name, there: bool = each.bias, beta: str = beta) -> Wide:
                return _without_mean(model.wide(f"{beta}.bias") + (model.wide(name) if there else 0), 0)

            computed[each.bias_name] = with_beta
    new = with_read_biases(block, path, shifting, out=block.residual == "normed")
    return with_norms(new, path, {name: to_rms(norm) for name, norm in gone.items()})


def has_bias(norm: Norm) -> bool:
    """Whether a norm has a bias."""
    return "bias" in norm.shapes()


def _inner_norm(block: Block, path: str) -> str:
    """The path of the norm that the feed-forward reads."""
    return f"{path}.attention_norm" if block.feed_forward_norm is None else f"{path}.feed_forward_norm"


def with_read_biases(block: Block, path: str, shifting: set[str], out: bool = False) -> Block:
    """A block with biases that take up those of some norms: in what reads them, and with `out` in what follows them."""
    attention, dense, own = block.attention, dense_of(block), f"{path}.feed_forward_norm" in shifting
    if f"{path}.attention_norm" in shifting:
        reads = {"qkv_bias": True, **({"kv_bias": False} if isinstance(attention, LatentAttention) else {})}
        attention = replace(attention, **reads, output_bias=attention.output_bias or out)
    if _inner_norm(block, path) in shifting:
        dense = replace(dense, up_bias=True, down_bias=dense.down_bias or (out and own))
    return with_dense(block.replaced(attention=attention), dense)


def replace_layernorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """The plain replacement: γ and eps kept, β and the centring dropped. Approximate at best."""
    why_not_exact(spec)
    old = chosen_norms(spec, layers)
    if spec.embedding.norm is not None and layers is None:
        old["embedding.norm"] = spec.embedding.norm
    new = exchanged(spec, {path: to_rms(known(path, each)[1]) for path, each in old.items()})
    return Swapped(new, "approximate", {}, summary(spec, layers))


def summary(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> dict[str, Any]:
    """What the output's record says of it."""
    inside = [path for path in _layer_norms(spec) if layers is None or in_layers(path, layers)]
    return {"from": "layernorm", "to": "rmsnorm", "norms": len(inside)}


def _steered(model: Model, router: str, beta: str) -> bool:
    """Whether β moves a router's scores otherwise than all alike, which the softmax would not see."""
    shift = shifted(f"{router}.weight", None, beta)(model)
    return bool(np.ptp(shift) > CENTRED * max(1.0, float(np.abs(shift).max())))


def _off_centre(spec: ModelSpec, asked: Asked) -> str | None:
    """The first router that LayerNorm's β would steer: it has no bias that could take it up."""
    for layer in asked.those(spec, lambda block: isinstance(block.feed_forward, MixtureOfExperts)):
        path, block = f"blocks.{layer}", spec.blocks[layer]
        norm, router = _inner_norm(block, path), f"{path}.feed_forward.router"
        if not has_bias(dict(norms(block, path))[norm]):
            continue
        question = partial(_steered, router=router, beta=f"{norm}.bias")
        # What is all alike in scores is seen by everything but a softmax.
        plain = isinstance(block.feed_forward, MixtureOfExperts) and not block.feed_forward.beside
        if asked.weights.ask(question, True, False) or not (plain or asked.weights.zero(f"{norm}.bias")):
            return router
    return None


def _to_rmsnorm(spec: ModelSpec, asked: Asked) -> Swapped:
    """LayerNorm -> RMSNorm, as exactly as is asked."""
    if asked.approximate:
        mixture = any(isinstance(block.feed_forward, MixtureOfExperts) for block in spec.blocks)
        normed = all(block.residual == "normed" for block in spec.blocks)
        if why_not_exact(spec) is None or mixture or not normed or asked.layers is not None:
            return replace_layernorm(spec, asked.layers)
        new, tensors = centred_tree(spec, None)
        notes = ("all but the mean of each norm's own output was taken care of",)
        return Swapped(new, "approximate", tensors, summary(spec), notes)
    router = _off_centre(spec, asked) if why_not_exact(spec) is None else None
    if router is not None:
        raise SwapRefused(
            f"LayerNorm -> RMSNorm cannot be exact here: the bias of the norm steers {router}, which has none",
            "Exchange the norms before the feed-forwards become experts, or --approximate.",
        )
    return layernorm_to_rmsnorm(spec, asked.layers)


# --- RMSNorm -> LayerNorm ---------------------------------------------------------------------------------------------


def why_not_layernorm(spec: ModelSpec) -> str | None:
    """The reason why RMSNorm -> LayerNorm cannot be exact for this tree, or None."""
    if all(norm.centred for _, norm in stream_norms(spec)):
        raise SwapRefused("this model has no RMSNorm on its stream: its norms are LayerNorm already")
    if any(block.residual == "normed" for block in spec.blocks):
        return "its residual is taken from the norm's output, where the norm's weight does not commute with a rotation"
    kept = [path for path, norm in (*stream_norms(spec), *every_norm(spec)) if norm.centred]
    if kept:
        return f"{kept[0]} is a LayerNorm already and removes a mean that the others see"
    return None


def _to_layer_norm(norm: Norm) -> Norm:
    """The LayerNorm in an RMSNorm's place; one that is there stays."""
    return norm if norm.centred else LayerNorm(size=norm.size, eps=norm.eps, bias=False, gain=norm.gain)


def off_the_mean(rows: Wide) -> Wide:
    """Rows [n, d] in the space of the vectors of d + 1 elements whose mean is zero, lengths and angles kept.

    A zero is appended and the Householder reflection applied that takes the last unit vector to (1, …, 1)/√(d + 1):
    what was at right angles to the one is then to the other.
    """
    size = rows.shape[1] + 1
    v = np.full(size, -1 / math.sqrt(size))
    v[-1] += 1
    wide = np.concatenate([rows, np.zeros((len(rows), 1))], axis=1)
    found: Wide = wide - np.outer(wide @ v, v * (2 / (v @ v)))
    return found


def _rmsnorm_to_layernorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """The exact swap, for all norms or those of some layers: one dimension wider, the head untied."""
    _require_exact("RMSNorm -> LayerNorm", why_not_layernorm(spec))
    old, size = spec.hidden_size, spec.hidden_size + 1

    def norm_of(path: str, norm: Norm) -> Norm:
        other = replace(norm, eps=eps_for(norm.eps, old, size))
        return _to_layer_norm(other) if layers is None or in_layers(path, layers) else other

    new, tensors = in_basis(spec, size, lambda _, rows: off_the_mean(rows), norm_of)
    notes = [f"the residual stream is {size} wide instead of {old}: with one more dimension its mean can be zero"]
    if spec.head.tied:
        notes.append("the head was untied from the embedding: it reads behind the last norm's weight")
    return Swapped(new, "exact", tensors, widened(spec, size), tuple(notes))


def _replace_rmsnorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """The plain replacement: γ and eps kept, the mean dropped. Exact where the stream has none."""
    why_not_layernorm(spec)
    new = exchanged(spec, {path: _to_layer_norm(norm) for path, norm in chosen_norms(spec, layers).items()})
    return Swapped(new, "approximate", {}, widened(spec, spec.hidden_size))


def widened(spec: ModelSpec, size: int) -> dict[str, Any]:
    """What the output's record says of it."""
    number = sum(not norm.centred for _, norm in stream_norms(spec))
    return {"from": "rmsnorm", "to": "layernorm", "norms": number, "hidden_size": [spec.hidden_size, size]}


def _stream_is_centred(model: Model) -> bool:
    """Whether nothing that writes into the stream has a mean."""

    def has_none(name: str, axis: int) -> bool:
        values = model.wide(name)
        return bool(np.abs(values.mean(axis=axis)).max() <= CENTRED * np.abs(values).max())

    return model.spec.embedding.norm is None and all(has_none(name, axis) for name, axis in written(model.spec))


def _to_layernorm(spec: ModelSpec, asked: Asked) -> Swapped:
    """RMSNorm -> LayerNorm, as exactly as is asked."""
    if asked.approximate:
        return _replace_rmsnorm(spec, asked.layers)
    normed = why_not_layernorm(spec) is not None and any(block.residual == "normed" for block in spec.blocks)
    if not normed and spec.embedding.norm is None and asked.weights.ask(_stream_is_centred, False, True):
        notes = (
            "nothing that writes into the residual stream has a mean, so the norms were exchanged where they stand",
        )
        return dataclasses.replace(_replace_rmsnorm(spec, asked.layers), guarantee="exact", notes=notes)
    return _rmsnorm_to_layernorm(spec, asked.layers)


def _back_to_rmsnorm(_: ModelSpec, asked: Asked) -> Step | None:
    """The way back from LayerNorms, where all of the stream's norms are: an RMSNorm beside them would have to be shown
    a stream without a mean, which a tree does not tell.
    """
    return None if asked.approximate or asked.layers is not None else Step("norm", "rmsnorm")


entry = partial(Swap, option="norm", by_layer=True)

ORDER = 50
OPTIONS = (
    Option(
        "norm",
        NORMS,
        1,
        "Which norm the layers and both ends have.",
        "rmsnorm | layernorm",
        words="rmsnorm = rms, root mean square; layernorm = ln, layer",
    ),
)
SWAPS = (
    entry(
        form="rmsnorm",
        takes="LayerNorm",
        gives="RMSNorm",
        needs="norms before attention and feed-forward (pre-norm), all of them LayerNorms",
        source="SliceGPT 2401.15024; Jiang et al. 2305.14858; TransformerLens",
        reshape=_to_rmsnorm,
        inverse=lambda before, asked: None if asked.approximate else Step("norm", "layernorm"),
        clears=(Clears("*norm", theirs=RMSNorm), Clears("*.norm", theirs=None)),
    ),
    entry(
        form="layernorm",
        takes="RMSNorm",
        gives="LayerNorm",
        needs="pre-norm, all norms on the residual stream RMSNorms; one more dimension, unless it has no mean already",
        source="an isometry onto the vectors of mean zero; after SliceGPT 2401.15024, section 3",
        reshape=_to_layernorm,
        inverse=_back_to_rmsnorm,
        clears=(Clears("*norm", theirs=LayerNorm),),
    ),
)
