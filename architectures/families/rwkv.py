"""RWKV-4 (Peng et al. 2305.13048): a recurrent model without attention. Every layer has a weighted mean over time and a
channel mixing, and both read a token and the token before it.

Except in training, transformers' class halves the hidden states after every `rescale_every` layers. It also halves
everything that later layers add to them. This is exact in binary. Dividing the input of a norm by s has the same effect
as multiplying its eps by s², so the tree has larger eps instead.

Source: transformers models/rwkv/{configuration,modeling}_rwkv.py.
"""

from collections.abc import Mapping
from functools import partial

from ...components import Block, ChannelMixing, Embedding, Head, LayerNorm, ModelSpec, SubLayer, TimeMixing
from ..base import Architecture, Leaf, leaves_of, only_eager
from ..config import ConfigReader
from ..draws import CONTEXTS, ODD, VOCAB, among
from ..fields import Field, Fields, draw_fields, read_fields, write_tree
from ..layout import Layout
from ..obstacles import of_kind
from ..usual import B

_EPS = 1e-5  # the eps of the last norm, whatever config.json states


def _widened(eps: float, halvings: int) -> float:
    """Return the eps of a norm in the ModelSpec, where its input is not halved.

    In transformers' class, the norm has `eps`, and its input has been halved `halvings` times.
    """
    return eps * 4.0**halvings


def _halved_after(spec: ModelSpec) -> int:
    """Return the number of layers after which transformers' class halves the hidden states, or 0."""
    first, last = of_kind(spec.embedding.norm, LayerNorm), of_kind(spec.final_norm, LayerNorm)
    norms = [of_kind(block.sublayers[0].norm, LayerNorm) for block in spec.blocks]
    ends = [*(norm.eps / first.eps for norm in norms), last.eps / _EPS]
    return next((layer for layer, times in enumerate(ends) if times != 1), 0)


_FIELDS: Fields = {
    "vocab_size": Field("vocab", 50277),
    "hidden_size": Field("hidden", 4096, draw=among(*ODD[1:])),
    "attention_hidden_size": Field("recurrence.inner", None, ConfigReader.optional_integer),
    "intermediate_size": Field(
        "channel_mixing.intermediate_size", None, ConfigReader.optional_integer, draw=among(*ODD)
    ),
    "num_hidden_layers": Field("layers", 32, draw=among(2, 3, 4)),
    "layer_norm_epsilon": Field("own.eps", 1e-5, of=lambda spec: of_kind(spec.embedding.norm, LayerNorm).eps),
    "rescale_every": Field("own.every", 6, ConfigReader.raw, of=_halved_after, draw=among(-1, 0, 1, 2, 3)),
    "tie_word_embeddings": Field("tied", False),
    "context_length": Field("context", 1024, draw=among(*CONTEXTS)),
}


