"""The price bound on the sum of completion times (``reference/policies.md``, "Lower bound").

Slots and memory are limited at every instant. Charge every request a price for both while its last
stay lasts, and pay out the prices of all there is: for prices π(t), μ(t) ≥ 0,

    Σ C_i ≥ Σ_i min_{C ≥ r_i + e_i} [C + ∫_0^{e_i} (π + μ m_i)(C - v) dv] - ∫ (slots π + pools μ) dt

since the stays of any schedule use at most `slots` and `pools` at every instant (weak duality). The
prices are constant in bins of time, and improved by subgradient steps on a grid. The grid's minimum
may be above the true one; so the bound itself is evaluated exactly: each bracket is piecewise
linear in C, and least where C, or C less a piece's end, is an edge of a bin, or at r_i + e_i.
"""

from __future__ import annotations

import numpy as np

from agents.residency import FloatArray, IntArray, Residencies

BINS = 4096
"""Most bins of the prices."""
BINS_PER_STAY = 32
"""Bins in a mean stay, where there are enough."""
WAITS = 64
"""Times of waiting that the grid offers to each request, from none on, ever further apart."""
ITERATIONS = 300
STEP = 0.6
"""First step, as a part of the price and of one that makes a stay cost as much as it lasts."""
KEPT = 0.9
"""Part of the direction that the next step keeps."""


def price_bound(stays: Residencies, slots: int, pools: int) -> float:
    """The best price bound on Σ C_i that was found, s; at least Σ (r_i + e_i).

    Args:
        stays: The requests.
        slots: Sequences of all workers together.
        pools: Memory of all workers, in pools of one.
    """
    capacity = np.array([[slots], [pools]], np.float64)
    grid = PriceGrid(stays, capacity)
    prices = (grid.no_prices, *improve(grid))
    return max(exact_value(stays, capacity, grid.edges, price) for price in prices)


def improve(grid: PriceGrid) -> tuple[FloatArray, FloatArray]:
    """Subgradient steps with momentum from no prices: the best prices seen, and the last average.

    The subgradient of a bin's price is what the cheapest stays use of it, less what there is.
    """
    prices = direction = grid.no_prices
    best, best_value, average = prices, -np.inf, prices
    for iteration in range(ITERATIONS):
        value, excess = grid.value(prices)
        if value > best_value:
            best, best_value = prices, value
        direction = KEPT * direction + (1 - KEPT) * np.clip(excess, -1.0, 1.0)
        step = STEP * (grid.price_scale + prices) / np.sqrt(1 + iteration / 4)
        prices = np.maximum(0.0, prices + step * direction)
        average = KEPT * average + (1 - KEPT) * prices
    return best, average


class PriceGrid:
    """The price problem where stays end, and their pieces begin, at edges of bins only.

    Args:
        stays: The requests.
        capacity: Slots and pools, shape (2, 1).

    Attributes:
        edges: Edges of the bins, s, shape (bins + 1,), of equal width.
        price_scale: Prices that make a mean stay cost about as much as it lasts, shape (2, 1).
        no_prices: Zeros, shape (2, bins).
    """

    def __init__(self, stays: Residencies, capacity: FloatArray) -> None:
        begin, end = float(stays.arrival.min()), _busy_end(stays, capacity)
        wanted = np.ceil((end - begin) / stays.seconds.mean() * BINS_PER_STAY)
        bins = int(min(BINS, wanted))
        self.edges: FloatArray = np.linspace(begin, end, bins + 1)
        self.no_prices = np.zeros((2, bins))
        self._bin_s = (end - begin) / bins
        self._capacity = capacity
        drops = _drops(stays.memory)
        # The first column is the slot, the others are the memory's pieces.
        self._weights = np.column_stack([np.ones(len(drops)), drops])
        lags = np.rint(np.column_stack([stays.seconds, stays.ends]) / self._bin_s)
        first = np.ceil((stays.arrival + stays.seconds - begin) / self._bin_s)
        waits = np.unique(np.rint(np.geomspace(1, bins + 1, WAITS)) - 1)
        self._ends = np.minimum(first[:, None] + waits, bins).astype(np.int64)
        self._lags = lags.astype(np.int64)
        memory_s = float((drops * stays.ends).sum())
        self.price_scale = np.array([[1.0], [float(stays.seconds.sum()) / max(memory_s, 1e-12)]])

    def value(self, prices: FloatArray) -> tuple[float, FloatArray]:
        """The grid's value, s, and by how much of the capacity each bin's use exceeds it.

        Args:
            prices: Of slots and of pools per second, shape (2, bins).
        """
        paid = np.zeros((2, len(self.edges)))
        np.cumsum(prices * self._bin_s, axis=1, out=paid[:, 1:])
        costs = self.edges[self._ends]
        for column, (weight, lag) in enumerate(zip(self._weights.T, self._lags.T, strict=True)):
            total = paid[min(column, 1)]
            begins = np.maximum(0, self._ends - lag[:, None])
            costs += weight[:, None] * (total[self._ends] - total[begins])
        chosen = costs.argmin(axis=1)[:, None]
        value = np.take_along_axis(costs, chosen, axis=1).sum()
        ends = np.take_along_axis(self._ends, chosen, axis=1)
        income = (self._capacity * paid[:, -1:]).sum()
        return float(value - income), self._use(ends) / self._capacity - 1

    def _use(self, ends: IntArray) -> FloatArray:
        """Slots and pools in use in each bin, if the stays end at these edges, shape (n, 1)."""
        begins = np.maximum(0, ends - self._lags)
        use = []
        for columns in (slice(0, 1), slice(1, None)):
            weights, size = self._weights[:, columns], len(self.edges)
            starts = np.bincount(begins[:, columns].ravel(), weights.ravel(), size)
            stops = np.bincount(ends.ravel(), weights.sum(axis=1), size)
            use.append(np.cumsum(starts - stops)[:-1])
        return np.stack(use)


