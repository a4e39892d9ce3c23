"""Tables of results: columns as wide as they need be, bad rows marked."""


class Table:
    """`columns` are names between blanks, explained by `note`. `is_good`: whether all rows are."""

    def __init__(self, columns: str, note: str = "") -> None:
        self._rows: list[tuple[str, ...]] = [tuple(columns.split())]
        self._marks = [""]
        self._note = note

    @property
    def is_good(self) -> bool:
        return not any(self._marks)

    def add(self, *cells: object, is_good: bool = True) -> None:
        assert len(cells) == len(self._rows[0]), (cells, self._rows[0])
        self._rows.append(tuple(str(cell) for cell in cells))
        self._marks.append("" if is_good else " FAILED")

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + mark
            for row, mark in zip(self._rows, self._marks, strict=True)
        ]
        return "\n".join(line.rstrip() for line in [*lines, self._note]).rstrip()
