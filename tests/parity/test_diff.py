"""Two checkpoints held against each other: files of every format, against a plain computation in torch."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.families import CONFIGS, GPT2, LLAMA, VOCAB, edited, save_hf, shared_weights

import gptkit
from gptkit.converter.checkpoint import Checkpoint
from gptkit.errors import InvalidInput
from gptkit.parity.changes import Diff, TensorDiff
from gptkit.parity.diff import diff
from gptkit.parity.surroundings import what_differs

WIDE = {**LLAMA, "hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}
FAMILIES = ("gpt2", "llama", "mixtral", "bloom", "falcon-40b")
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints that are not changed: "gpt2", "llama", …, and "wide"."""
    root = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        save_hf(CONFIGS[name], root / name)
    save_hf(WIDE, root / "wide")
    return root


def changed(source: Path, out: Path, change: Change) -> Path:
    """A copy with its tensors altered."""
    shutil.copytree(source, out)
    edited(out, change)
    return out


def one(found: Diff, name: str) -> TensorDiff:
    (tensor,) = [each for each in found.tensors if each.name == name]
    return tensor


def told(found: Diff) -> dict[str, int]:
    """The statuses that there are."""
    return {status: number for status, number in found.counts.items() if number}


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversion_is_the_same_to_the_last_bit(models: Path, tmp_path: Path, name: str) -> None:
    """Fused on one side and apart on the other, transposed or not."""
    gptkit.convert(models / name, tmp_path / "local")
    source, local = models / name, tmp_path / "local"
    for a, b in ((source, source), (source, local), (local, source)):
        found = diff(a, b)
        assert found.same and found.same_bytes and set(told(found)) == {"same"}
        assert found.tree == () and not found.changed and found.all.relative is None
        assert len(found.tensors) == len({each.name for each in found.tensors}) == len(list(found.a.spec.parameters()))


