"""Results: their short texts, and what a list of them gives."""

import pytest
import torch
from handmade import made

from fedobp import Config, Failure, Federation, FedobpError, Results

FAILED = Failure("local", 3, "it <failed>", Config(method="local", seed=3, lr=0.5), ValueError("why"))


@pytest.mark.essential
def test_texts_are_short():
    federation = Federation(Config(clients=5, model="mlp"))
    assert repr(federation) == "Federation(digits, 5 clients, mlp of 9,610 parameters)"
    assert repr(federation.model) == "Model(mlp for inputs of 1x8x8, 10 classes, 9,610 parameters)"
    assert repr(federation.data) == "FederatedData(5 clients, 1,797 samples of 1x8x8, 10 classes)"
    result = made("fedper", seed=7, pooled=93.651)
    assert repr(result) == "Result(fedper on digits, seed 7: 93.65 pooled, 92.65 client mean, round 4)"
    assert repr(result.models) == "ClientModels(the global model, 4 parameters each)"
    result.models.add(3, torch.ones(4), torch.tensor([True] * 4))
    assert repr(result.models) == "ClientModels(1 clients' models, 4 parameters each)"
    assert repr(FAILED) == "Failure(local, seed 3: it <failed>)"
    assert repr(Results([result, FAILED])) == f"[{result!r},\n {FAILED!r}]"
    assert repr(Results()) == "[]"


def test_results_are_a_list_whose_slices_are_results():
    results = Results([made(), FAILED, made("local")])
    assert isinstance(results, list)
    assert isinstance(results[1:], Results)
    assert (results[1], results[-1].config.method) == (FAILED, "local")
    assert [one.config.method for one in results.finished] == ["fedavg", "local"]
    assert (type(results.finished), results.failed) == (Results, [FAILED])


def test_a_failure_in_json_has_no_exception():
    assert FAILED.to_json() == {"method": "local", "seed": 3, "error": "it <failed>"}


def test_one_result_gives_what_a_list_of_it_gives():
    result = made()
    assert result.to_pandas().equals(Results([result]).to_pandas())
    assert result.to_pandas(history=True).equals(Results([result]).to_pandas(history=True))
    [axes] = result.plot().axes
    assert [line.get_label() for line in axes.lines] == ["fedavg"]


def test_results_without_a_finished_run_cannot_be_plotted():
    for results in (Results(), Results([FAILED])):
        with pytest.raises(FedobpError, match="no finished run to plot"):
            results.plot()
