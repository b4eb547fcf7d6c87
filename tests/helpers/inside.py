"""Workers of `confinement` without processes of their own, the limits of these, and the seconds that imports take."""

import tempfile
from types import ModuleType
from typing import Any

import pytest

from gptkit.converter import transformers_process


def asked_inside(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """What a module asks transformers in a process of its own is answered in this one."""

    class Inside:
        def __init__(self, worker: str) -> None:
            assert worker == "transformers_process"

        def ask(self, question: dict[str, Any]) -> dict[str, Any]:
            try:
                return {"answer": transformers_process.answer({**question, "libraries": []})}
            except Exception as error:
                return {"error": transformers_process.reason(error)}

    monkeypatch.setattr(transformers_process, "allow", lambda *_: None)
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    monkeypatch.setattr(module, "Confined", Inside)
