"""ModelSpec: a model as a tree of components, which are small frozen records. This package does not import torch.

A component lists its parameters by *shared name* and shape. Shared names are gptkit's own, and the same for all
families. `architectures/` defines the names and layouts in a family's checkpoints. A component has only fields that
every family with this component uses. There are two kinds of fields:

- Most fields decide which function is computed: sizes, heads, scale, activation, eps.
- Rounding fields (`arithmetic`, `cast`, `fused`, …) describe differences between the families' code in the last bits.
  In exact arithmetic the function is the same for all their values, but bf16 logits differ.

Weights of linear layers are [out, in] everywhere. `to_json` converts a tree to JSON, and `from_json` converts it back.
The `__all__` of every file lists its public names, so adding a kind to a file needs no change here.
"""

from .activations import *
from .attention import *
from .base import *
from .block import *
from .cross_attention import *
from .delta import *
from .encoder import *
from .ends import *
from .feed_forward import *
from .latent_attention import *
from .linear_attention import *
from .mamba import *
from .mamba2 import *
from .mixture import *
from .model import *
from .norms import *
from .positions import *
from .rg_lru import *
from .rwkv import *
from .serialise import *
from .shared_transformer import *
from .short_convolution import *
from .streams import *
from .sublayer import *
