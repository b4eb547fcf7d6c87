"""The presets: each is a config.json that gptkit and transformers read alike, and each can be found by its names."""

import json
from pathlib import Path

import pytest
from helpers.covering import few
from helpers.processes import imported

from gptkit.analysis.parameters import count
from gptkit.architectures import ARCHITECTURES, architecture_of
from gptkit.architectures.presets import PATH, Preset, find, nearest, presets, repo_of
from gptkit.parity.sides import auto_class
from gptkit.testing import stored

UNKNOWN_FIELDS = {"max_sequence_length"}
"""In huggyllama's config.json files, a copy of max_position_embeddings that nothing reads."""

PUBLISHED = {
    # As the hub counts the stored tensors, tied ones once.
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "bloom-560m": 559_214_592,
    "bloom-176b": 176_247_271_424,
    "falcon-7b": 6_921_720_704,
    "mixtral-8x7b": 46_702_792_704,
    "codellama-70b": 68_976_910_336,
    "open-llama-3b": 3_426_473_600,
    "solar-10.7b": 10_731_524_096,
    "deepseek-coder-33b": 33_342_991_360,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "moonlight-16b-a3b": 15_960_110_208,
    "falcon3-7b": 7_455_550_464,
    "qwen1.5-0.5b": 463_987_712,
    "qwen1.5-72b": 72_287_920_128,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "olmoe-1b-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "dbrx": 131_596_523_520,
    "lfm2-350m": 354_483_968,
    "lfm2-1.2b": 1_170_340_608,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "recurrentgemma-2b": 2_682_862_080,
    "rwkv-4-169m": 169_342_464,
    "rwkv-4-7b": 7_392_649_216,
    "mamba-2.8b": 2_768_345_600,
    "falcon-mamba-7b": 7_272_665_088,
    "jamba-v0.1": 51_570_323_328,
    "all-minilm-l6-v2": 22_713_216,
    "roberta-base": 124_697_433,
    "distilbert-base-uncased": 66_985_530,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "flan-t5-small": 76_961_152,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "flan-t5-base": 247_577_856,
}

every_preset = pytest.mark.parametrize("preset", presets().values(), ids=presets())


