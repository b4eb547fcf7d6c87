"""heal: a changed model trained to answer as the original does, beside a control and a floor.

First each changed layer by itself, on what the original's layer was given (block-local; as in 2510.14444), then the
whole model, by the KL divergence of its next-token distribution from the original's (Hinton et al. 1503.02531, at
temperature 1). What a text alone would have done is told beside it: the *control* is the original, trained on the same
tokens as a language model; the *floor* is the changed tree from random weights, trained as the changed model was.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..architectures import expressed
from ..components import Parameter, differences, without_rounding
from ..converter.files import locked
from ..converter.manifest import MANIFEST
from ..converter.publish import Staging
from ..converter.threads import suit
from ..converter.tokenizer import Tokenizer, load_tokenizer
from ..display import Record, Shown
from ..errors import InvalidInput, UsageError
from ..modules import Decoder
from ..modules.load import load
from ..modules.save import require_form, save
from ..surgery.recipe import HEAL, read_recipe
from ..surgery.registry import Step as Asked
from .data import NOWHERE, SAMPLE, Progress, TokenFile, Windows, paths_of, require_tokenizer
from .loop import Batch, Logits, Loss, Run, Settings, Step, fit, lost, next_token, usual_rate
from .parallel import Group, group
from .state import RUN, Store, make, remove_empty, remove_unbegun
from .state import beside as beside_of
from .train import (
    CONTEXT,
    FURTHER,
    HELD_OUT,
    carries,
    digest_of,
    family_of,
    gathered,
    longest,
    require_trainable,
    settings_of,
    size_of,
    split,
    tokens_of,
    windows_of,
)

LOCAL = 0.25
"""The share of the budget in which layers are trained by themselves, where nobody says how much."""
_EVALUATED = 2048  # tokens that are evaluated at once, at the least
CHOICES = ("all", "changed", "norms", "lora:RANK")
Budget = tuple[int | None, float | None]
"""Of a run: steps, or seconds."""


@dataclass(frozen=True)
class Held(Record):
    """A model on the held-out text: the KL divergence of its predictions from the original's and its cross entropy,
    each in nats a token.
    """

    kl: float
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))


@dataclass(frozen=True)
class Outcome(Record):
    """One kind of run over its seeds: what each came to, and its steps, tokens and seconds."""

    JSON = "runs=held seconds kl loss kl_spread loss_spread"

    held: tuple[Held, ...]
    seconds: float

    @property
    def kl(self) -> float:
        return sum(each.kl for each in self.held) / len(self.held)

    @property
    def loss(self) -> float:
        return sum(each.loss for each in self.held) / len(self.held)

    @property
    def perplexities(self) -> list[float]:
        return [each.perplexity for each in self.held]

    @property
    def kl_spread(self) -> float:
        """The largest less the smallest."""
        return max(each.kl for each in self.held) - min(each.kl for each in self.held)

    @property
    def loss_spread(self) -> float:
        return max(each.loss for each in self.held) - min(each.loss for each in self.held)


@dataclass(frozen=True)
class Healed(Record, Shown):
    """What came out. original, start: the original and the changed model on the held-out text. healed: the changed
    model, trained; control: the original, trained on the same tokens to predict them; floor: the changed tree from
    random weights, trained as the changed model was. trained: parameters that were; local: layers that were trained by
    themselves first.
    """

    JSON = "folder=name teacher tokens steps seeds trained local original start healed control floor recovered"

    folder: Path
    teacher: str
    tokens: int
    steps: int
    seeds: int
    trained: int
    local: tuple[int, ...]
    original: Held
    start: Held
    healed: Outcome
    control: Outcome | None
    floor: Outcome | None

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def recovered(self) -> float | None:
        """The share of the gap, the changed model's KL divergence, that is gone; None where there was none."""
        return None if self.start.kl <= 0 else 1 - self.healed.kl / self.start.kl


# --- losses -----------------------------------------------------------------------------------------------------------


