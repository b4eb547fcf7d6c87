"""One file a family: its config.json as a tree and back, and what its checkpoints call each tensor."""
