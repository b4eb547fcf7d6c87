"""Compare drafts with transformers' class of the model type, on tiny random models. This runs in a process of its own.

The process reads one question from standard input and answers on standard output, in JSON. It resolves the doubts of a
draft by trying their options. An option is kept if it brings the draft's logits nearer to those of transformers' class.
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
from ..parity.probe import ProbeBatch
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
"""The maximum number of drafts that are tried for one checkpoint."""

_PAIRS = 1500  # the maximum number of pairs of options that are tried together, the likeliest first
_PARAMETERS = 3_000_000  # the largest number of parameters; a larger model is built from a config with smaller sizes
_DTYPES = (torch.float32, torch.bfloat16)
_NEARLY = 1e-5  # a smaller difference is attributed to rounding
_TINY = {
    "vocab": 97, "hidden": 64, "layers": 6, "heads": 4, "head_dim": 16, "intermediate": 80, "context": 256,
    "attention.window": 16, "expert_size": 40, "shared_size": 40, "mixture.experts": 4, "mixture.top_k": 2,
    "mixture.groups": 2, "mixture.top_groups": 1,
}  # fmt: skip
"""The largest sizes of a tiny model, by gptkit's names of the sizes."""

Config = dict[str, Any]


def known_of(config: Mapping[str, Any]) -> Known | None:
    """Return transformers' classes for a config's model type.

    Return None if the installed transformers has no causal language model of this type.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config["model_type"]
    mapped = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if mapped is None:
        return None
    classes = [mapped] if isinstance(mapped, str) else list(mapped)
    stated = config.get("architectures")
    name = next((name for name in classes if isinstance(stated, list) and name in stated), classes[0])
    config_class = CONFIG_MAPPING[kind]
    fields = dataclasses.fields(config_class) if dataclasses.is_dataclass(config_class) else ()
    defaults = json.loads(config_class().to_json_string(use_diff=False))
    aliases = dict(config_class.attribute_map)
    return Known(name, config_class.__name__, defaults, tuple(field.name for field in fields), aliases)


class Case:
    """A config with transformers' model of it, which has random weights.

    The constructor raises the errors that transformers' class raises for the config.
    """

    def __init__(self, config: Config, name: str) -> None:
        import transformers

        self.config, self.name, self._class = config, name, getattr(transformers, name)
        with torch.device("meta"):
            meta = self._class(self._config())
        self.parameters = sum(parameter.numel() for parameter in meta.parameters())
        self.shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in _stored(meta).items()}

    def _config(self) -> Any:
        import transformers

        return transformers.AutoConfig.for_model(**copy.deepcopy(self.config))

    @cached_property
    def full(self) -> Config:
        """Return the config. Fields that it does not give have the defaults of transformers' config class."""
        defaults: Config = json.loads(self._config().to_json_string(use_diff=False))
        return {**defaults, **self.config}

    def model(self, dtype: torch.dtype, attention: str) -> Any:
        """Build transformers' model. Its weights are random, and about as large as trained weights.

        `attention` is transformers' attention implementation, "eager" or "sdpa".
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._class._from_config(self._config(), dtype=dtype, attn_implementation=attention).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim == 1:  # near its initial value, because a norm may add 1 to its weight
                    parameter.add_(0.3 * noise)
                else:
                    parameter.copy_(noise * (0.8 if "embed" in name else parameter.shape[-1] ** -0.5))
            stored_names = model.state_dict().keys()
            for name, buffer in model.named_buffers():
                if name in stored_names and buffer.is_floating_point():
                    buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
        return model

    def reference(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], ProbeBatch, Tensor]:
        """Return what drafts are compared with: the weights, a batch with padding, and transformers' logits.

        The logits are those of the tokens that are not padding, with eager attention.
        """
        if dtype not in self._references:
            model = self.model(dtype, "eager")
            batch = [*probes(40, 2, ("left",), self.full["vocab_size"])][-1]
            with torch.inference_mode():
                logits = outputs_of(model, batch)
            self._references[dtype] = (_stored(model), batch, logits)
        return self._references[dtype]

    @cached_property
    def _references(self) -> dict[torch.dtype, tuple[dict[str, Tensor], ProbeBatch, Tensor]]:
        return {}


def _stored(model: Any) -> dict[str, Tensor]:
    """Return a model's tensors as save_pretrained writes them, by name. Tied tensors appear once."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    return tensors


