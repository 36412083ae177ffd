"""`fedobp models`: list the networks."""

import inspect
from typing import Any

from fedobp.cli.output import print_result, report_failures
from fedobp.cli.settings import Json
from fedobp.errors import FedobpError


def models(*, as_json: Json = False) -> None:
    """List all networks with their options and defaults, also those of installed packages."""
    from fedobp.models import network, network_names, network_options
    from fedobp.report.tables import models_table

    rows: list[dict[str, Any]] = []
    failed: dict[str, FedobpError] = {}
    for name in network_names():
        try:
            summary = (inspect.getdoc(network(name)) or "").partition("\n")[0].removeprefix("Return ").rstrip(".")
            options = [{"name": spec.name, "default": spec.default} for spec in network_options(name).options()]
            rows.append({"name": name, "summary": summary, "options": options})
        except FedobpError as error:
            failed[name] = error
    content: dict[str, Any] = {"models": rows}
    if failed:
        content["failed"] = [{"model": name, "error": str(error)} for name, error in failed.items()]
    print_result(content if as_json else models_table(rows))
    if failed:
        raise report_failures(FedobpError("\n".join(map(str, failed.values()))))
