"""`fedobp doctor` and `fedobp tune`. Kernels are compiled in processes of their own: here they are interpreted."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from fedobp import doctor
from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.checks import HazardCheck
from fedobp.engine.kernels.tiles import shipped_table
from fedobp.engine.kernels.tuning import Timing, Tuned

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a card")
CARD = Card((8, 9), 99 * 1024, "NVIDIA L4")

# Debian has a package with Fashion-MNIST.
INSTALLED = ["digits", *(["fmnist"] if Path("/usr/share/datasets/fashion-mnist").is_dir() else [])]


def test_a_machine_without_a_card(command):
    said = command("doctor")
    assert (said.code, said.err) == (0, "")
    for text in ("packages", f"torch {torch.__version__}", "no card that torch", "off: no card can be used", "digits"):
        assert text in said.out
    assert len(said.out.splitlines()) < 30  # one screen


def test_json_holds_all_of_it(command, tmp_path):
    found = command("doctor", "--json").json
    assert found["packages"]["torch"] == torch.__version__
    assert found["device"] is None
    assert found["kernels"] is None
    assert found["data"] == {"folder": str(tmp_path / "data"), "problem": None, "datasets": INSTALLED}
    assert found["disk"][str(tmp_path)] > 0
    assert 0 < found["memory"]["free"] <= found["memory"]["total"]


def test_a_data_folder_that_cannot_be_read_is_said(command, tmp_path):
    (tmp_path / "data").write_text("a file")
    assert command("doctor", "--json").json["data"]["datasets"] == INSTALLED


def test_without_a_home_folder_it_still_answers(command, monkeypatch):
    monkeypatch.delenv("FEDOBP_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
    said = command("doctor")
    assert (said.code, said.err) == (0, "")
    for text in ("none: the data folder ~/.cache/fedobp/data has no home folder", "none: there is no home folder"):
        assert text in said.out
    assert command("doctor", "--json").json["data"]["folder"] is None


def test_a_data_folder_that_is_a_file_is_said(command, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("FEDOBP_DATA", str(tmp_path / "taken"))
    found = command("doctor", "--json").json
    assert found["data"]["problem"].endswith("taken is a file: give another --data-dir or FEDOBP_DATA")
    assert found["data"]["datasets"] == INSTALLED
    assert found["disk"][str(tmp_path / "taken")] == 0
    assert "taken is a file" in command("doctor").out


def test_names_with_brackets_are_shown_as_they_are(command, tmp_path):
    place = tmp_path / "[bold]data[red]"
    place.mkdir()
    assert f"{place}: digits" in command("doctor", "--data-dir", place).out.replace("\n", "").replace(" " * 15, "")


def test_a_machine_with_a_card(command, monkeypatch):
    card = {**CARD._asdict(), "count": 2, "memory": {"total": 24 << 30, "free": 20 << 30}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "card_of", lambda device: CARD)
    monkeypatch.setattr(doctor, "_device", lambda: card)
    monkeypatch.setattr("fedobp.engine.kernels.diagnosis.triton_problem", lambda *, launches: "Triton fails")
    said = command("doctor")
    assert "NVIDIA L4, compute capability 8.9, 21.5 GB of 25.8 GB free, 2 cards" in said.out
    assert "off in bf16: Triton fails" in said.out


def test_a_card_that_cannot_be_used(command, monkeypatch):
    def asked(device):
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for it in the manual")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
    said = command("doctor")
    assert said.code == 0
    text = " ".join(said.out.split())
    assert "the card cannot be used: CUDA error: CUDA-capable device(s) is/are busy or unavailable kernels" in text
    assert "off: no card can be used" in text


def test_a_card_without_free_memory(command, monkeypatch):
    def checked(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.67 GiB.")

    card = {**CARD._asdict(), "count": 1, "memory": {"total": 24 << 30, "free": 0}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "card_of", lambda device: CARD)
    monkeypatch.setattr(doctor, "_device", lambda: card)
    for name, value in (
        ("triton_problem", lambda *, launches: None),
        ("known_table", lambda card, precision: shipped_table((9, 0), "bf16")),
        ("_compiled", lambda card, table, precision: []),
        ("checked", checked),
    ):
        monkeypatch.setattr(f"fedobp.engine.kernels.diagnosis.{name}", value)
    monkeypatch.setattr("fedobp.engine.kernels.checks.hazard_check", lambda card: HazardCheck(True, "finds the race"))
    kernels = command("doctor", "--json").json["kernels"]
    assert not kernels["on"]
    assert "too little memory for the self-check (CUDA out of memory" in kernels["why"]


@pytest.fixture
def process(ran, tmp_path):
    """Run the command line in a process that compiles kernels, with an empty cache of tables."""

    def call(*arguments, **environment):
        kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        return ran("-m", "fedobp", *arguments, env={**kept, "XDG_CACHE_HOME": str(tmp_path), **environment})

    return call


def test_a_card_that_is_not_there(process):
    said = process("doctor", "--card", "8.6", "--json")
    assert (said.code, said.err) == (0, "")
    kernels = json.loads(said.out)["kernels"]
    assert kernels["on"]
    assert kernels["why"] == "every kernel compiles, fits and has no race (compiled, not run)"
    assert kernels["hazards"] == "a race cannot occur: products read registers on this card"
    assert kernels["table"]["source"] == "default"
    names = {one["kernel"] for one in kernels["kernels"]}
    assert {"conv1", "conv2", "dense", "head", "dense_backward", "conv2_inputs", "weights_backward", "update"} <= names
    assert all(0 <= one["shared_memory"] <= 99 * 1024 and not one["problems"] for one in kernels["kernels"])


def test_without_triton_it_says_what_is_missing(process, tmp_path):
    """As in a plain install with a CPU build of torch."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    said = process("doctor", "--card", "9.0", PYTHONPATH=str(tmp_path))
    assert (said.code, said.err) == (0, "")
    assert "off in bf16: the fused kernels need Triton, which CUDA builds" in " ".join(said.out.split())
    assert "shipped with fedobp, hash" in said.out


