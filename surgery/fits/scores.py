"""Refit queries and keys, after key-value heads were merged, so that attention scores are near to the original's.

After `regression.fit_keys`, this is the step that helps most. The notation is that of `regression`: n query heads read
one new key head, d = head_dim, e = width of the input. Biases are weights on a constant input of 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .regression import rotate


class _ScoreFit(NamedTuple):
    """The result of `refit_scores`: the new queries and key, and the error of the scores before and after."""

    queries: Tensor  # (n, d, e)
    key: Tensor  # (d, e)
    before: float  # the error before the refit, per token and query head
    after: float  # the error after the refit, per token and query head


def refit_scores(
    queries: Tensor,
    key: Tensor,
    inputs: Tensor,
    probabilities: Tensor,
    scores: Tensor,
    scale: float,
    angles: Tensor | None = None,
    *,
    rounds: int = 2,
    steps: int = 10,
    strength: float = 1e-3,
) -> _ScoreFit:
    """Fit the queries and the key head of a group together, so that their scores are near to the original's.

    The error is Σ_j p_ij (Δ_ij - Σ_k p_ik Δ_ik)², where Δ is the difference of scores and p the original's attention
    weights. To second order, it is twice the KL divergence of the two attention patterns. Equal shifts of all scores of
    a query do not count, because softmax ignores them. Scores are bilinear, so each round solves a least squares
    problem that is linearised in queries and keys (Gauss-Newton), by conjugate gradients on the normal equations. Few
    steps and a ridge prevent overfitting. If a round increases the error, its change is halved, and finally left out.

    Args:
        queries: The queries to start with, (n, d, e).
        key: The key to start with, (d, e).
        inputs: The layer's inputs in the new model, (B, T, e).
        probabilities: The original's attention weights on its own inputs, (B, n, T, T), with 0 at masked positions.
        scores: The original's q·k · scale without position biases, (B, n, T, T).
        scale: The factor of q·k.
        angles: The angles of the rotary positions, (T, p), or None without rotary positions.
        rounds: The number of rounds.
        steps: The number of steps of conjugate gradients in a round.
        strength: The strength of the ridge, relative to the mean curvature.
    """
    problem = _Scores(inputs, probabilities, scores, scale, angles)
    before = after = problem.error(queries, key)
    for _ in range(rounds):
        change = problem.solve(queries, key, steps, strength)
        for size in (1.0, 0.5, 0.25):
            trial = queries + size * change[0], key + size * change[1]
            error = problem.error(*trial)
            if error < after:
                (queries, key), after = trial, error
                break
        else:
            break
    tokens = inputs.shape[0] * inputs.shape[1] * queries.shape[0]
    return _ScoreFit(queries, key, before / tokens, after / tokens)


@dataclass
class _Scores:
    """The least squares problem of `refit_scores`, computed one sequence at a time. The fields are its arguments."""

    inputs: Tensor
    probabilities: Tensor
    scores: Tensor
    scale: float
    angles: Tensor | None

    def turned(self, x: Tensor) -> Tensor:
        return x if self.angles is None else rotate(x, self.angles)

    def turned_back(self, x: Tensor) -> Tensor:
        return x if self.angles is None else rotate(x, -self.angles)

    def residual(self, queries: Tensor, key: Tensor, b: int) -> Tensor:
        """Return the original's scores minus the current ones for sequence b, (n, T, T), with 0 at masked positions."""
        q, k = self.turned(self.inputs[b] @ queries.transpose(-1, -2)), self.turned(self.inputs[b] @ key.T)
        return torch.sub(self.scores[b], q @ k.T, alpha=self.scale).masked_fill_(self.probabilities[b] == 0, 0)

    def centred(self, difference: Tensor, b: int) -> Tensor:
        """Return p_ij (Δ_ij - Σ_k p_ik Δ_ik), (n, T, T), for differences of scores Δ in sequence b.

        p are the original's attention weights.
        """
        p = self.probabilities[b]
        weighted = p * difference
        return weighted.addcmul_(p, weighted.sum(dim=-1, keepdim=True), value=-1)

    def error(self, queries: Tensor, key: Tensor) -> float:
        """Return the squared error of the attention scores, weighted by the original's probabilities.

        It is the sum over sequences, query heads and tokens. `queries` and `key` are the projections of the fit.
        """
        total = 0.0
        for b in range(len(self.inputs)):
            missing = self.residual(queries, key, b)
            total += float((self.centred(missing, b) * missing).sum())
        return total

    def solve(self, queries: Tensor, key: Tensor, steps: int, strength: float) -> tuple[Tensor, Tensor]:
        """Return the change of queries and key after some steps of conjugate gradients on the linearised problem."""
        heads, d, width = queries.shape
        q = [self.turned(x @ queries.transpose(-1, -2)) * self.scale for x in self.inputs]  # (n, T, d) each
        k = [self.turned(x @ key.T) * self.scale for x in self.inputs]  # (T, d) each

        def adjoint(b: int, y: Tensor) -> tuple[Tensor, Tensor]:
            for_queries = self.turned_back(y @ k[b]).transpose(-1, -2) @ self.inputs[b]
            return for_queries, self.turned_back((y.transpose(-1, -2) @ q[b]).sum(dim=0)).T @ self.inputs[b]

        def curvature(b: int, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
            x = self.inputs[b]
            change = self.turned(x @ dq.transpose(-1, -2)) @ k[b].T
            change += q[b] @ self.turned(x @ dk.T).T
            return adjoint(b, self.centred(change, b))

        # Queries and key are each rescaled by 1 / the size of the other, so that both have the inputs' curvature.
        unit_q = float(torch.stack([part.square().mean() for part in k]).mean()) ** -0.5
        unit_k = float(torch.stack([part.square().sum(dim=0).mean() for part in q]).mean()) ** -0.5
        penalty = strength * float(self.inputs.square().sum()) / width

        def packed(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
            dq, dk = (torch.stack(part).sum(dim=0) for part in zip(*parts, strict=True))
            return torch.cat((dq.reshape(-1, width) * unit_q, dk * unit_k))

        def unpacked(z: Tensor) -> tuple[Tensor, Tensor]:
            return z[: heads * d].reshape(heads, d, width) * unit_q, z[heads * d :] * unit_k

        sequences = range(len(self.inputs))
        wanted = packed([adjoint(b, self.centred(self.residual(queries, key, b), b)) for b in sequences])

        def normal(z: Tensor) -> Tensor:
            return packed([curvature(b, *unpacked(z)) for b in sequences]) + penalty * z

        return unpacked(conjugate_gradients(normal, wanted, steps))


def conjugate_gradients(matrix: Callable[[Tensor], Tensor], wanted: Tensor, steps: int) -> Tensor:
    """Solve matrix(x) ≈ wanted for a positive semidefinite `matrix`, from zero (Hestenes & Stiefel 1952)."""
    x, r = torch.zeros_like(wanted), wanted.clone()
    p, size = r.clone(), float(r.square().sum())
    floor = size * torch.finfo(wanted.dtype).eps ** 2
    for _ in range(steps):
        if size <= floor:
            break
        product = matrix(p)
        along = size / float((p * product).sum())
        x, r = x + along * p, r - along * product
        size, old = float(r.square().sum()), size
        p = r + size / old * p
    return x
