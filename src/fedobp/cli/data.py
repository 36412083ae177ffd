"""`fedobp data`: list, fetch, import and show datasets."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedobp.cli.output import next_command, print_result
from fedobp.cli.progress import task_progress
from fedobp.cli.settings import Json

DataDir = Annotated[str | None, typer.Option(help="Folder that holds datasets.")]

data = typer.Typer()


@data.callback(invoke_without_command=True)
def _data_root(context: typer.Context) -> None:
    """List, fetch, import and show datasets."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@data.command("list")
def data_list(*, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the datasets: the embedded digits, the paper's eight, and those you imported."""
    from fedobp import data as datasets
    from fedobp.report.tables import datasets_table

    folder = datasets.data_dir(data_dir)
    rows = [asdict(info) for info in datasets.list_datasets(folder)]
    print_result({"datasets": rows} if as_json else datasets_table(rows), f"Data folder: {folder}")


@data.command("fetch")
def data_fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...")], *, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """Download the paper's datasets by name: mnist, fmnist, emnist, cifar10, cifar100, svhn, organamnist, organcmnist.

    Downloads are verified by checksum and resumed if interrupted. Stored datasets are not downloaded again.

    [bold]Examples[/bold]

    \b
    fedobp data fetch mnist cifar10
    fedobp data fetch emnist --data-dir /data
    """
    from fedobp import data as datasets
    from fedobp.report.tables import datasets_table

    folder = datasets.data_dir(data_dir)
    with task_progress() as advance:
        rows = [asdict(info) for info in datasets.fetch(names, folder, advance)]
    footer = f"Stored in {folder}. {next_command(names[0], data_dir)}"
    print_result({"datasets": rows} if as_json else datasets_table(rows), footer)


@data.command("import")
def data_import(
    name: str,
    source: Path,
    *,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column with the labels (default: label; in an npz: y).")
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column with each sample's client, for --partition natural."),
    ] = None,
    missing: Annotated[
        str,
        typer.Option(
            metavar="refuse|drop|impute",
            help="Missing cells of a table: refuse it, leave out their rows, or fill them (with the median, or with a "
            "category of their own) and mark them in a column NAME_missing.",
        ),
    ] = "refuse",
    drop: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN[,COLUMN]", help="Leave out columns of a table.")
    ] = None,
    categories: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN[,COLUMN]", help="Columns that hold categories although they look like numbers."),
    ] = None,
    separator: Annotated[
        str | None, typer.Option(help="Separator of a CSV file (default: the first lines tell): , ; | or tab.")
    ] = None,
    decimal: Annotated[
        str | None, typer.Option(help="Decimal point of a CSV file (default: the first lines tell): . or ,")
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Encoding of a CSV file (default: UTF-8, or what its first bytes tell).")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Import SOURCE as dataset NAME; an existing dataset is never overwritten.

    SOURCE is an npz file with arrays x and y, a CSV or Parquet table with a label column, a folder with one subfolder
    of images per class (or with subfolders train and test that have these), or a Hugging Face dataset saved to disk.
    Labels are whole numbers or names. Texts in other columns are categories, and become one column each.

    [bold]Examples[/bold]

    \b
    fedobp data import mine arrays.npz
    fedobp data import flowers flowers/
    fedobp data import hospitals hospitals.csv --label outcome --client hospital --missing impute
    fedobp data import wards wards.csv --drop patient,admitted --categories zip --encoding latin-1
    fedobp data import letters femnist/ --label character --client writer_id
    """
    from fedobp import data as datasets
    from fedobp.report.tables import datasets_table

    folder = datasets.data_dir(data_dir)
    tables: list[datasets.TableSummary] = []  # one, if the source is a table
    with task_progress() as advance:
        dataset = datasets.import_dataset(
            name,
            source,
            folder,
            label=label,
            client=client,
            missing=missing,
            drop=drop or (),
            categories=categories or (),
            separator=separator,
            decimal=decimal,
            encoding=encoding,
            progress=advance,
            on_table=tables.append,
        )
    row = asdict(dataset.info)
    flags = datasets.flags_to_run(dataset)
    if flags is None:
        hint = f"{len(dataset.y)} samples are too few to train and test with: import more of them under another name."
    else:
        hint = next_command(name, data_dir, *(word for pair in flags.items() for word in pair))
    if as_json:
        print_result({**row, "table": asdict(tables[0])} if tables else row)
    else:
        print_result(datasets_table([row]), "\n".join([*map(str, tables), f"Stored in {folder}. {hint}"]))


@data.command("show")
def data_show(name: str, *, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show one dataset's sizes, and whether it is available."""
    from fedobp import data as datasets
    from fedobp.report.tables import datasets_table

    row = asdict(datasets.describe(name, datasets.data_dir(data_dir)))
    print_result(row if as_json else datasets_table([row]))
