"""Report what programs would do with a checkpoint's config.json and tokenizer_config.json.

The rules are data: those about families are in `architectures.loaders`, and those about fields that transformers 4 does
not read in `converter.compatibility`, which can also repair them.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...architectures.loaders import RULES, LoaderView, windowed
from ...architectures.rope import PART, RotaryKind
from ...components import ModelSpec
from ...converter.companions import companions_in
from ...converter.compatibility import TEMPLATE, TOKENIZER_CHANGES, TOKENIZER_CONFIG, changed, compatible_config
from ...converter.names import CONFIG
from ...errors import CannotExpress, ConfigError, InvalidInput, UsageError, shown
from .subject import Finding, Severity, Subject

_EFFECTS: Mapping[str, tuple[str, Severity]] = {
    "refuses": ("loader-refuses", "error"),
    "misreads": ("loader-misreads", "error"),
    "ignores": ("loader-ignores", "note"),
}
"""What a program does -> the rule of the finding, and its severity."""


def view_of(subject: Subject) -> LoaderView:
    """Return what the rules look at. Raises InvalidInput if there is no config.json."""
    config, family, spec = subject.files.config, subject.family, subject.spec
    if config is None:
        raise InvalidInput(
            f"{subject.files.reference} has no {CONFIG}, which {subject.loader} needs to load a model",
            f"Copy the model's {CONFIG} into the folder.",
        )
    part = config.get(family.part if family is not None and family.part else "text_config")
    return LoaderView(part if isinstance(part, dict) else config, spec if isinstance(spec, ModelSpec) else None, family)


def check_settings(subject: Subject) -> Iterator[Finding]:
    """Report what the program `subject.loader` would refuse, misread or ignore in the config and the tokenizer."""
    program = subject.loader
    if subject.files.format == "gguf" or program in (None, "transformers"):
        return
    view = view_of(subject)
    if program == "transformers4":
        yield from _changes(subject, view)
    for rule in RULES:
        known = not rule.families or (view.family is not None and view.family.name in rule.families)
        if rule.program == program and known and rule.applies(view):
            name, severity = _EFFECTS[rule.effect]
            yield Finding(name, severity, f"{rule.words} ({rule.source})")
    if program == "sglang":
        yield from _for_sglang(view)
    if program == "mlx":
        yield from _for_mlx(view)


def _changes(subject: Subject, view: LoaderView) -> Iterator[Finding]:
    """Report the changes that transformers 4 needs; `--fix` makes them."""
    config = dict(subject.files.config or {})
    try:
        effective = compatible_config(config, view.family)[1]
    except CannotExpress as error:
        yield Finding("loader-refuses", "error", error.message)
        effective = []
    except ConfigError:  # another rule reports it
        return
    folder = subject.files.folder
    settings, beside = tokenizer_settings(folder)
    changes = [(CONFIG, change) for change in effective]
    changes += [(TOKENIZER_CONFIG, change) for change in changed(settings, TOKENIZER_CHANGES, beside)[1]]
    for file, change in changes:
        (name, severity), why = _EFFECTS[change.effect], change.why
        if change.name == "rope" and _usual_rope(view):
            (name, severity), why = (
                _EFFECTS["ignores"],
                "RoPE has the default values of transformers 4, which ignores them",
            )
        yield Finding(name, severity, f"{file}: {why} ({change.source})", (), _REPAIR)


_REPAIR = "gptkit audit NEW --for transformers4 --fix OUT adds the fields, and loses nothing."


def tokenizer_settings(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a folder's tokenizer_config.json, or an empty object, and the second argument of `RestatedFile.fields`."""
    import json

    files = {companion.name: companion for companion in companions_in(folder)}
    beside: dict[str, Any] = dict.fromkeys(files)
    if TEMPLATE in files:
        beside[TEMPLATE] = files[TEMPLATE].read_bytes()
    try:
        settings = json.loads(files[TOKENIZER_CONFIG].read_bytes()) if TOKENIZER_CONFIG in files else {}
    except (OSError, ValueError, RecursionError):
        settings = {}
    return (settings if isinstance(settings, dict) else {}), beside


def _usual_rope(view: LoaderView) -> bool:
    """Return whether RoPE has the default values of the family's config class in transformers 4."""
    if view.family is None:
        return False
    kinds = view.family.rotaries
    return all(_is_usual(view.rope if not name else view.rope.get(name) or {}, kind) for name, kind in kinds.items())


def _is_usual(rope: Mapping[str, Any], kind: RotaryKind) -> bool:
    if kind.usual:
        return all(rope.get(name) == value for name, value in kind.usual.items())
    default = kind.base if kind.former_base is None else kind.former_base
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    return bool(plain and rope.get("rope_theta", kind.base) == default and rope.get(PART, kind.whole) == kind.whole)


