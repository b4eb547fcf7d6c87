"""Swaps of components, with a guarantee for every swap."""
