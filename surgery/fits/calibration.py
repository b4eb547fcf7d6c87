"""A model's activations on the text that swaps are fitted on (`fits.text`), one layer at a time.

A calibrated swap needs the inputs of the layers that it changes. `Calibration.walk` runs the text through a model with
one layer's weights in memory, and yields every layer with its input. torch is only imported when a text runs through a
model, so that a dry run works without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeAlias

from ...components import ModelSpec
from ..base import Exactly, Model
from .text import CalibrationText

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ...modules.context import Context
    from ...modules.decoder import BlockModule

_Run: TypeAlias = "tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]"
_WINDOW = 512  # the number of tokens in a sequence, if the model accepts that many


class Calibration:
    """The part of a text to fit on, cut into sequences that a model accepts: token ids (rows, tokens).

    The activations on the text, and fits from them, are computed on `device`.
    """

    def __init__(
        self, text: CalibrationText, spec: ModelSpec, most: int = _WINDOW, device: torch.device | str = "cpu"
    ) -> None:
        self.text, self.spec, self.device = text, spec, device
        table = None if spec.positions is None else spec.positions.length
        width = min(limit for limit in (most, table, spec.context_length, len(text.fitted)) if limit is not None)
        self.shape = (len(text.fitted) // width, width)

    @cached_property
    def ids(self) -> Tensor:
        """Return the token ids, (rows, tokens), on the device."""
        import torch

        rows, width = self.shape
        return torch.tensor(self.text.fitted[: rows * width]).reshape(rows, width).to(self.device)

    def within(self, spec: ModelSpec) -> Calibration:
        """Return the same text in sequences that are also short enough for a second model, `spec`."""
        width = Calibration(self.text, spec, self.shape[1]).shape[1]
        return Calibration(self.text, self.spec, width, self.device)

    def deciding(self, tokens: int) -> Calibration:
        """Return the first `tokens` tokens of the part that chooses between fits, as the text to run through the model.

        If the text has no such part, they are taken from the part to fit on.
        """
        part = self.text.choosing or self.text.fitted
        return Calibration(replace(self.text, fitted=part[:tokens]), self.spec, device=self.device)

    def start(self, model: Model) -> tuple[Tensor, Context]:
        """Embed the text. Return the input of the first layer, (rows, tokens, hidden), and the positions and masks.

        All layers use these positions and masks (`Context`).
        """
        import torch

        from ...modules.context import Context
        from ...modules.decoder import Front
        from ...modules.load import filled, tensor_of

        (rows, steps), read = self.shape, partial(tensor_of, Exactly(model))
        front = filled(partial(Front, model.spec), read, torch.float32, device=self.device)
        positions = torch.arange(steps, device=self.device)[None]
        with torch.no_grad():
            x, inputs = front(self.ids, positions)
        context = Context(rows, steps, 0, False, positions, None, x.dtype)
        context.inputs, context.shared, context.first = inputs, dict.fromkeys(model.spec.reused_keys), x
        return x, context

    def walk(
        self, model: Model, layers: Collection[int] | None = None, without: Collection[int] = ()
    ) -> Iterator[CalibrationLayer]:
        """Run the text through a model in fp32, one layer at a time. Yield the layers with their inputs.

        If the caller changes the weights of a yielded layer, the later layers get the changed output.

        Args:
            model: The model to run.
            layers: The numbers of the layers to yield. The default is all.
            without: The numbers of layers that are skipped, as if the model did not have them.
        """
        x, context = self.start(model)
        for index in range(len(model.spec.blocks) if layers is None else max(layers) + 1):
            if index in without:
                continue
            context.layer = index
            layer = CalibrationLayer(index, block_of(model, index, self.device), context, x)
            if layers is None or index in layers:
                yield layer
            x = layer.output
            model.release()


@dataclass
class CalibrationLayer:
    """A layer of a model with its input, while a text runs through the model."""

    index: int  # the number of the layer
    module: BlockModule  # the layer's block with its weights
    context: Context
    x: Tensor  # the layer's input, (rows, tokens, hidden)

    @cached_property
    def output(self) -> Tensor:
        """Return the output of the layer."""
        return run_block(self.module, self.x, self.context)[0]

    def run(self, *watched: str) -> _Run:
        """Run the block with `run_block`. The attribute `output` then has the block's output."""
        output, activations = run_block(self.module, self.x, self.context, *watched)
        self.__dict__.setdefault("output", output)
        return output, activations


def run_block(block: BlockModule, x: Tensor, context: Context, *watched: str) -> _Run:
    """Run a block. Return its output, and for each module named in `watched` the pair of its input and output.

    A module is named by its path in the block, such as "attention.o_proj". `context` has the positions and masks.
    """
    import torch

    from ...parity.passes import hooked

    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        # These are copies, because a gated feed-forward multiplies its gate in place.
        seen[name] = (inputs[0].detach().clone(), output.detach().clone())

    hooks = [block.get_submodule(name).register_forward_hook(partial(watch, name)) for name in watched]
    with hooked(hooks), torch.no_grad():
        output: Tensor = block(x, context)
    return output, seen


def block_of(model: Model, index: int, device: torch.device | str = "cpu") -> BlockModule:
    """Return the module of one layer of a model, with its weights in fp32 on a device."""
    import torch

    from ...modules.decoder import BlockModule
    from ...modules.load import filled, tensor_of

    read, make = partial(tensor_of, Exactly(model)), partial(BlockModule, model.spec.blocks[index])
    return filled(make, read, torch.float32, f"blocks.{index}", device)
