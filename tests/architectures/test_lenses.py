"""The law of lenses: what `put` writes of a tree, `get` reads as the same values, in every family that has lenses."""

import subprocess
import sys
from typing import Any

import pytest
from helpers.families import VARIANTS, Variant, spec_of
from hypothesis import given
from hypothesis import strategies as st

from gptkit.architectures import architecture_of
from gptkit.architectures.config import ConfigReader
from gptkit.architectures.decoder import Decoder
from gptkit.architectures.fields import choice, flag
from gptkit.architectures.lenses import Lens
from gptkit.errors import CannotExpress

FAMILY = {"model_type": "gemma2", "num_hidden_layers": 5, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}


@given(
    kinds=st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=5, max_size=5),
    width=st.integers(1, 2**31 - 1),
)
def test_windows_come_back(kinds: list[str], width: int) -> None:
    config = {**FAMILY, "layer_types": kinds, "sliding_window": width}
    decoder = architecture_of(config).read.__self__  # type: ignore[attr-defined]
    written = decoder.layers.put(spec_of(config))
    assert written["layer_types"] == kinds
    values = {"layers": 5}
    windows = [width if kind == "sliding_attention" else None for kind in kinds]
    assert [fields["window"] for fields in decoder.layers.get(ConfigReader(written), values)] == windows


def lenses(variant: Variant) -> list[Lens]:
    """Return the lenses of a variant's family that apply to its trees."""
    decoder = getattr(architecture_of(variant.config).read, "__self__", None)
    if type(decoder) is not Decoder:
        return []
    sparse = None if decoder.mixtures is None else decoder.mixtures.sparse
    return [lens for lens in (decoder.layers, decoder.recurrent, sparse) if lens is not None]


WITH_LENSES = [variant for variant in VARIANTS if lenses(variant)]


@pytest.mark.parametrize("variant", WITH_LENSES, ids=str)
def test_what_lenses_write_is_read_as_the_same_tree(variant: Variant) -> None:
    """The tree is the same if the fields that the lenses write replace those of the config."""
    spec, config = spec_of(variant.config), variant.config
    part = architecture_of(config).part
    written: dict[str, Any] = {}
    for lens in lenses(variant):
        written |= lens.put(spec)
    text = config.get(part) if part else None
    changed = {**config, part: {**text, **written}} if isinstance(text, dict) else {**config, **written}
    assert spec_of(changed) == spec


def test_a_flag_and_a_choice_are_written_as_they_are_read() -> None:
    upcast = flag("attention.scores", False, "float32", "input")
    for value in (True, False):
        assert upcast.write(upcast.value(ConfigReader({"upcast": value}), "upcast")) is value
    kind = choice("activation", "a", {"a": 1, "b": 2, "c": 1})
    for name, back in (("a", "a"), ("b", "b"), ("c", "a")):
        assert kind.write(kind.value(ConfigReader({"kind": name}), "kind")) == back
    with pytest.raises(CannotExpress, match="no name for 3"):
        kind.write(3)


def test_looking_up_a_family_imports_only_its_file() -> None:
    code = (
        "import sys; from gptkit.architectures import architecture_of; architecture_of({'model_type': 'llama'});"
        "print([name for name in sys.modules if '.families.' in name])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['gptkit.architectures.families.llama']"
