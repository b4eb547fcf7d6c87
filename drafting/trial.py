"""Drafts held against transformers' own class of their model type, on tiny random models: a process of its own.

It is asked for one draft on standard input and answers on standard output, in JSON. What cannot be seen in names is
decided here: each open value is tried, and what comes nearest to the class' logits is kept.
"""

import contextlib
import copy
import dataclasses
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..architectures import ARCHITECTURES, BY_MODEL_TYPE, Architecture
from ..components import ModelSpec, Shape, without_rounding
from ..converter.confinement import allow, work
from ..converter.transformers_process import DATA, LIBRARIES, reason
from ..errors import GptkitError, InvalidInput, shown
from ..modules.decoder import Decoder
from ..parity.outputs import outputs_of
from ..parity.probe import Batch
from ..parity.sides import quiet
from ..plugins import import_file
from ..testing import (
    decoder_of,
    elements_land_once,
    fields_are_accounted_for,
    logits_agree,
    names_and_shapes_agree,
    probes,
    stored,
)
from .doubts import BY_LAYER, undecided
from .guess import accounted, guess
from .record import Draft, Known, Patch
from .source import source_of
from .vocabulary import KnownNames, known_names

MOST = 64
"""Drafts that are tried for one checkpoint."""

_PAIRS = 1500  # of open values that are looked at together, the likeliest
_PARAMETERS = 3_000_000  # a class of more is made of a config that is cut down
_DTYPES = (torch.float32, torch.bfloat16)
_NEARLY = 1e-5  # two functions that differ by less are one, rounded in two ways
_TINY = {
    "vocab": 97, "hidden": 64, "layers": 6, "heads": 4, "head_dim": 16, "intermediate": 80, "context": 256,
    "attention.window": 16, "expert_size": 40, "shared_size": 40, "mixture.experts": 4, "mixture.top_k": 2,
    "mixture.groups": 2, "mixture.top_groups": 1,
}  # fmt: skip
"""The largest sizes of a tiny model, by roles."""

Config = dict[str, Any]


def known_of(config: Mapping[str, Any]) -> Known | None:
    """What the installed transformers has of a config's model type, None where that is no causal language model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config["model_type"]
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if found is None:
        return None
    kinds = [found] if isinstance(found, str) else list(found)
    said = config.get("architectures")
    name = next((each for each in kinds if isinstance(said, list) and each in said), kinds[0])
    own = CONFIG_MAPPING[kind]
    names = tuple(each.name for each in dataclasses.fields(own)) if dataclasses.is_dataclass(own) else ()
    defaults = json.loads(own().to_json_string(use_diff=False))
    return Known(name, own.__name__, defaults, names, dict(own.attribute_map))


class Case:
    """A config, and transformers' model of it with random weights. Raises whatever the class says of the config."""

    def __init__(self, config: Config, name: str) -> None:
        import transformers

        self.config, self.name, self._class = config, name, getattr(transformers, name)
        with torch.device("meta"):
            meta = self._class(self._config())
        self.parameters = sum(each.numel() for each in meta.parameters())
        self.shapes: dict[str, Shape] = {name: tuple(each.shape) for name, each in _stored(meta).items()}

    def _config(self) -> Any:
        import transformers

        return transformers.AutoConfig.for_model(**copy.deepcopy(self.config))

    @cached_property
    def full(self) -> Config:
        """The config with all that the class takes where nothing is stated."""
        told: Config = json.loads(self._config().to_json_string(use_diff=False))
        return {**told, **self.config}

    def model(self, dtype: torch.dtype, attention: str) -> Any:
        """The class with every parameter random, at scales such as training leaves behind."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._class._from_config(self._config(), dtype=dtype, attn_implementation=attention).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim == 1:  # from where training starts it: a norm may add 1 to its weight
                    parameter.add_(0.3 * noise)
                else:
                    parameter.copy_(noise * (0.8 if "embed" in name else parameter.shape[-1] ** -0.5))
            kept = model.state_dict()
            for name, buffer in model.named_buffers():
                if name in kept and buffer.is_floating_point():
                    buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
        return model

    def reference(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], Batch, Tensor]:
        """Its weights, a padded batch, and its logits of real tokens, by its eager attention."""
        if dtype not in self._references:
            model = self.model(dtype, "eager")
            batch = [*probes(40, 2, ("left",), self.full["vocab_size"])][-1]
            with torch.inference_mode():
                logits = outputs_of(model, batch)
            self._references[dtype] = (_stored(model), batch, logits)
        return self._references[dtype]

    @cached_property
    def _references(self) -> dict[torch.dtype, tuple[dict[str, Tensor], Batch, Tensor]]:
        return {}


def _stored(model: Any) -> dict[str, Tensor]:
    """A model's tensors as save_pretrained names and shapes them, a tied one once."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    return tensors


