"""The version of gptkit. It has its own file so that pyproject.toml can read it without importing anything."""

__version__ = "0.1.0"
