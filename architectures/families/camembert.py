"""CamemBERT (Martin et al. 1911.03894): RoBERTa for French.

Source: transformers models/camembert/{configuration,modeling}_camembert.py.
"""

from .roberta import like_roberta

CAMEMBERT = like_roberta("camembert", "Camembert", "2019-11", 30522, head_first=True)
