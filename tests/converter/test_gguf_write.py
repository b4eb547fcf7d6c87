"""GGUF files as gptkit writes them, against the gguf package, llama.cpp's naming and transforms, and its runtime."""

import base64
import contextlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.covering import covered, few, functions, rest_slow
from helpers.families import VARIANTS, YARN_ROPE, Variant, auto_class, save_hf, spec_of

import gptkit
from gptkit.architectures.gguf import expressed, gguf_architecture
from gptkit.architectures.gguf_architecture import shifted
from gptkit.architectures.gguf_facts import GgufFacts
from gptkit.architectures.gguf_table import GGUF
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert, plan_conversion
from gptkit.converter.dtypes import Quantisation, cast, to_float64
from gptkit.converter.files import locked
from gptkit.converter.formats.gguf_header import open_header
from gptkit.converter.formats.gguf_tokenizer import CONTROL, UNKNOWN, UNUSED, USER_DEFINED
from gptkit.converter.formats.gguf_vocab import pre_tokenizer, vocabulary
from gptkit.converter.formats.gguf_write import ALIGNMENT, q8_0
from gptkit.converter.publish import begin_journal
from gptkit.converter.tokenizer import load_tokenizer
from gptkit.errors import CannotExpress, CheckpointError, GptkitError, InvalidInput, UsageError
from gptkit.parity.verify import verify
from gptkit.report.checkpoints import conversion_lines

gguf = pytest.importorskip("gguf")

SAMPLES = Path(gptkit.__file__).parent / "samples"
SHARED = Path(__file__).parents[2].parent / "shared" / "checkpoints"
STORIES = SHARED / "stories260K-llama"
needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="needs the project's shared checkpoints")

OTHER: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    "gemma3_text-scaled": {"query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True},
    "starcoder2": {"sliding_window": None},
    "gpt_oss": {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8}},
    "minicpm3": {"dim_model_base": 256, "rms_norm_eps": 1e-6},
    "minicpm3-longrope": {"dim_model_base": 256, "rms_norm_eps": 1e-6},
    "dots1": {"num_key_value_heads": 6},
    "olmoe": {"num_key_value_heads": 6},
    "afmoe": {"mup_enabled": True},
    "glm4_moe_lite": {"rms_norm_eps": 1e-6},
    "gemma4_text": {"vocab_size_per_layer_input": 97},
    "gemma4_text-shared": {"vocab_size_per_layer_input": 97},
    "gemma4_text-keys": {"attention_bias": False},
    "llama4_text": {"attention_chunk_size": 8192, "floor_scale": 8192},
    "llama4_text-three": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    "bitnet": {"hidden_act": "silu", "tie_word_embeddings": True},
    "mellum-windowed": {
        "rope_parameters": {
            "full_attention": {**YARN_ROPE, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e5},
        }
    },
    "granite_swa-bases": {"layer_rope_theta": [0, 1e4, 1e4, 0, 1e4]},
    "granitemoe_swa-bases": {"layer_rope_theta": [0, 1e4, 1e4, 0, 1e4]},
    "cohere2_moe-s": {
        "attention_bias": False,
        "shared_expert_combination_strategy": "average",
        "prefix_dense_sliding_window_pattern": 1,
    },
    "exaone4": {
        "num_hidden_layers": 64,
        "layer_types": [f"{'sliding' if layer % 4 != 3 else 'full'}_attention" for layer in range(64)],
    },
}
"""What variants have in place of what llama.cpp does not compute."""
COMPUTED = [
    Variant(f"{each.name}-computed", each.family, {**each.config, **OTHER[each.name]}, representative=False)
    for each in VARIANTS
    if each.name in OTHER
]
CONFIGS = {each.name: each.config for each in (*VARIANTS, *COMPUTED)}
BIASED = """falcon-40b falcon-mha gemma-legacy gemma2-no-caps
    gemma3_text-v5 qwen3_moe-n olmoe-c gpt_oss-b dots1-w ernie4_5_moe-b hunyuan_v1_moe-l youtu-plain youtu-yarn
    minicpm3-nulls deepseek_v2-grouped deepseek_v3-plain arcee-biased cohere-normed cohere2-biased ernie4_5-biased
    gpt_neox-serial hunyuan_v1_dense-alpha jais2-tied olmo-biased olmo2-biased olmo3-biased seed_oss-plain
    smollm3-windowed starcoder2-plain qwen3-windowed hy_v3-b afmoe-mup bitnet-biased cohere2_moe-s gemma4_text-keys
    llama4_text-dense mellum-by-kind"""
SCALED = """gpt2-by-layer gpt2-unscaled gpt2-upcast gpt2-upcast-unscaled gpt_bigcode-mha mpt-clipped gemma2
    gemma2-layer-types gemma3_text gemma3_text-scaled gemma3_text-composite"""
WINDOWED = """ministral3-windowed llama4_text llama4_text-three llama4_text-composite
    mistral mixtral-windowed phi3 qwen2 qwen2-layer-types qwen2_moe-n starcoder2 exaone4"""
REFUSED = {
    **dict.fromkeys(BIASED.split(), "bias"),
    **dict.fromkeys(SCALED.split(), "scale"),
    **dict.fromkeys(WINDOWED.split(), "window"),
    **dict.fromkeys(("qwen2_moe-s", "qwen3_moe-s", "exaone_moe-n"), "GatedFeedForward"),
    **dict.fromkeys(("minimax_m2-w",), "tied"),
    "stablelm-parallel": "q_norm",
    "gpt_neox-odd": "spread",
    **dict.fromkeys(("falcon-rw", "falcon-alibi-parallel", "falcon-RefinedWebModel-rw"), "ALiBi"),
    **dict.fromkeys(("minicpm3", "minicpm3-longrope", "glm4_moe_lite"), "eps"),
    **dict.fromkeys(("granite_swa-bases", "granitemoe_swa-bases", "mellum-windowed"), "base"),
    **dict.fromkeys(("gemma4_text", "gemma4_text-shared", "gemma4_text-composite"), "vocab_size"),
    "gemma4_text-layers": "activation",
    "apertus-plain": "activation",
    "bitnet": "head",
    "cohere2_moe-n": "position",
    "gpt2-other-names": "quick_gelu",
    "dbrx-plain": "activation",
    "afmoe": "multiplier",
    "llama-linear": "activation",
    "llama-dynamic": "scaling",
    "llama-yarn-mscale": "beta_fast",
    "llama-proportional": "ProportionalScaling",
    "mixtral-other-names": "activation",
    "internlm3-biased": "DynamicScaling",
    "bloom-post-norm": "residual",
    "falcon-serial": "feed_forward_norm",
    "glm-biasless": "a hidden size of heads · head_dim",
    "nemotron-biased": "a hidden size of heads · head_dim",
    "qwen3_moe": "normalise",
    "olmoe": "kv_heads",
    "phi": "q_norm",
    "glm4_moe_lite-types": "pairs",
}
"""What llama.cpp computes otherwise or not at all, and the word that says so."""
FAMILIES = {family: row.name for row in reversed(GGUF.values()) for family in row.written}
WRITTEN = [each for each in (*VARIANTS, *COMPUTED) if each.name not in REFUSED and each.family in FAMILIES]
GELUS = (
    *("BloomGelu", "FastGELUActivation", "GELU", "GELUActivation", "GELUTanh", "NewGELUActivation"),
    "PytorchGELUTanh",
)


