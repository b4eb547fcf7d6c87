"""Replace LayerNorm by RMSNorm, or RMSNorm by LayerNorm.

LayerNorm -> RMSNorm is exact for a pre-norm model (SliceGPT 2401.15024, section 3; Jiang et al. 2305.14858;
TransformerLens' centering). If every vector in the residual stream has mean zero, LayerNorm(x) = RMSNorm(x) + β. So

- everything that writes into the stream is centred: W -= mean over outputs, b -= mean(b), and the same for the rows of
  the token and position embeddings;
- β is folded into the biases of the linears that read the norm, R.bias += R·β, and for the last norm into a bias of the
  head;
- γ and eps are unchanged.

Only the norms depend on the mean of the stream, so subtracting it changes nothing else. A tied head is untied first,
because only the embedding is centred. If a norm follows the embedding (BLOOM), the table becomes
centre(LayerNorm(table)), and the norm is removed. If the residual is the *output* of a norm, the mean matters and no
exact form is known: the mean of γ⊙n remains, with n the normed vector.

RMSNorm -> LayerNorm is exact with one more dimension: an isometry maps the stream to vectors of mean zero (`basis`), on
which the two norms are the same function. If the stream has mean zero already, only the norms are exchanged. Then both
kinds of norm are possible in every layer, so both swaps can also be used for some layers only.
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
    """Raise SwapRefused if there is a `reason` why the swap `way` cannot be exact. The hint is to use --approximate."""
    if reason is not None:
        hint = "Use --approximate to replace the norms anyway and to measure the damage."
        raise SwapRefused(f"{way} cannot be exact here: {reason}", hint)


def _asked_for(path: str, layers: tuple[int, ...] | None) -> bool:
    """Return whether the norm at `path` is in one of these layers. With None, every norm counts."""
    return layers is None or (path.startswith("blocks.") and int(path.split(".")[1]) in layers)


def _of_layer_norms(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Return what the output's manifest says about the swap: the kinds of norm, and the number of replaced norms.

    Raises SwapRefused if the model has no LayerNorm.
    """
    paths = [path for path, node in spec.nodes() if isinstance(node, LayerNorm)]
    if not paths:
        raise SwapRefused("this model has no LayerNorm: all its norms are RMSNorm")
    return {"from": "layernorm", "to": "rmsnorm", "norms": sum(_asked_for(path, layers) for path in paths)}


def why_not_exact(spec: ModelSpec) -> str | None:
    """Return the reason why LayerNorm -> RMSNorm cannot be exact for this model, or None if it can."""
    _of_layer_norms(spec)
    tables(spec)  # raises SwapRefused for tables that cannot be centred
    if any(block.residual == "normed" for block in spec.blocks):
        return (
            "the residual is taken from the norm's output (apply_residual_connection_post_layernorm), so the mean that"
            " LayerNorm removes is part of what the model computes"
        )
    rms_norms = [path for path, norm in every_norm(spec) if not norm.centred]
    if rms_norms:
        return f"{rms_norms[0]} is an RMSNorm already, and its output would change if the residual stream lost its mean"
    return None


def _to_rms(norm: Norm) -> Norm:
    """Return the RMSNorm that replaces a LayerNorm. An RMSNorm is returned unchanged."""
    return RMSNorm(size=norm.size, eps=norm.eps, gain=norm.gain) if norm.centred else norm


def _without_mean(values: Wide, axis: int) -> Wide:
    """Subtract the mean along an axis."""
    return np.asarray(values - values.mean(axis=axis, keepdims=True))


def _centred(name: str, axis: int = 0) -> Compute:
    """Return a function that subtracts the mean of a tensor along `axis`, so that it writes vectors of mean zero.

    The axis is 0 for a weight [out, in] or bias [out], and 1 for an embedding.
    """
    return lambda model: _without_mean(model.wide(name), axis)


