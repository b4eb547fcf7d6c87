"""llama.cpp's architectures as data: the tensors of their files, and the config.json field of every metadata key.

A model may only have biases, windows and frequency divisors that its row names, since llama.cpp ignores others.

Source: llama.cpp, conversion/*.py (the keys and tensors that are written), src/models/*.cpp and llama-model.cpp (those
that are read, and their defaults).
"""

import math
from collections.abc import Mapping
from typing import Any

from .base import Leaf, qkv
from .gguf_architecture import LOCAL_BASE, PATTERN, WIDTH, WINDOW, FieldOfFile, GgufArchitecture
from .gguf_facts import GgufFacts
from .latent import DOWN, UP
from .layout import Layout
from .rope import ORIGINAL, PART, RotaryKind
from .usual import other_norms, two_parallel_norms

_B, _T = "blocks.{layer}.", "blk.{layer}."

# --- tensors ---

_ENDS = {
    "token_embd": "embedding",
    "token_embd_norm": "embedding.norm",
    "position_embd": "positions",
    "per_layer_token_embd": "layer_inputs.table",
    "per_layer_model_proj": "layer_inputs.projection",
    "per_layer_proj_norm": "layer_inputs.norm",
    "output_norm": "final_norm",
    "output": "head",
}
"""llama.cpp's names of modules outside of layers -> gptkit's names."""

_NAMES = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_gate": "attention.gate_proj",
    "attn_output": "attention.o_proj",
    "attn_output_norm": "feed_forward_norm",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_q_a": "attention.q_down_proj",
    "attn_q_a_norm": "attention.q_norm",
    "attn_q_b": "attention.q_up_proj",
    "attn_kv_a_norm": "attention.kv_norm",
    "attn_sub_norm": "attention.mixed_norm",
    "post_attention_norm": "attention_output_norm",
    "ffn_norm": "feed_forward_norm",
    "ffn_sub_norm": "feed_forward.inner_norm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_inp_shexp": "feed_forward.shared_gate",
    "ffn_gate_shexp": "feed_forward.shared.gate_proj",
    "ffn_up_shexp": "feed_forward.shared.up_proj",
    "ffn_down_shexp": "feed_forward.shared.down_proj",
    "post_ffw_norm": "feed_forward_output_norm",
    "pre_ffw_norm_2": "feed_forward.mixture.expert_norm",
    "post_ffw_norm_1": "feed_forward.dense_output_norm",
    "post_ffw_norm_2": "feed_forward.mixture_output_norm",
    "inp_gate": "layer_input.gate_proj",
    "proj": "layer_input.down_proj",
    "post_norm": "layer_input_output_norm",
    "layer_output_scale": "scale",
}
"""llama.cpp's names of a layer's modules -> gptkit's names."""

_GROUPS = {
    "ends": "token_embd output_norm output",
    "norms": "attn_norm ffn_norm",
    "qkv": "attn_q attn_k attn_v",
    "heads": "attn_q_norm attn_k_norm",
    "gated": "ffn_gate ffn_up ffn_down",
    "plain": "ffn_up ffn_down",
    "post": "post_attention_norm post_ffw_norm",
    "latent": "attn_q attn_q_a attn_q_a_norm attn_q_b attn_kv_a_mqa attn_kv_a_norm attn_output",
    "mixture": "ffn_gate_inp experts",
    "shared": "ffn_gate_shexp ffn_up_shexp ffn_down_shexp",
    "dense_next_to_experts": "ffn_norm=feed_forward.dense_norm ffn_gate=feed_forward.dense.gate_proj"
    " ffn_up=feed_forward.dense.up_proj ffn_down=feed_forward.dense.down_proj"
    " ffn_gate_inp=feed_forward.mixture.router",
}
"""Names for groups of modules that many architectures have -> llama.cpp's names of these modules."""


def _experts_of(suffix: str) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of experts whose projections are stacked.

    The gate, up and down projections have one tensor each, with the weights or biases of all experts. `suffix` is
    "weight" or "bias".
    """
    shapes = {"gate": "intermediate hidden", "up": "intermediate hidden", "down": "hidden intermediate"}
    return tuple(
        Leaf(
            f"{_T}ffn_{name}_exps.{suffix}",
            f"{_B}feed_forward.experts.{{expert}}.{name}_proj.{suffix}",
            Layout(f"experts {shape if suffix == 'weight' else shape.split()[0]}", stack="experts"),
        )
        for name, shape in shapes.items()
    )


def _read_together(there: str, inner: str, axes: str, expert_axis: str | None = None) -> Leaf:
    """Return the leaf (entry of the tensor table) of a tensor that contains both the gate and the up projection.

    Args:
        there: llama.cpp's name of the tensor.
        inner: the prefix of gptkit's names of the projections within the feed-forward, such as "shared.".
        axes: the pattern of the tensor's axes; see `Layout`.
        expert_axis: the axis of experts, if the tensor contains all experts.
    """
    names = (f"{_B}feed_forward.{inner}gate_proj.weight", f"{_B}feed_forward.{inner}up_proj.weight")
    return Leaf(f"{_T}{there}.weight", names, Layout(axes, split="part", parts=("1", "1"), stack=expert_axis))


def _experts_together(mixture: str = "") -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of experts whose gate and up projections are one tensor.

    The down projections are a second tensor. Both contain the weights of all experts. `mixture` is the prefix of
    gptkit's names of the experts within the feed-forward.
    """
    expert, layout = f"{mixture}experts.{{expert}}.", Layout("experts hidden intermediate", stack="experts")
    return (
        _read_together("ffn_gate_up_exps", expert, "experts (part intermediate) hidden", "experts"),
        Leaf(_T + "ffn_down_exps.weight", f"{_B}feed_forward.{expert}down_proj.weight", layout),
    )