def test_every_family_of_the_table_has_a_variant_that_is_written() -> None:
    assert {variant.family for variant in WRITTEN} == set(FAMILIES)


def written(folder: Path, dtype: str | None = None) -> Any:
    """The folder's checkpoint as a GGUF file, read by the gguf package."""
    convert(folder, folder.with_name(f"{dtype}.gguf"), "gguf", dtype=dtype)
    return gguf.GGUFReader(folder.with_name(f"{dtype}.gguf"))


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A model by its variant's name, as Hugging Face files."""
    save_hf(CONFIGS[name], folder / "hf", dtype)
    return folder / "hf"


def llama_cpp_tensors(model: transformers.PreTrainedModel, variant: Variant) -> dict[str, torch.Tensor]:
    """The tensors that convert_hf_to_gguf.py makes of a model: the package's names, the converter's transforms."""
    config, family = model.config, FAMILIES[variant.family]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = config.num_attention_heads
    found = {}
    for name, tensor in model.state_dict().items():
        if name in ("lm_head.weight", "embed_out.weight") and config.tie_word_embeddings:
            continue
        if family in PERMUTED and (name.endswith(("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"))):
            n = heads if "q_proj" in name else config.num_key_value_heads
            tensor = tensor.reshape(n, 2, len(tensor) // n // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if family == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.T
        if "query_key_value" in name:
            grouped = family == "falcon" and config.new_decoder_architecture
            kv = heads if family != "falcon" else config.num_kv_heads if grouped else 1
            parts = tensor.reshape(kv, heads // kv + 2, config.hidden_size // heads, *tensor.shape[1:])
            three = [parts[:, :-2], parts[:, -2], parts[:, -1]]
            tensor = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in three])
        if family in ONE_MORE and name.endswith("norm.weight"):
            tensor = tensor + 1
        mapped = names.get_name(name.removeprefix("transformer.") if family == "bloom" else name, (".weight", ".bias"))
        assert mapped is not None, name
        found[mapped] = tensor
    return found


PERMUTED = ("llama", "mistral3", "granite", "smollm3", "arcee", "olmo")
ONE_MORE = ("gemma", "gemma2", "gemma3", "nemotron")
OTHERWISE = ("experts", "kv_lora_rank", "moe", "dbrx", "apertus", "bitnet", "gemma4", "granite_swa")
RENAMED = [
    each for each in WRITTEN if not any(part in field for part in OTHERWISE for field in (*each.config, each.family))
]
"""Those whose tensors the converter takes one by one, each as it is, permuted, transposed or with 1 added."""


# --- tensors


@few(10)
@pytest.mark.parametrize("variant", RENAMED, ids=str)
def test_tensors_are_those_of_llama_cpps_converter(tmp_path: Path, variant: Variant) -> None:
    expected = llama_cpp_tensors(save_hf(variant.config, tmp_path / "hf"), variant)
    reader = written(tmp_path / "hf")
    got = {tensor.name: tensor for tensor in reader.tensors}
    extras = {name for name in got if name.startswith("rope_f")}
    assert set(got) - extras == set(expected)
    for name, tensor in expected.items():
        assert got[name].tensor_type == gguf.GGMLQuantizationType.F32
        assert list(got[name].shape) == list(reversed(tensor.shape))
        np.testing.assert_array_equal(got[name].data, tensor.numpy(), err_msg=name)
        assert got[name].data_offset % ALIGNMENT == 0
    assert reader.get_field("general.architecture").contents() == FAMILIES[variant.family]


@covered("variant", by=lambda variant: functions(spec_of(variant.config)))
@pytest.mark.parametrize("variant", WRITTEN, ids=str)
def test_the_same_tree_and_values_come_back(tmp_path: Path, variant: Variant) -> None:
    source = open_checkpoint(saved(variant.name, tmp_path))
    (shard,) = convert(tmp_path / "hf", tmp_path / "out", "gguf").plan.shards
    path = tmp_path / "out" / shard.name
    back = open_checkpoint(path)
    assert plan_conversion(back, "gguf").shards[0].header == shard.header
    factors = shifted(source.spec)
    for name, array, dtype in source.tensors():
        other, kind = back.tensor(name)
        assert kind == dtype == "F32"
        if name in factors:  # GGUF has 1 + weight
            array, other = array + np.float32(1), other + np.float32(1)
        np.testing.assert_array_equal(array, other, err_msg=name)
    name = open_header(path).metadata["general.architecture"]
    # The package may be older than the architecture, and then has at least the tensor's name.
    arch = next((arch for arch, each in gguf.MODEL_ARCH_NAMES.items() if each == name), None)
    known = {gguf.TENSOR_NAMES[each].format(bid="{layer}") for each in gguf.MODEL_TENSORS.get(arch, gguf.TENSOR_NAMES)}
    known |= {gguf.TENSOR_NAMES[each] for each in (gguf.MODEL_TENSOR.ROPE_FACTORS_LONG, gguf.MODEL_TENSOR.ROPE_FREQS)}
    names = (output.leaf.checkpoint for output in shard.outputs)
    stems = (re.sub(r"\.(weight|bias|scale)$", "", each) for each in names if not each.startswith("xielu."))
    assert not {re.sub(r"^blk\.\d+\.", "blk.{layer}.", each) for each in stems} - known


