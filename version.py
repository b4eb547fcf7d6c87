"""gptkit's version, which stands on the ground floor: pyproject.toml reads it without importing anything."""

__version__ = "0.1.0"
