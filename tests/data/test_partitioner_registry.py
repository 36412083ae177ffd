"""Partitions of one's own: functions, classes, references and entry points."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from fedobp import Config, Dataset, Federation, FedobpError
from fedobp.data import Partitioner, PartitionTask, partition, partitioner, with_client_changes
from fedobp.data.client_changes import ClientChange
from fedobp.options import option

Y = np.arange(60) % 4
CODE = '''
import numpy as np

def in_turn(task, *, first: int = 0):
    """Client c gets samples c, c + K, ..., from `first` on."""
    return [np.arange(first + client, len(task.y), task.clients) for client in range(task.clients)]

not_a_function = 3

def broken(task):
    return 1 / 0
'''


def in_turn(task, *, first: int = 0):
    return [np.arange(first + client, len(task.y), task.clients) for client in range(task.clients)]


@dataclass(frozen=True)
class Halves(Partitioner):
    """Half of the clients have rotated inputs."""

    name: ClassVar[str] = "halves"
    first: int = option(0, "first sample", low=0)

    def assign(self, task):
        return in_turn(task, first=self.first)

    def client_changes(self, task):
        return [ClientChange(turns=client % 2) for client in range(task.clients)]


@pytest.fixture
def module(install):
    found = {"in-turn": "in_turn", "iid": "in_turn", "three": "not_a_function"}
    values = {name: f"mypartitions:{value}" for name, value in found.items()}
    install("mypartitions", CODE, "fedobp.partitions", values)


def test_a_function_assigns_samples():
    shards = partition(Y, 3, kind=in_turn, options={"first": 6})
    assert [sorted(shard.samples) for shard in shards] == [list(range(6 + client, 60, 3)) for client in range(3)]
    assert [len(shard.test) for shard in shards] == [4, 4, 4]


def test_a_function_a_reference_and_an_entry_point_agree(module):
    made = [
        Federation(Config(partition=given, clients=5, partition_options={"first": 7}, rounds=1))
        for given in (in_turn, "mypartitions:in_turn", "in-turn")
    ]
    assert len({federation.partition for federation in made}) == 1
    assert made[0].config.partition_options == {"first": 7}
    assert Federation(Config(partition=in_turn, clients=5)).partition != made[0].partition


def test_a_class_may_change_inputs_and_share_no_samples():
    one = Federation(Config(partition=Halves, clients=4))
    other = Federation(Config(partition=Halves, clients=4, partition_options={"first": 1}), beside=one)
    plain = Federation(Config(partition=in_turn, clients=4))
    assert not np.array_equal(one.data.x.numpy(), plain.data.x.numpy())
    assert not np.array_equal(one.data.x.numpy(), other.data.x.numpy())
    shared = Federation(Config(partition=in_turn, clients=4, partition_options={"first": 1}), beside=plain)
    assert shared.data.x is plain.data.x


@pytest.mark.parametrize("vector", [np.array, list])
def test_a_class_may_give_new_labels_as_any_vector_of_whole_numbers(vector):
    class Relabelled(Halves):
        def client_changes(self, task):
            return [ClientChange(labels=vector([1, 0, 2, 3]))] * task.clients

    data = Dataset.from_data(np.ones((len(Y), 2)), Y)
    shards = partition(Y, 3, kind=Relabelled)
    assert [shard.change.labels for shard in shards] == [(1, 0, 2, 3)] * 3
    assert with_client_changes(data, shards).y.tolist() == [1, 0, 2, 3] * 15


@dataclass(frozen=True)
class Pairs(Halves):
    """Every second client is in a group of its own, without a change."""

    name: ClassVar[str] = "pairs"

    def client_changes(self, task):
        return [ClientChange(group=client % 2) for client in range(task.clients)]


def test_a_class_may_name_groups_alone():
    one, plain = Federation(Config(partition=Pairs, clients=4)), Federation(Config(partition=in_turn, clients=4))
    assert one.data.groups.tolist() == [0, 1, 0, 1]
    assert np.array_equal(one.data.x.numpy(), plain.data.x.numpy())
    assert plain.data.groups.tolist() == [0, 0, 0, 0]
    assert one.partition != plain.partition


def test_runs_with_a_function_are_recorded(tmp_path, module):
    config = Config(partition="mypartitions:in_turn", clients=4, rounds=1, epochs=1)
    assert Federation(config).run("fedavg").notes == ()
    result = Federation(Config(partition=lambda task: in_turn(task), clients=4, rounds=1, epochs=1)).run(
        "fedavg", out=tmp_path / "run"
    )
    assert "cannot be imported" in result.notes[0]
    assert "<lambda>" in (tmp_path / "run" / "config.toml").read_text()


def test_the_command_line_takes_a_reference_and_repeats_it(module, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ("--partition", "mypartitions:in_turn", "--partition-set", "first=3", "--clients", "5")
    shown = command("partition", *flags, "--save", "saved", "--json").json
    assert [one["train"] + one["test"] for one in shown["clients"]] == [359, 359, 359, 359, 358]
    command("run", *flags, "--rounds", "1", "--epochs", "1", "--out", "run")
    again = command("run", "--config", "run/config.toml", "--out", "again", "--json").json
    assert again["partition"] == shown["hash"]
    saved = command("run", "--partition-file", "saved", "--rounds", "1", "--epochs", "1", "--json").json
    assert saved["partition"] == shown["hash"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mypartitions:missing", "cannot be loaded: AttributeError"),
        ("nowhere.at:all", "cannot be loaded: ModuleNotFoundError"),
        ("mypartitions:", "write package.module:function"),
        ("mypartitions:not_a_function", "is no function of a task"),
        ("three", "is no function of a task"),
        ("in-trun", "did you mean 'in-turn'"),
        (3, "must be a text"),
        (int, "no subclass of `Partitioner`"),
    ],
)
def test_what_is_no_partition_is_refused(given, message, module):
    with pytest.raises(FedobpError, match=message):
        Federation(Config(partition=given, clients=5))


def test_a_built_in_name_stays_built_in(module):
    assert partitioner("iid").__module__ == "fedobp.data.partitioners"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([[0], [1]], "returns 2 parts for 3 clients"),
        (7, "returns a int for 3 clients"),
        ([[0, 1], [1], [2]], "assigns sample 1 to 2 clients"),
        ([[0], [1], [60]], "assigns sample 60, and samples are 0 to 59"),
        ([[0], [-1], [2]], "assigns sample -1"),
        ([[0.5], [1], [2]], "gives client 0 an array of shape"),
        ([[], [], []], "gives no client a sample"),
        ([[[0]], [1], [2]], "must be a vector of whole numbers"),
    ],
)
def test_wrong_assignments_are_named(found, message):
    with pytest.raises(FedobpError, match=message):
        partition(Y, 3, kind=lambda task: found)


def test_an_exception_names_the_partition_and_the_line(module):
    with pytest.raises(FedobpError, match=r"ZeroDivisionError.*partition 'mypartitions:broken'.*mypartitions.py:11"):
        Federation(Config(partition="mypartitions:broken", clients=5))


@dataclass(frozen=True)
class FewChanges(Halves):
    """Returns too few changes."""

    name: ClassVar[str] = "few"

    def client_changes(self, task):
        return [ClientChange()]


@dataclass(frozen=True)
class WrongChange(Halves):
    """Returns labels that are not there."""

    name: ClassVar[str] = "wrong"

    def client_changes(self, task):
        return [ClientChange(), ClientChange(labels=(1, 2, 3, 4)), ClientChange()]


@dataclass(frozen=True)
class TextChange(Halves):
    """Returns no change at all."""

    name: ClassVar[str] = "text"

    def client_changes(self, task):
        return ["turned", *[ClientChange()] * 2]


@dataclass(frozen=True)
class NoChanges(Halves):
    """Fails."""

    name: ClassVar[str] = "none"

    def client_changes(self, task):
        raise KeyError("turns")


@dataclass(frozen=True)
class Nameless(Partitioner):
    """Has no name."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (FewChanges, "must return one change for each client"),
        (
            WrongChange,
            "'wrong' gives client 1 the change .*: return a `ClientChange` .*, 4 labels or none",
        ),
        (TextChange, "partition 'text' gives client 0 the change turned: return a `ClientChange`"),
        (NoChanges, "KeyError: 'turns' .partition 'none'"),
        (Nameless, "has no text `name`"),
        (max, "is no function of a task"),
        (lambda task: [[1, [2]], [3], [4]], "gives client 0 no vector"),
        (lambda task: [np.array([2**64 - 1], np.uint64), [1], [2]], "assigns sample 18446744073709551615"),
    ],
)
def test_faults_of_a_partition_are_sentences(given, message):
    with pytest.raises(FedobpError, match=message):
        partition(Y, 3, kind=given)


