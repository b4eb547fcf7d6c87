"""Checkpoints as bytes: resolve, open, plan, write, publish."""