def test_layers_that_draft_tokens_and_dimensions_of_one_are_as_if_they_were_not_there(tmp_path: Path) -> None:
    """What llama.cpp's own converter writes of GLM 4.5 and ERNIE 4.5."""
    path, other = tmp_path / "ours.gguf", tmp_path / "other.gguf"
    convert(saved("glm4_moe", tmp_path), path, "gguf")
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(other, "glm4moe")
    writer.add_nextn_predict_layers(1)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = field.contents() + 1 if name == "glm4moe.block_count" else field.contents()
            writer.add_key_value(name, value, field.types[0], *field.types[1:2])
    for tensor in reader.tensors:
        array = np.array(tensor.data)
        writer.add_tensor(tensor.name, array[None] if tensor.name.endswith("exp_probs_b.bias") else array)
    layers = CONFIGS["glm4_moe"]["num_hidden_layers"]
    for name in ("nextn.eh_proj", "attn_norm"):
        writer.add_tensor(f"blk.{layers}.{name}.weight", np.ones((48, 96), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = open_checkpoint(path), open_checkpoint(other)
    assert theirs.spec == ours.spec and len(ours.spec.blocks) == layers
    for name, array, _ in ours.tensors():
        np.testing.assert_array_equal(array, theirs.tensor(name)[0], err_msg=name)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_latents_are_normed_by_the_eps_that_a_file_states(tmp_path: Path, eps: float) -> None:
    """llama.cpp has one eps, transformers one of its own for latents: a file with another is read as it is computed."""
    path = tmp_path / "out.gguf"
    convert(saved("minicpm3-computed", tmp_path), path, "gguf")
    path.write_bytes(path.read_bytes().replace(np.float32(1e-6).tobytes(), np.float32(eps).tobytes(), 1))
    attention = open_checkpoint(path).spec.blocks[0].attention
    assert (attention.q_norm.eps, attention.kv_norm.eps) == (eps, eps)


ODD = ("x", True, False, -1, 0, 1, 1.5, float("nan"), [1, 2], [True], [], 2**40)
MORE = ("expert_count", "nextn_predict_layers", "rope.scaling.type", "attention.key_length", "attention.sliding_window")


@few(20)
@pytest.mark.parametrize("name", GGUF)
def test_metadata_of_any_value_give_a_tree_or_an_error_of_ours(name: str) -> None:
    """Each key left out, and with values that it never has, of one variant of every row."""
    variant = next(each for each in WRITTEN if each.family == name)
    found = expressed(spec_of(variant.config), name)
    row = found.architecture
    shapes = {leaf.checkpoint: leaf.shape for leaf in found.leaves}
    shapes |= {extra: (len(values),) for extra, values in found.extras.items()}
    for key in {**found.metadata, **{f"{row.name}.{more}": 0 for more in MORE}}:
        without = {each: value for each, value in found.metadata.items() if each != key}
        for metadata in (without, *({**without, key: odd} for odd in ODD)):
            facts = GgufFacts(row.name, metadata, shapes, found.extras.__getitem__)
            with contextlib.suppress(GptkitError):
                gguf_architecture(facts).spec_of(facts)


def test_norms_that_add_one_come_back_from_half_precision_to_the_bit(tmp_path: Path) -> None:
    """What their weights are in released files, of which 1 + weight is exact in fp32."""
    source = open_checkpoint(saved("gemma2-computed", tmp_path, torch.bfloat16))
    done = convert(tmp_path / "hf", tmp_path / "out.gguf", "gguf")
    assert any("stored as 1 + weight" in note for note in done.source.notes)
    back = open_checkpoint(tmp_path / "out.gguf")
    for name in shifted(source.spec):
        array, dtype = source.tensor(name)
        np.testing.assert_array_equal(cast(array, dtype, "F32"), back.tensor(name)[0], err_msg=name)
    convert(tmp_path / "out.gguf", tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "again.gguf", "gguf")
    assert tensors_of(tmp_path / "again.gguf") == tensors_of(tmp_path / "out.gguf")


def test_llama3s_scaling_is_a_tensor_of_divisors(tmp_path: Path) -> None:
    model = save_hf(CONFIGS["llama-3"], tmp_path / "hf")
    (tensor,) = (tensor for tensor in written(tmp_path / "hf").tensors if tensor.name == "rope_freqs.weight")
    plain = CONFIGS["llama-3"]["rope_theta"] ** (-torch.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(plain / torch.tensor(tensor.data), model.model.rotary_emb.inv_freq, rtol=1e-6)


@pytest.mark.parametrize("count", [3, 1])
def test_numbers_of_an_activation_are_lists_of_the_metadata(tmp_path: Path, count: int) -> None:
    """Of each layer, or one that stands for all; anything else there is refused."""
    model = save_hf(CONFIGS["apertus"], tmp_path / "hf")
    fields = written(tmp_path / "hf").fields
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        values = [getattr(layer.mlp.act_fn, name).item() for layer in model.model.layers]
        assert fields[f"xielu.{name}"].contents() == values
    key, path = "xielu.beta", tmp_path / "None.gguf"
    data = path.read_bytes()
    at = data.index(key.encode()) + len(key)
    assert data[at : at + 16] == struct.pack("<IIQ", 9, 6, 3)
    other = struct.pack("<IIQ3f", 9, 6, 3, 0.5, 0.25, 2.0) if count == 3 else struct.pack("<If", 6, 0.5)
    # What the list was longer, the model's name is now.
    spare = 28 - len(other)
    name = struct.pack("<Q", 2 + spare) + b"hf" + b"x" * spare
    path.write_bytes(data[:at].replace(struct.pack("<Q", 2) + b"hf", name, 1) + other + data[at + 28 :])
    found = [open_checkpoint(path).tensor(f"blocks.{layer}.feed_forward.activation.beta")[0] for layer in range(3)]
    assert [float(each[0]) for each in found] == ([0.5, 0.25, 2.0] if count == 3 else [0.5] * 3)
    path.write_bytes(data.replace(struct.pack("<IIQ", 9, 6, 3), struct.pack("<IIQ", 9, 5, 3)))
    with pytest.raises(CheckpointError, match="one per layer"):
        open_checkpoint(path)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "q8_0"])
def test_values_in_every_type_are_the_packages(tmp_path: Path, dtype: str) -> None:
    save_hf({**CONFIGS["gpt2"], "n_embd": 64}, tmp_path / "hf")
    plain = {tensor.name: tensor for tensor in written(tmp_path / "hf").tensors}
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype]
    reader = written(tmp_path / "hf", dtype)
    for tensor in reader.tensors:
        matrix = len(tensor.shape) > 1 and tensor.name != "position_embd.weight"
        want = gguf.GGMLQuantizationType[kind if matrix else "F32"]
        assert tensor.tensor_type == want
        expected = gguf.quants.quantize(plain[tensor.name].data, want)
        np.testing.assert_array_equal(tensor.data.view(np.uint8), expected.view(np.uint8))
    file_type = {"F32": "ALL_F32"}.get(kind, f"MOSTLY_{kind}")
    assert reader.get_field("general.file_type").contents() == gguf.LlamaFileType[file_type]


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, "F16"), (torch.bfloat16, "BF16"), (torch.float64, "F32")])
def test_what_is_not_asked_for_stays_as_it_is_stored(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    found = written(saved("llama-2", tmp_path, dtype))
    types = {(len(tensor.shape), tensor.tensor_type.name) for tensor in found.tensors}
    assert types == {(2, kind), (1, "F32")}


def test_biases_and_routers_stay_fp32_whatever_their_dimensions(tmp_path: Path) -> None:
    """llama.cpp adds no others to what experts give."""
    found = written(saved("gpt_oss-computed", tmp_path, torch.bfloat16))
    types = {tensor.name: tensor.tensor_type.name for tensor in found.tensors}
    fp32 = {name for name, kind in types.items() if kind == "F32"}
    assert fp32 >= {f"blk.0.{name}" for name in ("ffn_gate_exps.bias", "ffn_down_exps.bias", "ffn_gate_inp.weight")}
    assert types["blk.0.ffn_gate_exps.weight"] == types["blk.0.attn_q.weight"] == "BF16"


def test_rows_that_do_not_divide_into_blocks_are_f16_and_said_so(tmp_path: Path) -> None:
    source = open_checkpoint(saved("llama-2", tmp_path))
    (shard,) = plan_conversion(source, "gguf", "q8_0").shards
    assert {output.dtype for output in shard.outputs} == {"F32", "F16"}
    assert any("not a multiple of 32" in note for note in source.notes)


def scalar_q8_0(block: np.ndarray) -> bytes:
    """ggml's quantize_row_q8_0_ref, a value at a time in fp32."""
    top = np.float32(0)
    for value in block:
        top = max(top, abs(value))
    scale = np.float32(top / np.float32(127))
    with np.errstate(over="ignore"):
        inverse = np.float32(1) / scale if scale else np.float32(0)
    out = np.float16(scale).tobytes()
    if np.isinf(inverse):  # what a float out of range becomes is not defined in C; on x86 these are zeros
        return bytes(34)
    for value in block:
        scaled = np.float32(value * inverse)
        whole = np.trunc(scaled)
        away = whole + np.sign(scaled) if abs(np.float64(scaled) - whole) >= 0.5 else whole
        out += np.int8(away).tobytes()
    return out


def test_q8_0_is_the_reference_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, 32)).astype(np.float32) * 10.0 ** rng.integers(-30, 6, (40, 1)).astype(np.float32)
    rows[0] = 0
    rows[1] = np.arange(-16, 16) + 0.5  # ties, once the largest value is 127
    rows[1, 0] = 127
    rows[2, :8] = [127, 0.5, -0.5, 1.5, -1.5, 0.49999997, -126.5, 126.5]
    rows[3] = np.float32(1e-38)
    blocks = q8_0("x")(rows, "F32")
    assert blocks.tobytes() == b"".join(scalar_q8_0(row) for row in rows)
    halves = rows.astype(np.float16)
    whole = q8_0("x")(halves, "F16")
    assert whole.tobytes() == np.concatenate([q8_0("x")(halves[i : i + 7], "F16") for i in range(0, 40, 7)]).tobytes()