def test_a_partition_cannot_change_the_labels():
    with pytest.raises(FedobpError, match="read-only"):
        partition(Y, 3, kind=lambda task: task.y.sort())


def test_a_saved_partition_of_an_entry_point_needs_no_code(module, command, tmp_path, monkeypatch):
    command("partition", "--partition", "in-turn", "--clients", "5", "--save", tmp_path / "saved")
    monkeypatch.setattr("fedobp.data.partitioner_registry.declared", lambda group: {})
    flags = ("--partition-file", tmp_path / "saved", "--rounds", "1", "--epochs", "1", "--json")
    assert command("run", *flags).json["partition"]


def test_options_are_checked():
    with pytest.raises(FedobpError, match="unknown option"):
        Federation(Config(partition=in_turn, clients=5, partition_options={"frist": 1}))
    with pytest.raises(FedobpError, match="must be a whole number"):
        Federation(Config(partition=in_turn, clients=5, partition_options={"first": 0.5}))


def test_some_clients_may_have_no_samples():
    shards = partition(Y, 3, kind=lambda task: [np.arange(8), [], list(range(8, 60))])
    assert [len(shard.samples) for shard in shards] == [8, 0, 52]


def test_a_task_has_what_a_partition_needs():
    seen = []

    def look(task):
        seen.append(task)
        return in_turn(task)

    partition(Y, 2, kind=look, alpha=0.3, seed=9, natural=Y)
    assert isinstance(seen[0], PartitionTask)
    assert (seen[0].clients, seen[0].alpha, seen[0].seed) == (2, 0.3, 9)
    for given in (seen[0].y, seen[0].natural):
        assert np.array_equal(given, Y)
        with pytest.raises(ValueError, match="read-only"):
            given[0] = 3
