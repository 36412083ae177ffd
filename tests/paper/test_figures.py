"""Figures as files."""

from itertools import combinations

from fedobp.paper.figures import drawing, panels, quantile_axis, save, style


def test_lines_can_be_told_apart():
    looks = [tuple(style(at).values()) for at in range(28)]
    assert all(one != other for one, other in combinations(looks, 2))


def test_a_figure_is_written_with_the_same_bytes_each_time(tmp_path):
    for name in ("one", "two"):
        with drawing():
            figure, axes = panels(1, 3)
            axes[0][0].plot([1, 2], [3, 4], label="a")
            axes[0][1].set_title("b")
            save(figure, tmp_path, name)
    for kind in ("pdf", "png"):
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()
    assert [text.get_text() for text in axes[0][0].texts] == []
    assert [text.get_text() for text in axes[0][1].texts] == ["not measured"]
    assert not axes[0][2].axison  # a place of the grid that is not used
    assert not axes[0][2].texts


def test_of_many_quantiles_some_are_labelled():
    _, axes = panels(1, 2)
    quantile_axis(axes[0][0], (0.0, 0.9, 1.0))
    quantile_axis(axes[0][1], [n / 32 for n in range(33)])
    assert [text.get_text() for text in axes[0][0].get_xticklabels()] == ["0", "0.9", "1"]
    assert len(axes[0][1].get_xticks()) == 11