def exact_value(
    stays: Residencies, capacity: FloatArray, edges: FloatArray, prices: FloatArray
) -> float:
    """The bound of given prices, s, for any prices ≥ 0.

    Args:
        stays: The requests.
        capacity: Slots and pools, shape (2, 1).
        edges: Edges of the prices' bins, s, shape (bins + 1,); outside there is no price.
        prices: Of slots and of pools per second, shape (2, bins).
    """
    paid = np.zeros((2, len(edges)))
    np.cumsum(prices * np.diff(edges), axis=1, out=paid[:, 1:])
    stay_rows = zip(
        stays.arrival.tolist(),
        stays.seconds.tolist(),
        stays.ends,
        _drops(stays.memory),
        strict=True,
    )
    least = sum(_least_cost(edges, paid, *row) for row in stay_rows)
    return float(least - (capacity * paid[:, -1:]).sum())


def _least_cost(
    edges: FloatArray,
    paid: FloatArray,
    arrival: float,
    seconds: float,
    ends: FloatArray,
    drops: FloatArray,
) -> float:
    """Least completion time plus charges of one request, s.

    As no price is negative, no completion later than a cost that was found can be better.
    """
    slots_paid, pools_paid = paid

    def cost(completion: FloatArray) -> FloatArray:
        slot = np.interp(completion, edges, slots_paid)
        slot -= np.interp(completion - seconds, edges, slots_paid)
        pool = np.interp(completion, edges, pools_paid)[:, None]
        pool = pool - np.interp(completion[:, None] - ends, edges, pools_paid)
        total: FloatArray = completion + slot + pool @ drops
        return total

    earliest = arrival + seconds
    least: float = cost(np.array([earliest])).item()
    at_edges = edges[(edges > earliest) & (edges < least)]
    least = min(least, cost(at_edges).min(initial=np.inf))
    near = edges[(edges > earliest - seconds) & (edges < least)]
    corners = (near[:, None] + np.unique(np.append(ends, seconds))).ravel()
    corners = corners[(corners > earliest) & (corners < least)]
    return float(min(least, cost(corners).min(initial=np.inf)))


def _drops(memory: FloatArray) -> FloatArray:
    """By how much the memory held drops at the far end of each piece, shape (n, pieces)."""
    return -np.diff(memory, axis=1, append=0.0)


def _busy_end(stays: Residencies, capacity: FloatArray) -> float:
    """About when the last request completes, s: no bound, but where prices end."""
    memory_s = (_drops(stays.memory) * stays.ends).sum(axis=1)
    work = np.maximum(stays.seconds / capacity[0], memory_s / capacity[1])
    now = 0.0
    for arrival, needed in zip(stays.arrival.tolist(), work.tolist(), strict=True):
        now = max(now, arrival) + needed
    return now + float(stays.seconds.max())
