"""Falcon Mamba (TII 2410.05355): Mamba with weightless norms on its step size, B and C.

Source: transformers models/falcon_mamba/{configuration,modeling}_falcon_mamba.py.
"""

from functools import partial

from ..base import Architecture
from ..fields import Field
from .mamba import FAMILY, FIELDS, IRRELEVANT, draw, read, write

_FIELDS = {**FIELDS, "mixer_rms_eps": Field("b_norm.eps", 1e-6)}

_FALCON_MAMBA = Architecture(
    name="falcon_mamba",
    model_types=("falcon_mamba",),
    hf_class="FalconMambaForCausalLM",
    hf_config="FalconMambaConfig",
    read=partial(read, fields=_FIELDS),
    write=partial(write, fields=_FIELDS),
    draw=partial(draw, fields=_FIELDS),
    released="2024-08",
    irrelevant={**IRRELEVANT, "use_falcon_mambapy": "which kernels compute it"},
    **FAMILY,
)
