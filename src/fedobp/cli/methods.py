"""`fedobp methods`: list the methods."""

from typing import Any

from fedobp.cli.output import print_result, report_failures
from fedobp.cli.settings import Json
from fedobp.errors import FedobpError


def methods(*, as_json: Json = False) -> None:
    """List all methods with summary, paper, options and defaults."""
    from fedobp.algorithms import available
    from fedobp.report.tables import methods_table

    usable, failed = available()
    rows = [
        {
            "name": name,
            "summary": method.summary,
            "options": [
                {"name": spec.name, "default": spec.default, "doc": spec.metadata["doc"]}
                | ({"choices": list(spec.metadata["choices"])} if spec.metadata["choices"] else {})
                for spec in method.options()
            ],
            "paper": method.paper,
        }
        for name, method in usable.items()
    ]
    content: dict[str, Any] = {"methods": rows}
    if failed:
        content["failed"] = [{"method": name, "error": str(error)} for name, error in failed.items()]
    print_result(content if as_json else methods_table(rows))
    if failed:
        raise report_failures(FedobpError("\n".join(map(str, failed.values()))))
