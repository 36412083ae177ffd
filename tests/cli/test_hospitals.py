"""From a table of hospitals to a table of results, in two commands."""

import csv
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

from fedobp.data import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "hospitals.py"


@pytest.fixture
def hospitals(command):
    """The command line, in a folder with hospitals.csv."""
    spec = spec_from_file_location("hospitals", EXAMPLE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_hospitals(Path("hospitals.csv"))
    return command


IMPORT = ("data", "import", "hospitals", "hospitals.csv", "--label", "outcome", "--client", "hospital")


def test_two_commands_lead_from_the_file_to_the_table(hospitals):
    said = hospitals(*IMPORT, "--missing", "impute")
    assert said.code == 0
    assert "Inputs: 24 features from 11 columns, 10 of numbers and 1 of categories (microscope: 3)." in said.out
    assert "Missing values, imputed and marked by a feature NAME_missing: microscope: " in said.out
    assert said.out.endswith("Next: fedobp run --dataset hospitals --partition natural\n")
    said = hospitals("compare", "--dataset", "hospitals", "--partition", "natural", "--rounds", 20, "--json")
    assert said.code == 0
    assert [row["method"] for row in said.json["table"]] == ["fedobp", "fedavg", "fedavg-last", "local", "fedper"]
    assert said.json["table"][1]["pooled"]["mean"] > 80


def test_the_inputs_are_the_measurements(hospitals):
    row = hospitals(*IMPORT, "--missing", "impute", "--json").json
    dataset = load("hospitals", Path("data"))
    assert (row["samples"], row["shape"], row["classes"], row["clients"]) == (569, [24], 2, 8)
    columns = [name for feature in row["table"]["features"] for name in feature["names"]]
    assert columns[:6] == ["microscope=A100", "microscope=B7", "microscope=C", "microscope_missing", "radius",
                           "radius_missing"]  # fmt: skip
    real = load_breast_cancer().data[:, 0]
    radius, missing = dataset.x[:, columns.index("radius")], dataset.x[:, columns.index("radius_missing")] == 1
    np.testing.assert_allclose(radius[~missing], real[~missing], rtol=1e-4)
    [feature] = [feature for feature in row["table"]["features"] if feature["column"] == "radius"]
    assert (feature["kind"], feature["missing"]) == ("number", missing.sum())
    assert feature["median"] == pytest.approx(np.median(real[~missing]), rel=1e-4)
    assert (radius[missing] == np.float32(feature["median"])).all()
    assert (dataset.x[:, :4].sum(axis=1) == 1).all()


def test_without_a_policy_the_first_gap_is_named(hospitals):
    said = hospitals(*IMPORT)
    with Path("hospitals.csv").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter=";"))
    first = next(at for at, row in enumerate(rows, 1) if row["microscope"] == "")
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        f"error: hospitals.csv has a missing value in row {first} of column 'microscope': fill it in, choose --missing "
        "drop or --missing impute, or leave the column out with --drop microscope\n"
    )
    assert not Path("data").exists()


def test_every_flag_reaches_the_import(command):
    Path("t.csv").write_bytes("id;zip;größe;label\n1;7;1,500;a\n2;8;;a\n3;9;2,500;b\n".encode("latin-1"))
    said = command("data", "import", "t", "t.csv", "--encoding", "latin-1", "--separator", ";", "--decimal", ",",
                   "--drop", "id", "--categories", "zip", "--missing", "drop", "--json")  # fmt: skip
    assert said.json["table"] == {
        "rows": 3, "dropped_rows": 1, "dropped_columns": ["id"],
        "features": [
            {"column": "zip", "kind": "category", "names": ["zip=7", "zip=9"], "missing": 0, "median": None},
            {"column": "größe", "kind": "number", "names": ["größe"], "missing": 0, "median": None},
        ],
    }  # fmt: skip
    assert load("t", Path("data")).x.tolist() == [[1, 0, 1.5], [0, 1, 2.5]]
