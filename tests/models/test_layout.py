"""The positions of tensors and parts in the flat vector."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedobp.models import Layout

LAST = Layout(("fc.weight", "fc.bias", "classifier.weight", "classifier.bias"), ((2, 3), (2,), (1, 2), (1,)))
MIDDLE = Layout(("a.weight", "classifier.weight", "b.weight", "classifier.bias", "c"), ((2,), (1, 2), (3,), (1,), ()))
ONLY = Layout(("classifier.weight", "classifier.bias"), ((2, 3), (2,)))

checked = settings(deadline=None, max_examples=60)
names = st.lists(st.sampled_from(["fc", "conv", "classifier"]), min_size=1, max_size=5).map(
    lambda parts: tuple(f"{part}.{position}" for position, part in enumerate(parts))
)
layouts = names.flatmap(
    lambda chosen: st.lists(
        st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), min_size=len(chosen), max_size=len(chosen)
    ).map(lambda shapes: Layout(chosen, tuple(shapes)))
)


def test_sizes_and_slices_by_hand():
    assert LAST.sizes == (6, 2, 2, 1)
    assert LAST.size == 11
    assert list(LAST.slices.items()) == [
        ("fc.weight", slice(0, 6)),
        ("fc.bias", slice(6, 8)),
        ("classifier.weight", slice(8, 10)),
        ("classifier.bias", slice(10, 11)),
    ]
    assert MIDDLE.sizes == (2, 2, 3, 1, 1)  # a tensor without axes has one entry


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("classifier.weight", True),
        ("classifier.0.bias", True),
        ("classifier", False),
        ("classifiers.weight", False),
        ("net.classifier.weight", False),
        ("fc.weight", False),
    ],
)
def test_the_head_is_the_layer_called_classifier(name, head):
    assert Layout.in_head(name) is head


def test_is_head_by_hand():
    assert LAST.is_head().tolist() == [False] * 8 + [True] * 3
    assert MIDDLE.is_head().tolist() == [False, False, True, True, False, False, False, True, False]
    assert ONLY.is_head().all()


@pytest.mark.essential
def test_split_and_join_by_hand_with_a_classifier_in_the_middle():
    base, head = MIDDLE.split(torch.arange(9.0))
    assert base.tolist() == [0, 1, 4, 5, 6, 8]
    assert head.tolist() == [2, 3, 7]
    assert MIDDLE.join(base, head).tolist() == list(range(9))


def test_a_model_with_only_a_head_has_an_empty_base():
    theta = torch.arange(16.0).reshape(2, 8)
    base, head = ONLY.split(theta)
    assert base.shape == (2, 0)
    assert head.equal(theta)
    assert ONLY.join(base, head).equal(theta)


def test_views_share_the_vectors_memory():
    theta = torch.zeros(11)
    LAST.views(theta)["fc.bias"].fill_(5)
    assert theta.tolist() == [0] * 6 + [5, 5] + [0] * 3


def test_a_tensor_without_axes_has_a_view():
    views = MIDDLE.views(torch.arange(9.0))
    assert views["c"].shape == ()
    assert MIDDLE.flatten(views).tolist() == list(range(9))


def test_flatten_uses_the_layouts_order_and_detaches():
    tensors = {name: tensor.clone() for name, tensor in LAST.views(torch.arange(11.0)).items()}
    shuffled = {name: tensors[name].requires_grad_() for name in reversed(LAST.names)}
    flat = LAST.flatten(shuffled)
    assert flat.tolist() == list(range(11))
    assert not flat.requires_grad


@checked
@given(layout=layouts)
def test_views_and_flatten_are_inverse(layout):
    theta = torch.arange(float(layout.size))
    views = layout.views(theta)
    assert tuple(views) == layout.names
    assert tuple(tuple(view.shape) for view in views.values()) == layout.shapes
    assert layout.flatten(views).equal(theta)


@checked
@given(layout=layouts, lead=st.lists(st.integers(1, 3), max_size=2).map(tuple))
def test_split_and_join_are_inverse_whatever_the_leading_axes(layout, lead):
    theta = torch.arange(float(prod(lead) * layout.size)).reshape(*lead, layout.size)
    base, head = layout.split(theta)
    mask = layout.is_head()
    assert base.equal(theta[..., ~mask])
    assert head.equal(theta[..., mask])
    assert layout.join(base, head).equal(theta)
    for (name, view), shape in zip(layout.views(theta).items(), layout.shapes, strict=True):
        assert view.shape == (*lead, *shape)
        assert view.reshape(*lead, -1).equal(theta[..., layout.slices[name]])
