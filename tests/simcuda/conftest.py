"""A simulated machine for the tests of the simulator itself."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from ..simulated_gpu.device import simulated
from ..simulated_gpu.simulation import Simulation


@pytest.fixture
def gpu() -> Iterator[Simulation]:
    """Two GPUs."""
    # Not in inference mode: a worker thread is in none, and could not write to its tensors.
    with simulated(2) as simulation, torch.no_grad():
        yield simulation
