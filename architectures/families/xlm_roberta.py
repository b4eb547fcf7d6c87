"""XLM-RoBERTa (Conneau et al. 1911.02116): RoBERTa with a vocabulary for a hundred languages.

Source: transformers models/xlm_roberta/{configuration,modeling}_xlm_roberta.py.
"""

from .roberta import like_roberta

XLM_ROBERTA = like_roberta("xlm-roberta", "XLMRoberta", "2019-11", 30522, head_first=True)
