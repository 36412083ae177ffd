"""`fedobp report` and `fedobp plot`."""

import os

import pytest
from saved import write_run

from fedobp.cli.report import plot, report


@pytest.fixture
def study(tmp_path):
    for method in ("fedobp", "fedavg"):
        write_run(tmp_path / "study", method)
    return tmp_path / "study"


@pytest.mark.essential
def test_a_report_is_written_into_the_folder_of_a_comparison(command, study):
    said = command("report", study)
    assert (said.code, said.err) == (0, "")
    assert said.out.split() == ["Report", "of", "2", "runs:", str(study / "report.html")]
    assert (study / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert command("report", study).code == 0  # its own report is replaced


def test_a_report_of_single_runs_with_a_title_as_json(command, study, tmp_path):
    said = command(
        "report", study / "fedobp-seed1", study / "fedavg-seed1", "--out", "a.html", "--title", "<Mine>", "--json"
    )
    text = (tmp_path / "a.html").read_text()
    assert said.json == {"out": "a.html", "runs": 2, "bytes": len(text.encode())}
    assert "<h1>&lt;Mine&gt;</h1>" in text
    assert list(study.glob("*.html")) == []


def test_the_report_of_a_sweep_says_what_the_sweep_said(command, tmp_path):
    settings = ("--methods", "fedavg", "--grid", "lr=0.05,0.1,1e9", "--val-ratio", 0.2, "--rounds", 1, "--model", "mlp")
    assert command("sweep", *settings, "--out", "sweep").code == 2  # one of its runs diverges
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "Best of 2 by validation accuracy: " in page
    assert "no longer finite" in page
    assert command("report", "sweep").code == 0
    assert (tmp_path / "sweep" / "report.html").read_text() == page
    (tmp_path / "link").symlink_to("sweep")
    assert command("report", "link", "sweep", "--out", "both.html").code == 0
    assert (tmp_path / "both.html").read_text().count("Best of 2 by validation accuracy: ") == 1
    (tmp_path / "sweep" / "fedavg-lr0.1-seed42" / "result.json").unlink()
    command("report", "sweep")
    assert "Not trained yet: 1 run." in (tmp_path / "sweep" / "report.html").read_text()


def test_a_figure_is_written_into_the_folder_or_where_the_user_says(command, study, tmp_path):
    assert command("plot", study).code == 0
    assert (study / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    said = command("plot", study, "--figure", "bytes", "--out", "b.pdf", "--json")
    assert said.json == {"out": "b.pdf", "runs": 2, "figure": "bytes"}
    assert (tmp_path / "b.pdf").read_bytes().startswith(b"%PDF")
    assert command("plot", study, "--figure", "bytes", "--out", "b.pdf").code == 0  # replaced


@pytest.mark.parametrize("name", ["[bold]", "[/bold]", ":bug:", "long" * 50])
def test_the_path_of_what_is_written_is_printed_as_it_is_in_one_line(command, tmp_path, name):
    write_run(tmp_path, name=name)
    assert command("report", name).out == f"Report of 1 run: {name}/report.html\n"
    assert command("plot", name).out == f"Figure: {name}/accuracy.png\n"


def test_folders_with_names_that_are_not_utf_8_are_reported(command, tmp_path):
    write_run(tmp_path / "study\udcff", name="one\udcff")
    assert command("report", "study\udcff").code == 0
    assert "one\\udcff" in (tmp_path / "study\udcff" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("report", "nowhere"), "there is no folder nowhere: give the folder of a run"),
        (("plot", "nowhere"), "there is no folder nowhere: give the folder of a run"),
        (("report", "empty"), "there is no finished run in empty"),
        (("report", "study", "empty"), "several folders are given, so say where to write: --out report.html"),
        (("plot", "study", "empty"), "several folders are given, so say where to write: --out accuracy.png"),
        (("report", "study", "--out", "a.pdf"), "--out a.pdf must end in .html or .htm"),
        (("plot", "study", "--out", "a.gif"), "--out a.gif must end in .png, .pdf or .svg"),
        (("report", "study", "--out", "no/a.html"), "there is no folder no; make it first"),
        (("plot", "study", "--out", "no/a.png"), "there is no folder no; make it first"),
        (("report", "study", "--title", "a\udcff"), r"--title must be readable text, not 'a\udcff'"),
        (("report", "study", "--out", "dir.html"), "--out dir.html is a folder"),
        (("report", "study", "--out", "pipe.html"), "pipe.html is a named pipe, not a file"),
        (("report", "study", "--out", "mine.html"), "mine.html was not made by this command, so it is not overwritten"),
        (("plot", "study", "--out", "mine.png"), "mine.png was not made by this command, so it is not overwritten"),
        (("plot", "study", "--figure", "acuracy"), "unknown figure 'acuracy': did you mean 'accuracy'?"),
        (("plot", "study", "--figure", "clients"), "none of these runs has a clients.csv"),
        (("report",), "Missing argument 'RUN...'"),
    ],
)
def test_user_errors_are_one_sentence_and_nothing_is_written(arguments, sentence, command, study, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "dir.html").mkdir()
    os.mkfifo(tmp_path / "pipe.html")
    for name in ("mine.html", "mine.png"):
        (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    said = command(*arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "mine.html").read_text() == (tmp_path / "mine.png").read_text() == "mine"


@pytest.mark.parametrize("one", [report, plot])
def test_help_has_examples(one, command):
    said = command(one.__name__, "--help")
    assert f"fedobp {one.__name__} runs/NAME" in said.out
