"""Separators, decimal commas and encodings of CSV files."""

import csv

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importer_cases import imported, refused

from fedobp.data import csv_format as module
from fedobp.data.columns import TableRules
from fedobp.data.csv_format import csv_format

TABLE = "label,a,b\nx,1.5,2\ny,3,4\n"


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_first_lines_tell_the_separator(folder, source, separator):
    found = imported("mine", source(TABLE.replace(",", separator)), folder)
    assert (found.x.tolist(), found.labels) == ([[1.5, 2], [3, 4]], ("x", "y"))


@pytest.mark.parametrize(
    ("text", "separator"),
    [
        ("label;size, cm\nx;1,5\ny;2,5\n", ";"),  # the comma makes two columns as well, but none called label
        ("label;size, cm, or in\nx;1,5\n", ";"),  # the comma makes more
        ("a;b;label\n1,5;2,5;x\n2,5;3,5;y\n", ";"),  # no comma in the names
        ("a,b;c,d\n1,2;3,4\n", ","),  # no label: the comma makes more columns
        ('"a;b",label\n"1;2",x\n', ","),  # in quotes
        ("label,a\n0,1,2\n1,2\n", ","),  # ragged, but nothing else separates
        ("label\n1\n", ","),
        ("\n\nlabel|a\n", "|"),
        ("", ","),
        ('label,"', ","),
    ],
)
def test_a_separator_makes_a_column_of_the_label(source, text, separator):
    assert csv_format(source(text), TableRules("label")).separator == separator


def test_long_first_lines_are_cut(source, monkeypatch):
    monkeypatch.setattr(module, "_HEAD_BYTES", 20)
    assert csv_format(source("label;a\n" + "1;" + "2" * 9 + ";3,3,3\n"), TableRules("label")).separator == ";"
    assert csv_format(source("a|b|c|d|e|f|g|h|i|label\n"), TableRules("label")).separator == "|"
    assert csv_format(source("label;a\nx;2\ny;123,456\n"), TableRules("label")).decimal == "."  # cut to 123,4
    assert csv_format(source("label;a\nx;2,5\ny;123,456\n"), TableRules("label")).decimal == ","


@pytest.mark.parametrize(("given", "written"), [("#", "#"), (" ", " "), ("tab", "\t"), (r"\t", "\t"), ("\t", "\t")])
def test_a_separator_can_be_given(folder, source, given, written):
    found = imported("mine", source(TABLE.replace(",", written)), folder, separator=given)
    assert found.x.tolist() == [[1.5, 2], [3, 4]]


@pytest.mark.parametrize("given", ["", "::", '"', "\n"])
def test_other_separators_are_refused(folder, source, given):
    refused("--separator is '.*': give one character, such as ; or |, or the word tab", source(TABLE), folder,
            separator=given)  # fmt: skip


def test_a_wrong_separator_is_named_with_the_row(folder, source):
    text = source("label;a\nx;1\ny;2;3\n")
    refused("has 3 cells in row 2 and 2 columns: put texts with semicolons into quotes, .* another --separator", text,
            folder)  # fmt: skip


def test_spaces_after_separators_are_skipped(folder, source):
    found = imported("mine", source('label, a, b\nx, 1, "p, q"\ny, 2, r\n'), folder)
    assert (found.labels, found.x.tolist()) == (("x", "y"), [[1, 1, 0], [2, 0, 1]])


def test_files_called_tsv_and_txt_are_read(folder, tmp_path):
    for suffix in ("tsv", "txt"):
        (tmp_path / f"t.{suffix}").write_text(TABLE.replace(",", "\t"))
        assert imported(suffix, tmp_path / f"t.{suffix}", folder).x.shape == (2, 2)


# Decimal commas.


def test_the_first_lines_tell_a_decimal_comma(folder, source):
    found = imported("mine", source("label;a;b\nx;1,5;,5\ny;-3;-1,5e2\n"), folder)
    assert found.x.tolist() == [[1.5, 0.5], [-3, -150]]


