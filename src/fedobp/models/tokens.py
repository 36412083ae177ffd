"""Networks for tokens [B, length]: an embedding in front, and one answer a sequence or one a position.

They are made of matrix products alone, so that they run for many clients at once: `nn.LSTM` and the fused attention of
torch have no such form.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedobp.errors import FedobpError
from fedobp.models.networks import check_sizes
from fedobp.models.registry import register


def _length(name: str, shape: Sequence[int]) -> int:
    if len(shape) != 1:
        raise FedobpError(
            f"model '{name}' needs sequences of tokens, not inputs of shape {'x'.join(map(str, shape))}: choose "
            "another --model, such as mlp"
        )
    return shape[0]


class Recurrence(nn.Module):
    """One layer of an LSTM (Hochreiter and Schmidhuber, 1997), with the gates in the order of `nn.LSTM`.

    It has one bias, where `nn.LSTM` adds two.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, 4 * width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states [B, length, width] of [B, length, inputs]."""
        weight = self.hidden.weight
        hidden = cell = weight.new_zeros(len(x), weight.shape[1])  # in the type of the weights: sums are kept in it
        states = []
        for given in self.input(x).unbind(dim=1):
            entry, forget, new, out = (given + self.hidden(hidden)).chunk(4, dim=1)
            cell = forget.sigmoid() * cell + entry.sigmoid() * new.tanh()
            hidden = out.sigmoid() * cell.tanh()
            states.append(hidden)
        return torch.stack(states, dim=1)


class Recurrent(nn.Module):
    """An embedding, layers of an LSTM, and a linear layer."""

    def __init__(
        self, vocabulary: int, classes: int, embedding: int, width: int, layers: int, every_position: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.layers = nn.Sequential(*(Recurrence(width if at else embedding, width) for at in range(layers)))
        self.classifier = nn.Linear(width, classes)
        self._every_position = every_position

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of [B, length]."""
        states = self.layers(self.embedding(tokens))
        return self.classifier(states if self._every_position else states[:, -1])  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention: a position sees itself and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to [B, length, width]."""
        query, key, value = (
            layer(x).unflatten(2, (self._heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=x.device).triu(1)
        shares = scores.masked_fill(later, -math.inf).softmax(dim=3)
        return self.out((shares @ value).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and a perceptron, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to [B, length, width]."""
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Embeddings of tokens and positions, layers, a norm, and a linear layer."""

    def __init__(
        self, length: int, vocabulary: int, classes: int, width: int, heads: int, layers: int, every_position: bool
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.empty(length, width))
        for weight in (self.embedding.weight, self.positions):
            nn.init.normal_(weight, std=0.02)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, classes)
        self._every_position = every_position

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of [B, length]."""
        states = self.layers(self.embedding(tokens) + self.positions)
        return self.classifier(self.norm(states if self._every_position else states[:, -1]))  # type: ignore[no-any-return]


@register("lstm")
def lstm(
    shape: Sequence[int],
    classes: int,
    *,
    vocabulary: int,
    every_position: bool,
    embedding: int = 8,
    width: int = 128,
    layers: int = 1,
) -> nn.Module:
    """Return an LSTM on embedded tokens, as McMahan et al. (2017) train on characters; theirs has 2 layers of 256."""
    check_sizes("lstm", embedding=embedding, width=width, layers=layers)
    _length("lstm", shape)
    return Recurrent(vocabulary, classes, embedding, width, layers, every_position)


@register("transformer")
def transformer(
    shape: Sequence[int],
    classes: int,
    *,
    vocabulary: int,
    every_position: bool,
    width: int = 128,
    heads: int = 4,
    layers: int = 2,
) -> nn.Module:
    """Return a causal transformer (as GPT-2: norms before each part, learned positions) without dropout."""
    check_sizes("transformer", width=width, heads=heads, layers=layers)
    if width % heads:
        raise FedobpError(
            f"option 'width' of model 'transformer' must be a multiple of its option 'heads' ({heads}), not {width}"
        )
    length = _length("transformer", shape)
    return Transformer(length, vocabulary, classes, width, heads, layers, every_position)
