"""Placeholder until llama2c is written."""

matches = None
describe = None
read = None
plan = None
write = None
