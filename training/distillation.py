"""Losses by which one model learns to answer as another: of the whole, or of each layer by itself."""

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


class Answers:
    """A teacher that remembers its logits, up to `_REMEMBERED` bytes, for text that is evaluated repeatedly."""

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
    teacher: Decoder, hidden: float = 0.0, sample: Batch | None = None, answers: Answers | None = None
) -> Loss:
    """Return the loss by which a model learns to answer as a teacher.

    It is the KL divergence of the model's next-token distribution from the teacher's (see `divergence`). In training,
    `hidden` is the weight of a second term: the squared distance between the streams of both after a layer, over the
    mean square of the teacher's on the `sample`, as a mean over layers. In evaluations, the `answers` have the
    teacher's logits.
    """
    sizes = _sizes(teacher, sample, range(len(teacher.blocks))) if hidden and sample is not None else {}

    def loss(model: Logits, batch: Batch) -> Tensor:
        counted = batch.targets != NOWHERE
        if answers is not None and not torch.is_grad_enabled():
            return divergence(answers(batch), model(batch.ids, documents=batch.documents), counted)
        layers = range(len(teacher.blocks)) if hidden and torch.is_grad_enabled() else range(0)
        with torch.no_grad(), _watched(teacher.blocks, layers) as original:
            wanted = teacher(batch.ids, documents=batch.documents)
        with _watched(_student(model).blocks, layers) as own:
            found = divergence(wanted, model(batch.ids, documents=batch.documents), counted)
        for layer in layers:
            y, given = original[layer][1].float(), own[layer][1].float()
            size = sizes[layer][1] if sizes else float(y.square().sum(dim=-1).mean())
            far = (given - y).square().sum(dim=-1) / max(size, 1e-12)
            found = found + hidden / len(layers) * (far * counted).sum()
        return found

    return loss


def _student(model: Logits) -> Decoder:
    """The model itself, of one that may be compiled."""
    found: Decoder = model if isinstance(model, Decoder) else model._orig_mod  # type: ignore[attr-defined]
    return found


def divergence(wanted: Tensor, given: Tensor, counted: Tensor) -> Tensor:
    """Σ KL(wanted ‖ given) in nats, of logits (B, T, vocabulary), at the places that are counted, (B, T). It is
    differentiable by `given`.

    Vocabularies may differ behind the tokens that both have. What `given` has more takes probability from the others,
    and counts against it. What it has not, it cannot answer: `wanted` is then what it is among the tokens of both.
    """
    rows = (each.flatten(0, -2) for each in (wanted[..., : given.shape[-1]], given))
    found: Tensor = _Divergence.apply(*rows, counted.reshape(-1))  # type: ignore[no-untyped-call]
    return found


class _Divergence(torch.autograd.Function):
    """A few tokens at a time, with the gradient, softmax(given) - softmax(wanted): a vocabulary's probabilities in fp32
    take more memory than much of a model, and more time from memory than from a core's cache.
    """

    @staticmethod
    def forward(ctx: Any, wanted: Tensor, given: Tensor, counted: Tensor) -> Tensor:
        """Logits (N, vocabulary), those wanted of no more tokens than are given, and which rows count, (N,)."""
        both = wanted.shape[-1]
        step = max(1, (_CACHED if given.device.type == "cpu" else _LAUNCHED) // given.shape[-1])
        gradient = torch.empty_like(given) if given.requires_grad else None
        total = torch.zeros((), device=given.device)
        for rows in (slice(start, start + step) for start in range(0, len(given), step)):
            p, q = (F.log_softmax(each[rows].float(), dim=-1) for each in (wanted, given))
            likely, counts = p.exp(), counted[rows].to(p.dtype)
            total += ((p.sub_(q[:, :both]).mul_(likely)).sum(dim=-1) * counts).sum()
            if gradient is not None:
                q.exp_()[:, :both].sub_(likely)
                gradient[rows] = q.mul_(counts[:, None])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *of_total: Tensor) -> tuple[None, Tensor, None]:
        """What was kept, times the gradient of the sum."""
        (gradient,) = ctx.saved_tensors
        return None, gradient * of_total[0], None


_REMEMBERED = 1 << 28
_CACHED = 1 << 18  # numbers of fp32 that, a few times, stay in a core's cache
_LAUNCHED = 1 << 26  # that keep a GPU busy for as long as the next kernels take to be launched: 268 MB


def block_local(teacher: Decoder, layers: Sequence[int], sample: Batch | None = None) -> Loss:
    """How far each of these layers is from the teacher's, given what the teacher's was: |Δ|² over |what it adds|², a
    mean over layers. What it adds is that of the `sample`, the same for each part of a step, or of each batch.
    """
    sizes = {} if sample is None else _sizes(teacher, sample, layers)

    def loss(model: Logits, batch: Batch) -> Tensor:
        with torch.no_grad(), _watched(teacher.blocks, layers) as original:
            teacher(batch.ids, documents=batch.documents)
        given = {layer: x for layer, (x, _) in original.items()}
        with _watched(_student(model).blocks, layers, given) as own:
            model(batch.ids, documents=batch.documents)
        counted = batch.targets != NOWHERE
        total = torch.zeros(counted.shape, device=batch.ids.device)
        for layer in layers:
            (x, y), (_, found) = original[layer], own[layer]
            added = sizes[layer][0] if sizes else float((y - x).float().square().sum(dim=-1).mean())
            total = total + (found - y).float().square().sum(dim=-1) / max(added, 1e-12)
        return (total * counted).sum() / len(layers)

    return loss


@torch.no_grad()
def _sizes(teacher: Decoder, sample: Batch, layers: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Of each layer, on a batch: the mean square of what it adds to the stream of a token, and of what leaves it."""
    with _watched(teacher.blocks, layers) as seen:
        teacher(sample.ids, documents=sample.documents)
    pairs = {layer: ((y - x).float(), y.float()) for layer, (x, y) in seen.items()}
    return {i: tuple(float(x.square().sum(dim=-1).mean()) for x in pair) for i, pair in pairs.items()}  # type: ignore[misc]


@contextmanager
def _watched(
    blocks: nn.ModuleList, layers: Sequence[int], given: Mapping[int, Tensor] | None = None
) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """What each layer is given, and gives, each (B, T, hidden); with `given`, they are given that."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    hooks = []
    for layer in layers:

        def before(_: nn.Module, args: Any, layer: int = layer) -> Any:
            return None if given is None else (given[layer], *args[1:])

        def after(_: nn.Module, args: Any, output: Tensor, layer: int = layer) -> None:
            seen[layer] = args[0], output

        hooks += [blocks[layer].register_forward_pre_hook(before), blocks[layer].register_forward_hook(after)]
    try:
        yield seen
    finally:
        for each in hooks:
            each.remove()