def distilled(teacher: Decoder, hidden: float = 0.0, sample: Batch | None = None) -> Loss:
    """The KL divergence of a model's next-token distribution from a teacher's (see `divergence`); where it is trained,
    and `hidden` is more than 0, with so much of how far the stream is from the teacher's behind each layer,
    |Δ|² over its |x|², a mean over layers; |x|² is that of the `sample`.
    """
    sizes = _sizes(teacher, sample, range(len(teacher.blocks))) if hidden and sample is not None else {}

    def loss(model: Logits, batch: Batch) -> Tensor:
        layers = range(len(teacher.blocks)) if hidden and torch.is_grad_enabled() else range(0)
        counted = batch.targets != NOWHERE
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
        step = max(1, (_CACHED if given.device.type == "cpu" else 64 * _CACHED) // given.shape[-1])
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


_CACHED = 1 << 18  # numbers of fp32 that, a few times, stay in a core's cache


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


# --- what is trained --------------------------------------------------------------------------------------------------


def touched(before: Decoder, after: Decoder) -> set[str]:
    """The parameters of the changed model that are new, of another shape or value, or of a component that changed."""
    old = dict(before.named_parameters())
    found = {
        name for name, each in after.named_parameters()
        if name not in old or old[name].shape != each.shape or not torch.equal(old[name], each)
    }  # fmt: skip
    if len(before.spec.blocks) != len(after.spec.blocks):
        return {name for name, _ in after.named_parameters()}
    for path, _, _ in differences(without_rounding(before.spec), without_rounding(after.spec)):
        parts = path.split(".")
        inside = ".".join(parts[: 3 if parts[0] == "blocks" else 1])
        found |= {name for name, _ in after.named_parameters() if name.startswith(f"{inside}.")}
    return found


def changed_layers(before: Decoder, after: Decoder) -> tuple[int, ...]:
    """The layers in which something changed, of trees whose layers and streams are each other's; else none."""
    one, other = before.spec, after.spec
    if len(one.blocks) != len(other.blocks) or one.hidden_size != other.hidden_size:
        return ()
    return tuple(sorted({int(name.split(".")[1]) for name in touched(before, after) if name.startswith("blocks.")}))


def chosen(what: str, declared: Sequence[Parameter], changed: Callable[[], set[str]]) -> set[str]:
    """The names of the parameters that "all", "changed" or "norms" trains."""
    if what == "all":
        return {each.name for each in declared}
    if what == "changed":
        return changed()
    gains = {each.name.rpartition(".")[0] for each in declared if each.role == "gain"}
    return {each.name for each in declared if each.name.rpartition(".")[0] in gains}


def rank_of(what: str) -> int:
    """The rank in "lora:RANK", 0 of the others of `CHOICES`. Raises UsageError for none of them."""
    match = re.fullmatch(r"lora:([1-9]\d{0,8})", what, re.ASCII)
    if match is None and what not in CHOICES[:-1]:
        hint = f"known: {', '.join(CHOICES)}, where RANK is 1 or more."
        raise UsageError(f"nothing is called {what!r:.40} among what can be trained", hint)
    return 0 if match is None else int(match[1])


def _matrices(declared: Sequence[Parameter]) -> list[str]:
    """What updates of a low rank are added to."""
    return [each.name for each in declared if len(each.shape) == 2 and each.role in ("reads", "writes", "inner")]


class _LowRank(nn.Module):
    """W + B·A, of which A and B are trained (Hu et al. 2106.09685); B begins at 0."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(torch.randn(rank, columns, device=weight.device) / math.sqrt(columns))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


@contextmanager
def _adapted(model: Decoder, declared: Sequence[Parameter], rank: int) -> Iterator[set[str]]:
    """The model with such an update to each of its matrices, which is added up in the end; their names."""
    modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in _matrices(declared)}
    for name, module in modules.items():
        weight = getattr(module, name.rpartition(".")[2])
        parametrize.register_parametrization(module, name.rpartition(".")[2], _LowRank(weight, rank))
    try:
        yield {name for name, _ in model.named_parameters() if name.endswith((".0.a", ".0.b"))}
    finally:
        for name, module in modules.items():
            parametrize.remove_parametrizations(module, name.rpartition(".")[2], leave_parametrized=True)


# --- the runs ---------------------------------------------------------------------------------------------------------


def heal(
    changed: str | Path,
    teacher: str | Path,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokens: int | None = None,
    seconds: float | None = None,
    trained: str = "all",
    local: float | None = None,
    hidden: float = 0.0,
    seeds: int = 1,
    beside: bool | str = True,
    batch: int | None = None,
    context: int | None = None,
    rate: float | None = None,
    warmup: float = 0.05,
    decay: float = 0.0,
    clip: float = 1.0,
    accumulate: int = 1,
    every: int | None = None,
    patience: int = 0,
    held_out: float | str | Path = HELD_OUT,
    seed: int = 0,
    dtype: str | None = None,
    compiled: bool = False,
    device: str | None = None,
    to: str | None = None,
    resume: bool = False,
    force: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    on_start: Callable[[str, Held, Held], None] = lambda trained, original, start: None,
    tell: Callable[[str, Step], None] = lambda what, step: None,
    progress: Progress | None = None,
) -> Healed:
    """Train a changed model to answer as the original, and write it as a checkpoint; beside it a control and a floor.

    Args:
        changed: a checkpoint, as a swap wrote it.
        teacher: the one that it was made from, of the same tokens.
        data: texts, or one folder that `tokenize` wrote, by the teacher's tokenizer.
        out: the folder to make. Beside it, in `out`.healing, are the runs' checkpoints and measurements.
        tokens: how many each run is trained on.
        seconds: how long each run is trained instead.
        trained: "all", "changed" (what the change touched), "norms", or "lora:RANK" (an update of so low a rank to
            every matrix).
        local: the share of the budget in which each changed layer is trained by itself first; by default `LOCAL` where
            the layers of both are one another's, else 0.
        hidden: how much of the distance between the streams behind each layer is added to the loss, where the layers of
            both are one another's.
        seeds: how many runs of each kind, by other orders of the windows.
        beside: run the control and the floor too, or one of the two, by its name.
        patience: end a run after so many evaluations without a better one; 0 never does.
        batch: tokens a step; this and what follows as in `train`.
        context: tokens a window.
        rate: AdamW's highest; by default what `train` takes for random weights, three times that for low ranks
            (not for control and floor, of which all is trained).
        warmup: the share of a run within which the rate is reached.
        decay: of the weights; by default none.
        clip: what a gradient's norm is cut to.
        accumulate: parts of a step.
        every: steps between two evaluations and checkpoints.
        held_out: the share of the text that is held out, or a text by itself.
        seed: of the first run's order of windows; those of the others follow.
        dtype: what is multiplied in.
        compiled: by torch.compile, both models.
        device: by default a GPU where there is one.
        to: the format of the result, as in `save`; by default files of the family that has the tree, else "local".
        resume: go on from the last checkpoints.
        force: replace `out`, and forget runs that have not ended.
        offline: use local files and the hub's cache only.
        allow_pickle: read .bin files too (weights only).
        on_start: given what is trained in words, and both models on the held-out text.
        tell: given which run it is and every step of it.
        progress: of tokenising, as in `tokenize`.

    Raises:
        UsageError, InvalidInput, Offline, GptkitError, KeyboardInterrupt: as `train`; vocabularies that differ.
        NoNumber: as `train`, but that it goes on at no other rate: its layers were trained at this one.
    """
    target, paths = Path(out).expanduser(), paths_of(data)
    rank = rank_of(trained)
    if seeds < 1 or not 0 <= (local or 0) < 1:
        raise UsageError("seeds are 1 or more, and the local share is 0 or more and below 1")
    if beside not in (True, False, "control", "floor"):
        raise UsageError(f"nothing is called {beside!r:.40} among what runs beside", "known: control, floor")
    if not 0 <= hidden < math.inf:
        raise UsageError(f"the weight of hidden states is {hidden:g}, expected 0 or more")
    with ExitStack() as stack:
        us = stack.enter_context(group(device))
        folder = beside_of(target, "healing")

        def claim() -> None:
            Staging(target, force).check()
            stack.enter_context(locked(folder))  # first: whoever has it not cleans nothing up
            make(folder)
            stack.callback(remove_empty, folder)
            stack.callback(remove_unbegun, folder)
            runs = stores_in(folder, us)
            if not any(each.goes_on(resume, force) for each in runs):
                for each in runs:  # now, for their tokens may be written over: half of a run is none to resume
                    each.forget()

        us.lead(claim)
        going_on = any(each.goes_on(resume, force) for each in stores_in(folder, us))
        opening: Any = {"device": us.device, "offline": offline, "allow_pickle": allow_pickle}
        original, model = (load(each, "float32", **opening) for each in (teacher, changed))
        sizes = original.spec.vocab_size, model.spec.vocab_size
        coder, coded = _tokenizer_of((original, teacher), (model, changed))
        for each in (original, model):
            require_trainable(each.spec, False, not us.alone)
        if rank and not us.alone:
            raise UsageError("several processes share out what is trained, and have no shares of lora's updates")
        if rank > model.spec.hidden_size:
            raise UsageError(f"a rank of {rank:,} is not low: the stream has {model.spec.hidden_size:,} numbers")
        declared = list(model.spec.parameters())
        names = set(_matrices(declared)) if rank else chosen(trained, declared, lambda: touched(original, model))
        if not names:
            raise UsageError(f"nothing is left to train: {trained} names no parameter of this model")
        family, _ = expressed(model.spec)
        tree = model.source
        form = to or ("local" if family is None else f"hf:{family if tree is None else family_of(tree, family)}")
        with _moved(model, names):
            require_form(model, form, "float32")

        length = min(CONTEXT, longest(original.spec), longest(model.spec)) if context is None else context
        windows = windows_of(batch, length, tokens, us.size * accumulate, FURTHER)
        layers = changed_layers(original, model)
        share = (LOCAL if layers else 0.0) if local is None else local
        if share and not layers:
            raise UsageError(
                "no layer is trained by itself: layers of the two are not one another's", "Leave out --local."
            )
        if hidden and not layers:
            raise UsageError("hidden states are not one another's: layers of the two are not", "Leave out --hidden.")
        usual = usual_rate(size_of(model.spec))
        settings = settings_of(
            windows, length, tokens, seconds, every=every, accumulate=accumulate, warmup=warmup, decay=decay, clip=clip,
            seed=seed, compiled=compiled, patience=patience, rate=usual * (3 if rank else 1) if rate is None else rate,
            dtype=dtype or ("bfloat16" if us.device.type == "cuda" else "float32"),
        )  # fmt: skip

        made = {"tokenizer": coded, "vocabulary": sizes[0], "progress": progress, "offline": offline}

        def take(paths: Sequence[str | Path], name: str, **another: Any) -> TokenFile:
            return tokens_of(paths, folder / name, going_on, us, **{**made, **another})

        found = take(paths, "data")
        if found.folder != folder / "data":
            require_tokenizer(found, coded, coder, offline=offline, allow_pickle=allow_pickle)
        if found.vocabulary > min(sizes):
            rows = f"{sizes[0]:,} and {sizes[1]:,} rows"
            message = f"the texts have ids up to {found.vocabulary - 1:,}, and the models {rows}"
            raise UsageError(message, "Both must have the same tokens.")
        apart = not any(carries(each.spec) for each in (original, model))  # no mask keeps states within a document
        training, held = split(found, held_out, take, us, length, windows, apart)
        texts = [{"sha256": each.sha256, "bytes": each.bytes} for each in found.sources]
        about = {
            "teacher": digest_of(original), "changed": digest_of(model), "texts": texts, "tokens": found.digest,
            "held_out": hashlib.sha256(held.ids.tobytes()).hexdigest(), "processes": us.size, "train": trained,
            "local": share, "hidden": hidden,
        }  # fmt: skip
        share = 0.0 if settings.steps == 1 else share  # one step is of the whole model
        suit(model.spec)
        original.requires_grad_(False).eval()
        runs = _Runs(
            original, held, settings, share, layers, hidden, found, training, us, folder, about, resume, force, tell
        )
        unchanged, start = runs.held(original), runs.held(model)
        on_start(trained, unchanged, start)
        finished, outcome, steps, count = runs.healed(model, trained, seeds)
        control = floor = None
        # What is trained whole beside updates of a low rank has not their rate.
        others = replace(runs, settings=msgspec.structs.replace(settings, rate=usual)) if rate is None else runs
        if beside in (True, "control"):
            control = others.control(seeds)
        if beside in (True, "floor"):
            floor = others.floor(partial(load, changed, "float32", random=True, **opening), seeds)
        result = Healed(
            target, str(teacher), steps * windows * length, steps, seeds, count, layers if share else (),
            unchanged, start, outcome, control, floor,
        )  # fmt: skip
        record = {**msgspec.to_builtins(settings), "train": trained, "share": share, "hidden": hidden, "texts": texts}
        record |= _timeless({name: value for name, value in result.as_json().items() if name != "folder"})
        given = {
            "tokens": tokens, "seconds": seconds, "train": trained, "local": share, "hidden": hidden, "seeds": seeds,
            "beside": beside is True, "rate": rate, "warmup": warmup, "decay": decay, "clip": clip,
            "batch": windows * length, "context": length, "accumulate": accumulate, "every": settings.every,
            "held_out": held_out if isinstance(held_out, int | float) else str(held_out), "patience": patience,
            "seed": seed, "dtype": settings.dtype, "compile": compiled,
        }  # fmt: skip
        before = tree is not None and any("healed" in each for each in tree.origin.history)
        known = {name: value for name, value in given.items() if value is not None}
        manifest = _recipe(changed, before, paths, known, to)
        whole = gathered(finished.eval(), us)
        whole.source = replace(model.source, path=found.folder, texts={}) if model.source else None
        healed = {"healed": record}
        us.lead(lambda: save(whole, target, form, dtype="float32", force=force, record=healed, about=manifest))
        us.lead(runs.done)
        return result


@contextmanager
def _moved(model: Decoder, names: Container[str]) -> Iterator[None]:
    """The model with no parameter of these names that has nothing but zeros: they are something else once trained."""
    empty = [each.data for name, each in model.named_parameters() if name in names and not each.any()]
    for each in empty:
        each.fill_(1)
    try:
        yield
    finally:
        for each in empty:
            each.zero_()


def _timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without the seconds that something took, which would make another file of each run of the same call."""
    return {
        name: _timeless(each) if isinstance(each, dict) else each for name, each in record.items() if name != "seconds"
    }


def _recipe(
    changed: str | Path, healed: bool, data: Sequence[str | Path], settings: Mapping[str, Any], to: str | None
) -> dict[str, Any]:
    """What the manifest has of the recipe that the changed model came from, this healing its last step; nothing where
    no swap made it, or where it was `healed` before or several texts do, which a recipe has no place for.
    """
    if healed or len(data) > 1 or not (Path(changed) / MANIFEST).is_file():
        return {}
    try:
        found = read_recipe(Path(changed))
    except (InvalidInput, UsageError):
        return {}
    healing = Asked(HEAL.name, str(data[0]), settings=settings)
    return {"swap": {"recipe": replace(found, to=to, heal=healing).as_json()}}


def _tokenizer_of(*models: tuple[Decoder, str | Path]) -> tuple[Tokenizer | None, str]:
    """The tokenizer of two models, of which one without any takes the other's, and whose it is; UsageError where they
    do not encode alike.
    """
    about = [model.source for model, _ in models]
    coders = [load_tokenizer(each.path or Path(), each.texts) if each else None for each in about]
    told = [None if coder is None else coder.encode(SAMPLE) for coder in coders]
    if None not in told and told[0] != told[1]:  # the changed one may have tokens besides
        message = "the changed model's tokenizer makes other tokens than the teacher's: it came from another model"
        raise UsageError(message, "--teacher is the model that it was made from.")
    whose = 0 if coders[0] is not None or coders[1] is None else 1
    return coders[whose], str(models[whose][1])


def stores_in(folder: Path, us: Group) -> list[Store]:
    """What earlier calls left of their runs."""
    return [Store(each.parent, us) for each in sorted(folder.glob(f"*/{RUN}"))]


@dataclass
class _Runs:
    """What all runs have in common."""

    original: Decoder
    windows: Windows
    settings: Settings
    local: float
    layers: tuple[int, ...]
    hidden: float
    found: TokenFile
    training: Any
    group: Group
    folder: Path
    about: Mapping[str, Any]
    resume: bool
    force: bool
    tell: Callable[[str, Step], None]

    def _sample(self) -> Batch:
        """As much held-out text as a step has, the same in every process."""
        parts = max(1, len(self.windows.ids) // self.settings.windows)
        return Batch.of(self.windows.part(0, parts), self.group.device)

    def held(self, model: Decoder) -> Held:
        """A model on the held-out text."""
        training, sums, settings = model.training, [0.0, 0.0], self.settings
        # As many windows as a part of a step has, or more where that is little work for a whole pass.
        once = max(-(-settings.windows // (settings.accumulate * self.group.size)), _EVALUATED // settings.context)
        parts = -(-len(self.windows.ids) // once)
        model.eval()
        with torch.no_grad():
            for number in range(parts):
                batch = Batch.of(self.windows.part(number, parts), self.group.device)
                wanted = self.original(batch.ids, documents=batch.documents)
                given = wanted if model is self.original else model(batch.ids, documents=batch.documents)
                sums[0] += float(divergence(wanted, given, batch.targets != NOWHERE))
                sums[1] += float(lost(given, batch.targets))
        model.train(training)
        counted = max(1, self.windows.counted)
        return Held(max(sums[0], 0.0) / counted, sums[1] / counted)

    def _answering(self) -> Decoder:
        """The original, compiled where the model that learns of it is, and none looks into it."""
        found: Any = torch.compile(self.original) if self.settings.compiled and not self.hidden else self.original
        return found  # type: ignore[no-any-return]

    def _fit(
        self,
        name: str,
        model: Decoder,
        loss: Loss,
        trained: set[str] | None,
        seed: int,
        budget: Budget,
        behind: int = 0,
    ) -> Run:
        """One run, from its last checkpoint where there is one, which then stays until all have ended. Its windows are
        those behind so many steps.
        """
        steps, seconds = budget
        settings = msgspec.structs.replace(self.settings, steps=steps, seconds=seconds, seed=self.settings.seed + seed)
        store = Store(self.folder / name, self.group)

        def begin() -> None:
            store.folder.mkdir(parents=True, exist_ok=True)
            store.begin({"run": name, **self.about, **msgspec.to_builtins(settings)}, self.resume, self.force)

        def step_of(number: int) -> Windows:
            if number % settings.every == 0:
                self.found.require_unchanged()
            windows: Windows = self.training.step(behind + number, settings.windows, settings.seed)
            return windows

        self.group.lead(begin)
        return fit(
            model,
            step_of,
            self.windows,
            settings,
            group=self.group,
            store=store,
            loss=loss,
            trained=trained,
            tell=partial(self.tell, name),
        )

    def _budgets(self, local: float) -> tuple[Budget, Budget]:
        """What layers by themselves get of the budget, and the whole model."""
        steps, seconds = self.settings.steps, self.settings.seconds
        if steps is None:
            assert seconds is not None
            return (None, seconds * local), (None, seconds * (1 - local))
        first = min(max(1, round(steps * local)), steps - 1) if local else 0
        return (first, None), (steps - first, None)

    def _both(self, name: str, model: Decoder, trained: str, seed: int) -> tuple[int, float, int]:
        """Layers by themselves, then the whole model on what is left of the text: steps, seconds, and how many
        parameters were trained.
        """
        declared, rank, begun = list(model.spec.parameters()), rank_of(trained), Run()
        with ExitStack() as stack:
            if rank:
                torch.manual_seed(self.settings.seed + seed)
                names = stack.enter_context(_adapted(model, declared, rank))
            else:
                names = chosen(trained, declared, lambda: touched(self.original, model))
            count = sum(each.numel() for name, each in model.named_parameters() if name in names)
            prefixes = tuple(f"blocks.{layer}." for layer in self.layers)
            inside = {each for each in names if each.startswith(prefixes)} if self.local else set()
            first, rest = self._budgets(self.local if inside else 0.0)
            if inside:
                loss = block_local(self.original, self.layers, self._sample())
                begun = self._fit(f"{name}-layers-{seed}", model, loss, inside, seed, first)
            loss = distilled(self._answering(), self.hidden, self._sample())
            run = self._fit(f"{name}-{seed}", model, loss, names, seed, rest, begun.step)
        return begun.step + run.step, begun.seconds + run.seconds, count

    def healed(self, model: Decoder, trained: str, seeds: int) -> tuple[Decoder, Outcome, int, int]:
        """The changed model, healed; of the first seed."""
        finished, held, taken, steps, count = model, [], 0.0, 0, 0
        for seed in range(seeds):
            own = deepcopy(model)
            steps, seconds, count = self._both("healed", own, trained, seed)
            held.append(self.held(own))
            taken += seconds
            finished = own if seed == 0 else finished
        return finished, Outcome(tuple(held), taken), steps, count

    def control(self, seeds: int) -> Outcome:
        """The original, trained on the same tokens to predict them."""
        held, taken = [], 0.0
        for seed in range(seeds):
            own = deepcopy(self.original)
            run = self._fit(f"control-{seed}", own, next_token, None, seed, self._budgets(0.0)[1])
            held.append(self.held(own))
            taken += run.seconds
        return Outcome(tuple(held), taken)

    def floor(self, make: Callable[..., Decoder], seeds: int) -> Outcome:
        """The changed tree from random weights, trained as the changed model was, all of it."""
        held, taken = [], 0.0
        for seed in range(seeds):
            own = make(seed=self.settings.seed + seed)
            _, seconds, _ = self._both("floor", own, "all", seed)
            held.append(self.held(own))
            taken += seconds
        return Outcome(tuple(held), taken)

    def done(self) -> None:
        """All have ended: their checkpoints go, what was measured stays."""
        for each in stores_in(self.folder, self.group):
            each.done()
