"""Numbers about a tree, without weights or torch."""
