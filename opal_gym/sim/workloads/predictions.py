"""What schedulers see of a request's output length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.workloads.streams import Stream, generator


def predict(output_tokens: NDArray[np.int64], sigma: float, seed: int) -> NDArray[np.int64]:
    """Predicted output lengths: the truth times a log-normal error with median 1.

    Args:
        output_tokens: True lengths in tokens, shape (n,).
        sigma: Standard deviation of the error's logarithm.
        seed: The workload's seed.

    Returns:
        Tokens, shape (n,).
    """
    normal = generator(seed, Stream.PREDICTIONS).standard_normal(len(output_tokens))
    return np.maximum(1, np.rint(output_tokens * np.exp(sigma * normal))).astype(np.int64)
