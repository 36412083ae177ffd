"""Datasets by name, their partitions over clients, and client data as tensors."""

from fedobp.data.client_changes import ClientChange
from fedobp.data.columns import TableSummary
from fedobp.data.dataset import Dataset, Info
from fedobp.data.datasets import (
    data_dir,
    dataset_names,
    describe,
    list_datasets,
    load,
    store,
)
from fedobp.data.defaults import default_clients_and_alpha, flags_to_run
from fedobp.data.federated import FederatedData, Split
from fedobp.data.fetch import fetch
from fedobp.data.importers import import_dataset, read_own
from fedobp.data.in_memory import dataset_from_data
from fedobp.data.lazy import LazyDataset, LazyFederatedData
from fedobp.data.normalization import normalization_for
from fedobp.data.partition import Shard, partition, with_client_changes
from fedobp.data.partition_file import load_partition, partition_hash, partition_settings, save_partition
from fedobp.data.partitioner_registry import PARTITIONERS, GivenPartitioner, partitioner, partitioner_names
from fedobp.data.partitioners import Partitioner, PartitionTask
from fedobp.data.registry import REGISTRY

__all__ = [
    "PARTITIONERS", "REGISTRY", "ClientChange", "Dataset", "FederatedData", "GivenPartitioner", "Info", "LazyDataset",
    "LazyFederatedData", "PartitionTask", "Partitioner",
    "Shard", "Split", "TableSummary", "data_dir", "dataset_from_data", "dataset_names", "default_clients_and_alpha",
    "describe", "fetch", "flags_to_run", "import_dataset", "list_datasets", "load", "load_partition",
    "normalization_for", "partition", "partition_hash", "partition_settings", "partitioner", "partitioner_names",
    "read_own", "save_partition", "store", "with_client_changes",
]  # fmt: skip
