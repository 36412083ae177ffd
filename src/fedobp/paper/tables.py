"""Tables as Markdown and LaTeX: the best value bold, the second underlined, a published number below or behind it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_LATEX = str.maketrans(
    {
        "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "±": r"$\pm$", "²": r"$^2$", "|": r"\textbar{}",
        "<": "$<$", ">": "$>$", "✓": r"\checkmark", "✗": r"$\times$", "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}", "{": r"\{", "}": r"\}", "\\": r"\textbackslash{}",
    }
)  # fmt: skip


class Cell(NamedTuple):
    """A cell: a number as text, its rank (1: best, 2: second, 0: neither), and what stands beside it."""

    text: str
    rank: int = 0
    beside: str = ""


@dataclass
class Table:
    """A table with a title, and notes below it."""

    title: str
    header: Sequence[str]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: Sequence[str] = ()

    def add(self, *cells: str | Cell) -> None:
        """Add a row."""
        self.rows.append([cell if isinstance(cell, Cell) else Cell(cell) for cell in cells])

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [markdown_row(self.header), "|---" * len(self.header) + "|"]
        lines += [markdown_row([_markdown(cell) for cell in row]) for row in self.rows]
        return "\n\n".join([f"## {self.title}", "\n".join(lines), *self.notes]) + "\n"

    def latex(self) -> str:
        """Return the table as LaTeX: a `tabular` that needs booktabs, amssymb and graphicx."""
        rows = [" & ".join(_latex_cell(cell) for cell in row) + r" \\" for row in self.rows]
        head = " & ".join(map(latex, self.header)) + r" \\"
        return "\n".join(
            [
                r"\begin{table}[t]\centering\footnotesize",
                rf"\caption{{{latex(self.title)}.{''.join(' ' + latex(note) for note in self.notes)}}}",
                r"\resizebox{\linewidth}{!}{%",
                rf"\begin{{tabular}}{{l{'c' * (len(self.header) - 1)}}}",
                rf"\toprule {head}",
                r"\midrule",
                *rows,
                r"\bottomrule",
                r"\end{tabular}}",
                r"\end{table}",
                "",
            ]
        )


def markdown_row(cells: Sequence[str]) -> str:
    """Return cells as a line of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _markdown(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.rank == 1 else f"<u>{cell.text}</u>" if cell.rank == 2 else cell.text
    return f"{text} ({cell.beside})" if cell.beside else text


def latex(text: str) -> str:
    """Return text with LaTeX's special characters escaped."""
    return text.translate(_LATEX)


def _latex_cell(cell: Cell) -> str:
    text = latex(cell.text)
    text = rf"\textbf{{{text}}}" if cell.rank == 1 else rf"\underline{{{text}}}" if cell.rank == 2 else text
    return rf"\shortstack{{{text}\\{{\tiny {latex(cell.beside)}}}}}" if cell.beside else text
