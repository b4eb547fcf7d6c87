"""The torch modules of all components."""

from .cache import Cache
from .decoder import Decoder

__all__ = ["Cache", "Decoder"]
