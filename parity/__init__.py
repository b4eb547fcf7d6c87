"""Proof that two models compute the same."""