def test_what_quantising_cost_is_told_apart_from_rounding(tmp_path: Path) -> None:
    """Against the tensors that are read back, all that are quantised and no other."""
    done = convert("sample:llama", tmp_path / "out", "gguf", dtype="q8_0")
    (shard,) = done.plan.shards
    names = {name for output in shard.outputs if output.dtype == "Q8_0" for name in output.leaf.shared}
    assert 0 < len(names) < len(done.source.shared_dtypes())
    after = {name: to_float64(array, dtype) for name, array, dtype in open_checkpoint(tmp_path / "out").tensors()}
    before = {name: to_float64(array, dtype) for name, array, dtype in open_checkpoint("sample:llama").tensors()}
    errors, values = (np.concatenate([each[name].ravel() for name in sorted(names)]) for each in (after, before))
    errors = errors - values
    assert done.transferred is not None
    loss = sum(done.transferred.quantised.values(), Quantisation())
    assert loss.largest == pytest.approx(np.abs(errors).max(), rel=1e-6)
    assert loss.relative == pytest.approx(np.linalg.norm(errors) / np.linalg.norm(values), rel=1e-6)
    told = "\n".join(conversion_lines(done))
    count = len(done.transferred.quantised)
    expected = f"off by {loss.largest:.1e} at most, with a relative RMS error of {loss.relative:.1e}"
    assert f"{count} of {done.plan.tensors} tensors are quantised to Q8_0\n  {expected}" in told
    assert f"of {len(done.transferred.rounded)} other tensors" in told


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e7])
def test_what_q8_0_cannot_hold_is_refused(value: float) -> None:
    rows = np.ones((2, 32), np.float32)
    rows[1, 3] = value
    with pytest.raises(CheckpointError, match=r"blk\.0"):
        q8_0("blk.0")(rows, "F32")


# --- the file


