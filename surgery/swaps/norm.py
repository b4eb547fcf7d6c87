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

import math
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...components import Block, Head, LatentAttention, LayerNorm, MixtureOfExperts, ModelSpec, Norm, RMSNorm
from ...errors import SwapRefused
from ..base import Computed, Model, Moved, Swapped, Tensor, Wide
from ..layerwise import head_weight, readers, tables, weighed, with_blocks, writers, written
from ..options import NORMS, Option
from ..registry import Asked, Clears, Swap
from .basis import (
    CENTRED,
    Compute,
    chosen_norms,
    eps_for,
    every_norm,
    exchanged,
    in_basis,
    known,
    norms,
    stream_norms,
    table_rows,
    with_norms,
)
from .mlp import dense_of, with_dense


def _require_exact(way: str, reason: str | None) -> None:
    """Raise SwapRefused where there is a reason why it cannot be exact."""
    if reason is not None:
        hint = "Use --approximate to replace the norms anyway and to measure the damage."
        raise SwapRefused(f"{way} cannot be exact here: {reason}", hint)


def _asked_for(path: str, layers: tuple[int, ...] | None) -> bool:
    """Whether the norm at a path is one of those of some layers, or all are asked for."""
    return layers is None or (path.startswith("blocks.") and int(path.split(".")[1]) in layers)


