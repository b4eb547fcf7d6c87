"""Parameters, FLOPs and memory of a model, counted from its architecture without weights or torch.

Here and below, a *tree* is a model's architecture: a `ModelSpec` with nested component records. A *program* is the
list of operations that one part of it computes, such as a layer (`components.operations`).
"""
