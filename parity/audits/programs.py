"""Report how transformers, llama.cpp or vLLM would load a checkpoint."""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...analysis.named import LAYER
from ...architectures.gguf import expressed
from ...components import ModelSpec
from ...converter.confinement import Confined, libraries
from ...converter.formats.gguf_header import open_header
from ...converter.names import CONFIG
from ...errors import CannotExpress, InvalidInput, UnknownFamily, UsageError, shown
from .names import folded
from .subject import CONVERT_AGAIN, SAVE_AGAIN, Finding, Severity, Subject

_SUFFIXES = (".weight", ".bias")


def ask_program(subject: Subject) -> Iterator[Finding]:
    """Report how the program `subject.loader` would treat the checkpoint's tensors, for example ignore or rename them.

    For transformers, gptkit builds the model class without weights. For llama.cpp it reads the tensor names that the
    gguf package knows. For vLLM it reads the source code of the model class.
    """
    files = subject.files
    if subject.loader in ("llama.cpp", "vllm"):
        yield from (_for_vllm if subject.loader == "vllm" else _for_llama_cpp)(subject)
    if subject.loader != "transformers":
        return
    if files.config is None:
        raise InvalidInput(
            f"{files.reference} has no {CONFIG}, which transformers needs to load a model",
            f"Copy the model's {CONFIG} into the folder.",
        )
    tensors = [[name, list(info.shape)] for name, info in files.tensors.items()]
    question = {"config": dict(files.config), "libraries": libraries(), "tensors": tensors}
    reply = Confined("transformers_process").ask(question)
    if reply is None or "error" in reply:
        why = "building the model takes more time or memory than gptkit allows" if reply is None else reply["error"]
        words = "".join(sign if sign.isprintable() else " " for sign in why)
        raise UnknownFamily(f"transformers cannot build a model from {files.reference}: {words:.300}")
    loading, kind = reply["answer"]["loading"], reply["answer"]["class"]
    rules: tuple[tuple[str, str, Severity, str, str], ...] = (
        (
            "ignored",
            "loader-ignores",
            "warning",
            "ignores these tensors without a warning",
            "save_pretrained() does not write them.",
        ),
        (
            "unexpected",
            "loader-ignores",
            "error",
            "has no parameters with these names, and ignores the tensors",
            "Rename the tensors, or remove them.",
        ),
        (
            "missing",
            "loader-draws",
            "error",
            "finds no tensors for these parameters, and initialises them at random",
            SAVE_AGAIN,
        ),
        ("unneeded", "loader-draws", "note", "computes these parameters itself, so they need no tensors", ""),
        (
            "mismatched",
            "loader-shape",
            "error",
            "expects other shapes for these tensors",
            f"Correct the sizes in {CONFIG}.",
        ),
    )
    for key, rule, severity, message, remedy in rules:
        if loading[key]:
            yield Finding(rule, severity, f"transformers' {kind} {message}", tuple(loading[key]), remedy)
    if loading["renamed"]:
        shown = "; ".join(folded([f"{x} → {y}" for x, y in loading["renamed"].items()])[:3])
        yield Finding("loader-renames", "note", f"transformers' {kind} renames: {shown}", tuple(loading["renamed"]))