_XIELU = tuple(f"xielu.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps"))
_KEYS, _VALUES = _B + "attention.k_up_proj.weight", _B + "attention.v_up_proj.weight"
_FUSED = tuple(
    Leaf(f"{_T}attn_qkv.{suffix}", qkv(suffix), Layout(pattern, split="slot", parts=("heads", "kv_heads", "kv_heads")))
    for suffix, pattern in (("weight", "(slot head_dim) hidden"), ("bias", "(slot head_dim)"))
)
_APART = {
    # llama.cpp rotates neighbouring rows in some models. transformers rotates row i with row i + half.
    "permuted": tuple(
        Leaf(
            f"{_T}attn_{x}.{suffix}",
            f"{_B}attention.{x}_proj.{suffix}",
            Layout(f"({heads} half two){rest}", f"({heads} two half){rest}"),
        )
        for x, heads in (("q", "heads"), ("k", "kv_heads"))
        for suffix, rest in (("weight", " hidden"), ("bias", ""))
    ),
    # llama.cpp stores all queries, then all keys, then all values. The family may have another order.
    "fused": _FUSED,
    "attn_qkv": _FUSED[:1],
    # Every head has a norm of its own. They are stored as one tensor of two dimensions.
    "by_head": tuple(
        Leaf(f"{_T}attn_{x}_norm.weight", f"{_B}attention.{x}_norm.weight", Layout(f"{n} head_dim", f"({n} head_dim)"))
        for x, n in (("q", "heads"), ("k", "kv_heads"))
    ),
    "attn_sinks": (Leaf(_T + "attn_sinks.weight", _B + "attention.sinks"),),
    "attn_kv_a_mqa": (
        Leaf(
            _T + "attn_kv_a_mqa.weight",
            (_B + "attention.kv_down_proj.weight", _B + "attention.k_rope_proj.weight"),
            DOWN,
        ),
    ),
    "attn_kv_b": (Leaf(_T + "attn_kv_b.weight", (_KEYS, _VALUES), UP),),
    # The projection of keys is transposed, so that queries can be multiplied by it.
    "absorbed": (
        Leaf(_T + "attn_k_b.weight", _KEYS, Layout("heads kv_rank nope_dim", "(heads nope_dim) kv_rank")),
        Leaf(_T + "attn_v_b.weight", _VALUES, Layout("heads value_dim kv_rank", "(heads value_dim) kv_rank")),
    ),
    "falcon_norms": tuple(
        Leaf(f"{_T}{there}.{suffix}", f"{_B}{here}.{suffix}", when=when)
        for there, here, when in (
            ("attn_norm", "attention_norm", other_norms),
            ("attn_norm", "feed_forward_norm", two_parallel_norms),
            ("attn_norm_2", "attention_norm", two_parallel_norms),
        )
        for suffix in ("weight", "bias")
    ),
    "gate_up": (_read_together("ffn_up", "", "(part intermediate) hidden"),),
    "gate_up_shexp": (_read_together("ffn_up_shexp", "shared.", "(part shared) hidden"),),
    "experts": _experts_of("weight"),
    "experts_biases": _experts_of("bias"),
    "experts_together": _experts_together(),
    "experts_next_to_dense": (
        Leaf(_T + "ffn_gate_inp.scale", _B + "feed_forward.mixture.router_norm.weight"),
        Leaf(_T + "ffn_down_exps.scale", _B + "feed_forward.mixture.expert_scale.weight"),
        *_experts_together("mixture."),
    ),
    "choice": (Leaf(_T + "exp_probs_b.bias", _B + "feed_forward.choice.bias"),),
    "exp_probs_b": (Leaf(_T + "exp_probs_b", _B + "feed_forward.choice.bias"),),
    "xielu": tuple(Leaf(f"{key}.{{layer}}", f"{_B}feed_forward.activation.{key[6:]}") for key in _XIELU),
}
"""Names for modules -> their leaves, if their tensors have another layout than gptkit's parameters."""


def _leaves(modules: str) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of modules.

    Args:
        modules: llama.cpp's names of modules, or names in `_GROUPS`, separated by spaces. "name+" has biases too.
            "name=ours" is a module whose name usually means something else, and `ours` is gptkit's name of it.
    """
    leaves: list[Leaf] = []
    for word in modules.split():
        name, biased = word.removesuffix("+"), word.endswith("+")
        if name in _GROUPS:
            leaves += _leaves(" ".join(module + "+" * biased for module in _GROUPS[name].split()))
        elif name in _APART:
            leaves += _APART[name]
        else:
            there, _, here = name.partition("=")
            theirs, ours = (there, _ENDS[there]) if there in _ENDS else (_T + there, _B + (here or _NAMES[there]))
            leaves += [Leaf(f"{theirs}.{suffix}", f"{ours}.{suffix}") for suffix in ("weight", "bias")[: 1 + biased]]
    return tuple(leaves)


# --- metadata ---

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


def _sizes(*without: str) -> dict[str, str]:
    """Return the metadata keys of sizes that most models have -> their config fields, except the keys in `without`."""
    return {key: name for key, name in _SIZES.items() if key not in without}


_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_GIVEN = {WIDTH: "head_dim"}
_USUAL = {**_SIZES, **_RMS, **_GIVEN}


def _layer_norm(name: str) -> dict[str, str]:
    """Return the metadata key of LayerNorm's eps -> its config field, which is `name`."""
    return {"attention.layer_norm_epsilon": name}


def _experts(count: str = "num_experts", chosen: str = "num_experts_per_tok", width: str = "") -> dict[str, str]:
    """Return the metadata keys of a mixture of experts -> their config fields.

    Args:
        count: the config field of the number of experts.
        chosen: the config field of the number of experts per token.
        width: the config field of the width of an expert, if it is not that of a dense layer.
    """
    keys = {"expert_count": count, "expert_used_count": chosen}
    return {**keys, "expert_feed_forward_length": width} if width else keys


def _layers_without(step: int) -> FieldOfFile:
    """Return the function that computes SmolLM3's `no_rope_layers` from a file.

    The result has 0 for every N-th layer (N is `step`), which has no position encoding, and 1 for other layers.
    """
    return lambda facts: [int((layer + 1) % step != 0) for layer in range(facts.layers)]


