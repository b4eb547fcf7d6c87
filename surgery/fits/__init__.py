"""What is fitted on a text: keys and values, heads, latents, in closed form."""
