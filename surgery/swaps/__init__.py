"""The swaps, with one kind per file. `registry` lists them in the order in which they run."""
