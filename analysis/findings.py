"""Remarks for `recommend`: sentences that compare the usual advice on components with their counted costs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..architectures import expressed
from ..components import ModelSpec
from ..display import Record
from .costs import Costs, costs
from .design import Baseline, Design, build
from .papers import PAPERS

_NOTHING = 0.02  # a relative difference up to this is too small to decide a choice
_MORE = 0.05  # the same, for models whose sizes differ a little
_SEQUENCES = 16  # the batch for the bytes that a decoding step reads
_ITEMSIZE = 2  # bf16


@dataclass(frozen=True)
class Remark(Record):
    """A sentence about costs, and its figures."""

    JSON = "about words figures against_advice=against"

    about: str  # the component, such as "norm"
    words: str  # the sentence
    figures: dict[str, float]  # the figures in the sentence, by name
    against: bool = False  # whether the sentence contradicts the usual advice


def findings(goal: str, design: Design, spec: ModelSpec, base: Baseline) -> tuple[Remark, ...]:
    """Return remarks on the components of a design, and on the whole design.

    The costs of a component are measured by exchanging it alone in the baseline.

    Args:
        goal: the goal of the design, such as "speed".
        design: the recommended design.
        spec: the model of this design.
        base: the baseline, GPT-2 with about as many parameters.
    """
    usual, shape = base.costs(), base.shape
    remarks: list[Remark] = []
    if design.positions != "learned":
        remarks.append(_positions(goal, design, base.costs(positions=design.positions), usual))
    remarks.append(_norm(goal, design, base.costs(norm="rmsnorm"), usual))
    gated = "swiglu" if design.feed_forward == "gelu" else design.feed_forward
    remarks.append(_gated(goal, design, base.costs(feed_forward=gated), usual))
    if design.attention in ("gqa", "mqa") and shape.heads > 1:
        kind = "mqa" if shape.kv_heads == 1 else design.attention  # if there are few heads, one group has all of them
        remarks.append(_shared_heads(kind, base.costs(attention=design.attention), usual))
    if goal == "memory":
        kinds = ("mqa", "mla") if shape.kv_heads == 1 else ("mqa", "gqa", "mla")
        rivals = {kind: base.costs(positions="rope", attention=kind) for kind in kinds}
        family, _ = expressed(build(replace(design, attention="mla"), shape, base.vocab, base.context))
        remarks.append(_least(design.attention, rivals, family))
    if design.block == "parallel":
        share = 1 - base.costs(block="parallel").parameters / usual.parameters
        words = (
            f"A parallel block saves a norm, {_share(share)} of the parameters, and no FLOPs. Its gain is speed:"
            " products can be fused, and devices synchronise once per layer."
        )
        remarks.append(Remark("block", words, {"parameters": share}))
    if design.window is not None:
        other = base.costs(window=design.window)
        cache, flops = other.cached_at_context / usual.cached_at_context, 1 - other.total_flops / usual.total_flops
        words = (
            f"A window of {design.window:,} keeps {_share(cache)} of the cache and saves {_share(flops)} of the FLOPs."
        )
        remarks.append(Remark("window", words, {"cache": cache, "flops": flops}))
    return (*remarks, *_whole(costs(spec, spec.context_length or 1), usual, spec.context_length or 1))


def _positions(goal: str, design: Design, other: Costs, usual: Costs) -> Remark:
    share, against = 1 - other.parameters / usual.parameters, goal == "speed"
    name, rival = ("ALiBi", "RoPE") if design.positions == "alibi" else ("RoPE", "ALiBi")
    saved = f"the table of positions, {_share(share)} of the parameters, and neither FLOPs nor cache"
    words = f"{name} saves {saved}. {rival} saves as much: costs do not decide between them."
    if against:
        words = f"The usual advice is {name}; the costs say that {rival} does as well: each saves {saved}."
    return Remark("positions", words, {"parameters": share}, against)


def _norm(goal: str, design: Design, other: Costs, usual: Costs) -> Remark:
    share, against = 1 - other.parameters / usual.parameters, goal == "speed" and design.norm == "layernorm"
    saved = f"saves {_share(share)} of the parameters and no FLOPs that are counted"
    words = f"RMSNorm in place of LayerNorm {saved}."
    if against:
        words = (
            f"The usual advice is LayerNorm; the costs say otherwise: RMSNorm in its place {saved}, and took 7 to"
            f" 64% less time ({PAPERS['rmsnorm']})."
        )
    elif design.norm == "rmsnorm":
        words += f" It saves time: 7 to 64% in its paper ({PAPERS['rmsnorm'].arxiv})."
    return Remark("norm", words, {"parameters": share}, against)


def _gated(goal: str, design: Design, with_gate: Costs, usual: Costs) -> Remark:
    share = with_gate.parameters / usual.parameters - 1
    flops = with_gate.total_flops / usual.total_flops - 1
    changes = f"changes parameters by {_signed(share)} and FLOPs by {_signed(flops)}"
    same, plain = abs(share) <= _NOTHING and abs(flops) <= _NOTHING, design.feed_forward == "gelu"
    against = plain and same and goal in ("speed", "balance")
    if not plain:
        name = "SwiGLU" if design.feed_forward == "swiglu" else "GEGLU"
        end = "its gain costs nothing" if same else "rounding up its width is not free at this size"
        words = f"{name}, 8/3 as wide as the residual stream, {changes}: {end}."
    elif against:
        words = (
            "The usual advice is GELU without a gate; the costs say that it is simpler, not cheaper: SwiGLU, 8/3 as"
            f" wide as the residual stream, {changes} if it is used instead."
        )
    else:
        end = "the plain one is simpler, not cheaper" if same else "the plain one is cheaper at this size"
        words = f"SwiGLU, 8/3 as wide as the residual stream, {changes} if it is used instead: {end}."
    return Remark("feed-forward", words, {"parameters": share, "flops": flops}, against)


def _shared_heads(kind: str, shared: Costs, usual: Costs) -> Remark:
    cache = shared.cached_at_context / usual.cached_at_context
    flops, parameters = 1 - shared.total_flops / usual.total_flops, 1 - shared.parameters / usual.parameters
    words = (
        f"{kind.upper()} keeps {_share(cache)} of the cache. It saves {_share(flops)} of the FLOPs and"
        f" {_share(parameters)} of the parameters, all in the k and v projections. The number of scores is unchanged,"
        " and at the same model size the savings are spent on layers."
    )
    return Remark("attention", words, {"cache": cache, "flops": flops, "parameters": parameters})


def _least(kind: str, rivals: Mapping[str, Costs], family: str | None) -> Remark:
    """Return the remark on which kind of attention has the smallest cache per token.

    Args:
        kind: the attention of the recommended design.
        rivals: the costs of the baseline with every kind of attention.
        family: the transformers family that has the design with MLA, or None.
    """
    times = {name: rival.cached / rivals[kind].cached for name, rival in rivals.items()}
    others = " and ".join(f"{name.upper()} {times[name]:.2f} times as much" for name in times if name != kind)
    where = "no transformers family that gptkit supports has it" if family is None else f"{family} has it"
    nearer = f"; GQA is nearer to MHA ({PAPERS['gqa'].arxiv})" if "gqa" in rivals else ""
    words = (
        f"{kind.upper()} caches the least per token, {others}. MLA is the better model in its paper"
        f" ({PAPERS['mla'].arxiv}), and {where}{nearer}."
    )
    return Remark("cache", words, {f"times_{name}": value for name, value in times.items()})


def _whole(costs: Costs, usual: Costs, context: int) -> Iterator[Remark]:
    scores, before = costs.flops.get("scores", 0), usual.flops.get("scores", 0)
    weights = (costs.total_flops - scores) / (usual.total_flops - before) - 1
    share = scores / costs.total_flops
    why = "more weights are multiplied instead of looked up"
    why = "a token uses each weight once" if abs(weights) <= _MORE else why
    words = (
        f"Products with weights take {_signed(weights)} FLOPs per token compared with GPT-2's design: {why}."
        f" Scores are {_share(share)} of all FLOPs at {context:,} tokens; only a window limits them."
    )
    yield Remark("FLOPs", words, {"weights": weights, "scores": share})
    read, cache, usual_cache = (
        _ITEMSIZE * costs.active,
        *(_SEQUENCES * c.cache_bytes_at_context(_ITEMSIZE) for c in (costs, usual)),
    )
    times = (_ITEMSIZE * usual.active + usual_cache) / (read + cache)
    against = "as much as GPT-2's design"
    if not 0.95 < times < 1.05:
        ratio = f"{times:.1f} times less than" if times > 1 else f"{1 / times:.1f} times as much as"
        against = f"{ratio} GPT-2's design, whose cache is {_giga(usual_cache)}"
    words = (
        f"Memory bandwidth limits decoding. A step of {_SEQUENCES} sequences with {context:,} tokens each reads"
        f" {_giga(read)} of weights and {_giga(cache)} of cache, in bf16: {against}."
    )
    yield Remark("reading", words, {"weight_bytes": read, "cache_bytes": cache, "baseline_cache_bytes": usual_cache})


def _share(part: float) -> str:
    """Return a share from 0 to 1 in per cent, as text. A share that is not 0 is never shown as 0."""
    value = 100 * part
    if 0 < abs(value) < 0.01:
        return "less than 0.01%"
    return f"{value:.2g}%" if abs(value) < 10 else f"{value:.0f}%"


def _signed(part: float) -> str:
    value = 100 * part
    return f"{value:+.1f}%" if abs(value) >= 0.05 else "0.0%"


def _giga(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
