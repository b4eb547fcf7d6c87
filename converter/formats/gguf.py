"""Placeholder until gguf is written."""

matches = None
describe = None
read = None
plan = None
write = None
