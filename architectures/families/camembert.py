"""CamemBERT (Martin et al. 1911.03894): RoBERTa for French.

Source: transformers models/camembert/{configuration,modeling}_camembert.py.
"""

from dataclasses import replace

from ..fields import with_defaults
from .roberta import BASE, ENCODER, FAMILY, HEAD

_ENCODER = replace(ENCODER, fields=with_defaults(ENCODER.fields, vocab=30522), masked=("CamembertForMaskedLM",))

# transformers' class creates the head first.
CAMEMBERT = _ENCODER.architecture("camembert", "CamembertForMaskedLM", (*HEAD, *BASE), released="2019-11", **FAMILY)