def _every(number: int | None) -> Any:
    """Return a function for `GgufArchitecture.windows` that returns `number` for any number of layers."""
    return lambda _: number


def _field_of(name: str, factor: str = "") -> Any:
    """Return a function that computes the value of a metadata key from a config.json.

    The value is that of the config field `name`, multiplied by that of the field `factor` if there is one. It is None
    if the config lacks a field.
    """

    def product(config: Mapping[str, Any]) -> Any:
        values = [config.get(field) for field in (name, factor) if field]
        return None if None in values else math.prod(values)

    return product


def _whole(key: str, *default: Any) -> FieldOfFile:
    """Return a function that computes a config field from a file: it returns the value of the metadata key `key`."""
    return lambda facts: facts.value(key, *default)


def _dense_first(facts: GgufFacts) -> list[str]:
    """Return the config field `mlp_layer_types`.

    The first `leading_dense_block_count` layers are dense, others are mixtures.
    """
    first = facts.value("leading_dense_block_count", 0)
    return ["dense" if layer < first else "sparse" for layer in range(facts.layers)]


def _bases(facts: GgufFacts) -> list[float]:
    """Return the RoPE base of every layer, or 0 for a layer without RoPE."""
    base, pattern = facts.number("rope.freq_base", 10_000.0), facts.raw("attention.rope_pattern")
    rotary_layers = [pattern is not False] * facts.layers if pattern is None or isinstance(pattern, bool) else pattern
    if not isinstance(rotary_layers, list) or len(rotary_layers) != facts.layers:
        raise facts.fail("attention.rope_pattern", pattern, f"a list of {facts.layers} booleans")
    return [base if has_rope else 0 for has_rope in rotary_layers]


def _grouped(facts: GgufFacts) -> bool:
    """Return whether a Falcon model has the new architecture, in which groups of query heads share a key-value head.

    Falcon 40b and 11b have this architecture. In 7b, all query heads share one key-value head. In older models, every
    query head may have its own.
    """
    heads = facts.integer("attention.head_count")
    return _two_norms(facts) or facts.integer("attention.head_count_kv", heads) not in (1, heads)


def _two_norms(facts: GgufFacts) -> bool:
    return "blk.0.attn_norm_2.weight" in facts.shapes


def _query_scale(layers: int) -> FieldOfFile:
    """Return a function that computes Gemma's config field `query_pre_attn_scalar` from a file.

    In the largest model of a release, it is hidden size / heads. In the others, it is the width of a head. `layers` is
    the number of layers of the largest model.
    """

    def scalar(facts: GgufFacts) -> int:
        large = facts.layers == layers
        return facts.integer("embedding_length") // facts.integer("attention.head_count") if large else facts.head_dim()

    return scalar


def _is_lite(facts: GgufFacts) -> bool:
    """Return whether llama.cpp treats a DeepSeek model as V2-Lite, in which queries have no latent.

    llama.cpp decides this from the number of layers and the size of the vocabulary.
    """
    return facts.layers in (26, 27) or (facts.layers == 48 and facts.vocab_size == 128_256)


_LATENT_FIELDS = {
    **_sizes("attention.head_count_kv"),
    **_RMS,
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}
_DEEPSEEK_FIELDS = {
    **_LATENT_FIELDS,
    "attention.value_length_mla": "v_head_dim",
    "leading_dense_block_count": "first_k_dense_replace",
    **_experts("n_routed_experts"),
    "expert_weights_scale": "routed_scaling_factor",
}
_DEEPSEEK: dict[str, Any] = {
    "latent": True,
    "absent": {"expert_count": None, "expert_used_count": None, "expert_weights_scale": 1.0},
    "assumed": {
        "num_key_value_heads": _whole("attention.head_count"),
        "qk_nope_head_dim": lambda facts: (
            facts.integer("attention.key_length_mla") - facts.integer("rope.dimension_count")
        ),
        "q_lora_rank": lambda facts: None if _is_lite(facts) else facts.value("attention.q_lora_rank", 0) or None,
        "moe_intermediate_size": _whole("expert_feed_forward_length"),
        "n_shared_experts": lambda facts: facts.value("expert_shared_count", 0) or 1,
    },
    "always": {
        "attention.head_count_kv": 1,
        "attention.key_length": lambda config: config["kv_lora_rank"] + config["qk_rope_head_dim"],
        "attention.value_length": _field_of("kv_lora_rank"),
        "attention.q_lora_rank": lambda config: config["q_lora_rank"] or 0,
        "attention.key_length_mla": lambda config: config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "expert_feed_forward_length": lambda c: c.get("moe_intermediate_size", c["intermediate_size"]),
        "expert_shared_count": lambda config: config["n_shared_experts"] if config.get("n_routed_experts") else 0,
    },
}