def difference(draft: Draft, case: Case) -> float:
    """How far the draft's logits are from the class' in the mean, in parts of the largest: in fp32, and where that is 0
    in bf16, as less than any other. Infinite where there are none.
    """
    for dtype, weight in zip(_DTYPES, (1.0, 1e-12), strict=True):
        try:
            weights, batch, theirs = case.reference(dtype)
            ours = _logits(draft, case, weights, dtype, batch)
        except Exception:  # whatever a draft that is not right runs into
            return float("inf")
        real = ... if batch.attention_mask is None else batch.attention_mask.bool()
        gap = (ours[real].double() - theirs[real].double()).abs().mean() / theirs[real].double().abs().max()
        if gap != 0:
            return weight * float(gap) if gap.isfinite() else float("inf")
    return 0.0


def _logits(draft: Draft, case: Case, weights: Mapping[str, Tensor], dtype: torch.dtype, batch: Batch) -> Tensor:
    family = draft.family()
    spec = family.read(family.reader(case.full))
    bound = family.bind(spec)
    if {name for name in weights if name != family.head or not spec.tied} - {each.checkpoint for each in bound}:
        raise ValueError("tensors are left over")
    shared = {
        name: each
        for leaf in bound
        for name, each in zip(leaf.shared, leaf.to_shared(weights[leaf.checkpoint]), strict=True)
    }
    decoder = Decoder(spec, attention="eager").to(dtype).eval()
    decoder.load_state_dict(shared)
    with torch.inference_mode():
        return outputs_of(decoder, batch)


def _tiny(config: Config, draft: Draft) -> Config:
    """The config with smaller sizes, lists of a value a layer cut to the layers."""
    found = copy.deepcopy(config)
    roles = {role: name for name, each in draft.fields.items() for role in each.role.split() if name in config}
    layers = config.get(roles.get("layers", ""), 0)
    for role, most in _TINY.items():
        name = roles.get(role, "")
        if type(config.get(name)) is int:
            found[name] = min(config[name], most)
    heads, groups = (config.get(roles.get(role, "")) for role in ("heads", "kv_heads"))
    if type(heads) is int and type(groups) is int:
        found[roles["kv_heads"]] = {heads: found[roles["heads"]], 1: 1}.get(groups, 2)
    for name, value in config.items():
        if isinstance(value, list) and len(value) == layers:
            found[name] = value[: found[roles["layers"]]]
        elif name.endswith("token_id") and type(value) is int:
            found[name] = min(value, 5)
        elif "window" in name and type(value) is int:
            found[name] = min(value, 16)
    return found


def _variants(draft: Draft, case: Case) -> Iterator[tuple[str, Any, Case]]:
    """The case with another value of each field that is read, or that nobody reads: its name, the value, the case."""
    family = draft.family()
    reader = family.reader(case.full)
    family.read(reader)
    roles = {name: each.role.split()[0] for name, each in draft.fields.items()}
    for name, value in case.full.items():
        if name not in reader.used and f"refused.{name}" not in draft.todo:
            continue
        role, other = roles.get(name, ""), cast("Any", None)
        if isinstance(value, bool) or (value is None and name in roles and draft.fields[name].default is False):
            other = not value
        elif isinstance(value, float):
            other = 1e-3 if role == "eps" else value * 1.5 or 0.5
        elif role == "activation":
            other = "gelu" if value != "gelu" else "relu"
        elif role == "kv_heads":
            other = 1
        elif "window" in name and (value is None or type(value) is int):
            other = 16 if value is None or value > 16 else value + 5
        elif name == "rope_parameters" and isinstance(value, dict) and isinstance(value.get("rope_theta"), float):
            other = {**value, "rope_theta": value["rope_theta"] * 3}
        if other is not None:
            with contextlib.suppress(Exception):  # whatever the class says of it
                varied = Case({**case.config, name: other}, case.name)
                varied.reference(torch.float32)
                yield name, other, varied


