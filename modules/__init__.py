"""The torch modules that compute a model.

A model's architecture is a `ModelSpec`, called its *tree*: nested records of components, such as `Attention`. Every
kind of component has a torch module here. The modules give the same bits as transformers, so they add numbers in the
same order and lay out tensors in memory in the same way.
"""

from .cache import Cache, StaticCache
from .decoder import Decoder

__all__ = ["Cache", "Decoder", "StaticCache"]
