"""Place and cause: the same in memory and a layer at a time, in one layer or in all, and none where nothing parts."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers.command import call
from helpers.covering import covered, exhaustive, few, rest_slow
from helpers.families import REPRESENTATIVES, save_hf

from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.converter.dtypes import to_float64
from gptkit.modules import layers
from gptkit.modules.load import tensor_of
from gptkit.parity import repair
from gptkit.parity.bisect import KeptStates, bisect
from gptkit.parity.mutations import MUTATIONS
from gptkit.parity.probe import ProbeBatch, probe
from gptkit.parity.repair import Repair, Repaired, unit_of, where_they_differ
from gptkit.parity.sides import Sides
from gptkit.parity.verify import verify

B0, B1 = "blocks.0.", "blocks.1."


def damaged(sample, out, *, tensors=lambda t: None, fields=None, layers=None):
    """A sample converted, with tensors changed and fields of its tree set, in all layers or in some."""
    convert(f"sample:{sample}", out)
    weights = safetensors.torch.load_file(out / "model.safetensors")
    tensors(weights)
    safetensors.torch.save_file({k: v.contiguous() for k, v in weights.items()}, out / "model.safetensors")
    config = json.loads((out / "gptkit.json").read_text())

    def walk(node):
        if isinstance(node, dict):
            node.update({name: value for name, value in (fields or {}).items() if name in node})
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            walk(child)

    for index in range(len(config["spec"]["blocks"])) if layers is None else layers:
        walk(config["spec"]["blocks"][index])
    if layers is None:
        walk(config["spec"])
    (out / "gptkit.json").write_text(json.dumps(config))
    return out


def exchange(a, b):
    return lambda t: t.update({a: t[b].clone(), b: t[a].clone()})


def row(token):
    return lambda t: t["embedding.weight"][token].mul_(1.5)


CASES = {
    "all layers, tensors": (
        "llama",
        {
            "tensors": lambda t: [
                exchange(f"blocks.{i}.feed_forward.gate_proj.weight", f"blocks.{i}.feed_forward.up_proj.weight")(t)
                for i in range(sum(name.endswith("gate_proj.weight") for name in t))
            ]
        },
        "layer 0 feed-forward gate",
        "swapping gate and up",
    ),
    "one layer, tensors": (
        "llama",
        {"tensors": exchange(B1 + "feed_forward.gate_proj.weight", B1 + "feed_forward.up_proj.weight")},
        "layer 1 feed-forward gate",
        "swapping gate and up in layer 1",
    ),
    "across layers": (
        "bloom",
        {"tensors": exchange(B0 + "attention.o_proj.weight", B1 + "attention.o_proj.weight")},
        "layer 0 attention output projection",
        "exchanging layers 0 and 1",
    ),
    "all layers, a field": (
        "falcon",
        {"fields": {"base": 5e4}},
        "layer 0 attention mix (positions, scale, mask, softmax)",
        "the reference's base",
    ),
    "one layer, a field": (
        "gpt2",
        {"fields": {"activation": "gelu"}, "layers": [1]},
        "layer 1 feed-forward activation",
        "the reference's activation",
    ),
    "a row of the table": ("gpt2", {"tensors": row(0)}, "embedding", "the reference's values of embedding.weight"),
    "a row that only the bytes point to": (
        "gpt2",
        {"tensors": row(7)},
        "embedding",
        "the reference's values of embedding.weight",
    ),
    "the final norm": (
        "llama",
        {"tensors": lambda t: t.update({"final_norm.weight": t["final_norm.weight"] * 1.01})},
        "final norm",
        "the reference's values of final_norm.weight",
    ),
}


@exhaustive
@few(1)
@pytest.mark.parametrize("name", CASES)
def test_place_and_cause_are_the_same_a_layer_at_a_time(name, tmp_path):
    sample, damage, place, cause = CASES[name]
    bad = damaged(sample, tmp_path / "bad", **damage)
    whole, streamed = (verify(f"sample:{sample}", bad, mutations=False, stream=stream) for stream in (False, True))
    assert whole.verdict == streamed.verdict == "different"
    assert whole.divergence == streamed.divergence
    assert whole.divergence.first.name == place
    restoring = [each.repair for each in whole.divergence.causes if each.restores]
    assert cause in restoring


# A wrong row of a tied table shows at its token, and far more in the head, wherever it is looked at.
@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize("name", [name for name in CASES if name != "a row of the table"])
def test_a_large_model_is_looked_at_where_it_differs(name, tmp_path, monkeypatch):
    """A few positions of a few batches, and few repairs made in the whole."""
    monkeypatch.setattr(repair, "SMALL", 1)
    monkeypatch.setattr(repair, "_ROOM", 2**20)
    sample, damage, place, cause = CASES[name]
    bad = damaged(sample, tmp_path / "bad", **damage)
    found = verify(f"sample:{sample}", bad, mutations=False, stream=True).divergence
    assert found.first.name == place
    assert found.causes[0].restores
    assert cause in [each.repair for each in found.causes]


@exhaustive
def test_the_first_of_two_mistakes_is_a_cause_though_another_is_behind_it(tmp_path):
    def both(tensors):
        exchange(B0 + "feed_forward.gate_proj.weight", B0 + "feed_forward.up_proj.weight")(tensors)
        tensors[B1 + "attention.o_proj.weight"] *= -1

    bad = damaged("llama", tmp_path / "bad", tensors=both)
    found = verify("sample:llama", bad, mutations=False).divergence
    assert found.first.name == "layer 0 feed-forward gate"
    named = {each.repair: each.restores for each in found.causes}
    assert named["swapping gate and up in layer 0"] is False
    assert any(repair.startswith("the reference's values") and restores for repair, restores in named.items())


@few(1)
@pytest.mark.parametrize("family", rest_slow(REPRESENTATIVES))
def test_no_component_of_a_right_model_parts(family, tmp_path):
    """transformers keeps parts of an fp64 model in fp32: that is within what rounding to fp32 makes in both sides."""
    save_hf(REPRESENTATIVES[family].config, tmp_path / "hf")
    for path in open_checkpoint(tmp_path / "hf").architecture.reference(open_checkpoint(tmp_path / "hf").spec):
        found = verify(tmp_path / "hf", attention=path, mutations=False, bisected=True).divergence
        assert found.first is None
        assert all(place.relative <= 1.001 * place.noise + 1e-9 for place in found.places)


@few(1)
@pytest.mark.parametrize("family", ["gpt_neox_japanese", "granitemoeshared"])
def test_nothing_parts_where_transformers_adds_a_part_in_another_module(family, tmp_path):
    test_no_component_of_a_right_model_parts(family, tmp_path)


def test_a_right_component_that_rounds_all_it_can_does_not_part(tmp_path):
    """With a norm's weight at 1 transformers' fp64 is its fp32, and all of the difference is gptkit's own noise."""
    save_hf(REPRESENTATIVES["llama"].config, tmp_path / "hf", torch.bfloat16)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors.update({name: torch.ones_like(each) for name, each in tensors.items() if "norm" in name})
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    convert(tmp_path / "hf", tmp_path / "local")
    weights = safetensors.torch.load_file(tmp_path / "local" / "model.safetensors")
    exchange(B1 + "feed_forward.gate_proj.weight", B1 + "feed_forward.up_proj.weight")(weights)
    safetensors.torch.save_file(weights, tmp_path / "local" / "model.safetensors")
    found = verify(tmp_path / "hf", tmp_path / "local", mutations=False).divergence
    assert found.first.name == "layer 1 feed-forward gate"
    assert found.causes[0].restores


