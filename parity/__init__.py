"""Compare two models, and show whether they compute the same function."""
