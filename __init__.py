"""gptkit: take any GPT-style checkpoint apart, change it, and prove that it still computes what it should."""

__version__ = "0.1.0"
