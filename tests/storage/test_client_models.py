"""Saved models: small files, ordinary state dicts, the same predictions."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedobp import Config, Federation, FedobpError, load_state_dict
from fedobp.data import data_dir, load, partition
from fedobp.models import Layout
from fedobp.storage import ClientModels
from fedobp.storage.tensor_file import read_tensors, write_tensors

LAYOUT = Layout(("fc.weight", "classifier.bias"), ((2, 3), (4,)))
SHARED = torch.arange(10.0)


def personal(*entries, size=10):
    """A model that differs from the shared one in these entries, and their mask."""
    mine = torch.zeros(size, dtype=torch.bool)
    mine[list(entries)] = True
    shared = torch.arange(float(size))
    return torch.where(mine, -shared - 1, shared), mine


def saved(folder, clients=True, **models):
    """Save models of clients 0, 1, ... and return what was made."""
    made = ClientModels(LAYOUT, SHARED)
    for client, entries in enumerate(models.values()):
        made.add(client, *personal(*entries))
    made.save(folder / "models", clients=clients, about={"model": "toy"})
    return made


# Small examples.


def test_few_entries_are_kept_as_positions_and_values(tmp_path):
    saved(tmp_path, none=(), two=(1, 7), half=(0, 2, 4, 6, 8))
    found = load_file(tmp_path / "models" / "clients.safetensors")
    assert set(found) == {f"{client}.{part}" for client in range(3) for part in ("index", "value")}
    assert found["0.index"].tolist() == found["0.value"].tolist() == []
    assert found["1.index"].tolist() == [1, 7]
    assert found["1.value"].tolist() == [-2, -8]
    assert found["2.index"].tolist() == [0, 2, 4, 6, 8]


def test_more_than_half_of_the_entries_are_kept_as_a_whole_vector(tmp_path):
    saved(tmp_path, six=range(6), all=range(10))
    found = load_file(tmp_path / "models" / "clients.safetensors")
    assert set(found) == {"0.vector", "1.vector"}
    assert found["0.vector"].tolist() == [-1, -2, -3, -4, -5, -6, 6, 7, 8, 9]


def test_the_global_file_is_an_ordinary_state_dict_with_a_description(tmp_path):
    saved(tmp_path, two=(1, 7))
    path = tmp_path / "models" / "global.safetensors"
    found = load_file(path)
    assert found["fc.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["classifier.bias"].tolist() == [6, 7, 8, 9]
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["fedobp"])
    assert about["model"] == "toy"
    assert about["names"] == ["fc.weight", "classifier.bias"]
    assert about["clients"] == [0]


@pytest.mark.essential
def test_every_model_comes_back_in_the_layouts_order(tmp_path):
    made = saved(tmp_path, none=(), two=(1, 7), eight=range(8))
    expected = {
        None: ([[0, 1, 2], [3, 4, 5]], [6, 7, 8, 9]),
        0: ([[0, 1, 2], [3, 4, 5]], [6, 7, 8, 9]),
        1: ([[0, -2, 2], [3, 4, 5]], [6, -8, 8, 9]),
        2: ([[-1, -2, -3], [-4, -5, -6]], [-7, -8, 8, 9]),
    }
    for client, (weight, bias) in expected.items():
        for found in (made.state_dict(client), load_state_dict(tmp_path, client)):
            assert list(found) == ["fc.weight", "classifier.bias"]
            assert found["fc.weight"].tolist() == weight
            assert found["classifier.bias"].tolist() == bias


def test_clients_are_told_apart_by_their_whole_number(tmp_path):
    made = ClientModels(LAYOUT, SHARED)
    for client in (1, 11, 21, 2):
        made.add(client, *personal(client % 10, client // 10))
    made.save(tmp_path / "models", clients=True, about={})
    for client in (1, 11, 21, 2):
        for name, tensor in made.state_dict(client).items():
            assert torch.equal(load_state_dict(tmp_path, client)[name], tensor)


@pytest.mark.parametrize("entries", [(3,), range(8)])
def test_a_state_dict_is_a_copy(entries):
    made = ClientModels(LAYOUT, SHARED)
    theta, mine = personal(*entries)
    made.add(0, theta, mine)
    theta.zero_()
    for client in (None, 0):
        before = made.state_dict(client)["fc.weight"].clone()
        made.state_dict(client)["fc.weight"].zero_()
        assert torch.equal(made.state_dict(client)["fc.weight"], before)
    assert made.state_dict(0)["fc.weight"][1, 0] == -4


def test_a_model_that_differs_outside_its_personal_entries_is_a_bug():
    theta, mine = personal(1, 7)
    theta[3] += 1
    with pytest.raises(AssertionError, match="must be the global model's"):
        ClientModels(LAYOUT, SHARED).add(0, theta, mine)


def test_without_clients_only_the_global_model_is_left():
    layout = Layout(("classifier.weight",), ((10,),))
    models = ClientModels(layout, torch.zeros(10))
    models.add(0, torch.ones(10), torch.ones(10, dtype=torch.bool))
    alone = models.without_clients()
    assert alone.size == models.size == 10
    assert torch.equal(alone.state_dict()["classifier.weight"], torch.zeros(10))
    with pytest.raises(FedobpError, match="no model of client 0"):
        alone.state_dict(0)


def test_personal_files_are_small(tmp_path):
    size, clients = 100_000, 20
    made = ClientModels(Layout(("classifier.weight",), ((size,),)), torch.arange(float(size)))
    for client in range(clients):
        made.add(client, *personal(*range(client, client + 10), size=size))
    made.save(tmp_path / "models", clients=True, about={})
    # Ten entries of 8 + 4 bytes each and about 150 bytes of header per client, against 8 MB for whole models.
    assert (tmp_path / "models" / "clients.safetensors").stat().st_size < clients * (120 + 250)
    assert (tmp_path / "models" / "global.safetensors").stat().st_size < 4 * size + 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_keep_their_precision(tmp_path, dtype):
    shared = (torch.arange(10, dtype=torch.float64) / 3).to(dtype)
    mine = torch.arange(10) == 2
    made = ClientModels(LAYOUT, shared)
    made.add(0, torch.where(mine, -shared / 7, shared), mine)
    made.save(tmp_path / "models", clients=True, about={})
    found = load_state_dict(tmp_path, 0)["fc.weight"]
    assert found.dtype == dtype
    assert found[0, 2] == -shared[2] / 7


# Refusals.


def test_the_error_for_an_unknown_client_names_the_clients(tmp_path):
    made = saved(tmp_path, none=(), two=(1, 7), eight=range(8))
    for ask in (made.state_dict, lambda client: load_state_dict(tmp_path, client)):
        for client in (3, -1):
            with pytest.raises(FedobpError, match=f"no model of client {client}: clients are 0 to 2"):
                ask(client)


def test_a_client_is_any_whole_number_and_nothing_else(tmp_path):
    made = saved(tmp_path, none=(), two=(1, 7), eight=range(8))
    for ask in (made.state_dict, lambda client: load_state_dict(tmp_path, client)):
        for client in (torch.tensor(1), np.int64(1), True):
            assert torch.equal(ask(client)["fc.weight"], ask(1)["fc.weight"])
        for client, named in (("0", "'0'"), (1.0, "1.0"), ([1], "[1]"), (torch.tensor(1.5), "tensor(1.5000)")):
            with pytest.raises(FedobpError, match="`client` must be a whole number, a client's id, not ") as caught:
                ask(client)
            assert str(caught.value).endswith(f"not {named}")


def test_where_only_the_global_model_was_saved_there_are_no_clients(tmp_path):
    saved(tmp_path, clients=False, two=(1, 7))
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["global.safetensors"]
    assert load_state_dict(tmp_path)["classifier.bias"].tolist() == [6, 7, 8, 9]
    with pytest.raises(FedobpError, match=r"no model of client 0: none were saved \(use --save-models all\)"):
        load_state_dict(tmp_path, 0)


@pytest.mark.parametrize("client", [None, 0])
def test_a_folder_without_models_is_refused(tmp_path, client):
    sentence = r"models holds no models: give the folder of a run that saved them"
    for folder in (tmp_path / "absent", tmp_path, str(tmp_path)):
        with pytest.raises(FedobpError, match=sentence):
            load_state_dict(folder, client)


@pytest.mark.parametrize("name", ["global", "clients"])
@pytest.mark.parametrize("damage", ["cut", "emptied", "overwritten", "removed"])
def test_a_damaged_file_is_refused(tmp_path, name, damage):
    saved(tmp_path, two=(1, 7))
    path = tmp_path / "models" / f"{name}.safetensors"
    content = path.read_bytes()
    changed = {"cut": content[:-5], "emptied": b"", "overwritten": b"\xff" * len(content)}
    path.unlink()
    if damage in changed:
        path.write_bytes(changed[damage])
    with pytest.raises(FedobpError, match=r"is damaged|holds no models|cannot read .*clients\.safetensors"):
        load_state_dict(tmp_path, 0)


def test_a_safetensors_file_without_our_metadata_is_refused(tmp_path):
    (tmp_path / "models").mkdir()
    save_file({"weight": torch.zeros(3)}, tmp_path / "models" / "global.safetensors")
    with pytest.raises(FedobpError, match="is damaged, or is not fedobp's"):
        load_state_dict(tmp_path)


@pytest.mark.parametrize(
    "entries",
    [
        {"0.index": torch.tensor([70]), "0.value": torch.zeros(1)},
        {"0.index": torch.tensor([1, 2]), "0.value": torch.zeros(1)},
        {"0.index": torch.tensor([1])},
        {"0.vector": torch.zeros(9)},
        {"1.vector": torch.zeros(10)},
    ],
    ids=["position out of range", "fewer values than positions", "no values", "too short", "not there"],
)
def test_clients_that_do_not_fit_the_global_model_are_refused(tmp_path, entries):
    saved(tmp_path, two=(1, 7))
    _, about = read_tensors(tmp_path / "models" / "global.safetensors")
    write_tensors(tmp_path / "models" / "clients.safetensors", entries, {"global": about["sha256"]})
    with pytest.raises(FedobpError, match=r"the models in .* are damaged"):
        load_state_dict(tmp_path, 0)


@pytest.mark.parametrize(
    "change", [{"names": ["a" * 5000]}, {"clients": ["a" * 5000]}, {"clients": 3}, {"names": [[]]}]
)
def test_a_refusal_of_odd_metadata_is_one_short_line(tmp_path, change):
    saved(tmp_path, two=(1, 7))
    tensors, about = read_tensors(tmp_path / "models" / "global.safetensors")
    del about["sha256"]
    write_tensors(tmp_path / "models" / "global.safetensors", tensors, {**about, **change})
    with pytest.raises(FedobpError) as caught:
        load_state_dict(tmp_path, 0)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_files_of_two_runs_are_refused(tmp_path):
    for name, entries in (("a", (1, 7)), ("b", (2,))):
        saved(tmp_path / name, two=entries)
    write_tensors(tmp_path / "a" / "models" / "clients.safetensors", {"0.vector": torch.zeros(10)}, {"global": "other"})
    with pytest.raises(FedobpError, match="are not of one run"):
        load_state_dict(tmp_path / "a", 0)


# Models of real runs.


@pytest.fixture(scope="module", params=["fedobp", "fedavg", "fedper", "local", "fedavg-ft"])
def run(request, tmp_path_factory):
    """A tiny run of methods with few, no, some and all entries personal."""
    out = tmp_path_factory.mktemp("run")
    config = Config(
        dataset="digits", clients=5, rounds=2, epochs=1, model="mlp", participation=0.6, method=request.param
    )
    federation = Federation(config)
    return federation, federation.run(out=out)


def test_saved_models_are_the_results_models(run):
    _, result = run
    for client in (None, *range(5)):
        in_memory, on_disk = result.state_dict(client), load_state_dict(result.out, client)
        assert list(in_memory) == list(on_disk)
        assert all(torch.equal(in_memory[name], on_disk[name]) for name in in_memory)


def test_an_ordinary_module_with_a_saved_model_predicts_as_the_run_did(run):
    federation, result = run
    module = federation.model.module()
    right = total = 0
    for client in range(5):
        module.load_state_dict(load_state_dict(result.out, client))
        with torch.no_grad():
            found = module(federation.data.inputs(client, "test")).argmax(dim=1)
        right += int((found == federation.data.targets(client, "test")).sum())
        total += len(found)
    assert result.accuracy.pooled == pytest.approx(100 * right / total)


def test_a_saved_model_carries_what_is_needed_to_use_it_elsewhere(run):
    federation, result = run
    with safe_open(result.out / "models" / "global.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["fedobp"])
    assert (about["method"], about["model"]) == (result.config.method, "mlp")
    assert about["input_shape"] == [1, 8, 8]
    assert about["labels"] == list(range(10))
    scaling = about["scaling"]
    digits, config = load("digits", data_dir()), result.config
    tested = partition(digits.y, 5, alpha=config.alpha, seed=config.partition_seed)[2].test
    raw = torch.as_tensor(digits.x[tested][:, None]).float()
    scaled = (raw / scaling["unit"] - torch.tensor(scaling["mean"])) / torch.tensor(scaling["std"])
    torch.testing.assert_close(federation.data.inputs(2, "test"), scaled, rtol=0, atol=1e-5)


def test_personal_entries_alone_differ_from_the_global_model(run):
    _, result = run
    shared = torch.cat([tensor.flatten() for tensor in result.state_dict().values()])
    differing = []
    for client in range(5):
        served = torch.cat([tensor.flatten() for tensor in result.state_dict(client).values()])
        differing.append(int((served != shared).sum()))
    assert max(differing) <= result.personal.max
    if result.config.method == "fedavg":
        assert differing == [0] * 5
    if result.config.method == "fedper":
        assert result.personal.min == result.personal.max == 128 * 10 + 10
