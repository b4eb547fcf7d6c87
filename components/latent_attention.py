"""Multi-head latent attention."""

from typing import Annotated, Any, ClassVar, Self

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from .attention import few_biased, plain_scale, scale_words, shared_words
from .base import Arithmetic, Component, Mixer, Scale, Size, Weight, bias, divided
from .norms import Norm, inside
from .operations import AnyOperation, CacheOperation, Concat, Program, Rotate, Sizes, attend, linear, out_of
from .positions import ALL_OF_IT, ALiBi, Position, Rotary, Turning
from .words import Words

__all__ = ["LatentAttention"]


class LatentAttention(Mixer, Component, frozen=True):
    """Multi-head latent attention (DeepSeek-V2 2405.04434, section 2.1; TransMLA 2502.07864).

    Keys and values are computed from a latent c = kv_down(x): keys are k_up(c) and values are v_up(c). RoPE has
    `rope_heads` separate keys k_rope(x) of width `position.dim`, which all heads share. A query head has nope_dim
    elements, and then one rotated part per rotary key r:

        score = (q_nope · k_nope + Σ_r q_rope[r] · k_rope[r]) · scale

    This equals grouped-query attention if `rope_heads` is the number of key-value heads, and the rotated query parts
    are zero except for the head's own key. The KV cache contains c and the rotated k_rope.

    k_up has no bias, because it would add the same number to all scores of a query. v_up has none, because it would
    equal a bias of the output.
    """

    label = "attention"
    slot = "attention"
    axes = ("query_dim", "rope_dim")
    rounds = ("arithmetic", "fused", "gathered")
    described = (
        *("nope_dim", "value_dim", "scale", "position", "window", "q_norm", "kv_norm"),
        *("qkv_bias", "kv_bias", "output_bias"),
    )
    by_length: ClassVar[dict[str, Any]] = {"window": None}
    forgotten: ClassVar[dict[str, str]] = {
        "rope_heads": "rotary keys of latent attention left out",
        "position": "no positions in attention",
        "window": "window ignored",
        "q_rank": "latent of queries left out",
        "q_norm": "latent of queries not normed",
        "kv_norm": "latent not normed",
        "qkv_bias": "QKV bias dropped",
        "kv_bias": "bias of latent and rotary keys dropped",
        "output_bias": "output bias of attention dropped",
    }

    hidden_size: Size
    """The width of the residual stream."""
    heads: Size
    """The number of query heads."""
    kv_rank: Size
    """The width of the latent c."""
    nope_dim: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    """The number of elements of a key, per head, that are computed from c and not rotated."""
    value_dim: Size
    """The number of elements of a value, per head."""
    scale: Scale
    """The factor by which scores are multiplied."""
    rope_heads: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """The number of rotary keys. It is above 0 with RoPE, and 0 without."""
    position: Position | None = None
    """The position encoding inside attention, such as RoPE or ALiBi."""
    window: Size | None = None
    """With w, position t attends to t-w+1 … t."""
    q_rank: Size | None = None
    """The width of the queries' latent: queries are q_up(q_down(x)). None means that they are q(x)."""
    q_norm: Norm | None = None
    """The norm of the queries' latent."""
    kv_norm: Norm | None = None
    """The norm of the latent c."""
    qkv_bias: bool = False
    """Whether all projections that read the stream have a bias: q or its latent, c, and k_rope."""
    kv_bias: bool = False
    """Whether the projections to c and k_rope have a bias, and that of the queries has none."""
    output_bias: bool = False
    """Whether the output projection has a bias."""
    arithmetic: Arithmetic = "linear"
    """How the projections multiply and add their bias. It changes only the rounding, like the fields below."""
    fused: bool = False
    """Whether c and k_rope are computed in one matrix product, and all keys (k_up) and values (v_up) in another. In the
    rows of the second one, every head has its key and then its value."""
    gathered: bool = False
    """Whether the rotation of adjacent pairs also reorders elements: the first elements of all pairs come before the
    second ones (DeepSeek-V3). Scores then sum the elements in another order."""

    def __post_init__(self) -> None:
        if isinstance(self.position, Turning) != (self.rope_heads > 0):
            raise ConfigError(
                f"latent attention has rope_heads: {self.rope_heads}, but its position encoding is "
                f"{type(self.position).__name__}: rope_heads must be above 0 with RoPE, and 0 without"
            )
        if not self.query_dim:
            raise ConfigError(
                "the queries of latent attention have dimension 0: set nope_dim above 0, or add RoPE with "
                "rope_heads above 0"
            )
        for norm, rank in ((self.kv_norm, self.kv_rank), (self.q_norm, self.q_rank)):
            if norm is not None and norm.size != rank:
                raise ConfigError(f"the norm of a latent has size {norm.size}, but the latent has dimension {rank}")
        if self.qkv_bias and self.kv_bias:
            raise ConfigError("kv_bias and qkv_bias cannot both be true: qkv_bias already includes the bias")

    @property
    def rope_dim(self) -> int:
        """The number of rotated elements of a query head, which is rope_heads · position.dim."""
        return self.rope_heads * self.position.dim if isinstance(self.position, Turning) else 0

    @property
    def query_dim(self) -> int:
        """The number of elements of a query head: nope_dim and then rope_dim."""
        return self.nope_dim + self.rope_dim

    @property
    def queries(self) -> str:
        """The name of the linear layer whose outputs are the query heads: q_up_proj, or q_proj without `q_rank`."""
        return "q_proj" if self.q_rank is None else "q_up_proj"

    def weights(self) -> dict[str, Weight]:
        q, hidden = self.heads * self.query_dim, self.hidden_size
        if self.q_rank is None:
            weights, reading = {"q_proj.weight": Weight((q, hidden), "reads")}, {"q_proj": q}
        else:
            weights = {
                "q_down_proj.weight": Weight((self.q_rank, hidden), "reads"),
                "q_up_proj.weight": Weight((q, self.q_rank), "inner"),
            }
            reading = {"q_down_proj": self.q_rank}
        weights["kv_down_proj.weight"] = Weight((self.kv_rank, hidden), "reads")
        if self.rope_dim:
            weights["k_rope_proj.weight"] = Weight((self.rope_dim, hidden), "reads")
        if self.nope_dim:
            weights["k_up_proj.weight"] = Weight((self.heads * self.nope_dim, self.kv_rank), "inner")
        weights["v_up_proj.weight"] = Weight((self.heads * self.value_dim, self.kv_rank), "inner")
        weights["o_proj.weight"] = Weight((hidden, self.heads * self.value_dim), "writes")
        if self.qkv_bias:
            weights |= {f"{name}.bias": bias(size) for name, size in reading.items()}
        if self.qkv_bias or self.kv_bias:
            weights["kv_down_proj.bias"] = bias(self.kv_rank)
            if self.rope_dim:
                weights["k_rope_proj.bias"] = bias(self.rope_dim)
        if self.output_bias:
            weights["o_proj.bias"] = bias(hidden)
        return weights

    def words(self) -> dict[str, Words]:
        scale = scale_words(self.scale, self.query_dim)
        keys = f", {self.rope_heads} rope keys" if self.rope_heads > 1 else ""
        on = ALL_OF_IT
        if isinstance(self.position, Turning):
            turned = f"{self.rope_heads} {'key' if self.rope_heads == 1 else 'keys'} of {self.position.dim} dimensions"
            on = Words("", None, f", on {turned} for all heads")
        data = {"kind": "MLA", "heads": self.heads, "kv_rank": self.kv_rank, "rope_heads": self.rope_heads}
        low = "" if self.q_rank is None else f", latent of queries {self.q_rank:,}"
        data |= {} if self.q_rank is None else {"q_rank": self.q_rank}
        norms = {name: norm for name, norm in (("latent of queries", self.q_norm), ("latent", self.kv_norm)) if norm}
        where = " and ".join(norms) if len(norms) > 1 else "latent of queries" if self.q_norm else "latent"
        wide = f"query dim {self.query_dim}, value dim {self.value_dim}{scale.whole}"
        return {
            "attention": Words(
                f"MLA {self.heads}, latent {self.kv_rank:,}{low}{keys}",
                data,
                f"MLA, {self.heads} heads, latent {self.kv_rank}, {wide}{low}",
            ),
            "head dim": Words(
                f"q/k {self.query_dim:,}, v {self.value_dim:,}",
                {"nope_dim": self.nope_dim, "rope_dim": self.rope_dim, "value_dim": self.value_dim},
            ),
            "scale": scale,
            "q/k norm": inside(norms, f" on the {where}", f"the {where}"),
            **shared_words(self.window, self.position, on),
        }

    def biases(self) -> dict[str, Words]:
        out = Words("attention out", self.output_bias, "attention output")
        if self.kv_bias:
            return {"qkv": Words("latent", "latent", "latent"), "output": out}
        return {"qkv": Words("q, latent", self.qkv_bias, "q and latent"), "output": out}

    def alike(self) -> Self:
        return msgspec.structs.replace(super().alike(), scale=plain_scale(self.scale))

    def letters(self, part: str = "") -> dict[str, int]:
        if part:
            return {"r": self.kv_rank}
        up = {"u": self.heads * self.nope_dim, "w": self.heads * self.value_dim}
        low = {} if self.q_rank is None else {"a": self.q_rank}
        return {"h": self.heads * self.query_dim, **low, "r": self.kv_rank, "p": self.rope_dim, **up}

    def share(self, devices: int) -> Self:
        return msgspec.structs.replace(self, heads=divided(self.heads, devices, "query heads"))

    def small(self, hidden: int) -> Self:
        heads = few_biased(self.heads) if isinstance(self.position, ALiBi) else min(self.heads, 2)
        fields: dict[str, Any] = {"kv_rank": min(self.kv_rank, 64)}
        if self.q_rank is not None:
            fields["q_rank"] = min(self.q_rank, 64)
        for norm, rank in ((self.q_norm, "q"), (self.kv_norm, "kv")):
            if norm is not None:
                fields[f"{rank}_norm"] = norm.small(fields[f"{rank}_rank"])
        return msgspec.structs.replace(self, hidden_size=hidden, heads=heads, **fields)

    def slips(self) -> dict[str, Self]:
        slips = {"scores not scaled": msgspec.structs.replace(self, scale=1.0)}
        if plain_scale(self.scale) != plain_scale(self.query_dim**-0.5):  # in released models, because of YaRN's mscale
            slips["scores scaled by their width alone"] = msgspec.structs.replace(self, scale=self.query_dim**-0.5)
        if isinstance(self.position, Rotary):
            other = self.position.in_other_pairs()
            slips["RoPE pairs of latent attention confused"] = msgspec.structs.replace(self, position=other)
        return slips

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        row, end = "attention", f"{path}.o_proj"
        heads, program = self.heads, list[AnyOperation]()
        latent, rope = f"{path}.latent_cached", f"{path}.k_rope_cached"

        def project(name: str, source: str, inner: Sizes, live_until: str = "", **fields: Any) -> str:
            window = self.window if source == latent else None
            program.append(linear(self, name, path, source, inner, row, live_until, window=window, **fields))
            return program[-1].id

        def norm(name: str, norm: Norm | None) -> None:
            if norm is not None:
                program.extend(out_of(row, norm.operations(f"{path}.{name}", program[-1].id, program[-1].shape)))

        def rotate(name: str, rotary: Turning, start: int, parts: int, live_until: str = "") -> str:
            fields: dict[str, Any] = {"rotary": rotary, "start": start, "parts": parts, "live_until": live_until}
            program.append(Rotate(f"{path}.{name}", (program[-1].id,), program[-1].shape, row, **fields))
            return program[-1].id

        def cache(name: str) -> None:
            seen: Sizes = ("B", "S", *program[-1].shape[2:])
            fields: dict[str, Any] = {"window": self.window, "ours": self.rope_heads != 1, "as_given": True}
            program.append(CacheOperation(name, (program[-1].id,), seen, row, live_until=end, **fields))

        whole: Sizes = ("B", "T", heads, self.query_dim)
        down: dict[str, Any] = {"together": f"{path}.kv_down", "fused": self.fused and self.rope_dim > 0}
        up: dict[str, Any] = {"together": f"{path}.kv_up", "fused": self.fused and self.nope_dim > 0, "groups": heads}
        reads = source
        if self.q_rank is not None:
            project("q_down_proj", source, ("B", "T", self.q_rank))
            norm("q_norm", self.q_norm)
            reads = program[-1].id
        q = project(self.queries, reads, whole, "" if self.rope_dim else end)
        if isinstance(self.position, Turning):
            q = rotate("q_rotated", self.position, self.nope_dim, self.rope_heads, end)
            project("k_rope_proj", source, ("B", "T", self.rope_heads, self.position.dim), **down)
            rotate("k_rope_rotated", self.position, 0, 1)
            cache(rope)
        project("kv_down_proj", source, ("B", "T", self.kv_rank), **down)
        norm("kv_norm", self.kv_norm)
        cache(latent)
        keys = [project("k_up_proj", latent, ("B", "S", heads, self.nope_dim), end, **up)] if self.nope_dim else []
        if self.rope_dim:
            seen: Sizes = ("B", "S", heads, self.query_dim)
            program.append(Concat(f"{path}.k_whole", (*keys, rope), seen, row, live_until=end))
        k = program[-1].id
        v = project("v_up_proj", latent, ("B", "S", heads, self.value_dim), end, **up)
        scores = {"scale": self.scale, "query_dim": self.query_dim, "kv_heads": heads}
        program += attend(path, (q, k, v), scores, heads, self.value_dim, position=self.position, window=self.window)
        project("o_proj", f"{path}.mixed", shape)
        return tuple(program)