def _of_layer_norms(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> dict[str, Any]:
    """What the output's record says of LayerNorms that become RMSNorms. Raises SwapRefused where there are none."""
    found = [path for path, node in spec.nodes() if isinstance(node, LayerNorm)]
    if not found:
        raise SwapRefused("this model has no LayerNorm: all its norms are RMSNorm")
    return {"from": "layernorm", "to": "rmsnorm", "norms": sum(_asked_for(path, layers) for path in found)}


def why_not_exact(spec: ModelSpec) -> str | None:
    """The reason why LayerNorm -> RMSNorm cannot be exact for this tree, or None."""
    _of_layer_norms(spec)
    tables(spec)  # which are centred
    if any(block.residual == "normed" for block in spec.blocks):
        return (
            "the residual is taken from the norm's output (apply_residual_connection_post_layernorm), so the mean that"
            " LayerNorm removes is part of what the model computes"
        )
    kept = [path for path, norm in every_norm(spec) if not norm.centred]
    if kept:
        return f"{kept[0]} is an RMSNorm already, and its output would change if the residual stream lost its mean"
    return None


def _to_rms(norm: Norm) -> Norm:
    """The RMSNorm in a LayerNorm's place; one that is there stays."""
    return RMSNorm(size=norm.size, eps=norm.eps, gain=norm.gain) if norm.centred else norm


def _without_mean(values: Wide, axis: int) -> Wide:
    """Values less their mean along an axis."""
    return np.asarray(values - values.mean(axis=axis, keepdims=True))


def _centred(name: str, axis: int = 0) -> Compute:
    """A writer's weight [out, in] or bias [out], or the rows of a table (axis 1), with the mean taken off."""
    return lambda model: _without_mean(model.wide(name), axis)


def _shifted(weight: str, bias: str | None, beta: str) -> Compute:
    """A reader's bias after β moved into it: bias + W·β."""
    if bias is None:
        return lambda model: model.wide(weight) @ model.wide(beta)
    return lambda model: model.wide(weight) @ model.wide(beta) + model.wide(bias)


def shifts_taken(
    spec: ModelSpec, layers: tuple[int, ...] | None, made: dict[str, Compute], routers: bool = True
) -> tuple[dict[int, Block], Head]:
    """The blocks of some layers, or of all with the head, whose linears have biases that take up those of the norms
    that they read; the tensors go into `made`. Raises SwapRefused where a router would have to, but for `routers`.
    """
    blocks, head = {}, spec.has_head()
    for layer in range(len(spec.blocks)) if layers is None else layers:
        block, path = spec.blocks[layer], f"blocks.{layer}"
        shifting = {name for name, norm in norms(block, path) if has_bias(norm)}
        for each in readers(block, path):
            if each.norm in shifting and each.may_have_bias:
                old = each.bias_name if each.bias else None
                made[each.bias_name] = _shifted(each.weight, old, f"{each.norm}.bias")
            elif each.norm in shifting and routers:
                raise SwapRefused(f"the bias of {each.norm} cannot be moved into {each.path}, which has no bias")
        blocks[layer] = _with_read_biases(block, path, shifting)
    if layers is None and spec.final_norm is not None and has_bias(spec.final_norm):
        made["head.bias"] = _shifted(head_weight(spec), "head.bias" if head.bias else None, "final_norm.bias")
        head = replace(head, bias=True)
    return blocks, head


def _with_read_biases(block: Block, path: str, shifting: set[str]) -> Block:
    """A block with biases for those of some norms: in what reads them, and in what is added to a norm's output."""
    if not shifting:  # of layers without attention too
        return block
    attention, dense, out = block.attention, dense_of(block), block.residual == "normed"
    if f"{path}.attention_norm" in shifting:
        reads = {"qkv_bias": True, **({"kv_bias": False} if isinstance(attention, LatentAttention) else {})}
        attention = replace(attention, **reads, output_bias=attention.output_bias or out)
    if _inner_norm(block, path) in shifting:
        mixture = block.feed_forward
        if isinstance(mixture, MixtureOfExperts) and mixture.shared is not None:  # which reads that norm too
            block = block.replaced(feed_forward=replace(mixture, shared=replace(mixture.shared, up_bias=True)))
        own = out and f"{path}.feed_forward_norm" in shifting
        dense = replace(dense, up_bias=True, down_bias=dense.down_bias or own)
    return with_dense(block.replaced(attention=attention), dense)


def has_bias(norm: Norm) -> bool:
    """Whether a norm has a bias."""
    return "bias" in norm.shapes()


def _inner_norm(block: Block, path: str) -> str:
    """The path of the norm that the feed-forward reads."""
    return f"{path}.attention_norm" if block.feed_forward_norm is None else f"{path}.feed_forward_norm"


# --- LayerNorm -> RMSNorm ---------------------------------------------------------------------------------------------


def layernorm_to_rmsnorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """The exact swap, for all norms or those of some layers."""
    _require_exact("LayerNorm -> RMSNorm", why_not_exact(spec))
    new, tensors = _centred_tree(spec, layers)
    notes = (
        ("the head was untied from the embedding, because only the embedding has its mean removed",)
        if spec.tied
        else ()
    )
    return Swapped(new, "exact", tensors, _of_layer_norms(spec, layers), notes)


def _centred_tree(spec: ModelSpec, layers: tuple[int, ...] | None) -> tuple[ModelSpec, dict[str, Tensor]]:
    """A tree with a stream of mean zero, as far as it is not a norm's output, and RMSNorms for LayerNorms."""
    made: dict[str, Compute] = {}
    blocks, head = shifts_taken(spec, layers, made, routers=False)
    made |= {name: _centred(name, axis) for name, axis in written(spec)}
    for layer, block in enumerate(spec.blocks):
        path = f"blocks.{layer}"
        gone = dict(norms(block, path)) if layer in blocks else {}
        for each in writers(block, path):
            norm = f"{path}.{each.slot}_norm"
            if block.residual == "normed" and norm in gone and has_bias(gone[norm]):  # β is part of the residual too

                def with_beta(
                    model: Model, name: str = each.bias_name, there: bool = each.bias, at: str = norm
                ) -> Wide:
                    return _without_mean(model.wide(f"{at}.bias") + (model.wide(name) if there else 0), 0)

                made[each.bias_name] = with_beta
        blocks[layer] = with_norms(blocks.get(layer, block), path, {name: _to_rms(norm) for name, norm in gone.items()})
    final, table = spec.final_norm, spec.embedding.norm
    if layers is None:
        final = _to_rms(known("final_norm", final)[1])
    if table is not None:
        assert table.centred
        weighed("embedding.norm", table)
        made["embedding.weight"] = lambda model: _without_mean(table_rows(model, table), 1)
    untied: dict[str, Tensor] = {"head.weight": Moved("embedding.weight")} if head.tied else {}
    ends = {"embedding": replace(spec.embedding, norm=None), "final_norm": final, "head": replace(head, tied=False)}
    return with_blocks(spec, blocks, **ends), {name: Computed(make) for name, make in made.items()} | untied


def replace_layernorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """The plain replacement: γ and eps kept, β and the centring dropped. Approximate at best."""
    record, old = _of_layer_norms(spec, layers), chosen_norms(spec, layers)
    if spec.embedding.norm is not None and layers is None:
        old["embedding.norm"] = spec.embedding.norm
    new = exchanged(spec, {path: _to_rms(known(path, each)[1]) for path, each in old.items()})
    return Swapped(new, "approximate", {}, record)


def _steered(model: Model, router: str, beta: str) -> bool:
    """Whether β moves a router's scores otherwise than all alike, which the softmax would not see."""
    shift = _shifted(f"{router}.weight", None, beta)(model)
    return bool(np.ptp(shift) > CENTRED * max(1.0, float(np.abs(shift).max())))


def _off_centre(spec: ModelSpec, asked: Asked) -> str | None:
    """The first router that LayerNorm's β would steer: it has no bias that could take it up."""
    for layer in asked.those(spec, lambda block: isinstance(block.mixer("feed_forward"), MixtureOfExperts)):
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
    reason = why_not_exact(spec)
    if asked.approximate:
        mixture = any(isinstance(block.mixer("feed_forward"), MixtureOfExperts) for block in spec.blocks)
        normed = all(block.residual == "normed" for block in spec.blocks)
        if reason is None or mixture or not normed or asked.layers is not None:
            return replace_layernorm(spec, asked.layers)
        new, tensors = _centred_tree(spec, None)
        notes = ("everything except the mean of the norms' outputs is compensated for",)
        return Swapped(new, "approximate", tensors, _of_layer_norms(spec), notes)
    router = _off_centre(spec, asked) if reason is None else None
    if router is not None:
        raise SwapRefused(
            f"LayerNorm -> RMSNorm cannot be exact here: the norm's bias affects {router}, which has no bias "
            "to take it over",
            "Replace the norms before you make experts, or use --approximate.",
        )
    return layernorm_to_rmsnorm(spec, asked.layers)


# --- RMSNorm -> LayerNorm ---------------------------------------------------------------------------------------------


def why_not_layernorm(spec: ModelSpec) -> str | None:
    """The reason why RMSNorm -> LayerNorm cannot be exact for this tree, or None."""
    if all(norm.centred for _, norm in stream_norms(spec)):
        raise SwapRefused("this model has no RMSNorm on its residual stream: all these norms are LayerNorm")
    if any(block.residual == "normed" for block in spec.blocks):
        return "the residual is taken from the norm's output, and the norm's weight does not commute with the rotation"
    kept = [path for path, norm in (*stream_norms(spec), *every_norm(spec)) if norm.centred]
    if kept:
        return f"{kept[0]} is a LayerNorm already and removes a mean that the other norms keep"
    return None


def _to_layer_norm(norm: Norm) -> Norm:
    """The LayerNorm in an RMSNorm's place; one that is there stays."""
    return norm if norm.centred else LayerNorm(size=norm.size, eps=norm.eps, bias=False, gain=norm.gain)


def _off_the_mean(rows: Wide) -> Wide:
    """Rows [n, d] in the space of the vectors of d + 1 elements whose mean is zero, lengths and angles kept.

    A zero is appended and the Householder reflection applied that takes the last unit vector to (1, …, 1)/√(d + 1):
    what was at right angles to the one is then to the other.
    """
    size = rows.shape[1] + 1
    v = np.full(size, -1 / math.sqrt(size))
    v[-1] += 1
    wide = np.concatenate([rows, np.zeros((len(rows), 1))], axis=1)
    return np.asarray(wide - np.outer(wide @ v, v * (2 / (v @ v))))


def _to_layernorm(spec: ModelSpec, asked: Asked) -> Swapped:
    """RMSNorm -> LayerNorm, as exactly as is asked: one dimension wider and the head untied, unless the stream has no
    mean. The plain replacement keeps γ and eps and drops the mean.
    """
    reason, layers, old = why_not_layernorm(spec), asked.layers, spec.hidden_size
    record = {"from": "rmsnorm", "to": "layernorm", "norms": sum(not n.centred for _, n in stream_norms(spec))}
    normed = any(block.residual == "normed" for block in spec.blocks)
    bare = not normed and spec.embedding.norm is None
    centred = not asked.approximate and bare and asked.weights.ask(_stream_is_centred, False, True)
    if asked.approximate or centred:
        new = exchanged(spec, {path: _to_layer_norm(norm) for path, norm in chosen_norms(spec, layers).items()})
        why = "the residual stream already has zero mean, so only the norms were replaced"
        record |= {"hidden_size": [old, old]}
        return Swapped(new, "exact" if centred else "approximate", {}, record, (why,) if centred else ())
    _require_exact("RMSNorm -> LayerNorm", reason)
    size = old + 1

    def norm_of(path: str, norm: Norm) -> Norm:
        other = replace(norm, eps=eps_for(norm.eps, old, size))
        return _to_layer_norm(other) if _asked_for(path, layers) else other

    new, tensors = in_basis(spec, size, lambda _, rows: _off_the_mean(rows), norm_of)
    notes = [
        f"the hidden size grew from {old} to {size}: the extra dimension makes the mean of the residual stream zero"
    ]
    if spec.tied:
        notes.append("the head was untied from the embedding, because it takes up the last norm's weight")
    return Swapped(new, "exact", tensors, record | {"hidden_size": [old, size]}, tuple(notes))


def _stream_is_centred(model: Model) -> bool:
    """Whether nothing that writes into the stream has a mean."""
    every = ((model.wide(name), axis) for name, axis in written(model.spec))
    return all(bool(np.abs(each.mean(axis=axis)).max() <= CENTRED * np.abs(each).max()) for each, axis in every)


_entry = partial(Swap, option="norm", by_layer=True, each_stack=True)

ORDER = 50
OPTIONS = (
    Option(
        "norm",
        NORMS,
        1,
        "The kind of norm in all layers and after the last layer.",
        "rmsnorm | layernorm",
        words="rmsnorm = rms, root mean square; layernorm = ln, layer",
    ),
)
SWAPS = (
    _entry(
        form="rmsnorm",
        takes="LayerNorm",
        gives="RMSNorm",
        needs="norms before attention and feed-forward (pre-norm), all of them LayerNorms",
        source="SliceGPT 2401.15024; Jiang et al. 2305.14858; TransformerLens",
        reshape=_to_rmsnorm,
        clears=(Clears("*norm", theirs=RMSNorm), Clears("*.norm", theirs=None)),
    ),
    _entry(
        form="layernorm",
        takes="RMSNorm",
        gives="LayerNorm",
        needs="pre-norm, all norms on the residual stream RMSNorms; one more dimension, unless it has no mean already",
        source="an isometry onto the vectors of mean zero; after SliceGPT 2401.15024, section 3",
        reshape=_to_layernorm,
        clears=(Clears("*norm", theirs=LayerNorm),),
    ),
)
