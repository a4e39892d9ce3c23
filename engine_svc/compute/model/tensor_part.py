"""Which part of a tensor is meant: some rows and columns, or all."""

from typing import Final, NamedTuple


class TensorPart(NamedTuple):
    """Of a vector, its values are the rows."""

    rows: slice = slice(None)
    columns: slice = slice(None)


WHOLE: Final = TensorPart()
