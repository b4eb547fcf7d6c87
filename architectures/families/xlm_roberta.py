"""XLM-RoBERTa (Conneau et al. 1911.02116): RoBERTa with a vocabulary for a hundred languages.

Source: transformers models/xlm_roberta/{configuration,modeling}_xlm_roberta.py.
"""

from dataclasses import replace

from ..fields import with_defaults
from .roberta import BASE, ENCODER, FAMILY, HEAD

_ENCODER = replace(ENCODER, fields=with_defaults(ENCODER.fields, vocab=30522), masked=("XLMRobertaForMaskedLM",))

# transformers' class creates the head first.
XLM_ROBERTA = _ENCODER.architecture(
    "xlm-roberta", "XLMRobertaForMaskedLM", (*HEAD, *BASE), released="2019-11", **FAMILY
)
