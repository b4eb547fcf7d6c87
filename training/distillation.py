"""The losses of distillation: a model learns to predict like a teacher, or its layers to compute like the teacher's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules import Decoder
from .data import NOWHERE
from .loop import Batch, Logits, Loss


class TeacherLogits:
    """A function that computes a teacher's logits, and keeps them for text that is evaluated repeatedly.

    It keeps logits of up to `_REMEMBERED` bytes in total.
    """

    def __init__(self, teacher: Decoder) -> None:
        self.teacher, self.size = teacher, 0
        self.known: dict[tuple[torch.Size, bytes, bytes, bool], Tensor] = {}

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """Return the logits of a batch, (B, T, vocabulary)."""
        documents = b"" if batch.documents is None else batch.documents.cpu().numpy().tobytes()
        ids, narrow = batch.ids.cpu().numpy().tobytes(), torch.is_autocast_enabled(batch.ids.device.type)
        key = batch.ids.shape, ids, documents, narrow
        if (known := self.known.get(key)) is not None:
            return known
        logits: Tensor = self.teacher(batch.ids, documents=batch.documents)
        if self.size + logits.nbytes <= _REMEMBERED:
            self.known[key] = logits
            self.size += logits.nbytes
        return logits


def distilled(
    teacher: Decoder, hidden: float = 0.0, sample: Batch | None = None, answers: TeacherLogits | None = None
) -> Loss:
    """Return the loss by which a model learns to predict like a teacher.

    The loss is the KL divergence of the model's next-token distribution from the teacher's (see `divergence`). In
    training, a second term can be added. It is the squared distance between the hidden states of both models after a
    layer, divided by the mean squared norm of the teacher's hidden states, and averaged over layers.

    Args:
        teacher: the teacher.
        hidden: the weight of the second term; 0 leaves it out.
        sample: the text on which the mean squared norm of the teacher's hidden states is measured; by default, it is
            measured on every batch anew.
        answers: a function with a cache that gives the teacher's logits in evaluations, instead of `teacher`.
    """
    sizes = _sizes(teacher, sample, range(len(teacher.blocks))) if hidden and sample is not None else {}

    def loss(model: Logits, batch: Batch) -> Tensor:
        counted = batch.targets != NOWHERE
        if answers is not None and not torch.is_grad_enabled():
            return divergence(answers(batch), model(batch.ids, documents=batch.documents), counted)
        layers = range(len(teacher.blocks)) if hidden and torch.is_grad_enabled() else range(0)
        with torch.no_grad(), _layer_states(teacher.blocks, layers) as teacher_states:
            target = teacher(batch.ids, documents=batch.documents)
        with _layer_states(_student(model).blocks, layers) as student_states:
            total = divergence(target, model(batch.ids, documents=batch.documents), counted)
        for layer in layers:
            teacher_y, student_y = teacher_states[layer][1].float(), student_states[layer][1].float()
            size = sizes[layer][1] if sizes else float(teacher_y.square().sum(dim=-1).mean())
            distance = (student_y - teacher_y).square().sum(dim=-1) / max(size, 1e-12)
            total = total + hidden / len(layers) * (distance * counted).sum()
        return total

    return loss


def _student(model: Logits) -> Decoder:
    """Return the `Decoder` that `model` wraps if it was compiled with torch.compile, and otherwise `model` itself."""
    student: Decoder = model if isinstance(model, Decoder) else model._orig_mod  # type: ignore[attr-defined]
    return student


def divergence(target: Tensor, logits: Tensor, counted: Tensor) -> Tensor:
    """Return the KL divergence of `logits` from `target`, KL(target ‖ logits), in nats, summed over tokens.

    It is differentiable with respect to `logits`. The two vocabularies may differ in additional tokens at the end. If
    the student has more tokens, the probability that it gives to them increases the divergence. If the teacher has more
    tokens, its distribution is restricted to those that the student has.

    Args:
        target: the teacher's logits, (B, T, vocabulary).
        logits: the student's logits, (B, T, vocabulary).
        counted: whether a token counts, (B, T).
    """
    rows = (tensor.flatten(0, -2) for tensor in (target[..., : logits.shape[-1]], logits))
    total: Tensor = _Divergence.apply(*rows, counted.reshape(-1))  # type: ignore[no-untyped-call]
    return total


class _Divergence(torch.autograd.Function):
    """The sum of KL divergences over tokens, computed for a few tokens at a time together with its gradient.

    The gradient is softmax(logits) - softmax(target). For all tokens at once, the fp32 probabilities of a large
    vocabulary would need much memory, and would not fit in a core's cache.
    """

    @staticmethod
    def forward(ctx: Any, target: Tensor, logits: Tensor, counted: Tensor) -> Tensor:
        """Return the sum of the divergences.

        Args:
            ctx: stores the gradient for `backward`.
            target: the teacher's logits, (N, vocabulary). Their vocabulary is not larger than that of `logits`.
            logits: the student's logits, (N, vocabulary).
            counted: whether a row counts, (N,).
        """
        common = target.shape[-1]
        step = max(1, (_CACHED if logits.device.type == "cpu" else _LAUNCHED) // logits.shape[-1])
        gradient = torch.empty_like(logits) if logits.requires_grad else None
        total = torch.zeros((), device=logits.device)
        for rows in (slice(start, start + step) for start in range(0, len(logits), step)):
            p, q = (F.log_softmax(tensor[rows].float(), dim=-1) for tensor in (target, logits))
            likely, counts = p.exp(), counted[rows].to(p.dtype)
            total += ((p.sub_(q[:, :common]).mul_(likely)).sum(dim=-1) * counts).sum()
            if gradient is not None:
                q.exp_()[:, :common].sub_(likely)
                gradient[rows] = q.mul_(counts[:, None])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *of_total: Tensor) -> tuple[None, Tensor, None]:
        """Return the gradient that `forward` has stored, times the incoming gradient `of_total`."""
        (gradient,) = ctx.saved_tensors
        return None, gradient * of_total[0], None


_REMEMBERED = 1 << 28  # bytes
_CACHED = 1 << 18  # the number of fp32 values of which a few arrays fit in a core's cache
_LAUNCHED = 1 << 26  # the number of values (268 MB) that occupy a GPU until the next kernels are launched


def block_local(teacher: Decoder, layers: Sequence[int], sample: Batch | None = None) -> Loss:
    """Return the loss by which layers learn to compute like the same layers of a teacher (block-local distillation).

    Every layer reads the same input as the teacher's layer. The loss is the squared distance between the outputs of
    both layers, averaged over layers. The distance of a layer is divided by the mean squared norm of the difference
    between output and input of the teacher's layer.

    Args:
        teacher: the teacher.
        layers: the layers to train.
        sample: the text on which the mean squared norm is measured, so that it is the same for all parts of a step; by
            default, it is measured on every batch anew.
    """
    sizes = {} if sample is None else _sizes(teacher, sample, layers)

    def loss(model: Logits, batch: Batch) -> Tensor:
        with torch.no_grad(), _layer_states(teacher.blocks, layers) as teacher_states:
            teacher(batch.ids, documents=batch.documents)
        inputs = {layer: x for layer, (x, _) in teacher_states.items()}
        with _layer_states(_student(model).blocks, layers, inputs) as student_states:
            model(batch.ids, documents=batch.documents)
        counted = batch.targets != NOWHERE
        total = torch.zeros(counted.shape, device=batch.ids.device)
        for layer in layers:
            (x, y), (_, student_y) = teacher_states[layer], student_states[layer]
            size = sizes[layer][0] if sizes else float((y - x).float().square().sum(dim=-1).mean())
            total = total + (student_y - y).float().square().sum(dim=-1) / max(size, 1e-12)
        return (total * counted).sum() / len(layers)

    return loss


@torch.no_grad()
def _sizes(teacher: Decoder, sample: Batch, layers: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return two mean squared norms for every layer: of its output minus its input, and of its output.

    They are means over the tokens of `sample`. The keys of the result are layer numbers.
    """
    with _layer_states(teacher.blocks, layers) as states:
        teacher(sample.ids, documents=sample.documents)
    pairs = {layer: ((y - x).float(), y.float()) for layer, (x, y) in states.items()}
    return {i: tuple(float(x.square().sum(dim=-1).mean()) for x in pair) for i, pair in pairs.items()}  # type: ignore[misc]


@contextmanager
def _layer_states(
    blocks: nn.ModuleList, layers: Sequence[int], inputs: Mapping[int, Tensor] | None = None
) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Record the input and output, both (B, T, hidden), of layers that run inside the context.

    The context yields a dictionary from layer number to (input, output), which is filled when the model runs. If
    `inputs` is given, the layers read these inputs instead of the output of the layer before them.
    """
    states: dict[int, tuple[Tensor, Tensor]] = {}
    handles = []
    for layer in layers:

        def before(_: nn.Module, args: Any, layer: int = layer) -> Any:
            return None if inputs is None else (inputs[layer], *args[1:])

        def after(_: nn.Module, args: Any, output: Tensor, layer: int = layer) -> None:
            states[layer] = args[0], output

        handles += [blocks[layer].register_forward_pre_hook(before), blocks[layer].register_forward_hook(after)]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
