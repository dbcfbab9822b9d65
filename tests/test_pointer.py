"""The pointer network: logits by hand, equal in NumPy and PyTorch, and what its file may hold."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from agents import load_policy, make_policy
from agents.learning.inputs import CONTEXT, Inputs
from agents.learning.pointer import PointerNetwork
from agents.learning.policy_file import PartialPolicy, TrainedPolicy
from agents.learning.scoring import PARAMETERS, ScoringWeights
from opal_gym.sim.candidates import FEATURES, INDEX
from opal_gym.sim.decision import STOP, Decision, DecisionKind
from opal_gym.sim.policies import FifoLeastWorkPolicy
from opal_gym.sim.simulation import Simulation
from tests.driving import play
from tests.tiny import tiny_config, tiny_workload


def network(hidden: tuple[int, int] = (5, 4), seed: int = 0) -> PointerNetwork:
    rng = np.random.default_rng(seed)
    first, second = hidden
    shapes = {
        "features": (len(FEATURES), first),
        "context": (CONTEXT, first),
        "bias": (first,),
        "stop": (first,),
        "own": (first, second),
        "pooled": (first, second),
        "hidden_bias": (second,),
        "logit": (second,),
    }
    return PointerNetwork(
        **{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    )


def inputs(candidates: int, seed: int = 1) -> Inputs:
    rng = np.random.default_rng(seed)
    rows = rng.random((candidates, len(FEATURES)), np.float32)
    rows[:, INDEX["present"]] = 1
    return Inputs(rng.random(CONTEXT, np.float32), rows)


def shortest_output() -> PointerNetwork:
    """One unit: the shorter a candidate's predicted output, the greater its logit; STOP last.

    h₁ = tanh(predicted output as observed), STOP's is tanh(1); h₂ = tanh(h₁); logit = -h₂.
    """
    features = np.zeros((len(FEATURES), 1), np.float32)
    features[INDEX["predicted_output_tokens"]] = 1
    one, zero = np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)
    return PointerNetwork(
        features=features,
        context=np.zeros((CONTEXT, 1), np.float32),
        bias=zero[0],
        stop=one[0],
        own=one,
        pooled=zero,
        hidden_bias=zero[0],
        logit=-one[0],
    )


def test_logits_by_hand() -> None:
    given = inputs(2)
    given.rows[:, INDEX["predicted_output_tokens"]] = [0.5, 0.25]
    expected = [-np.tanh(np.tanh(x)) for x in (0.5, 0.25, 1.0)]
    assert shortest_output().logits(given, stop_allowed=True) == pytest.approx(expected, rel=1e-6)
    without = shortest_output().logits(given, stop_allowed=False)
    assert without == pytest.approx(expected[:2], rel=1e-6)


def test_the_maximum_over_all_choices_moves_every_logit() -> None:
    """One unit, h₂ = tanh(h₁ + max h₁): with STOP's 1 the maximum is tanh(1), without tanh(0.5)."""
    base = shortest_output()
    pooled = PointerNetwork.of({**base.arrays(), "pooled": base.own})
    given = inputs(1)
    given.rows[:, INDEX["predicted_output_tokens"]] = 0.5
    own, stop = np.tanh(0.5), np.tanh(1.0)
    assert pooled.logits(given, stop_allowed=False) == pytest.approx([-np.tanh(own + own)])
    assert pooled.logits(given, stop_allowed=True) == pytest.approx(
        [-np.tanh(own + stop), -np.tanh(stop + stop)]
    )


def test_logits_follow_the_candidates() -> None:
    given, order = inputs(7), np.random.default_rng(2).permutation(7)
    logits = network().logits(given, stop_allowed=True)
    moved = network().logits(Inputs(given.context, given.rows[order]), stop_allowed=True)
    assert moved[:7] == pytest.approx(logits[order], rel=1e-5)
    assert moved[7] == pytest.approx(logits[7], rel=1e-5)


def test_it_schedules_a_simulation() -> None:
    """The shortest of three first, one at a time: outputs 6, 2, 4 end at 6, 8, 12 s.

    The first is alone when it arrives at 0; the others wait from 1 s on.
    """
    config = tiny_config(max_num_seqs=1)
    workload = tiny_workload([(0.0, 4, 6), (1.0, 4, 4), (1.0, 4, 2)])
    records = play(Simulation(config, workload, shortest_output().policy()))
    ends = {request: record["decode_done_time"] for request, record in records.items()}
    assert ends == {0: 6.0, 2: 8.0, 1: 12.0}


