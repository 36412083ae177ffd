"""Tables as Markdown and LaTeX."""

from fedobp.paper.tables import Cell, Table, latex


def small():
    table = Table("Accuracy, 50% & more", ["method", "Digits_1"], notes=["A note: s² < 1."])
    table.add("FedAvg-Last", Cell("87.40 ± 0.10", 1, "87.02 ✓"))
    table.add("a|b", Cell("87.30", 2))
    table.add("nothing", "")
    return table


def test_markdown():
    assert small().markdown() == (
        "## Accuracy, 50% & more\n\n"
        "| method | Digits_1 |\n|---|---|\n"
        "| FedAvg-Last | **87.40 ± 0.10** (87.02 ✓) |\n"
        "| a\\|b | <u>87.30</u> |\n"
        "| nothing |  |\n\n"
        "A note: s² < 1.\n"
    )


def test_latex():
    lines = small().latex().splitlines()
    assert r"\caption{Accuracy, 50\% \& more. A note: s$^2$ $<$ 1.}" in lines
    assert r"\begin{tabular}{lc}" in lines
    assert r"\toprule method & Digits\_1 \\" in lines
    assert r"FedAvg-Last & \shortstack{\textbf{87.40 $\pm$ 0.10}\\{\tiny 87.02 \checkmark}} \\" in lines
    assert r"a\textbar{}b & \underline{87.30} \\" in lines
    assert r"nothing &  \\" in lines


def test_latex_escapes_all_special_characters():
    assert latex("_#$~^{}\\") == r"\_\#\$\textasciitilde{}\textasciicircum{}\{\}\textbackslash{}"
