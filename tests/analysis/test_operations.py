"""Components that gptkit does not have, made of operations that it knows: every walk knows what they do."""

import json
from collections.abc import Callable
from io import StringIO
from typing import Any, get_args

import msgspec
import pytest
import torch
from helpers.families import CONFIGS, spec_of
from helpers.storages import drawn_ids, kept_bytes, prefill_peak
from helpers.trees import TREES, filled, random_weights
from rich.console import Console
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gptkit.analysis import activations, prefill
from gptkit.analysis.activations import Pass, saved_for_backward, saved_with_checkpointing, ways
from gptkit.analysis.aspects import aspects, describe
from gptkit.analysis.compare import comparison
from gptkit.analysis.costs import cache_bytes, costs, forward_flops
from gptkit.analysis.figures import Scenario
from gptkit.analysis.memory import memory, training_memory
from gptkit.analysis.parameters import count
from gptkit.analysis.params import ModelCount
from gptkit.analysis.prefill import peak
from gptkit.components import (
    Attention,
    Component,
    Embedding,
    Gain,
    LayerNorm,
    Mixer,
    ModelSpec,
    Norm,
    Position,
    RMSNorm,
    Weight,
    recast,
    without_rounding,
)
from gptkit.components import operations as ops
from gptkit.errors import ConfigError
from gptkit.modules import Decoder
from gptkit.report.counts import parameter_table
from gptkit.report.drawing import path_lines
from gptkit.report.show import model_drawing
from gptkit.report.structure import structure

replace = msgspec.structs.replace


class ScaledNorm(Norm, Component, frozen=True):
    """g · x / ‖x‖ (Nguyen and Salazar 1910.05895): one gain for all elements."""

    label = "norms"
    centred = False
    size: int
    eps: float = 0.0
    gain: Gain = "weight"

    def weights(self) -> dict[str, Weight]:
        return {"weight": Weight((1,), "gain", 1.0)}

    def operations(self, path: str, source: str, shape: ops.Sizes) -> ops.Program:
        return self.normed(path, source, shape, "x / ‖x‖", kind="ScaleNorm", normalised_in="kernel", statistics=2)


class LinearRecurrence(Mixer, Component, frozen=True):
    """h(t) = a(t)·h(t-1) + (1 - a(t))·v(t) with a = sigmoid(x·Aᵀ) and v = x·Vᵀ; the result is h·Oᵀ."""

    label = "attention"
    slot = "attention"
    hidden_size: int
    width: int

    def weights(self) -> dict[str, Weight]:
        inner = Weight((self.width, self.hidden_size), "reads")
        out = Weight((self.hidden_size, self.width), "writes")
        return {"a_proj.weight": inner, "v_proj.weight": inner, "o_proj.weight": out}

    def operations(self, path: str, source: str, shape: ops.Sizes) -> ops.Program:
        inner: ops.Sizes = (*shape[:-1], self.width)
        end = f"{path}.o_proj"
        gate = ops.linear(self, "a_proj", path, source, inner, "attention")
        decay = ops.ActivationOperation(
            id=f"{path}.decay", inputs=(gate.id,), shape=inner, row="attention", function="sigmoid", live_until=end
        )
        value = ops.linear(self, "v_proj", path, source, inner, "attention", live_until=end)
        scan = ops.Scan(
            id=f"{path}.state",
            inputs=(decay.id, value.id),
            shape=inner,
            row="attention",
            state=(self.width,),
            title="recurrence",
            formula="h(t) = a(t)·h(t−1) + (1 − a(t))·v(t)",
            saved=2,  # the states before each token, and 1 - a
        )
        return (gate, decay, value, scan, ops.linear(self, "o_proj", path, scan.id, shape, "attention"))


class ScaledNormModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight / x.norm(dim=-1, keepdim=True))


class LinearRecurrenceModule(nn.Module):
    def __init__(self, record: LinearRecurrence) -> None:
        super().__init__()
        self.a_proj = nn.Linear(record.hidden_size, record.width, bias=False)
        self.v_proj = nn.Linear(record.hidden_size, record.width, bias=False)
        self.o_proj = nn.Linear(record.width, record.hidden_size, bias=False)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        decay = torch.sigmoid(self.a_proj(x))
        value = self.v_proj(x)
        rest = 1 - decay
        states = [x.new_zeros(x.shape[0], decay.shape[-1])]
        for token in range(x.shape[1]):
            states.append(decay[:, token] * states[-1] + rest[:, token] * value[:, token])
        out: Tensor = self.o_proj(torch.stack(states[1:], dim=1))
        return out


