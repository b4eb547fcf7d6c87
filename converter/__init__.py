"""Read and write checkpoints: resolve a reference, open its files, plan an output, write and publish it."""
