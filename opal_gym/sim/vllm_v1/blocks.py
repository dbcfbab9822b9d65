"""The block pool of `vllm_v1`: which content is reused, and which is lost first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opal_gym.sim.blocks import BlockPool
from opal_gym.sim.clock import SimEnvironment

Content = int | tuple[int, int]
"""What a full block holds: the chained hash of a prompt's block, or (request id, block of it)."""


class VLLMBlockPool(BlockPool):
    """Blocks with content have numbers, since several may hold the same (vLLM's `BlockPool`).

    vLLM does not merge blocks that become equal: each keeps its place in the free queue. Free
    blocks without content are reused first; those with content follow, least recently freed first.
    """

    def __init__(self, env: SimEnvironment, total: int) -> None:
        super().__init__(env, total)
        self._numbers: dict[Content, dict[int, None]] = {}
        self._content: dict[int, Content] = {}
        self._count = 0

    @property
    def empty(self) -> int:
        """Free blocks without content."""
        return self.free - len(self._idle)

    def allocate(self, blocks: int) -> None:
        """Takes `blocks` free blocks, those without content first; the others lose theirs."""
        self._settle()
        self.free -= blocks
        while len(self._idle) > self.free:
            number, _ = self._idle.popitem(last=False)
            content = self._content.pop(number)
            numbers = self._numbers[content]
            del numbers[number]
            if not numbers:
                del self._numbers[content]

    def cache(self, content: Content) -> int:
        """Gives a held block the content that others may share; returns its number."""
        self._count += 1
        number = self._count
        self._content[number] = content
        self._numbers.setdefault(content, {})[number] = None
        self._holders[number] = 1
        return number

    def find(self, contents: Iterable[Content]) -> list[int]:
        """Numbers of the blocks that hold the longest cached beginning of `contents`."""
        found = []
        for content in contents:
            numbers = self._numbers.get(content)
            if numbers is None:
                break
            found.append(next(iter(numbers)))
        return found

    def idle(self, numbers: Sequence[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(number in self._idle for number in numbers)
