"""The swaps, a file each; `registry` has their order."""