def test_formats_of_one_model_are_the_same(models: Path, tmp_path: Path) -> None:
    gptkit.convert(models / "llama", tmp_path / "x.gguf", to="gguf")
    gptkit.convert(models / "llama", tmp_path / "shards", to="hf", max_shard_bytes=40_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    pickled = tmp_path / "pickled"
    shutil.copytree(models / "llama", pickled)
    torch.save(safetensors.torch.load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    for other in (tmp_path / "x.gguf", tmp_path / "shards", pickled):
        found = diff(other, models / "llama", allow_pickle=True)
        assert found.same and found.same_bytes, told(found)
    with pytest.raises(InvalidInput, match="pickle"):
        diff(models / "llama", pickled)


def test_the_same_bytes_in_another_dtype_are_not_the_same(tmp_path: Path) -> None:
    """A fused tensor is looked at as it lies, but not as what it is not."""
    save_hf(CONFIGS["gpt2"], tmp_path / "a", torch.bfloat16)

    def misread(weights: dict[str, torch.Tensor]) -> None:
        weights.update({name: tensor.view(torch.float16) for name, tensor in weights.items()})

    found = diff(tmp_path / "a", changed(tmp_path / "a", tmp_path / "b", misread))
    assert not found.same and found.counts["changed"] == len(found.tensors)


def test_what_is_quantised_is_said_to_be(models: Path, tmp_path: Path) -> None:
    """Rounding to blocks of eight bits has full rank, and says nothing of the weights."""
    save_hf(
        {**CONFIGS["llama-2"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}, tmp_path / "a"
    )
    gptkit.convert(tmp_path / "a", tmp_path / "x.gguf", to="gguf", dtype="q8_0")
    found = diff(tmp_path / "a", tmp_path / "x.gguf")
    (quantised,) = {each.quantised for each in found.changed}
    assert quantised == ("b",) and found.changed and not found.same
    assert all(each.figures is not None and each.figures.rank is None for each in found.changed)
    assert all(each.figures.relative < 0.01 for each in found.changed if each.figures and each.figures.relative)
    assert diff(tmp_path / "x.gguf", tmp_path / "x.gguf").same


def test_the_same_file_twice_is_not_read(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = models / "link"
    link.symlink_to(models / "gpt2")
    monkeypatch.setattr("gptkit.parity.diff.compare_tensors", lambda *_, **__: pytest.fail("compared"))
    monkeypatch.setattr("gptkit.parity.diff.same_bytes", lambda *_: pytest.fail("read"))
    assert diff(models / "gpt2", link).same_bytes


@pytest.mark.parametrize("name", FAMILIES)
def test_figures_are_those_of_torch(models: Path, tmp_path: Path, name: str) -> None:
    """Every tensor of another seed's model under its shared name, computed from the models themselves."""
    config = CONFIGS[name]
    sides = [shared_weights(save_hf(config, tmp_path / str(seed), seed=seed), config) for seed in (0, 1)]
    gptkit.convert(tmp_path / "1", tmp_path / "local")
    for b in (tmp_path / "1", tmp_path / "local"):
        found = diff(models / name, b, rank=False)
        assert {each.name for each in found.tensors} == set(sides[0]) == set(sides[1])
        for each in found.tensors:
            x, y = (side[each.name].double() for side in sides)
            assert each.figures is not None and each.shape_a == each.shape_b == tuple(x.shape)
            assert each.figures.relative == pytest.approx(((y - x).norm() / x.norm()).item(), rel=1e-12)
            assert each.figures.largest == (y - x).abs().max().item()
            assert each.figures.changed == int((x != y).sum())
            assert each.status == ("changed" if bool((x != y).any()) else "same")
        pairs = [(side[0].double(), side[1].double()) for side in zip(*(s.values() for s in sides), strict=True)]
        square = sum(((y - x) ** 2).sum().item() for x, y in pairs)
        assert found.all.relative == pytest.approx(math.sqrt(square / sum((x**2).sum().item() for x, _ in pairs)))
        assert not found.same


def test_one_tensor_of_a_fused_one(models: Path, tmp_path: Path) -> None:
    """A change in k alone is told of k alone, in the layer where it is."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.h.1.attn.c_attn.weight"][5, 48 + 7] += 1  # (in, q k v): k's output 7

    found = diff(models / "gpt2", changed(models / "gpt2", tmp_path / "b", change))
    (each,) = found.changed
    assert (each.name, each.layer, each.module) == ("blocks.1.attention.k_proj.weight", 1, "attention.k_proj")
    assert each.figures is not None and each.figures.rows == ((7, 7),) and each.figures.changed == 1
    assert each.figures.largest == pytest.approx(1)


# --- what is not on both sides, or not alike --------------------------------------------------------------------------


def test_dtypes(models: Path, tmp_path: Path) -> None:
    gptkit.convert(models / "llama", tmp_path / "bf16", to="hf", dtype="bfloat16")
    gptkit.convert(tmp_path / "bf16", tmp_path / "wide", to="hf", dtype="float32")
    narrowed = diff(models / "llama", tmp_path / "bf16")
    assert set(told(narrowed)) == {"rounded"} and narrowed.rounded == ("BF16", "b") and not narrowed.same
    assert diff(tmp_path / "wide", models / "llama").rounded == ("BF16", "a")
    widened = diff(tmp_path / "bf16", tmp_path / "wide")
    assert set(told(widened)) == {"dtype"} and widened.same and not widened.same_bytes
    assert {(each.dtype_a, each.dtype_b) for each in widened.tensors} == {("BF16", "F32")}


def test_a_vocabulary_that_grew(models: Path, tmp_path: Path) -> None:
    """Rows have tokens' names: those in common are compared."""
    base = safetensors.torch.load_file(models / "wide/model.safetensors")
    save_hf({**WIDE, "vocab_size": VOCAB + 4}, tmp_path / "grown")

    def keep(weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in base.items():
            weights[name][: len(tensor)] = tensor
        weights["lm_head.weight"][3] = 0

    edited(tmp_path / "grown", keep)
    found = diff(models / "wide", tmp_path / "grown")
    assert told(found) == {"same": len(found.tensors) - 2, "reshaped": 2} and not found.same
    embedding, head = one(found, "embedding.weight"), one(found, "head.weight")
    assert embedding.figures is not None and embedding.figures.same_bytes and embedding.figures.rows_all == VOCAB
    assert head.figures is not None and head.figures.rows == ((3, 3),)
    assert [(each.path, each.a, each.b) for each in found.tree if each.path.startswith("head")] == [
        ("head.vocab_size", str(VOCAB), str(VOCAB + 4))
    ]


def test_a_head_that_was_tied(models: Path, tmp_path: Path) -> None:
    save_hf({**WIDE, "tie_word_embeddings": True}, tmp_path / "tied")
    base = safetensors.torch.load_file(models / "wide/model.safetensors")
    edited(tmp_path / "tied", lambda weights: weights.update({name: base[name] for name in weights}))
    for a, b, only in ((tmp_path / "tied", models / "wide", "only_b"), (models / "wide", tmp_path / "tied", "only_a")):
        found = diff(a, b)
        head = one(found, "head.weight")
        assert head.status == only and head.figures is not None and head.figures.changed > 0
        expected = base["lm_head.weight"].double() - base["model.embed_tokens.weight"].double()
        assert head.figures.square == pytest.approx((expected**2).sum().item())
        assert told(found) == {"same": len(found.tensors) - 1, only: 1}
        assert [each.path for each in found.tree] == ["head.tied"] and not found.same


def test_other_shapes_and_layers(models: Path, tmp_path: Path) -> None:
    """A change of heads and of depth: what has no like is listed, what has one compared by its place."""
    save_hf({**WIDE, "num_key_value_heads": 2, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}, tmp_path / "b")
    found = diff(models / "wide", tmp_path / "b")
    reshaped = [each for each in found.tensors if each.status == "reshaped"]
    assert {each.module for each in reshaped} == {"attention.k_proj", "attention.v_proj"} and len(reshaped) == 4
    assert all(each.figures is None for each in reshaped)
    assert {each.layer for each in found.tensors if each.status == "only_a"} == {2}
    tree = {each.path: (each.layers, each.a, each.b) for each in found.tree}
    assert tree["layers"] == (None, "3", "2")
    assert tree["blocks.*.attention.kv_heads"] == ("0–1", "4", "2")
    assert tree["blocks.*.attention_norm.eps"] == ("0–1", "1e-06", "1e-05")
    back = diff(tmp_path / "b", models / "wide")
    assert back.counts["only_b"] == found.counts["only_a"] and back.counts["reshaped"] == 4
    assert {each.name for each in found.tensors} == {each.name for each in back.tensors}


def test_layers_of_another_number(models: Path, tmp_path: Path) -> None:
    """A model without its first layer is not another model: the note says which layer is which."""

    def drop(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if ".layers." in name]:
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            tensor = weights.pop(name)
            if layer != "0":
                weights[f"model.layers.{int(layer) - 1}.{rest}"] = tensor

    other = changed(models / "wide", tmp_path / "b", drop)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    notes = diff(models / "wide", other).notes
    assert any("but B's 0–1 are A's 1–2" in note for note in notes), notes
    assert any("but B's 1–2 are A's 0–1" in note for note in diff(other, models / "wide").notes)


def test_two_families(models: Path, tmp_path: Path) -> None:
    save_hf({**GPT2, "n_embd": 96, "n_head": 8}, tmp_path / "gpt2")
    found = diff(models / "wide", tmp_path / "gpt2")
    assert any("A is of the family llama and B of gpt2" in note for note in found.notes) and not found.same
    assert {each.name for each in found.tensors if each.status == "only_b"} >= {"positions.weight", "final_norm.bias"}
    for each in found.tensors:
        assert (each.figures is not None) == (each.status in ("same", "changed") or each.name == "head.weight")
    empty = diff(models / "gpt2", "sample:llama")  # no tensor of the same shape at all
    assert empty.all.relative is None and not empty.changed and not empty.same
    json.dumps(empty.as_json(), allow_nan=False)


def test_values_are_the_same_in_another_tree(models: Path, tmp_path: Path) -> None:
    """An eps is no tensor, and another function all the same; the longest text is neither."""
    cases = (("eps", "rms_norm_eps", 1e-3, False), ("long", "max_position_embeddings", 512, True))
    for name, field, value, same in cases:
        shutil.copytree(models / "wide", tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps({**config, field: value}))
        found = diff(models / "wide", tmp_path / name)
        assert set(told(found)) == {"same"} and found.same is same and found.tree
        (file,) = found.files
        assert file.name == "config.json" and file.told == (f"{field}: {json.dumps(config[field])} → {value}",)


def test_tokenizers(models: Path, tmp_path: Path) -> None:
    def tokenizer(vocabulary: dict[str, int]) -> str:
        return json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": []})

    for side, vocabulary in (("a", {"x": 0, "y": 1, "z": 2}), ("b", {"y": 0, "x": 1, "w": 3})):
        shutil.copytree(models / "llama", tmp_path / side)
        (tmp_path / side / "tokenizer.json").write_text(tokenizer(vocabulary))
        (tmp_path / side / "merges.txt").write_text(side)
    (tmp_path / "b" / "vocab.json").write_text("{}")
    files = {each.name: each for each in diff(tmp_path / "a", tmp_path / "b").files}
    assert files["tokenizer.json"].told == (
        '1 token added: "w"',
        '1 token gone: "z"',
        '2 tokens with another id: "x", "y"',
        "the merges are equal",
    )
    assert files["vocab.json"].only == "b" and files["merges.txt"].told == ()
    (tmp_path / "a" / "tokenizer.json").write_text("{")  # broken: bytes that differ
    assert {each.name: each.told for each in diff(tmp_path / "a", tmp_path / "b").files}["tokenizer.json"] == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data["model"].update(merges=["x y"]), "token ids agree: the vocabulary and the merges are equal"),
        (
            lambda data: data["model"].update(merges=[["y", "x"]]),
            "the vocabulary is equal, but merges differ: a text may get different token ids",
        ),
        (lambda data: data.update(normalizer=None), "other parts that differ: normalizer"),
        (lambda data: data["model"].update(byte_fallback=True), "other parts that differ: model.byte_fallback"),
    ],
)
def test_a_tokenizer_with_other_bytes_says_whether_token_ids_agree(
    change: Callable[[dict[str, Any]], object], said: str
) -> None:
    model = {"type": "BPE", "vocab": {"x": 0, "y": 1, "xy": 2, "yx": 3}, "merges": [["x", "y"]]}
    data = {"model": model, "added_tokens": [], "normalizer": {"type": "NFC"}}
    text = json.dumps(data).encode()
    change(data)
    told = what_differs("tokenizer.json", text, json.dumps(data).encode())
    assert told is not None and told[-1] == said
    assert told[0].startswith("token ids agree") != said.startswith("the vocabulary is equal")


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ({"rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, True),
        ({"rope_theta": 1e4, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 1e4}}, True),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 1e4, **LINEAR}},
            True,
        ),
        ({"rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, False),
        ({"rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 1e4, **LINEAR}}, False),
        ({"rope_theta": 1e4}, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, False),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, True),
        ({"torch_dtype": "bfloat16"}, {"dtype": "float32"}, False),
    ],
)
def test_another_spelling_of_the_same_values_is_no_change(old: dict[str, Any], new: dict[str, Any], same: bool) -> None:
    told = what_differs("config.json", json.dumps(old).encode(), json.dumps(new).encode())
    if same:
        assert told == (f"{' and '.join(old)} → {' and '.join(new)}: another spelling of the same values",)
    else:
        assert told is not None and len(told) == len(old) + len(new) and not any("spelling" in line for line in told)


# --- without a place in the tree --------------------------------------------------------------------------------------


def test_tensors_without_a_place_are_compared_by_their_names(models: Path, tmp_path: Path) -> None:
    """Numbers of any kind; what cannot be read is said to be left out."""
    extra = {
        "scale": torch.tensor(2.0),
        "steps": torch.tensor([1, 2, 3], dtype=torch.int32),
        "more.layers.7.thing.weight": torch.ones(4, 4),
        "kept.weight": torch.ones(2, 2, 2),
        "flags": torch.tensor([True]),
    }
    a = changed(models / "wide", tmp_path / "a", lambda w: w.update(extra))

    def alter(weights: dict[str, torch.Tensor]) -> None:
        weights["scale"] += 1
        weights["steps"][1] = 5
        weights["added"] = weights.pop("more.layers.7.thing.weight")

    found = diff(a, changed(a, tmp_path / "b", alter))
    total = len(list(found.a.spec.parameters()))
    assert told(found) == {"same": total + 1, "changed": 2, "only_a": 1, "only_b": 1} and not found.same
    steps, gone = one(found, "steps").figures, one(found, "more.layers.7.thing.weight")
    assert steps is not None and (steps.changed, steps.largest, steps.square_a) == (1, 3, 14)
    assert (gone.layer, gone.module, gone.status) == (7, "more.layers.*.thing", "only_a")
    assert found.parameters[0] == sum(each.count for each in found.a.spec.parameters()) + 1 + 3 + 16 + 8
    assert any(note.startswith("A: ") and "cannot read their dtype: flags" in note for note in found.notes)
    json.dumps(found.as_json(), allow_nan=False)
    left = diff(a, tmp_path / "b", allow_extra=True)
    assert told(left) == {"same": total} and left.same


def test_missing_tensors(models: Path, tmp_path: Path) -> None:
    """Of a fused one all parts, on either side or on both, those that decide on layers and heads too."""
    for name, tensor, parts in (
        ("gpt2", "transformer.h.1.attn.c_attn.weight", {f"blocks.1.attention.{x}_proj.weight" for x in "qkv"}),
        ("gpt2", "transformer.wte.weight", {"embedding.weight"}),
        ("wide", "model.layers.0.self_attn.o_proj.weight", {"blocks.0.attention.o_proj.weight"}),
        ("wide", "lm_head.weight", {"head.weight"}),
    ):
        lacking = changed(models / name, tmp_path / tensor, lambda w, tensor=tensor: w.pop(tensor))
        for a, b, only in ((models / name, lacking, "only_a"), (lacking, models / name, "only_b")):
            found = diff(a, b)
            assert {each.name for each in found.tensors if each.status == only} == parts
            assert told(found) == {"same": len(found.tensors) - len(parts), only: len(parts)} and not found.same
        assert diff(lacking, lacking).same
        with pytest.raises(InvalidInput, match="missing") as refused:  # nobody else takes half a model
            gptkit.convert(lacking, tmp_path / "out", allow_extra=True)
        assert "allow-extra" not in str(refused.value.hint)


def test_no_advice_that_was_followed(models: Path, tmp_path: Path) -> None:
    """A tensor under another name is missing and extra at once; to leave the extra one out helps nobody."""
    norm = "model.norm.weight"
    renamed = changed(models / "wide", tmp_path / "b", lambda w: w.update({"norm.scale": w.pop(norm)}))
    assert {each.name: each.status for each in diff(models / "wide", renamed).tensors if each.status != "same"} == {
        "final_norm.weight": "only_a",
        "norm.scale": "only_b",
    }
    with pytest.raises(InvalidInput, match=norm) as refused:
        gptkit.convert(renamed, tmp_path / "out", allow_extra=True)
    assert "allow-extra" not in str(refused.value.hint)


def test_a_bias_is_told_of_apart_from_its_weight(models: Path, tmp_path: Path) -> None:
    def alter(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.h.0.attn.c_proj.bias"] *= 8

    found = diff(models / "gpt2", changed(models / "gpt2", tmp_path / "b", alter))
    groups = {group.name: group for group in found.by_module()}
    assert groups["attention.o_proj.bias"].relative == pytest.approx(7)
    assert not groups["attention.o_proj"].changed and groups["attention.o_proj"].relative is None


# --- readings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_read_as_one(tmp_path: Path, dtype: torch.dtype) -> None:
    save_hf(WIDE, tmp_path / "a", dtype)
    generator = torch.Generator().manual_seed(0)

    def merge(weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            if name.endswith(("q_proj.weight", "v_proj.weight")):
                update = torch.randn(len(tensor), 4, generator=generator) @ torch.randn(4, 96, generator=generator)
                wide = tensor.float()
                weights[name] = (wide + update * 0.05 * wide.norm() / update.norm()).to(dtype)

    found = diff(tmp_path / "a", changed(tmp_path / "a", tmp_path / "b", merge))
    low = found.low_rank
    assert low is not None and (low.matrices, low.unclear, low.rank) == (6, 0, 4)
    assert low.modules == ("attention.q_proj", "attention.v_proj")
    assert {each.reading for each in found.changed} == {"low"}
    # One matrix trained in full is enough to say no.
    edited(tmp_path / "b", lambda w: w["model.layers.1.mlp.up_proj.weight"].mul_(1 + 0.1 * torch.randn(72, 96)))
    assert diff(tmp_path / "a", tmp_path / "b").low_rank is None
    assert diff(tmp_path / "a", tmp_path / "b", rank=False).low_rank is None


def test_some_rows_are_no_adapter(models: Path, tmp_path: Path) -> None:
    other = changed(models / "wide", tmp_path / "b", lambda w: w["model.embed_tokens.weight"][5:7].add_(1))
    found = diff(models / "wide", other)
    (each,) = found.changed
    assert each.figures is not None and each.figures.rows == ((5, 6),) and each.reading is None
    assert found.low_rank is None


def test_groups_sum_up(models: Path, tmp_path: Path) -> None:
    """By module and by layer every tensor is told of once, and the figures are of all that changed there."""
    twice = changed(models / "mixtral", tmp_path / "b", lambda w: [t.mul_(2) for t in w.values()])
    found = diff(models / "mixtral", twice)
    for groups in (found.by_module(), found.by_layer(), found.by_place()):
        assert sum(len(group.tensors) for group in groups) == len(found.tensors)
        assert all(group.relative == pytest.approx(1) and group.cosine == pytest.approx(1) for group in groups)
    modules = {group.name: len(group.tensors) for group in found.by_module()}
    assert modules["feed_forward.experts.up_proj"] == 3 * 4
    assert {each.figures.scale for each in found.changed if each.figures is not None} == {2.0}


def test_json_is_plain(models: Path, tmp_path: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"][3] = math.nan
        weights["model.layers.0.mlp.up_proj.weight"][2, 2] = math.inf
        weights["model.layers.1.mlp.up_proj.weight"][:] = 0

    data = diff(models / "wide", changed(models / "wide", tmp_path / "b", change)).as_json()
    again = json.loads(json.dumps(data, allow_nan=False))
    assert again == data and again["schema_version"] == 1
    tensors = {each["name"]: each for each in again["tensors"]}
    assert tensors["final_norm.weight"]["compared"]["not_finite_b"] == 1
    assert tensors["final_norm.weight"]["compared"]["changed"] == 1
    assert tensors["blocks.1.feed_forward.up_proj.weight"]["compared"]["cosine"] is None
    assert tensors["blocks.1.feed_forward.up_proj.weight"]["compared"]["relative"] == 1
    groups = {each["name"]: each for each in again["modules"]}
    for told in (again, groups["final_norm"], groups["feed_forward.up_proj"]):
        figures = (told["not_finite"], told["relative"], told["max_abs"], told["cosine"])
        assert figures == (True, None, None, None), "no figure covers NaN"
    assert sum(again["counts"].values()) == len(tensors)
    assert all(type(value) is int for value in again["counts"].values())


# --- going wrong ------------------------------------------------------------------------------------------------------


def test_an_error_in_a_thread_ends_it(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Checkpoint.read

    def read(self: Checkpoint, leaf: Any) -> np.ndarray:
        if "h.1.mlp" in leaf.checkpoint:
            raise InvalidInput("it is gone")
        return broken(self, leaf)

    gptkit.convert(models / "gpt2", tmp_path / "b")
    monkeypatch.setattr(Checkpoint, "read", read)
    for workers in (1, 3):
        with pytest.raises(InvalidInput, match="it is gone"):
            diff(models / "gpt2", tmp_path / "b", workers=workers)


def test_an_interruption_ends_it(models: Path, tmp_path: Path) -> None:
    seen = []

    def interrupt(done: int, total: int) -> None:
        seen.append((done, total))
        raise KeyboardInterrupt

    gptkit.convert(models / "gpt2", tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        diff(models / "gpt2", tmp_path / "b", workers=1, progress=interrupt)
    assert len(seen) == 1
    seen.clear()
    diff(models / "gpt2", tmp_path / "b", progress=lambda *each: seen.append(each))
    (total,) = {total for _, total in seen}
    count = sum(each.count for each in gptkit.open_checkpoint(models / "gpt2").spec.parameters())
    assert sum(done for done, _ in seen) == total == 2 * 4 * count


def test_memory_stays_that_of_some_rows(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that were read are let go, and no tensor is ever whole in memory."""
    from gptkit.parity import diff as module
    from gptkit.parity import tensor_diff

    released: list[bool] = []
    monkeypatch.setattr(module, "_MAPPED_BYTES", 4096)
    monkeypatch.setattr(tensor_diff, "CHUNK", 500)
    monkeypatch.setattr(Checkpoint, "release", lambda self: released.append(True))
    wide: list[int] = []
    real = tensor_diff.to_float64

    def widened(array: np.ndarray, dtype: str) -> np.ndarray:
        wide.append(array.size)
        return real(array, dtype)

    monkeypatch.setattr(tensor_diff, "to_float64", widened)
    other = changed(models / "wide", tmp_path / "b", lambda w: [t.mul_(2) for t in w.values()])
    wide.clear()
    found = diff(models / "wide", other)
    assert max(wide) <= 500 and len(released) > 20
    assert found.all.relative == pytest.approx(1) and {e.figures.scale for e in found.changed if e.figures} == {2.0}
