"""Arrival rates that change over time: on/off phases and sine waves, multiplied.

An arrival process is drawn in operational time, in which its rate is constant, and carried to
simulated time by the exact inverse of ∫ modulation dt. Nothing is thinned: requests keep their
operational times when the load changes, and the modulation is the same function of simulated time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.workloads.streams import Stream, generator

if TYPE_CHECKING:
    from opal_gym.config import OnOffModulation, SineModulation

Array = NDArray[np.float64]


def simulated_time(
    operational: Array, modulation: Sequence[OnOffModulation | SineModulation], seed: int
) -> Array:
    """Times at which the integral of the modulation reaches the given values.

    Args:
        operational: Integrals from time 0 in seconds, not decreasing, shape (n,).
        modulation: Factors of the rate.
        seed: The workload's seed; factor i draws from part i of its modulation stream.

    Returns:
        Simulated seconds, not decreasing, shape (n,).
    """
    waves = Waves(
        [
            (factor, _phase(factor, seed, index))
            for index, factor in enumerate(modulation)
            if factor.kind == "sine"
        ]
    )
    phases = [(factor, index) for index, factor in enumerate(modulation) if factor.kind == "on_off"]
    area = _through_phases(operational, phases, waves, seed) if phases else operational
    times: Array = np.maximum.accumulate(waves.inverse_integral(area))
    return times


def _phase(sine: SineModulation, seed: int, index: int) -> float:
    if sine.phase is not None:
        return sine.phase
    return generator(seed, Stream.MODULATION, index).uniform(0.0, 2 * math.pi)


def _through_phases(
    operational: Array, phases: Sequence[tuple[OnOffModulation, int]], waves: Waves, seed: int
) -> Array:
    """Integrals of the waves alone where those of waves × on/off phases are `operational`.

    Measured by the waves' integral, the on/off factor is still piecewise constant, so that the
    integral of the product is piecewise linear in it.
    """
    cycles = 16
    while True:
        paths = [
            on_off_path(factor, cycles, generator(seed, Stream.MODULATION, index))
            for factor, index in phases
        ]
        ends, factor = _product(paths)
        area = np.concatenate([[0.0], waves.integral(ends)])
        total = np.concatenate([[0.0], np.cumsum(factor * np.diff(area))])
        if total[-1] >= operational[-1]:
            reached: Array = np.interp(operational, total, area)
            return reached
        cycles *= 2


def on_off_path(
    config: OnOffModulation, cycles: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """The first phases of an on/off modulation: their ends in seconds and their factors.

    The first state is drawn from its share of the time, and exponential dwells do not age, so
    that the path is stationary. With more cycles it goes on, and begins the same.

    Returns:
        Ends, increasing, and factors, shapes (2 · cycles,).
    """
    begins_on = rng.random() < config.mean_on_s / (config.mean_on_s + config.mean_off_s)
    on = np.arange(2 * cycles) % 2 == (0 if begins_on else 1)
    dwells = rng.standard_exponential(2 * cycles)
    ends = np.cumsum(dwells * np.where(on, config.mean_on_s, config.mean_off_s))
    return ends, np.where(on, config.on_factor, config.off_factor)


def _product(paths: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The product of piecewise constant paths, as far as all of them reach."""
    reach = min(ends[-1] for ends, _ in paths)
    ends = np.unique(np.concatenate([ends[ends <= reach] for ends, _ in paths]))
    product = np.ones_like(ends)
    for own_ends, factor in paths:
        product *= factor[np.searchsorted(own_ends, ends)]
    return ends, product


class Waves:
    """A product of sine modulations 1 + a · sin(ω t + φ), written as a constant and cosines.

    Two cosines multiply to two of half the amplitude: k sines give (3^k − 1) / 2 of them.
    """

    def __init__(self, sines: Sequence[tuple[SineModulation, float]]) -> None:
        self._min = self._max = self._mean = 1.0
        self._cosines: list[tuple[float, float, float]] = []
        for sine, phase in sines:
            a, omega, phi = sine.amplitude, 2 * math.pi / sine.period_s, phase - math.pi / 2
            self._min *= 1 - a
            self._max *= 1 + a
            new = [(self._mean * a, omega, phi)]
            for amplitude, own, own_phi in self._cosines:
                new.append((amplitude * a / 2, own + omega, own_phi + phi))
                new.append((amplitude * a / 2, own - omega, own_phi - phi))
            self._cosines += [cosine for cosine in new if cosine[1] != 0]
            self._mean += sum(a * math.cos(phi) for a, omega, phi in new if omega == 0)

    def value(self, time: Array) -> Array:
        """The product at `time` in seconds, shape (n,)."""
        value = np.full_like(time, self._mean)
        for amplitude, omega, phi in self._cosines:
            value += amplitude * np.cos(omega * time + phi)
        return value

    def integral(self, time: Array) -> Array:
        """Its integral from 0 to `time` in seconds, shape (n,)."""
        integral = self._mean * time
        for amplitude, omega, phi in self._cosines:
            half = omega / 2 * time
            integral += 2 * amplitude / omega * np.sin(half) * np.cos(half + phi)
        return integral

    def inverse_integral(self, area: Array) -> Array:
        """Times in seconds at which the integral reaches `area`, shape (n,).

        Newton's method, with a bisection wherever it would leave the bracket.
        """
        low, high = self._bracket(area)
        time = (low + high) / 2
        excess = self.integral(time) - area
        while np.any(np.abs(excess) > 1e-12 * (1 + time)):
            low = np.where(excess <= 0, time, low)
            high = np.where(excess >= 0, time, high)
            newton = time - excess / self._slope(time)
            inside = (low <= newton) & (newton <= high)
            time = np.where(inside, newton, (low + high) / 2)
            excess = self.integral(time) - area
        return time - excess / self._slope(time)

    def _slope(self, time: Array) -> Array:
        """The product at `time`, kept positive where rounding is as large as its minimum."""
        return np.maximum(self.value(time), self._min)

    def _bracket(self, area: Array) -> tuple[Array, Array]:
        """Bounds of the inverse: by the extremes of the product, and by its mean and swing."""
        swing = sum(2 * amplitude / abs(omega) for amplitude, omega, _ in self._cosines)
        low = np.maximum(area / self._max, (area - swing) / self._mean)
        high = np.minimum(area / self._min, (area + swing) / self._mean)
        return low, high
