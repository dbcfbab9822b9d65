"""The `running` list of `vllm_v1`."""

from __future__ import annotations

from collections.abc import Iterator

from opal_gym.sim.batch import BatchMetadata
from opal_gym.sim.request import VLLMSchedulerRequest
from opal_gym.sim.steps import StepLog
from opal_gym.sim.vllm_v1.request import V1Request


class RunningBatch(BatchMetadata):
    """Running requests in admission order.

    `decode_requests` are those in lockstep, which make a token in every step; `prefill_requests`
    are the others.

    Attributes:
        running: All of them by id, in admission order.
    """

    def __init__(self, block_size: int, steps: StepLog) -> None:
        super().__init__(block_size, steps)
        self.running: dict[int, V1Request] = {}

    def __iter__(self) -> Iterator[V1Request]:
        return iter(self.running.values())

    def add_prefill(self, request: VLLMSchedulerRequest) -> None:
        """Adds an admitted request at the end."""
        assert isinstance(request, V1Request)
        super().add_prefill(request)
        self.running[request.request_id] = request

    def remove(self, request: VLLMSchedulerRequest) -> None:
        """Takes a request out of the batch, its progress and blocks kept."""
        super().remove(request)
        del self.running[request.request_id]

    def completed(self) -> list[VLLMSchedulerRequest]:
        """Requests that have made all their tokens, in admission order."""
        # One that went and came back without a step in between has two entries for one finish.
        completed = {request.request_id: request for request in super().completed()}
        return sorted(completed.values(), key=lambda request: request.admission)

    def _block_class(self, offset: int) -> int:
        """The newest token is not in KV, so a block is full one step later."""
        return super()._block_class(offset - 1)