@few(6)
@every_preset
def test_parameters_are_those_of_the_transformers_model(preset: Preset, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig
    from transformers.core_model_loading import revert_weight_conversion

    (tmp_path / "config.json").write_text(json.dumps(preset.config))
    with torch.device("meta"):
        model = auto_class(preset.config).from_config(AutoConfig.from_pretrained(tmp_path))
    spec = architecture_of(preset.config).spec(preset.config)
    if spec.encoder is not None and not spec.tied:  # T5's class ties every head until files hold another
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    # Modules may hold several tensors in one. What the choice of experts is biased with is a buffer there.
    state = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in state}
    if spec.encoder is not None:  # bart-base's files have no bias of logits, which its class with one takes for zeros
        own = {leaf.checkpoint for leaf in architecture_of(preset.config).bind(spec)}
        buffers = {name: buffer for name, buffer in buffers.items() if name in own}
    every = dict(model.named_parameters(remove_duplicate=False))
    named = revert_weight_conversion(model, every | buffers)
    theirs = {name: tuple(parameter.shape) for name, parameter in named.items()}

    architecture = architecture_of(preset.config)
    placed = stored(architecture, spec, theirs)
    assert {leaf.checkpoint: leaf.shape for leaf in architecture.bind(spec)} == placed
    biased = sum(buffer.numel() for buffer in buffers.values())
    # Sines and cosines, which are no tensors of a file.
    biased -= sum(each.numel() for name, each in named.items() if not each.requires_grad and name not in placed)
    assert count(spec).total == model.num_parameters() + biased
    # A tied head is the embedding's parameter under a second name, and in neither count.
    twice = sum(parameter.numel() for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = spec.vocab_size * (spec.embedding.width or spec.hidden_size) if spec.tied else 0
    tied += sum(every[name].numel() for name in architecture.repeats(spec) if name in every)
    assert twice + biased == count(spec).total + tied
    if spec.head is not None:
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == spec.tied
    assert type(model).__name__ == architecture.class_of(spec)
    assert preset.config["architectures"] == [architecture.class_of(spec)] or spec.encoder is not None


@every_preset
def test_every_field_is_known(preset: Preset) -> None:
    _, unknown = architecture_of(preset.config).spec_and_unknown(preset.config)
    assert set(unknown) <= UNKNOWN_FIELDS


@few(20)
@every_preset
def test_the_tree_goes_back_into_a_config(preset: Preset) -> None:
    architecture = architecture_of(preset.config)
    spec = architecture.spec(preset.config)
    assert architecture.spec(architecture.config_for(spec)) == spec


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_published_totals(name: str, total: int) -> None:
    assert count(spec_of(name)).total == total


@pytest.mark.parametrize(("name", "total"), [("bert-base-uncased", 109_482_240), ("bert-large-uncased", 335_141_888)])
def test_published_totals_without_the_head(name: str, total: int) -> None:
    """What is told of BERT is BertModel with its pooler; the files say BertForMaskedLM."""
    preset = find(name)
    assert preset is not None
    config = {**preset.config, "architectures": ["BertModel"]}
    assert count(architecture_of(config).spec(config)).total == total


def spec_of(name: str):
    preset = find(name)
    assert preset is not None
    return architecture_of(preset.config).spec(preset.config)


WITHOUT = {"hunyuan_v1_dense", "hyperclovax", "ministral", "cohere2_moe", "granitemoeshared"}
WITHOUT |= {"afmoe", "axk1", "granite_swa", "granitemoe_swa", "kolibri1", "mellum", "phimoe", "flint"}
WITHOUT |= {"gemma4_unified_text", "lfm2_moe", "falcon_h1", "modernbert-decoder", "cohere_compass_text"}
"""Families whose checkpoints' configs nobody here knows for certain."""


def test_every_family_has_presets() -> None:
    assert {architecture_of(preset.config).name for preset in presets().values()} == set(ARCHITECTURES) - WITHOUT


def test_the_file_holds_no_other_fields() -> None:
    data = json.loads(PATH.read_text(encoding="utf-8"))
    assert set(data) == {"schema", "presets"}
    assert data["schema"] == 1
    for entry in data["presets"]:
        assert set(entry) == {"name", "aliases", "repo", "source", "config"}
    assert len(data["presets"]) == len(presets())


def test_names_are_unique_and_in_lower_case() -> None:
    names = [name for preset in presets().values() for name in (preset.name, *preset.aliases)]
    assert all(name == name.lower() and name.isprintable() and "/" not in name for name in names)
    everything = [name.lower() for preset in presets().values() for name in preset.known_as]
    assert len(everything) == len(set(everything))


def test_repositories_and_sources_are_well_formed() -> None:
    for preset in presets().values():
        assert preset.source.startswith("https://")
        if preset.repo is not None:
            assert preset.repo.count("/") == 1
            assert preset.repo in preset.source


def test_find_takes_names_aliases_and_repositories_in_any_case() -> None:
    qwen = presets()["qwen3-8b"]
    for name in ("qwen3-8b", "Qwen3-8B", "qwen-3-8b", "Qwen/Qwen3-8B", "qwen/qwen3-8b"):
        assert find(name) is qwen
    for preset in presets().values():
        assert all(find(name.upper()) is preset for name in preset.known_as)


@pytest.mark.parametrize("name", ["", "qwen3", "nobody/qwen3-8b", "qwen3-8b ", "x" * 10_000, "\0"])
def test_find_knows_no_other_names(name: str) -> None:
    assert find(name) is None
    assert repo_of(name) is None


def test_repo_of() -> None:
    assert repo_of("gpt2") == "openai-community/gpt2"
    assert repo_of("QWEN/qwen3-8b") == "Qwen/Qwen3-8B"
    assert repo_of("gpt3-175b") is None  # never published


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("qwen3-8", "qwen3-8b"), ("gtp2", "gpt2"), ("mistral", "mistral-7b"), ("lama-2-7b", "llama-2-7b")],
)
def test_nearest_guesses_typos(typo: str, meant: str) -> None:
    assert meant in nearest(typo)


def test_nearest_tells_few_names_each_once() -> None:
    for name in ("qwen3", "llama", "gpt", *presets()):
        found = nearest(name)
        assert 1 <= len(found) <= 5
        assert len(set(found)) == len(found)
        assert set(found) <= set(presets())
    assert nearest("Qwen3-8B")[0] == "qwen3-8b"
    assert nearest("gpt5")[:2] == ["gpt2", "gpt3-175b"]  # alike in as many letters
    assert all(name.startswith("qwen3-") for name in nearest("Qwen3"))


@pytest.mark.parametrize("name", ["", "zzzzzzzzzz", "llama" * 1_000_000])
def test_nearest_may_find_nothing(name: str) -> None:
    assert nearest(name) == []


def test_counting_imports_nothing_heavy() -> None:
    assert not imported("import gptkit.architectures.presets, gptkit.analysis.parameters, gptkit.report.rows")
