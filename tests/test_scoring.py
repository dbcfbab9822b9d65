"""The scoring policy: the grid's rules are points of it, and its weights worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from agents.evaluation import run_in_process
from agents.grid import Heuristic
from agents.learning.scoring import PARAMETERS, ScoringWeights
from opal_gym.config import load_config
from opal_gym.sim.simulation import Simulation
from tests.driving import play
from tests.tiny import tiny_config, tiny_workload

MS = 0.001


@pytest.mark.parametrize(
    ("heuristic", "weights"),
    [
        (
            Heuristic("sjf", "0.95", "latest", "slack-15ms"),
            {
                "admit.predicted_output_tokens": 1.0,
                "gate": 0.95,
                "preempt.admission_rank": -1.0,
                "chunk": np.log(15 * MS),
            },
        ),
        (
            Heuristic("mem-sjf", "1.1", "longest", "slack-29ms"),
            {
                "admit.predicted_kv_area": 1.0,
                "gate": 1.1,
                "preempt.predicted_remaining": -1.0,
                "chunk": np.log(29 * MS),
            },
        ),
        (
            Heuristic("spf", "none", "latest", "full"),
            {
                "admit.prompt_tokens": 1.0,
                "gate": 100.0,
                "preempt.admission_rank": -1.0,
                "chunk": 100.0,
            },
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("seed", [1, 2])
def test_members_of_the_grid_are_points_of_it(
    heuristic: Heuristic, weights: dict[str, float], seed: int
) -> None:
    """Equal in every metric of an episode under load that preempts."""
    config = load_config(
        "mem-chat-burst", {"workload.num_requests": 150, "workload.arrivals.load": 1.3}
    )
    _, expected = run_in_process(config, heuristic.policy(), seed)
    _, metrics = run_in_process(config, ScoringWeights.named(weights).policy(), seed)
    assert metrics == expected


def test_waiting_outweighs_length() -> None:
    """Cost: log(1 + output) - log(1 + waiting).

    One slot, 1 s a step. The first runs from 0 to 8. Then B (output 7) has waited 7 s: 8 / 8 = 1;
    C (output 3) 1 s: 4 / 2 = 2; B is first, against shortest-first.
    """
    weights = {"admit.predicted_output_tokens": 1.0, "admit.waiting_time": -1.0, "gate": 9.0}
    config = tiny_config(max_num_seqs=1)
    workload = tiny_workload([(0.0, 4, 8), (1.0, 4, 7), (7.0, 4, 3)])
    policy = ScoringWeights.named({**weights, "chunk": 9.0}).policy()
    records = play(Simulation(config, workload, policy))
    assert {i: r["decode_done_time"] for i, r in records.items()} == {0: 8.0, 1: 15.0, 2: 18.0}


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match=r"got 'admit\.luck'; allowed: admit\.predicted_output"):
        ScoringWeights.named({"admit.luck": 1.0})
    assert ScoringWeights.named({"gate": 0.5})["gate"] == 0.5


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros(len(PARAMETERS), np.float32)])
def test_weights_of_another_form_are_refused(values: np.ndarray) -> None:
    with pytest.raises(ValueError, match="allowed: float64 of shape"):
        ScoringWeights(values)
