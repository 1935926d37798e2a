"""Changes of tensors are seen."""

from __future__ import annotations

import torch

from llmnode.models.tensors import version_of


def test_a_change_in_place_and_other_data_give_another_version() -> None:
    tensor = torch.zeros(3)
    versions = [version_of(tensor)]
    tensor.add_(1)
    versions.append(version_of(tensor))
    tensor.data = torch.ones(3)
    versions.append(version_of(tensor))
    assert len(set(versions)) == 3
    assert version_of(tensor) == versions[-1]


def test_a_tensor_of_inference_mode_has_a_version_too() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    assert version_of(tensor) == version_of(tensor)
