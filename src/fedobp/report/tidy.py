"""Results as tidy rows: one for each run and each model that its clients are tested with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedobp.config import Config
from fedobp.csv_rows import read_rows
from fedobp.plugins import label

if TYPE_CHECKING:
    from fedobp.saved_runs import SavedRun

MODELS = {"served": "accuracy", "last": "last", "finetuned": "finetuned"}  # by their names in result.json
PARTS = ("prior", "calibrate", "average", "compress_down", "compress_up")  # settings that any method may have
TRAINING = ("epochs", "batch_size", "lr", "momentum", "weight_decay", "lr_schedule")
TEXTS = (
    "run", "method", "mode", "dataset", "partition", "protocol", "model", "options", "parts", "training",
    "partition_options", "network", "config_hash", "partition_hash", "fedobp", "torch", "triton", "python", "device",
    "precision",
)  # fmt: skip


def smallest_quarter(clients: Sequence[Mapping[str, Any]], model: str) -> float | None:
    """Return the mean accuracy of the quarter of clients with the fewest training samples, from rows of clients.csv.

    A client with as many samples as the largest of them counts, too. Clients without test samples are left out.
    """
    known = [(row["train"], row[model]) for row in clients if None not in (row["train"], row.get(model))]
    if not known:
        return None
    most = sorted(size for size, _ in known)[max(1, len(known) // 4) - 1]
    return fmean(accuracy for size, accuracy in known if size <= most)


def tidy_rows(run: "SavedRun") -> list[dict[str, Any]]:
    """Return a row for each model that a run's clients are tested with; accuracies are per cent."""
    config, result, origin = run.config, run.result, run.result.get("provenance", {})
    after = {
        "personal_mean": result["personal"]["mean"],
        "personal_share": result["personal"]["share"],
        "bytes_down": result["bytes"]["down_total"],
        "bytes_up": result["bytes"]["up_total"],
        "visit_passes": result["compute"]["visit"],
        "use_passes": result["compute"]["use"],
        "seconds": result.get("seconds"),
        "options": _pairs(config.options),
        "parts": _changed(config, PARTS),
        "training": _changed(config, TRAINING),
        "partition_options": _pairs(config.partition_options) or None,
        "network": label(config.model),
        "clients": config.clients,
        "participation": config.participation,
        "config_hash": origin.get("config"),
        "partition_hash": result.get("partition"),
        **{name: origin.get(name) for name in ("fedobp", "torch", "triton", "python", "device", "precision")},
        "beside": len(origin["beside"]) if "beside" in origin else None,
    }
    columns = {model: result[name] for model, name in MODELS.items() if result.get(name)}
    clients = run.clients()
    return [
        {
            **_head(run),
            "model": model,
            "rounds": config.rounds,
            **values,
            "smallest_quarter": smallest_quarter(clients, model),
            "validation": (result.get("validation") or {}).get("pooled") if model == "served" else None,
            **after,
        }
        for model, values in columns.items()
    ]


def _changed(config: Config, names: Sequence[str]) -> str | None:
    """Return the settings that are not the default."""
    return _pairs({name: value for name in names if (value := getattr(config, name)) != getattr(Config, name)}) or None


def _pairs(values: Mapping[str, Any]) -> str:
    return ";".join(f"{name}={value}" for name, value in values.items())


def history_rows(run: "SavedRun") -> list[dict[str, Any]]:
    """Return a row for each evaluation of a run."""
    return [
        {**_head(run), "round": number, "pooled": pooled, "client_mean": client_mean}
        for number, pooled, client_mean in run.history
    ]


def _head(run: "SavedRun") -> dict[str, Any]:
    config = run.config
    return {
        "run": run.name,
        "method": config.method,
        "mode": config.options.get("mode"),
        "dataset": config.dataset,
        "alpha": config.alpha,
        "partition": label(config.partition),
        "seed": config.seed,
        "protocol": config.protocol,
    }


def read_tidy(path: Path) -> list[dict[str, Any]]:
    """Return tidy rows from a CSV file; an empty cell is None."""
    return read_rows(path, TEXTS)
