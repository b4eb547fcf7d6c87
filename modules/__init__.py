"""The shared module set, in torch."""

from .cache import Cache
from .decoder import Decoder

__all__ = ["Cache", "Decoder"]