def test_without_a_cause_the_report_says_what_was_tried(tmp_path):
    """Two mistakes at once: no single repair makes the models agree."""
    noise = torch.Generator().manual_seed(0)
    bad = damaged(
        "llama",
        tmp_path / "bad",
        tensors=lambda t: t[B0 + "attention.q_proj.weight"].normal_(generator=noise),
        fields={"base": 3e4, "eps": 0.3},
    )
    run = call("verify", "sample:llama", bad, "--no-mutations", "--json")
    divergence = json.loads(run.stdout)["divergence"]
    undone, copied = divergence["undone"], divergence["copied"]
    assert divergence["causes"] == []
    assert {"swapping q and k", "multiplying RoPE positions by 2"} < {*undone}
    assert copied == ["the reference's base, eps", "the reference's values of attention.q_proj.weight"]
    said = " ".join(call("verify", "sample:llama", bad, "--no-mutations").stdout.split())
    assert f"cause not found: gptkit tried {len(undone)} repairs of known mistakes and 2 parts copied" in said


@pytest.mark.exhaustive
def test_imprecision_has_neither_place_nor_cause(monkeypatch):
    """Right in fp64: no component parts, and any repair would seem to restore what never differed."""
    rough = lambda x: torch.nn.functional.silu(x if x.dtype == torch.float64 else x.bfloat16()).to(x)  # noqa: E731
    monkeypatch.setitem(layers.ACTIVATIONS, "silu", rough)
    result = verify("sample:llama", mutations=False)
    assert result.verdict == "different"
    assert result.noise.imprecise == ("float32",)
    assert (result.divergence.first, result.divergence.causes) == (None, ())


