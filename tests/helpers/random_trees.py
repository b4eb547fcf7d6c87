"""Random trees with weights, and random chains of exact swaps on them.

Everything is drawn through `choose`, one of several things: hypothesis shrinks what it draws, and a seeded generator
draws without it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer, models

from gptkit.analysis.parameters import count
from gptkit.components import ModelSpec, differences, without_rounding
from gptkit.converter.checkpoint import Checkpoint, open_checkpoint
from gptkit.converter.convert import plan_output
from gptkit.converter.dtypes import from_float64
from gptkit.converter.publish import Staging
from gptkit.converter.tree import Origin
from gptkit.converter.write import execute
from gptkit.errors import ConfigError, SwapRefused, UsageError
from gptkit.surgery.base import Model, StoredModel, Swapped, SwappedModel
from gptkit.surgery.listing import values_of
from gptkit.surgery.registry import Step, Swap, all_swaps, apply, swap_for
from helpers.families import CONFIGS, spec_of
from helpers.inverses import inverse
from helpers.trees import TREES
from helpers.weights import Weights

T = TypeVar("T")
Choose = Callable[[Sequence[Any]], Any]
Arrays = dict[str, np.ndarray]

LARGEST = 300_000
"""Parameters of a tree in a chain: four swaps that double something are still quick."""

# --- trees ------------------------------------------------------------------------------------------------------------

LAYERS = ("n_layer", "num_hidden_layers", "num_layers", "n_layers")
HEADS = ("n_head", "num_attention_heads", "num_heads", "attention_heads", "n_heads")
HIDDEN = ("n_embd", "n_embed", "hidden_size", "d_model", "dim")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
WIDTHS = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "dff")
NO_OTHER = ("helium",)
"""Families that state how wide heads are, and know no other width than their share of the hidden size."""
SHARED_OUT = ("llama", "gemma", "gemma2", "gemma3_text")
"""Families with heads of any width of which transformers wants the hidden size to be a multiple all the same."""


def turning_part(config: Mapping[str, Any]) -> float:
    """How much of each head turns with positions, which is to be an even number of elements; 1 where nothing does."""
    attention: Any = next(block.attention for block in spec_of(config).blocks if block.mixer("attention") is not None)
    dim = getattr(attention.position, "dim", None)
    return 1.0 if dim is None or not hasattr(attention, "head_dim") else float(dim / attention.head_dim)


def resized(config: Mapping[str, Any], choose: Choose) -> dict[str, Any]:
    """A config of any family in other sizes, under its own names; without attention only the vocabulary changes."""
    if "text_config" in config:
        return {**config, "text_config": resized(config["text_config"], choose)}
    vocabulary = choose((41, 64, 97))
    name = {names: next((n for n in names if n in config), "") for names in (LAYERS, HEADS, HIDDEN, KV_HEADS, WIDTHS)}
    attends = [block.mixer("attention") is not None for block in spec_of(config).blocks]
    if not (any(attends) and all(name[each] for each in (LAYERS, HEADS, HIDDEN))):
        return {**config, "vocab_size": vocabulary}
    found = dict(config)
    part = 1.0 if "rotary_dim" in config else turning_part(config)
    own = config[name[HIDDEN]] // config[name[HEADS]]
    dims = [each for each in (4, 6, 8, 10, 16) if each <= 10 or part < 1]
    dims = [each for each in dims if each * part > 0 and each * part % 2 == 0]
    head_dim = own if "short_factor" in str(config) else choose(dims)
    kv_heads, group = choose((1, 2, 3)), choose((1, 2, 3))
    kv_heads = config.get("attn_config", {}).get("kv_n_heads", kv_heads)
    if "kv_lora_rank" in config:  # of a latent every head has a key and a value
        kv_heads, group = kv_heads * group, 1
    if config.get(name[KV_HEADS]):
        found[name[KV_HEADS]] = kv_heads
    found[name[HEADS]] = kv_heads * group
    found[name[HIDDEN]] = kv_heads * group * head_dim
    if config.get("head_dim"):
        shared = config["model_type"] in SHARED_OUT
        found["head_dim"] = head_dim
        found[name[HIDDEN]] = choose((3, 4, 5)) * kv_heads * group if shared else choose((18, 24, 29))
        if config["model_type"] in NO_OTHER:
            found[name[HIDDEN]] = head_dim * kv_heads * group
    by_layer = [
        n for n, v in config.items() if isinstance(v, list) and n not in ("attention_layers", "attention_types")
    ]
    if all(attends) and not any(len(config[each]) == config[name[LAYERS]] for each in by_layer):
        found[name[LAYERS]] = max(choose((1, 2, 3)), config.get("first_k_dense_replace", 0))
    if "attention_types" in config:
        found.pop("attention_layers", None)
        found["attention_types"] = [[[choose(("global", "local"))], found[name[LAYERS]]]]
    if "rotary_dim" in config:
        found["rotary_dim"] = choose((2, 4))
    if config["model_type"] == "codegen":  # whose heads are shared out over four cores
        found |= {name[HEADS]: 4 * found[name[HEADS]], name[HIDDEN]: 4 * found[name[HIDDEN]]}
    if name[WIDTHS]:
        found[name[WIDTHS]] = choose((8, 20, 30, 33))
    return {**found, "vocab_size": vocabulary}


def drawn_config(name: str, choose: Choose) -> dict[str, Any]:
    """A config in sizes that go together in its family, or the one it has where ten draws found none."""
    for _ in range(10):
        found = resized(CONFIGS[name], choose)
        with suppress(ConfigError):
            spec_of(found)
            return found
    return dict(CONFIGS[name])


def drawn_spec(choose: Choose) -> ModelSpec:
    """The tree of a family's config in random sizes, or one that no family has."""
    name = choose((*CONFIGS, *TREES))
    return TREES[name] if name in TREES else spec_of(drawn_config(name, choose))


