"""The activation functions and their properties, without the functions themselves."""

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
"""The names of the activations. Their formulas are in `modules.layers`, and their properties in `FACTS`."""


class ActivationFacts(NamedTuple):
    """The properties of an activation."""

    words: str
    """The name of the activation in tables."""
    gated: str = "gated"
    """The name of a gated feed-forward with this activation (Shazeer 2002.05202)."""
    function: Activation | None = None
    """The name of the standard implementation, if this activation computes the same function with other rounding.
    Example: "gelu" for gelu_python. None if this activation is itself the standard one."""
    zero: bool = True
    """Whether the activation maps 0 to 0."""


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
"""The learnt parameters of an activation, each a single number, with their values at the start of training. Plain
feed-forwards store them in the module `activation` (Apertus)."""


def function_of(activation: Activation) -> Activation:
    """Return the name of the standard activation with the same function, such as "gelu" for "gelu_python"."""
    return FACTS[activation].function or activation
