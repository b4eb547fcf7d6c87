"""What weights take in the formats that people run: held to the files that are written, and to what others publish."""

from pathlib import Path

import pytest
from helpers.family_specs import preset_spec
from helpers.trees import TREES

from gptkit.analysis.formats import FORMATS, GGUF, in_formats, sizer, weighed
from gptkit.analysis.parameters import count
from gptkit.analysis.tensors import tensor_groups
from gptkit.architectures import architecture_of
from gptkit.architectures.gguf_types import BLOCKS, FILE_TYPES
from gptkit.architectures.presets import presets
from gptkit.components import Parameter
from gptkit.converter.convert import convert
from gptkit.errors import CannotExpress

gguf = pytest.importorskip("gguf", reason='the types are those of pip install "gptkit[gguf]"')


def family_of(name: str) -> str:
    return architecture_of(presets()[name].config).name


def bits(name: str, dtype: str) -> float:
    spec = preset_spec(name)
    return 8 * weighed(spec, dtype, family_of(name)).total / count(spec).total


def test_blocks_are_ggmls() -> None:
    assert set(FILE_TYPES) == set(GGUF)
    for name, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes


def test_bits_a_weight_are_those_that_llama_cpp_publishes() -> None:
    """tools/quantize/README.md of llama.cpp, of Llama 3.1 8B; sizes of files for the others."""
    assert f"{bits('llama-3.1-8b', 'q4_k_m'):.4f}" == "4.8944"
    assert f"{bits('llama-3.1-8b', 'q8_0'):.4f}" == "8.5008"
    assert f"{bits('llama-2-7b', 'q4_0') * 6_738_415_616 / 8 / 2**30:.2f}" == "3.56"
    assert f"{bits('llama-2-7b', 'q4_k_m') * 6_738_415_616 / 8 / 2**30:.2f}" == "3.80"
    assert f"{weighed(preset_spec('llama-3.1-70b'), 'q4_k_m', 'llama').total / 1e9:.2f}" == "42.51"


@pytest.mark.parametrize("sample", ["gpt2", "llama", "falcon", "bloom"])
def test_q8_0_is_what_a_file_takes(sample: str, tmp_path: Path) -> None:
    done = convert(f"sample:{sample}", tmp_path / "out", "gguf", dtype="q8_0")
    (file,) = (tmp_path / "out").glob("*.gguf")
    tensors = gguf.GGUFReader(file).tensors
    written = sum(int(each.n_bytes) for each in tensors if not each.name.startswith("rope_"))
    assert weighed(done.source.spec, "q8_0", done.source.origin.family or "").total == written


def test_nf4_is_4_127_bits_of_a_linear_and_bf16_of_all_else() -> None:
    spec = preset_spec("llama-2-7b")
    size = sizer(spec, "nf4")
    for each in spec.parameters():
        linear = each.component in ("attention", "feed-forward")
        assert 8 * size(each) / each.count == pytest.approx(4.126953125 if linear else 16, rel=1e-6), each.name
    assert size(Parameter("blocks.0.attention.q_proj.weight", (3, 7), "attention", 0)) == 11 + 1 + 4
    mixture = preset_spec("mixtral-8x7b")
    assert weighed(mixture, "nf4").by_component["router"] == 2 * count(mixture).by_component["router"]


ONE_EACH = ("gpt2", "bloom-560m", "falcon-7b", "llama-3.2-1b", "mistral-7b", "mixtral-8x7b", "qwen2-0.5b", "qwen3-0.6b")


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", *FORMATS])
def test_parts_sum_to_the_whole(name: str, dtype: str) -> None:
    spec, family = preset_spec(name), family_of(name)
    found = weighed(spec, dtype, family)
    size = sizer(spec, dtype, family)
    inside = sum(layer.total for layer in found.by_layer)
    assert found.total == sum(found.by_component.values()) == inside + sum(found.outside.values())
    assert found.total == sum(map(size, spec.parameters())) == sum(g.nbytes for g in tensor_groups(spec, size))
    assert list(found.by_component) == list(count(spec).by_component)


def test_what_a_token_meets_of_a_mixture() -> None:
    spec = preset_spec("mixtral-8x7b")
    for dtype in ("bfloat16", *FORMATS):
        found, counted = weighed(spec, dtype, "mixtral"), count(spec)
        assert found.active < found.total
        if dtype == "bfloat16":
            assert found.active == 2 * counted.active


def test_trees_that_llama_cpp_has_no_types_for() -> None:
    latent = TREES[next(name for name in TREES if "deepseek" in name)]
    found = in_formats(latent, "llama")
    assert found["q4_k_m"] is None and found["nf4"] is not None and found["bfloat16"] == 2 * count(latent).total
    with pytest.raises(CannotExpress, match="latent attention"):
        weighed(latent, "q8_0", "llama")
    with pytest.raises(CannotExpress, match="a model without a transformers architecture"):
        weighed(preset_spec("gpt2"), "q8_0")