def test_thousands_are_not_taken_for_decimals(folder, source):
    text = source("label;a\nx;1,500\ny;2,500\n")
    refused("has '1,500' in row 1 of column 'a', which is no number: remove separators of thousands, or give --decimal",
            text, folder)  # fmt: skip
    assert imported("mine", text, folder, decimal=",").x.tolist() == [[1.5], [2.5]]


def test_points_and_commas_in_one_file_are_refused(folder, source):
    text = source("label;a;b\nx;1,5;2.5\ny;2;3\n")
    refused("has '1,5' in row 1 of column 'a', which is no number: .* give --decimal ,", text, folder)
    refused("has '2.5' in row 1 of column 'b', although commas are the decimal points", text, folder, decimal=",")
    found = imported("mine", text, folder, decimal=",", categories="b")
    assert found.x.tolist() == [[1.5, 1, 0], [2, 0, 1]]


def test_a_decimal_comma_between_commas_must_be_quoted_and_given(folder, source):
    text = source('label,a\nx,"1,5"\ny,2\n')
    refused("has '1,5' in row 1 of column 'a', which is no number: .* give --decimal ,", text, folder)
    refused("--decimal is 'comma': give . or ,", text, folder, decimal="comma")
    assert imported("mine", text, folder, decimal=",").x.tolist() == [[1.5], [2]]


@pytest.mark.parametrize("cell", ["1.234,56", "1.234.567", "-12.345.678,9"])
@pytest.mark.parametrize("first", ["3,5", "7"])
def test_thousands_with_points_are_refused(folder, source, cell, first):
    text = source(f"label;a\nx;{first}\ny;{cell}\n")
    sentence = f"has '{cell}' in row 2 of column 'a', which is no number: remove separators of thousands$"
    refused(sentence, text, folder)
    refused(sentence, text, folder, decimal=",")
    assert imported("mine", text, folder, categories="a").x.sum() == 2


def test_labels_and_clients_have_decimal_commas_too(folder, source):
    refused("fractions in the label column 'label', such as 0.5: .*, unlike in row 1",
            source("label;a\n0,5;1,5\n1,5;2\n"), folder)  # fmt: skip
    found = imported("mine", source("label;a;ward\n10,0;1,5;2,0\n9,0;2;10\n"), folder, client="ward")
    assert (found.labels, found.client_names) == ((9, 10), ("2", "10"))
    found = imported("names", source("label;a\n1,0;1,5\nx,y;2\n"), folder)
    assert found.labels == ("1,0", "x,y")


# Encodings.


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_mark_tells_the_encoding(folder, source, encoding):
    found = imported("mine", source("größe;label\n1,5;ä\n2;ö\n", encoding), folder)
    assert (found.labels, found.x.tolist()) == (("ä", "ö"), [[1.5], [2]])


def test_other_encodings_are_given(folder, source):
    for encoding in ("latin-1", "cp1252", "utf-16-le", "mac-roman"):
        assert imported(encoding, source("label,a\nä,1\nö,2\n", encoding), folder, encoding=encoding).labels == (
            "ä",
            "ö",
        )
    marked = source("\ufefflabel,a\nä,1\nö,2\n", "utf-16-be")
    assert imported("marked", marked, folder, encoding="utf-16-be").labels == ("ä", "ö")
    quoted = source('"label",a\nä,1\nö,2\n', "utf-8-sig")
    assert imported("utf-8", quoted, folder, encoding="UTF8").labels == ("ä", "ö")


@pytest.mark.parametrize("padding", [0, 5000])
def test_a_byte_that_is_not_utf8_is_named_with_its_row_and_column(folder, source, padding):
    rows = "".join(f'x,"1\n","{row}"\n' for row in range(padding))
    text = source(f"label,a,b\n{rows}x,1,é\ny,2,z\n", "latin-1")
    refused(
        rf"cannot be read as a CSV file in UTF-8 \(a character that is not in row {padding + 1} of column 'b'\): give "
        "its encoding, such as --encoding latin-1 .*, or save it again, in UTF-8",
        text,
        folder,
    )
    refused("in the line of its column names", source("lábel,a\nx,1\n", "latin-1"), folder)