def test_a_triton_that_is_damaged_is_said(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", object())
    kernels = command("doctor", "--card", "9.0", "--json").json["kernels"]
    assert "need a working Triton, and this one fails" in kernels["why"]
    assert kernels["table"]["source"] == "shipped"


def test_interpreted_kernels_are_not_compiled(command):
    assert "while TRITON_INTERPRET is set" in command("doctor", "--card", "8.0", "--json").json["kernels"]["why"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["doctor", "--card", "7.5"], "unknown compute capability '7.5'"),
        (["doctor", "--precision", "bf61"], "did you mean 'bf16'"),
        (["tune", "--precision", "fp64"], "unknown value of --precision"),
        (["tune", "--seconds", "-1"], "--seconds must be between 0 and 86,400"),
        (["tune", "--seconds", "nan"], "--seconds must be between 0 and 86,400"),
        (["tune"], "fedobp tune needs a CUDA card that torch can use, and there is none here"),
        (["run", "--kernels", "of"], "unknown value of --kernels"),
        (["run", "--kernels", "on"], "--kernels on needs a CUDA device: use --kernels auto"),
        (["run", "--kernels", "on", "--engine", "serial"], "--kernels on needs the engine lanes"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, sentence, command, tmp_path):
    said = command(*arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert len(said.err.splitlines()) == 1
    assert sentence in said.err
    assert not list(tmp_path.rglob("config.toml"))


def test_the_table_of_a_search(command, monkeypatch, tmp_path):
    table = shipped_table((9, 0), "bf16")
    timings = [
        Timing(1, 50.0, 45.5, {"conv1": 3.5, "update": 2.0}),
        Timing(160, 1500.0, 1423.0, {"conv1": 139.0, "update": 65.0}),
    ]
    asked = []

    def tune(card, precision, device, seconds, start):
        asked.append((card, precision, seconds, start))
        return Tuned(table, 12.0, tmp_path / "tiles.json" if seconds else None, timings)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("fedobp.engine.kernels.tuning.tune", tune)
    monkeypatch.setattr(doctor, "card_of", lambda device: CARD)
    monkeypatch.setattr(doctor, "triton_problem", lambda: None)
    monkeypatch.setattr(doctor, "known_table", lambda card, precision: table)
    said = command("tune")
    assert said.code == 0
    for text in ("lanes", "45.5", "50.0", "139.0", "NVIDIA L4, bf16, 12 s", f"Table {table.hash}: kept in"):
        assert text in said.out
    found = command("tune", "--seconds", "0", "--precision", "tf32", "--json").json
    assert found["file"] is None
    assert found["table"]["hash"] == table.hash
    assert [one["lanes"] for one in found["timings"]] == [1, 160]
    assert asked == [(CARD, "bf16", 600.0, table), (CARD, "tf32", 0.0, table)]
    monkeypatch.setattr(doctor, "triton_problem", lambda: "the fused kernels need Triton 3.6 or newer")
    assert "error: the fused kernels need Triton 3.6 or newer" in command("tune").err
