"""Swaps: changes to the components of a model, such as its norms or attention heads.

Every swap states a guarantee: exact, approximate, or useless until the model is trained (`base.Guarantee`).
"""