def difference(draft: Draft, case: Case) -> float:
    """Return how much a draft's logits differ from those of transformers' class.

    This is the mean absolute difference in fp32, divided by the largest logit. If the fp32 logits are equal, the
    difference in bf16 is returned, scaled to be less than any difference in fp32. It is infinite if the draft computes
    no logits.
    """
    for dtype, weight in zip(_DTYPES, (1.0, 1e-12), strict=True):
        try:
            weights, batch, theirs = case.reference(dtype)
            ours = _logits(draft, case, weights, dtype, batch)
        except Exception:  # a wrong draft may raise anything
            return float("inf")
        real = ... if batch.attention_mask is None else batch.attention_mask.bool()
        gap = (ours[real].double() - theirs[real].double()).abs().mean() / theirs[real].double().abs().max()
        if gap != 0:
            return weight * float(gap) if gap.isfinite() else float("inf")
    return 0.0


def _logits(draft: Draft, case: Case, weights: Mapping[str, Tensor], dtype: torch.dtype, batch: ProbeBatch) -> Tensor:
    family = draft.family()
    spec = family.read(family.reader(case.full))
    bound = family.bind(spec)
    if {name for name in weights if name != family.head or not spec.tied} - {leaf.checkpoint for leaf in bound}:
        raise ValueError("tensors are left over")
    shared = {
        name: tensor
        for leaf in bound
        for name, tensor in zip(leaf.shared, leaf.to_shared(weights[leaf.checkpoint]), strict=True)
    }
    decoder = Decoder(spec, attention="eager").to(dtype).eval()
    decoder.load_state_dict(shared)
    with torch.inference_mode():
        return outputs_of(decoder, batch)


def _tiny(config: Config, draft: Draft) -> Config:
    """Return the config of a tiny model of the same family. Lists with a value per layer are shortened too."""
    tiny = copy.deepcopy(config)
    roles = {role: name for name, field in draft.fields.items() for role in field.role.split() if name in config}
    layers = config.get(roles.get("layers", ""), 0)
    for role, most in _TINY.items():
        name = roles.get(role, "")
        if type(config.get(name)) is int:
            tiny[name] = min(config[name], most)
    heads, groups = (config.get(roles.get(role, "")) for role in ("heads", "kv_heads"))
    if type(heads) is int and type(groups) is int:
        tiny[roles["kv_heads"]] = {heads: tiny[roles["heads"]], 1: 1}.get(groups, 2)
    for name, value in config.items():
        if isinstance(value, list) and len(value) == layers:
            tiny[name] = value[: tiny[roles["layers"]]]
        elif name.endswith("token_id") and type(value) is int:
            tiny[name] = min(value, 5)
        elif "window" in name and type(value) is int:
            tiny[name] = min(value, 16)
    return tiny


def _variants(draft: Draft, case: Case) -> Iterator[tuple[str, Any, Case]]:
    """Yield the name of a config field, another value for it, and the case with this value, for many fields.

    The fields are those that the draft reads, and those that have a TODO because nothing reads them.
    """
    family = draft.family()
    reader = family.reader(case.full)
    family.read(reader)
    roles = {name: field.role.split()[0] for name, field in draft.fields.items()}
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
            with contextlib.suppress(Exception):  # the class may refuse the value
                varied = Case({**case.config, name: other}, case.name)
                varied.reference(torch.float32)
                yield name, other, varied


