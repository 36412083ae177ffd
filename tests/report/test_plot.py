"""Pictures of partitions."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn."""
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig

    def keep(self, *args, **kwargs):
        drawn.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return drawn


def test_few_clients_are_circles_whose_area_counts_samples(command, figures):
    counts = np.zeros((10, 10))
    for client in command("partition", "--clients", 10, "--plot", "few.png", "--json").json["clients"]:
        for label, samples in client["labels"].items():
            counts[client["id"], int(label)] = samples
    circles = figures[0].axes[0].collections[0]
    assert not figures[0].axes[0].images
    areas = {tuple(map(int, at)): area for at, area in zip(circles.get_offsets(), circles.get_sizes(), strict=True)}
    assert set(areas) == set(zip(*counts.nonzero(), strict=True))
    for at, area in areas.items():
        assert area == pytest.approx(300 * counts[at] / counts.max())


def test_dollars_in_names_are_no_formulas(command, figures):
    Path("here").mkdir()
    labels = np.array(["$$", "$0-$50k", "$x^2_{$"] * 20)
    np.savez("here/a$_$.npz", x=np.arange(60, dtype=np.float32)[:, None], y=labels)
    asked = ("--dataset", "a$_$", "--data-dir", "here", "--partition", "iid", "--clients", 2)
    said = command("partition", *asked, "--plot", "names.png")
    assert (said.code, said.err) == (0, "")
    assert [text.get_text() for text in figures[0].axes[0].get_yticklabels()] == ["$$", "$0-$50k", "$x^2_{$"]


def test_many_clients_are_a_heat_map_in_the_order_of_their_labels(command, figures):
    arguments = ("--clients", 200, "--partition", "dirichlet-equal", "--holdout-clients", 50)
    said = command("partition", *arguments, "--plot", "many.svg")
    assert "... and 100 more clients" in said.out
    assert "* 50 clients are held out" in said.out
    [image] = figures[0].axes[0].images
    cells = image.get_array().filled(0)
    assert cells.shape == (10, 200)
    assert cells.sum() == 1797
    for part in (cells[:, :150], cells[:, 150:]):
        most = part.argmax(axis=0)
        assert most.tolist() == sorted(most)
    assert Path("many.svg").read_text().startswith("<?xml")


def test_a_thousand_clients_and_one_are_drawn_too(command):
    assert command("partition", "--clients", 898, "--partition", "iid", "--plot", "many.png").code == 0
    assert command("partition", "--clients", 1, "--partition", "iid", "--plot", "one.pdf").code == 0
