"""Tables 1 and 2, the convergence figures, and the MedMNIST rows: all methods under one protocol."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fedobp.algorithms import method_class
from fedobp.data import REGISTRY
from fedobp.paper import published
from fedobp.paper.experiment import Case, Experiment, Files, Setting, train_cases
from fedobp.paper.figures import PAGE, cell_panels, legend, style, whole_numbers
from fedobp.paper.published import NAMES, TABLE1, TABLE2, title
from fedobp.paper.rows import AS_PUBLISHED, EXTRA, Row, by_seed, labelled, mean_of, where
from fedobp.paper.stats import NOISE_RULE, TEST_RULE, Spread, beside_published, paired, probability, ranks, within_noise
from fedobp.paper.tables import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NETWORKS = {"fedbn": "cnn-bn"}  # instead of the paper's, on which it would be FedAvg
_ORGANS = (
    "OrganA and OrganC are measured with the right scaling of images; the published numbers are not (see `medmnist`)."
)
_SCALINGS = {"dataset": "right constants", "as-published": "as published", "train": "training parts", "none": "none"}


def modes_of(method: str) -> tuple[str, ...]:
    """Return a method's modes; () if it has one only."""
    choices = [spec.metadata["choices"] for spec in method_class(method).options() if spec.name == "mode"]
    return tuple(choices[0]) if choices else ()


def method_cases(setting: Setting) -> Iterator[Case]:
    """Yield all methods, in each mode that is asked for, on all datasets."""
    for dataset, alpha, seed in setting.points():
        for method in setting.methods:
            modes = [mode for mode in modes_of(method) if mode in setting.modes]
            network = {"model": NETWORKS[method]} if method in NETWORKS and setting.scale != "smoke" else {}
            for options in [{"mode": mode} for mode in modes] or [{}]:
                yield Case(setting.config(dataset, alpha, seed, method, options=options, finetune_epochs=5, **network))


def names_of(setting: Setting) -> list[str]:
    """Return the rows of the tables: FedAvg's other models stand below it."""
    names: list[str] = []
    for method in setting.methods:
        name, modes = NAMES.get(method, method), [mode for mode in modes_of(method) if mode in setting.modes]
        names += [name + (AS_PUBLISHED if mode == "as-published" else "") for mode in modes] or [name]
        names += list(EXTRA.values()) if method == "fedavg" else []
    return names


def theirs_of(name: str, dataset: str, alpha: float) -> tuple[float, float] | None:
    """Return the published number of a row of the tables."""
    plain = name.removesuffix(AS_PUBLISHED)
    method = next((method for method, shown in NAMES.items() if shown == plain), "")
    return published.accuracy(dataset, method, alpha)


def accuracy_tables(setting: Setting, files: Files) -> list[Table]:
    """Return the paper's table with the published numbers, and one for each dataset and alpha with the tests."""
    names, rows = names_of(setting), files["results"]
    found = {cell: labelled(rows, *cell) for cell in setting.cells()}
    grid = Table(
        "Accuracy in per cent, pooled over clients, as served",
        ["method", *(f"{title(dataset)} {alpha:g}" for dataset, alpha in setting.cells())],
        notes=[
            "Mean ± deviation (n - 1) over seeds; best bold, second underlined, among methods as their authors meant "
            "them. In parentheses the published number: ✓ within noise, ✗ not.",
            NOISE_RULE,
            *([_ORGANS] if {"organamnist", "organcmnist"} & set(setting.datasets) else []),
        ],
    )
    means = {cell: {name: mean_of(of) for name, of in by_name.items()} for cell, by_name in found.items()}
    best = {cell: ranks(_ranked({name: of.get(name) for name in names})) for cell, of in means.items()}
    for name in names:
        cells = [
            Cell(
                str(means[cell].get(name) or ""),
                best[cell].get(name, 0),
                beside_published(means[cell].get(name), theirs_of(name, *cell)),
            )
            for cell in setting.cells()
        ]
        grid.add(name, *cells)
    return [grid, *(cell_table(names, by_name, *cell) for cell, by_name in found.items())]


def _ranked(means: dict[str, Spread | None]) -> dict[str, float]:
    """Return the means that compete: broken implementations do not, unless nothing else was run."""
    values = {name: one.mean for name, one in means.items() if one}
    faithful = {name: value for name, value in values.items() if not name.endswith(AS_PUBLISHED)}
    return faithful if set(faithful) - set(EXTRA.values()) - {"FedOBP", "FedAvg", "Local-Only"} else values


