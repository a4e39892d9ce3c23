"""Finds the first stop string in text that arrives in pieces, and holds back the least it can."""

import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

_ROOT: Final = 0
# Automata over more characters than this are built for one sequence and not kept.
_MAX_CACHED_CHARACTERS: Final = 1_000


class StopAutomaton:
    """The automaton of Aho and Corasick (CACM 18(6), 1975) over characters, for some stop strings.

    A node stands for a prefix of a stop string. After reading a text, the node is the longest
    suffix of the text that is such a prefix. Immutable, so that sequences share it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert stops and all(stops), "an empty stop string matches everywhere"
        # Per node: the children; the node of the longest proper suffix; the length of the prefix;
        # the longest stop string that is a suffix of the prefix, or "".
        self.children: list[dict[str, int]] = [{}]
        self.suffix: list[int] = [_ROOT]
        self.depth: list[int] = [0]
        self.match: list[str] = [""]
        for stop in stops:
            self._insert(stop)
        self._link_suffixes()
        # Where a match can start, so that text far from any stop string is passed over quickly.
        starts = "".join(re.escape(character) for character in self.children[_ROOT])
        self.find_start = re.compile(f"[{starts}]").search

    def _insert(self, stop: str) -> None:
        node = _ROOT
        for character in stop:
            child = self.children[node].get(character)
            if child is None:
                child = len(self.children)
                self.children[node][character] = child
                self.children.append({})
                self.suffix.append(_ROOT)
                self.depth.append(self.depth[node] + 1)
                self.match.append("")
            node = child
        self.match[node] = stop

    def _link_suffixes(self) -> None:
        # Breadth first: the suffix of a node is shorter than the node, so it is done already.
        queue = deque(self.children[_ROOT].values())
        while queue:
            node = queue.popleft()
            for character, child in self.children[node].items():
                self.suffix[child] = self.follow(self.suffix[node], character)
                # The node's own string is the longest that can end here.
                self.match[child] = self.match[child] or self.match[self.suffix[child]]
                queue.append(child)

    def follow(self, node: int, character: str) -> int:
        """The node after reading `character` at `node`."""
        children = self.children
        while (child := children[node].get(character)) is None and node != _ROOT:
            node = self.suffix[node]
        return _ROOT if child is None else child


class StopStrings:
    """The search through the text of one sequence.

    The match that ends earliest wins; of those, the one that starts earliest. Text is released as
    soon as it cannot be part of a match: what is held is exactly the longest suffix of the text
    that is a proper prefix of a stop string.
    """

    __slots__ = ("_automaton", "_held", "_node")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._node = _ROOT
        self._held = ""

    @property
    def num_held(self) -> int:
        """Characters taken and not released."""
        return len(self._held)

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str]:
        """Takes more text; returns the text it releases and the stop string that matched, or "".

        Text from the match on is neither released nor held. Nothing may be pushed after a match.
        may_end: whether a match that ends in this text counts; one that only begins in it does
        always.
        """
        automaton = self._automaton
        node = self._node
        index = 0
        while index < len(text):
            if node == _ROOT:
                start = automaton.find_start(text, index)
                if start is None:
                    break
                index = start.start()
            node = automaton.follow(node, text[index])
            index += 1
            if may_end and (stop := automaton.match[node]):
                released = (self._held + text[:index])[: -len(stop)]
                self._held = ""
                return released, stop
        while not automaton.children[node]:
            # A match that did not count: only what is shorter can still grow into one.
            node = automaton.suffix[node]
        self._node = node
        whole = self._held + text if self._held else text
        num_held = automaton.depth[node]
        if not num_held:
            self._held = ""
            return whole, ""
        self._held = whole[-num_held:]
        return whole[:-num_held], ""

    def flush(self) -> str:
        """Ends the text without a match and returns what was held."""
        held, self._held, self._node = self._held, "", _ROOT
        return held


class StopAutomata:
    """Automata of recent requests: many requests share their stop strings. Bounded."""

    def __init__(self, max_entries: int = 64) -> None:
        self._cached = lru_cache(max_entries)(StopAutomaton)

    def automaton(self, stops: tuple[str, ...]) -> StopAutomaton:
        if sum(map(len, stops)) > _MAX_CACHED_CHARACTERS:
            return StopAutomaton(stops)
        return self._cached(stops)
