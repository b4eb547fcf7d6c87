"""The activations, and what is to be known of each without evaluating it. No torch."""

from math import expm1, log
from typing import Literal, NamedTuple

__all__ = ["FACTS", "LEARNT", "Activation", "Facts", "function_of"]

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


class Facts(NamedTuple):
    """What is to be known of an activation.

    words: for tables. gated: what a gated feed-forward with it is called (Shazeer 2002.05202). function: the activation
    that stands for all which evaluate one function in ways of their own, None where it is the only one. zero: whether
    it is 0 at 0.
    """

    words: str
    gated: str = "gated"
    function: Activation | None = None
    zero: bool = True


FACTS: dict[Activation, Facts] = {
    "gelu": Facts("GELU", "GEGLU"),
    "gelu_python": Facts("GELU", "GEGLU", "gelu"),
    "gelu_tanh": Facts("GELU (tanh)", "GEGLU"),
    "gelu_new": Facts("GELU (tanh)", "GEGLU", "gelu_tanh"),
    "gelu_bloom": Facts("GELU (tanh)", "GEGLU", "gelu_tanh"),
    "gelu_fast": Facts("GELU (tanh)", "GEGLU", "gelu_tanh"),
    "gelu_10": Facts("GELU (clipped)"),
    "quick_gelu": Facts("GELU (sigmoid)"),
    "silu": Facts("SiLU", "SwiGLU"),
    "mish": Facts("Mish"),
    "hardswish": Facts("hard swish"),
    "relu": Facts("ReLU", "ReGLU"),
    "relu2": Facts("ReLU²"),
    "relu6": Facts("ReLU6"),
    "leaky_relu": Facts("leaky ReLU"),
    "sigmoid": Facts("sigmoid", "GLU", zero=False),
    "tanh": Facts("tanh"),
    "laplace": Facts("Laplace", zero=False),
    "sqrtsoftplus": Facts("√softplus", zero=False),
    "linear": Facts("linear", "bilinear"),
    "xielu": Facts("xIELU"),
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
