"""Conversion there and back: the bytes that transformers wrote, and checkpoints that transformers reads."""

import itertools
import json
import re
import shutil
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.command import call
from helpers.covering import covered, few, layouts, others_slow, rest_slow, slow_unless_new
from helpers.families import CONFIGS, REPRESENTATIVES, VARIANTS, Variant, edited, modern, randomised_reference, save_hf
from helpers.hubserver import Hub, Repo
from helpers.unknown import composite
from safetensors.torch import load_file, save_file, save_model

from gptkit import params, verify
from gptkit.architectures import ARCHITECTURES, Architecture, architecture_of
from gptkit.architectures.base import CARRIED, OUTSIDE
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert, default_output
from gptkit.converter.manifest import check_manifest
from gptkit.errors import CheckpointError, ConfigError, GptkitError, UsageError
from gptkit.modules.load import load as load_model
from gptkit.parity.outputs import outputs_of
from gptkit.parity.probe import ProbeBatch
from gptkit.parity.sides import auto_class

SHARDED = 20_000  # bytes a file: some ten shards for these models
OLD_FORMS = [variant for variant in VARIANTS if "RefinedWeb" in variant.name]
GRID = [
    pytest.param(
        *(variant, dtype, size),
        id=f"{variant}-{str(dtype).removeprefix('torch.')}-{'shards' if size else 'one'}",
        marks=slow_unless_new(variant.name),
    )
    for variant in VARIANTS
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), (0, SHARDED))
    if variant.representative or (dtype is torch.bfloat16) == bool(size)
]


