"""Models trained: texts as token files, one loop, and what it needs. See docs/train.md."""
