"""Networks for tokens: against torch's own layers, what they see, and many copies at once."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fedobp.errors import FedobpError
from fedobp.models import NETS

LENGTH, VOCABULARY, CLASSES = 7, 11, 5
NAMES = pytest.mark.parametrize("name", ["lstm", "transformer"])


def build(name, every_position=True, **options):
    torch.manual_seed(1)
    given = {"vocabulary": VOCABULARY, "every_position": every_position, **options}
    return NETS[name]((LENGTH,), CLASSES, **given).double()


def tokens(*leading):
    return torch.randint(VOCABULARY, (*leading, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("layers", [1, 2])
def test_the_lstm_is_torchs(layers):
    ours = build("lstm", embedding=3, width=4, layers=layers)
    theirs = nn.LSTM(3, 4, layers, batch_first=True).double()
    with torch.no_grad():
        for at, layer in enumerate(ours.layers):
            getattr(theirs, f"weight_ih_l{at}").copy_(layer.input.weight)
            getattr(theirs, f"bias_ih_l{at}").copy_(layer.input.bias)
            getattr(theirs, f"weight_hh_l{at}").copy_(layer.hidden.weight)
            getattr(theirs, f"bias_hh_l{at}").zero_()
    x = tokens(6)
    states = theirs(ours.embedding(x))[0]
    torch.testing.assert_close(ours.layers(ours.embedding(x)), states)
    torch.testing.assert_close(ours(x), ours.classifier(states))


def test_the_transformer_is_torchs():
    ours = build("transformer", width=8, heads=2, layers=2)
    theirs = nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True).double()
    theirs = nn.TransformerEncoder(theirs, 2, nn.LayerNorm(8).double(), enable_nested_tensor=False)
    with torch.no_grad():
        for to, layer in zip(theirs.layers, ours.layers, strict=True):
            inside = [layer.attention.query, layer.attention.key, layer.attention.value]
            to.self_attn.in_proj_weight.copy_(torch.cat([one.weight for one in inside]))
            to.self_attn.in_proj_bias.copy_(torch.cat([one.bias for one in inside]))
            pairs = [(to.self_attn.out_proj, layer.attention.out), (to.norm1, layer.norm1), (to.norm2, layer.norm2),
                     (to.linear1, layer.fc1), (to.linear2, layer.fc2)]  # fmt: skip
            for target, one in pairs:
                target.load_state_dict(one.state_dict())
    x, mask = tokens(3), nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    states = theirs(ours.embedding(x) + ours.positions, mask=mask)
    torch.testing.assert_close(ours(x), ours.classifier(states))


@NAMES
def test_a_position_sees_itself_and_those_before_it_and_the_last_answers_for_a_sequence(name):
    module, x = build(name), tokens(4)
    every = module(x)
    assert every.shape == (4, LENGTH, CLASSES)
    changed = x.clone()
    changed[:, 3] = (x[:, 3] + 1) % VOCABULARY
    apart = (module(changed) - every).abs().sum(dim=2)
    assert (apart[:, :3] == 0).all()
    assert (apart[:, 3:] > 0).all()
    torch.testing.assert_close(build(name, every_position=False)(x), every[:, -1])


@NAMES
def test_order_matters(name):
    module = build(name, every_position=False)
    x = torch.arange(LENGTH)[None]
    assert not torch.allclose(module(x), module(x[:, [1, 0, *range(2, LENGTH)]]))


@NAMES
@pytest.mark.parametrize("every_position", [False, True])
def test_many_copies_at_once_equal_one_after_the_other(name, every_position):
    module = build(name, every_position, width=8)
    lanes = 3
    tensors = {
        key: torch.stack([one.detach() * (1 + lane / 5) for lane in range(lanes)])
        for key, one in module.named_parameters()
    }
    x, y = tokens(lanes, 4), torch.arange(lanes * 4 * LENGTH).view(lanes, 4, LENGTH) % CLASSES
    y = y if every_position else y[..., 0]

    def loss(tensors, x, y):
        return functional.cross_entropy(functional_call(module, tensors, (x,)).flatten(0, -2), y.flatten())

    found = vmap(grad(loss))(tensors, x, y)
    for lane in range(lanes):
        copy = deepcopy(module)
        with torch.no_grad():
            for key, one in copy.named_parameters():
                one.copy_(tensors[key][lane])
        functional.cross_entropy(copy(x[lane]).flatten(0, -2), y[lane].flatten()).backward()
        for key, one in copy.named_parameters():
            torch.testing.assert_close(found[key][lane], one.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("lstm", {"width": 0}, "option 'width' of model 'lstm' must be between 1 and 4096, not 0"),
        ("lstm", {"layers": 0}, "option 'layers' of model 'lstm' must be"),
        ("lstm", {"embedding": 5000}, "option 'embedding' of model 'lstm' must be"),
        ("transformer", {"heads": 0}, "option 'heads' of model 'transformer' must be"),
        ("transformer", {"heads": 3}, r"'width' of model 'transformer' must be a multiple .* 'heads' \(3\), not 128"),
    ],
)
def test_options_that_make_no_network_are_refused(name, options, complaint):
    with pytest.raises(FedobpError, match=complaint):
        build(name, **options)


@NAMES
@pytest.mark.parametrize("shape", [(1, 8, 8), (4, 3)])
def test_inputs_that_are_no_sequences_are_refused(name, shape):
    given = "x".join(map(str, shape))
    with pytest.raises(FedobpError, match=f"'{name}' needs sequences of tokens, not inputs of shape {given}: choose"):
        NETS[name](shape, CLASSES, vocabulary=VOCABULARY, every_position=False)