def _shifted(weight: str, bias: str | None, beta: str) -> Compute:
    """Return a function that folds the bias β of a norm into the bias of a linear after it: bias + W·β.

    `bias` is the name of the linear's bias, or None if it has none.
    """
    if bias is None:
        return lambda model: model.wide(weight) @ model.wide(beta)
    return lambda model: model.wide(weight) @ model.wide(beta) + model.wide(bias)


def shifts_taken(
    spec: ModelSpec, layers: tuple[int, ...] | None, computed: dict[str, Compute], routers: bool = True
) -> tuple[dict[int, Block], Head]:
    """Fold the biases of norms into the biases of the linears that read these norms. Return the new blocks and head.

    Args:
        spec: The model.
        layers: The layers with the norms. With None, these are all layers, and the last norm is folded into the head.
        computed: The new biases are added to this dictionary.
        routers: Raise SwapRefused if a norm's bias would have to be folded into a router, which cannot have a bias.
    """
    blocks, head = {}, spec.has_head()
    for layer in range(len(spec.blocks)) if layers is None else layers:
        block, path = spec.blocks[layer], f"blocks.{layer}"
        shifting = {name for name, norm in norms(block, path) if has_bias(norm)}
        for reader in readers(block, path):
            if reader.norm in shifting and reader.may_have_bias:
                old = reader.bias_name if reader.bias else None
                computed[reader.bias_name] = _shifted(reader.weight, old, f"{reader.norm}.bias")
            elif reader.norm in shifting and routers:
                raise SwapRefused(f"the bias of {reader.norm} cannot be moved into {reader.path}, which has no bias")
        blocks[layer] = _with_read_biases(block, path, shifting)
    if layers is None and spec.final_norm is not None and has_bias(spec.final_norm):
        computed["head.bias"] = _shifted(head_weight(spec), "head.bias" if head.bias else None, "final_norm.bias")
        head = replace(head, bias=True)
    return blocks, head


def _with_read_biases(block: Block, path: str, shifting: set[str]) -> Block:
    """Return a block in which the linears after some norms have biases, into which the norms' biases can be folded.

    `shifting` are the paths of the norms. If the residual is taken from the output of such a norm, its bias also has to
    be added to the residual. So the projection whose output is added to this residual gets a bias too.
    """
    if not shifting:  # a layer may have no attention
        return block
    attention, dense, out = block.attention, dense_of(block), block.residual == "normed"
    if f"{path}.attention_norm" in shifting:
        reads = {"qkv_bias": True, **({"kv_bias": False} if isinstance(attention, LatentAttention) else {})}
        attention = replace(attention, **reads, output_bias=attention.output_bias or out)
    if _inner_norm(block, path) in shifting:
        mixture = block.feed_forward
        if (
            isinstance(mixture, MixtureOfExperts) and mixture.shared is not None
        ):  # the shared expert reads that norm too
            block = block.replaced(feed_forward=replace(mixture, shared=replace(mixture.shared, up_bias=True)))
        of_residual = out and f"{path}.feed_forward_norm" in shifting
        dense = replace(dense, up_bias=True, down_bias=dense.down_bias or of_residual)
    return with_dense(block.replaced(attention=attention), dense)


def has_bias(norm: Norm) -> bool:
    """Return whether a norm has a bias."""
    return "bias" in norm.shapes()


def _inner_norm(block: Block, path: str) -> str:
    """Return the path of the norm whose output the feed-forward reads. It may be the same one that attention reads."""
    return f"{path}.attention_norm" if block.feed_forward_norm is None else f"{path}.feed_forward_norm"


# --- LayerNorm -> RMSNorm ---------------------------------------------------------------------------------------------


def layernorm_to_rmsnorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """Replace LayerNorms by RMSNorms exactly, in some layers or in the whole model."""
    _require_exact("LayerNorm -> RMSNorm", why_not_exact(spec))
    new, tensors = _centred_tree(spec, layers)
    notes = (
        ("the head was untied from the embedding, because only the embedding has its mean removed",)
        if spec.tied
        else ()
    )
    return Swapped(new, "exact", tensors, _of_layer_norms(spec, layers), notes)