WIDTH = 40
LLAMA = spec_of(CONFIGS["llama"])


def foreign(spec: ModelSpec) -> ModelSpec:
    """A recurrence in place of attention in every second layer, ScaleNorm everywhere."""
    norm: Any = ScaledNorm(size=spec.hidden_size)
    mixer: Any = LinearRecurrence(hidden_size=spec.hidden_size, width=WIDTH)
    blocks = tuple(
        block.replaced(attention_norm=norm, feed_forward_norm=norm, attention=block.attention if layer % 2 else mixer)
        for layer, block in enumerate(spec.blocks)
    )
    return replace(spec, blocks=blocks, final_norm=norm)


SPEC = foreign(LLAMA)


def built(dtype: torch.dtype, kernel: Any = "sdpa") -> Decoder:
    model = Decoder(LLAMA, attention=kernel)
    for module, block in zip(model.blocks, SPEC.blocks, strict=True):
        record: Any = block.mixer("attention")
        module.attention_norm, module.feed_forward_norm = ScaledNormModule(), ScaledNormModule()
        if isinstance(record, LinearRecurrence):
            module.attention = LinearRecurrenceModule(record)
    model.final_norm = ScaledNormModule()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model.to(dtype)


def test_parameters() -> None:
    assert count(SPEC).total == sum(parameter.numel() for parameter in built(torch.float32).parameters())


