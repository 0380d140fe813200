"""What every test starts from: a seed, warnings as errors, no slow fallback of vmap."""

import os

import hypothesis
import pytest
import torch
from backends import BACKENDS, running_on

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, database=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_isa: part of the subset that runs under every instruction set")
    torchs_own = ("torch.jit.*:DeprecationWarning", "torch.jit.*:FutureWarning", "isinstance.*LeafSpec.*:FutureWarning")
    for line in ("error", *(f"ignore:.*{text}" for text in torchs_own)):
        config.addinivalue_line("filterwarnings", line)
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def no_slow_vmap():
    torch._C._functorch._set_vmap_fallback_enabled(False)  # it would only print a warning, from C++
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


@pytest.fixture(params=BACKENDS)
def device(request: pytest.FixtureRequest):
    """The device of the tensors, on each backend in turn."""
    with running_on(request.param) as name:
        yield name
