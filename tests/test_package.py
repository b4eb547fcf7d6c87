"""The package itself: what `import gptkit` offers, and what it does not wait for."""

import pytest
from helpers.processes import imported

import gptkit


@pytest.mark.parametrize("name", gptkit.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(gptkit, name) is not None
    assert name in dir(gptkit)


def test_names_are_sorted_and_documented() -> None:
    assert gptkit.__all__ == sorted(gptkit.__all__)
    assert gptkit.__doc__ is not None
    for name in set(gptkit.__all__) - {"__version__"}:
        assert f"    {name}(" in gptkit.__doc__
        assert callable(getattr(gptkit, name))
        assert getattr(gptkit, name).__doc__


@pytest.mark.parametrize("name", sorted(set(gptkit.__all__) - {"__version__", "swap"}))
def test_a_misspelt_keyword_is_reported_by_the_called_function(name: str) -> None:
    with pytest.raises(TypeError, match=rf"\b{name}\(\) got an unexpected keyword argument 'ofline'"):
        getattr(gptkit, name)(ofline=True)


def test_errors_are_there_without_another_import() -> None:
    code = (
        "import gptkit\ntry: gptkit.params('no such model')\nexcept gptkit.errors.GptkitError as e: assert e.exit_code"
    )
    assert not imported(code)
    assert not imported("import gptkit; assert gptkit.errors.UsageError.exit_code == 2")


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'surgeon'"):
        _ = gptkit.surgeon


@pytest.mark.parametrize(
    "code",
    [
        "import gptkit; dir(gptkit); gptkit.__version__",
        "import gptkit; gptkit.errors.GptkitError",
        "import gptkit; gptkit.params('qwen3-8b')",
        "import gptkit; gptkit.params('sample:gpt2')",
        "import gptkit.cli",
    ],
)
def test_what_needs_no_torch_imports_none(code: str) -> None:
    assert not imported(code, "torch", "transformers", "tokenizers", "safetensors")