def cell_table(names: list[str], by_name: dict[str, list[Row]], dataset: str, alpha: float) -> Table:
    """Return one dataset's numbers beside the published ones, and FedOBP's test against each method."""
    table = Table(
        f"{title(dataset)}, Dirichlet({alpha:g})",
        ["method", "measured", "seeds", "published", "momentum 0", "difference", "within noise", "client mean",
         "FedOBP minus it", "test", "FedOBP is"],
        notes=[TEST_RULE],
    )  # fmt: skip
    ours = by_seed(by_name.get("FedOBP", []))
    for name in names:
        rows = by_name.get(name, [])
        measured, theirs = mean_of(rows), theirs_of(name, dataset, alpha)
        method = rows[0]["method"] if rows and name not in EXTRA.values() else ""
        at_0 = published.momentum_0(dataset, method, alpha)
        test = paired(ours, by_seed(rows)) if name != "FedOBP" else None
        table.add(
            name,
            str(measured or ""),
            str(measured.n) if measured else "",
            f"{theirs[0]:.2f} ± {theirs[1]:.2f}" if theirs else "",
            f"{at_0:.2f}" if at_0 is not None else "",
            f"{measured.mean - theirs[0]:+.2f}" if measured and theirs else "",
            ("yes" if within_noise(measured, *theirs) else "no") if measured and theirs else "",
            str(mean_of(rows, "client_mean") or ""),
            f"{test.difference:+.2f}" if test else "",
            f"{probability(test.p)}, {test.pairs} pairs" if test and test.p is not None else "",
            test.verdict if test else "",
        )
    return table


def accuracy_figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw all methods' accuracies beside the published ones, a panel for each dataset and alpha."""
    names = names_of(setting)
    figure, axes, used = cell_panels(
        len(setting.datasets), len(setting.alphas), height=0.13 * len(names) + 0.6, sharey=True
    )
    for ax, (dataset, alpha) in zip(used, setting.cells(), strict=True):
        by_name = labelled(files["results"], dataset, alpha)
        for place, name in enumerate(names):
            theirs, measured = theirs_of(name, dataset, alpha), mean_of(by_name.get(name, []))
            if theirs:
                ax.plot(theirs[0], place, "|", color="#d55e00", markersize=7, mew=1.3, label="published")
            if measured:
                ax.errorbar(measured.mean, place, xerr=measured.std, fmt="o", color="#0072b2", label="measured")
        ax.set_title(f"{title(dataset)}, Dir({alpha:g})")
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlabel("accuracy, per cent")
    legend(figure, axes, 2)
    return {"figure": figure}


