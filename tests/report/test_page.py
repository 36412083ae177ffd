"""The report: its structure, its numbers, and that nothing in it comes from elsewhere."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from saved import accuracy, clients_of, write_run

from fedobp.errors import FedobpError
from fedobp.files import read_checked_json
from fedobp.report.page import MARK, report_html, write_report
from fedobp.saved_runs import find_runs
from fedobp.storage import write_result

VOID = {"meta", "br", "hr", "img", "input", "link"}
LOADS = {"src", "srcset", "data", "poster", "action", "formaction", "background", "ping", "manifest"}


class Page(HTMLParser):
    """A page, read strictly: every element is closed in order, and every id is there once."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self.tables = [], {}, []
        self._open, self.ids = [], []
        self.feed(text)
        self.close()
        assert self._open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if "id" in dict(attributes):
            self.ids.append(dict(attributes)["id"])

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        for tag in set(self._open):
            self.texts[tag] = self.texts.get(tag, "") + data
        if self._open and ("td" in self._open or "th" in self._open):
            bold = "strong" in self._open
            self.tables[-1][-1][-1] += f"*{data}*" if bold else data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(*folders, **more):
    return Page(report_html(find_runs(folders), **more))


@pytest.fixture
def study(tmp_path):
    """Three methods with two seeds each: FedOBP keeps 3 to 6 parameters a client, the others do not record it."""
    for seed, up in ((1, 0.0), (2, 4.0)):
        write_run(tmp_path, "fedobp", seed, 80 + up, clients=clients_of(4, lambda i: 70.0 + 10 * i))
        write_run(tmp_path, "fedavg", seed, 60 - up, clients=clients_of(4, lambda i: 75.0))
        write_run(tmp_path, "local", seed, 70.0, clients=clients_of(4, lambda i: 100.0 if i else None))
    return tmp_path


@pytest.mark.essential
def test_the_summary_has_means_and_deviations_over_seeds_and_marks_the_best(study):
    table = page_of(study).tables[0]
    heads = ["Method", "Pooled", "Client mean", "Worst tenth", "Smallest quarter"]
    heads += ["Last", "Personal", "Down", "Up", "Time"]
    costs = ["3", "1.0 kB", "500 B", "1.5 ± 0.0 s"]
    assert table == [
        heads,
        # The deviation of 60 and 56, and of 80 and 84, with n - 1: 4 / sqrt(2).
        ["fedavg", "58.00 ± 2.83", "57.00 ± 2.83", "48.00 ± 2.83", "75.00 ± 0.00", "63.00 ± 2.83", *costs],
        ["fedobp", "*82.00 ± 2.83*", "*81.00 ± 2.83*", "*72.00 ± 2.83*", "70.00 ± 0.00", "*87.00 ± 2.83*", *costs],
        ["local", "70.00 ± 0.00", "69.00 ± 0.00", "60.00 ± 0.00", "*100.00 ± 0.00*", "75.00 ± 0.00", *costs],
    ]


def test_new_clients_have_a_column_for_each_way_to_serve_them(tmp_path):
    for method, columns in (("fedavg", {"served": 50.0, "visited": 50.0, "last": 90.0}),
                            ("fedobp", {"served": 40.0, "visited": 80.0, "last": 90.0, "visited_twice": 85.0,
                                        "unlabelled": 60.0})):  # fmt: skip
        folder = write_run(tmp_path, method, holdout_clients=1)
        values = read_checked_json(folder / "result.json")
        write_result(folder, values | {"new_clients": {name: accuracy(pooled) for name, pooled in columns.items()}})
    heads, *rows = page_of(tmp_path).tables[0]
    first = heads.index("New clients")
    assert heads[first : first + 4] == ["New clients", "Without labels", "After one round", "After two"]
    assert [row[first : first + 4] for row in rows] == [["*50.00*", "-", "50.00", "-"],
                                                        ["40.00", "*60.00*", "*80.00*", "*85.00*"]]  # fmt: skip


