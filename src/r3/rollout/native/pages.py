"""Pages of the key-value cache: who holds which, and how many are left. Counting only; the tensors are elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

IDLE = 0
"""The page that lanes without a row write to; nobody ever holds it."""


class OutOfPages(Exception):
    """More pages are wanted than are free."""


class PagePool:
    """Pages 1 … count - 1 of `size` tokens each; a page shared by several holders is free when the last gives it back.

    >>> pool = PagePool(count=4, size=16)
    >>> held = pool.take(2)
    >>> pool.share(held)
    >>> pool.give_back(held), pool.free
    (None, 1)
    >>> pool.give_back(held), pool.free
    (None, 3)
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._free = list(range(count - 1, IDLE, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.size)

    def take(self, n: int) -> list[int]:
        """`n` pages of one's own; nothing is taken if there are not as many."""
        if n > len(self._free):
            raise OutOfPages(f"{n} pages wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(n)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages that another holds too."""
        for page in pages:
            assert self._holders[page] > 0
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._holders[page] > 0
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
