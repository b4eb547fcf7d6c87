"""Train, heal and evaluate models on texts. See docs/train.md.

To *heal* a model is to train it further after a change of its components, so that it predicts like the model that it
was made from (knowledge distillation). *Held-out* text is kept for evaluations, and is not trained on.
"""
