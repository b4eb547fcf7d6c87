"""ModelSpec: a model as a tree of components, each a small frozen record. No torch.

A component names its parameters by *shared name* and shape; a checkpoint family's own names and layouts live in
`architectures/`. Each component holds only what it needs itself: a field that another family would ignore belongs
in a component of its own. Two kinds of field:

- what function it is: sizes, heads, scale, activation, eps;
- how it rounds, where the families' code differs in the last bit (`arithmetic`, `cast`, `fused`, …): the
  function in exact arithmetic is the same for every value of these, bf16 logits are not.

Linear weights are [out, in] everywhere. Everything serialises to JSON with `to_json` and back with `from_json`. What is
public stands in each file's `__all__`, so that a new kind in a file that is here needs no edit of this one.
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