def test_a_file_is_the_same_every_time_and_named_as_llama_cpp_does(tmp_path: Path) -> None:
    first = convert("sample:llama", tmp_path / "a", "gguf", dtype="float16")
    second = convert(SAMPLES / "llama", tmp_path / "b", "gguf", dtype="float16")
    assert [shard.name for shard in first.plan.shards] == ["llama-F16.gguf"]
    assert (tmp_path / "a" / "llama-F16.gguf").read_bytes() == (tmp_path / "b" / "llama-F16.gguf").read_bytes()
    assert second.plan.nbytes == sum(p.stat().st_size for p in (tmp_path / "b").iterdir() if p.name != "manifest.json")
    beside = {path.name for path in (tmp_path / "a").iterdir()}
    assert beside >= {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (SAMPLES / "llama" / "tokenizer.json").read_bytes()


@few(4)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_llama_cpp_does_not_compute_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(CannotExpress, match=REFUSED[name]):
        convert(saved(name, tmp_path), tmp_path / "out", "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("dtype", ["float64", "q4_0", ""])
def test_a_dtype_that_is_not_written_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(UsageError):
        convert("sample:llama", tmp_path / "out", "gguf", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_gguf_to_gguf_keeps_the_tokenizer_that_it_held(tmp_path: Path) -> None:
    convert("sample:llama", tmp_path / "a", "gguf", dtype="float32")
    shutil.copy(tmp_path / "a" / "llama-F32.gguf", tmp_path)  # without what lies beside
    convert(tmp_path / "llama-F32.gguf", tmp_path / "b", "gguf", dtype="float16")
    one, two = (gguf.GGUFReader(p) for p in (tmp_path / "llama-F32.gguf", tmp_path / "b" / "llama-F16.gguf"))
    keys = [key for key in one.fields if key.startswith("tokenizer.")]
    assert "tokenizer.ggml.merges" in keys
    for key in keys:
        assert two.fields[key].contents() == one.fields[key].contents(), key


# --- the tokenizer


def files_of(folder: Path, *names: str) -> dict[str, bytes]:
    names = names or ("tokenizer.json", "tokenizer_config.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def changed(folder: Path, **changes: Any) -> dict[str, bytes]:
    """The folder's tokenizer files with other parts in tokenizer.json."""
    data = json.loads((folder / "tokenizer.json").read_text())
    return files_of(folder) | {"tokenizer.json": json.dumps(data | changes).encode()}


def test_a_byte_level_tokenizer() -> None:
    found = vocabulary(files_of(SAMPLES / "llama"), 514)
    data = json.loads((SAMPLES / "llama" / "tokenizer.json").read_text())
    meta = {key.removeprefix("tokenizer.ggml."): value for key, value in found.metadata.items()}
    assert meta["model"] == "gpt2" and meta["pre"] == "gpt-2" and not found.notes
    assert meta["tokens"] == [*sorted(data["model"]["vocab"], key=data["model"]["vocab"].get), "[PAD512]", "[PAD513]"]
    assert meta["merges"] == [" ".join(pair) for pair in data["model"]["merges"]]
    assert meta["token_type"] == [CONTROL, *[1] * 511, UNUSED, UNUSED]
    assert (meta["bos_token_id"], meta["eos_token_id"], meta["padding_token_id"]) == (0, 0, 0)
    assert (meta["add_bos_token"], meta["add_eos_token"]) == (False, False)
    assert "scores" not in meta


@needs_stories
def test_sentencepieces_bpe_by_either_file() -> None:
    by_json = vocabulary(files_of(STORIES), 512).metadata
    by_model = vocabulary(files_of(STORIES, "tokenizer.model"), 512).metadata
    for key in ("model", "tokens", "token_type", "add_bos_token", "add_space_prefix", "bos_token_id", "eos_token_id"):
        assert by_json[f"tokenizer.ggml.{key}"] == by_model[f"tokenizer.ggml.{key}"], key
    assert by_json["tokenizer.ggml.model"] == "llama"
    assert by_json["tokenizer.ggml.token_type"][:3] == [UNKNOWN, CONTROL, CONTROL]  # type: ignore[index]
    one, two = (np.array(meta["tokenizer.ggml.scores"][259:]) for meta in (by_json, by_model))  # type: ignore[index]
    merged = one < 0
    assert merged.any() and (np.diff(one[merged]) < 0).all() and (np.diff(two[merged]) < 0).all()


LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


BARE = {"added_tokens": [], **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))}
TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


@pytest.mark.parametrize(
    ("steps", "ignore_merges", "name"),
    [
        ([{"type": "ByteLevel", "use_regex": True}], False, "gpt-2"),
        ([{"type": "ByteLevel"}], False, "gpt-2"),
        ([split(LLAMA3_SPLIT), BYTES], True, "llama-bpe"),
        ([split(LLAMA3_SPLIT, "Removed", True), BYTES], True, "llama-bpe"),
        ([split(LLAMA3_SPLIT), BYTES], False, "smaug-bpe"),
        ([split(LLAMA3_SPLIT.replace("{1,3}", "")), BYTES], False, "qwen2"),
        ([split(LLAMA3_SPLIT.replace("{1,3}", "")), BYTES], True, None),
        ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}], False, "smollm"),
        ([split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), BYTES], False, "bloom"),
        (
            [
                {"type": "Punctuation", "behavior": "Contiguous"},
                {"type": "ByteLevel"},
                {"type": "Digits", "individual_digits": False},
                split("[0-9][0-9][0-9]"),
            ],
            False,
            "falcon",
        ),
        ([split("other"), BYTES], False, None),
        ([split(LLAMA3_SPLIT, "MergedWithNext"), BYTES], True, None),
    ],
)
def test_ways_to_split_text_have_llama_cpps_names(steps: list[dict[str, Any]], ignore_merges: bool, name: str) -> None:
    assert pre_tokenizer(steps, ignore_merges) == name


def test_a_way_without_a_name_is_default_and_said_so() -> None:
    steps = {"type": "Sequence", "pretokenizers": [split("other"), BYTES]}
    found = vocabulary(changed(SAMPLES / "gpt2", pre_tokenizer=steps, normalizer={"type": "NFC"}), 512)
    assert found.metadata["tokenizer.ggml.pre"] == "default"
    assert any("no name" in note for note in found.notes) and any("NFC" in note for note in found.notes)


