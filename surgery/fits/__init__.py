"""Fits on a text, in closed form: keys and values, heads, latents."""
