"""Trees whose tensors are in memory, in place of files."""

from collections.abc import Callable

import msgspec
import numpy as np
import torch
from torch import Tensor

from gptkit.analysis.activations import Kernel
from gptkit.architectures import architecture_of
from gptkit.components import ModelSpec
from gptkit.modules import Decoder
from gptkit.modules.load import as_array
from helpers.families import CONFIGS, randomised_reference, shared_weights, spec_of


class Held:
    """A tree whose tensors are in memory."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor]) -> None:
        self.spec, self.weights, self.reads, self.releases = spec, weights, list[str](), 0

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        self.reads.append(name)
        return as_array(self.weights[name])

    def release(self) -> None:
        self.releases += 1

    def decoder(self, dtype: torch.dtype, attention: Kernel = "sdpa") -> Decoder:
        model = Decoder(self.spec, attention).to(dtype).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.weights[name])
        return model

    def changed(self, name: str, change: Callable[[Tensor], Tensor]) -> "Held":
        return Held(self.spec, {**self.weights, name: change(self.weights[name].clone())})


def held(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Held:
    attention = architecture_of(CONFIGS[name]).reference(spec_of(CONFIGS[name]))[0]
    reference = randomised_reference(CONFIGS[name], dtype, attention, seed)
    weights = shared_weights(reference, CONFIGS[name])
    return Held(spec_of(CONFIGS[name]), {key: value.detach() for key, value in weights.items()})


def fewer_tokens(tree: Held, kept: list[int]) -> Held:
    """The tree with the rows of `kept` alone, in this order."""
    spec = msgspec.structs.replace(
        tree.spec,
        embedding=msgspec.structs.replace(tree.spec.embedding, vocab_size=len(kept)),
        head=msgspec.structs.replace(tree.spec.head, vocab_size=len(kept)),
    )
    ends = ("embedding.weight", "head.weight", "head.bias")
    return Held(spec, {name: w[kept] if name in ends else w for name, w in tree.weights.items()})
