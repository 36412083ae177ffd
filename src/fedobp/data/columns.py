"""The columns of a table with labels: the role of each column, and all of them as arrays.

Every column except those of the label and the client is a feature: numbers, or categories.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.cells import TYPED_MISSING, is_missing, is_number
from fedobp.data.features import (
    ANY_CATEGORIES,
    CATEGORIES,
    DATES,
    UNKNOWN,
    Cells,
    EncodedColumn,
    Feature,
    FeatureColumn,
    flag,
    numbers_or_texts,
    with_points,
)  # fmt: skip
from fedobp.data.free_memory import memory_guard, require_free_memory
from fedobp.data.images import ImageArray
from fedobp.errors import FedobpError, short, unknown

MISSING_POLICIES = ("refuse", "drop", "impute")

Chunk = Mapping[str, Cells]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class TableRules:
    """How a table is read: its roles, its missing cells, and, of a CSV file, its format (None: found out)."""

    label: str
    client: str | None = None
    missing: str = "refuse"
    drop: str | Sequence[Any] = ()  # columns; a text may name several, separated by commas
    categories: str | Sequence[Any] = ()
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        if self.missing not in MISSING_POLICIES:
            raise unknown("value of --missing", self.missing, MISSING_POLICIES)
        for key, listed in (("drop", self.drop), ("categories", self.categories)):
            if not isinstance(listed, Iterable):
                raise FedobpError(f"{key} is {short(listed)}: give the names of columns as a text or a list")


@dataclass(frozen=True)
class TableSummary:
    """What became of a table's rows and columns; `features` is empty if the inputs are images."""

    rows: int  # in the table
    dropped_rows: int  # because of missing cells
    dropped_columns: tuple[str, ...]
    features: tuple[Feature, ...]

    def __str__(self) -> str:
        lines = []
        if self.features:
            kinds = Counter(feature.kind for feature in self.features)
            categories = ", ".join(f"{one.column}: {one.categories}" for one in self.features if one.categories)
            parts = [f"{kinds['number']} of numbers"] * bool(kinds["number"])
            parts += [f"{kinds['category']} of categories ({short(categories, 200)})"] * bool(categories)
            inputs = sum(len(feature.names) for feature in self.features)
            lines.append(f"Inputs: {inputs:,} features from {len(self.features):,} columns, {' and '.join(parts)}.")
        filled = [feature for feature in self.features if feature.missing]
        if filled:
            names = short(", ".join(f"{feature.column}: {feature.missing:,}" for feature in filled), 200)
            lines.append(f"Missing values, imputed and marked by a feature NAME_missing: {names}.")
        if self.dropped_rows:
            lines.append(f"Left out: {self.dropped_rows:,} of {self.rows:,} rows, which have missing values.")
        if self.dropped_columns:
            lines.append(f"Left out: {short(', '.join(self.dropped_columns), 200)}.")
        return "\n".join(lines)