class Search:
    """A search for the draft that agrees best with transformers' class. It tries the options of the draft's doubts."""

    def __init__(self, case: Case) -> None:
        self._case, self.tried, self.kept, self._seen = case, 0, list[str](), set[Any]()

    def nearest(self, draft: Draft) -> tuple[Draft, float]:
        """Return the draft with the least `difference` from transformers' class, and this difference.

        Options are tried one after another, and then two at a time.
        """
        best, distance = draft, difference(draft, self._case)
        self.tried += 1
        options = [option for doubt in draft.doubts for option in doubt.options]
        pairs = sorted(combinations(range(len(options)), 2), key=sum)[:_PAIRS]
        for most, chosen in ((MOST // 2, [(index,) for index in range(len(options))]), (MOST, pairs)):
            for rounding in (False, True):  # first the function, and then its rounding
                for indices in chosen * 2:
                    if not distance or (distance > _NEARLY) == rounding or self.tried >= most:
                        break
                    words = ", ".join(options[index][0] for index in indices)
                    patch = {place: value for index in indices for place, value in options[index][1].items()}
                    tried, new_distance = self._try(best, patch, rounding)
                    if new_distance < distance * (0.97 if rounding else 0.5):
                        best, distance = _with_reason(tried, patch, words), new_distance
                        self.kept.append(words)
        return best, distance

    def _try(self, best: Draft, patch: Patch, rounding: bool) -> tuple[Draft, float]:
        """Return the draft `best` with a patch, and its `difference` from transformers' class.

        The difference is infinite if the patch should not be tried: the same draft was tried before, or the patch is of
        the wrong kind. With `rounding`, only patches that change nothing but rounding are tried, and otherwise only
        others.
        """
        tried, far = best.patched(patch), float("inf")
        now, new = (_tree(one, self._case.full) for one in (best, tried))
        if now is None or new is None:
            return tried, far if new is None else difference(tried, self._case)
        key = (new, tuple(tried.leaves.values()))
        alike = without_rounding(now) == without_rounding(new) and best.leaves == tried.leaves
        with contextlib.suppress(TypeError):  # a list where a number should be has no hash
            if key in self._seen or alike != rounding:
                return tried, far
            self._seen.add(key)
        distance = difference(tried, self._case)
        self.tried += distance < far
        return tried, distance


def _tree(draft: Draft, config: Config) -> ModelSpec | None:
    try:
        family = draft.family()
        return family.read(family.reader(config))
    except Exception:  # the draft cannot read the config
        return None


def _with_reason(draft: Draft, patch: Patch, words: str) -> Draft:
    reason = f"{words}: tried against transformers' class, and nearest"
    return dataclasses.replace(draft, why={**draft.why, **dict.fromkeys(patch, reason)})


def settled(draft: Draft, case: Case, words: KnownNames) -> Draft:
    """Test the meaning of every config field at a second value of the field. Return the corrected draft.

    If the logits at that value differ from those of transformers' class, the field gets its meaning in another family.
    If no meaning is right, the draft refuses all values of the field but the checkpoint's. `draft` is right on `case`.
    """
    for name, value, varied in list(_variants(draft, case)):
        value_text, place = shown(value), f"{'refused' if name in draft.more['refused'] else 'fields'}.{name}"
        why, todo = dict(draft.why), dict(draft.todo)
        unread = place in todo and place.startswith("refused")
        if not unread and difference(draft, varied) == 0:
            why[place] = f"{why.get(place, '')}; right at {value_text} too"
            draft = dataclasses.replace(draft, why=why)
            continue
        idle = unread and _same(case, varied)
        others = _meanings(draft, name, words) if unread or name in draft.fields else _by_layer(draft)
        others = iter(()) if idle else others
        right = next((other for other in others if max(difference(other, one) for one in (case, varied)) == 0), None)
        if right is not None:
            todo.pop(place, None)
            why[f"fields.{name}"] = (
                f"so the class' logits are right at {shown(case.full.get(name))} and at {value_text}"
            )
            draft = dataclasses.replace(right, why=why, todo=todo)
        elif name in draft.fields:
            draft = _at_one_value(draft, name, case, value_text)
        elif unread:
            same = "the same names and logits" if idle else "other names or logits"
            todo[place] = f"{todo[place]}; at {value_text} the class has {same}"
            draft = dataclasses.replace(draft, todo=todo)
        else:
            todo[f"read {name}"] = f"with {name} {value_text} the class' logits are others than this definition's"
            draft = dataclasses.replace(draft, todo=todo)
    return draft


def _by_layer(draft: Draft) -> Iterator[Draft]:
    """Yield variants of the draft that read the differences between layers from the config as other families do."""
    yield from (draft.patched(patch) for doubt in draft.doubts if doubt.what == BY_LAYER for _, patch in doubt.options)


def _meanings(draft: Draft, name: str, words: KnownNames) -> Iterator[Draft]:
    """Yield the draft with other meanings of the config field `name`.

    First come the meanings of a field of this name in other families. Then come the meanings of all fields that have
    values of the same type.
    """
    current = draft.fields.get(name)
    roles = {role for other, field in draft.fields.items() if other != name for role in field.role.split()}
    value = draft.more["refused"][name][0][0] if current is None else current.default
    options = [meaning.value for meaning in words.fields.get(name, [])]
    options += [
        meanings[0].value
        for meanings in words.fields.values()
        if isinstance(value, (bool, float)) and type(meanings[0].value.default) is type(value)
    ]
    refused = {key: refusal for key, refusal in draft.more["refused"].items() if key != name}
    more = {**draft.more, "refused": refused}
    for role, field in {(option.role, option.read): option for option in options}.items():
        if roles.isdisjoint(field.role.split()) and (current is None or role != (current.role, current.read)):
            fixed = {key: one for key, one in draft.arguments["fixed"].items() if key not in field.role.split()}
            new = field._replace(default=value if type(value) is type(field.default) else field.default)
            arguments = {**draft.arguments, "fixed": fixed}
            yield dataclasses.replace(draft, fields={**draft.fields, name: new}, more=more, arguments=arguments)


def _at_one_value(draft: Draft, name: str, case: Case, other: str) -> Draft:
    """Return the draft with all values of a config field refused but the checkpoint's, since another gave wrong logits.

    For sizes of the whole model, such as the hidden size, only a TODO is added.

    Args:
        draft: The draft, which gives the right logits with the checkpoint's value.
        name: The name of the field.
        case: The checkpoint's config.
        other: The other value as text, for the TODO.
    """
    field, value = draft.fields[name], case.full.get(name)
    todo = {
        **draft.todo,
        f"refused.{name}": f"{name} was taken for {field.role}, and at {other} the class differs from that",
    }
    if "." not in field.role:
        return dataclasses.replace(
            draft, todo={**draft.todo, f"fields.{name}": f"at {name} {other} the class' logits are others"}
        )
    read = field.value(draft.family().reader(case.full), name)
    fixed = {**draft.arguments["fixed"], **dict.fromkeys(field.role.split(), read)}
    refused = {**draft.more["refused"], name: ((value,), f"TODO: this definition was tested only with {shown(value)}")}
    return dataclasses.replace(
        draft,
        fields={key: one for key, one in draft.fields.items() if key != name},
        arguments={**draft.arguments, "fixed": fixed},
        more={**draft.more, "refused": refused},
        todo=todo,
    )


def _same(case: Case, other: Case) -> bool:
    """Return whether transformers' models of two cases have the same tensor names, shapes and logits."""
    if case.shapes != other.shapes:
        return False
    (_, _, ours), (_, _, theirs) = case.reference(torch.float32), other.reference(torch.float32)
    return torch.equal(ours, theirs)


# --- the tests of a definition ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Proof:
    """The result of one of the four tests in `gptkit.testing`."""

    name: str
    holds: bool | None  # None if the test could not be run
    told: str  # the cases for which the test passes, or why it fails or could not be run


def proved(
    family: Architecture, draft: Draft, config: Config, shapes: Mapping[str, Shape], case: Case | None, note: str
) -> list[_Proof]:
    """Run the four tests of `gptkit.testing` on a definition, and return their results.

    Args:
        family: The family, as the definition file defines it.
        draft: The draft from which the file was written.
        config: The checkpoint's config.json.
        shapes: The shapes of the checkpoint's tensors, by name.
        case: transformers' model to compare with, or None if there is none.
        note: A phrase for the result of the logits test: why there is no such model, or how much its logits differ.
    """
    known, small = draft.known, config if case is None else case.full
    if case is None and sum(map(math.prod, shapes.values())) > _PARAMETERS:
        small = _tiny(config, draft)
    fields = [*config] if known is None else [*dict.fromkeys((*known.fields, *known.aliases, *config))]
    proofs = [
        _run_proof(
            "fields",
            lambda: fields_are_accounted_for(family, [config, small], fields),
            f"{len(fields)} fields are read, irrelevant or refused",
        ),
        _run_proof("elements", lambda: elements_land_once(family, small), "every element lands once and comes back"),
        _run_proof(
            "names",
            lambda: _named(family, config, shapes, case),
            f"{len(shapes)} names and shapes of the checkpoint" + (" and those of the class" if case else ""),
        ),
    ]
    if case is None:
        return [*proofs, _Proof("logits", None, note)]
    paths = ("eager",) if "eager" in draft.more else ("sdpa", "eager")
    apart = f"logits differ from those of this definition, {note}"
    words = f"bit for bit in fp32 and bf16, {' and '.join(paths)}"
    return [*proofs, _run_proof("logits", lambda: _computed(family, case, paths), words, apart)]


def _run_proof(name: str, proof: Callable[[], None], words: str, instead: str = "") -> _Proof:
    try:
        proof()
    except Exception as error:  # AssertionError if it fails; a wrong definition may raise anything
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
    missing, spare = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    assert not missing, f"the tree has {len(missing)} tensors that the checkpoint has not: {missing[:3]}"
    assert not spare, f"{len(spare)} tensors have no place in the tree: {spare[:3]}"
    other = [f"{name} {theirs[name]}, and {ours[name]} in the tree" for name in ours if theirs[name] != ours[name]]
    assert not other, f"shapes differ: {other[:3]}"
    if case is not None:
        names_and_shapes_agree(family, case.full, case.shapes)


def _computed(family: Architecture, case: Case, paths: Sequence[str]) -> None:
    vocabulary = case.full["vocab_size"]
    batches = [batch for length in (1, 7, 130) for batch in probes(length, 2, ("left", "right"), vocabulary)]
    for attention in paths:
        for dtype in _DTYPES:
            model = case.model(dtype, attention)
            logits_agree(model, decoder_of(family, case.full, _stored(model), attention), batches)


def place_and_cause(case: Case) -> list[str]:
    """Return the lines in which `gptkit verify` says where the logits start to differ from transformers', and why."""
    from ..parity.verify import verify
    from ..report.verification import verdict_lines

    with tempfile.TemporaryDirectory(prefix="gptkit-draft-") as folder:
        case.model(torch.float32, "eager").save_pretrained(folder)
        try:
            how: Any = {"mutations": False, "bisected": True, "offline": True, "device": "cpu"}
            verification = verify(folder, attention="eager", **how)
        except GptkitError as error:
            return [error.message.replace(folder, "the tiny model").splitlines()[0]]
        lines = verdict_lines(verification)
    return [line for line in lines if line.startswith(("place", "cause"))]


# --- the process -----------------------------------------------------------------------------------------------------


_MOST_LAYERS = 1000
"""A config is only refused for its number of layers if it has more layers than this, and more than tensors."""
_LABELS = ("num_labels", "id2label", "label2id")
"""Config fields of classifiers. transformers builds a table with one row per label from them, so they are removed."""


def _require_worth(config: Config, shapes: Mapping[str, Shape], words: KnownNames) -> None:
    """Raise InvalidInput if config.json has far too many layers: more than 1,000, and more than the number of tensors.

    Building a model from such a config could take all memory.
    """
    for name, meanings in words.fields.items():
        value = config.get(name)
        counts = any("layers" in meaning.value.role.split() for meaning in meanings)
        if counts and type(value) is int and value > max(len(shapes), _MOST_LAYERS):
            message = f"config.json says {name} {shown(value)}, but the checkpoint has only {len(shapes):,} tensors"
            raise InvalidInput(
                message, "Check that config.json belongs to these weights, and that all files are there."
            )


def draft_of(config: Config, shapes: Mapping[str, Shape], without: Sequence[str]) -> dict[str, Any]:
    """Draft a definition and test it. Return its text and the results of the four tests, as JSON values.

    `without` names supported families to treat as unknown.
    """
    words = known_names(tuple(without))
    _require_worth(config, shapes, words)
    config = {name: value for name, value in config.items() if name not in _LABELS}
    for family in [family for name, family in ARCHITECTURES.items() if name in without]:
        del ARCHITECTURES[family.name]
        for kind in family.model_types:
            BY_MODEL_TYPE.pop(kind, None)
    known = known_of(config)
    draft = guess(config, shapes, known, words)
    case, search, distance = None, None, None
    note = "transformers has no class of this type"
    if known is not None:
        try:
            case = Case(config, known.hf_class)
            if case.parameters > _PARAMETERS:
                case = Case(_tiny(config, draft), known.hf_class)
            case.reference(torch.float32)
        except Exception as error:  # the class may refuse the config
            case, note = (
                None,
                f"transformers' {known.hf_class} makes no tiny model of it: {' '.join(str(error).split()):.200}",
            )
    if case is None:
        draft = undecided(draft, config)
    else:
        search = Search(case)
        draft, distance = search.nearest(draft)
        note = f"by {distance:.1e} in the mean" if distance < float("inf") else "which gives none"
        draft = accounted(draft, config, shapes)
        if distance == 0:
            draft = settled(draft, case, words)
        try:
            case.model(torch.float32, "sdpa")
        except Exception:  # the class supports only eager attention
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
        "proofs": [dataclasses.asdict(proof) for proof in proofs],
        "place": place,
        "tried": search.tried if search else 0,
        "kept": search.kept if search else [],
        "todo": todo,
    }


def _head(draft: Draft, proofs: Sequence[_Proof], place: Sequence[str], tried: int) -> list[str]:
    """Return the paragraphs of the definition file's docstring, which report the test results.

    `place` has lines about the first difference, and `tried` is the number of drafts that were compared.
    """
    passed = [proof.name for proof in proofs if proof.holds]
    result = (
        "the four proofs pass"
        if len(passed) == 4
        else f"of the four proofs {', '.join(passed) or 'none'} pass" + ("es" if len(passed) == 1 else "")
    )
    subject = (
        f"a tiny random model of transformers' {draft.known.hf_class}"
        if proofs[-1].holds is not None and draft.known
        else "names and config alone"
    )
    origin = f"{draft.model_type}, as gptkit draft made it of a checkpoint's config.json, names and shapes"
    lines = [f"{origin}: {result}, on {subject}."]
    lines += [
        f"{proof.name}: {'not tried: ' if proof.holds is None else 'fails: '}{proof.told}"
        for proof in proofs
        if not proof.holds
    ]
    lines += [" ".join(words.split()) for words in place]
    lines += [f"Drafts that were tried against the class: {tried}."] if tried else []
    lines += [f"Open questions, marked with TODO: {len(draft.todo)}."] if draft.todo else []
    return lines


def answered(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a question of the parent process: the draft, or the error.

    The question has a `config`, the `shapes` of the tensors by name, and families to treat as unknown (`without`).
    """
    shapes = {name: tuple(shape) for name, shape in question["shapes"].items()}
    try:
        with quiet():
            return draft_of(question["config"], shapes, question["without"])
    except GptkitError as error:
        return {"refused": [type(error).__name__, error.message, error.hint]}


def main() -> None:
    """Read the question of the parent process from standard input, and answer it on standard output."""
    allow(0, LIBRARIES, DATA)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    work(answered, reason)


if __name__ == "__main__":
    main()
