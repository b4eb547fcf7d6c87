"""Placeholder until nanogpt is written."""

matches = None
describe = None
read = None
plan = None
write = None
