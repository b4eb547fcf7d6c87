"""Fits: new weights computed from a model's activations on a text, without gradients. One file per kind of swap."""
