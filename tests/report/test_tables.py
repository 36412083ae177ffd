"""Tables and heat maps in terminals of every width: nothing is cut."""

import re
from dataclasses import asdict
from html import unescape

import pytest
from handmade import made
from resolved import resolved
from rich.console import Console

import fedobp
from fedobp.bench import Bench, Speed
from fedobp.federation import assign, read
from fedobp.report.heat_map import heat_map
from fedobp.report.tables import bench_table, compare_table, datasets_table, methods_table, run_table, summarise

WIDTHS = [20, 40, 60, 80, 200]


@pytest.fixture(scope="module")
def results():
    tiny = {"clients": 5, "rounds": 1, "epochs": 1, "model": "mlp", "holdout_clients": 1, "metrics": "loss,confusion"}
    names = ("fedavg-last", "local")
    return fedobp.sweep([fedobp.Config(**tiny, method=name, seed=seed) for seed in (1, 2) for name in names])


@pytest.mark.parametrize("columns", WIDTHS)
def test_names_and_accuracies_are_never_cut(columns, results):
    shown = rendered(compare_table(results), columns)
    for row in summarise(results):
        value = rf"{row['pooled']['mean']:.2f} ±\s+{row['pooled']['std']:.2f}"
        assert re.search(rf"^ ?{row['method']}\s+(pooled: )?{value}", shown, re.MULTILINE)
    assert ("seconds.\n" in shown) == (columns in (40, 60, 80))  # too narrow for a column, which is named below
    assert (" loss" in shown) == (columns != 20)
    for name, accuracy in (("as served", results[0].accuracy), ("own last local model", results[0].last)):
        value = f"{accuracy.pooled:.2f}"
        line = rf"^ ?{name}\s+(pooled: )?{value}"
        assert re.search(line, rendered(run_table(results[0]), columns), re.MULTILINE)


@pytest.mark.parametrize("columns", WIDTHS)
def test_lists_and_maps_fit_too(command, columns):
    rows = command("methods", "--json").json["methods"]
    assert all(row["name"] in rendered(methods_table(rows), columns) for row in rows)
    rows = command("data", "list", "--json").json["datasets"]
    assert all(row["name"] in rendered(datasets_table(rows), columns) for row in rows)
    config = resolved(clients=5, holdout_clients=1)
    dataset, shards = assign(config, read(config))
    shown = rendered(heat_map(dataset, shards, columns), columns)
    assert len([line for line in shown.splitlines() if re.match(r" {5}\d ", line)]) == 5  # a line for each client


def rendered(table, columns):
    """Return a table as a terminal shows it; nothing may be cut or too wide."""
    console = Console(width=columns, color_system=None)
    with console.capture() as shown:
        console.print(table)
    assert "…" not in shown.get()
    assert max(map(len, shown.get().splitlines())) <= columns
    return shown.get()


def test_a_notebook_shows_the_cells_of_the_console(results):
    for one, table, least in ((results, compare_table(results), 3), (results[0], run_table(results[0]), 6)):
        shown, html = rendered(table, 300), one._repr_html_()
        parts = re.findall("<tr>(.*?)</tr>|<p>(.*?)</p>", html)
        rows = [" ".join(re.findall(r"<t[hd]>(.*?)</t[hd]>", row)) for row, _ in parts]
        assert sum(map(bool, rows)) >= least
        lines = [" ".join(line.split()) for line in shown.splitlines() if line.strip(" ─")]
        assert lines == [unescape(row or note) for row, (_, note) in zip(rows, parts, strict=True)]


def test_runs_that_differ_in_more_than_their_seeds_have_rows_of_their_own():
    different = [made(), made(seed=2), made(lr=0.5, holdout_clients=2), made("local", rounds=8)]
    shown = rendered(compare_table(different), 200)
    for row in ("fedavg, holdout_clients=0, rounds=4, lr=0.01 80.00 ± 0.00", "local, holdout_clients=0, rounds=8, lr="):
        assert row in " ".join(shown.split())
    assert "round 4 (protocol default) or round 8 (protocol default). Mean ± deviation (n - 1) over seeds 1" in shown
    assert "New clients: 2, held out" in shown


@pytest.mark.parametrize(
    ("seeds", "note"),
    [
        ([{"seed": 3}], "Seed 3."),
        ([{"seed": 3}, {"seed": 5, "method": "local"}], "Seeds 3, 5."),
        ([{"seed": 3}, {"seed": 5}], "Mean ± deviation (n - 1) over seeds 3, 5."),
        (
            [{"seed": 3, "partition_seed": 7}, {"seed": 3, "partition_seed": 9}],
            "Seed 3; mean ± deviation (n - 1) over partition seeds 7, 9.",
        ),
    ],
)
def test_the_note_on_seeds_says_what_is_averaged(seeds, note):
    lines = rendered(compare_table([made(**one) for one in seeds]), 200).splitlines()
    assert [line for line in lines if line.endswith(f"default). {note}")]


def test_names_and_errors_are_escaped_in_a_notebook():
    html = fedobp.Results([made(dataset="<b>"), made(dataset="&"), fedobp.Failure("<i>", 3, "1 < 2")])._repr_html_()
    assert "<td>fedavg, dataset=&lt;b&gt;</td>" in html
    assert "<td>fedavg, dataset=&amp;</td>" in html
    assert "<p>Failed: &lt;i&gt;, seed 3: 1 &lt; 2</p>" in html
    assert fedobp.Results([fedobp.Failure("local", 3, "why")])._repr_html_() == (
        "<div><p>Failed: local, seed 3: why</p></div>"
    )
    assert fedobp.Results()._repr_html_() == "<div><p>No runs.</p></div>"


def test_a_fast_device_is_shown_in_larger_units():
    rows = tuple(
        Speed(name, 12.0, rate, 0.97, rate * 1e9, 0.5, 3e3 / rate, rate / 1e3, 0.1, hours * 3600.0)
        for name, rate, hours in (("serial", 1e3, 2.5), ("lanes", 2e4, 0.01))
    )
    found = Bench(
        "NVIDIA H200", 8, "tf32", "cifar10", True, 60_000, "cnn", 878_538, 100, 10, "iid", 0.1, 32, 5, 8, 400, 20,
        713.2, 1.4e9, 4e13, rows, 31.0,
    )  # fmt: skip
    console = Console(width=120, color_system=None)
    with console.capture() as shown:
        console.print(bench_table(asdict(found)))
    for word in ("TFLOP/s", "20.00x", "2 h 30 min", "36.0 s", "NVIDIA H200, tf32", "40.0 TFLOP/s", "97%", "IID",
                 "one run's share of 8", "Random images in the shape of cifar10"):  # fmt: skip
        assert word in " ".join(shown.get().split())


def test_seeds_that_are_no_range_are_listed():
    shown = rendered(compare_table([made(seed=seed) for seed in (1, 7, 42)]), 200)
    assert "over seeds 1, 7, 42." in shown
    assert "over seeds 1 to 3." in rendered(compare_table([made(seed=seed) for seed in (3, 1, 2)]), 200)


def test_runs_on_other_data_have_no_common_guess():
    mixed = [made(), made(dataset="mnist")]
    assert "most frequent training label" not in rendered(compare_table(mixed), 200)
    assert "most frequent training label" in rendered(compare_table(mixed[:1]), 200)