def _centred_tree(spec: ModelSpec, layers: tuple[int, ...] | None) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Replace LayerNorms by RMSNorms, and give the residual stream mean zero. Return the new model and its tensors.

    If the residual is the output of a norm, this output keeps its mean, and the new model is only an approximation.
    """
    computed: dict[str, Compute] = {}
    blocks, head = shifts_taken(spec, layers, computed, routers=False)
    computed |= {name: _centred(name, axis) for name, axis in written(spec)}
    for layer, block in enumerate(spec.blocks):
        path = f"blocks.{layer}"
        old_norms = dict(norms(block, path)) if layer in blocks else {}
        for writer in writers(block, path):
            norm = f"{path}.{writer.slot}_norm"
            if (
                block.residual == "normed" and norm in old_norms and has_bias(old_norms[norm])
            ):  # the residual includes β

                def with_beta(
                    model: Model, name: str = writer.bias_name, there: bool = writer.bias, at: str = norm
                ) -> Wide:
                    return _without_mean(model.wide(f"{at}.bias") + (model.wide(name) if there else 0), 0)

                computed[writer.bias_name] = with_beta
        blocks[layer] = with_norms(
            blocks.get(layer, block), path, {name: _to_rms(norm) for name, norm in old_norms.items()}
        )
    final, table = spec.final_norm, spec.embedding.norm
    if layers is None:
        final = _to_rms(known("final_norm", final)[1])
    if table is not None:
        assert table.centred
        weighed("embedding.norm", table)
        computed["embedding.weight"] = lambda model: _without_mean(table_rows(model, table), 1)
    untied: dict[str, Tensor] = {"head.weight": Moved("embedding.weight")} if head.tied else {}
    ends = {"embedding": replace(spec.embedding, norm=None), "final_norm": final, "head": replace(head, tied=False)}
    return with_blocks(spec, blocks, **ends), {name: Computed(make) for name, make in computed.items()} | untied


def replace_layernorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """Replace LayerNorms by RMSNorms without changing other weights. γ and eps stay, and β is dropped.

    The result is an approximation at best.
    """
    record, old = _of_layer_norms(spec, layers), chosen_norms(spec, layers)
    if spec.embedding.norm is not None and layers is None:
        old["embedding.norm"] = spec.embedding.norm
    new = exchanged(spec, {path: _to_rms(known(path, norm)[1]) for path, norm in old.items()})
    return Swapped(new, "approximate", {}, record)


def _steered(model: Model, router: str, beta: str) -> bool:
    """Return whether the bias β of the norm before a router shifts the scores of the experts unequally.

    Softmax ignores an equal shift.
    """
    shift = _shifted(f"{router}.weight", None, beta)(model)
    return bool(np.ptp(shift) > CENTRED * max(1.0, float(np.abs(shift).max())))


def _off_centre(spec: ModelSpec, asked: Asked) -> str | None:
    """Return the path of the first router whose choice depends on the bias of the LayerNorm before it, or None.

    Such a bias cannot be removed, because it cannot be folded into a router.
    """
    for layer in asked.those(spec, lambda block: isinstance(block.mixer("feed_forward"), MixtureOfExperts)):
        path, block = f"blocks.{layer}", spec.blocks[layer]
        norm, router = _inner_norm(block, path), f"{path}.feed_forward.router"
        if not has_bias(dict(norms(block, path))[norm]):
            continue
        question = partial(_steered, router=router, beta=f"{norm}.bias")
        # Only the softmax of a plain router ignores an equal shift of all scores.
        plain = isinstance(block.feed_forward, MixtureOfExperts) and not block.feed_forward.extras
        if asked.weights.ask(question, True, False) or not (plain or asked.weights.zero(f"{norm}.bias")):
            return router
    return None


def _to_rmsnorm(spec: ModelSpec, asked: Asked) -> Swapped:
    """Replace LayerNorms by RMSNorms exactly, or with --approximate without changing other weights."""
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
            f"LayerNorm -> RMSNorm cannot be exact here: the norm's bias would have to move into {router}, which has "
            "no bias",
            "Replace the norms before --mlp moe makes the experts, or use --approximate.",
        )
    return layernorm_to_rmsnorm(spec, asked.layers)


# --- RMSNorm -> LayerNorm ---------------------------------------------------------------------------------------------


def why_not_layernorm(spec: ModelSpec) -> str | None:
    """Return the reason why RMSNorm -> LayerNorm cannot be exact for this model, or None if it can."""
    if all(norm.centred for _, norm in stream_norms(spec)):
        raise SwapRefused("this model has no RMSNorm on its residual stream: all these norms are LayerNorm")
    if any(block.residual == "normed" for block in spec.blocks):
        return "the residual is taken from the norm's output, and the norm's weight does not commute with the rotation"
    layer_norms = [path for path, norm in (*stream_norms(spec), *every_norm(spec)) if norm.centred]
    if layer_norms:
        return f"{layer_norms[0]} is a LayerNorm already and removes a mean that the other norms keep"
    return None


def _to_layer_norm(norm: Norm) -> Norm:
    """Return the LayerNorm that replaces an RMSNorm. A LayerNorm is returned unchanged."""
    return norm if norm.centred else LayerNorm(size=norm.size, eps=norm.eps, bias=False, gain=norm.gain)


def _off_the_mean(rows: Wide) -> Wide:
    """Map rows [n, d] to vectors of d + 1 elements with mean zero. Lengths and angles are preserved.

    A zero is appended. Then a Householder reflection maps the last unit vector to (1, …, 1)/√(d + 1). The rows with the
    appended zero are orthogonal to the former, so they become orthogonal to the latter: their mean is zero.
    """
    size = rows.shape[1] + 1
    v = np.full(size, -1 / math.sqrt(size))
    v[-1] += 1
    wide = np.concatenate([rows, np.zeros((len(rows), 1))], axis=1)
    return np.asarray(wide - np.outer(wide @ v, v * (2 / (v @ v))))


def _to_layernorm(spec: ModelSpec, asked: Asked) -> Swapped:
    """Replace RMSNorms by LayerNorms exactly, or with --approximate without changing other weights.

    If the residual stream has mean zero already, only the norms are replaced. Otherwise, the exact swap increases the
    hidden size by 1, and unties a tied head.
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
    """Return whether all vectors in the residual stream have mean zero, because all tensors that write into it have."""
    tensors = ((model.wide(name), axis) for name, axis in written(model.spec))
    return all(bool(np.abs(values.mean(axis=axis)).max() <= CENTRED * np.abs(values).max()) for values, axis in tensors)