def _for_llama_cpp(subject: Subject) -> Iterator[Finding]:
    """Report the tensors for which llama.cpp has no name, and whether it has an architecture for the model.

    The names come from the gguf package and from gptkit's own definitions of GGUF architectures.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(
            "llama.cpp's tensor names come from the gguf package, which is not installed",
            "Install it: pip install gguf",
        )
    import gguf

    files = subject.files
    names = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = max((int(match["index"]) + 1 for name in files.tensors if (match := LAYER.fullmatch(name))), default=0)
    if files.format == "gguf":
        kind = open_header(files.folder / next(iter(files.names))).metadata.get("general.architecture")
        if kind not in names:
            raise UnknownFamily(
                f"the gguf package has no architecture called {shown(kind)}", "Update it: pip install --upgrade gguf"
            )
        known = gguf.get_tensor_name_map(names[kind], layers)
        unknown = tuple(name for name in files.tensors if known.get_name(name, _SUFFIXES) is None)
        if unknown:
            message = f"llama.cpp's {kind} does not use these tensors, and does not load a file with unknown tensors"
            yield Finding("loader-ignores", "error", message, unknown, CONVERT_AGAIN)
        return
    if subject.family is not None and isinstance(subject.spec, ModelSpec):
        try:
            expression = expressed(subject.spec, subject.family.name)
        except CannotExpress as error:
            yield Finding(
                "loader-refuses", "error", f"no llama.cpp architecture can compute this model: {error.message}"
            )
            return
        unwritten = tuple(name for name in files.tensors if subject.family.carries(name, len(subject.spec.blocks)))
        if unwritten:
            message = (
                "gptkit convert --to gguf does not write these tensors, because llama.cpp's architecture has "
                "no such parameters"
            )
            yield Finding("loader-ignores", "warning", message, unwritten)
        message = f"llama.cpp can run this model as its architecture {expression.architecture.name}"
        yield Finding("loader-architecture", "note", message)
        return
    model_type = (files.config or {}).get("model_type")
    kind = next(
        (
            architecture
            for architecture in names
            if re.sub(r"[^a-z0-9]", "", architecture) == re.sub(r"[^a-z0-9]", "", str(model_type))
        ),
        None,
    )
    if kind is None:
        raise UnknownFamily(
            f"the gguf package has no architecture for the model_type {shown(model_type)}",
            "Update it: pip install --upgrade gguf",
        )
    known = gguf.get_tensor_name_map(names[kind], layers)
    unknown = tuple(name for name in files.tensors if known.get_name(name, _SUFFIXES) is None)
    if unknown:
        message = (
            f"the gguf package's {kind} has no names for these tensors, so converters that use it fail with: "
            "can not map tensor"
        )
        remedy = "Ignore this if llama.cpp's convert_hf_to_gguf.py renames these tensors first."
        yield Finding("loader-unmapped", "warning", message, unknown, remedy)
    yield Finding("loader-architecture", "note", f"llama.cpp has an architecture called {kind}")


def _for_vllm(subject: Subject) -> Iterator[Finding]:
    """Report how vLLM would treat the tensors. gptkit reads the source code of vLLM's models, and
    does not import vLLM.
    """
    folder = _installed("vllm")
    if folder is None or not Path(folder, "model_executor", "models", "registry.py").is_file():
        why = "this check reads the source code of vLLM's models, and the vllm package is not installed"
        raise UsageError(why, "Install it without its dependencies: pip install --no-deps vllm")
    files, config = subject.files, subject.files.config
    if config is None:
        raise InvalidInput(
            f"{files.reference} has no {CONFIG}, which vLLM needs to find the model's class",
            f"Copy the model's {CONFIG} into the folder.",
        )
    named = config.get("architectures")
    name = (
        next((class_name for class_name in named if isinstance(class_name, str)), None)
        if isinstance(named, list)
        else None
    )
    if name is None:
        message = f"{CONFIG} has no field architectures, by which vLLM chooses the model's class"
        remedy = f'Add it to {CONFIG}, for example: "architectures": ["LlamaForCausalLM"].'
        yield Finding("loader-refuses", "error", message, (), remedy)
        return
    reply_fields = Confined("transformers_process").ask(
        {"config": dict(config), "libraries": libraries(), "fields": True}
    )
    fields = (reply_fields or {}).get("answer", {}).get("fields")
    tensors = [[tensor, list(info.shape)] for tensor, info in files.tensors.items()]
    question = {"source": folder, "architecture": name, "tensors": tensors, "quantised": subject.quantised}
    question |= {"config": fields or dict(config), "complete": fields is not None}
    reply = Confined("vllm_process").ask(question)
    if reply is None or "error" in reply:
        why = "building the model takes more time or memory than gptkit allows" if reply is None else reply["error"]
        raise UnknownFamily(f"gptkit cannot read vLLM's source for {name:.60}: {why:.300}")
    answer = reply["answer"]
    yield from _vllm_knows(config, name, answer)
    kind, loading = f"vLLM's {answer['class']}", answer.get("loading", {})
    if "refuses" in answer:
        yield Finding("loader-refuses", "error", f"{kind} does not accept this {CONFIG}: {answer['refuses']}")
    if "unread" in answer:
        message = f"not checked: gptkit does not understand the code of {kind}, which uses {answer['unread']}"
        yield Finding("loader-unread", "note", message)
    if loading.get("ignored"):
        message = f"{kind} has no parameters with these names, and ignores the tensors without a warning"
        yield Finding("loader-ignores", "warning", message, tuple(loading["ignored"]))
    if loading.get("unexpected"):
        message = f"{kind} has no parameters with these names, and does not load a checkpoint that has the tensors"
        yield Finding(
            "loader-ignores", "error", message, tuple(loading["unexpected"]), "Rename the tensors, or remove them."
        )
    for checked, does in ((False, "computes with uninitialised memory"), (True, "does not load the checkpoint")):
        missing = [parameter for parameter, looks in loading.get("missing", {}).items() if looks is checked]
        missing += [] if checked else loading.get("halves", [])
        if missing:
            message = f"{kind} finds no tensors for these parameters, and {does}"
            yield Finding("loader-draws", "error", message, tuple(missing), SAVE_AGAIN)
    for why, names in loading.get("unread", {}).items():
        yield Finding("loader-unread", "note", f"not compared with {kind}: {why}", tuple(names))


def _installed(package: str) -> str | None:
    """Return the folder of a package without importing it."""
    spec = importlib.util.find_spec(package)
    return next(iter(spec.submodule_search_locations or []), None) if spec is not None else None


def _vllm_knows(config: Mapping[str, Any], name: str, answer: Mapping[str, Any]) -> Iterator[Finding]:
    """Report if vLLM has no class for the architecture, or does not support the quantisation.

    Args:
        config: the checkpoint's config.json.
        name: the class name in the config's field `architectures`.
        answer: the answer of the process that read vLLM's source. "module" is vLLM's module with this class, or
            "transformers" if vLLM runs transformers' class, or None. "last" is the last version of vLLM that had a
            removed class. "quantisations" are the names of the supported methods.
    """
    quantisation = config.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    if method is not None and method not in answer["quantisations"]:
        yield Finding("loader-refuses", "error", f"vLLM does not support weights quantised by {shown(method, 40)}")
    if answer["module"] == "transformers":
        message = f"vLLM has no class of its own for {name}, and runs transformers' class"
        yield Finding("loader-architecture", "note", message, (), "Use --for transformers to check that class.")
    elif answer["module"] is None:
        until = f": version {answer['last']} was the last that had one" if answer["last"] else ""
        folder, kind = _installed("transformers"), re.sub(r"[^a-z0-9_]", "", str(config.get("model_type")))
        code = [] if folder is None else [*Path(folder).glob(f"models/{kind}/modeling_{kind}.py")]
        if any(f"class {name}(" in file.read_text() for file in code):
            message = (
                f"vLLM has no class for {name}{until}; it runs transformers' class if that class supports "
                "vLLM's attention"
            )
            yield Finding("loader-architecture", "warning", message, (), "Use --for transformers to check that class.")
        else:
            yield Finding("loader-refuses", "error", f"neither vLLM nor transformers has a class for {name}{until}")