def checkpoints(rounds: int) -> list[int]:
    """Return the quarters of a run: the paper's rounds 100, 200, 300 and 400."""
    return sorted({max(1, rounds * quarter // 4) for quarter in (1, 2, 3, 4)})


def curve(rows: Sequence[Row]) -> dict[int, Spread]:
    """Return the mean over seeds of each evaluated round."""
    rounds = sorted({row["round"] for row in rows})
    return {at: found for at in rounds if (found := mean_of(where(rows, round=at)))}


def first_within(points: dict[int, Spread], margin: float = 1.0) -> int | None:
    """Return the first evaluated round from which the mean stays at most `margin` points below its last value."""
    if not points:
        return None
    last = points[max(points)].mean
    low = [at for at, found in points.items() if found.mean < last - margin]
    return min((at for at in points if at > max(low, default=0)), default=None)


def _histories(files: Files, dataset: str, alpha: float) -> dict[str, list[Row]]:
    return labelled([{**row, "model": "served"} for row in files["history"]], dataset, alpha)


def convergence_tables(setting: Setting, files: Files) -> list[Table]:
    """Return the accuracy at the quarters of the run, and when a method is within a point of its end."""
    tables = []
    for dataset, alpha in setting.cells():
        marks, histories = checkpoints(setting.rounds), _histories(files, dataset, alpha)
        table = Table(
            f"{title(dataset)}, Dirichlet({alpha:g})",
            ["method", *(f"round {at}" for at in marks), "within 1 point of its end from round", "published (best)"],
            notes=["Pooled accuracy of all clients, as served, mean over seeds; it is not smoothed. The paper's curves "
                   "are of the 10 sampled clients, smoothed (Savitzky-Golay, window 20, order 2)."],
        )  # fmt: skip
        curves = {name: curve(rows) for name, rows in histories.items()}
        best = {at: ranks({name: points[at].mean for name, points in curves.items() if at in points}) for at in marks}
        for name in (name for name in names_of(setting) if name not in EXTRA.values()):
            points, theirs = curves.get(name, {}), theirs_of(name, dataset, alpha)
            cells = [Cell(f"{points[at].mean:.2f}", best[at].get(name, 0)) if at in points else "" for at in marks]
            end = points[max(points)] if points else None
            table.add(name, *cells, str(first_within(points) or ""), beside_published(end, theirs))
        tables.append(table)
    return tables


def convergence_figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw the accuracy of all methods over the rounds, a panel for each dataset and alpha."""
    names = [name for name in names_of(setting) if name not in EXTRA.values()]
    order = ["FedOBP", *(name for name in names if name != "FedOBP")]
    figure, axes, used = cell_panels(len(setting.datasets), len(setting.alphas))
    for ax, (dataset, alpha) in zip(used, setting.cells(), strict=True):
        histories = _histories(files, dataset, alpha)
        for place, name in enumerate(order):
            points = curve(histories.get(name, []))
            if points:
                look = {**style(place), "markevery": max(1, len(points) // 5), "zorder": 3 if name == "FedOBP" else 2}
                ax.plot(list(points), [found.mean for found in points.values()], label=name, **look)
        ax.set_title(f"{title(dataset)}, Dir({alpha:g})")
        ax.set(xlabel="round", ylabel="accuracy, per cent" if ax in axes[:, 0] else None)
        whole_numbers(ax)
    legend(figure, axes, 5)
    return {"figure": figure}


def scaling_cases(setting: Setting) -> Iterator[Case]:
    """Yield the methods with the right scaling of images, and with the mistaken one where the dataset has it."""
    for dataset, alpha, seed in setting.points():
        facts = REGISTRY.get(dataset)
        mistaken = facts is not None and facts.published_factor != 1
        for scaling in ("dataset", "as-published") if mistaken else ("train", "none"):
            for method in ("fedobp", "fedavg", "local", "fedper", "pfedfda"):
                modes = modes_of(method)
                options = {"mode": "as-published" if "as-published" in setting.modes else "faithful"} if modes else {}
                more = {"normalize": scaling, "finetune_epochs": 5}
                yield Case(
                    setting.config(dataset, alpha, seed, method, options=options, **more), {"normalize": scaling}
                )


def scaling_tables(setting: Setting, files: Files) -> list[Table]:
    """Return each method's accuracy under both scalings, beside the published one and the majority class."""
    table = Table(
        "Accuracy in per cent, pooled over clients",
        ["dataset", "alpha", "scaling", "method", "measured", "published", "majority class"],
        notes=[
            "The published rows were run with constants of the 0-255 scale on images of the 0-1 scale, so that all "
            "images look alike and a network learns its client's label frequencies only. Majority class: always "
            "answering the client's most frequent training label.",
            NOISE_RULE,
        ],
    )
    for dataset, alpha in setting.cells():
        rows = where(files["results"], dataset=dataset, alpha=alpha)
        for scaling in dict.fromkeys(row["normalize"] for row in rows):
            of_scaling = labelled(where(rows, normalize=scaling), dataset, alpha)
            best = ranks({name: found.mean for name, of in of_scaling.items() if (found := mean_of(of))})
            for name, of in of_scaling.items():
                measured, majority = mean_of(of), mean_of(of, "majority_class")
                theirs = theirs_of(name, dataset, alpha)
                shown = beside_published(measured if scaling == "as-published" else None, theirs)
                accuracy = Cell(str(measured or ""), best.get(name, 0))
                guess = f"{majority.mean:.2f}" if majority else ""
                table.add(title(dataset), f"{alpha:g}", _SCALINGS[scaling], name, accuracy, shown, guess)
        if not rows:
            table.add(title(dataset), f"{alpha:g}", *[""] * 5)
    return [table]


def scaling_figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw the accuracies under both scalings, with the majority class as a line."""
    wide = PAGE if len(setting.datasets) > 1 else 4.0
    figure, axes, used = cell_panels(len(setting.datasets), len(setting.alphas), width=wide, height=2.4, most=2)
    for ax, (dataset, alpha) in zip(used, setting.cells(), strict=True):
        rows = where(files["results"], dataset=dataset, alpha=alpha)
        names = list(labelled(rows, dataset, alpha))
        for place, scaling in enumerate(dict.fromkeys(row["normalize"] for row in rows)):
            means = {name: mean_of(of) for name, of in labelled(where(rows, normalize=scaling), dataset, alpha).items()}
            look = {key: value for key, value in style(place + 1).items() if key != "linestyle"}
            points = [(names.index(name), found.mean) for name, found in means.items() if found]
            ax.plot(*zip(*points, strict=True), linestyle="", label=f"scaling: {_SCALINGS[scaling]}", **look)
        theirs = [(names.index(name), one[0]) for name in names if (one := theirs_of(name, dataset, alpha))]
        if theirs:
            ax.plot(*zip(*theirs, strict=True), "_", color="#000000", markersize=9, label="published")
        if rows:
            ax.axhline(rows[0]["majority_class"], color="#777777", linestyle=":", label="majority class")
        ax.set_title(f"{title(dataset)}, Dir({alpha:g})")
        ax.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
        ax.set_ylabel("accuracy, per cent")
    legend(figure, axes, 4 if wide == PAGE else 2)
    return {"figure": figure}


_ABOUT = "13 methods and the two baselines that the paper leaves out, on "
EXPERIMENTS = [
    Experiment(
        name, _ABOUT + ", ".join(map(title, datasets)), train_cases(method_cases), accuracy_tables, accuracy_figures,
        datasets, seeds=3, smoke_seeds=2, smoke_rounds=3, mode="both", takes_methods=True, takes_modes=True,
    )
    for name, datasets in (("table1", TABLE1), ("table2", TABLE2))
] + [
    Experiment(
        "convergence", "accuracy of all methods over the rounds", train_cases(method_cases), convergence_tables,
        convergence_figures, (*TABLE1, *TABLE2), seeds=3, takes_methods=True, takes_modes=True,
    ),
    Experiment(
        "medmnist", "the MedMNIST rows: the mistake in the scaling of images, and its correction",
        train_cases(scaling_cases), scaling_tables, scaling_figures, TABLE2[2:], seeds=3, mode="as-published",
        takes_modes=True,
    ),
]  # fmt: skip
