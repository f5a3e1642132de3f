"""REKLS for one matrix in NumPy float64, written from the algorithm alone, and the values of the PyTorch original."""

from functools import cache
from pathlib import Path

import numpy as np

VALUES = Path(__file__).parent / "rekls_reference.npz"
"""Trajectories of NVIDIA Emerging-Optimizers, pull request 175, in float64; see the notes in test_rekls_math.py."""
DECAYS = ("decoupled", "independent", "palm", "l2", "l2_before_factors")
LIMIT = 0.1 / np.sqrt(0.05 * (1 - 0.9**2 / 0.95))
"""Of an update, with the default betas: 1.165."""


@cache
def original():
    """Arrays of the PyTorch original by ``case|name``."""
    with np.load(VALUES) as found:
        return dict(found)


class ByHand:
    """REKLS for one float64 matrix."""

    def __init__(
        self,
        weight,
        *,
        lr=1e-2,
        betas=(0.9, 0.95),
        factor_beta=0.95,
        eps=1e-8,
        weight_decay=0.01,
        decay="decoupled",
        skip=False,
        start=0.0,
        relative=0.0,
        limit=np.inf,
    ):
        m, n = weight.shape
        self.w, self.lr, self.betas, self.factor_beta, self.eps = weight.copy(), lr, betas, factor_beta, eps
        self.weight_decay, self.decay, self.skip, self.t = weight_decay, decay, skip, 0
        self.at_rms, self.relative, self.limit = start == "rms", relative, limit
        start = 0.0 if self.at_rms else start
        self.left, self.right = np.zeros((m, m)), np.zeros((n, n))
        self.ql, self.qr, self.vl, self.vr = np.eye(m), np.eye(n), np.full(m, start), np.full(n, start)
        self.first, self.second = np.zeros((m, n)), np.zeros((m, n))

    def step(self, g, bases=(None, None)):
        """Take a step. Where eigenvalues repeat, ``bases`` has the eigenvectors to use, of both sides."""
        self.t += 1
        m, n = g.shape
        if self.decay == "l2_before_factors":
            g = g + self.weight_decay * self.w
        keep = 1 - (1 - self.factor_beta) / (1 - self.factor_beta**self.t)
        by_r = self.qr @ np.diag(1 / self.divisors(self.vr, g)) @ self.qr.T
        by_l = self.ql @ np.diag(1 / self.divisors(self.vl, g)) @ self.ql.T
        self.left = keep * self.left + (1 - keep) / n * g @ by_r @ g.T
        self.right = keep * self.right + (1 - keep) / m * g.T @ by_l @ g
        plain = self.ql @ self.first @ self.qr.T
        (self.vl, self.ql), (self.vr, self.qr) = map(descending, (self.left, self.right), bases)
        self.first = self.ql.T @ plain @ self.qr
        t = self.t - self.skip
        if t:
            self.move(g, t)

    def divisors(self, values, g):
        if self.at_rms and not np.any(values > 0):
            values = np.full_like(values, np.sqrt(np.mean(g**2)))
        values = np.maximum(values, self.eps)
        return np.maximum(values, self.relative * values.mean())

    def move(self, g, t):
        if self.decay == "l2":
            g = g + self.weight_decay * self.w
        b1, b2 = self.betas
        scale = {"decoupled": self.lr, "independent": 1.0, "palm": self.lr**2}.get(self.decay, 0.0)
        self.w -= scale * self.weight_decay * self.w
        g = self.ql.T @ g @ self.qr
        self.first = b1 * self.first + (1 - b1) * g
        self.second = b2 * self.second + (1 - b2) * g**2
        u = self.first / (1 - b1**t) / (np.sqrt(self.second / (1 - b2**t)) + self.eps)
        self.w -= self.lr * self.ql @ np.clip(u, -self.limit, self.limit) @ self.qr.T


def descending(factor, basis=None):
    if basis is None:
        values, vectors = np.linalg.eigh(factor)
        return values[::-1], vectors[:, ::-1]
    there = basis.T @ factor @ basis
    np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), atol=1e-12)
    np.testing.assert_allclose(there, np.diag(np.diag(there)), atol=1e-12 * np.abs(factor).max())
    return np.diag(there), basis
