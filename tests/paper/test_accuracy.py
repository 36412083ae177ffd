"""Tables of accuracies, from hand-made rows."""

from fedobp.paper.accuracy import accuracy_tables, convergence_tables, first_within, names_of, scaling_tables
from fedobp.paper.stats import Spread
from paper.cases import row, setting


def cells(table):
    return {line[0].text: line[1:] for line in table.rows}


def test_rows_of_the_tables_are_the_13_methods_in_both_modes_and_two_more():
    names = names_of(setting())
    assert names[:4] == ["Local-Only", "FedAvg", "FedAvg-Last", "FedAvg-FT"]
    assert names[-1] == "FedOBP"
    assert len([name for name in names if name.endswith(", as published")]) == 10
    assert len(names) == 13 + 10 + 2
    assert len(names_of(setting(mode="faithful"))) == 15


def rows():
    found = []
    for seed, shift in ((42, -0.1), (43, 0.1)):
        found += [
            row("fedobp", seed, 86.8 + shift),
            row("fedavg", seed, 57.0 + 5 * shift),
            row("fedavg", seed, 87.4 - shift, model="last"),
            row("fedper", seed, 84.0, mode="faithful"),
            row("fedper", seed, 99.0, mode="as-published"),
            row("fedper", seed, 99.5, mode="faithful", model="last"),
        ]
    return found


def test_the_grid_has_the_best_the_second_and_the_published_numbers():
    grid, detail = accuracy_tables(setting(datasets=("cifar10", "svhn")), {"results": rows()})[:2]
    assert list(grid.header) == ["method", "CIFAR10 0.1", "SVHN 0.1"]
    found = cells(grid)
    # FedOBP: deviation 0.1414; published 87.02 ± 0.17: |86.8 - 87.02| <= 2 sqrt(0.02 * 1.5 + 0.0289) = 0.485
    assert found["FedOBP"][0] == ("86.80 ± 0.14", 2, "87.02 ✓")
    assert found["FedAvg-Last"][0] == ("87.40 ± 0.14", 1, "")
    # FedAvg: deviation 0.7071, published 58.15 ± 0.26: 1.15 <= 2 sqrt(0.5 * 1.5 + 0.0676) = 1.808
    assert found["FedAvg"][0] == ("57.00 ± 0.71", 0, "58.15 ✓")
    # FedPer: no deviation, so the published one counts: |84 - 84.98| > 2 * 0.43
    assert found["FedPer"][0] == ("84.00 ± 0.00", 0, "84.98 ✗")
    # broken implementations take no rank
    assert found["FedPer, as published"][0] == ("99.00 ± 0.00", 0, "84.98 ✗")
    # what is not measured is empty, beside the published number
    assert found["APFL"][0] == ("", 0, "59.37")
    assert found["FedOBP"][1] == ("", 0, "95.60")
    shown = {line[0].text: [cell.text for cell in line[1:]] for line in detail.rows}
    assert shown["FedAvg"] == [
        "57.00 ± 0.71", "2", "58.15 ± 0.26", "58.04", "-1.15", "yes", "56.00 ± 0.71", "+29.80",
        "p = 0.009, 2 pairs", "better",
    ]  # fmt: skip
    # differences -0.8 and -0.4: t = -3, and for one degree of freedom p = 1 - 2 atan(3) / pi = 0.205
    assert shown["FedAvg-Last"][-3:] == ["-0.60", "p = 0.205, 2 pairs", "no difference shown"]
    assert shown["FedOBP"][-3:] == ["", "", ""]


def test_one_seed_claims_no_test():
    table = accuracy_tables(setting(), {"results": [row("fedobp"), row("local", pooled=70.0)]})[1]
    shown = {line[0].text: [cell.text for cell in line[1:]] for line in table.rows}
    assert shown["Local-Only"][0] == "70.00"
    assert shown["Local-Only"][-3:] == ["+10.00", "", "no test"]


def test_broken_implementations_are_ranked_where_nothing_else_was_run():
    rows = [row("fedobp", pooled=80.0), row("apfl", pooled=70.0, mode="as-published")]
    grid = accuracy_tables(setting(mode="as-published"), {"results": rows})[0]
    assert cells(grid)["APFL, as published"][0].rank == 2


def test_convergence():
    points = {100: 80.0, 200: 85.0, 300: 84.0, 400: 85.5}
    history = [{**row(), "round": at, "pooled": value} for at, value in points.items()]
    table = convergence_tables(setting(mode="faithful"), {"results": [], "history": history})[0]
    assert [cell.text for cell in cells(table)["FedOBP"]] == ["80.00", "85.00", "84.00", "85.50", "400", "87.02 ✗"]
    assert "FedAvg-Last" not in cells(table)


def test_first_round_from_which_the_mean_stays_near_its_end():
    def first(**points):
        return first_within({int(at[1:]): Spread(value, None, 1) for at, value in points.items()})

    assert first(r1=10.0, r2=49.0, r3=48.9, r4=49.2, r5=50.0) == 4
    assert first(r1=49.0, r2=60.0, r3=50.0) == 1
    assert first() is None


def test_scaling():
    rows = [
        row(dataset="organamnist", pooled=98.3, normalize="dataset"),
        row(dataset="organamnist", pooled=67.5, normalize="as-published"),
    ]
    [table] = scaling_tables(setting(datasets=("organamnist", "organcmnist")), {"results": rows})
    shown = [[cell.text for cell in line] for line in table.rows]
    assert shown == [
        ["OrganA", "0.1", "right constants", "FedOBP", "98.30", "67.31", "60.00"],
        ["OrganA", "0.1", "as published", "FedOBP", "67.50", "67.31 ✓", "60.00"],
        ["OrganC", "0.1", "", "", "", "", ""],
    ]