def test_the_page_is_well_formed_and_loads_nothing(study):
    text = report_html(find_runs([study]))
    page = Page(text)
    assert "http://" not in text.replace('"http://www.w3.org/2000/svg"', "")  # a name for createElementNS
    assert not re.search(r"https:|@import|url\((?!#)", text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not LOADS & set(attributes) or tag == "meta", (tag, attributes)
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "xlink:href"):
                assert value.startswith(("#", "data:image/png;base64,")), value
    targets = {
        attributes["href"][1:] for tag, attributes in page.elements if attributes.get("href", "").startswith("#")
    }
    assert targets | set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    [policy] = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")


def test_a_screen_reader_finds_language_title_headings_captions_and_a_text_for_every_figure(study):
    page = page_of(study, title="Mine")
    assert page.all("html") == [{"lang": "en"}]
    assert page.texts["title"] == page.texts["h1"] == "Mine"
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert len(page.all("caption")) == len(page.all("table")) == 2
    assert {head.get("scope") for head in page.all("th")} == {"col", "row"}
    pictures = [svg for svg in page.all("svg") if "aria-hidden" not in svg]
    # Accuracy twice (wide and narrow), one dot plot, three stacks, three heat maps, bytes, time.
    assert len(pictures) == 2 + 1 + 3 + 3 + 2
    assert all(svg["role"] == "img" and len(svg["aria-label"]) > 30 for svg in pictures)
    assert pictures[0]["aria-label"] == (
        "Pooled accuracy over rounds on digits, Dirichlet(0.1), 4 clients. At the last evaluation: fedavg 58.00, "
        "fedobp 82.00 and local 70.00."
    )
    assert pictures[2]["aria-label"] == (
        "Accuracy of fedobp on each of 4 clients, sorted: from 70.0 to 100.0, median 85.0; above fedavg on 3 of 4 "
        "clients, below on 1; above local on 0 of 3 clients, below on 2."
    )
    buttons = [one for one in page.all("button") if "data-toggle" in one]
    assert [(one["aria-pressed"], one["data-toggle"]) for one in buttons] == [
        ("true", "0"),
        ("true", "1"),
        ("true", "2"),
    ]


def test_configuration_and_protocol_are_sentences(study):
    text = page_of(study).texts["li"]
    assert "4 clients, 2 in each round, 4 rounds." in text
    assert "The data is digits, assigned to clients by Dirichlet(0.1);" in text
    assert "5 local epochs of SGD in batches of 32, with a constant learning rate of 0.01." in text
    assert "The network is mlp, with 10 parameters." in text
    assert "Seeds 1 and 2 of initial weights, sampling and batches; the partition has the same seed." in text
    assert "Reported is round 4 (protocol default)" in text
    assert "a pooled accuracy of 50.00." in text


def test_the_papers_protocol_says_that_it_chooses_on_the_test_set(tmp_path):
    text = page_of(write_run(tmp_path, rounds=200, protocol="paper")).texts["li"]
    assert "Reported is the best of rounds 100, 200 (protocol paper)" in text
    assert "The round is chosen on the test samples" in text


def test_provenance_is_told_once_if_it_is_the_same_and_by_run_where_it_differs(study):
    page = page_of(study)
    assert "fedobp 9.8, torch 7.6, triton none, python 3.11, device abacus, precision fp32" in page.texts["p"]
    heads, first, *_ = page.tables[1]
    assert heads == ["Run", "Seed", "Settings hash", "Partition hash", "Launch"]
    assert first == ["fedavg-seed1", "1", "hash1", "partition of see", "1"]
    assert "Launch 1: fedavg-seed1, other-seed1." in page.texts["li"]


