"""The activations, and their properties. No torch."""

from math import expm1, log
from typing import Literal, NamedTuple

__all__ = ["FACTS", "LEARNT", "Activation", "ActivationFacts", "function_of"]

Activation = Literal[
    "gelu",
    "gelu_python",
    "gelu_new",
    "gelu_tanh",
    "gelu_bloom",
    "gelu_fast",
    "gelu_10",
    "quick_gelu",
    "silu",
    "mish",
    "hardswish",
    "relu",
    "relu2",
    "relu6",
    "leaky_relu",
    "sigmoid",
    "tanh",
    "laplace",
    "sqrtsoftplus",
    "linear",
    "xielu",
]
"""The formulas are in `modules.layers`, and the properties in `FACTS`."""


class ActivationFacts(NamedTuple):
    """The properties of an activation."""

    words: str
    """The name in tables."""
    gated: str = "gated"
    """The name of a gated feed-forward with it (Shazeer 2002.05202)."""
    function: Activation | None = None
    """The activation that represents this function, if several activations compute it in different ways; otherwise
    None."""
    zero: bool = True
    """Whether it is 0 at 0."""


FACTS: dict[Activation, ActivationFacts] = {
    "gelu": ActivationFacts("GELU", "GEGLU"),
    "gelu_python": ActivationFacts("GELU", "GEGLU", "gelu"),
    "gelu_tanh": ActivationFacts("GELU (tanh)", "GEGLU"),
    "gelu_new": ActivationFacts("GELU (tanh)", "GEGLU", "gelu_tanh"),
    "gelu_bloom": ActivationFacts("GELU (tanh)", "GEGLU", "gelu_tanh"),
    "gelu_fast": ActivationFacts("GELU (tanh)", "GEGLU", "gelu_tanh"),
    "gelu_10": ActivationFacts("GELU (clipped)"),
    "quick_gelu": ActivationFacts("GELU (sigmoid)"),
    "silu": ActivationFacts("SiLU", "SwiGLU"),
    "mish": ActivationFacts("Mish"),
    "hardswish": ActivationFacts("hard swish"),
    "relu": ActivationFacts("ReLU", "ReGLU"),
    "relu2": ActivationFacts("ReLU²"),
    "relu6": ActivationFacts("ReLU6"),
    "leaky_relu": ActivationFacts("leaky ReLU"),
    "sigmoid": ActivationFacts("sigmoid", "GLU", zero=False),
    "tanh": ActivationFacts("tanh"),
    "laplace": ActivationFacts("Laplace", zero=False),
    "sqrtsoftplus": ActivationFacts("√softplus", zero=False),
    "linear": ActivationFacts("linear", "bilinear"),
    "xielu": ActivationFacts("xIELU"),
}

LEARNT: dict[Activation, dict[str, float]] = {
    "xielu": {"alpha_p": log(expm1(0.8)), "alpha_n": log(expm1(0.3)), "beta": 0.5, "eps": -1e-6}
}
"""The parameters of activations, with their initial values. Plain feed-forwards have them in `activation` (Apertus)."""


def function_of(activation: Activation) -> Activation:
    """Return the activation that represents the function of this one."""
    return FACTS[activation].function or activation
