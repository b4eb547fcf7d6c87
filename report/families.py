"""The lists of model families and of presets (the models that gptkit knows by name), as tables and as JSON."""

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
    "an encoder, or an encoder and a decoder": """
        bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra
        ernie marian mbart megatron-bert mvp pegasus plbart prophetnet rembert roberta
        roberta-prelayernorm roc_bert roformer trocr whisper xlm-roberta xlm-roberta-xl xmod
    """,
    "parts for images or sound": """
        aria_text emu3 fuyu git got_ocr2 mllama moshi moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal
    """,
    "attention that chooses or compresses its keys": """
        deepseek_v32 deepseek_v4 glm_moe_dsa minimax_m3_vl_text reformer
    """,
}
"""The model types that gptkit does not read yet, by a reason that several of them share."""

UNCOUNTED = frozenset({
    "cohere_compass_text", "emu3", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "lfm2_moe", "qwen4_exp",
    "qwen4_exp_text",
})  # fmt: skip
"""Model types from whose default config transformers builds no model, so that names cannot be counted."""


def _reason(kind: str) -> str:
    return next((why for why, kinds in _WHY.items() if kind in kinds.split()), "other unsupported components")


def causal_types() -> dict[str, str]:
    """Return the names of the classes of causal language models in the installed transformers, by model type.

    They are parsed from the text of models/auto/modeling_auto.py, because importing it takes a second. Without
    transformers the result is empty.
    """
    for node in ast.parse(transformers_lists("modeling_auto.py")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == _MAPPING for t in node.targets):
            assert isinstance(node.value, ast.Call)
            pairs: Sequence[tuple[str, str | tuple[str, ...]]] = ast.literal_eval(node.value.args[0])
            return {kind: name if isinstance(name, str) else name[0] for kind, name in pairs}
    return {}


def families_json(words: Sequence[str] = (), *, everything: bool = False) -> dict[str, Any]:
    """Return the families, oldest first, as plain JSON values.

    `words` selects the families that have all of these words in their names. `everything` adds the causal language
    models of transformers that gptkit cannot read.

    In the result, `released` is the date of the first published weights, and `without_head` the class of an encoder
    without a head. `counts.exact` is the number of transformers' causal language models that gptkit can read.
    `counts.counted` is the number of those whose parameters it can at least count by the names of their tensors.
    """

    def wanted(*names: str) -> bool:
        return all(any(word in name.lower() for name in names) for word in words)

    kinds, known = causal_types(), [preset.config["model_type"] for preset in presets().values()]
    decoders = {kind for kind, family in BY_MODEL_TYPE.items() if not family.base_class and not family.two_stacks}
    exact = [kind for kind in kinds if kind in decoders]
    families = ARCHITECTURES.values()
    return {
        "schema_version": 1,
        "families": [
            {
                "family": family.name,
                "released": family.released or None,
                "model_types": list(family.model_types),
                "transformers": family.hf_class,
                "without_head": family.base_class or None,
                "encoder_decoder": family.two_stacks,
                "presets": sum(kind in family.model_types for kind in known),
            }
            for family in families
            if wanted(family.name, *family.model_types)
        ],
        "counts": {
            "families": len(families),
            "encoders": sum(bool(family.base_class) for family in families),
            "encoder_decoders": sum(family.two_stacks for family in families),
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
def families_table(terminal: Terminal, families: Mapping[str, Any]) -> RenderResult:
    """Yield the result of `families_json` as tables: decoders, encoders, encoder-decoders, and models not read yet."""
    tables: dict[str, list[Any]] = {"family": [], "encoder": [], "encoder-decoder": []}
    for family in families["families"]:
        others = [kind for kind in family["model_types"] if kind != family["family"]]
        name = family["family"] + (f" ({', '.join(others)})" if others else "")
        row = (name, family["released"] or "", family["transformers"], f"{family['presets'] or ''}")
        title = "encoder-decoder" if family["encoder_decoder"] else "encoder" if family["without_head"] else "family"
        tables[title].append([*map(terminal.text, row)])
    filled = {title: rows for title, rows in tables.items() if rows} or {"family": []}
    for index, (title, rows) in enumerate(filled.items()):
        yield from [""] * (index > 0)
        headings = (title, "since", "transformers' class", "presets")
        yield plain_table(*((heading, heading == "presets") for heading in headings), rows=rows)
    if families["others"]:
        counted = {True: "by names", False: "no"}
        cells = [(kind["model_type"], counted[kind["counted"]], kind["why"]) for kind in families["others"]]
        yield ""
        columns = (("not supported yet", False), ("counted", False), ("reason", False))
        yield plain_table(*columns, rows=[[*map(terminal.text, row)] for row in cells])
    counts = families["counts"]
    if counts["types"]:
        yield ""
        yield terminal.text(
            f"{counts['families']} families, of which {counts['encoders']} are encoders and "
            f"{counts['encoder_decoders']} encoder-decoders; {counts['exact']} of the "
            f"{counts['types']} causal language models of the installed transformers. gptkit counts the parameters of "
            f"{counts['counted']} of these."
        )


def preset_json(preset: Preset) -> dict[str, Any]:
    """Return a preset with its number of parameters as plain JSON values."""
    family = architecture_of(preset.config)
    parameters = count(family.spec(preset.config)).total
    names = {"name": preset.name, "aliases": list(preset.aliases), "family": family.name}
    return {**names, "parameters": parameters, "repo": preset.repo, "source": preset.source}


@drawing
def preset_table(terminal: Terminal, presets: Sequence[Mapping[str, Any]]) -> RenderResult:
    """Yield a table of presets from their JSON values, with as many columns as fit."""
    rows = [(p["name"], p["family"], f"{p['parameters']:,}", p["repo"] or "not published") for p in presets]
    gap = GAP - 1  # the longest repository just fits 80 columns
    widths = [max(map(len, column)) + gap for column in zip(*rows, strict=True)]
    choices = ((0, 1, 2, 3), (0, 2, 3), (0, 2))
    fitting = (choice for choice in choices if sum(widths[column] for column in choice) - gap <= terminal.width)
    columns = next(fitting, choices[-1])
    titles = [("preset", False), ("family", False), ("parameters", True), ("repository", False)]
    cells = [[terminal.text(row[column]) for column in columns] for row in rows]
    yield plain_table(*(titles[column] for column in columns), rows=cells, gap=gap)
