"""Instruction sets: a part of the suite under each of those that this machine runs, and how one is chosen."""

import os
import subprocess
import sys

import pytest
from processes import ROOT, run_alone

import attention_ops
from attention_ops import _isas

BUILT = attention_ops.build_info()["isas"]


def reason_to_skip(isa: str) -> str | None:
    if isa not in _isas.buildable():
        return f"{isa} is for another kind of machine"
    if isa not in BUILT:
        return f"{isa} was not built: {BUILT}"
    if not _isas.ISAS[isa].allowed():
        return f"the kernel does not allow {isa}"
    if isa not in _isas.runnable():
        return f"this processor lacks {sorted(_isas.ISAS[isa].needs - _isas.processor_flags())}"
    if isa == attention_ops.isa():
        return f"the whole suite runs under {isa}"
    return None


@pytest.mark.parametrize("isa", _isas.ISAS)
def test_the_suite_under(isa):
    if "ATTENTION_OPS_ISA" in os.environ:
        pytest.skip(f"the whole suite runs under ATTENTION_OPS_ISA={os.environ['ATTENTION_OPS_ISA']}")
    if reason := reason_to_skip(isa):
        pytest.skip(reason)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "every_isa", "-p", "no:cacheprovider", "tests"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**variables, "ATTENTION_OPS_ISA": isa, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize("isa", [isa for isa in _isas.ISAS if isa in BUILT and isa in _isas.runnable()])
def test_one_can_be_forced(isa):
    assert run_alone("import attention_ops; print(attention_ops.isa())", ATTENTION_OPS_ISA=isa) == isa


def test_an_unknown_one_is_refused_in_one_sentence():
    code = "import attention_ops"
    with pytest.raises(
        AssertionError, match=r"ImportError: attention_ops: expected ATTENTION_OPS_ISA one of .*, got mmx"
    ):
        run_alone(code, ATTENTION_OPS_ISA="mmx")


def test_the_best_one_is_the_default():
    variables = {"ATTENTION_OPS_ISA": ""}
    best = _isas.best(BUILT)
    assert run_alone("import attention_ops; print(attention_ops.isa())", **variables) == best


@pytest.mark.parametrize(
    ("machine", "first"), [("x86_64", "baseline"), ("aarch64", "neon"), ("arm64", "neon"), ("riscv64", "baseline")]
)
def test_every_kind_of_machine_has_one_that_always_runs(monkeypatch, machine, first):
    monkeypatch.setattr(_isas.platform, "machine", lambda: machine)
    assert _isas.buildable()[0] == first
    assert not _isas.ISAS[first].needs


def test_without_the_matrix_unit_the_next_best_is_chosen(monkeypatch):
    """The kernel may refuse its registers."""
    monkeypatch.setitem(_isas.ISAS, "amx", _isas.ISAS["amx"]._replace(allowed=lambda: False))
    assert "amx" not in _isas.runnable()
    assert _isas.best(BUILT) != "amx"


@pytest.mark.skipif("avx512_bf16" not in _isas.buildable(), reason="for another kind of machine")
@pytest.mark.parametrize(("vendor", "best"), [("AuthenticAMD", "avx512_bf16"), ("GenuineIntel", "avx512")])
def test_pairs_are_chosen_where_they_are_fast(vendor, best, monkeypatch):
    flags = " ".join(_isas.ISAS["avx512_bf16"].needs)
    monkeypatch.setattr(_isas, "_processor", lambda: {"vendor_id": vendor, "flags": flags})
    assert "avx512_bf16" in _isas.runnable()
    assert _isas.best(list(_isas.ISAS)) == best
    assert _isas.best(["baseline", "avx2", "avx512_bf16"]) == "avx512_bf16"  # the one it is compared with is not there
    assert _isas.best(["mmx"]) is None


def test_what_is_built_can_be_chosen(monkeypatch):
    buildable = _isas.buildable()
    for text, names in {"": buildable, buildable[-1]: buildable[-1:], " ".join(buildable[::-1]): buildable}.items():
        monkeypatch.setenv("ATTENTION_OPS_ISAS", text)
        assert _isas.wanted() == names
    monkeypatch.setenv("ATTENTION_OPS_ISAS", "native")
    assert _isas.wanted() == [_isas.best(buildable)]
    for wrong in (f"{buildable[0]},mmx", f"native {buildable[0]}"):
        monkeypatch.setenv("ATTENTION_OPS_ISAS", wrong)
        with pytest.raises(SystemExit, match=rf"expected ATTENTION_OPS_ISAS native, or some of .*, got {wrong}"):
            _isas.wanted()
