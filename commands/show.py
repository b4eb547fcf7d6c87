"""show: how a model is built, its tree and the path of the data through one of its layers."""

from __future__ import annotations

from typing import Annotated

from ..errors import UsageError
from ..terminal import answer, say
from .base import ForTree, Json, ModelArgument, Pictures, app, examples, guarded, option


@app.command(
    epilog=examples(
        "gptkit show qwen3-8b",
        "gptkit show falcon-7b --svg falcon.svg",
        "gptkit show ./my-checkpoint --layer 3 --html block.html",
    )
)
@guarded
def show(
    model: ModelArgument,
    layer: Annotated[int | None, option("N", "Draw this layer, where layers differ. The first one is 0.")] = None,
    json: Json = False,
    *,
    drawn: Pictures,
    opening: ForTree,
) -> None:
    """Draw a model's tree with shapes, and the data's path through a layer."""
    from ..analysis.params import params
    from ..report.show import model_drawing, show_json, show_page
    from ..report.structure import structure

    (found,) = params(model, **opening)
    layers = len(found.spec.blocks)
    if layer is not None and not 0 <= layer < layers:
        raise UsageError(f"there is no layer {layer}", f"{model} has {layers:,}, 0 to {layers - 1:,}")
    graph = structure(found.spec)
    kinds = graph.kinds if layer is None else (graph.kind_of(layer),)
    answer(json, lambda: show_json(found, graph, kinds), lambda: model_drawing(found, graph, kinds[0], layer))
    if not json and (found.revision or found.notes):
        from ..report.summaries import source_lines

        say(["", *source_lines([found])], quiet=False)
    drawn.write(lambda: show_page(found, graph, kinds), quiet=json)