class Search:
    """Open values tried on one case, and how many drafts were."""

    def __init__(self, case: Case) -> None:
        self._case, self.tried, self.kept, self._seen = case, 0, list[str](), set[Any]()

    def nearest(self, draft: Draft) -> tuple[Draft, float]:
        """The draft with the values that come nearest to the class, one after another and then two at a time, and how
        near.
        """
        best, left = draft, difference(draft, self._case)
        self.tried += 1
        options = [each for doubt in draft.doubts for each in doubt.options]
        pairs = sorted(combinations(range(len(options)), 2), key=sum)[:_PAIRS]
        for most, chosen in ((MOST // 2, [(each,) for each in range(len(options))]), (MOST, pairs)):
            for rounding in (False, True):  # one function first, and then how it rounds
                for several in chosen * 2:
                    if not left or (left > _NEARLY) == rounding or self.tried >= most:
                        break
                    words = ", ".join(options[each][0] for each in several)
                    patch = {place: value for each in several for place, value in options[each][1].items()}
                    tried, found = self._try(best, patch, rounding)
                    if found < left * (0.97 if rounding else 0.5):
                        best, left = _told(tried, patch, words), found
                        self.kept.append(words)
        return best, left

    def _try(self, best: Draft, patch: Patch, rounding: bool) -> tuple[Draft, float]:
        """The draft with a patch, and how far it is; infinitely where it says nothing new, or is a change of
        rounding alone where it should not be, or is none where it should.
        """
        tried, far = best.patched(patch), float("inf")
        now, new = (_tree(each, self._case.full) for each in (best, tried))
        if now is None or new is None:
            return tried, far if new is None else difference(tried, self._case)
        key = (new, tuple(tried.leaves.values()))
        alike = without_rounding(now) == without_rounding(new) and best.leaves == tried.leaves
        with contextlib.suppress(TypeError):  # a list where a number should be has no hash
            if key in self._seen or alike != rounding:
                return tried, far
            self._seen.add(key)
        found = difference(tried, self._case)
        self.tried += found < far
        return tried, found


def _tree(draft: Draft, config: Config) -> ModelSpec | None:
    try:
        family = draft.family()
        return family.read(family.reader(config))
    except Exception:  # a draft that does not read it
        return None


def _told(draft: Draft, patch: Patch, words: str) -> Draft:
    reason = f"{words}: tried against transformers' class, and nearest"
    return dataclasses.replace(draft, why={**draft.why, **dict.fromkeys(patch, reason)})


def settled(draft: Draft, case: Case, words: KnownNames) -> Draft:
    """With each field's meaning held against the class at another value. A meaning that does not hold there is taken
    from another family, or the field is refused at other values than the checkpoint's.
    """
    for name, value, varied in list(_variants(draft, case)):
        told, place = shown(value), f"{'refused' if name in draft.more['refused'] else 'fields'}.{name}"
        why, todo = dict(draft.why), dict(draft.todo)
        unread = place in todo and place.startswith("refused")
        if not unread and difference(draft, varied) == 0:
            why[place] = f"{why.get(place, '')}; right at {told} too"
            draft = dataclasses.replace(draft, why=why)
            continue
        idle = unread and _same(case, varied)
        others = _meanings(draft, name, words) if unread or name in draft.fields else _by_layer(draft)
        others = iter(()) if idle else others
        found = next((each for each in others if max(difference(each, one) for one in (case, varied)) == 0), None)
        if found is not None:
            todo.pop(place, None)
            why[f"fields.{name}"] = f"so the class' logits are right at {shown(case.full.get(name))} and at {told}"
            draft = dataclasses.replace(found, why=why, todo=todo)
        elif name in draft.fields:
            draft = _at_one_value(draft, name, case, told)
        elif unread:
            same = "the same names and logits" if idle else "other names or logits"
            draft = dataclasses.replace(draft, todo={**todo, place: f"{todo[place]}; at {told} the class has {same}"})
        else:
            todo[f"read {name}"] = f"with {name} {told} the class' logits are others than this definition's"
            draft = dataclasses.replace(draft, todo=todo)
    return draft


def _by_layer(draft: Draft) -> Iterator[Draft]:
    """The draft with what other families read of each layer."""
    yield from (draft.patched(patch) for doubt in draft.doubts if doubt.what == BY_LAYER for _, patch in doubt.options)


def _meanings(draft: Draft, name: str, words: KnownNames) -> Iterator[Draft]:
    """The draft with each other meaning of a field: of its name, then of all fields that have values of its kind."""
    own = draft.fields.get(name)
    taken = {role for other, each in draft.fields.items() if other != name for role in each.role.split()}
    value = draft.more["refused"][name][0][0] if own is None else own.default
    found = [each.value for each in words.fields.get(name, [])]
    found += [
        each[0].value
        for each in words.fields.values()
        if isinstance(value, (bool, float)) and type(each[0].value.default) is type(value)
    ]
    more = {**draft.more, "refused": {key: each for key, each in draft.more["refused"].items() if key != name}}
    for role, field in {(each.role, each.read): each for each in found}.items():
        if taken.isdisjoint(field.role.split()) and (own is None or role != (own.role, own.read)):
            fixed = {key: each for key, each in draft.arguments["fixed"].items() if key not in field.role.split()}
            new = field._replace(default=value if type(value) is type(field.default) else field.default)
            arguments = {**draft.arguments, "fixed": fixed}
            yield dataclasses.replace(draft, fields={**draft.fields, name: new}, more=more, arguments=arguments)


def _at_one_value(draft: Draft, name: str, case: Case, told: str) -> Draft:
    """With a field that is read rightly at the checkpoint's value alone refused at any other."""
    field, value = draft.fields[name], case.full.get(name)
    todo = {
        **draft.todo,
        f"refused.{name}": f"{name} was taken for {field.role}, and at {told} the class differs from that",
    }
    if "." not in field.role:
        return dataclasses.replace(
            draft, todo={**draft.todo, f"fields.{name}": f"at {name} {told} the class' logits are others"}
        )
    read = field.value(draft.family().reader(case.full), name)
    fixed = {**draft.arguments["fixed"], **dict.fromkeys(field.role.split(), read)}
    refused = {**draft.more["refused"], name: ((value,), f"TODO: this definition was right at {shown(value)} alone")}
    return dataclasses.replace(
        draft,
        fields={key: each for key, each in draft.fields.items() if key != name},
        arguments={**draft.arguments, "fixed": fixed},
        more={**draft.more, "refused": refused},
        todo=todo,
    )


def _same(case: Case, other: Case) -> bool:
    """Whether the class of two configs has the same names, shapes and logits."""
    if case.shapes != other.shapes:
        return False
    (_, _, ours), (_, _, theirs) = case.reference(torch.float32), other.reference(torch.float32)
    return torch.equal(ours, theirs)


# --- the proofs ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Proof:
    """One of the four: whether it holds, None where it could not be tried, and on what, or why not."""

    name: str
    holds: bool | None
    told: str


def proved(
    family: Architecture, draft: Draft, config: Config, shapes: Mapping[str, Shape], case: Case | None, note: str
) -> list[_Proof]:
    """The four proofs of `testing`, of the checkpoint's own names and of transformers' class of its type. `note`: why
    there is no case, or how far logits are apart.
    """
    known, small = draft.known, config if case is None else case.full
    if case is None and sum(map(math.prod, shapes.values())) > _PARAMETERS:
        small = _tiny(config, draft)
    fields = [*config] if known is None else [*dict.fromkeys((*known.fields, *known.aliases, *config))]
    found = [
        _held(
            "fields",
            lambda: fields_are_accounted_for(family, [config, small], fields),
            f"{len(fields)} fields are read, irrelevant or refused",
        ),
        _held("elements", lambda: elements_land_once(family, small), "every element lands once and comes back"),
        _held(
            "names",
            lambda: _named(family, config, shapes, case),
            f"{len(shapes)} names and shapes of the checkpoint" + (" and those of the class" if case else ""),
        ),
    ]
    if case is None:
        return [*found, _Proof("logits", None, note)]
    paths = ("eager",) if "eager" in draft.more else ("sdpa", "eager")
    apart = f"logits differ from those of this definition, {note}"
    words = f"bit for bit in fp32 and bf16, {' and '.join(paths)}"
    return [*found, _held("logits", lambda: _computed(family, case, paths), words, apart)]


def _held(name: str, proof: Callable[[], None], words: str, instead: str = "") -> _Proof:
    try:
        proof()
    except Exception as error:  # AssertionError where it does not hold, whatever a wrong definition runs into
        reason = " ".join(str(error).split()) or instead
        if not isinstance(error, (AssertionError, GptkitError)):
            reason = f"{type(error).__name__}: {reason}"
        return _Proof(name, False, f"{reason:.300}")
    return _Proof(name, True, words)


def _named(family: Architecture, config: Config, shapes: Mapping[str, Shape], case: Case | None) -> None:
    spec = family.spec(config)
    ours = {leaf.checkpoint: leaf.shape for leaf in family.bind(spec)}
    theirs = stored(family, spec, shapes)
    called = {name: family.canonical_name(name, ours, len(spec.blocks)) for name in theirs}
    theirs = {to: theirs[name] for name, to in called.items() if to is not None}
    lacking, spare = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    assert not lacking, f"the tree has {len(lacking)} tensors that the checkpoint has not: {lacking[:3]}"
    assert not spare, f"{len(spare)} tensors have no place in the tree: {spare[:3]}"
    other = [f"{name} {theirs[name]}, and {ours[name]} in the tree" for name in ours if theirs[name] != ours[name]]
    assert not other, f"shapes differ: {other[:3]}"
    if case is not None:
        names_and_shapes_agree(family, case.full, case.shapes)


def _computed(family: Architecture, case: Case, paths: Sequence[str]) -> None:
    vocabulary = case.full["vocab_size"]
    batches = [each for length in (1, 7, 130) for each in probes(length, 2, ("left", "right"), vocabulary)]
    for attention in paths:
        for dtype in _DTYPES:
            model = case.model(dtype, attention)
            logits_agree(model, decoder_of(family, case.full, _stored(model), attention), batches)


def place_and_cause(case: Case) -> list[str]:
    """Where the definition parts from the class, and what would mend it, as verify finds them."""
    from ..parity.verify import verify
    from ..report.verification import verdict_lines

    with tempfile.TemporaryDirectory(prefix="gptkit-draft-") as folder:
        case.model(torch.float32, "eager").save_pretrained(folder)
        try:
            found = verify(folder, attention="eager", mutations=False, bisected=True, offline=True)
        except GptkitError as error:
            return [error.message.replace(folder, "the tiny model").splitlines()[0]]
        lines = verdict_lines(found)
    return [line for line in lines if line.startswith(("place", "cause"))]


# --- the process -----------------------------------------------------------------------------------------------------


_MOST_LAYERS = 1000
"""Layers that a class is made of whatever tensors there are."""
_LABELS = ("num_labels", "id2label", "label2id")
"""Fields of classifiers, of which transformers makes a table with a row for each label."""


def _require_worth(config: Config, shapes: Mapping[str, Shape], words: KnownNames) -> None:
    """Raise InvalidInput where config.json says more layers than there are tensors, before a class is made of it."""
    for name, known in words.fields.items():
        value = config.get(name)
        counts = any("layers" in each.value.role.split() for each in known)
        if counts and type(value) is int and value > max(len(shapes), _MOST_LAYERS):
            message = f"config.json says {name} {shown(value)}, and the checkpoint has {len(shapes):,} tensors"
            raise InvalidInput(
                message, "Check that config.json belongs to these weights, and that all files are there."
            )


def draft_of(config: Config, shapes: Mapping[str, Shape], without: Sequence[str]) -> dict[str, Any]:
    """The definition's text, and what was proved of it."""
    words = known_names(tuple(without))
    _require_worth(config, shapes, words)
    config = {name: value for name, value in config.items() if name not in _LABELS}
    for family in [each for name, each in ARCHITECTURES.items() if name in without]:
        del ARCHITECTURES[family.name]
        for kind in family.model_types:
            BY_MODEL_TYPE.pop(kind, None)
    known = known_of(config)
    draft = guess(config, shapes, known, words)
    case, search, left = None, None, None
    note = "transformers has no class of this type"
    if known is not None:
        try:
            case = Case(config, known.hf_class)
            if case.parameters > _PARAMETERS:
                case = Case(_tiny(config, draft), known.hf_class)
            case.reference(torch.float32)
        except Exception as error:  # whatever the class says
            case, note = (
                None,
                f"transformers' {known.hf_class} makes no tiny model of it: {' '.join(str(error).split()):.200}",
            )
    if case is None:
        draft = undecided(draft, config)
    else:
        search = Search(case)
        draft, left = search.nearest(draft)
        note = f"by {left:.1e} in the mean" if left < float("inf") else "which gives none"
        draft = accounted(draft, config, shapes)
        if left == 0:
            draft = settled(draft, case, words)
        try:
            case.model(torch.float32, "sdpa")
        except Exception:  # the class says that it has none
            draft = dataclasses.replace(draft, more={**draft.more, "eager": True})
    name = "drafted_definition"
    with tempfile.TemporaryDirectory(prefix="gptkit-draft-") as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(source_of(draft, ["being proved"]), encoding="utf-8")
        import_file(path)
    family = BY_MODEL_TYPE[config["model_type"]]
    proofs = proved(family, draft, config, shapes, case, note)
    failed = proofs[-1].holds is False
    place = place_and_cause(case) if case is not None and failed and proofs[2].holds else []
    head = _head(draft, proofs, place, search.tried if search else 0)
    todo = list(dict.fromkeys(draft.todo.values()))
    return {
        "text": source_of(draft, head),
        "skeleton": draft.skeleton.family.name,
        "proofs": [dataclasses.asdict(each) for each in proofs],
        "place": place,
        "tried": search.tried if search else 0,
        "kept": search.kept if search else [],
        "todo": todo,
    }


def _head(draft: Draft, proofs: Sequence[_Proof], place: Sequence[str], tried: int) -> list[str]:
    """What the file says of itself."""
    held = [each.name for each in proofs if each.holds]
    told = (
        "the four proofs pass"
        if len(held) == 4
        else f"of the four proofs {', '.join(held) or 'none'} pass" + ("es" if len(held) == 1 else "")
    )
    of = (
        f"a tiny random model of transformers' {draft.known.hf_class}"
        if proofs[-1].holds is not None and draft.known
        else "names and config alone"
    )
    lines = [
        f"{draft.model_type}, as gptkit draft made it of a checkpoint's config.json, names and shapes: {told}, on {of}."
    ]
    lines += [
        f"{each.name}: {'not tried: ' if each.holds is None else 'fails: '}{each.told}"
        for each in proofs
        if not each.holds
    ]
    lines += [" ".join(each.split()) for each in place]
    lines += [f"Drafts that were tried against the class: {tried}."] if tried else []
    lines += [f"What is open, look for TODO: {len(draft.todo)}."] if draft.todo else []
    return lines


def answered(question: Mapping[str, Any]) -> dict[str, Any]:
    """The draft of a checkpoint's `config` and `shapes`, `without` some families; or how it is refused."""
    shapes = {name: tuple(shape) for name, shape in question["shapes"].items()}
    try:
        with quiet():
            return draft_of(question["config"], shapes, question["without"])
    except GptkitError as error:
        return {"refused": [type(error).__name__, error.message, error.hint]}


def main() -> None:
    """Answer questions on standard input."""
    allow(0, LIBRARIES, DATA)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    work(answered, reason)


if __name__ == "__main__":
    main()
