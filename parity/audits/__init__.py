"""The rules of `audit`: functions from a `Subject` to findings."""
