"""ModelSpec: a model as a tree of components. A component is a small frozen record. No torch.

A component lists its parameters by *shared name* and shape. The names and layouts of a checkpoint family are in
`architectures/`. A component has only the fields that it needs itself: a field that another family would ignore belongs
in a component of its own. There are two kinds of fields:

- fields that decide which function is computed: sizes, heads, scale, activation, eps;
- fields that decide how it is rounded, where the code of families differs in the last bit (`arithmetic`, `cast`,
  `fused`, …). They change bf16 logits, and not the function in exact arithmetic.

Linear weights are [out, in] everywhere. `to_json` writes a tree as JSON, and `from_json` reads it. The public names of
a file are in its `__all__`, so a new component in an existing file needs no change here.
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
