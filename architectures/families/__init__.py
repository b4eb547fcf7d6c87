"""The families, one per file. A file describes the family's config.json and the names of the tensors in checkpoints."""
