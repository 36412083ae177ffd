"""Bad input at scale: 20,000 mutated files and messages; `python tests/fuzz.py --inputs 1000000` reads a million."""

import pytest
from fuzzing.campaign import LONGEST, MEMORY, Campaign, Fault, campaign, hostile, shares
from fuzzing.readers import READERS, Reader, Subject

from fedobp import FedobpError

COUNTS = shares(20_000, list(READERS))


@pytest.mark.parametrize("name", READERS)
def test_any_input_gives_a_value_or_a_sentence(name: str):
    """No other exception, no long message, no memory that a header made up, and nothing executed or written."""
    with campaign(name, seed=1) as one:
        for number in range(COUNTS[name]):
            one.run(number)
    assert one.tally.inputs == COUNTS[name]
    assert 0 < one.tally.accepted < one.tally.inputs  # mutants reach both ends of a reader


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch):
    """A function that fuzzes a function as a reader."""

    def run(read) -> None:
        made = Reader(lambda folder: Subject(folder, {"file": b"one 1\n"}, lambda: read(folder)), 1)
        monkeypatch.setitem(READERS, "tested", made)
        with campaign("tested", 1) as one:
            for number in range(100):
                one.run(number)

    return run


def refuse(text: str):
    def read(folder) -> None:
        if (folder / "file").read_bytes() != b"one 1\n":
            raise FedobpError(text)

    return read


def parse(folder) -> None:
    int((folder / "file").read_text(errors="replace").split()[1])


def reserve(folder) -> None:
    bytearray(b"1") * (MEMORY + 2**24 if b"1" not in (folder / "file").read_bytes() else 1)


def write_beside(folder) -> None:
    (folder.parent / "beside").touch()


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (parse, "Error instead of a sentence; .*repeat with: python tests/fuzz.py --reader tested --seed 1 --only"),
        (refuse("two\nlines"), "a message of 9 characters"),
        (refuse("a" * (LONGEST + 1)), "a message of 701 characters"),
        (reserve, "it took .* MiB"),
        (write_beside, r"reading has made \['beside'\]"),
    ],
)
def test_what_a_reader_may_not_do_is_found(reading, read, fault):
    reading(refuse("a sentence"))
    with pytest.raises(Fault, match=fault):
        reading(read)


def test_hostile_files_do_harm_to_those_who_unpickle_them(tmp_path, ran):
    """The marker that no reader makes: an array of objects, as NumPy reads it where it may."""
    for at, content in enumerate(hostile(tmp_path / "marker")):
        (tmp_path / str(at)).write_bytes(content)
    assert ran("-c", "import pickle; pickle.load(open('0', 'rb'))", cwd=tmp_path).code == 0
    (tmp_path / "marker").unlink()
    ran("-c", "import numpy; numpy.load('1', allow_pickle=True)", cwd=tmp_path)
    assert (tmp_path / "marker").exists()


def test_shares_add_up():
    assert sum(COUNTS.values()) == 20_000
    assert min(COUNTS.values()) > 0


def test_a_number_makes_the_same_input_again(tmp_path):
    first, again = (Campaign("csv", 1, tmp_path / name) for name in ("first", "again"))
    different = {str(sorted(first.input(number).items())) for number in range(50)}
    assert different == {str(sorted(again.input(number).items())) for number in range(50)}
    assert len(different) > 45