def installed(package: str) -> Path:
    """Return the folder of a program's source code, without importing it. Raises UsageError if it is not installed."""
    from importlib.util import find_spec

    spec = find_spec(package.replace("-", "_"))
    folder = next(iter(spec.submodule_search_locations or []), None) if spec is not None else None
    if folder is None:
        raise UsageError(
            f"this check reads the source code of {package}, which is not installed",
            f"Install it without its dependencies: pip install --no-deps {package}",
        )
    return Path(folder)


def _for_sglang(view: LoaderView) -> Iterator[Finding]:
    """Report if SGLang has no class for the model. Its classes are in srt/models, in the variable EntryClass."""
    named = view.config.get("architectures")
    name = next((x for x in named if isinstance(x, str)), None) if isinstance(named, list) else None
    if name is None:
        remedy = f'Add it to {CONFIG}, for example: "architectures": ["LlamaForCausalLM"].'
        message = f"{CONFIG} has no field architectures, by which SGLang chooses the model's class"
        yield Finding("loader-refuses", "error", message, (), remedy)
        return
    sources = (file.read_text("utf-8") for file in sorted((installed("sglang") / "srt" / "models").glob("*.py")))
    entries = re.compile(r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", re.M)
    classes = {word for text in sources for entry in entries.findall(text) for word in re.findall(r"\w+", entry)}
    if name not in classes:
        message = f"SGLang has no class of its own for {shown(name, 60)}, and runs transformers' class"
        yield Finding("loader-architecture", "note", message, (), "Use --for transformers to check that class.")


def _for_mlx(view: LoaderView) -> Iterator[Finding]:
    """Report what mlx-lm's class for the model would refuse or ignore, from the fields of its record ModelArgs."""
    folder, kind = installed("mlx-lm"), view.config.get("model_type")
    tree = ast.parse((folder / "utils.py").read_text("utf-8"))
    names: Mapping[Any, Any] = next(
        (ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
         and [getattr(target, "id", "") for target in node.targets] == ["MODEL_REMAPPING"]), {},
    )  # fmt: skip
    module = names.get(kind, kind)
    file = folder / "models" / f"{module}.py"
    if not isinstance(module, str) or not re.fullmatch(r"[\w-]+", module) or not file.is_file():
        yield Finding("loader-refuses", "error", f"mlx-lm has no class for the model type {shown(kind, 60)}")
        return
    text = file.read_text("utf-8")
    fields = _arguments(text)
    where = f"mlx-lm, models/{module}.py"
    missing = [name for name, required in fields.items() if required and name not in view.config]
    if missing:
        words = f"mlx-lm needs these fields of {CONFIG}, which are missing: {', '.join(missing)} ({where})"
        yield Finding("loader-refuses", "error", words, (), _REPAIR.replace("transformers4", "mlx"))
    if (ignored := _ignored_rope(view, text, fields)) and not missing:
        words = (
            f"mlx-lm uses its default of {ignored}, because it does not read rope_parameters for this model ({where})"
        )
        yield Finding("loader-misreads", "error", words, (), _REPAIR.replace("transformers4", "mlx"))
    yield Finding("loader-unread", "note", "the names of tensors were not compared with mlx-lm's class")
    if windowed(view) and "sliding_window" not in text:
        words = f"mlx-lm has no attention windows for this model, so it differs for texts longer than one ({where})"
        yield Finding("loader-misreads", "warning", words)


def _ignored_rope(view: LoaderView, source: str, fields: Mapping[str, bool]) -> str:
    """Return a config field of RoPE that a model of mlx-lm reads and config.json lacks, if its default is wrong.

    `source` is the code of the model, and `fields` are those of its record. Return "" if there is no such field.
    """
    if "rope_parameters" in fields or "rope_parameters" not in view.config:
        return ""
    whole = view.rope.get("full_attention")
    rope = whole if isinstance(whole, dict) else view.rope
    default = re.search(r"^    rope_theta: [^=\n]+= ([\d._]+)$", source, re.M)
    base = rope.get("rope_theta")
    if default is not None and "rope_theta" not in view.config and base not in (None, float(default[1])):
        return "rope_theta"
    scaled = rope.get("rope_type", "default") != "default" and "rope_scaling" not in view.config
    return "rope_scaling" if scaled and "rope_scaling" in fields else ""


def _arguments(source: str) -> dict[str, bool]:
    """Return the fields of the class ModelArgs in the source code of a model, and whether they are required."""
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "ModelArgs")
    body = [node for found in classes for node in found.body if isinstance(node, ast.AnnAssign)]
    return {node.target.id: node.value is None for node in body if isinstance(node.target, ast.Name)}