def test_sections_share_data_and_clients_and_an_overview_compares_them(tmp_path):
    for alpha, up in ((0.1, 0.0), (0.5, 10.0)):
        for method, pooled in (("fedavg", 50.0), ("fedobp", 60.0 - 2 * up)):
            write_run(tmp_path / f"{alpha}", method, pooled=pooled, alpha=alpha)
    write_run(tmp_path / "0.1", "fedobp", pooled=70.0, lr=0.5, name="fast")
    page = page_of(tmp_path / "0.5", tmp_path / "0.1")
    first, second = "digits, Dirichlet(0.1), 4 clients", "digits, Dirichlet(0.5), 4 clients"
    assert page.tables[0] == [
        ["Method", first, second],
        ["fedavg, lr=0.01", "50.00", "*50.00*"],
        ["fedobp, lr=0.01", "60.00", "40.00"],
        ["fedobp, lr=0.5", "*70.00*", "-"],
    ]
    assert [row[0] for row in page.tables[1]] == ["Method", "fedavg, lr=0.01", "fedobp, lr=0.01", "fedobp, lr=0.5"]
    assert [row[0] for row in page.tables[2]] == ["Method", "fedavg, lr=0.01", "fedobp, lr=0.01"]
    assert first in page.texts["h2"]
    assert second in page.texts["h2"]


def test_the_same_settings_and_seed_are_one_sample(tmp_path):
    write_run(tmp_path / "a", pooled=80.0)
    write_run(tmp_path / "b", pooled=80.0)
    page = page_of(tmp_path / "a", tmp_path / "b")
    assert page.tables[0][1][:2] == ["fedavg", "80.00"]
    assert "1 run with settings and seeds of others given: left out." in page.texts["p"]


def test_an_old_run_without_clients_and_times_leaves_out_figures_with_a_sentence(tmp_path):
    folder = write_run(tmp_path, timings=False, provenance=False)
    (folder / "metrics.jsonl").unlink()
    written = json.loads((folder / "result.json").read_text())
    older = {name: value for name, value in written.items() if name not in ("files", "format", "sha256")}
    (folder / "result.json").write_text(json.dumps(older))
    page = page_of(folder)
    assert "These runs have no clients.csv" in page.texts["p"]
    assert "These runs have no timings.jsonl" in page.texts["p"]
    assert "fedavg: not recorded." in page.texts["li"]
    assert "torch not recorded" in page.texts["p"]
    assert len([svg for svg in page.all("svg") if svg.get("role") == "img"]) == 3  # accuracy twice, bytes


def test_without_fedavg_and_local_the_dots_stand_alone_and_a_sentence_says_so(tmp_path):
    page = page_of(write_run(tmp_path, "fedper", clients=clients_of(3, float)))
    assert "No run of FedAvg and Local-Only on these clients is given to compare with." in page.texts["p"]
    [dots] = [path for path in page.all("path") if "data-dots" in path]
    assert dots["d"].count("h0") == 3


def test_clients_of_other_partitions_are_not_mixed(study, tmp_path):
    page = page_of(study)
    assert "These are the clients of partition seed 1; other seeds have other clients." in page.texts["p"]
    only = page_of(study / "fedobp-seed1", study / "fedavg-seed2")
    assert "Not recorded on these clients: fedobp." in only.texts["p"]  # fedavg's are those of seed 2


EVIL = "</script><script>alert(1)</script><b>&\"'$x$ 数据"


def test_texts_of_the_user_are_escaped_everywhere(tmp_path):
    for method in ("fedavg", "fedobp"):
        write_run(tmp_path, method, dataset=EVIL, clients=clients_of(3, float), model=EVIL, name=f"{method} <i>")
    text = report_html(find_runs([tmp_path]), title=EVIL, notes=[EVIL])
    page = Page(text)
    assert page.texts["title"] == page.texts["h1"] == EVIL
    assert EVIL in page.texts["h2"]
    assert EVIL in page.texts["p"]
    assert text.count("<script>") == 1
    assert "<b>" not in text
    assert page.all("i") == [{"style": "background: var(--c0)"}, {"style": "background: var(--c1)"}]
    [svg, *_] = [svg for svg in page.all("svg") if svg.get("role") == "img"]
    assert EVIL in svg["aria-label"]


