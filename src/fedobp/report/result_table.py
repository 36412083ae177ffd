"""A table of results that fits the terminal, and shows the same cells in a notebook."""

from html import escape

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text


class ResultTable:
    """A table that fits the terminal: columns that do not fit are left out, the last ones first, and named below it.

    If not even two columns fit, each row becomes a list. So a name and its first number are never cut. `notes` are
    lines below the table, and `below` are further tables. A notebook shows the same cells.
    """

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self._rows: list[tuple[str, ...]] = []
        self.notes: list[str] = []
        self.below: list[ResultTable] = []

    def add_row(self, *cells: str) -> None:
        """Add a cell for each column."""
        self._rows.append(cells)

    def _with_columns(self, count: int) -> Table:
        table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for position, column in enumerate(self._columns[:count]):
            table.add_column(column, justify="right" if position else "left", no_wrap=True)
        for row in self._rows:
            table.add_row(*map(Text, row[:count]))
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._rows:
            yield from self._fitted(console, options)
        yield from map(Text, self.notes)
        yield from self.below

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(column)}</th>" for column in self._columns)
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._rows)
        body = "".join(f"<tr>{cells}</tr>" for cells in rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if self._rows else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<div>{table}{notes}{''.join(one._repr_html_() for one in self.below)}</div>"

    def _fitted(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=10_000)
        for count in range(len(self._columns), 1, -1):
            table = self._with_columns(count)
            if console.measure(table, options=unlimited).maximum <= options.max_width:
                yield table
                if missing := self._columns[count:]:
                    yield Text(f"Too narrow to show: {', '.join(missing)}.")
                return
        for name, *cells in self._rows:
            yield Text(name, style="bold")
            yield from (Text(f"{head}: {cell}") for head, cell in zip(self._columns[1:], cells, strict=True))
