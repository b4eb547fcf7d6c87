"""The commands, a file a kind. Each parses, calls a function of the package, and prints; see `gptkit.cli`."""