def test_flops_are_torchs_count() -> None:
    model = built(torch.float32, "eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(drawn_ids(SPEC, 2, 24))
    assert counter.get_total_flops() == forward_flops(SPEC, 24, 2).dense


def test_a_state_does_not_grow() -> None:
    layers = sum(isinstance(block.mixer("attention"), LinearRecurrence) for block in SPEC.blocks)
    assert 0 < layers < len(SPEC.blocks)
    others = replace(LLAMA, blocks=tuple(b for b in LLAMA.blocks[: len(LLAMA.blocks) - layers]))
    for context in (1, 7, 300):
        found = cache_bytes(SPEC, context, "float32", 3)
        assert found.nbytes == cache_bytes(others, context, "float32", 3).nbytes + 3 * layers * WIDTH * 4
        assert found.in_transformers is None
    assert cache_bytes(SPEC, 9).bytes_per_token == cache_bytes(others, 9).bytes_per_token
    alone = replace(SPEC, blocks=SPEC.blocks[:1])
    assert costs(alone, 10).flops == costs(alone, 10_000).flops
    assert cache_bytes(alone, 10).nbytes == cache_bytes(alone, 10_000).nbytes == WIDTH * 2


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)])
def test_what_autograd_keeps(kernel: Any, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = kept_bytes(built(dtype, kernel), drawn_ids(SPEC, 2, 12), monkeypatch)
    found = saved_for_backward(SPEC, Pass(12, 2, size, kernel))
    assert sum(found.values()) == measured
    assert sum(saved_with_checkpointing(SPEC, Pass(12, 2, size, kernel)).values()) < measured


def test_the_worst_moment_of_reading_a_context() -> None:
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        measured = prefill_peak(built(dtype), drawn_ids(SPEC, 2, 128), True)
        assert peak(SPEC, Pass(128, 2, size)) == pytest.approx(measured, rel=0.06)
    assert memory(SPEC, context=64).assumed and training_memory(SPEC, context=64).by_component["attention"]
    alone = replace(SPEC, blocks=SPEC.blocks[:1])
    assert "no attention" in memory(alone, context=64).assumed[0]


def test_it_is_drawn() -> None:
    graph = structure(SPEC)
    nodes = {node.id: node for node in graph.path(graph.kinds[0])}
    assert nodes["attention_norm"].formula == "x / ‖x‖ · w" and nodes["attention_norm"].detail == "ScaleNorm"
    assert nodes["attention.state"].inputs == ("attention.decay", "attention.v_proj")
    assert nodes["attention.state"].formula.startswith("h(t) =")
    lines = "\n".join(line.plain for line in path_lines(graph, graph.kinds[0], 100))
    for words in ("ScaleNorm", "recurrence", f"state {WIDTH}", "a_proj"):
        assert words in lines


# --- the vocabulary ---


class Unheard(ops.Operation, frozen=True):
    """An operation that no walk knows."""


class Strange(Mixer, Component, frozen=True):
    slot = "attention"
    hidden_size: int

    def operations(self, path: str, source: str, shape: ops.Sizes) -> ops.Program:
        operation: Any = Unheard(id=path, inputs=(source,), shape=shape, row="attention")
        return (operation,)


class Silent(Mixer, Component, frozen=True):
    slot = "attention"
    hidden_size: int


WALKS: list[Callable[[ModelSpec], Any]] = [
    costs,
    structure,
    lambda spec: forward_flops(spec, 8),
    lambda spec: cache_bytes(spec, 8),
    lambda spec: saved_for_backward(spec, Pass(8, 1, 4)),
    lambda spec: peak(spec, Pass(8, 1, 4)),
    lambda spec: memory(spec, context=8),
    lambda spec: training_memory(spec, context=8),
]


@pytest.mark.parametrize("walk", range(len(WALKS)))
def test_what_is_unknown_is_refused_by_its_name(walk: int) -> None:
    for record, message in ((Strange(hidden_size=48), "Unheard"), (Silent(hidden_size=48), "the component Silent")):
        attention: Any = record
        spec = replace(LLAMA, blocks=(LLAMA.blocks[0].replaced(attention=attention),))
        with pytest.raises(ConfigError, match=message):
            WALKS[walk](spec)


def test_every_operation_has_a_rule_for_its_memory() -> None:
    """A table, unlike a `match` that ends with `raise unknown(…)`, is not checked for missing entries by mypy."""
    for rules in (activations._RULES, prefill._RULES):
        assert rules.keys() == set(get_args(ops.AnyOperation))


class Capped(Attention, frozen=True):
    """Attention whose scores and results are capped and scaled."""

    def operations(self, path: str, source: str, shape: ops.Sizes) -> ops.Program:
        found = []
        for each in super().operations(path, source, shape):
            if isinstance(each, ops.Softmax):
                cap = ops.Cap(id=f"{path}.capped", inputs=each.inputs, shape=each.shape, row="scores", limit=50.0)
                found += [cap, replace(each, inputs=(cap.id,))]
            else:
                found.append(each)
        out = found[-1]
        return (
            *found,
            ops.ScaleOperation(id=f"{path}.scaled", inputs=(out.id,), shape=shape, row="attention", factor=0.5),
        )


def test_caps_and_scales_are_ready() -> None:
    block = LLAMA.blocks[0]
    fields = {name: getattr(block.attention, name) for name in block.attention.__struct_fields__}
    spec = replace(LLAMA, blocks=(block.replaced(attention=Capped(**fields)),))
    plain = replace(LLAMA, blocks=(block,))
    assert ways(spec.block_operations(spec.blocks[0])) == {"eager"}  # no fused kernel has a cap
    assert forward_flops(spec, 9) == forward_flops(plain, 9)
    run = Pass(9, 1, 4, "eager")
    pairs = block.attention.heads * 9 * 9
    assert sum(saved_for_backward(spec, run).values()) == sum(saved_for_backward(plain, run).values()) + pairs * 4
    assert peak(spec, run) >= peak(plain, run)
    titles = [node.title for node in structure(spec).kinds[0].nodes]
    assert titles.index("soft cap") == titles.index("softmax") - 1 and "× 0.5" in titles


def reads_stream(program: ops.Program) -> set[str]:
    """The linears of a block that read the residual stream, or what a norm or a choice makes of it."""
    streams: set[str] = set()
    found = set()
    for each in program:
        same = isinstance(each, ops.Stream) or (isinstance(each, ops.Add) and each.residual is not None)
        if same or (
            isinstance(each, ops.NormOperation | ops.Gather | ops.ScaleOperation) and each.inputs[0] in streams
        ):
            streams.add(each.id)
        elif isinstance(each, ops.Linear) and each.inputs[0] in streams:
            found.add(each.id)
    return found


def writes_stream(program: ops.Program) -> set[str]:
    """The linears of a block whose results are added to the residual stream, through norms, sums and experts."""
    sums = [each for each in program if isinstance(each, ops.Add)]
    branches = {name for each in sums for name in each.inputs if name != each.residual}
    found = set()
    for each in reversed(program):
        if each.id in branches and isinstance(each, ops.NormOperation | ops.ScaleOperation | ops.Combine):
            branches.update(each.inputs)
        elif each.id in branches and isinstance(each, ops.Linear):
            found.add(each.id)
    return found


@pytest.mark.parametrize(
    ("name", "reads", "writes"),
    [
        ("llama", "attention.q_proj attention.k_proj attention.v_proj", "attention.o_proj feed_forward.down_proj"),
        ("falcon-7b", "attention.q_proj attention.k_proj attention.v_proj", "attention.o_proj feed_forward.down_proj"),
        (
            "mixtral",
            "attention.q_proj attention.k_proj attention.v_proj feed_forward.router",
            "attention.o_proj feed_forward.experts.down_proj",
        ),
        (
            "latent-deepseek",
            "attention.q_proj attention.k_rope_proj attention.kv_down_proj",
            "attention.o_proj feed_forward.down_proj",
        ),
    ],
)
def test_who_reads_and_who_writes_the_stream(name: str, reads: str, writes: str) -> None:
    spec = TREES[name] if name in TREES else spec_of(CONFIGS[name])
    program = spec.block_operations(spec.blocks[0])
    inside = {each.id for each in program if each.id.endswith(("gate_proj", "up_proj")) and "attention" not in each.id}
    assert reads_stream(program) == {*reads.split(), *inside}
    assert writes_stream(program) == set(writes.split())


# --- norms and sums in other places ---


def arranged(**fields: Any) -> ModelSpec:
    """The tree with fields of every sub-layer changed."""
    blocks = (
        replace(block, sublayers=tuple(replace(each, **fields) for each in block.sublayers)) for block in LLAMA.blocks
    )
    return replace(LLAMA, blocks=tuple(blocks))


HIDDEN = LLAMA.hidden_size
ARRANGED = {
    "sandwich": arranged(output_norm=RMSNorm(size=HIDDEN, eps=1e-6), multiplier=0.5),
    "output-norms": arranged(norm=None, output_norm=RMSNorm(size=HIDDEN, eps=1e-6)),
    "post-norm": arranged(norm=None, sum_norm=LayerNorm(size=HIDDEN, eps=1e-5)),
    "one-more": arranged(norm=RMSNorm(size=HIDDEN, eps=1e-6, gain="1 + weight", cast="after_weight")),
    "one-more-cast": arranged(norm=RMSNorm(size=HIDDEN, eps=1e-6, gain="1 + weight")),
    "one-more-centred": arranged(norm=LayerNorm(size=HIDDEN, eps=1e-6, gain="1 + weight")),
    "no-gain": arranged(norm=RMSNorm(size=HIDDEN, eps=1e-6, gain="none")),
    "no-gain-centred": arranged(norm=LayerNorm(size=HIDDEN, eps=1e-6, gain="none", bias=False)),
}


@pytest.mark.parametrize("name", ARRANGED)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_other_arrangements(name: str, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ARRANGED[name]
    model = filled(spec, random_weights(spec), dtype)
    found = saved_for_backward(spec, Pass(24, 2, size))
    assert sum(found.values()) == kept_bytes(model, drawn_ids(spec, 2, 24), monkeypatch), found
    measured = prefill_peak(model, drawn_ids(spec, 2, 128), True)
    assert peak(spec, Pass(128, 2, size)) == pytest.approx(measured, rel=0.06)
    graph = structure(spec)
    assert list(path_lines(graph, graph.kinds[0], 100))


# --- words ---


class Spiral(Position, Component, frozen=True):
    """Positions that nobody wrote words for."""

    turns: int
    inward: bool = False


class Memory(Mixer, Component, frozen=True):
    slot = "memory"
    hidden_size: int
    cells: int


class Lifted(Embedding, frozen=True):
    """A table with a field that no aspect is about."""

    lift: float = 1.0


class Louder(RMSNorm, frozen=True):
    """A norm with a field that its parent's words do not know."""

    loudness: float = 1.0


def printed(renderable: Any, width: int = 160) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def said(spec: ModelSpec) -> dict[str, tuple[str, str]]:
    return {each.name: (each.words, json.dumps(each.data, sort_keys=True)) for each in aspects(spec)}


def spiral(**fields: Any) -> ModelSpec:
    """Every attention of `SPEC` with such positions."""
    blocks = (
        block.replaced(attention=replace(block.attention, position=Spiral(**fields))) if layer % 2 else block
        for layer, block in enumerate(SPEC.blocks)
    )
    return replace(SPEC, blocks=tuple(blocks))


def test_what_nobody_wrote_words_for_is_told_by_its_name_and_fields() -> None:
    spec = spiral(turns=3)
    words, told = describe(spec), said(spec)
    assert words["norm"].startswith("ScaledNorm, pre-norm") and told["norm"][0] == "ScaledNorm, pre"
    for found in (words["attention"], told["attention"][0]):
        assert "LinearRecurrence, width 40 in 0" in found
    assert "Spiral, turns 3 in 1" in words["positions"] and "Spiral, turns 3 in 1" in told["position"][0]
    assert json.loads(told["position"][1])["in_attention"]["layers_differ"][1]["value"] == {
        "kind": "Spiral",
        "turns": 3,
    }
    assert told["head dim"][0].startswith("– in 0") and told["window"][0] == words["window"] == "none"
    assert told["final norm"][0] == "as in the layers" and "at the end" not in words["norm"]
    for other in (spiral(turns=4), spiral(turns=3, inward=True), SPEC, LLAMA):
        assert said(other)["position"] != told["position"]
    assert "Spiral, turns 3, inward in 1" in said(spiral(turns=3, inward=True))["position"][0]

    models = [ModelCount("strange", "", spec), ModelCount("llama", "llama", LLAMA)]
    table = comparison(models, Scenario(context=16))
    differing = {row.name for row in table.rows if row.differs}
    assert {"position", "norm", "attention"} <= differing and "feed-forward" not in differing
    shown = printed(parameter_table([ModelCount("strange", "", spec)]))
    assert "positions: layers differ" in shown and "ScaledNorm, pre-norm" in shown
    graph = structure(spec)
    drawn = printed(model_drawing(models[0], graph, graph.kinds[0], None))
    for name in ("ScaleNorm", "LinearRecurrence, width 40", "Spiral, turns 3"):
        assert name in drawn


def test_a_layer_of_one_mixer_and_a_mixer_of_a_slot_of_its_own() -> None:
    block = LLAMA.blocks[0]
    mixer: Any = Memory(hidden_size=LLAMA.hidden_size, cells=9)
    alone = replace(block, sublayers=block.sublayers[:1])
    more = replace(block, sublayers=(*block.sublayers, replace(block.sublayers[0], mixer=mixer)))
    spec = replace(LLAMA, blocks=(alone, more))
    words, told = describe(spec), said(spec)
    assert words["feed-forward"].startswith("layers differ: none in 0; gated") and told["feed-forward"][0][0] == "–"
    assert told["memory"][0] == "– in 0; Memory, cells 9 in 1"
    assert words["memory"] == "layers differ: none in 0; Memory, cells 9 in 1"
    one, two = [replace(spec, blocks=(each,)) for each in (alone, more)]
    assert "memory" not in said(one) and said(two)["memory"][0] == "Memory, cells 9"
    assert said(two)["bias"][0] == "q, k, v, attention out, gate, up, down"  # what the memory has is not known


CHANGED = {
    **ARRANGED,
    "multiplier": arranged(multiplier=2.0),
    "louder": arranged(norm=Louder(size=HIDDEN, eps=1e-6, loudness=2.0)),
    "louder-as-by-default": arranged(norm=Louder(size=HIDDEN, eps=1e-6)),
    "other-eps": arranged(output_norm=RMSNorm(size=HIDDEN, eps=1e-3)),
    "other-output-norm": arranged(output_norm=LayerNorm(size=HIDDEN, eps=1e-6)),
    "lifted": replace(LLAMA, embedding=recast(LLAMA.embedding, Lifted, lift=3.0)),
    "lifted-as-by-default": replace(LLAMA, embedding=recast(LLAMA.embedding, Lifted)),
    "head-norms": replace(
        LLAMA,
        blocks=tuple(
            block.replaced(
                attention=replace(
                    block.attention,
                    q_norm=RMSNorm(size=block.attention.head_dim, eps=1e-6, gain="1 + weight"),
                    k_norm=RMSNorm(size=block.attention.head_dim, eps=1e-6),
                )
            )
            for block in LLAMA.blocks
        ),
    ),
}


def test_no_field_is_silent() -> None:
    seen: dict[str, Any] = {}
    for spec in (LLAMA, *CHANGED.values()):
        key = json.dumps([(each.name, each.data) for each in aspects(spec)])
        assert without_rounding(seen.setdefault(key, spec)) == without_rounding(spec)
    assert len(seen) > len(CHANGED) - 2  # two round in their own ways
    assert said(CHANGED["multiplier"])["block"][0] == "serial, branch multiplier 2"
    assert said(CHANGED["lifted"])["embedding"][0].endswith(", lift 3") and "embedding" not in said(LLAMA)
    assert said(CHANGED["louder"])["norm"][0] == "Louder, eps 1e-06, loudness 2, pre"
    assert said(CHANGED["sandwich"])["norm"][0] == "RMSNorm, pre and output"
    assert said(CHANGED["post-norm"])["norm"][0] == "LayerNorm, post"
    assert said(CHANGED["one-more"])["norm"][0] == "RMSNorm, gain 1 + weight, pre"
    assert describe(CHANGED["one-more"])["norm"].startswith("RMSNorm, eps 1e-06, gain 1 + weight, pre-norm")
    assert said(CHANGED["head-norms"])["q/k norm"][0] == "RMSNorm, gain 1 + weight and RMSNorm"
    assert all(describe(spec) != describe(LLAMA) for spec in CHANGED.values())
