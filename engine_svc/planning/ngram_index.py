"""An index of a sequence's n-grams: where its latest tokens stood before, and what came after."""

from collections.abc import Sequence


class NgramIndex:
    """Where pairs and fours of tokens of one sequence last ended. It grows with the sequence.

    A token costs time once, when the index is first asked after the sequence has gained it. Keys
    are numbers, which the garbage collector need not look at. Those of fours are hashes: one that
    is found may be another's, which makes for a wrong draft and nothing worse.
    """

    __slots__ = ("_ends_of_fours", "_ends_of_pairs", "_next_end")

    def __init__(self) -> None:
        self._ends_of_pairs: dict[int, int] = {}
        self._ends_of_fours: dict[int, int] = {}
        # Those that end before it are known.
        self._next_end = 2

    def find(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Where the last tokens stood before: the position after them, and how many agree.

        (0, 0) when they are new. Four tokens count for more than two, later ones for more than
        earlier ones. `token_ids` is always the same sequence, possibly longer than at the last
        call.
        """
        self._catch_up(token_ids)
        if len(token_ids) < 4:
            return (0, 0)
        before_two, before_one, one, last = token_ids[-4:]
        pair = one << 32 | last
        end = self._ends_of_fours.get(hash((before_two << 32 | before_one, pair)))
        if end is not None:
            return (end, 4)
        end = self._ends_of_pairs.get(pair)
        return (0, 0) if end is None else (end, 2)

    def _catch_up(self, token_ids: Sequence[int]) -> None:
        """Takes in all n-grams that a token follows; the last ones of all would find themselves."""
        of_pairs, of_fours = self._ends_of_pairs, self._ends_of_fours
        for end in range(self._next_end, len(token_ids)):
            pair = token_ids[end - 2] << 32 | token_ids[end - 1]
            of_pairs[pair] = end
            if end >= 4:
                of_fours[hash((token_ids[end - 4] << 32 | token_ids[end - 3], pair))] = end
        self._next_end = max(self._next_end, len(token_ids))
