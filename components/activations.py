"""The activations, and what is to be known of each without evaluating it. No torch."""

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
"""The formulas are in `modules.layers`, what is to be known of each in `FACTS`."""


class ActivationFacts(NamedTuple):
    """What is to be known of an activation.

    words: for tables. gated: what a gated feed-forward with it is called (Shazeer 2002.05202). function: the activation
    that stands for all which evaluate one function in ways of their own, None where it is the only one. zero: whether
    it is 0 at 0.
    """

    words: str
    gated: str = "gated"
    function: Activation | None = None
    zero: bool = True


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
"""The numbers that an activation has as parameters, each with the value with which training starts. Feed-forwards that
are plain have them in `activation` (Apertus).
"""


def function_of(activation: Activation) -> Activation:
    """The activation that stands for this one's function, however each of them evaluates it."""
    return FACTS[activation].function or activation
