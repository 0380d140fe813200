"""The faults that `make mutate` plants: each still applies to the source. Whether tests find them, it says itself."""

import pathlib
import runpy

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
MUTATIONS = runpy.run_path(str(ROOT / "tests" / "gpu_model" / "mutate.py"))["MUTATIONS"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_applies_once(mutation):
    assert (ROOT / "csrc" / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old


def test_names_are_told_apart():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