def test_what_does_not_fit_the_given_encoding_is_refused(folder, source):
    refused(r"CSV file in ascii \(a character that is not in row 2 of column 'label'\)",
            source("label,a\nx,1\nä,2\n"), folder, encoding="ascii")  # fmt: skip
    (path := source("")).write_bytes("label,a\nx,1\ny,2\n".encode("utf-16")[:-1])
    refused("cannot be read as a CSV file in utf-16", path, folder)
    refused("has NUL characters in its first lines: give its encoding, such as --encoding utf-16-le",
            source("label,a\nx,1\n", "utf-16-le"), folder)  # fmt: skip


@pytest.mark.parametrize("encoding", ["", "utf-9", "base64", "idna", "a\0b", "undefined"])
def test_unknown_encodings_are_refused(folder, source, encoding):
    refused("--encoding is '.*', which Python does not know: give a name such as utf-8", source(TABLE), folder,
            encoding=encoding)  # fmt: skip


def test_an_encoding_that_cannot_read_the_file_is_refused(folder, source):
    refused("cannot be read as a CSV file in punycode .*: give its encoding", source("label,a\nä-b,1\n"), folder,
            encoding="punycode")  # fmt: skip


@pytest.mark.parametrize("end", [-1, -3, -5])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_that_ends_within_a_character_names_the_row(folder, source, encoding, end):
    (path := source("")).write_bytes("label,a\nx,1\ny,22\n".encode(encoding)[:end])
    refused(r"a character that is not in row 2 of column 'a'", path, folder, encoding=encoding)


def test_a_bad_character_of_utf_16_names_the_row(folder, source):
    (path := source("")).write_bytes("label,a\nx,1\n?,2\n".encode("utf-16-le").replace(b"?\0", b"\0\xdc"))
    refused("in utf-16-le .*a character that is not in row 2 of column 'label'", path, folder, encoding="utf-16-le")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "gb18030"])
def test_a_mark_before_a_quote_is_skipped(folder, source, encoding):
    text = source('\ufeff"label, one",a\nä,1\nö,2\n', encoding)
    assert imported("mine", text, folder, encoding=encoding, label="label, one").labels == ("ä", "ö")


@pytest.mark.parametrize("before", [0, 5000])
@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ('x,"2\ny,3\n', "a quote in row {} that is not closed: close it"),
        ('x,"2"5\ny,3\n', "characters after a closing quote in row {}: put the whole cell into quotes"),
        ('x,"2\ny,3\nz,"4"\n', "characters after a closing quote in row {}: put the whole cell into quotes"),
        (f"x,{'2' * 131073}\n", "a cell of more than 131,072 characters in row {}: close its quote"),
        (f'x,"{"y,3 " * 50000}\n', "a cell of more than 131,072 characters in row {}: close its quote"),
    ],
)
def test_a_broken_record_is_named_by_the_row_where_it_begins(folder, source, before, record, sentence):
    text = source("label,a\n" + 'x,"1\n"\n' * before + record)
    refused(f"table.csv has {sentence.format(before + 1)}", text, folder)


def test_a_quote_in_the_names_that_is_not_closed_is_refused(folder, source):
    refused("has a quote in the line of column names that is not closed", source('label,"a\nx,1\n'), folder, label="x")


TEXTS = st.text(st.sampled_from("ab ,;|\t\"'\né"), max_size=5)


@settings(max_examples=100, derandomize=True)
@given(
    cells=st.lists(st.tuples(TEXTS, st.integers(-99, 99)), min_size=2, max_size=6),
    separator=st.sampled_from(",;|\t"),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
)
def test_what_the_csv_module_writes_is_read(tmp_path_factory, cells, separator, encoding):
    folder = tmp_path_factory.mktemp("any")
    rows = [(f"z{text}z", number) for text, number in cells] + [("first", 0), ("second", 1)]
    with (folder / "t.csv").open("w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=separator).writerows([("label", "a"), *rows])
    found = imported("mine", folder / "t.csv", folder)
    assert [found.labels[at] for at in found.y] == [text for text, _ in rows]
    np.testing.assert_array_equal(found.x[:, 0], [number for _, number in rows])
