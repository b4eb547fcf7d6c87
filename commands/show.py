"""The command show, which draws a model's tree and the path of the data through one of its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UsageError
from ..terminal import answer, say
from .base import JSON, MODEL, QUIET, ForTree, Pictures, command, option

if TYPE_CHECKING:
    from ..analysis.params import ModelCount


@command(
    "gptkit show qwen3-8b",
    "gptkit show falcon-7b --svg falcon.svg",
    "gptkit show ./my-checkpoint --layer 3 --html block.html",
)
def show(
    model: str = MODEL,
    layer: int | None = option(
        "N",
        "The number of the layer to draw, such as 3. The first layer is 0. By default, gptkit draws layer 0. "
        "An HTML page (--html) then has one layer of each kind.",
    ),
    json: bool = JSON,
    *,
    drawn: Pictures,
    opening: ForTree,
    quiet: bool = QUIET,
) -> None:
    """Draw a model: its components with shapes, and the path of data through a layer."""
    from ..analysis.params import params
    from ..report.show import model_drawing, named_drawing, named_json, named_page, show_json, show_page
    from ..report.structure import structure

    (counted,) = params(model, **opening)
    if counted.named is not None and layer is None:
        answer(json, lambda: named_json(counted), lambda: named_drawing(counted), quiet)
        _source(counted, quiet or json)
        drawn.write(lambda: named_page(counted), quiet or json)
        return
    layers = len(counted.spec.blocks)
    if layer is not None and not 0 <= layer < layers:
        raise UsageError(
            f"--layer: {model} has no layer {layer}", f"It has {layers:,} layers, numbered from 0 to {layers - 1:,}."
        )
    graph = structure(counted.spec)
    kinds = graph.kinds if layer is None else (graph.kind_of(layer),)
    answer(
        json, lambda: show_json(counted, graph, kinds), lambda: model_drawing(counted, graph, kinds[0], layer), quiet
    )
    _source(counted, quiet or json)
    drawn.write(lambda: show_page(counted, graph, kinds), quiet or json)


def _source(model: ModelCount, quiet: bool) -> None:
    """Print where the model's config comes from, and notes about it."""
    from ..report.checkpoints import source_lines

    if model.revision or model.notes:
        say(["", *source_lines([model])], quiet)