@pytest.mark.parametrize(
    "evil", [EVIL, '"><img src=x onerror=alert(1)>', "' onload='alert(1)", "{{ 7 * 7 }}", "]]>-->"]
)
def test_names_in_the_files_of_runs_are_escaped(tmp_path, evil):
    """Of tensors, methods' options, partitions, versions and devices: a run's folder may come from anyone."""
    for seed in (1, 2):
        rows = [{**row, f"personal.{evil}": 1} for row in clients_of(3, float)]
        folder = write_run(
            tmp_path,
            "fedobp",
            seed,
            clients=rows,
            options={"mode": evil},
            partition=evil,
            partition_options={"a": evil},
        )
        result = read_checked_json(folder / "result.json")
        del result["files"]
        result["provenance"] |= dict.fromkeys(("fedobp", "torch", "device", "engine", "precision", "protocol"), evil)
        result |= {"labels": [evil, evil], "notes": [evil], "partition": evil}
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines[-1]["personal_by_tensor"][evil] = 1.0
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_result(folder, result)
    text = report_html(find_runs([tmp_path]))
    page = Page(text)
    assert evil in "".join(page.texts.values())
    assert len(page.all("script")) == text.count("<script>") + text.count("<script type=")
    assert text.count("<script>") == 1
    assert not page.all("img")
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


def test_numbers_in_labels_keep_their_digits_in_figures(tmp_path):
    for q in (0.99, 0.999):
        write_run(tmp_path, options={"q": q}, method="fedobp", name=f"q{q}", clients=clients_of(4, lambda i: 70.0 + i))
    text = report_html(find_runs([tmp_path]))
    labels = re.findall(r"<text[^>]*>(?:clients, sorted by )?fedobp, q=([\d.]+)</text>", text)
    assert labels.count("0.99") == labels.count("0.999") > 0


def test_the_same_runs_give_the_same_bytes(study):
    assert report_html(find_runs([study])) == report_html(find_runs([study]))
    assert report_html(find_runs([study])) == report_html(find_runs(sorted(study.iterdir(), reverse=True)))


def test_twenty_methods_on_a_thousand_clients_stay_small(tmp_path):
    options = [{"q": 0.9 + at / 1000} for at in range(18)]
    for at, more in enumerate(options):
        rows = clients_of(1000, lambda i, at=at: (i * (at + 7)) % 101, lambda i: (i % 5, i % 61, i % 3))
        write_run(tmp_path, "fedobp", clients=rows, options=more, name=f"fedobp{at}")
    for method in ("fedavg", "local"):
        write_run(tmp_path, method, clients=clients_of(1000, lambda i: i % 90))
    text = report_html(find_runs([tmp_path]))
    assert len(text) < 4_000_000
    page = Page(text)
    dots = [path["d"].count("h0") for path in page.all("path") if "data-dots" in path]
    assert dots == [1000] * 3 * 18
    looks = {(svg_path["style"]) for svg_path in page.all("path") if "stroke-dasharray" in svg_path.get("style", "")}
    assert len(looks) >= 20  # curves differ in colour or dashes


def test_write_report_replaces_a_report_and_nothing_else(study, tmp_path_factory):
    runs, place = find_runs([study]), tmp_path_factory.mktemp("out")
    path = write_report(place / "report.html", runs, title="One")
    assert MARK in path.read_text()
    write_report(path, runs, title="Two")
    assert "<h1>Two</h1>" in path.read_text()
    path.write_text("mine")
    with pytest.raises(FedobpError, match="was not made by this command, so it is not overwritten"):
        write_report(path, runs)
    assert path.read_text() == "mine"
    assert [one.name for one in place.iterdir()] == ["report.html"]


def test_no_run_is_an_error():
    with pytest.raises(FedobpError, match="there is no finished run to report"):
        report_html([])
