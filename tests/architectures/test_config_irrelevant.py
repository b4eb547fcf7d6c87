"""A field that a family declares irrelevant changes nothing in transformers' model, whatever value it has.

"Made of other fields" is the claim that is most often wrong: a config class computes a field, and then takes the
file's value for it all the same. Each such field is set to other values, and transformers' tiny model has to have the
same tensors and the same logits. Values that gptkit or transformers refuses prove nothing and are passed over.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.covering import few
from helpers.families import REPRESENTATIVES, has_cache, hf_config, modern, randomised_reference, spec_of

from gptkit.architectures import ARCHITECTURES
from gptkit.architectures.config import COMMON_IRRELEVANT
from gptkit.errors import ConfigError
from gptkit.parity.outputs import outputs_of
from gptkit.parity.probe import ProbeBatch
from gptkit.parity.sides import begin_anew

ELSEWHERE = {
    "architectures": "names the class",
    "model_type": "names the family",
    "dtype": "read by the loader",
    "torch_dtype": "read by the loader",
    "quantization_config": "read by the loader",
    "quantization": "read by the loader",
    "auto_map": "points at code",
    "transformers_version": "a label",
}
"""Fields that other code than a family's `read` accounts for."""
FAMILIES = [name for name, family in ARCHITECTURES.items() if not family.model]
IDS = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(0))


def others(value: Any) -> list[Any]:
    """Other values of a field, of the type that it has."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return sorted({value + 1, max(value - 1, 0), max(value // 2, 1), 2 * value + 2} - {value})
    if isinstance(value, float):
        return [value + 0.5, value / 2]
    if isinstance(value, str):
        return ["gelu", "another"]
    if isinstance(value, list | tuple):
        return [[], [*value, *value[:1]]]
    return [True, 2, 5, 0.5]


class Reference:
    """transformers' model of a family's tiny config, to be built again with fields changed and the same weights."""

    def __init__(self, family: str) -> None:
        self.family, self.config = ARCHITECTURES[family], modern(REPRESENTATIVES[family].config)
        self.attention = self.family.reference(spec_of(self.config))[-1]
        self.state: dict[str, torch.Tensor] | None = None
        self.usual = self.logits({})

    def logits(self, changed: dict[str, Any]) -> list[torch.Tensor] | None:
        """Return the logits of a text, and of a token decoded behind it; None where the tensors have other shapes."""
        model = randomised_reference({**self.config, **changed}, attention=self.attention)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if self.state is None:
            self.state = state
        if {name: each.shape for name, each in state.items()} != {
            name: each.shape for name, each in self.state.items()
        }:
            return None
        model.load_state_dict(self.state)
        begin_anew(model, self.family)
        with torch.inference_mode():
            found = [outputs_of(model, ProbeBatch("whole", IDS))]
            if has_cache(model) and not self.family.wrong_batches and spec_of(self.config).encoder is None:
                past = model(IDS, use_cache=True)
                past = getattr(past, "past_key_values", None) or getattr(past, "cache_params", None)
                if past is not None and hasattr(past, "get_seq_length"):
                    found.append(model(IDS[:, :1], past_key_values=past, use_cache=True).logits)
        return found

    def moved_by(self, changed: dict[str, Any]) -> bool:
        """Return whether changed fields that gptkit reads as before change transformers' tensors or logits."""
        try:
            spec_of({**self.config, **changed})
            found = self.logits(changed)
        except ConfigError:
            return False
        except Exception:
            return False
        if found is None or self.usual is None or len(found) != len(self.usual):
            return True
        pairs = zip(found, self.usual, strict=True)
        return not all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)


def values(family: str, names: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Each field with each other value."""
    usual = hf_config(REPRESENTATIVES[family].config)
    for name in names:
        yield from ((name, each) for each in others(getattr(usual, name, None)) if name not in ELSEWHERE)


@few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_a_family_calls_irrelevant_moves_nothing(family: str) -> None:
    own = {name: reason for name, reason in ARCHITECTURES[family].irrelevant.items() if reason is not None}
    names = {**own, "pad_token_id": "generation"} if "pad_token_id" in ARCHITECTURES[family].ignored else own
    reference = Reference(family)
    moving = [(name, value) for name, value in values(family, names) if reference.moved_by({name: value})]
    assert moving == [], "read these in the family's file, or refuse other values"


@few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_irrelevant_everywhere_moves_nothing(family: str) -> None:
    ignored = ARCHITECTURES[family].ignored
    names = {name: reason for name, reason in COMMON_IRRELEVANT.items() if name in ignored}
    reference, last = Reference(family), dict(values(family, names))
    together = {name: value for name, value in last.items() if name not in ("output_attentions", "return_dict")}
    assert reference.usual is not None
    if reference.moved_by(together):
        assert [name for name, value in together.items() if reference.moved_by({name: value})] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_another_name_of_a_field_that_is_read_is_not_irrelevant(family: str) -> None:
    """transformers sets the field under both names, so that a file may have either."""
    names = type(hf_config(REPRESENTATIVES[family].config)).attribute_map
    ignored = ARCHITECTURES[family].ignored
    assert [name for name, target in names.items() if name in ignored and target not in ignored] == []
