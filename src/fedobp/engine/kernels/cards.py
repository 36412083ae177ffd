"""Graphics cards as the kernels see them: their compute capability, and how much shared memory a block may use."""

from typing import NamedTuple

import torch

from fedobp.errors import unknown

# Shared memory of a block in KiB, and cards of each compute capability, by NVIDIA's programming guide.
KNOWN = {
    (8, 0): (163, "A100, A30"),
    (8, 6): (99, "RTX 30, A10, A40"),
    (8, 7): (163, "Jetson Orin"),
    (8, 9): (99, "RTX 40, L4, L40"),
    (9, 0): (227, "H100, H200, GH200"),
    (10, 0): (227, "B100, B200, GB200"),
    (10, 3): (227, "B300, GB300"),
    (12, 0): (99, "RTX 50, RTX PRO Blackwell"),
    (12, 1): (99, "DGX Spark"),
}
OLDEST = (8, 0)  # the first with bf16 and asynchronous copies


class Card(NamedTuple):
    """A card, or a kind of card that need not be there."""

    capability: tuple[int, int]
    shared: int  # bytes
    name: str

    @property
    def version(self) -> str:
        """The compute capability as it is written."""
        return f"{self.capability[0]}.{self.capability[1]}"


def card_of(device: torch.device) -> Card:
    """Return the card of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0)  # absent in torch's types, and on AMD's cards
    return Card((properties.major, properties.minor), shared, properties.name)


def known_card(version: str) -> Card:
    """Return the cards of a compute capability that is written as 8.6."""
    cards = {f"{major}.{minor}": (major, minor) for major, minor in KNOWN}
    if version not in cards:
        raise unknown("compute capability", version, cards)
    shared, names = KNOWN[cards[version]]
    return Card(cards[version], shared * 1024, names)