def prepared(model: Weights, choose: Choose) -> Weights:
    """Sometimes the tree after a swap that is not exact, such as no family has: a GPT-2 with ALiBi, say."""
    if not choose((False, True)):
        return model
    found = [
        (f"{step}", swapped)
        for step, swapped in possible(model, steps_for(model.spec), lambda each: each.guarantee != "exact")
        if swapped.spec != model.spec
    ]
    if not found:
        return model
    chosen = choose([name for name, _ in found])
    after = SwappedModel(model, dict(found)[chosen])
    return Weights(after.spec, {each.name: np.array(after.wide(each.name)) for each in after.spec.parameters()})


# --- what training may leave in weights, and exactness may hang on ----------------------------------------------------


def no_biases(spec: ModelSpec, weights: Arrays, choose: Choose) -> None:
    """Some kinds of bias are zero in every layer."""
    kinds = sorted({".".join(name.split(".")[-2:]) for name in weights if name.endswith(".bias")})
    for kind in kinds:
        if choose((False, True)):
            for name in weights:
                if name.endswith(kind):
                    weights[name][...] = 0


def silent(spec: ModelSpec, weights: Arrays, choose: Choose) -> None:
    """Attention or the feed-forward of every layer, or of one, adds nothing."""
    part = choose(("o_proj.", "down_proj."))
    layer = choose(("", *(f"blocks.{layer}." for layer in range(len(spec.blocks)))))
    for name in weights:
        if part in name and name.startswith(layer):
            weights[name][...] = 0


def one_table(spec: ModelSpec, weights: Arrays, choose: Choose) -> None:
    """A head of its own has the values of the embedding."""
    if "head.weight" in weights:
        weights["head.weight"][...] = weights["embedding.weight"]
        if "head.bias" in weights:
            weights["head.bias"][...] = 0


def no_positions(spec: ModelSpec, weights: Arrays, choose: Choose) -> None:
    """The table of positions is zero."""
    if "positions.weight" in weights:
        weights["positions.weight"][...] = 0


