"""Sweeps over quantiles, from hand-made rows."""

from fedobp.paper.ablation import layer_shares, layer_tables, quantiles_of, variant_tables
from fedobp.paper.quantiles import (
    best_quantile,
    by_quantile,
    claimed_peaks,
    communication_tables,
    quantile_tables,
    rate_tables,
    score_tables,
)
from paper.cases import row, setting, swept


def texts(table):
    return [[cell.text for cell in line] for line in table.rows]


def test_the_best_quantile_is_the_largest_of_those_that_print_equal():
    rows = [swept(0.9, 80.0), swept(0.99, 80.001), swept(0.999, 79.0)]
    assert best_quantile(by_quantile(rows, "cifar10", 0.1)) == 0.99
    assert best_quantile({}) is None


def test_quantiles_beside_the_paper():
    rows = [swept(0.9, 70.0, personal_mean=87853.0), swept(0.99998, 86.8, personal_mean=18.0)]
    counts, sweep = quantile_tables(setting(), {"results": rows})
    assert texts(counts) == [
        ["CIFAR10", "0.1", "878,538", "0.99998", "18", "18", "18", "86.80", "0.99998", "18", "86.80"]
    ]
    assert counts.rows[0][7].beside == "87.02 ✓"
    assert texts(sweep) == [["0.9", "87,853", "70.00"], ["0.99998", "18", "86.80"]]
    empty = quantile_tables(setting(datasets=("organamnist",)), {"results": []})[0]
    assert texts(empty) == [["OrganA", "0.1", "582,539", "0.9999", "53", "59", "", "", "", "", ""]]


def test_scores_beside_the_logs():
    rows = [
        swept(0.9, 82.0, method="decoupled", set={"score": "gradient", "pool": "tensor"}),
        swept(0.0, 81.0, method="decoupled", set={"score": "gradient", "pool": "tensor"}),
        swept(0.999, 86.0, method="decoupled", set={"score": "squared", "pool": "global"}),
    ]
    peaks, table = score_tables(setting(), {"results": rows})
    shown = {(line[2], line[3]): line[4:] for line in texts(peaks)}
    assert shown["gradient", "each tensor"] == ["0.9", "18", "82.00", "0.1", "0.1", "81.26"]
    assert shown["OBP", "all entries"] == ["0.999", "18", "86.00", "0.9999", "0.997", "85.66"]
    assert shown["Fisher", "all entries"] == ["", "", "", "0.7", "0.7", "82.93"]
    assert texts(table)[0] == ["0", "", "", "", "81.00", "", ""]


def test_claimed_peaks():
    assert claimed_peaks("cifar10") == {"gradient": 0.1, "fisher": 0.7, "squared": 0.9999}
    assert claimed_peaks("mnist") == {"gradient": 0.4, "fisher": 0.7}
    assert claimed_peaks("digits") == {}


def test_communication_is_counted_in_bytes():
    rows = [
        swept(0.5, 80.0, bytes_down=2_200_000, personal_share=0.5),
        swept(0.999, 79.0, bytes_down=4_000_000, personal_share=0.001),
        swept(1.0, 60.0, bytes_down=4_000_000, personal_share=0.0),
    ]
    [table] = communication_tables(setting(), {"results": rows})
    assert texts(table) == [
        ["0.5", "50.0000 %", "5.5 kB", "55.00 %", "10 B", "80.00"],
        ["0.999", "99.9000 %", "10.0 kB", "100.00 %", "10 B", "79.00"],
        ["1", "100.0000 %", "10.0 kB", "100.00 %", "10 B", "60.00"],
    ]
    assert [line[-1].rank for line in table.rows] == [1, 2, 0]


def test_participation():
    rows = [row(pooled=70.0, participation=0.1, score="OBP"), row(pooled=72.0, participation=0.5, score="OBP")]
    rows += [row(pooled=71.0, participation=0.1, score="Fisher")]
    [table] = rate_tables(setting(), {"results": rows})
    assert list(table.header) == ["score", "0.1", "0.5"]
    assert texts(table) == [["OBP", "70.00", "72.00"], ["Fisher", "71.00", ""]]
    assert [cell.rank for cell in table.rows[0]] == [0, 2, 1]


def test_ablation_has_the_published_numbers_beside_the_score_that_they_were_run_with():
    rows = [row(pooled=86.9, score="squared", variant="none"), row(pooled=87.2, score="product", variant="none")]
    [table] = variant_tables(setting(), {"results": rows})
    squared, product = table.rows
    assert squared[3] == ("86.90", 2, "")
    assert product[3] == ("87.20", 1, "87.36 ✓")
    assert product[4] == ("", 0, "85.00")


def test_quantiles_of_the_ablation():
    assert quantiles_of("cifar10", 0.1) == (0.9999, 0.983)
    assert quantiles_of("digits", 0.1) == (0.999, round(1 - 54 / 1290, 4))


def test_layers():
    rows = [
        {"dataset": "cifar10", "alpha": 0.1, "score": "product", "round": at, "layer": layer, "share": share}
        for at, shares in ((40, (0.2, 0.8)), (360, (0.7, 0.3)), (400, (0.9, 0.1)))
        for layer, share in zip(("classifier", "conv1"), shares, strict=True)
    ]
    assert layer_shares(rows, 356, 400) == {"classifier": 0.8, "conv1": 0.2}
    [table] = layer_tables(setting(), {"layers": rows})
    assert texts(table) == [
        ["CIFAR10", "0.1", "squared (eq. 19)", "", "", "", "", ""],
        ["CIFAR10", "0.1", "product (released code)", "1 to 44", "classifier", "0.20", "", ""],
        ["CIFAR10", "0.1", "product (released code)", "1 to 44", "conv1", "0.80", "", ""],
        ["CIFAR10", "0.1", "product (released code)", "357 to 400", "classifier", "0.80", "0.86", "0.9 to 1.0"],
        ["CIFAR10", "0.1", "product (released code)", "357 to 400", "conv1", "0.20", "0.14", "0.0 to 0.1"],
    ]