def test_added_tokens_and_what_is_put_around_a_text() -> None:
    added = [
        {"id": 0, "content": "<|endoftext|>", "special": True},
        {"id": 512, "content": "  ", "special": False, "lstrip": True},
        {"id": 513, "content": "<|im_end|>", "special": False},
        {"id": 514, "content": "beyond", "special": True},
    ]
    one = {"type_id": 0, "id": "<|im_end|>"}
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": one}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": one}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [513], "tokens": ["<|im_end|>"]}},
    }
    files = changed(SAMPLES / "gpt2", added_tokens=[TOKEN | token for token in added], post_processor=processor)
    found = vocabulary(files, 514, {"unk_token_id": 7, "pad_token_id": 9999})
    meta = found.metadata
    assert meta["tokenizer.ggml.token_type"][-2:] == [USER_DEFINED, CONTROL]  # type: ignore[index]
    assert meta["tokenizer.ggml.tokens"][-2:] == ["  ", "<|im_end|>"]  # type: ignore[index]
    assert meta["tokenizer.ggml.add_bos_token"] is True and meta["tokenizer.ggml.bos_token_id"] == 513
    assert meta["tokenizer.ggml.add_eos_token"] is True
    assert meta["tokenizer.ggml.unknown_token_id"] == 7
    assert any("has only 514 rows" in note for note in found.notes)
    assert any("lstrip" in note for note in found.notes)


def test_two_tokens_of_one_text_are_refused() -> None:
    added = [TOKEN | {"id": 512, "content": "!", "special": True}]
    with pytest.raises(CannotExpress, match="'!'"):
        vocabulary(changed(SAMPLES / "gpt2", added_tokens=added), 513)


def test_a_vocabulary_and_merges_in_files_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(SAMPLES / "gpt2", folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}')
    fields = written(folder).fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.merges"].contents() == [" ".join(pair) for pair in model["merges"]]
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 0


def test_merges_that_llama_cpp_makes_and_the_tokenizer_does_not_are_told() -> None:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "ab": 4, "▁ab": 5, "▁a": 6}
    merges = [["a", "b"], ["▁", "ab"]]
    data = {
        **BARE,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "vocab": vocab, "merges": merges},
    }
    found = vocabulary({"tokenizer.json": json.dumps(data).encode()}, 7)
    assert found.metadata["tokenizer.ggml.add_space_prefix"] is True
    assert found.metadata["tokenizer.ggml.scores"] == [0.0, 0.0, 0.0, 0.0, -0.0, -1.0, 0.0]
    note, differing = found.notes
    assert "can form 2 tokens" in note  # ▁a, and ▁ab from ▁a and b
    assert "llama.cpp gives other token ids than the original" in differing
    data["model"] |= {"merges": [*merges, ["▁", "a"], ["▁a", "b"]]}  # type: ignore[operator]
    notes = vocabulary({"tokenizer.json": json.dumps(data).encode()}, 7).notes
    assert not any("can form" in note for note in notes)


def test_a_unigram_tokenizer() -> None:
    vocab = [["<unk>", 0.0], ["<s>", 0.0], ["▁", -2.0], ["a", -1.5], ["▁a", -1.0]]
    charsmap = base64.b64encode(b"\x04\0\0\0abcdefgh").decode()
    data = {
        **BARE,
        "normalizer": {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False},
    }
    found = vocabulary({"tokenizer.json": json.dumps(data).encode()}, 5)
    meta = found.metadata
    assert meta["tokenizer.ggml.model"] == "t5"
    assert meta["tokenizer.ggml.scores"] == [score for _, score in vocab]
    assert meta["tokenizer.ggml.token_type"] == [UNKNOWN, 1, 1, 1, 1]
    assert meta["tokenizer.ggml.add_space_prefix"] is True and meta["tokenizer.ggml.remove_extra_whitespaces"] is True
    assert charsmap not in str(meta)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("chat_template.jinja", "{{ evil() }}", {"tokenizer.chat_template": "{{ evil() }}"}),
        ("chat_template.json", '{"chat_template": "x"}', {"tokenizer.chat_template": "x"}),
        ("tokenizer_config.json", '{"chat_template": "y"}', {"tokenizer.chat_template": "y"}),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}',
            {
                "tokenizer.chat_template": "d",
                "tokenizer.chat_templates": ["tool_use"],
                "tokenizer.chat_template.tool_use": "t",
            },
        ),
    ],
)
def test_a_chat_template_is_kept_as_text(name: str, content: str, expected: dict[str, Any]) -> None:
    files = files_of(SAMPLES / "gpt2", "tokenizer.json") | {name: content.encode()}
    meta = vocabulary(files, 512).metadata
    assert {key: value for key, value in meta.items() if "chat" in key} == expected


def test_without_a_tokenizer_there_is_none_and_a_note() -> None:
    found = vocabulary({}, 512)
    assert found.metadata == {"tokenizer.ggml.model": "none"} and found.notes


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b'{"model": 3}'),
        ("tokenizer.json", b'{"model": {"type": "BPE", "merges": []}, "pre_tokenizer": {"type": "ByteLevel"}}'),
        (
            "tokenizer.json",
            b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}, "pre_tokenizer": {"type": "ByteLevel"}}',
        ),
        ("tokenizer.model", b"\x0a\xff"),
        ("tokenizer.model", b"not a model"),
        ("tokenizer.model", b""),
        ("tokenizer.model", b"\x80" * 64),
        ("tokenizer.model", b"\x0a\x05\x0a\x01a\x18\x09"),
    ],
)
def test_broken_tokenizer_files_are_bad_input(name: str, content: bytes) -> None:
    with pytest.raises(InvalidInput, match=name):
        vocabulary({name: content}, 16)


# --- llama.cpp itself

CLIENT = Path(__file__).with_name("llama_cpp_client.py")
TEXTS = [
    "Hello world",
    "  two  spaces",
    "<|endoftext|>First<|endoftext|> citizen:<|endoftext|>",
    "naïve café — 日本語 🚀\n\n\ttab 12345 it's I'LL we'Ve",
    " leading",
    "trailing ",
    "a\u0301 decomposed",
    "3.14159 1000000",
    "ROMEO:\nBut soft,\r\n what light?!",
    "",
]
SPM_TEXTS = ["Once upon a time", "<s>Once</s>there was<s>a", "naïve café — 日本語 🚀", "two  spaces\n\n x"]


