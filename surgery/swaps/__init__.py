"""The swaps, with one kind per file. `registry` has their order."""