class Columns:
    """The roles of a table's columns: label, client, features; `missing_texts` count as missing."""

    def __init__(
        self,
        where: str | Path,
        names: Sequence[str],
        rules: TableRules,
        *,
        missing_texts: frozenset[str] = TYPED_MISSING,
        decimal: str = ".",
    ) -> None:
        self.where, self.rules = short(where, 200), rules
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            raise FedobpError(f"{self.where} has two columns called '{short(twice[0])}': rename one")
        label, client = rules.label, rules.client
        for option, name in (("--label", label), ("--client", client)):
            if name is not None and name not in names:
                raise unknown(f"column for {option} in {self.where}", name, names)
        if label == client:
            raise FedobpError(f"--label and --client are both '{short(label)}': name two columns")
        self.named = [label] if client is None else [label, client]
        self.dropped = self._chosen("--drop", rules.drop, names, taken=self.named)
        self._categories = self._chosen("--categories", rules.categories, names, taken=[*self.named, *self.dropped])
        self.features = [name for name in names if name not in (*self.named, *self.dropped)]
        if not self.features:
            besides = " and ".join(map(short, [*self.named, *self.dropped]))
            raise FedobpError(f"{self.where} has no columns besides {besides}: there are no inputs")
        self._missing_texts, self._decimal = missing_texts, decimal

    def _chosen(
        self, option: str, given: str | Sequence[Any], names: Sequence[str], *, taken: Sequence[str]
    ) -> list[str]:
        """Return the columns that a flag names: a text is a column, or several separated by commas."""
        texts = [given] if isinstance(given, str) else list(map(str, given))
        found = [name for text in texts for name in ([text] if text in names else text.split(","))]
        found = list(dict.fromkeys(name if name in names else name.strip() for name in found))
        for name in found:
            if name not in names:
                raise unknown(f"column for {option} in {self.where}", name, names)
            if name in taken:
                raise FedobpError(
                    f"{option} names '{short(name)}', which --label, --client or --drop names too: give each column "
                    "one role"
                )
        return found

    def to_arrays(
        self,
        chunks: Iterable[Chunk],
        *,
        categorical: Iterable[str] = (),
        temporal: Iterable[str] = (),
        images: ImageArray | None = None,
        n_train: int | None = None,
    ) -> tuple[Arrays, TableSummary]:
        """Return a dataset's arrays from chunks of rows, and what became of the columns.

        `categorical` and `temporal` columns have a type that says so. With `images`, the only feature is a column of
        images. The first `n_train` rows are the training split.
        """
        kinds = dict.fromkeys(categorical, CATEGORIES) | dict.fromkeys(temporal, DATES)
        kinds |= dict.fromkeys(self._categories, ANY_CATEGORIES)
        features = [
            FeatureColumn(self.where, name, self._missing_texts, kinds.get(name, UNKNOWN), self._decimal)
            for name in ([] if images else self.features)
        ]
        cells: dict[str, list[Any]] = {name: [] for name in self.named}
        pieces: list[NDArray[np.bool_]] = []
        for chunk in chunks:
            row = len(cells[self.rules.label]) + 1
            for name, listed in cells.items():
                listed.extend(chunk[name])
            found = self._add_images(images, chunk, row) if images else self._add_features(features, chunk, row)
            pieces.append(found)
            size = 4 * len(cells[self.rules.label]) * len(features)  # of the inputs that are made in the end
            require_free_memory(f"{self.where}, of which {row:,} rows are read,", size)
        if not cells[self.rules.label]:
            raise FedobpError(f"{self.where} has no rows: there is nothing to import")
        named = {name: self._texts(name, listed) for name, listed in cells.items()}
        complete = ~np.concatenate(pieces)  # rows whose inputs have no missing cell
        kept = np.ones_like(complete)
        if self.rules.missing == "drop":
            kept = np.logical_and.reduce([complete, *(texts != "" for texts in named.values())])
            if not kept.any():
                raise self._nothing_kept(features, named)
        encoded = [column.encode(kept) for column in features]
        self._check_feature_names(encoded)
        arrays: Arrays = {"x": images.of_rows(complete, kept) if images else self._inputs(encoded)}
        for key, name in zip(("y", "client"), self.named, strict=False):
            arrays[key] = numbers_or_texts(named[name][kept])
        if n_train is not None:
            arrays["n_train"] = np.array(kept[:n_train].sum())
        inputs = tuple(column.feature for column in encoded)
        return arrays, TableSummary(len(kept), int((~kept).sum()), tuple(self.dropped), inputs)

    def _nothing_kept(self, features: Sequence[FeatureColumn], named: Mapping[str, NDArray[Any]]) -> FedobpError:
        """Return the user error for a table whose rows all have a missing cell."""
        for (option, name), texts in zip((("--label", "label"), ("--client", "client")), named.values(), strict=False):
            if not (texts != "").any():
                column = short(self.rules.label if name == "label" else self.rules.client)
                return FedobpError(
                    f"{self.where} has no {name} in column '{column}', from row 1 to the last: name another column "
                    f"with {option}"
                )
        for feature in features:
            if feature.missing.all():
                return feature.no_value()
        imputable = features and all((texts != "").all() for texts in named.values())
        return FedobpError(
            f"{self.where} has a missing value in every row, from row 1 to the last: fill some in, or leave out "
            f"columns with --drop{', or choose --missing impute' if imputable else ''}"
        )

    def _check_feature_names(self, encoded: Sequence[EncodedColumn]) -> None:
        owners: dict[str, str] = {}
        for feature in (column.feature for column in encoded):
            for name in feature.names:
                if name in owners:
                    raise FedobpError(
                        f"{self.where} makes two features called '{short(name)}', from columns "
                        f"'{short(owners[name])}' and '{short(feature.column)}': rename one of these columns"
                    )
                owners[name] = feature.column

    def _add_features(self, features: Sequence[FeatureColumn], chunk: Chunk, row: int) -> NDArray[np.bool_]:
        """Add a chunk's cells to the features; return the rows with a missing cell."""
        found = np.zeros(len(chunk[self.rules.label]), np.bool_)
        for column in features:
            cells = chunk[column.name]
            missing = column.add(cells, row)
            found |= missing
            if self.rules.missing == "refuse" and missing.any():
                at = int(np.argmax(missing))
                raise FedobpError(
                    f"{self.where} has a missing value{_quoted(cells[at])} in row {row + at} of column "
                    f"'{short(column.name)}': fill it in, choose --missing drop or --missing impute, or leave the "
                    f"column out with {flag('--drop', column.name)}"
                )
        return found

    def _add_images(self, images: ImageArray, chunk: Chunk, row: int) -> NDArray[np.bool_]:
        """Add a chunk's images; return the rows without one."""
        cells = chunk[self.features[0]]
        missing = np.zeros(len(cells), np.bool_)
        for at, cell in enumerate(cells):
            where = f"the image in row {row + at} of column '{short(self.features[0])}' of {self.where}"
            found = None if cell is None else cell.get("path") if cell["bytes"] is None else cell["bytes"]
            if found is None:
                missing[at] = True
                if self.rules.missing != "drop":
                    raise FedobpError(f"{where} is missing: remove the row, or choose --missing drop")
                continue
            if not isinstance(found, str | bytes):
                raise FedobpError(f"{where} is neither bytes nor the path of a file: save the images anew")
            images.add(where, Path(found) if isinstance(found, str) else found)
        return missing

    def _inputs(self, encoded: Sequence[EncodedColumn]) -> NDArray[np.float32]:
        widths = [len(column.feature.names) for column in encoded]
        shape = len(encoded[0].values), sum(widths)
        with memory_guard(f"{self.where}, as {shape[1]:,} features of {shape[0]:,} rows,", 4 * shape[0] * shape[1]):
            x = np.empty(shape, np.float32)
            for column, width, end in zip(encoded, widths, np.cumsum(widths).tolist(), strict=True):
                column.write_to(x[:, end - width : end])
        return x

    def _texts(self, column: str, cells: Sequence[Any]) -> NDArray[np.str_]:
        """Return labels or clients as texts; a missing one is an empty text with --missing drop, else a user error."""
        what = "label" if column == self.rules.label else "client"
        gone = [is_missing(cell, self._missing_texts) for cell in cells]
        if any(gone) and self.rules.missing != "drop":
            at = gone.index(True)
            raise FedobpError(
                f"{self.where} has no {what} in row {at + 1} of column '{short(column)}'{_quoted(cells[at])}: fill it "
                "in, or remove the row, as --missing drop does"
            )
        if self._decimal == ",":
            pointed = with_points(cells)
            if all(missing or is_number(cell) for cell, missing in zip(pointed, gone, strict=True)):
                cells = pointed
        listed = ["" if missing else str(cell).strip() for cell, missing in zip(cells, gone, strict=True)]
        with memory_guard(
            f"the {what}s of {self.where}", 4 * len(listed) * max(map(len, listed))
        ):  # NumPy stores all texts at the width of the longest
            texts = np.array(listed)
        found, first = np.unique(texts, return_index=True)
        occurring = [(at, text) for text, at in zip(found.tolist(), first.tolist(), strict=True) if text]
        if what == "label" and all(is_number(text) for _, text in occurring):
            at, text = min(((at, text) for at, text in occurring if not float(text).is_integer()), default=(0, ""))
            if text:
                raise FedobpError(
                    f"{self.where} has numbers with fractions in the label column '{short(column)}', such as "
                    f"{short(text)}: labels must be whole numbers or names of classes, unlike in row {at + 1}"
                )
        return texts


def _quoted(cell: Any) -> str:
    return f" ('{short(cell)}')" if isinstance(cell, str) and cell.strip() else ""
