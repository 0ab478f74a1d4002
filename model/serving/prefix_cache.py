"""PrefixCache: finished prefixes by their tokens, for hybrid models.

A tree whose edges are whole pages of tokens. An entry binds a token prefix, its depth, the pages
that hold its MLA rows, and a snapshot of the recurrent state at exactly that depth. A hit is the
deepest entry on the prompt's path: pages without a snapshot (or the reverse) are not usable, since
a state at another depth gives wrong output without any error.

An entry whose depth is no multiple of the page ends in a tail, a partly filled page: the page's
owner may go on appending rows behind it, and a reader copies it before it writes.
"""

from __future__ import annotations

import array
import hashlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.slots import Handle, StateError
from moe_comm.model.serving.state_pool import StatePool

Tokens = tuple[int, ...]


def token_hash(tokens: Sequence[int]) -> str:
    """sha256 of the token ids as little-endian int64."""
    ids = array.array("q", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(ids.tobytes()).hexdigest()


@dataclass(slots=True, eq=False)
class Entry:
    """A usable prefix: `depth` tokens hashing to `tokens_hash`, whose state is `snapshot`."""

    depth: int
    tokens_hash: str
    snapshot: Handle
    fingerprint: str
    last_used: int
    pins: int = 0


@dataclass(slots=True, eq=False)
class _Node:
    """`tokens` are the node's own (a full page, or fewer in a tail); `page` holds their rows."""

    parent: _Node | None
    tokens: Tokens
    page: int
    entry: Entry | None = None
    children: dict[Tokens, _Node] = field(default_factory=dict)
    tails: dict[Tokens, _Node] = field(default_factory=dict)

    @property
    def bare(self) -> bool:
        return self.entry is None and not self.children and not self.tails


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A usable prefix, pinned until `PrefixCache.unpin(hit)`.

    `pages` hold rows [0, depth); where `depth` is no multiple of the page the last one must be
    copied before a row is added. `matched` is how far the pages alone match: beyond `depth` the
    state is missing, so a snapshot at the last grid position up to `matched` would serve the next
    such prompt (a branch point).
    """

    depth: int
    matched: int
    pages: tuple[int, ...]
    snapshot: Handle | None
    entry: Entry | None


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    entries: int
    pages: int
    lookups: int
    hits: int
    tokens_asked: int
    tokens_hit: int
    evicted_entries: int


class PrefixCache:
    """Holds one reference on each page of the tree and on each entry's snapshot."""

    def __init__(self, pool: StatePool, cache: PagedCache) -> None:
        self.pool, self.cache = pool, cache
        self.page_size = cache.page_size
        self.fingerprint = pool.layout.fingerprint()
        if cache.layout.fingerprint() != self.fingerprint:
            raise StateError("cache: the pool and the paged cache were made for different layouts")
        self._root = _Node(parent=None, tokens=(), page=0)
        self._clock = itertools.count(1)
        self._lookups = self._hits = self._asked = self._hit_tokens = self._evicted = 0

    # -- lookup ----------------------------------------------------------------------------------
    def match(self, tokens: Sequence[int]) -> Hit:
        """The deepest entry at most `len(tokens) - 1` deep, pinned; depth 0 where there is none.

        The cap comes before the choice: at least one token is left to compute, and the state that
        is handed out is the one of the depth that is handed out.
        """
        limit = len(tokens) - 1
        best: tuple[int, _Node] | None = None
        matched = 0
        for depth, node in self._path(tokens, limit):
            matched = depth
            if node.entry is not None:
                best = (depth, node)
        if best is None:
            return Hit(depth=0, matched=matched, pages=(), snapshot=None, entry=None)
        depth, node = best
        entry = node.entry
        assert entry is not None
        self._check(entry, depth, tokens)
        entry.pins += 1
        entry.last_used = next(self._clock)
        pages = tuple(_pages(node))
        self.cache.retain(pages)
        self.pool.retain(entry.snapshot)
        return Hit(depth=depth, matched=matched, pages=pages, snapshot=entry.snapshot, entry=entry)

    def count(self, hit: Hit, num_tokens: int) -> None:
        """Note for the statistics that a request of `num_tokens` starts from `hit`. A lookup for a
        request that could not start is not counted: it will come again."""
        self._lookups += 1
        self._asked += num_tokens
        self._hits += hit.depth > 0
        self._hit_tokens += hit.depth

    def unpin(self, hit: Hit) -> None:
        """End a hit: its copies are enqueued, or the request gave up. Call exactly once."""
        if hit.entry is None or hit.snapshot is None:
            return
        if hit.entry.pins < 1:
            raise StateError(f"unpin: the entry of {hit.depth} tokens is not pinned")
        hit.entry.pins -= 1
        self.pool.release(hit.snapshot)
        self.cache.release(hit.pages)

    def has_entry(self, tokens: Sequence[int]) -> bool:
        """Whether exactly these tokens have an entry, so that no snapshot need be taken."""
        return any(
            depth == len(tokens) and node.entry is not None
            for depth, node in self._path(tokens, len(tokens))
        )

    # -- insert ----------------------------------------------------------------------------------
    def insert(self, tokens: Sequence[int], pages: Sequence[int], snapshot: Handle) -> bool:
        """Add an entry of depth `len(tokens)`; False where it exists already.

        The tree takes its own references; the caller keeps and releases its own, in both cases.
        Raises StateError where the snapshot's position is not the depth, or the pages do not
        cover exactly the tokens.
        """
        tokens, depth, size = tuple(tokens), len(tokens), self.page_size
        position = self.pool.position(snapshot)
        if position != depth or depth == 0:
            raise StateError(f"insert: {depth} tokens, but a snapshot of {position}")
        if len(pages) != -(-depth // size):
            raise StateError(f"insert: {depth} tokens take {-(-depth // size)} pages, got {pages}")
        self.pool.references(snapshot)  # raises unless it is a live snapshot
        node = self._root
        for i, page in enumerate(pages):
            part = tokens[i * size : (i + 1) * size]
            branch = node.children if len(part) == size else node.tails
            child = branch.get(part)
            if child is None:
                self.cache.retain((page,))
                child = branch[part] = _Node(parent=node, tokens=part, page=page)
            node = child
        if node.entry is not None:
            node.entry.last_used = next(self._clock)
            return False
        self.pool.retain(snapshot)
        node.entry = Entry(
            depth=depth,
            tokens_hash=token_hash(tokens),
            snapshot=snapshot,
            fingerprint=self.fingerprint,
            last_used=next(self._clock),
        )
        return True

    # -- eviction --------------------------------------------------------------------------------
    def evict(self, *, slots: int = 0, pages: int = 0) -> bool:
        """Drop the least recently used entries until the pool has `slots` free slots and the cache
        `pages` free pages. False where what is left is pinned or in use: the caller waits.

        A snapshot and the pages that only it made useful go together.
        """
        while self.pool.num_free < slots or self.cache.num_free < pages:
            for_slots = self.pool.num_free < slots
            victim = min(
                (node for node in self._nodes() if self._evictable(node, leaf=not for_slots)),
                key=lambda node: node.entry.last_used if node.entry else 0,
                default=None,
            )
            if victim is None:
                return False
            self._drop(victim)
        return True

    def clear(self) -> bool:
        """Drop every entry that is not pinned; whether the tree is empty now."""
        for node in list(self._nodes()):
            if node.entry is not None and node.entry.pins == 0:
                self._drop(node)
        return self._root.bare

    # -- accounts --------------------------------------------------------------------------------
    def stats(self) -> CacheStats:
        nodes = list(self._nodes())
        return CacheStats(
            entries=sum(node.entry is not None for node in nodes),
            pages=len(nodes),
            lookups=self._lookups,
            hits=self._hits,
            tokens_asked=self._asked,
            tokens_hit=self._hit_tokens,
            evicted_entries=self._evicted,
        )

    def audit(self) -> tuple[list[int], list[Handle]]:
        """The pages and snapshots that the tree holds, a reference each. Raises StateError where
        an entry's snapshot is dead or at another depth, or a node serves no entry."""
        pages, snapshots = [], []
        for node in self._nodes():
            pages.append(node.page)
            if self.cache.references(node.page) < 1:
                raise StateError(f"audit: page {node.page} is in the tree and free")
            if node.bare:
                raise StateError(f"audit: page {node.page} is kept for no entry")
            if node.entry is not None:
                if self.pool.position(node.entry.snapshot) != _depth(node):
                    raise StateError(f"audit: snapshot at another depth than {_depth(node)}")
                if node.entry.depth != _depth(node):
                    raise StateError(f"audit: entry of depth {node.entry.depth} at {_depth(node)}")
                snapshots.append(node.entry.snapshot)
        return pages, snapshots

    # -- inside ----------------------------------------------------------------------------------
    def _path(self, tokens: Sequence[int], limit: int) -> Iterator[tuple[int, _Node]]:
        """Nodes along `tokens`, depths ascending, none deeper than `limit`."""
        node, depth, size = self._root, 0, self.page_size
        while True:
            rest = tuple(tokens[depth : min(depth + size, limit)])
            for length in sorted({len(tail) for tail in node.tails}):
                tail = node.tails.get(rest[:length]) if length <= len(rest) else None
                if tail is not None:
                    yield depth + length, tail
            child = node.children.get(rest) if len(rest) == size else None
            if child is None:
                return
            node, depth = child, depth + size
            yield depth, node

    def _check(self, entry: Entry, depth: int, tokens: Sequence[int]) -> None:
        if (
            entry.depth != depth
            or self.pool.position(entry.snapshot) != depth
            or entry.fingerprint != self.fingerprint
            or entry.tokens_hash != token_hash(tokens[:depth])
        ):
            raise StateError(
                f"match: an entry found at {depth} tokens is bound to {entry.depth} tokens and a "
                f"snapshot of {self.pool.position(entry.snapshot)}"
            )

    def _nodes(self) -> Iterator[_Node]:
        stack = [self._root]
        while stack:
            node = stack.pop()
            if node is not self._root:
                yield node
            stack.extend(node.children.values())
            stack.extend(node.tails.values())

    def _evictable(self, node: _Node, *, leaf: bool) -> bool:
        if node.entry is None or node.entry.pins:
            return False
        # Dropping an inner entry frees its slot, but its pages serve deeper entries.
        return not leaf or not (node.children or node.tails)

    def _drop(self, node: _Node) -> None:
        assert node.entry is not None
        self.pool.release(node.entry.snapshot)
        node.entry = None
        self._evicted += 1
        while node.parent is not None and node.bare:
            self.cache.release((node.page,))
            parent = node.parent
            branch = parent.children if len(node.tokens) == self.page_size else parent.tails
            del branch[node.tokens]
            node = parent


def _pages(node: _Node) -> list[int]:
    pages: list[int] = []
    while node.parent is not None:
        pages.append(node.page)
        node = node.parent
    return pages[::-1]


def _depth(node: _Node) -> int:
    depth = 0
    while node.parent is not None:
        depth += len(node.tokens)
        node = node.parent
    return depth