_GRANITE_FIELDS = {
    **_USUAL,
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_GRANITE: dict[str, Any] = {"divisors": ("llama3", "longrope")}
_GRANITE_SWA: dict[str, Any] = {
    **_GRANITE,
    "always": {"attention.rope_pattern": lambda config: [base > 0 for base in config["layer_rope_theta"]]},
    "assumed": {"layer_rope_theta": _bases},
    "windows": _every(None),
}
_SCALING, _GROWTH = "rope_scaling", "attention.temperature_scale"
_PARTIAL = RotaryKind(part=PART)
_SCALED_EXPERTS = {
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}


def _sliding(facts: GgufFacts) -> list[bool]:
    """Return for every layer of Gemma 4 whether it has a window."""
    pattern = facts.raw(PATTERN)
    sliding = [pattern] * facts.layers if isinstance(pattern, bool) else pattern
    if not isinstance(sliding, list) or len(sliding) != facts.layers or sliding[-1]:
        raise facts.fail(PATTERN, pattern, f"a list of {facts.layers} booleans, the last one false")
    return sliding


def _of_kind(facts: GgufFacts, key: str, *, local: bool) -> int:
    """Return the value of a metadata key for layers with a window (`local`) or for layers without one.

    If the value is a list by layer, the result is the value for the first such layer.
    """
    value = facts.raw(key)
    if isinstance(value, list) and len(value) == facts.layers:
        value = next(
            (item for item, windowed in zip(value, _sliding(facts), strict=True) if windowed == local), value[0]
        )
    if type(value) is not int or not 0 < value < 2**31:
        raise facts.fail(key, value, "a positive integer, or a list with one for each layer")
    return value


def _heads_by_layer(facts: GgufFacts) -> dict[str, dict[str, int]]:
    """Return Gemma 4's config field `per_layer_config`.

    For every layer without a window, it has the width of a head and the number of key-value heads.
    """
    kv_heads = _of_kind(facts, "attention.head_count_kv", local=False)
    own = {"head_dim": facts.integer(WIDTH), "num_key_value_heads": kv_heads}
    return {str(layer): own for layer, windowed in enumerate(_sliding(facts)) if not windowed}


def _shared_layers(facts: GgufFacts) -> int:
    """Return Gemma 4's config field `num_kv_shared_layers`.

    It is the number N of layers at the end that use keys and values of earlier layers. In llama.cpp, these earlier
    layers are the two before the last N. The first of the two serves layers with a window, and the second serves layers
    with full attention.
    """
    key, windowed = "attention.shared_kv_layers", _sliding(facts)
    shared = facts.value(key, 0) and facts.integer(key)
    if shared and windowed[: facts.layers - shared][-2:] != [True, False]:
        raise facts.fail(
            key,
            shared,
            "0, or N if the two layers before the last N have a sliding window and full attention, in this order",
        )
    return shared


def _kv_heads(config: Mapping[str, Any]) -> list[int]:
    """Return the number of key-value heads of every layer, from Gemma 4's config.json."""
    usual, by_layer = config["num_key_value_heads"], config.get("per_layer_config", {})
    full = config["num_global_key_value_heads"] or usual
    kinds = [full if kind == "full_attention" else usual for kind in config["layer_types"]]
    return [by_layer.get(str(layer), {}).get("num_key_value_heads", usual) for layer, usual in enumerate(kinds)]


def _widths(config: Mapping[str, Any]) -> list[int]:
    """Return the width of every layer's feed-forward, from Gemma 4's config.json."""
    width, shared = config["intermediate_size"], config["num_kv_shared_layers"]
    wide = 2 * width if config["use_double_wide_mlp"] else width
    return [width] * (config["num_hidden_layers"] - shared) + [wide] * shared


def _mixture_interval(config: Mapping[str, Any]) -> int:
    """Return N if every N-th layer of a Llama 4 model is a mixture of experts, or 0 if none is."""
    return config["moe_layers"][0] + 1 if config["moe_layers"] else 0


_GPT2_FIELDS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    **_layer_norm("layer_norm_epsilon"),
}
# fmt: off
_ROWS = (
    GgufArchitecture("llama", _leaves("ends norms attn_v+ attn_output+ permuted mixture"),
        {**_USUAL, **_experts("num_local_experts")}, "mixtral", signs=("expert_count",),
        assumed={"sliding_window": None}, divisors=("llama3", "longrope"),
    ),
    GgufArchitecture("llama", _leaves("ends norms heads attn_v+ attn_output+ gated+ permuted"), _USUAL,
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"}, divisors=("llama3", "longrope"),
        also=("mistral", "internlm3", "iquestcoder"),
    ),
    GgufArchitecture(
        "qwen2", _leaves("ends norms qkv+ attn_output gated"), _USUAL, assumed={"use_sliding_window": False},
        square=True,
    ),
    GgufArchitecture(
        "qwen3", _leaves("ends norms qkv+ attn_output heads gated"), _USUAL, assumed={"use_sliding_window": False},
        biases={"attention_bias": "attn_q"},
    ),
    GgufArchitecture(
        "gpt2", _leaves("token_embd output_norm+ output position_embd norms+ fused attn_output+ plain+"), _GPT2_FIELDS,
        always={"attention.head_count_kv": _field_of("n_head")}, assumed={"activation_function": "gelu_new"},
        rotary=None, square=True,
    ),
    GgufArchitecture(
        "bloom", _leaves("token_embd output_norm+ output token_embd_norm+ norms+ fused attn_output+ plain+"),
        {
            "embedding_length": "hidden_size", "block_count": "n_layer", "attention.head_count": "n_head",
            **_layer_norm("layer_norm_epsilon"),
        },
        always={
            "context_length": lambda config: config.get("seq_length") or config["hidden_size"],
            "feed_forward_length": lambda config: 4 * config["hidden_size"],
            "attention.head_count_kv": _field_of("n_head"),
        },
        assumed={"seq_length": _whole("context_length")}, rotary=None, square=True,
    ),
    # llama.cpp does not read the biases of Falcon's linears, and supports neither its ALiBi nor its serial blocks.
    GgufArchitecture("falcon", _leaves("token_embd output_norm+ output falcon_norms attn_qkv attn_output plain"),
        {
            **_sizes("attention.head_count_kv", "feed_forward_length"), "attention.head_count_kv": "num_kv_heads",
            "feed_forward_length": "ffn_hidden_size", **_layer_norm("layer_norm_epsilon"),
        },
        always={"tensor_data_layout": "jploski"},
        assumed={
            "new_decoder_architecture": _grouped,
            "multi_query": lambda facts: not _grouped(facts) and facts.raw("attention.head_count_kv") == 1,
            "num_ln_in_parallel_attn": lambda facts: (2 if _two_norms(facts) else 1) if _grouped(facts) else None,
            "parallel_attn": True, "alibi": False, "bias": False, "activation": "gelu",
        },
        square=True,
    ),
    GgufArchitecture("gemma", _leaves("token_embd output_norm norms qkv attn_output gated"), _USUAL, tied=True),
    GgufArchitecture("gemma2", _leaves("token_embd output_norm norms post qkv attn_output gated"),
        {
            **_USUAL, "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        assumed={"query_pre_attn_scalar": _query_scale(46)}, windows=_every(2), tied=True,
    ),
    GgufArchitecture("gemma3", _leaves("ends norms post qkv attn_output gated heads"),
        {**_USUAL, "final_logit_softcapping": "final_logit_softcapping"}, "gemma3_text",
        absent={"final_logit_softcapping": None, LOCAL_BASE: 10_000.0},
        assumed={"query_pre_attn_scalar": _query_scale(62)}, windows=_every(6), unwindowed=True, by_kind=True,
    ),
    GgufArchitecture("phi3", _leaves("ends norms attn_output attn_qkv gate_up ffn_down"),
        {**_USUAL, "rope.scaling.original_context_length": ORIGINAL},
        absent={"rope.scaling.original_context_length": None}, assumed={"sliding_window": None}, rotary=_PARTIAL,
        divisors=("longrope",), square=True,
    ),
    GgufArchitecture("qwen3moe", _leaves("ends norms qkv+ attn_output heads mixture"),
        {**_USUAL, **_experts(width="moe_intermediate_size")}, "qwen3_moe",
        assumed={"norm_topk_prob": True, "use_sliding_window": False}, biases={"attention_bias": "attn_q"},
    ),
    GgufArchitecture("qwen2moe", _leaves("ends norms qkv+ attn_output mixture ffn_gate_inp_shexp shared"),
        {
            **_USUAL, **_experts(width="moe_intermediate_size"),
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        "qwen2_moe", assumed={"norm_topk_prob": False, "use_sliding_window": False}, biases={"qkv_bias": "attn_q"},
        tied=False, square=True,
    ),
    GgufArchitecture("gptneox", _leaves("token_embd output_norm+ output norms+ fused attn_output+ plain+"),
        {
            **_sizes("attention.head_count_kv"), **_layer_norm("layer_norm_eps"),
            "use_parallel_residual": "use_parallel_residual",
        },
        "gpt_neox", always={"attention.head_count_kv": _field_of("num_attention_heads")},
        rotary=RotaryKind(theta="rotary_emb_base", part="rotary_pct"), tied=False, square=True,
    ),
    GgufArchitecture("starcoder2", _leaves("token_embd output_norm+ output norms+ qkv+ attn_output+ plain+"),
        {**_SIZES, **_GIVEN, **_layer_norm("norm_epsilon")}, assumed={"use_bias": True, "sliding_window": None},
        square=True,
    ),
    # The converter also writes a key that llama.cpp does not read. It is wrong if config.json does not state the value.
    GgufArchitecture("stablelm", _leaves("token_embd output_norm+ output norms+ qkv+ attn_output gated"),
        {**_SIZES, **_layer_norm("layer_norm_eps")},
        assumed={"use_parallel_residual": lambda facts: "blk.0.ffn_norm.weight" not in facts.shapes},
        biases={"use_qkv_bias": "attn_q"}, rotary=_PARTIAL, tied=False, square=True,
    ),
    GgufArchitecture(
        "olmo2", _leaves("ends post qkv heads attn_output gated"), _USUAL, "olmo3", signs=("attention.sliding_window",),
        windows=_every(4), by_kind=True, tied=False, square=True,
    ),
    GgufArchitecture("olmo2", _leaves("ends post qkv heads attn_output gated"), _USUAL, tied=False, square=True),
    GgufArchitecture("olmo", _leaves("token_embd output attn_v attn_output gated permuted"),
        {**_SIZES, **_GIVEN, "attention.clamp_kqv": "clip_qkv"}, always={"attention.layer_norm_epsilon": 1e-5},
        absent={"attention.clamp_kqv": None}, square=True,
    ),
    GgufArchitecture("phi2", _leaves("token_embd output_norm+ output+ attn_norm+ qkv+ attn_output+ plain+"),
        {**_SIZES, **_layer_norm("layer_norm_eps")}, "phi", rotary=_PARTIAL, tied=False, square=True,
    ),
    GgufArchitecture("command-r", _leaves("token_embd output_norm attn_norm qkv attn_output gated by_head"),
        {**_SIZES, **_GIVEN, **_layer_norm("layer_norm_eps"), "logit_scale": "logit_scale"}, "cohere",
        assumed={"use_qk_norm": lambda facts: facts.layers >= 64}, tied=True, square=True,
    ),
    GgufArchitecture("cohere2", _leaves("token_embd output_norm attn_norm qkv attn_output gated"),
        {**_SIZES, **_layer_norm("layer_norm_eps"), "logit_scale": "logit_scale"}, windows=_every(4), tied=True,
        square=True,
    ),
    GgufArchitecture("granite", _leaves("ends norms attn_v+ attn_output+ gated+ permuted"), _GRANITE_FIELDS,
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"}, **_GRANITE,
    ),
    GgufArchitecture("granitemoe", _leaves("ends norms attn_v+ attn_output+ permuted mixture shared"),
        {
            **_GRANITE_FIELDS, **_experts("num_local_experts"),
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        "granitemoeshared", signs=("expert_shared_feed_forward_length",), biases={"attention_bias": "attn_q"},
        **_GRANITE,
    ),
    GgufArchitecture("granitemoe", _leaves("ends norms attn_v+ attn_output+ permuted mixture"),
        {**_GRANITE_FIELDS, **_experts("num_local_experts")}, biases={"attention_bias": "attn_q"}, **_GRANITE,
    ),
    GgufArchitecture("gpt-oss",
        _leaves(
            "ends attn_norm qkv+ attn_output+ attn_sinks post_attention_norm=feed_forward_norm ffn_gate_inp+ experts"
            " experts_biases",
        ),
        {**_USUAL, **_experts("num_local_experts")}, "gpt_oss",
        always={"expert_feed_forward_length": _field_of("intermediate_size")},
        absent={"feed_forward_length": _whole("expert_feed_forward_length")}, rotary=RotaryKind(usual={}),
        windows=_every(2), tied=False,
    ),
    GgufArchitecture(
        "deepseek2", _leaves("ends norms gated latent absorbed mixture shared"), _DEEPSEEK_FIELDS, "deepseek_v2",
        signs=("expert_count",), **{**_DEEPSEEK, "always": {**_DEEPSEEK["always"], "expert_gating_func": 1}},
    ),
    GgufArchitecture("deepseek2", _leaves("ends norms gated latent absorbed mixture choice shared"),
        {
            **_DEEPSEEK_FIELDS, "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
            "expert_weights_norm": "norm_topk_prob",
        },
        "deepseek_v3", also=("glm4_moe_lite", "youtu"),
        **{
            **_DEEPSEEK,
            "absent": {
                **_DEEPSEEK["absent"], "expert_group_count": 1, "expert_group_used_count": 1,
                "expert_weights_norm": False,
            },
            "always": {**_DEEPSEEK["always"], "expert_gating_func": 2},
        },
    ),
    GgufArchitecture("minicpm3", _leaves("ends norms gated latent attn_kv_b"),
        {**_LATENT_FIELDS, "attention.q_lora_rank": "q_lora_rank", "attention.value_length": "v_head_dim"},
        absent={
            "attention.value_length": lambda facts: (
                facts.integer("embedding_length") // facts.integer("attention.head_count")
            ),
        },
        always={
            "attention.head_count_kv": _field_of("num_attention_heads"),
            "attention.key_length": lambda config: config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        },
        assumed={
            "num_key_value_heads": _whole("attention.head_count"),
            "qk_nope_head_dim": lambda facts: facts.integer(WIDTH) - facts.integer("rope.dimension_count"),
            "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256,
        },
        latent=True, divisors=("longrope",),
    ),
    GgufArchitecture("chatglm", _leaves("ends norms qkv+ attn_output gate_up ffn_down"), _USUAL, "glm",
        biases={"attention_bias": "attn_q"}, rotary=_PARTIAL, square=True,
    ),
    GgufArchitecture("glm4", _leaves("ends norms post qkv+ attn_output gate_up ffn_down"), _USUAL,
        biases={"attention_bias": "attn_q"}, rotary=_PARTIAL,
    ),
    GgufArchitecture("exaone4", _leaves("ends post qkv heads attn_output gated"), _USUAL,
        windows=lambda layers: 4 if layers == 64 else 0, divisors=("llama3",), square=True,
    ),
    GgufArchitecture("exaone-moe", _leaves("ends norms qkv heads attn_output gated mixture choice shared"),
        {
            **_USUAL, **_experts(width="moe_intermediate_size"),
            **{key: name for key, name in _SCALED_EXPERTS.items() if name != "first_k_dense_replace"},
            "expert_shared_count": "num_shared_experts", "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
        },
        "exaone_moe", absent={"expert_group_count": 1, "expert_group_used_count": 1},
        always={
            "expert_gating_func": 2,
            "expert_shared_feed_forward_length": _field_of("num_shared_experts", "moe_intermediate_size"),
            "leading_dense_block_count": lambda config: config["mlp_layer_types"].count("dense"),
        },
        assumed={"mlp_layer_types": _dense_first}, windows=_every(4), divisors=("llama3",), tied=False,
    ),
    GgufArchitecture("nemotron", _leaves("token_embd output_norm+ output norms+ qkv+ attn_output+ plain+"),
        {**_SIZES, **_GIVEN, **_layer_norm("norm_eps")}, biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
        rotary=_PARTIAL, tied=False, square=True,
    ),
    # llama.cpp needs as many key-value heads as query heads.
    GgufArchitecture("olmoe", _leaves("ends norms qkv heads attn_output mixture"), {**_USUAL, **_experts()},
        always={"attention.head_count_kv": _field_of("num_attention_heads")},
        assumed={"norm_topk_prob": False, "clip_qkv": None}, tied=False, square=True,
    ),
    GgufArchitecture("smollm3", _leaves("ends norms attn_v+ attn_output gated permuted"), _USUAL,
        assumed={"no_rope_layers": _layers_without(4), "use_sliding_window": False},
    ),
    GgufArchitecture("mpt", _leaves("ends norms attn_qkv attn_output plain"),
        {
            "context_length": "max_seq_len", "embedding_length": "d_model", "block_count": "n_layers",
            "attention.head_count": "n_heads", **_layer_norm("layer_norm_epsilon"),
            "attention.clamp_kqv": "attn_config.clip_qkv",
        },
        absent={"attention.clamp_kqv": None},
        always={
            "feed_forward_length": lambda config: 4 * config["d_model"],
            "attention.head_count_kv": _field_of("n_heads"), "attention.max_alibi_bias": 8.0,
        },
        rotary=None, square=True,
    ),
    GgufArchitecture("ernie4_5-moe", _leaves("ends norms qkv attn_output gated mixture choice shared"),
        {
            **_USUAL, **_experts("moe_num_experts", "moe_k", "moe_intermediate_size"),
            "expert_shared_count": "moe_num_shared_experts", "leading_dense_block_count": "moe_layer_start_index",
        },
        "ernie4_5_moe", absent={"leading_dense_block_count": 0},
        always={
            "expert_shared_feed_forward_length": _field_of("moe_num_shared_experts", "moe_intermediate_size"),
            "interleave_moe_layer_step": 1,
        },
        assumed={"moe_layer_end_index": lambda facts: facts.layers - 1, "moe_layer_interval": 1, "use_bias": False},
    ),
    GgufArchitecture("ernie4_5", _leaves("ends norms qkv attn_output gated"), _USUAL, assumed={"use_bias": False}),
    GgufArchitecture("hunyuan-moe", _leaves("ends norms qkv heads attn_output mixture shared"),
        {**_USUAL, **_experts(chosen="moe_topk")}, "hunyuan_v1_moe",
        always={
            "expert_feed_forward_length": _field_of("intermediate_size"),
            "expert_shared_feed_forward_length": _field_of("intermediate_size"),
        },
    ),
    GgufArchitecture("hy_v3", _leaves("ends norms qkv heads attn_output gated mixture exp_probs_b shared"),
        {**_USUAL, **_experts(width="moe_intermediate_size"), "expert_weights_scale": "router_scaling_factor"},
        always={
            "expert_gating_func": 2, "expert_weights_norm": True,
            "expert_shared_feed_forward_length": _field_of("num_shared_experts", "moe_intermediate_size"),
        },
        assumed={
            "num_shared_experts": lambda facts: (
                facts.integer("expert_shared_feed_forward_length") // facts.integer("expert_feed_forward_length")
            ),
            "mlp_layer_types": lambda facts: [
                "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in facts.shapes else "dense"
                for layer in range(facts.layers)
            ],
        },
    ),
    GgufArchitecture("afmoe", _leaves("ends norms post qkv heads attn_output gated attn_gate mixture choice shared"),
        {
            **_USUAL, **_experts(width="moe_intermediate_size"), "expert_shared_count": "num_shared_experts",
            "expert_weights_scale": "route_scale", "leading_dense_block_count": "num_dense_layers",
        },
        absent={"expert_weights_scale": 1.0, "leading_dense_block_count": 0},
        always={"expert_gating_func": 2, "expert_weights_norm": True}, assumed={"mup_enabled": True}, windows=_every(4),
    ),
    GgufArchitecture("dbrx", _leaves("ends attn_norm attn_output_norm attn_output attn_qkv mixture"),
        {
            "context_length": "max_seq_len", "embedding_length": "d_model", "block_count": "n_layers",
            "attention.head_count": "n_heads", "attention.head_count_kv": "attn_config.kv_n_heads",
            "attention.clamp_kqv": "attn_config.clip_qkv", "feed_forward_length": "ffn_config.ffn_hidden_size",
            **_experts("ffn_config.moe_num_experts", "ffn_config.moe_top_k"),
        },
        always={"attention.layer_norm_epsilon": 1e-5}, tied=False, square=True,
    ),
    GgufArchitecture("hunyuan-dense", _leaves("ends norms qkv heads attn_output gated"), _USUAL, "hunyuan_v1_dense"),
    GgufArchitecture(
        "seed_oss", _leaves("ends attn_norm post_attention_norm=feed_forward_norm qkv+ attn_output gated"), _USUAL,
        assumed={"attention_out_bias": False}, biases={"attention_bias": "attn_q"},
    ),
    # llama.cpp needs as many key-value heads as query heads.
    GgufArchitecture("dots1", _leaves("ends norms qkv heads attn_output gated mixture choice shared"),
        {**_USUAL, **_experts("n_routed_experts", width="moe_intermediate_size"), **_SCALED_EXPERTS},
        absent={"expert_weights_scale": 1.0, "expert_weights_norm": False, "leading_dense_block_count": 0},
        always={"expert_gating_func": 2, "attention.head_count_kv": _field_of("num_attention_heads")},
        assumed={"use_sliding_window": False, "n_group": 1, "topk_group": 1}, tied=False,
    ),
    GgufArchitecture("glm4moe",
        _leaves(
            "ends attn_norm post_attention_norm=feed_forward_norm qkv+ heads attn_output gated mixture choice shared",
        ),
        {
            **_USUAL, **_experts("n_routed_experts", width="moe_intermediate_size"), **_SCALED_EXPERTS,
            "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
        },
        "glm4_moe", also=("solar_open",),
        absent={
            "feed_forward_length": _whole("expert_feed_forward_length"), "expert_weights_scale": 1.0,
            "expert_weights_norm": False, "leading_dense_block_count": 0, "expert_group_count": 1,
            "expert_group_used_count": 1,
        },
        always={"expert_gating_func": 2},
        assumed={"use_qk_norm": lambda facts: "blk.0.attn_q_norm.weight" in facts.shapes},
        biases={"attention_bias": "attn_q"}, rotary=_PARTIAL,
    ),
    GgufArchitecture("minimax-m2", _leaves("ends norms qkv heads attn_output mixture choice"),
        {**_USUAL, **_experts("num_local_experts")}, "minimax_m2",
        always={"expert_gating_func": 2, "expert_feed_forward_length": _field_of("intermediate_size")}, rotary=_PARTIAL,
        tied=False,
    ),
    GgufArchitecture("arcee", _leaves("ends norms attn_v+ attn_output plain permuted"), _USUAL, divisors=("llama3",)),
    GgufArchitecture(
        "starcoder", _leaves("token_embd output_norm+ output position_embd norms+ fused attn_output+ plain+"),
        _GPT2_FIELDS, "gpt_bigcode",
        always={"attention.head_count_kv": lambda config: 1 if config["multi_query"] else config["n_head"]},
        assumed={"multi_query": lambda facts: facts.integer("attention.head_count_kv") == 1}, rotary=None, square=True,
    ),
    GgufArchitecture("jais2", _leaves("token_embd output_norm+ output norms+ qkv+ attn_output+ plain+"),
        {**_SIZES, **_GIVEN, **_layer_norm("layer_norm_eps")},
    ),
    GgufArchitecture(
        "mistral3", _leaves("ends norms attn_v attn_output gated permuted"), _USUAL, "ministral3", signs=(_GROWTH,),
        always={
            _GROWTH: lambda config: config[_SCALING]["llama_4_scaling_beta"],
            "rope.scaling.original_context_length": lambda config: config[_SCALING][ORIGINAL],
        },
        assumed={
            "sliding_window": None, f"{_SCALING}.llama_4_scaling_beta": lambda facts: facts.number(_GROWTH),
            f"{_SCALING}.{ORIGINAL}": lambda facts: (
                facts.integer("rope.scaling.original_context_length", facts.integer("context_length"))
            ),
        },
    ),
    GgufArchitecture("mistral3", _leaves("ends norms attn_v attn_output gated permuted"), _USUAL, "mistral",
        assumed={"sliding_window": None},
    ),
    GgufArchitecture(
        "apertus", _leaves("ends norms qkv+ heads attn_output+ plain xielu"), _USUAL, assumed={"hidden_act": "xielu"},
        biases={"attention_bias": "attn_q"}, divisors=("llama3", "longrope"), numbers=_XIELU, tied=False,
    ),
    GgufArchitecture(
        "bitnet", _leaves("token_embd output_norm norms attn_sub_norm ffn_sub_norm qkv attn_output gated"), _USUAL,
        assumed={"hidden_act": "silu"}, tied=True, square=True,
    ),
    GgufArchitecture("mellum", _leaves("ends norms qkv heads attn_output mixture"),
        {**_USUAL, **_experts(width="moe_intermediate_size")}, assumed={"norm_topk_prob": True}, windows=_every(4),
        unwindowed=True, by_kind=True,
    ),
    GgufArchitecture("granite_swa",
        _leaves(
            "ends norms attn_v+ attn_output+ ffn_gate_inp permuted attn_sinks experts_together gate_up_shexp"
            " ffn_down_shexp",
        ),
        {
            **_GRANITE_FIELDS, **_experts("num_local_experts"),
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        "granitemoe_swa", signs=("expert_count",), absent={"expert_shared_feed_forward_length": 0},
        biases={"attention_bias": "attn_q"}, **_GRANITE_SWA,
    ),
    GgufArchitecture(
        "granite_swa", _leaves("ends norms attn_v+ attn_output+ gated+ permuted attn_sinks"), _GRANITE_FIELDS,
        "granite_swa", biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"}, **_GRANITE_SWA,
    ),
    GgufArchitecture("cohere2moe", _leaves("ends attn_norm qkv attn_output gated mixture shared"),
        {
            **_sizes("feed_forward_length"), **_GIVEN, **_layer_norm("layer_norm_eps"), **_RMS, **_experts(),
            "logit_scale": "logit_scale", "expert_feed_forward_length": "intermediate_size",
            "feed_forward_length": "prefix_dense_intermediate_size", "expert_weights_norm": "norm_topk_prob",
            "expert_shared_count": "num_shared_experts",
        },
        "cohere2_moe",
        absent={
            "attention.layer_norm_epsilon": None, "attention.layer_norm_rms_epsilon": None, "feed_forward_length": None,
            "expert_weights_norm": False, "expert_shared_count": 0,
        },
        always={
            "expert_gating_func": lambda config: 1 if config.get("expert_selection_fn", "softmax") == "softmax" else 2,
            "leading_dense_block_count": lambda config: config["mlp_layer_types"].count("dense"),
        },
        assumed={
            "expert_selection_fn": lambda facts: "softmax" if facts.raw("expert_gating_func") == 1 else "sigmoid",
            "mlp_layer_types": _dense_first, "shared_expert_combination_strategy": "average",
            "prefix_dense_sliding_window_pattern": 1,
        },
        windows=_every(None),
    ),
    GgufArchitecture("llama4", _leaves("ends norms qkv attn_output gated mixture shared"),
        {
            **_USUAL, **_experts("num_local_experts", width="intermediate_size"),
            "feed_forward_length": "intermediate_size_mlp",
        },
        "llama4_text", always={WINDOW: 8192, "interleave_moe_layer_step": _mixture_interval},
        assumed={
            "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True,
            "use_qk_norm": lambda facts: facts.integer("expert_count") != 128, "no_rope_layers": _layers_without(4),
            "moe_layers": lambda facts: [
                *range((step := facts.integer("interleave_moe_layer_step")) - 1, facts.layers, step)
            ],
        },
        divisors=("llama3",),
    ),
    GgufArchitecture("gemma4",
        _leaves(
            "ends per_layer_token_embd per_layer_model_proj per_layer_proj_norm norms post qkv attn_output gated heads"
            " layer_output_scale inp_gate proj post_norm pre_ffw_norm_2 post_ffw_norm_1 post_ffw_norm_2"
            " dense_next_to_experts experts_next_to_dense",
        ),
        {
            **_sizes("attention.head_count_kv", "feed_forward_length"), **_RMS, "attention.key_length_swa": "head_dim",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            **_experts(chosen="top_k_experts", width="moe_intermediate_size"),
        },
        "gemma4_text",
        absent={
            "expert_count": None, "expert_used_count": None, "expert_feed_forward_length": None, LOCAL_BASE: 10_000.0,
        },
        always={
            "attention.head_count_kv": _kv_heads, "attention.shared_kv_layers": _field_of("num_kv_shared_layers"),
            WIDTH: _field_of("global_head_dim"), "attention.value_length": _field_of("global_head_dim"),
            "attention.value_length_swa": _field_of("head_dim"), "rope.dimension_count_swa": _field_of("head_dim"),
            "feed_forward_length": _widths,
            "final_logit_softcapping": lambda config: config["final_logit_softcapping"] or 0.0,
        },
        assumed={
            "num_key_value_heads": lambda facts: _of_kind(facts, "attention.head_count_kv", local=True),
            "num_global_key_value_heads": None, "global_head_dim": _whole(WIDTH),
            "final_logit_softcapping": lambda facts: (
                None if facts.raw("final_logit_softcapping") == 0 else facts.number("final_logit_softcapping", 30.0)
            ),
            "per_layer_config": _heads_by_layer, "num_kv_shared_layers": _shared_layers,
            "intermediate_size": lambda facts: _of_kind(facts, "feed_forward_length", local=True),
            "use_double_wide_mlp": lambda facts: isinstance(facts.raw("feed_forward_length"), list),
            "attention_k_eq_v": lambda facts: any(
                f"blk.{layer}.attn_k.weight" in facts.shapes and f"blk.{layer}.attn_v.weight" not in facts.shapes
                for layer in range(facts.layers)
            ),
            "enable_moe_block": lambda facts: facts.value("expert_count", 0) > 0,
            "vocab_size_per_layer_input": lambda facts: facts.vocab_size,
        },
        windows=_every(None), by_kind=True, divisors=("proportional",),
    ),
)
# fmt: on

GGUF: Mapping[str, GgufArchitecture] = {row.reads: row for row in _ROWS}
"""The rows of the table by the name of the family that files are read as. Among rows of the same architecture, those
with `signs` come first."""