def raw_tensors(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name -> (dtype, shape, bytes) of all safetensors files, read with nothing but the format's definition."""
    found: dict[str, tuple[str, list[int], bytes]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                assert name not in found
                found[name] = (entry["dtype"], entry["shape"], data[8 + length + begin : 8 + length + end])
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; None takes one out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace a folder's weights."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def reload(folder: Path, like: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """transformers' model of a folder, which must fill every parameter and use every tensor."""
    model, info = auto_class(json.loads((folder / "config.json").read_text())).from_pretrained(
        folder,
        dtype=like.dtype,
        attn_implementation=like.config._attn_implementation,
        output_loading_info=True,
        local_files_only=True,
    )
    assert not any(info.values()), info
    for parameter in model.parameters():  # which lies in the mapped file, where products may sum in another order
        parameter.data = parameter.data.clone()
    return model.eval()


def assert_same_logits(a: torch.nn.Module, b: torch.nn.Module, vocabulary: int = 97) -> None:
    ids = torch.randint(vocabulary, (2, 21), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.equal(outputs_of(a, ProbeBatch("", ids)), outputs_of(b, ProbeBatch("", ids)))


@pytest.fixture
def gpt2(tmp_path: Path) -> tuple[Path, transformers.PreTrainedModel]:
    """A tiny GPT-2 in one file, in a folder of its own."""
    model = save_hf(CONFIGS["gpt2"], tmp_path / "gpt2")
    return tmp_path / "gpt2", model


# --- there and back ---


@covered("variant", "dtype", "size", by=lambda variant, *rest: {*layouts(variant.name), *rest})
@pytest.mark.parametrize(("variant", "dtype", "size"), GRID)
def test_there_and_back(variant: Variant, dtype: torch.dtype, size: int, tmp_path: Path) -> None:
    source, local, back = tmp_path / "source", tmp_path / "local", tmp_path / "back"
    model = save_hf(variant.config, source, dtype, max_shard_size=size or "5GB")
    assert (len(list(source.glob("*.safetensors"))) > 1) == bool(size)

    convert(source, local)
    assert (local / "gptkit.json").is_file() and not (local / "config.json").exists()
    assert check_manifest(local) == []
    convert(local, back, "hf")
    assert check_manifest(back) == []

    assert raw_tensors(back) == raw_tensors(source)
    if not size:
        assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    if variant.config.get("text_config") is None:
        assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
    if modern(variant.config) == variant.config:
        # Products of experts may round otherwise where these lie otherwise in memory, as in the model that was saved.
        model, readable = reload(source, model), back
    else:
        readable = tmp_path / "standard"
        convert(local, readable, f"hf:{variant.family}")
    assert_same_logits(model, reload(readable, model))


@pytest.mark.parametrize("kind", [kind for family in ARCHITECTURES.values() for kind in family.model_types])
def test_a_config_comes_back_under_every_model_type_of_a_family(kind: str) -> None:
    """The tree that the config describes is written with the same config, whatever the family is called there."""
    family = architecture_of({"model_type": kind})
    config = {**REPRESENTATIVES[family.name].config, "model_type": kind, "transformers_version": "4.0"}
    if kind != family.name and family.part:
        config = {"model_type": kind, family.part: config}
    spec = family.spec(config)
    composite = kind != family.name and bool(family.part)
    assert family.export_config(spec, config, whole=composite) is None
    standard = family.export_config(spec, config, standard=True)
    assert (standard is None) == (kind == family.name)
    assert standard is None or standard["model_type"] == family.name


@pytest.mark.parametrize("variant", OLD_FORMS, ids=str)
def test_old_falcons_are_written_as_falcons_where_that_is_asked(variant: Variant, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    model = save_hf(variant.config, source)
    edit_config(
        source,
        auto_map={"AutoConfig": "configuration_RW.RWConfig"},
        architectures=["RWForCausalLM"],
        torch_dtype="bfloat16",
        bos_token_id=7,
    )
    convert(source, back, "hf:falcon")

    config = json.loads((back / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("falcon", ["FalconForCausalLM"])
    assert "auto_map" not in config and "n_layer" not in config and "torch_dtype" not in config
    assert config["bos_token_id"] == 7, "what does not describe the tree is kept"
    assert config["dtype"] == "float32", "what is stored, not what the old file claimed"
    assert type(transformers.AutoConfig.from_pretrained(back)).__name__ == "FalconConfig"
    assert_same_logits(model, reload(back, model))


def test_straight_to_hf_is_the_same_files(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    convert(gpt2[0], tmp_path / "again", "hf")
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (gpt2[0] / name).read_bytes()


def test_local_of_local_is_the_same_but_for_its_manifest(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    convert(gpt2[0], tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "two")
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one.pop("manifest.json") and two.pop("manifest.json")
    assert one == two


def test_another_family_that_can_hold_the_tree(tmp_path: Path) -> None:
    model = save_hf(CONFIGS["mistral-no-window"], tmp_path / "mistral")
    convert(tmp_path / "mistral", tmp_path / "llama", "hf:llama")
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["model_type"] == "llama"
    assert raw_tensors(tmp_path / "llama") == raw_tensors(tmp_path / "mistral")
    assert_same_logits(model, reload(tmp_path / "llama", model))


def test_mixed_dtypes_stay_as_they_are(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    source, model = gpt2
    rewrite(
        source,
        {
            name: t.bfloat16() if "attn" in name else t
            for name, t in model.state_dict().items()
            if name != "lm_head.weight"
        },
    )
    convert(source, tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "back", "hf")
    assert {dtype for dtype, _, _ in raw_tensors(source).values()} == {"BF16", "F32"}
    assert raw_tensors(tmp_path / "back") == raw_tensors(source)


def test_one_weight_file_of_a_gptkit_folder_can_be_named(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    convert(gpt2[0], tmp_path / "local")
    assert open_checkpoint(tmp_path / "local" / "model.safetensors").format == "local"
    # Both descriptions in one folder: the weights' names are those of gptkit.json.
    shutil.copy(gpt2[0] / "config.json", tmp_path / "local")
    convert(tmp_path / "local" / "model.safetensors", tmp_path / "back", "hf")
    assert raw_tensors(tmp_path / "back") == raw_tensors(gpt2[0])


def test_config_text_survives_in_every_detail(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    source = gpt2[0]
    text = (source / "config.json").read_text().replace("\n", "\r\n").replace("{", '{ "note": "ß\\ud800\\u00e9 💾",', 1)
    (source / "config.json").write_bytes(text.encode())
    convert(source, tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "back", "hf")
    assert (tmp_path / "back" / "config.json").read_bytes() == text.encode()


def test_half_a_surrogate_pair_in_a_config_that_is_rewritten(tmp_path: Path) -> None:
    save_hf(OLD_FORMS[0].config, tmp_path / "source")
    edit_config(tmp_path / "source", note="\ud800")
    convert(tmp_path / "source", tmp_path / "back", "hf:falcon")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["note"] == "\ud800"


# --- names that older files have ---


def test_names_without_their_prefix(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    source, model = gpt2
    rewrite(source, {name.removeprefix("transformer."): t for name, t in model.transformer.state_dict().items()})
    expected = raw_tensors(source)
    convert(source, tmp_path / "back", "hf")
    assert raw_tensors(tmp_path / "back") == expected
    assert_same_logits(model, reload(tmp_path / "back", model))


def test_gamma_and_beta(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    source, model = gpt2

    def old(name: str) -> str:
        if ".ln_" not in name:
            return name
        return name.replace(".weight", ".gamma").replace(".bias", ".beta").removeprefix("transformer.")

    rewrite(source, {old(name): t for name, t in model.state_dict().items() if name != "lm_head.weight"})
    convert(source, tmp_path / "local")
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, load_model(tmp_path / "local")(ids))
    convert(tmp_path / "local", tmp_path / "back", "hf")
    assert raw_tensors(tmp_path / "back") == raw_tensors(source)


@few(4)
@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_what_older_files_hold_beside_the_weights_is_left_out_and_told(family: str, tmp_path: Path) -> None:
    """Buffers, and a head that is tied all the same."""
    config = REPRESENTATIVES[family].config
    architecture = architecture_of(config)
    save_hf(config, tmp_path / "source")
    expected = raw_tensors(tmp_path / "source")
    names = [each for template in architecture.dropped if (each := template.format(layer=1)) not in expected]
    more = {name: torch.ones(5, dtype=torch.uint8) for name in names}
    if architecture.spec(config).head.tied:
        table = next(
            leaf.checkpoint
            for leaf in architecture.bind(architecture.spec(config))
            if leaf.shared[0] == "embedding.weight"
        )
        more[architecture.head] = load_file(tmp_path / "source" / "model.safetensors")[table]
    edited(tmp_path / "source", lambda weights: weights.update({name: each.clone() for name, each in more.items()}))
    conversion = convert(tmp_path / "source", tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "back", "hf")
    assert raw_tensors(tmp_path / "back") == expected
    told = " ".join(conversion.source.notes)
    assert told.count("…") or all(name in told for name in more)


@few(2)
@pytest.mark.parametrize("size", ["5GB", SHARDED], ids=["one", "shards"])
@pytest.mark.parametrize("family", [each.name for each in ARCHITECTURES.values() if each.stacked or each.aliases])
def test_tensors_as_transformers_modules_hold_them_come_back_file_for_file(
    family: str, size: str | int, tmp_path: Path
) -> None:
    """Experts in one tensor, and today's names where files have older ones: what transformers reads beside its own."""
    config = REPRESENTATIVES[family].config
    attention = architecture_of(config).reference(architecture_of(config).spec(config))[0]
    model = randomised_reference(config, attention=attention)
    model.save_pretrained(tmp_path / "hf", max_shard_size=size, save_original_format=False)
    assert raw_tensors(tmp_path / "hf").keys() <= model.state_dict().keys()
    convert(tmp_path / "hf", tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "back", "hf")
    assert contents(tmp_path / "hf").items() <= contents(tmp_path / "back").items()
    verified = verify(tmp_path / "hf", tmp_path / "local", mutations=False)
    assert verified.passed


def test_a_buffer_of_a_layer_that_is_not_there_is_no_buffer(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    rewrite(
        gpt2[0],
        {**gpt2[1].state_dict(), "transformer.h.3.attn.bias": torch.ones(8, 8)} | {"lm_head.weight": torch.ones(1)},
    )
    with pytest.raises(CheckpointError, match=r"transformer\.h\.3\.attn\.bias"):
        convert(gpt2[0], tmp_path / "back", "hf")


# --- a tied head that was stored ---


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_a_stored_tied_head_is_kept_once(prefix: str, gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    source, model = gpt2
    expected = raw_tensors(source)
    # Without the prefix the head comes before the embedding in the file.
    rewrite(source, {n.replace("transformer.", prefix): t.clone() for n, t in model.state_dict().items()})
    assert "lm_head.weight" in raw_tensors(source)
    conversion = convert(source, tmp_path / "back", "hf")
    assert raw_tensors(tmp_path / "back") == expected
    assert any("lm_head.weight" in note and "stored only once" in note for note in conversion.source.notes)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("change", ["value", "sign of zero", "dtype", "shape"])
def test_a_stored_tied_head_of_other_values_is_refused(
    prefix: str, change: str, gpt2: tuple[Path, Any], tmp_path: Path
) -> None:
    source, model = gpt2
    state = {n.replace("transformer.", prefix): t.clone() for n, t in model.state_dict().items()}
    state[f"{prefix}wte.weight"][96, 47] = 0.0
    head = state[f"{prefix}wte.weight"].clone()
    if change == "dtype":
        head = head.bfloat16()
    elif change == "shape":
        head = head[:-1]
    else:
        head[96, 47] = 1e-30 if change == "value" else -0.0
    rewrite(source, {**state, "lm_head.weight": head})
    with pytest.raises(CheckpointError, match="ties the head to the embedding") as caught:
        convert(source, tmp_path / "back", "hf")
    assert "tie_word_embeddings" in str(caught.value)
    assert not (tmp_path / "back").exists()


def test_a_tied_head_in_the_embeddings_place(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    """safetensors' save_model keeps the name that sorts first, and transformers ties the other to it."""
    source, model = gpt2
    before = (source / "model.safetensors").read_bytes()
    save_model(model, str(source / "model.safetensors"), {"format": "pt"})
    names = raw_tensors(source)
    assert "lm_head.weight" in names and "transformer.wte.weight" not in names
    assert_same_logits(model, reload(source, model))
    conversion = convert(source, tmp_path / "back", "hf")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == before
    assert any("lm_head.weight" in note for note in conversion.source.notes)


def test_nan_in_a_stored_tied_head_equals_itself(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    source, model = gpt2
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in ("lm_head.weight", "transformer.wte.weight"):
        state[name][3, 3] = torch.nan
    rewrite(source, state)
    convert(source, tmp_path / "back", "hf")


# --- shards ---


@few(4)
@pytest.mark.parametrize("variant", rest_slow(REPRESENTATIVES.values()))
def test_shards_that_transformers_reads(variant: Variant, tmp_path: Path) -> None:
    model = save_hf(variant.config, tmp_path / "source")
    for to, name in (("local", "local"), ("hf", "back")):
        conversion = convert(tmp_path / "source", tmp_path / name, to, max_shard_bytes=SHARDED)
        written = sorted(path.name for path in (tmp_path / name).glob("*.safetensors"))
        assert [shard.name for shard in conversion.plan.shards] == written
        assert len(written) > 2
        assert all(shard.nbytes <= SHARDED or len(shard.outputs) == 1 for shard in conversion.plan.shards)
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        tensors = raw_tensors(tmp_path / name)
        assert index["weight_map"].keys() == tensors.keys()
        assert set(index["weight_map"].values()) == set(written)
        assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())
        assert check_manifest(tmp_path / name) == []
    assert raw_tensors(tmp_path / "back") == raw_tensors(tmp_path / "source")
    assert_same_logits(model, reload(tmp_path / "back", model))
    convert(tmp_path / "local", tmp_path / "one", "hf")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "source" / "model.safetensors"
    ).read_bytes()


@few(4)
@pytest.mark.parametrize("name", others_slow(CONFIGS))
def test_shards_come_back_as_the_same_files(name: str, tmp_path: Path) -> None:
    """As the source was sharded unless told otherwise; told its size, by transformers' own rule and order."""
    randomised_reference(CONFIGS[name], torch.float32, "eager").save_pretrained(
        tmp_path / "source", max_shard_size=40_000
    )
    convert(tmp_path / "source", tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "back", "hf")
    convert(tmp_path / "local", tmp_path / "again", "hf", max_shard_bytes=40_000)
    before = contents(tmp_path / "source")
    assert len([path for path in before if path.endswith(".safetensors")]) >= 3
    # What transformers holds in one parameter and writes as several tensors it never deals out over two shards.
    stacked = architecture_of(CONFIGS[name]).stacked
    for folder in ("back",) if stacked else ("back", "again"):
        after = contents(tmp_path / folder)
        assert after.pop("manifest.json")
        assert after == before


def test_files_that_no_tool_of_today_writes_come_back_too(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    """A header in another order, with its own metadata and padding, in a file of another name."""
    source, _ = gpt2
    path = source / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    entries["__metadata__"] = {"format": "pt", "made by": "hand, \N{SNOWMAN}"}
    header = json.dumps(dict(reversed(entries.items())), indent=1, ensure_ascii=False).encode() + b" " * 5
    path.unlink()
    (source / "weights.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    convert(source, tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "back", "hf")
    assert (tmp_path / "back" / "weights.safetensors").read_bytes() == (source / "weights.safetensors").read_bytes()


def as_mlx(source: Path, name: str) -> dict[str, bytes]:
    """A folder as MLX writes one: its own metadata, a header that is not padded, and an index beside one file."""
    raw = (source / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps({**json.loads(raw[8 : 8 + length]), "__metadata__": {"format": "mlx"}}).encode()
    (source / "model.safetensors").unlink()
    (source / name).write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    names = [key for key in json.loads(header) if key != "__metadata__"]
    index = {"metadata": {"total_size": len(raw)}, "weight_map": dict.fromkeys(sorted(names), name)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
    return contents(source)


@pytest.mark.parametrize("where", ["here", "on the hub"])
@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_an_index_of_a_single_file_comes_back(
    name: str, where: str, gpt2: tuple[Path, Any], hub: Hub, tmp_path: Path
) -> None:
    before = as_mlx(gpt2[0], name)
    hub.repos["org/mlx"] = Repo(before)
    source = gpt2[0] if where == "here" else "org/mlx"
    dry = convert(source, tmp_path / "dry", "hf", dry_run=True).plan
    assert {shard.name for shard in dry.shards} | dry.texts.keys() >= {name, "model.safetensors.index.json"}
    convert(source, tmp_path / "straight", "hf")
    convert(source, tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "back", "hf")
    for folder in ("straight", "back"):
        after = contents(tmp_path / folder)
        assert after.pop("manifest.json") and after == before


def test_an_index_of_other_files_is_not_taken_along(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    source, _ = gpt2
    for number, text in enumerate(("{}", "no index", json.dumps({"weight_map": {"x": "model.safetensors"}}))):
        (source / "model.safetensors.index.json").write_text(text)
        convert(source, tmp_path / f"{number}", "hf")
        assert not (tmp_path / f"{number}" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/tmp/model.safetensors", "gptkit.json", "a\\b.safetensors", ""]
)
def test_a_tampered_record_of_the_original_files_leads_nowhere(
    name: str, gpt2: tuple[Path, Any], tmp_path: Path
) -> None:
    convert(gpt2[0], tmp_path / "local")
    data = json.loads((tmp_path / "local" / "gptkit.json").read_text())
    data["origin"]["files"] = {name: data["origin"]["files"]["model.safetensors"]}
    (tmp_path / "local" / "gptkit.json").write_text(json.dumps(data))
    convert(tmp_path / "local", tmp_path / "out" / ".." / "back", "hf")
    assert raw_tensors(tmp_path / "back") == raw_tensors(gpt2[0])
    assert sorted(path.name for path in (tmp_path / "back").glob("*.safetensors")) == ["model.safetensors"]


# --- outputs ---


@pytest.mark.parametrize(
    ("reference", "to", "expected"),
    [
        ("gpt2", "local", "gpt2-local"),
        ("org/gpt2@main", "local", "gpt2-local"),
        ("hf://org/gpt2", "hf", "gpt2-hf"),
        ("sample:gpt2", "hf:llama", "gpt2-hf-llama"),
        ("./some/gpt2/", "local", "gpt2-local"),
        ("gpt2-local", "hf", "gpt2-hf"),
        ("/a/b/model.safetensors", "local", "model-local"),
        ("llama-3.1-8b", "local", "llama-3.1-8b-local"),
        ("/", "local", "model-local"),
    ],
)
def test_default_output(reference: str, to: str, expected: str) -> None:
    assert default_output(reference, to) == Path(expected)


@pytest.mark.parametrize(("reference", "expected"), [(".", "here-local"), ("./", "here-local"), ("..", "above-local")])
def test_default_output_of_a_folder_that_does_not_say_its_name(
    reference: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "above" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "above" / "here")
    assert default_output(reference, "local") == Path(expected)


def test_the_default_output_lies_in_the_working_directory(
    gpt2: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    convert(gpt2[0])
    assert [path.name for path in Path().iterdir()] == ["gpt2-local"]


def test_an_existing_output_is_refused_and_left_alone(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    convert(gpt2[0], tmp_path / "out")
    before = contents(tmp_path)
    for to in ("local", "hf"):
        with pytest.raises(UsageError, match="exists") as caught:
            convert(gpt2[0], tmp_path / "out", to)
        assert caught.value.exit_code == 2
    assert contents(tmp_path) == before


def test_an_existing_output_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    """Which may be a download of gigabytes."""
    (tmp_path / "out").mkdir()
    for out, to, message in (
        (tmp_path / "out", "local", "exists"),
        (tmp_path / "no" / "out", "local", "does not exist"),
        (tmp_path / "new", "onnx", "unknown format"),
        (tmp_path / "new", "hf:", "unknown format"),
    ):
        with pytest.raises(UsageError, match=message):
            convert("no-such-org/no-such-model", out, to, offline=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_replaces(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "out")
    (tmp_path / "out" / "stray.txt").write_text("old")
    convert(gpt2[0], tmp_path / "out", force=True)
    assert check_manifest(tmp_path / "out") == []
    assert (tmp_path / "out" / "stray.txt").read_text() == "old"
    assert not (tmp_path / "out" / "config.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2", "out"]


def test_force_in_place(gpt2: tuple[Path, Any]) -> None:
    """The source is read while its folder is replaced in one step at the end."""
    source = gpt2[0]
    before = contents(source)
    convert(source, source, force=True)
    convert(source, source, "hf", force=True)
    after = contents(source)
    assert after.pop("manifest.json")
    assert after == before


def test_force_with_a_bad_source_leaves_the_old_output(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    convert(gpt2[0], tmp_path / "out")
    before = contents(tmp_path / "out")
    edit_config(gpt2[0], n_layer=2)
    with pytest.raises(CheckpointError):
        convert(gpt2[0], tmp_path / "out", force=True)
    assert contents(tmp_path / "out") == before


def test_a_failure_half_way_leaves_nothing(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    def full(nbytes: int) -> None:
        raise GptkitError("the disk is full")

    before = contents(tmp_path)
    with pytest.raises(GptkitError, match="full"):
        convert(gpt2[0], tmp_path / "out", progress=full)
    assert contents(tmp_path) == before


def test_dry_run_writes_nothing_and_reads_no_weights(
    gpt2: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: Any) -> np.ndarray:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("gptkit.converter.weights.Weights.read", unreadable)
    before = contents(tmp_path)
    planned = convert(gpt2[0], tmp_path / "no" / "such" / "parent", dry_run=True)
    assert contents(tmp_path) == before
    assert not planned.published
    monkeypatch.undo()
    done = convert(gpt2[0], tmp_path / "out")
    assert done.published
    assert done.plan.shards == planned.plan.shards and done.plan.texts == planned.plan.texts
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    del written["manifest.json"]
    assert planned.plan.nbytes == sum(written.values())
    assert {shard.name: shard.size for shard in planned.plan.shards}.items() <= written.items()
    assert planned.plan.largest == max(len(data) for _, _, data in raw_tensors(tmp_path / "out").values())


def test_progress_adds_up(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    told: list[int] = []
    done = convert(gpt2[0], tmp_path / "out", progress=told.append)
    assert sum(told) == sum(shard.nbytes for shard in done.plan.shards)


def test_what_travels_with_the_weights(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    source = gpt2[0]
    files = {
        "tokenizer.json": b'{"version":"1.0"}\r\n\x00',
        "tokenizer_config.json": b"{}",
        "generation_config.json": b'{ "eos_token_id" : 5 }',
        "chat_template.jinja": "{{ naïve }}".encode(),
        "vocab.json": b"{",
        "merges.txt": b"#version: 0.2\n",
        "LICENSE.txt": b"\xff\xfe",
    }
    stays = {
        "README.md": b"x",
        "modeling_gpt2.py": b"x",
        "tokenizer.py": b"x",
        "optimizer.pt": b"x",
        "notes.json": b"x",
    }
    for name, data in {**files, **stays}.items():
        (source / name).write_bytes(data)
    (source / "tokenizer.json").chmod(0o600)
    convert(source, tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "back", "hf")
    for folder, description in ((tmp_path / "local", "gptkit.json"), (tmp_path / "back", "config.json")):
        assert {path.name for path in folder.iterdir()} == {*files, description, "model.safetensors", "manifest.json"}
        for name, data in files.items():
            assert (folder / name).read_bytes() == data


def test_every_registered_family_is_tried() -> None:
    assert {architecture_of(variant.config).name for variant in VARIANTS} == set(REPRESENTATIVES)


# --- a base model alone -----------------------------------------------------------------------------------------------


def has_a_head_of_its_own(family: str) -> bool:
    """Whether a family ties no head, or has a bias in it."""
    config = {**REPRESENTATIVES[family].config, "tie_word_embeddings": True}
    try:
        return any(each.name.startswith("head.") for each in architecture_of(config).spec(config).parameters())
    except ConfigError:
        return True


@few(2)
@pytest.mark.parametrize("size", ["5GB", SHARDED], ids=["one", "shards"])
@pytest.mark.parametrize("family", [family for family in REPRESENTATIVES if not has_a_head_of_its_own(family)])
def test_a_base_model_alone_comes_back_file_for_file(family: str, size: str | int, tmp_path: Path) -> None:
    """Its names have no prefix, and there is no head."""
    config = {**REPRESENTATIVES[family].config, "tie_word_embeddings": True}
    attention = architecture_of(config).reference(architecture_of(config).spec(config))[0]
    model = randomised_reference(config, attention=attention)
    base, nameless = model.base_model, False
    if base is model and (nameless := hasattr(model, "model")):  # Llama 4's text alone: no prefix to look behind
        base = model.model
    elif base is model:  # T5's base model is a class beside this one, with modules of the same names
        base = transformers.AutoModel.from_config(model.config)
        base.load_state_dict(model.state_dict(), strict=False)
    base.save_pretrained(tmp_path / "hf", max_shard_size=size)
    names = set(raw_tensors(tmp_path / "hf"))
    assert not any(name.startswith(("model.", "transformer.", "lm_head")) for name in names)
    convert(tmp_path / "hf", tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "back", "hf")
    before, after = contents(tmp_path / "hf"), contents(tmp_path / "back")
    assert before == {name: data for name, data in after.items() if name != "manifest.json"}
    batch = ProbeBatch("", torch.arange(9)[None])
    with torch.no_grad():
        if nameless:
            again: Any = load_model(tmp_path / "back", attention=attention)
        else:
            again = reload(tmp_path / "back", model)
        assert torch.equal(outputs_of(again, batch), outputs_of(model, batch))


def test_old_names_come_back(tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    old = {name.replace("ln_1.weight", "ln_1.gamma"): array for name, array in load_file(path).items()}
    rewrite(tmp_path / "hf", old)
    convert(tmp_path / "hf", tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "back", "hf")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == path.read_bytes()


def test_a_base_model_whose_head_is_its_own_lacks_it(tmp_path: Path) -> None:
    randomised_reference(CONFIGS["llama"]).base_model.save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="lm_head") as caught:
        convert(tmp_path / "hf", tmp_path / "local")
    assert "A base model has no head" in str(caught.value)


# --- what is carried along --------------------------------------------------------------------------------------------

DRAFTS = {family.name: family.carried["mtp"] for family in ARCHITECTURES.values() if "mtp" in family.carried}
BESIDE = [(family.name, group) for family in ARCHITECTURES.values() for group in family.carried if group != "mtp"]
COMPOSITES = {
    family.model_types[-1]: family for family in ARCHITECTURES.values() if not {*OUTSIDE}.isdisjoint(family.carried)
}


def computed_all_the_same(
    architecture: Architecture, config: Mapping[str, Any], stored: Mapping[str, torch.Tensor], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Of what no layer reads the tensors that transformers computes with where files hold them, as they must be."""
    own = {name: stored[first].clone() for name, first in architecture.repeated.items() if first in stored}
    own |= {name: torch.tensor(make(architecture.spec(config))).float() for name, make in architecture.computed.items()}
    return {name: each for name, each in own.items() if name in names}


ALTERED = [
    (family.name, name)
    for family in ARCHITECTURES.values()
    for name in (*family.repeated, *family.computed)
    if name in family.carried.get("unused", ())
]


@few(3)
@pytest.mark.parametrize(("family", "name"), ALTERED)
def test_a_copy_with_other_values_is_refused(family: str, name: str, tmp_path: Path) -> None:
    """transformers takes it apart from what it is tied to, or in place of what it makes of the config."""
    architecture, config = ARCHITECTURES[family], CONFIGS[family]
    reference = save_hf(config, tmp_path)
    right = computed_all_the_same(architecture, config, load_file(tmp_path / "model.safetensors"), [name])
    edited(tmp_path, lambda weights: weights.update(right))
    assert verify(tmp_path, mutations=False).verdict == "identical"
    edited(tmp_path, lambda weights: weights.update({name: weights[name].flip(0).clone()}))
    again = type(reference).from_pretrained(tmp_path, attn_implementation="eager").eval()
    batch = ProbeBatch("", torch.arange(1, 9)[None])
    with torch.inference_mode():
        assert (outputs_of(again, batch) - outputs_of(reference, batch)).abs().max() > 1e-3
    with pytest.raises(CheckpointError, match=f"from those that follow from config.json: {re.escape(name)}"):
        convert(tmp_path, tmp_path / "out")


@few(2)
@pytest.mark.parametrize(("family", "group"), BESIDE)
def test_what_no_layer_reads_is_carried_there_and_back_unless_dropped(family: str, group: str, tmp_path: Path) -> None:
    """Whatever its type is, under each of the names that it may have; a float of another type is cast where asked."""
    architecture = ARCHITECTURES[family]
    shared = CONFIGS.get(f"{family}-shared", CONFIGS[family])
    config = shared if group == "unused" else CONFIGS[family]
    save_hf(config, tmp_path / "hf")
    text = raw_tensors(tmp_path / "hf")
    last = len(architecture.spec(config).blocks) - 1
    names = [template.format(layer=last) for template in architecture.carried[group]]
    names = [name + "0.weight" if name.endswith(".") else name for name in names]
    assert not {*names} & {*text}
    more = {name: torch.full((2, 3), number, dtype=torch.int64) for number, name in enumerate(names)}
    more |= {f"{names[0]}_scale": torch.rand(3)}
    kinds = dict.fromkeys(names, "I64") | {f"{names[0]}_scale": "BF16"}
    read = computed_all_the_same(architecture, config, load_file(tmp_path / "hf" / "model.safetensors"), names)
    more, kinds = more | read, kinds | dict.fromkeys(read, "BF16")
    edited(tmp_path / "hf", lambda weights: weights.update(more))
    done = convert(tmp_path / "hf", tmp_path / "local")
    assert any(f"({group})" in note and CARRIED[group] in note for note in done.source.notes)
    convert(tmp_path / "local", tmp_path / "back", "hf")
    assert raw_tensors(tmp_path / "back") == raw_tensors(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "without", "hf", drop=[group])
    assert raw_tensors(tmp_path / "without") == text
    with pytest.raises(UsageError, match=r"--drop 'sight': .* has no tensors of this group"):
        convert(tmp_path / "hf", tmp_path / "never", drop=["sight"])
    half = convert(tmp_path / "hf", tmp_path / "half", "hf", dtype="bfloat16")
    assert {name: raw_tensors(tmp_path / "half")[name][0] for name in more} == kinds
    assert half.source.carried.keys() == {group}


@few(1)
@pytest.mark.parametrize("family", COMPOSITES)
@pytest.mark.parametrize("edit", [None, "dtype", "shards"])
def test_a_composite_model_comes_back_whole(family: str, edit: str | None, tmp_path: Path) -> None:
    """As transformers saves it; and where its files are others, a composite that transformers loads without a word."""
    if family == "gemma3n":
        pytest.importorskip("timm", reason="transformers looks at images with it")
    model = composite(family)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "local")
    how = {None: {}, "dtype": {"dtype": "float64"}, "shards": {"max_shard_bytes": SHARDED}}[edit]
    convert(tmp_path / "local", tmp_path / "back", "hf", **how)
    if edit is None:
        assert contents(tmp_path / "hf").items() <= contents(tmp_path / "back").items()
    again, info = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(
        torch.equal(x.double(), y.double())
        for x, y in zip(again.state_dict().values(), model.state_dict().values(), strict=True)
    )
    convert(tmp_path / "local", tmp_path / "text", "hf", drop=open_checkpoint(tmp_path / "local").carried.keys())
    reload(tmp_path / "text", transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text"))


def test_what_drafts_tokens_is_what_transformers_drops() -> None:
    """Its classes name the layer behind the last of released models by its number (`layers.61`), or what is in it."""
    dropping = set()
    for family in ARCHITECTURES.values():
        module = sys.modules[getattr(transformers, family.hf_class).__module__]
        classes = [each for name, each in vars(module).items() if name.endswith("PreTrainedModel")]
        dropped = [each for kind in classes for each in kind._keys_to_ignore_on_load_unexpected or ()]
        dropping |= {family.name for each in dropped if "mtp" in each or "layers" in each}
    assert dropping == set(DRAFTS)


@few(2)
@pytest.mark.parametrize(
    ("family", "base"),
    [
        pytest.param(family, base, id=f"{family}-{'base model' if base else 'whole'}")
        for family in DRAFTS
        for base in (False, True)
        if not base or not has_a_head_of_its_own(family)
    ],
)
def test_what_drafts_tokens_is_carried_there_and_back_and_told(family: str, base: bool, tmp_path: Path) -> None:
    """As `layers.61` of DeepSeek-V3; what is further behind has no place."""
    config = CONFIGS[family] | {"tie_word_embeddings": base}
    model = save_hf(config, tmp_path / "hf")
    if base:
        model.base_model.save_pretrained(tmp_path / "hf")
    layers = len(architecture_of(config).spec(config).blocks)
    name = DRAFTS[family][0].format(next=layers) + "eh_proj.weight"
    name = name.removeprefix("model.") if base else name
    edited(tmp_path / "hf", lambda weights: weights.update({name: torch.randn(48, 96).bfloat16()}))
    convert(tmp_path / "hf", tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "back", "hf")
    assert contents(tmp_path / "hf").items() <= contents(tmp_path / "back").items()
    for folder in ("hf", "local"):
        checkpoint = open_checkpoint(tmp_path / folder)
        (note,) = checkpoint.notes
        assert note.startswith("4,608 parameters that draft tokens (multi-token prediction)")
        assert not any("eh_proj" in parameter.name for parameter in checkpoint.spec.parameters())
        (counted,) = params(tmp_path / folder, stored=True)
        assert note in counted.notes and counted.stored is not None
        assert counted.stored.dtypes["BF16"]["parameters"] == 4608
    assert note in params(tmp_path / "hf")[0].notes
    assert verify(tmp_path / "hf", tmp_path / "local", mutations=False).passed
    edited(tmp_path / "back", lambda weights: weights.update({name: torch.zeros(48, 96).bfloat16()}))
    failed = verify(tmp_path / "hf", tmp_path / "back", mutations=False)
    assert not failed.passed and len(failed.bytes.different) == 1
    if "{next}" in DRAFTS[family][0]:
        further = name.replace(f".{layers}.", f".{layers + 1}.").replace(f"layers.{layers}.", f"layers.{layers + 1}.")
        edited(tmp_path / "hf", lambda weights: weights.update({further: torch.ones(48, 96)}))
        with pytest.raises(CheckpointError, match="no place in the model"):
            open_checkpoint(tmp_path / "hf")


def test_a_swap_tells_what_it_leaves_out(tmp_path: Path) -> None:
    save_hf(CONFIGS["deepseek_v3-dense"], tmp_path / "hf")
    edited(tmp_path / "hf", lambda weights: weights.update({"model.layers.2.eh_proj.weight": torch.ones(48, 96)}))
    said = call("swap", tmp_path / "hf", tmp_path / "out", "--norm", "layernorm", "--dry-run")
    assert said.exit_code == 0, said.stderr
    told = " ".join((said.stdout + said.stderr).split())
    assert "left out: 4,608 parameters that draft tokens (multi-token prediction)" in told


def test_another_family_has_no_place_for_what_drafts_tokens(tmp_path: Path) -> None:
    save_hf(CONFIGS["deepseek_v3-dense"], tmp_path / "hf")
    edited(tmp_path / "hf", lambda weights: weights.update({"model.layers.2.eh_proj.weight": torch.ones(48, 96)}))
    done = convert(tmp_path / "hf", tmp_path / "youtu", "hf:youtu")
    assert (
        done.source.notes[-1]
        == "left out, because hf:youtu cannot store them: the tensors that draft tokens (multi-token prediction)"
    )
    assert open_checkpoint(tmp_path / "youtu").carried == {}