def alike_heads(spec: ModelSpec, weights: Arrays, choose: Choose) -> None:
    """The key-value heads are all the first one."""
    for layer, block in enumerate(spec.blocks):
        heads = getattr(block.attention, "kv_heads", 1)
        for name, array in weights.items():
            if name.startswith(f"blocks.{layer}.attention.") and name.split(".")[3] in ("k_proj", "v_proj"):
                part = array.reshape(heads, -1, *array.shape[1:])
                part[...] = part[:1]


def dead_heads(spec: ModelSpec, weights: Arrays, choose: Choose) -> None:
    """Nothing comes out of the last query head of each key-value head."""
    for layer, block in enumerate(spec.blocks):
        attention = block.attention
        output = weights[f"blocks.{layer}.attention.o_proj.weight"]
        kv_heads = getattr(attention, "kv_heads", 1)
        output.reshape(len(output), kv_heads, attention.heads // kv_heads, -1)[:, :, -1] = 0


def dead_dims(spec: ModelSpec, weights: Arrays, choose: Choose) -> None:
    """The slowest rotary pairs of queries are zero, and so are the values' elements at their places."""
    for layer, block in enumerate(spec.blocks):
        attention = block.mixer("attention")
        head_dim, rotary = getattr(attention, "head_dim", 0), getattr(attention, "position", None)
        for part in ("q_proj", "q_norm", "v_proj") if head_dim else ():
            for name, array in weights.items():
                if name.startswith(f"blocks.{layer}.attention.{part}."):
                    heads = array.reshape(-1, head_dim, *array.shape[1:])
                    halves = getattr(rotary, "pairs", "halves") == "halves" and part != "v_proj"
                    dim = getattr(rotary, "dim", head_dim)
                    heads[:, [dim // 2 - 1, dim - 1] if halves else [dim - 2, dim - 1]] = 0


def dead_units(spec: ModelSpec, weights: Arrays, choose: Choose) -> None:
    """Nothing comes out of a third of each feed-forward's units."""
    for name, array in weights.items():
        if name.endswith("down_proj.weight"):
            array[:, ::3] = 0


def alike_experts(spec: ModelSpec, weights: Arrays, choose: Choose) -> None:
    """The experts of each layer are all the first one."""
    for name, array in weights.items():
        before, experts, after = name.partition(".experts.")
        if experts:
            array[...] = weights[f"{before}.experts.0.{after.partition('.')[2]}"]


def alike_norms(spec: ModelSpec, weights: Arrays, choose: Choose) -> None:
    """The feed-forward's norm is the attention's."""
    for name, array in weights.items():
        other = name.replace("feed_forward_norm", "attention_norm")
        there = ".feed_forward_norm." in name and other in weights
        if there and weights[other].shape == array.shape:
            array[...] = weights[other]


def constant_factor(spec: ModelSpec, weights: Arrays, choose: Choose) -> None:
    """What the gate is multiplied by is the same for every input, where it has a bias."""
    for name, array in weights.items():
        others = {name.replace("weight", "bias"), name.replace("up_proj", "gate_proj")}
        if name.endswith("up_proj.weight") and others <= set(weights):
            array[...] = 0


STATES: tuple[Callable[[ModelSpec, Arrays, Choose], None], ...] = (
    no_biases,
    silent,
    one_table,
    no_positions,
    alike_heads,
    dead_heads,
    dead_dims,
    dead_units,
    alike_experts,
    alike_norms,
    constant_factor,
)


# --- files ------------------------------------------------------------------------------------------------------------


def tokenizer(size: int) -> bytes:
    """Of characters, and of pairs of them."""
    letters = "abcdefghijklmnop"
    merges = [(a, b) for a in letters for b in letters][: size - len(letters)]
    tokens = [*letters, *(a + b for a, b in merges)]
    text: str = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges)).to_str()
    return text.encode()


def drawn_source(choose: Choose, folder: Path) -> Path:
    """A random tree with random weights in gptkit's own format; beside it lists of tokens, for pruning."""
    model = prepared(Weights(drawn_spec(choose)), choose)
    for _ in range(choose((0, 1, 2))):
        choose(STATES)(model.spec, model.values, choose)
    dtype = choose(("F32", "BF16"))
    texts = {"tokenizer.json": tokenizer(model.spec.vocab_size)} if choose((False, True)) else {}
    source = folder / "source"
    write(model.spec, model.values, dtype, source, texts)
    (folder / "tokens.txt").write_text("a\n")
    (folder / "text.txt").write_text("abadabaeac")
    return source


def write(spec: ModelSpec, weights: Arrays, dtype: str, folder: Path, texts: Mapping[str, bytes]) -> None:
    """A tree in gptkit's own format."""
    names = [parameter.name for parameter in spec.parameters()]
    plan = plan_output(spec, Origin(), "local", dict.fromkeys(names, dtype), dtype, None, texts=texts)
    with Staging(folder, False) as staging:
        files = execute(plan, ((name, from_float64(weights[name], dtype), dtype) for name in names), staging)
        staging.commit({"format": "local"}, files=files)


# --- chains -----------------------------------------------------------------------------------------------------------


def first(spec: ModelSpec, slot: str, field: str) -> list[int]:
    """A field of the first layer that has a mixer in this slot, where any has."""
    found = (getattr(block.mixer(slot), field, None) for block in spec.blocks)
    return [each for each in found if each is not None][:1]


MORE: dict[tuple[str, str], Callable[[ModelSpec, Path], Sequence[str]]] = {
    ("vocab", "prune:FILE"): lambda spec, folder: (f"prune:{folder / 'tokens.txt'}",),
    ("vocab", "prune-text:FILE"): lambda spec, folder: (f"prune-text:{folder / 'text.txt'}",),
    ("vocab", "N"): lambda spec, folder: (str(spec.vocab_size - 3),),
    ("position", "learned:LENGTH"): lambda spec, folder: ("learned:40",),
    ("block", "parallel:shared"): lambda spec, folder: ("parallel:shared",),
    ("mlp", "moe:ExK:split"): lambda spec, folder: ("moe:3x3:split",),
    ("mlp", "moe:ExK"): lambda spec, folder: ("moe:3x1",),
    ("rotary_dim", "N"): lambda spec, folder: tuple(f"{n}:slowest" for n in (2, 4, 6, 8)),
    ("drop", "BIASES"): lambda spec, folder: ("biases",),
    ("activation", "gelu_bloom"): lambda spec, folder: ("gelu_bloom",),
    ("heads", "N"): lambda spec, folder: [str(2 * each) for each in first(spec, "attention", "heads")],
    ("intermediate", "N"): lambda spec, folder: [
        str(each * 2 // 3) for each in first(spec, "feed_forward", "intermediate_size")
    ],
}
"""Values that are worth trying on these trees beside a swap's own examples."""


def steps_for(spec: ModelSpec, folder: Path | None = None, blocks: str | None = None) -> Iterator[Step]:
    """Everything that may be asked for on a tree."""
    for swap in all_swaps():
        more = MORE.get((swap.option, swap.form)) if folder is not None else None
        values = [*values_of(swap, spec), *(more(spec, folder) if more is not None and folder is not None else ())]
        for value in dict.fromkeys(values):
            if swap_for(swap.option, value) is swap:
                yield Step(swap.option, value)
                if blocks is not None and swap.by_layer:
                    yield Step(swap.option, value, blocks)


def least_done(spec: ModelSpec) -> int:
    """How many of `steps_for`, for all layers and for one, in their best form and plainly, are carried out at least:
    most are of attention, which some layers may lack, and few are of two stacks or of blocks that layers share.
    """
    if spec.has_shared_blocks:
        return 6
    if spec.encoder is not None:
        return 10
    if any(getattr(block.mixer("feed_forward"), "dense", None) is not None for block in spec.blocks):
        return 10  # a feed-forward beside experts is one that few swaps know
    return 31 if all(block.mixer("attention") is not None for block in spec.blocks) else 25


def possible(
    model: Model, steps: Iterator[Step] | Sequence[Step], wanted: Callable[[Swapped], bool], **given: Any
) -> Iterator[tuple[Step, Swapped]]:
    """Those that are not refused, do not need a text, and are as wanted."""
    for step in steps:
        try:
            swapped = apply(model, step, **given)
        except (SwapRefused, UsageError):
            continue
        if wanted(swapped) and count(swapped.spec).total <= max(LARGEST, count(model.spec).total):
            yield step, swapped


@dataclass
class Chain:
    """Exact swaps one after the other on the files of a tree; what else could have been drawn is noted in `reached`."""

    source: Checkpoint
    folder: Path
    steps: list[Step] = field(default_factory=list)
    swapped: list[Swapped] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)
    reached: set[Swap] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.models.append(StoredModel(self.source))

    @property
    def moves(self) -> bool:
        """Whether no step computes anything."""
        last = self.models[-1]
        return not any(isinstance(last, SwappedModel) and last.computed(each.name) for each in last.spec.parameters())

    def backwards(self) -> list[Step]:
        """What undoes the last steps, the last one first: as many as have an inverse, as long as the inverses of those
        after them give back the very tree that they had left. (An inverse gives back the function; of a stream that
        has become wider for a norm it may leave the width.)
        """
        found: list[Step] = []
        here = self.models[-1]
        for step, before, left in reversed(list(zip(self.steps, self.models[:-1], self.models[1:], strict=True))):
            undo = inverse(step, before.spec)
            if undo is None or not alike(here.spec, left.spec):
                break
            found.append(undo)
            here = SwappedModel(here, apply(here, undo, **self.given))
        return found

    @property
    def given(self) -> dict[str, Any]:
        """What swaps may draw on: the tokenizer's files as the steps left them."""
        texts = dict(self.source.texts)
        for each in self.swapped:
            texts |= {name: text for name, text in each.texts.items() if text is not None}
        return {"files": self.source.folder, "texts": texts}

    def candidates(self, blocks: str | None) -> dict[str, tuple[Step, Swapped]]:
        """Every exact swap that there is on the last tree: those that undo earlier ones too."""
        model = self.models[-1]
        undone = [inverse(step, before.spec) for step, before in zip(self.steps, self.models, strict=False)]
        steps = [*steps_for(model.spec, self.folder, blocks), *(step for step in undone if step is not None)]
        exact = possible(model, steps, lambda each: each.guarantee == "exact" and each.against is None, **self.given)
        found = {f"{step} {dict(step.settings)}": (step, swapped) for step, swapped in exact}
        self.reached |= {swap_for(step.option, step.value) for step, _ in found.values()}
        return found

    def draw(self, choose: Choose) -> bool:
        """One more step; options are as likely as one another, however many values they have. False: there is none."""
        layers = len(self.models[-1].spec.blocks)
        found = self.candidates(choose((None, "0", f"{layers - 1}", f"{layers // 2}-")))
        if not found:
            return False
        option = choose(sorted({step.option for step, _ in found.values()}))
        step, swapped = found[choose([name for name, (step, _) in found.items() if step.option == option])]
        self.steps.append(step)
        self.swapped.append(swapped)
        self.models.append(SwappedModel(self.models[-1], swapped))
        return True


def drawn_chain(choose: Choose, folder: Path, longest: int = 4) -> Chain:
    """A random chain on a random tree, written to `folder`."""
    chain = Chain(open_checkpoint(drawn_source(choose, folder)), folder)
    for _ in range(choose(range(1, longest + 1))):
        if not chain.draw(choose):
            break
    return chain


def alike(a: ModelSpec, b: ModelSpec) -> bool:
    """Whether trees are one but for how they round, and for the last digits of what was computed (a base, an eps)."""
    found = differences(without_rounding(a), without_rounding(b))
    return all(isinstance(x, float) and isinstance(y, float) and math.isclose(x, y, rel_tol=1e-12) for _, x, y in found)
