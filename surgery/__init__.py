"""Component swaps, each with its guarantee."""
