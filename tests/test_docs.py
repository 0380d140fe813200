"""The examples in the docstrings run, and every public name has one."""

import doctest
import importlib
import inspect
import pathlib

import pytest

import attention_ops
from attention_ops import distributed, masks, nn, position, reference, rotary, visualize

FOLDER = pathlib.Path(attention_ops.__file__).parent
MODULES = [*sorted(f"attention_ops.{path.stem}" for path in FOLDER.glob("[!_]*.py")), "attention_ops._library"]
MODULES += sorted(f"attention_ops.nn.{path.stem}" for path in (FOLDER / "nn").glob("[!_]*.py"))
DOCUMENTED = (attention_ops, distributed, masks, nn, position, reference, rotary, visualize)
PUBLIC = [
    getattr(module, name)
    for module in DOCUMENTED
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_every_public_function_has_an_example(function):
    assert doctest.DocTestFinder(recurse=False).find(function)[0].examples


def test_all_names_are_there():
    for module in DOCUMENTED:
        assert all(hasattr(module, name) for name in module.__all__)