def _read(config: ConfigReader) -> ModelSpec:
    """Read the tree of a config.json."""
    values = read_fields(_FIELDS, config)
    hidden, layers, eps, every = (values[role] for role in ("hidden", "layers", "own.eps", "own.every"))
    if (inner := values["recurrence.inner"]) not in (None, hidden):
        raise config.fail(
            "attention_hidden_size", inner, f"hidden_size ({hidden}): with another width, transformers fails"
        )
    for name, size in (("num_hidden_layers", layers), ("hidden_size", hidden)):
        if size == 1:
            raise config.fail(name, size, "at least 2: transformers divides by this number minus 1")
    if type(every) is not int or not -(2**31) < every < 2**31:
        raise config.fail("rescale_every", every, "a number of layers, or 0")
    halvings = [layer // every if every > 0 else 0 for layer in range(layers + 1)]
    if halvings[-1] > 32:
        raise config.fail(
            "rescale_every", every, f"a larger number, so that {layers} layers halve the hidden states at most 32 times"
        )
    if config.kinds_of_layers() not in (None, ["linear_attention"] * layers):
        raise config.fail("layer_types", config.raw("layer_types"), "null: rwkv has no attention layers")
    mixers = (
        TimeMixing(hidden_size=hidden, inner=hidden),
        ChannelMixing(hidden_size=hidden, intermediate_size=values["channel_mixing.intermediate_size"] or 4 * hidden),
    )
    blocks = {}
    for count in dict.fromkeys(halvings):
        norm = LayerNorm(size=hidden, eps=_widened(eps, count))
        blocks[count] = Block(sublayers=tuple(SubLayer(mixer=mixer, norm=norm) for mixer in mixers))
    return ModelSpec(
        embedding=Embedding(vocab_size=values["vocab"], hidden_size=hidden, norm=LayerNorm(size=hidden, eps=eps)),
        blocks=tuple(blocks[count] for count in halvings[:-1]),
        final_norm=LayerNorm(size=hidden, eps=_widened(_EPS, halvings[-1])),
        head=Head(vocab_size=values["vocab"], hidden_size=hidden, tied=values["tied"]),
        context_length=values["context"],
    )


def _rescaled(spec: ModelSpec) -> dict[str, float]:
    """Return the tensors that write to the hidden states -> the factors by which transformers multiplies them."""
    first, factors = of_kind(spec.embedding.norm, LayerNorm), dict[str, float]()
    for layer, block in enumerate(spec.blocks):
        times = (first.eps / of_kind(block.sublayers[0].norm, LayerNorm).eps) ** 0.5
        names = ("attention.output", "feed_forward.value") if times != 1 else ()
        factors |= {f"rwkv.blocks.{layer}.{name}.weight": times for name in names}
    return factors


_T = "rwkv.blocks.{layer}."
_TIME = {"key": "k", "value": "v", "receptance": "r", "output": "o"}
_CHANNELS = {"key": "up", "receptance": "gate", "value": "down"}


def _mixer(theirs: str, ours: str, names: Mapping[str, str], last: str) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of a mixer.

    Args:
        theirs: the prefix of its names in checkpoints.
        ours: the prefix of gptkit's names.
        names: the projections' names in checkpoints -> gptkit's names.
        last: the name in checkpoints of the output projection, which has no weights for mixing two tokens.
    """
    mix = Layout("one 1 hidden", "(one 1 hidden)")
    mixes = {f"{theirs}time_mix_{name}": f"{ours}{own}_mix" for name, own in names.items() if name != last}
    return (
        *(Leaf(name, own, mix) for name, own in mixes.items()),
        *leaves_of({theirs + name: f"{ours}{own}_proj" for name, own in names.items()}),
    )


_RWKV = Architecture(
    name="rwkv",
    model_types=("rwkv",),
    hf_class="RwkvForCausalLM",
    hf_config="RwkvConfig",
    kinds=frozenset({ChannelMixing, LayerNorm, TimeMixing}),
    read=_read,
    write=partial(write_tree, _FIELDS),
    draw=lambda chosen: draw_fields(_FIELDS, chosen, {"vocab": VOCAB}),
    leaves=(
        *leaves_of({"rwkv.embeddings": "embedding", "rwkv.blocks.0.pre_ln": "embedding.norm"}),
        *leaves_of({_T + "ln1": B + "recurrence_norm", _T + "ln2": B + "channel_mixing_norm"}),
        Leaf(_T + "attention.time_decay", B + "recurrence.decay"),
        Leaf(_T + "attention.time_first", B + "recurrence.bonus"),
        *_mixer(_T + "attention.", B + "recurrence.", _TIME, "output"),
        *_mixer(_T + "feed_forward.", B + "channel_mixing.", _CHANNELS, "value"),
        *leaves_of({"rwkv.ln_out": "final_norm", "head": "head"}),
    ),
    released="2022-12",
    head="head.weight",
    prefix="rwkv.",
    token_ids={"bos_token_id": 0, "eos_token_id": 0},
    config_aliases={"context_length": ("max_position_embeddings",)},
    **only_eager("transformers' class has no attention, and therefore only one path"),
    wrong_batches=("padding", "steps"),
    rescaled=_rescaled,
    prepare=lambda model: model.rwkv.eval()._rescale_layers(),
)
