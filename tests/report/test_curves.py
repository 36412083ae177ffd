"""Curves: what is drawn, and that nothing stays open."""

import sys

import numpy as np
import pytest
from handmade import made
from matplotlib.figure import Figure

from fedobp import Results


def drawn(axes):
    return {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines}


@pytest.mark.essential
def test_a_curve_a_group_with_a_band_over_its_seeds():
    results = Results([made(seed=seed, pooled=pooled) for seed, pooled in ((1, 60.0), (2, 80.0))] + [made("local")])
    figure = results.plot()
    [axes] = figure.axes
    assert drawn(axes) == {"fedavg (2 runs)": ([2, 4], [35.0, 70.0]), "local": ([2, 4], [40.0, 80.0])}
    [band] = axes.collections
    low, high = 70 - np.sqrt(200), 70 + np.sqrt(200)  # the deviation of 60 and 80, with n - 1
    heights = sorted({round(y, 6) for x, y in band.get_paths()[0].vertices if x == 4})
    assert heights == pytest.approx([low, high])
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("round", "pooled accuracy (%)", "digits")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fedavg (2 runs)", "local"]


def test_curves_are_drawn_into_given_axes_beside_what_is_there():
    figure = Figure()
    axes = figure.subplots()
    assert made().plot(axes) is figure
    assert made("local").plot(ax=axes) is figure
    assert list(drawn(axes)) == ["fedavg", "local"]
    assert len({line.get_color() for line in axes.lines}) == 2


def test_many_curves_differ_in_colour_or_style_and_have_their_legend_beside_them():
    [axes] = Results([made(lr=0.1 + step) for step in range(12)]).plot().axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 12
    assert axes.get_legend()._loc == 6  # center left, of a point at the right edge


def test_datasets_that_differ_are_named_in_the_labels_and_dollars_are_no_formula():
    figure = Results([made(dataset="a$b"), made(dataset="c$d$")]).plot()
    [axes] = figure.axes
    assert (axes.get_title(), list(drawn(axes))) == ("", ["fedavg, dataset=a$b", "fedavg, dataset=c$d$"])
    assert not any(text.get_parse_math() for text in axes.get_legend().get_texts())
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert made(dataset="a$b").plot()._repr_png_().startswith(b"\x89PNG")


def test_pyplot_is_not_used_so_no_figure_stays_open_and_no_backend_is_chosen(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import of it fails
    assert made().plot()._repr_png_().startswith(b"\x89PNG")