@pytest.mark.exhaustive
def test_the_candidate_cannot_hide_a_mistake_in_its_noise_elsewhere(tmp_path, monkeypatch):
    """An imprecise feed-forward makes no allowance for the attention before it."""
    rough = lambda x: torch.nn.functional.silu(x if x.dtype == torch.float64 else x.bfloat16()).to(x)  # noqa: E731
    monkeypatch.setitem(layers.ACTIVATIONS, "silu", rough)
    bad = damaged("llama", tmp_path / "bad", fields={"base": 1.01e4})
    found = verify("sample:llama", bad, mutations=False).divergence
    assert found.first.name == "layer 0 attention mix (positions, scale, mask, softmax)"


# --- the parts --------------------------------------------------------------------------------------------------------


def test_positions_are_chosen_by_how_much_they_differ():
    batches = [ProbeBatch(str(size), torch.zeros(1, size, dtype=torch.long)) for size in (100, 200, 50, 100)]
    gaps = [torch.zeros(size) for size in (100, 200, 50, 100)]
    gaps[1][[3, 150]] = torch.tensor([5.0, 4.0])
    gaps[2][7] = 4.5
    gaps[3][1] = 3.0
    found = where_they_differ(batches, gaps, repair._ROOM // 3)
    assert [(batch.name, batch.rows.tolist()) for batch in found] == [("200", [3, 150]), ("50", [7])]
    values = torch.arange(200.0).reshape(1, 200, 1)
    assert found[0].valid(values).flatten().tolist() == [3, 150]


def test_one_batch_that_differs_is_enough_however_long():
    batches = [
        ProbeBatch("long", torch.zeros(1, 5000, dtype=torch.long)),
        ProbeBatch("one", torch.zeros(1, 1, dtype=torch.long)),
    ]
    gaps = [torch.ones(256), torch.zeros(1)]
    found = where_they_differ(batches, gaps, repair._ROOM * 2)
    assert [batch.name for batch in found] == ["long"]
    assert len(found[0].rows) == 1
    assert where_they_differ(batches, None, repair._ROOM // 2)


def test_kept_tensors_come_back():
    kept = KeptStates()
    values = {(1, 2): torch.randn(3, 4).double(), (1, 3): torch.empty(0, 4).double(), (2, 2): torch.randn(5).double()}
    for key, value in values.items():
        kept[key] = value
    for key, value in values.items():
        assert torch.equal(kept[key], value)
    assert (9, 9) not in kept
    kept.close()


@covered()
@pytest.mark.parametrize("sample", ["gpt2", "llama", "bloom", "falcon"])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_repair_read_by_name_is_the_mutation(sample, mutation):
    """Made on shapes and then a layer at a time, it is what it makes of the whole model."""
    checkpoint = open_checkpoint(f"sample:{sample}")
    names = [parameter.name for parameter in checkpoint.spec.parameters()]
    weights = {name: torch.from_numpy(to_float64(*checkpoint.tensor(name))) for name in names}
    mutant = mutation.apply(checkpoint.spec, weights)
    tree = Repaired(checkpoint, checkpoint, Repair("", mutation.apply))
    if mutant is None:
        assert not tree.changes
        return
    if mutation.name == "tied head ignored":
        return  # makes a tensor, and is no repair
    assert tree.spec == mutant[0]
    for parameter in tree.spec.parameters():
        assert torch.equal(tensor_of(tree, parameter.name), mutant[1][parameter.name]), parameter.name
    alone = Repaired(checkpoint, checkpoint, Repair("", mutation.apply), 1)
    assert {unit_of(name) for name in alone.touched} <= {1}
    for layer, block in enumerate(alone.spec.blocks):
        assert block == (mutant[0] if layer == 1 else checkpoint.spec).blocks[layer]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files")
def test_the_file_of_what_was_kept_is_gone():
    checkpoint = open_checkpoint("sample:llama")
    counts = []
    for _ in range(2):
        places = bisect(Sides(checkpoint, checkpoint, None), probe(checkpoint.spec)[:2], "sdpa")
        assert len(places) > 10 * len(checkpoint.spec.blocks)
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[0] == counts[1]
