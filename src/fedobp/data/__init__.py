"""Data: datasets by name, partitions over clients, and client data as tensors."""

from fedobp.data.datasets import Dataset, Info, catalogue, data_dir, describe, label_sizes, load, names, store
from fedobp.data.defaults import flags_to_run, suited
from fedobp.data.federated import FederatedData, Split
from fedobp.data.fetch import fetch
from fedobp.data.importers import bring
from fedobp.data.normalization import way_of
from fedobp.data.partition import Shard, changed, partition
from fedobp.data.partition_file import digest, load_partition, partition_settings, save_partition
from fedobp.data.partitioners import PARTITIONS
from fedobp.data.registry import KNOWN

__all__ = [
    "KNOWN", "PARTITIONS", "Dataset", "FederatedData", "Info", "Shard", "Split", "bring", "catalogue", "changed",
    "data_dir", "describe", "digest", "fetch", "flags_to_run", "label_sizes", "load", "load_partition", "names",
    "partition", "partition_settings", "save_partition", "store", "suited", "way_of",
]  # fmt: skip