class TestFiles:
    def test_what_was_saved_is_loaded(self, tmp_path: Path) -> None:
        saved = TrainedPolicy(network(), ("ADMIT", "CHUNK"), {"name": "x", "note": "ü"})
        path = saved.save(tmp_path / "x")
        loaded = TrainedPolicy.load(path)
        assert path.name == "x.npz"
        assert (loaded.decisions, loaded.card) == (("ADMIT", "CHUNK"), {"name": "x", "note": "ü"})
        for name, array in network().arrays().items():
            assert np.array_equal(array, loaded.weights.arrays()[name])
        assert isinstance(loaded.policy(), PartialPolicy)
        assert isinstance(make_policy(f"pretrained:{path}"), PartialPolicy)

    def test_scoring_weights_too(self, tmp_path: Path) -> None:
        weights = ScoringWeights.named({"gate": 0.9})
        path = TrainedPolicy(weights, ("ADMIT", "CHUNK", "PREEMPT"), {}).save(tmp_path / "y")
        loaded = TrainedPolicy.load(path).weights
        assert isinstance(loaded, ScoringWeights)
        assert loaded.by_name() == {**dict.fromkeys(PARAMETERS, 0.0), "gate": 0.9}

    @pytest.mark.parametrize("content", ["", "text", "half", "pickle", "object", "shape", "form"])
    def test_others_are_refused(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "bad.npz"
        whole = TrainedPolicy(network(), ("ADMIT",), {}).save(tmp_path / "good").read_bytes()
        about = np.array(json.dumps({"form": "pointer", "decisions": [], "card": {}}))
        if content == "shape":
            np.savez(path, about=about, **{**network().arrays(), "logit": np.ones(3)})
        elif content == "form":
            np.savez(path, about=np.array('{"form": "x", "decisions": [], "card": {}}'))
        elif content == "object":
            np.savez(path, about=about, logit=np.array([print], object))
        else:
            texts = {"": b"", "text": b"hello", "half": whole[: len(whole) // 2]}
            path.write_bytes(texts.get(content, pickle.dumps(print)))
        with pytest.raises(
            ValueError, match=r"bad\.npz: got .*allowed: a policy that scripts/train"
        ):
            load_policy(path)

    def test_some_decisions_can_be_taken_from_it(self, tmp_path: Path) -> None:
        path = TrainedPolicy(network(), ("ADMIT", "CHUNK", "PREEMPT"), {}).save(tmp_path / "x")
        assert not isinstance(load_policy(path), PartialPolicy)
        assert isinstance(load_policy(f"{path},decisions=ADMIT+CHUNK"), PartialPolicy)
        with pytest.raises(ValueError, match="decisions: got 'GUESS'; allowed: CHUNK, PREEMPT"):
            load_policy(f"{path},decisions=ADMIT+GUESS")

    def test_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"policy 'pretrained:nope': got 'nope'; allowed: an"):
            make_policy("pretrained:nope")

    @pytest.mark.parametrize("name", ["features", "context", "stop", "own", "pooled", "logit"])
    def test_weights_of_another_shape_are_refused(self, name: str) -> None:
        arrays = network().arrays()
        arrays[name] = arrays[name][..., :-1]
        with pytest.raises(ValueError, match="allowed: float32 of shape"):
            PointerNetwork.of(arrays)


def test_what_it_does_not_decide_the_baseline_does() -> None:
    """A policy that always stops, for ADMIT only where it may: CHUNK is the baseline's."""

    class Last(FifoLeastWorkPolicy):
        def choose(self, decision: Decision) -> int:
            return STOP if decision.stop_allowed else decision.num_candidates - 1

    asked: list[tuple[DecisionKind, bool]] = []

    class Watched(PartialPolicy):
        def choose(self, decision: Decision) -> int:
            answer = super().choose(decision)
            asked.append((decision.kind, answer == decision.baseline))
            return answer

    config = tiny_config(max_num_seqs=2, num_gpu_blocks_override=8)
    workload = tiny_workload([(0.0, 12, 9), (0.0, 12, 5), (0.5, 8, 4)])
    Simulation(config, workload, Watched(Last(), ("ADMIT",))).run()
    assert {kind for kind, _ in asked} == {DecisionKind.ADMIT, DecisionKind.CHUNK}
    assert all(is_baseline for kind, is_baseline in asked if kind is DecisionKind.CHUNK)
    assert not all(is_baseline for _, is_baseline in asked)


class TestTorch:
    @pytest.mark.parametrize("stop_allowed", [False, True])
    @pytest.mark.parametrize("candidates", [1, 3, 9])
    def test_equal_logits_with_padding(self, candidates: int, stop_allowed: bool) -> None:
        torch = pytest.importorskip("torch", reason="needs the extra `train`")
        from agents.learning.sb3_policy import PointerModule

        module = PointerModule((5, 4))
        module.load_network(network())
        given = inputs(candidates)
        rows = torch.zeros(1, 12, len(FEATURES))
        rows[0, :candidates] = torch.from_numpy(given.rows)
        legal = torch.zeros(1, 13, dtype=torch.bool)
        legal[0, :candidates], legal[0, 12] = True, stop_allowed
        logits = module(torch.from_numpy(given.context)[None], rows, legal)[0][0, legal[0]]
        expected = network().logits(given, stop_allowed=stop_allowed)
        assert logits.detach().numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5)

    def test_weights_go_there_and_back(self) -> None:
        pytest.importorskip("torch", reason="needs the extra `train`")
        from agents.learning.sb3_policy import PointerModule

        module = PointerModule((5, 4))
        module.load_network(network())
        for name, array in network().arrays().items():
            assert np.array_equal(module.network().arrays()[name], array), name
