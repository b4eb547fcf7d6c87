"""Falcon Mamba (TII 2410.05355): Mamba with weightless norms on its step size, B and C.

Source: transformers models/falcon_mamba/{configuration,modeling}_falcon_mamba.py.
"""

from functools import partial

from ..base import Architecture
from ..draws import sometimes
from .mamba import FAMILY, IRRELEVANT, draw, read

_FALCON_MAMBA = Architecture(
    name="falcon_mamba",
    model_types=("falcon_mamba",),
    hf_class="FalconMambaForCausalLM",
    hf_config="FalconMambaConfig",
    read=partial(read, normed=True),
    draw=lambda chosen: {**draw(chosen), **sometimes(chosen, {"mixer_rms_eps": 1e-2})},
    released="2024-08",
    irrelevant={**IRRELEVANT, "use_falcon_mambapy": "which kernels compute it"},
    **FAMILY,
)
