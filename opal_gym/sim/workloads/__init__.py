"""Workloads: who asks for what, and when."""

from opal_gym.sim.workloads.factory import make_workload
from opal_gym.sim.workloads.slo import SLOS
from opal_gym.sim.workloads.trace_files import TraceError
from opal_gym.sim.workloads.workload import Workload

__all__ = ["SLOS", "TraceError", "Workload", "make_workload"]
