"""Tests that need a GPU."""

import pytest
import torch

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is visible"),
]
