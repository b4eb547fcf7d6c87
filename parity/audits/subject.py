"""Define the input of the audit's rules (`Subject`) and their results (`Finding`, `Audit`)."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ...architectures import Architecture, named
from ...architectures.config import quantisation
from ...architectures.layout import Shape
from ...components import ModelSpec
from ...converter.checkpoint import Checkpoint, open_scanned
from ...converter.formats.gguf import declared
from ...converter.matching import Match, match
from ...converter.names import CONFIG, LOCAL_CONFIG
from ...converter.opening import Opening
from ...converter.resolve import read_spec
from ...converter.scan import FileScan
from ...converter.tree import Origin
from ...converter.weights import identity_leaves
from ...display import Record, Shown
from ...errors import CannotExpress, CheckpointError, GptkitError, InvalidInput, UnknownFamily

Severity = Literal["error", "warning", "note"]
REWRITABLE = ("safetensors", "pickle")
"""The formats of checkpoints that `fix` can write again."""

_ABOUT_CONFIG = {"config", "config-experts", "config-layers", "config-quantisation", "config-vocabulary", "no-config"}
"""The rules whose faults are in config.json. Other faults are in the index or in a weight file."""

SAVE_AGAIN = "Save the model again with the program that wrote it, then run gptkit audit again."
"""The remedy for a checkpoint of which something is missing or damaged."""
CONVERT_AGAIN = "Convert the original model to GGUF again."
"""The remedy for a GGUF file whose tensors do not match its metadata."""


@dataclass(frozen=True)
class Finding(Record):
    """A fault of a checkpoint, or a fact that is worth knowing (with the severity "note")."""

    rule: str  # the rule's name, for programs
    severity: Severity
    message: str
    tensors: tuple[str, ...] = ()  # the affected tensors, by their names in the files
    remedy: str = ""  # the next step for the user

    @property
    def fingerprint(self) -> str:
        """Return a hash that stays the same as long as the fault does: of the rule, the tensors, and the message.

        Numbers in the message do not count, so that a count or a measured difference may change.
        """
        text = re.sub(r"\d[\d.,e+-]*", "0", self.message)
        return hashlib.sha256("\0".join((self.rule, text, *sorted(self.tensors))).encode()).hexdigest()


@dataclass(frozen=True)
class Audit(Shown):
    """The result of an audit: the findings about one checkpoint, and what was examined."""

    reference: str  #: the checkpoint as the user named it
    revision: str | None  #: its commit, if it came from the hub
    tensors: int  #: the number of tensors
    nbytes: int  #: the size of all tensors in bytes
    looked: tuple[str, ...]  #: what was read for the audit, in words
    findings: tuple[Finding, ...]
    values: bool = False  #: whether the weights were read, which finds NaN, infinities and zeros
    names: Mapping[str, str] = field(default_factory=dict)  #: the tensors that need another name, and that name
    in_source: tuple[str, ...] = ()  #: missing tensors that the source has with the required shape
    restored: tuple[str, Any] | None = None
    """The field of config.json that contradicts the tensors, and the source's value, with which all tensors fit."""

    @property
    def clean(self) -> bool:
        """Return whether there is no error and no warning. Notes do not count."""
        return all(finding.severity == "note" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        data = {"schema_version": 1, "model": self.reference, "revision": self.revision, "clean": self.clean}
        data |= {"tensors": self.tensors, "bytes": self.nbytes, "held_against": list(self.looked)}
        data["values_read"] = self.values
        return {**data, "findings": [finding.as_json() for finding in self.findings]}

    def _location(self, finding: Finding) -> dict[str, Any]:
        """Return the SARIF location of a finding: the file that has the fault, and the names of the tensors."""
        folder = Path(self.reference)
        names = (CONFIG, "*.index.json") if finding.rule in _ABOUT_CONFIG else ("*.index.json", "*.safetensors", CONFIG)
        files = (path for name in names for path in sorted(folder.glob(name))) if folder.is_dir() else iter(())
        location: dict[str, Any] = {"artifactLocation": {"uri": next(files, folder).as_posix()}}
        tensors = [{"fullyQualifiedName": name} for name in finding.tensors]
        return {"physicalLocation": location, **({"logicalLocations": tensors} if tensors else {})}

    def as_sarif(self) -> dict[str, Any]:
        """Return the audit in the Static Analysis Results Interchange Format, version 2.1.0."""
        from ...version import __version__

        rules = [{"id": rule} for rule in dict.fromkeys(finding.rule for finding in self.findings)]
        driver = {"name": "gptkit", "version": __version__, "rules": rules}
        results = [
            {
                "ruleId": finding.rule,
                "level": finding.severity,
                "message": {"text": " ".join(filter(None, [f"{finding.message}.", finding.remedy]))},
                "locations": [self._location(finding)],
                "partialFingerprints": {"gptkitFinding/v1": finding.fingerprint},
            }
            for finding in self.findings
        ]
        run = {"tool": {"driver": driver}, "results": results}
        schema = "https://json.schemastore.org/sarif-2.1.0.json"
        return {"$schema": schema, "version": "2.1.0", "runs": [run]}


@dataclass
class Subject:
    """The input of all rules: the audited checkpoint, the model it was made from, and the caller's options.

    The properties are computed when a rule first needs them.
    """

    files: FileScan  # the files of the audited checkpoint
    source: FileScan | None  # the files of the model that it was made from
    loader: str | None  # the program that is to load the checkpoint
    values: bool  # whether the values are to be read
    opening: Opening
    progress: Callable[[int, int], None]  # called with the bytes read since the last call, and the total
    device: str = "auto"  # the device on which logits are computed
    names: dict[str, str] = field(default_factory=dict)  # misnamed tensors: name in the files -> the expected name
    in_source: list[str] = field(default_factory=list)  # missing tensors that the source has with the required shape
    restored: tuple[str, Any] | None = None  # a field of config.json and the source's value, with which all tensors fit
    findings: list[Finding] = field(default_factory=list)  # the findings of the previous rules

    @cached_property
    def described(self) -> tuple[ModelSpec, Origin, bool] | GptkitError | None:
        """Return what the checkpoint's config describes: the component tree, its origin, and a bool.

        The origin names the model from which the checkpoint was made. The bool is true if the tensors have the names
        that the model family uses on the hub. Return an error if the config cannot be read, and None if gptkit does not
        know the model family.
        """
        files = self.files
        try:
            if files.format == "gguf":
                return None if self.gguf is None else (self.gguf[0], Origin(), False)
            if files.opened is not None:
                return files.opened.spec, files.opened.origin, files.opened.architecture is not None
            if files.resolved.other is not None and files.config is None:
                return None
            config_location = replace(files.resolved, format="hf", source=files.folder / CONFIG)
            spec, origin, _ = read_spec(files.resolved if files.resolved.other is None else config_location)
        except UnknownFamily:
            return None
        except (CannotExpress, InvalidInput) as error:
            return error
        return spec, origin, not files.resolved.is_own

    @cached_property
    def gguf(self) -> tuple[ModelSpec, dict[str, Shape], frozenset[str]] | None:
        """Return what a GGUF's metadata declare: the component tree, the tensor shapes by name, and unused tensor
        names.

        Return None if the checkpoint is not a GGUF, or if gptkit does not know its architecture. Raises InvalidInput,
        CannotExpress.
        """
        if self.files.format != "gguf" or self.files.broken:
            return None
        try:
            return declared(self.files.folder / next(iter(self.files.names)))
        except UnknownFamily:
            return None

    @property
    def spec(self) -> ModelSpec | GptkitError | None:
        """Return the checkpoint's component tree, the error of reading its config, or None for an
        unknown model family.
        """
        return self.described[0] if isinstance(self.described, tuple) else self.described

    @property
    def family(self) -> Architecture | None:
        """Return the model family if the tensors have the names that it uses on the hub, else None."""
        return self.first_family if isinstance(self.described, tuple) and self.described[2] else None

    @property
    def first_family(self) -> Architecture | None:
        """Return the model family, even if the tensors have the names of another format; None if it is unknown."""
        known = isinstance(self.described, tuple) and self.described[1].family
        return named(known) if known else None

    @cached_property
    def match(self) -> Match | GptkitError | None:
        """Return which tensors fit the parameters of the model, as `gptkit.load` assigns them, and which do not.

        Return an error if they cannot be assigned. Return None if the model is unknown, and for a GGUF and quantised
        weights, which must be decoded first.
        """
        spec, family, weights = self.spec, self.family, self.files.raw
        if not isinstance(spec, ModelSpec) or self.files.format == "gguf" or self.quantised:
            return None
        if not weights.info:  # and the files that were to hold them are reported
            return None
        if len(spec.blocks) > len(weights.info):
            return CheckpointError(
                f"config.json has {len(spec.blocks):,} layers, but there are only {len(weights.info):,} tensors"
            )
        try:
            spec = spec if family is None else family.in_files(spec, weights.info)
            leaves = identity_leaves(spec) if family is None else family.bind_files(spec, weights.info)
            if family is None and self.files.opened is not None:
                leaves = self.files.opened.leaves
            return match(spec, leaves, weights, family, self.first_family)
        except (CannotExpress, InvalidInput) as error:
            return error

    @cached_property
    def origin(self) -> "Subject | None":
        """Return the source (the model that the checkpoint was made from) as a `Subject`; None if
        no source was given.
        """
        return None if self.source is None else Subject(self.source, None, None, False, self.opening, self.progress)

    @cached_property
    def checkpoint(self) -> Checkpoint | GptkitError:
        """Return the checkpoint as `gptkit.load` opens it, or the error that this raises."""
        try:
            return open_scanned(self.files, allow_pickle=self.opening.get("allow_pickle", False))
        except GptkitError as error:
            return error

    @property
    def says(self) -> str:
        """Return the name of the file that describes the model (config.json, for example), for use in messages."""
        files = self.files
        return (
            LOCAL_CONFIG
            if files.resolved.is_own
            else CONFIG
            if files.config is not None
            else "the config in the weight file"
        )

    @cached_property
    def quantised(self) -> bool:
        """Return whether config.json says that the weights are quantised."""
        return quantisation(self.files.config) is not None

    def looked(self) -> list[str]:
        """Return, in words, what this audit reads: "its headers", "config.json", the source, the loading program."""
        files = self.files
        words = ["its headers", *(["its index"] if files.index is not None else [])]
        words += ["its metadata"] if files.format == "gguf" and isinstance(self.spec, ModelSpec) else []
        if files.config is not None:
            known = isinstance(self.spec, ModelSpec) and not self.quantised
            words.append("config.json" if known else "config.json as far as names tell")
        words += ["its values"] if self.values else []
        words += [] if self.source is None else [self.source.reference]
        programs = {
            "transformers": "the class in transformers",
            "llama.cpp": "llama.cpp's tables",
            "vllm": "vLLM's source",
            "transformers4": "tables about transformers 4.57",
            "sglang": "SGLang's source",
            "mlx": "mlx-lm's source",
        }
        return words + ([programs[self.loader]] if self.loader else [])
