"""The law of lenses: what `put` writes of a tree, `get` reads as the same values, in every family that has lenses."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from helpers.covering import examples
from helpers.families import spec_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.architectures import ARCHITECTURES, architecture_of
from gptkit.architectures.config import ConfigReader
from gptkit.architectures.decoder import DecoderFamily
from gptkit.architectures.fields import choice, flag
from gptkit.architectures.lenses import sparse_layers
from gptkit.components import ModelSpec
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


def written(family: str, spec: ModelSpec) -> list[Mapping[str, Any]]:
    """Return the config fields that each lens of a family writes of a tree."""
    decoder = getattr(ARCHITECTURES[family].read, "__self__", None)
    if not isinstance(decoder, DecoderFamily):
        return []
    sparse = [] if decoder.mixtures is None else [decoder.mixtures.sparse.put(sparse_layers(spec))]
    return [lens.put(spec) for lens in (decoder.layers, decoder.recurrent) if lens is not None] + sparse


def has_lenses(family: str) -> bool:
    """Return whether a family has lenses."""
    decoder = getattr(ARCHITECTURES[family].read, "__self__", None)
    own = (decoder.layers, decoder.recurrent, decoder.mixtures) if isinstance(decoder, DecoderFamily) else ()
    return any(lens is not None for lens in own)


@pytest.mark.parametrize("family", [family for family in ARCHITECTURES if has_lenses(family)])
def test_what_a_lens_writes_it_reads_as_the_same_values(family: str) -> None:
    """The tree of a drawn config is the same if the fields that a lens writes replace those of the config."""

    @settings(max_examples=examples(100), deadline=None)
    @given(number=st.integers(0, 2**32))
    def law(number: int) -> None:
        config = ARCHITECTURES[family].drawn(number)
        spec = spec_of(config)
        for fields in written(family, spec):
            assert spec_of({**config, **fields}) == spec

    law()


def test_a_flag_and_a_choice_are_written_as_they_are_read() -> None:
    upcast = flag("attention.scores", False, "float32", "input")
    for value in (True, False):
        assert upcast.write(upcast.value(ConfigReader({"upcast": value}), "upcast")) is value
    kind = choice("activation", "a", {"a": 1, "b": 2, "c": 1})
    for name, back in (("a", "a"), ("b", "b"), ("c", "a")):
        assert kind.write(kind.value(ConfigReader({"kind": name}), "kind")) == back
    with pytest.raises(CannotExpress, match="no value for 3"):
        kind.write(3)


def test_looking_up_a_family_imports_only_its_file() -> None:
    code = (
        "import sys; from gptkit.architectures import architecture_of; architecture_of({'model_type': 'llama'});"
        "print([name for name in sys.modules if '.families.' in name])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['gptkit.architectures.families.llama']"
