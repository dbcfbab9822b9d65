"""The shortest stay on the worker that each request can have, and the memory it holds then.

A request that is preempted restarts, so whatever came before, its completion ends one contiguous
stay in the batch that computes its whole prompt (but for what a cache has) and its whole output.
A step takes at least as long as it would with this request alone, under every GPU model: more
chunks, decodes or context never shorten a step. Source: ``reference/policies.md``, "Lower bound on
the mean latency".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_gym.config import Config
from opal_gym.sim.blocks import blocks_of
from opal_gym.sim.gpu_model import GPUModel
from opal_gym.sim.workloads import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

DECODE_PIECES = 8
"""Pieces of constant memory into which a decode is cut."""
PREFILL_PARTS = (0.25, 0.5, 0.75, 1.0)
"""Parts of the prefill at whose beginning a piece of constant memory begins."""
FAR = 2**20
"""A context, in tokens, from which slopes are read: exact in floating point."""


class PrefillTimes:
    """The least time in which one request alone is prefilled, over all ways to cut its prompt.

    Full chunks are not the fastest way under every GPU model (where a step's time is convex in its
    tokens, even chunks are), so the least over all compositions is found by dynamic programming.
    It uses that a chunk's time is linear in the tokens before it (`GPUModel._latency`).

    Args:
        gpu: The step times.
        max_chunk: Most tokens of a step.
        longest: Most tokens of a prompt.
    """

    def __init__(self, gpu: GPUModel, max_chunk: int, longest: int) -> None:
        chunks = range(1, min(max_chunk, longest) + 1)
        self.alone = np.array([gpu.batch_latency(((0, c),), 0, 0) for c in chunks])
        far = np.array([gpu.batch_latency(((FAR, c),), 0, 0) for c in chunks])
        self.per_token_before = (far - self.alone) / FAR
        # Of a chunk of c tokens that is s0 + s1 * c, and s1 for each pair with a token before.
        slopes = self.per_token_before
        self.pair_s = float(slopes[1] - slopes[0] if len(slopes) > 1 else slopes[0])
        self._least = self._shortest_cuts(longest)

    def _shortest_cuts(self, longest: int) -> FloatArray:
        """Least time of the first n tokens of a prompt, for n = 0 … longest."""
        least, before = np.zeros(longest + 1), np.arange(longest + 1.0)
        for n in range(1, longest + 1):
            chunks = min(n, len(self.alone))
            rest = slice(n - chunks, n)
            times = (
                least[rest][::-1]
                + self.alone[:chunks]
                + before[rest][::-1] * self.per_token_before[:chunks]
            )
            least[n] = times.min()
        return least

    def __call__(self, prompt: IntArray, new: IntArray) -> FloatArray:
        """Least seconds for the last `new` tokens of prompts, the others being in KV."""
        return self._least[new] + self.pair_s * new * (prompt - new)


@dataclass(frozen=True)
class DecodeSteps:
    """All decode steps of all requests, at full speed; one row each.

    Attributes:
        row: Row of the request.
        context: Tokens of context.
        seconds: Duration alone in the batch, s.
        before_end: From the step's middle to the request's completion, s.
        memory: KV blocks held, as a fraction of a pool.
    """

    row: IntArray
    context: IntArray
    seconds: FloatArray
    before_end: FloatArray
    memory: FloatArray


@dataclass(frozen=True)
class Residencies:
    """The shortest final stays of n requests in the batch.

    The memory is a step function of the time before completion: piece k reaches back to
    `ends[:, k]`, and `memory[:, k]` is held in it at least, however slowly the stay goes. A slower
    stay is further at any time before its end, so it holds more.

    Attributes:
        arrival: Arrival times, s, shape (n,).
        prompt: Prompt tokens, shape (n,).
        output: Output tokens, shape (n,).
        computed: Those of them that no cache can save, shape (n,).
        prefill_s: Least seconds of prefill, shape (n,).
        decode_s: Least seconds of decode, shape (n,).
        ends: Seconds before completion, not decreasing, the last one the stay's length, shape
            (n, pieces).
        memory: Least KV memory, as a fraction of a pool, not increasing, shape (n, pieces).
        steps: The decode steps.
        prefill: The prefill times.
    """

    arrival: FloatArray
    prompt: IntArray
    output: IntArray
    computed: IntArray
    prefill_s: FloatArray
    decode_s: FloatArray
    ends: FloatArray
    memory: FloatArray
    steps: DecodeSteps
    prefill: PrefillTimes

    @property
    def seconds(self) -> FloatArray:
        """Lengths of the stays, s, shape (n,)."""
        return self.prefill_s + self.decode_s

    @classmethod
    def of(cls, config: Config, workload: Workload, gpu: GPUModel) -> Residencies:
        """The stays of a workload's requests on a worker that restarts what it preempts.

        Args:
            config: The worker, and what its caches hash.
            workload: Requests that the worker accepts.
            gpu: The step times.
        """
        params = config.worker.vllm_params
        prompt, stop = workload.prompt_tokens, workload.prompt_tokens + workload.output_tokens
        first = prompt + params.first_token_at_prefill_end
        shared = shared_tokens(config, workload)
        computed = prompt - cacheable_tokens(config, workload, shared)
        prefill = PrefillTimes(gpu, params.max_num_batched_tokens, int(computed.max()))
        decode = DecodeTimes(gpu)
        # Blocks that prompts share on the GPU belong to nobody alone.
        common = blocks_of(shared, params.block_size) * params.enable_prefix_caching

        def memory(tokens: IntArray, common: IntArray) -> FloatArray:
            own = np.maximum(0, blocks_of(tokens, params.block_size) - common)
            fraction: FloatArray = own / config.total_gpu_blocks
            return fraction

        ends, memories = [], []
        for piece in range(1, DECODE_PIECES + 1):
            start = stop - (stop - first) * piece // DECODE_PIECES
            ends.append(decode(start, stop))
            # The step at a context holds that many tokens and the one that it makes.
            memories.append(memory(start + 1, common))
        decode_s = ends[-1]
        # What is not held yet takes at most the time left: fewer than `left` tokens, if less time
        # is left than these take.
        for left in (np.ones_like(prompt), *(_ceil(part * computed) for part in PREFILL_PARTS)):
            ends.append(decode_s + prefill(prompt, left))
            # The last step holds the token that it makes, too.
            memories.append(memory(np.where(left == 1, first, prompt - left + 1), common))
        row = np.repeat(np.arange(len(prompt)), stop - first)
        begin = np.cumsum(stop - first) - (stop - first)
        context = np.arange(len(row)) - begin[row] + first[row]
        seconds = decode(context, context + 1)
        return cls(
            arrival=workload.arrival_time,
            prompt=prompt,
            output=workload.output_tokens,
            computed=computed,
            prefill_s=prefill(prompt, computed),
            decode_s=decode_s,
            ends=np.stack(ends, axis=1),
            memory=np.stack(memories, axis=1),
            steps=DecodeSteps(
                row=row,
                context=context,
                seconds=seconds,
                before_end=decode(context, stop[row]) - seconds / 2,
                memory=memory(context + 1, common[row]),
            ),
            prefill=prefill,
        )


class DecodeTimes:
    """Seconds of a request's decode steps alone; linear in the context under every GPU model.

    Args:
        gpu: The step times.
    """

    def __init__(self, gpu: GPUModel) -> None:
        self.base_s = gpu.batch_latency((), 1, 0)
        self.context_s = (gpu.batch_latency((), 1, FAR) - self.base_s) / FAR

    def __call__(self, start: IntArray, stop: IntArray) -> FloatArray:
        """Seconds of the steps at the contexts start, start + 1, …, stop - 1."""
        mean = self.base_s + self.context_s * (start + stop - 1) / 2
        seconds: FloatArray = (stop - start) * mean
        return seconds


def shared_tokens(config: Config, workload: Workload) -> IntArray:
    """Tokens at each prompt's beginning that another prompt of the workload may begin with, too."""
    if not workload.hash_ids:
        return np.zeros_like(workload.prompt_tokens)
    uses = Counter(chain.from_iterable(set(hashes) for hashes in workload.hash_ids))
    blocks = [
        max((i + 1 for i, block in enumerate(hashes) if uses[block] > 1), default=0)
        for hashes in workload.hash_ids
    ]
    tokens = np.array(blocks, np.int64) * config.kvc.hash_block_tokens
    shared: IntArray = np.minimum(workload.prompt_tokens, tokens)
    return shared


def cacheable_tokens(config: Config, workload: Workload, shared: IntArray) -> IntArray:
    """Most tokens of each prompt that its last stay may find cached; the last is always computed.

    A tier gets prompts when they complete, so it can have only what others share. With prefix
    caching on the GPU an earlier stay of the same request may have left all that has hashes.
    """
    if config.worker.vllm_params.enable_prefix_caching and workload.hash_ids:
        hashes = np.array([len(hash_ids) for hash_ids in workload.hash_ids])
        cached = hashes * config.kvc.hash_block_tokens
    elif config.kvc.tiers:
        cached = shared
    else:
        cached = np.zeros_like(shared)
    most: IntArray = np.minimum(cached, workload.prompt_tokens - 1)
    return most


def _ceil(values: NDArray[np.floating[Any]]) -> IntArray:
    whole: IntArray = np.ceil(values).astype(np.int64)
    return whole
