"""Write hospitals.csv: real measurements, spread over made-up hospitals.

    python examples/hospitals.py
    fedobp data import hospitals hospitals.csv --label outcome --client hospital --missing impute
    fedobp compare --dataset hospitals --partition natural

The measurements and outcomes are those of the 569 patients in scikit-learn's breast cancer data (Diagnostic Wisconsin,
UCI). The hospitals, the microscopes and the gaps are made up: hospitals differ in size, in the share of malignant
outcomes and in their microscope, and a cell in twenty is empty. The table has semicolons and decimal commas, as
spreadsheets write them in much of Europe.
"""

import csv
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

HOSPITALS = tuple(f"hospital {letter}" for letter in "ABCDEFGH")
MICROSCOPES = ("A100", "A100", "B7", "B7", "B7", "A100", "C", "C")
MEASUREMENTS = 10  # the means; the data also has standard errors and largest values


def write_hospitals(path: Path) -> None:
    """Write the table."""
    data, random = load_breast_cancer(), np.random.default_rng(0)
    names = [name.removeprefix("mean ").replace(" ", "_") for name in data.feature_names[:MEASUREMENTS]]
    # Of each outcome, the hospitals have shares drawn from a Dirichlet distribution.
    shares = random.dirichlet(np.full(len(HOSPITALS), 2.0), size=2)
    hospitals = [random.choice(len(HOSPITALS), p=shares[outcome]) for outcome in data.target]
    empty = random.random((len(data.data), MEASUREMENTS + 1)) < 0.05
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, delimiter=";")
        table.writerow(["hospital", "microscope", *names, "outcome"])
        for row, hospital, outcome, gaps in zip(data.data, hospitals, data.target, empty, strict=True):
            cells = [MICROSCOPES[hospital], *(f"{value:.5g}".replace(".", ",") for value in row[:MEASUREMENTS])]
            cells = ["" if gap else cell for cell, gap in zip(cells, gaps, strict=True)]
            table.writerow([HOSPITALS[hospital], *cells, data.target_names[outcome]])


if __name__ == "__main__":
    write_hospitals(Path("hospitals.csv"))