def client() -> str:
    """An interpreter that has llama-cpp-python: this one, or the one that GPTKIT_LLAMA_CPP_PYTHON names."""
    python = os.environ.get("GPTKIT_LLAMA_CPP_PYTHON", sys.executable)
    probe = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"{python} has no llama-cpp-python: see CONTRIBUTING.md")
    return python


def ask(path: Path, ids: list[int], texts: list[str], runs: list[dict[str, Any]]) -> dict[str, Any]:
    request = json.dumps({"model": str(path), "ids": ids, "texts": texts, "runs": runs})
    done = subprocess.run([client(), str(CLIENT)], input=request, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


class TableGelu(torch.nn.Module):
    """GELU as llama.cpp's CPU code has it: a table of its tanh form, from F16 to F16 (ggml-cpu/vec.h)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.to(torch.float16).double()
        curve = 0.5 * half * (1 + torch.tanh(0.7978845608028654 * half * (1 + 0.044715 * half * half)))
        table = curve.to(torch.float16).to(x.dtype)
        return torch.where(x <= -10, torch.zeros_like(x), torch.where(x >= 10, x, table))


def use_table_gelu(model: transformers.PreTrainedModel) -> None:
    for module in list(model.modules()):
        for name, inner in list(module.named_children()):
            if type(inner).__name__ in GELUS:
                setattr(module, name, TableGelu())


def logits(model: transformers.PreTrainedModel, ids: list[int], dtype: torch.dtype) -> np.ndarray:
    model.set_experts_implementation("eager")  # the others know no fp64
    with torch.no_grad():
        found: np.ndarray = model.to(dtype)(torch.tensor([ids])).logits[0].double().numpy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "falcon"])
def test_llama_cpp_computes_and_tokenizes_as_transformers(tmp_path: Path, name: str) -> None:
    """Logits to within what fp32 itself leaves open, and every id.

    transformers computes twice with llama.cpp's activation, in fp64 and in fp32. llama.cpp may be no more than twice as
    far from the first as the second is, or as its own results lie apart when it takes the text in other pieces.
    """
    convert(f"sample:{name}", tmp_path / "out", "gguf", dtype="float32")
    tokenizer = load_tokenizer(SAMPLES / name)
    assert tokenizer is not None
    ids = torch.randint(1, 512, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    runs = [{"batch": 256, "threads": 1}, {"batch": 256, "threads": 2}, {"batch": 1, "threads": 1}]
    answer = ask(tmp_path / "out" / f"{name}-F32.gguf", ids, TEXTS, runs)
    theirs = [np.array(run) for run in answer["logits"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(SAMPLES / name, dtype=torch.float32)
    plain = logits(model, ids, torch.float64)
    use_table_gelu(model)
    exact = logits(model, ids, torch.float64)
    rounded = logits(model, ids, torch.float32)
    own = max(np.abs(other - theirs[0]).mean() for other in theirs[1:])
    noise = max(np.abs(rounded - exact).mean(), own)
    for run in theirs:
        error = np.abs(run - exact).mean()
        print(f"{name}: mean {error:.2e}, noise {noise:.2e}, largest with plain GELU {np.abs(run - plain).max():.1e}")
        assert error <= 2 * noise
        assert (run.argmax(-1) == rounded.argmax(-1)).mean() > 0.99
    for text, found in zip(TEXTS, answer["tokens"], strict=True):
        assert found == tokenizer.encode(text), text


@pytest.mark.slow
@needs_stories
def test_llama_cpp_tokenizes_sentencepieces_bpe_as_its_tokenizer_json(tmp_path: Path) -> None:
    convert(STORIES, tmp_path / "out", "gguf", dtype="float32")
    tokenizer = load_tokenizer(STORIES)
    assert tokenizer is not None
    answer = ask(next((tmp_path / "out").glob("*.gguf")), [1, 5], SPM_TEXTS, [{"batch": 2, "threads": 1}])
    for text, found in zip(SPM_TEXTS, answer["tokens"], strict=True):
        assert found == tokenizer.encode(text), text


@pytest.mark.slow
@pytest.mark.parametrize("variant", WRITTEN, ids=str)
def test_llama_cpp_loads_and_computes_every_variant(tmp_path: Path, variant: Variant) -> None:
    """Random parameters and no tokenizer; within what fp32 rounds, in transformers or in llama.cpp's own other way."""
    model = save_hf(variant.config, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out.gguf", "gguf")
    ids = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    runs = [{"batch": 64, "threads": 1}, {"batch": 1, "threads": 1}]
    answer = ask(tmp_path / "out.gguf", ids, [], runs)
    use_table_gelu(model)
    exact, rounded = logits(model, ids, torch.float64), logits(model, ids, torch.float32)
    theirs, again = (np.array(each) for each in answer["logits"])
    error, noise = np.abs(theirs - exact), max(np.abs(rounded - exact).mean(), np.abs(theirs - again).mean())
    print(f"{variant}: mean {error.mean():.2e} of {np.abs(exact).mean():.2g}, noise {noise:.2e}")
    assert error.mean() <= 3 * noise


@pytest.mark.slow
@pytest.mark.parametrize("name", GGUF)
def test_llama_cpp_computes_in_half_precision(tmp_path: Path, name: str) -> None:
    """What it wants in fp32 is in fp32 then, or it ends."""
    variant = next(each for each in WRITTEN if each.family == name)
    model = save_hf(variant.config, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out.gguf", "gguf", dtype="float16")
    ids = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    answer = ask(tmp_path / "out.gguf", ids, [], [{"batch": 64, "threads": 1}])
    use_table_gelu(model)
    plain = logits(model, ids, torch.float32)
    error = np.abs(np.array(answer["logits"][0]) - plain).mean() / np.abs(plain).mean()
    print(f"{variant}: {error:.1e}")
    assert error < 0.02


# --- one file by name ---


def test_a_name_that_ends_in_gguf_is_the_file(tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    convert("sample:llama", tmp_path / "folder", "gguf")
    done = convert("sample:llama", target, "gguf")
    (inside,) = (tmp_path / "folder").glob("*.gguf")
    assert target.is_file() and target.read_bytes() == inside.read_bytes() and done.published
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.gguf"]
    dry = conversion_lines(convert("sample:llama", tmp_path / "dry.gguf", "gguf", dry_run=True))
    assert any("dry.gguf" in line for line in dry) and not any("manifest" in line for line in dry)


def test_force_replaces_a_gguf_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    convert("sample:llama", target, "gguf", dtype="float32")
    old = target.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        convert("sample:llama", target, "gguf")
    assert target.read_bytes() == old
    convert("sample:llama", target, "gguf", force=True)
    assert target.read_bytes() != old
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "other.gguf").write_text("notes of mine")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "link.gguf").symlink_to(target)
    for name in ("pipe", "other", "folder", "link"):
        before = (tmp_path / f"{name}.gguf").lstat()
        with pytest.raises(UsageError, match=r"not a file|another format"):
            convert("sample:llama", tmp_path / f"{name}.gguf", "gguf", force=True)
        assert (tmp_path / f"{name}.gguf").lstat().st_ino == before.st_ino
    assert not list(tmp_path.glob(".*"))


def test_a_file_over_its_own_source(tmp_path: Path) -> None:
    target = tmp_path / "x.gguf"
    convert("sample:llama", target, "gguf", dtype="float32")
    convert(target, target, "gguf", dtype="float16", force=True)
    assert {type_of(tensor) for tensor in gguf.GGUFReader(target).tensors} == {"F16", "F32"}


def type_of(tensor: Any) -> str:
    return str(tensor.tensor_type.name)


def test_one_writer_of_a_file_who_sweeps_what_others_left(tmp_path: Path) -> None:
    target, left = tmp_path / "out.gguf", tmp_path / ".out.gguf.partial-1-0123abcd"
    left.mkdir()
    (left / "out.gguf").write_bytes(b"half")
    begin_journal(left, "")
    with locked(target), pytest.raises(GptkitError, match="another"):
        convert("sample:llama", target, "gguf")
    assert left.exists() and not target.exists()
    convert("sample:llama", target, "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


@pytest.mark.parametrize(
    ("name", "to"),
    [("out.bin", "llama2c"), ("ckpt.pt", "nanogpt"), ("x.safetensors", "hf"), ("x.gguf", "local"), ("x.pth", "gguf")],
)
def test_a_files_name_is_no_folders(name: str, to: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{name} looks like a file name, but --to {to} writes a folder"):
        convert("sample:llama", tmp_path / name, to)
    assert not list(tmp_path.iterdir())


# --- what comes back ---


def tensors_of(path: Path) -> dict[str, tuple[str, bytes]]:
    return {tensor.name: (type_of(tensor), np.array(tensor.data).tobytes()) for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_tensors_of_a_gguf_come_back_to_the_byte(dtype: str, tmp_path: Path) -> None:
    convert("sample:llama", tmp_path / "a.gguf", "gguf", dtype=dtype)
    convert(tmp_path / "a.gguf", tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "b.gguf", "gguf")
    assert tensors_of(tmp_path / "b.gguf") == tensors_of(tmp_path / "a.gguf")


def test_of_a_quantised_gguf_the_numbers_come_back(tmp_path: Path) -> None:
    convert("sample:llama", tmp_path / "a.gguf", "gguf", dtype="q8_0")
    source = open_checkpoint(tmp_path / "a.gguf")
    numbers = {leaf.checkpoint: source.read(leaf).astype(np.float32) for leaf in source.leaves}
    convert(tmp_path / "a.gguf", tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "b.gguf", "gguf")
    back = tensors_of(tmp_path / "b.gguf")
    assert {name for name, (kind, _) in tensors_of(tmp_path / "a.gguf").items() if kind == "Q8_0"}
    assert not any(kind == "Q8_0" for kind, _ in back.values())
    for name, (kind, data) in back.items():
        assert np.array_equal(
            np.frombuffer(data, kind.replace("F", "<f").replace("32", "4").replace("16", "2")),
            numbers[name].reshape(-1),
        ), name
    convert(tmp_path / "b.gguf", tmp_path / "again")
    convert(tmp_path / "again", tmp_path / "c.gguf", "gguf")
    assert tensors_of(tmp_path / "c.gguf") == back


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "q8_0"])
def test_config_json_names_the_dtype_of_the_matrices_of_a_gguf(dtype: str, tmp_path: Path) -> None:
    """Norms are F32 in every GGUF, and the output says so where the source has them in another dtype."""
    written = convert("sample:llama", tmp_path / "model.gguf", "gguf", dtype=dtype)
    said = "llama.cpp requires F32 for 11 norms and other small tensors, which the source stores as BF16"
    assert (said in written.source.notes) == (dtype != "float32")
    back = convert(tmp_path / "model.gguf", tmp_path / "back", "hf")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config.get("dtype") == (None if dtype == "q8_0" else dtype)
    why = "config.json has no dtype, because the GGUF stores its matrices as F16, Q8_0"
    assert (why in back.source.notes) == (dtype == "q8_0")
    convert(tmp_path / "model.gguf", tmp_path / "narrow", "hf", dtype="bfloat16")
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["dtype"] == "bfloat16"
    if dtype != "q8_0":
        convert(tmp_path / "back", tmp_path / "again.gguf", "gguf")
        assert tensors_of(tmp_path / "again.gguf") == tensors_of(tmp_path / "model.gguf")


# --- what a file gives back is whole ---


@few(6)
@pytest.mark.parametrize("name", rest_slow(name for name in CONFIGS if name not in REFUSED))
def test_transformers_builds_what_comes_back(tmp_path: Path, name: str) -> None:
    """The config.json that a file gives has all that transformers' class asks for."""
    try:
        convert(saved(name, tmp_path), tmp_path / "model.gguf", "gguf")
    except CannotExpress:
        pytest.skip("not written")
    convert(tmp_path / "model.gguf", tmp_path / "back", "hf")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    with torch.device("meta"):
        model = auto_class(config).from_config(transformers.AutoConfig.from_pretrained(tmp_path / "back"))
    assert model.num_parameters() > 0
    assert verify(tmp_path / "model.gguf", mutations=False).verdict in ("identical", "equal")


@pytest.mark.parametrize("name", ["mamba", "rwkv", "jamba", "t5"])
def test_a_family_that_is_not_written_is_named_first(tmp_path: Path, name: str) -> None:
    with pytest.raises(CannotExpress) as refused:
        convert(saved(name, tmp_path), tmp_path / "model.gguf", "gguf")
    assert refused.value.message.startswith(f"gptkit cannot write {name} as GGUF. ")
