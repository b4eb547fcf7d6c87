"""The lists of families and of presets, for the terminal and for programs."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderResult

from ..analysis.parameters import count
from ..architectures import ARCHITECTURES, BY_MODEL_TYPE, architecture_of, transformers_lists
from ..architectures.presets import Preset, presets
from .sheets import GAP, Terminal, drawing, plain_table

_MAPPING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"  # what transformers calls its list of causal language models

_WHY: Mapping[str, str] = {
    "recurrent, convolutional or linear layers": """
        bailing_hybrid kimi_linear lfm3
        minimax olmo_hybrid xlstm zamba
    """,
    "an encoder, or a decoder beside one": """
        bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra
        ernie marian mbart megatron-bert modernbert-decoder mvp pegasus plbart prophetnet rembert roberta
        roberta-prelayernorm roc_bert roformer trocr whisper xlm-roberta xlm-roberta-xl xmod
    """,
    "parts that see or hear": """
        aria_text emu3 fuyu git got_ocr2 mllama moshi moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal
    """,
    "attention that chooses or compresses its keys": """
        deepseek_v32 deepseek_v4 glm_moe_dsa minimax_m3_vl_text reformer
    """,
}
"""Why model types are not read yet, where the reason is one of many types'."""


UNCOUNTED = frozenset({
    "cohere_compass_text", "emu3", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "lfm2_moe", "qwen4_exp",
    "qwen4_exp_text",
})  # fmt: skip
"""Model types of which transformers makes no model from the sizes that its own config class begins with."""


def _reason(kind: str) -> str:
    """Why a model type is not read."""
    return next((why for why, kinds in _WHY.items() if kind in kinds.split()), "other components")


def causal_types() -> dict[str, str]:
    """Each model type of the installed transformers that is a causal language model, with its class.

    Read from the text of models/auto/modeling_auto.py, since to import it takes a second; empty where there is none.
    """
    for node in ast.parse(transformers_lists("modeling_auto.py")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == _MAPPING for t in node.targets):
            assert isinstance(node.value, ast.Call)
            pairs: Sequence[tuple[str, str | tuple[str, ...]]] = ast.literal_eval(node.value.args[0])
            return {kind: name if isinstance(name, str) else name[0] for kind, name in pairs}
    return {}


def families_json(words: Sequence[str] = (), *, everything: bool = False) -> dict[str, Any]:
    """Plain JSON values: the families, oldest first, with when their first weights were published, their model types,
    transformers' class, that of encoders without a head, whether they are encoder-decoders, and how many presets they
    have; how many of the installed transformers' causal language models they are, and how many can be counted, by the
    names of their tensors at the least; and with `everything` those that they are not, and why.
    """

    def wanted(*names: str) -> bool:
        return all(any(word in name.lower() for name in names) for word in words)

    kinds, known = causal_types(), [each.config["model_type"] for each in presets().values()]
    own = {kind: each for kind, each in BY_MODEL_TYPE.items() if not each.base_class and not each.two_stacks}
    exact = [kind for kind in kinds if kind in own]
    return {
        "schema_version": 1,
        "families": [
            {
                "family": each.name,
                "released": each.released or None,
                "model_types": list(each.model_types),
                "transformers": each.hf_class,
                "without_head": each.base_class or None,
                "encoder_decoder": each.two_stacks,
                "presets": sum(kind in each.model_types for kind in known),
            }
            for each in ARCHITECTURES.values()
            if wanted(each.name, *each.model_types)
        ],
        "counts": {
            "families": len(ARCHITECTURES),
            "encoders": sum(bool(each.base_class) for each in ARCHITECTURES.values()),
            "encoder_decoders": sum(each.two_stacks for each in ARCHITECTURES.values()),
            "types": len(kinds),
            "exact": len(exact),
            "counted": len(kinds.keys() - UNCOUNTED),
        },
        "others": [
            {"model_type": kind, "transformers": name, "why": _reason(kind), "counted": kind not in UNCOUNTED}
            for kind, name in kinds.items()
            if everything and kind not in exact and wanted(kind)
        ],
    }


@drawing
def families_table(terminal: Terminal, found: Mapping[str, Any]) -> RenderResult:
    """A row a family, and one for each model type that is none."""
    kinds: dict[str, list[Any]] = {"family": [], "encoder": [], "encoder-decoder": []}
    for each in found["families"]:
        others = [kind for kind in each["model_types"] if kind != each["family"]]
        name = each["family"] + (f" ({', '.join(others)})" if others else "")
        row = (name, each["released"] or "", each["transformers"], f"{each['presets'] or ''}")
        kind = "encoder-decoder" if each["encoder_decoder"] else "encoder" if each["without_head"] else "family"
        kinds[kind].append([*map(terminal.text, row)])
    there = {kind: rows for kind, rows in kinds.items() if rows} or {"family": []}
    for index, (kind, rows) in enumerate(there.items()):
        yield from [""] * (index > 0)
        titles = (kind, "since", "transformers' class", "presets")
        yield plain_table(*((title, title == "presets") for title in titles), rows=rows)
    if found["others"]:
        counted = {True: "by names", False: "no"}
        rows = [[*map(terminal.text, (o["model_type"], counted[o["counted"]], o["why"]))] for o in found["others"]]
        yield ""
        yield plain_table(("not yet", False), ("counted", False), ("what they have", False), rows=rows)
    counts = found["counts"]
    if counts["types"]:
        yield ""
        yield terminal.text(
            f"{counts['families']} families, of which {counts['encoders']} are encoders and "
            f"{counts['encoder_decoders']} encoder-decoders; {counts['exact']} of the "
            f"{counts['types']} causal language models of the installed transformers. Parameters are counted of "
            f"{counts['counted']} of these."
        )


def preset_json(preset: Preset) -> dict[str, Any]:
    """Plain JSON values; the parameters are an integer."""
    architecture = architecture_of(preset.config)
    told: dict[str, Any] = {"name": preset.name, "aliases": list(preset.aliases), "family": architecture.name}
    told["parameters"] = count(architecture.spec(preset.config)).total
    return {**told, "repo": preset.repo, "source": preset.source}


@drawing
def preset_table(terminal: Terminal, presets: Sequence[Mapping[str, Any]]) -> RenderResult:
    """A row a preset, of its JSON values: its name, its parameters, and where it lies on the hub; as many columns as
    there is room for.
    """
    rows = [(p["name"], p["family"], f"{p['parameters']:,}", p["repo"] or "not published") for p in presets]
    gap = GAP - 1  # the longest repository just fits 80 columns
    widths = [max(map(len, column)) + gap for column in zip(*rows, strict=True)]
    some = ((0, 1, 2, 3), (0, 2, 3), (0, 2))
    columns = next((each for each in some if sum(widths[column] for column in each) - gap <= terminal.width), some[-1])
    titles = [("preset", False), ("family", False), ("parameters", True), ("repository", False)]
    cells = [[terminal.text(row[column]) for column in columns] for row in rows]
    yield plain_table(*(titles[column] for column in columns), rows=cells, gap=gap)
