"""The rules of `audit`, a file an idea: each is a function from a `Subject` to findings."""
