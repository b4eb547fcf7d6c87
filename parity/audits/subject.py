"""What an audit looks at, and what it finds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from ...architectures import Architecture, architecture_of
from ...architectures.config import quantisation
from ...architectures.layout import Shape
from ...components import ModelSpec
from ...converter.formats.gguf import declared
from ...converter.scan import Scan
from ...display import Record, Shown
from ...errors import CannotExpress, InvalidInput, UnknownFamily

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding(Record):
    """Something that is wrong, or worth knowing ("note"). rule: its name, for programs. tensors: those it is of, by the
    names in the files. remedy: what to do.
    """

    rule: str
    severity: Severity
    message: str
    tensors: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True)
class Audit(Shown):
    """All that was found of a checkpoint. tensors: how many it has; looked: what they were held against, in words."""

    reference: str
    revision: str | None
    tensors: int
    nbytes: int
    looked: tuple[str, ...]
    findings: tuple[Finding, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are to have another name, and which."""

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong; what is only worth knowing does not count."""
        return all(each.severity == "note" for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        data = {"schema_version": 1, "model": self.reference, "revision": self.revision, "clean": self.clean}
        data |= {"tensors": self.tensors, "bytes": self.nbytes, "held_against": list(self.looked)}
        return {**data, "findings": [each.as_json() for each in self.findings]}

    def as_sarif(self) -> dict[str, Any]:
        """The same in the Static Analysis Results Interchange Format, version 2.1.0."""
        from ...version import __version__

        rules = [{"id": rule} for rule in dict.fromkeys(each.rule for each in self.findings)]
        driver = {"name": "gptkit", "version": __version__, "rules": rules}
        results = [
            {
                "ruleId": each.rule,
                "level": each.severity,
                "message": {"text": " ".join(filter(None, [f"{each.message}.", each.remedy]))},
                "locations": [{"logicalLocations": [{"fullyQualifiedName": name} for name in each.tensors]}]
                if each.tensors
                else [],
            }
            for each in self.findings
        ]
        run = {"tool": {"driver": driver}, "results": results}
        schema = "https://json.schemastore.org/sarif-2.1.0.json"
        return {"$schema": schema, "version": "2.1.0", "runs": [run]}


@dataclass
class Subject:
    """What the rules look at: the files, the family that config.json names, the source."""

    files: Scan
    source: Scan | None
    loader: str | None
    values: bool
    opening: Mapping[str, bool]
    progress: Callable[[int, int], None]
    names: dict[str, str] = field(default_factory=dict)
    """Tensors by their names in the files, each with the name that it is to have."""

    @cached_property
    def family(self) -> Architecture | None:
        try:
            return None if self.files.config is None else architecture_of(self.files.config)
        except InvalidInput:
            return None

    @cached_property
    def gguf(self) -> tuple[ModelSpec, dict[str, Shape], frozenset[str]] | None:
        """What a GGUF's metadata say of its tensors; None of other files, and of architectures that are not known.
        Raises InvalidInput, CannotExpress.
        """
        if self.files.format != "gguf" or self.files.broken:
            return None
        try:
            return declared(self.files.folder / next(iter(self.files.names)))
        except UnknownFamily:
            return None

    @cached_property
    def spec(self) -> ModelSpec | str | None:
        """The tree that config.json says; in words why it says none; None of a family that is not known."""
        try:
            if self.gguf is not None:
                return self.gguf[0]
        except (CannotExpress, InvalidInput) as error:
            return error.message
        if self.family is None or self.files.config is None:
            return None
        try:
            return self.family.spec(self.files.config)
        except InvalidInput as error:
            return error.message

    @cached_property
    def quantised(self) -> bool:
        return quantisation(self.files.config) is not None

    def looked(self) -> list[str]:
        files = self.files
        words = ["its headers", *(["its index"] if files.index is not None else [])]
        words += ["its metadata"] if files.format == "gguf" and isinstance(self.spec, ModelSpec) else []
        if files.config is not None:
            known = isinstance(self.spec, ModelSpec) and not self.quantised
            words.append("config.json" if known else "config.json as far as names tell")
        words += ["its values"] if self.values else []
        words += [] if self.source is None else [self.source.reference]
        told = {"transformers": "the class in transformers", "llama.cpp": "llama.cpp's tables", "vllm": "vLLM's source"}
        return words + ([told[self.loader]] if self.loader else [])
