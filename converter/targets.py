"""What `convert --to` writes, for its help, its errors and the shell; the README's table has the same. No imports."""

from __future__ import annotations

__all__ = ["FORMATS", "TARGETS"]

FORMATS = ("gguf", "llama2c", "llama2c_v1", "nanogpt", "nanogpt_tanh", "dcp")
"""The modules of `formats`."""

TARGETS = ("local", "hf", "hf:FAMILY", "hf:auto", *FORMATS)
"""Every value."""