_entry = partial(Swap, option="norm", by_layer=True, each_stack=True)

ORDER = 50
OPTIONS = (
    Option(
        "norm",
        NORMS,
        1,
        "The new kind of norm, in all layers and after the last layer.",
        "rmsnorm | layernorm",
        words="rmsnorm = rms, root mean square; layernorm = ln, layer",
    ),
)
SWAPS = (
    _entry(
        form="rmsnorm",
        takes="LayerNorm",
        gives="RMSNorm",
        needs="Needs norms before attention and feed-forward (pre-norm), all of them LayerNorm",
        source="SliceGPT 2401.15024; Jiang et al. 2305.14858; TransformerLens",
        reshape=_to_rmsnorm,
        clears=(Clears("*norm", theirs=RMSNorm), Clears("*.norm", theirs=None)),
    ),
    _entry(
        form="layernorm",
        takes="RMSNorm",
        gives="LayerNorm",
        needs="Needs pre-norm blocks, with RMSNorm everywhere on the residual stream. The hidden size grows by 1,"
        " unless the residual stream already has mean zero",
        source="after SliceGPT 2401.15024, section 3: a linear map of the stream to vectors with mean zero",
        reshape=_to_layernorm,
        clears=(Clears("*norm", theirs=LayerNorm),),
    ),
)
