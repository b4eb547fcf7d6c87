"""Fits of weights on a text, without gradients: keys and values, heads, latent attention, feed-forwards, rounding."""
