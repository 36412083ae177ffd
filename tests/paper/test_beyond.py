"""Tables of the study beyond the paper, from hand-made rows."""

import pytest

from fedobp.csv_rows import write_rows
from fedobp.paper.beyond import OURS, by_cell, cell_of, cell_table, curves, label, read_study, tables


def row(method="fedavg", pooled=50.0, seed=42, model="served", parts="", **more):
    return {
        "run": f"{method}-{parts}-seed{seed}", "method": method, "mode": None, "dataset": "digits", "alpha": 0.1,
        "partition": "dirichlet", "partition_options": "", "seed": seed, "protocol": "default", "model": model,
        "rounds": 60, "pooled": pooled, "client_mean": pooled - 1, "worst_decile": pooled - 20, "personal_mean": 10.0,
        "bytes_down": 60e6, "bytes_up": 120e6, "visit_passes": 5.0, "use_passes": 0.0, "options": "", "parts": parts,
        "network": "mlp", "clients": 20, "participation": 0.2, **more,
    }  # fmt: skip


def test_labels_name_the_parts():
    assert label(row()) == "fedavg"
    assert label(row(model="last")) == "fedavg-last"
    assert label(row(model="finetuned")) == "fedavg-ft"
    assert label(row("fedper", model="last")) is None
    assert label(row(OURS, model="finetuned")) == "fedobp-auto-ft"
    assert label({**row(), "training": "lr=0.1;weight_decay=0.01"}) == "fedavg, lr=0.1, weight_decay=0.01"
    assert label({**row(model="last"), "training": "lr=0.1"}) is None
    assert label(row(parts="prior=serve")) == "fedavg-prior (served)"
    assert label(row("scaffold", parts="prior=train")) == "scaffold-prior"
    assert label(row(parts="prior=serve", model="last")) is None  # it trains as FedAvg does: that row is there already
    assert label(row(parts="calibrate=bias;average=0.05")) == "fedavg, bias fitted, averaged"
    assert label(row("decoupled", options="rule=rms;c=20.0")) == "decoupled, rms rule"


def test_settings_that_all_methods_of_a_cell_share_are_not_in_names():
    rows = [row(name, training="lr=0.05") for name in (OURS, "fedper")]
    rows += [row(training="lr=0.05", model=model) for model in ("served", "last")]
    rows += [row(training="lr=0.05;weight_decay=0.01")]
    [by_name] = by_cell(rows).values()
    assert list(by_name) == [OURS, "fedper", "fedavg", "fedavg-last", "fedavg, weight_decay=0.01"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "Digits, Dirichlet(0.1), 20% of 20 clients a round, 60 rounds, `mlp`"),
        (
            {"partition": "concept", "partition_options": "groups=4;change=permute;labels=iid"},
            "Digits, concept shift (permute), equal label shares, 20% of 20 clients a round, 60 rounds, `mlp`",
        ),
        (
            {"partition": "feature", "partition_options": "change=blur;labels=dirichlet", "participation": 0.02},
            "Digits, feature shift (blur), Dirichlet(0.1), 2% of 20 clients a round, 60 rounds, `mlp`",
        ),
    ],
)
def test_settings_in_words(more, words):
    assert cell_of(row(**more)).words == words


def study():
    """Ours is 2 points above FedAvg on each of three seeds but for noise, and level with FedAvg-Last."""
    rows = []
    for seed, noise in ((42, 0.0), (43, 0.1), (44, -0.1)):
        rows += [row(OURS, 92 + noise, seed, use_passes=1.0), row("fedavg", 90.0, seed)]
        rows += [row("fedavg", 92 + 5 * noise, seed, "last"), row("fedavg", 70.0, seed, "finetuned")]
    return rows


def test_a_table_has_means_costs_and_tests():
    [(cell, by_name)] = by_cell(study()).items()
    table = cell_table(cell, by_name)
    found = {cells[0].text: [one.text for one in cells[1:]] for cells in table.rows}
    assert list(found) == [OURS, "fedavg-last", "fedavg", "fedavg-ft"]
    assert found[OURS] == ["92.00 ± 0.10", "91.00 ± 0.10", "72.00 ± 0.10", "10", "3.00", "5.0, 1.0", "3", ""]
    assert found["fedavg"][-1] == "+2.00 (p < 0.001)"
    assert found["fedavg-last"][3:] == ["all", "3.00", "5.0, 0.0", "3", "+0.00 (p = 1.000)"]
    assert found["fedavg-ft"][5] == "5.0, 5.0"
    assert [cells[1].rank for cells in table.rows] == [1, 1, 2, 0]


def test_passes_before_use_of_other_models():
    """A last model is used as it is; fine-tuning starts from what is served."""
    rows = [row(OURS, 92.0, model=model, use_passes=1.0) for model in ("served", "last", "finetuned")]
    [(cell, by_name)] = by_cell(rows).items()
    passes = {cells[0].text: cells[6].text for cells in cell_table(cell, by_name).rows}
    assert passes == {OURS: "5.0, 1.0", f"{OURS}'s last": "5.0, 0.0", f"{OURS}-ft": "5.0, 6.0"}


def test_a_cell_without_ours_has_no_test():
    [(cell, by_name)] = by_cell([row("fedper")]).items()
    assert cell_table(cell, by_name).rows[0][-1].text == ""


def test_a_study_is_read_from_the_files_of_its_sweeps(tmp_path):
    history = [{**one, "round": number} for one in study() for number in (30, 60) if one["model"] == "served"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_rows(
            tmp_path / name / "results.csv", [{**one, "alpha": 0.1 if name == "one" else 0.5} for one in study()]
        )
        write_rows(tmp_path / name / "history.csv", history)
    results, curve = read_study(tmp_path)
    assert [table.title.split(", ")[1] for table in tables(results)] == ["Dirichlet(0.1)", "Dirichlet(0.5)"]
    axes = [ax for ax in curves(results, curve).axes if ax.axison]
    assert len(axes) == 2
    for ax in axes:  # runs of the other folder have the same names
        assert sorted(line.get_label() for line in ax.lines) == ["fedavg", OURS]
        assert all(list(line.get_xdata()) == [30, 60] for line in ax.lines)
