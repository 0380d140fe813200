"""What is shipped, and what a reader is told when libraries and torch do not fit together."""

import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tarfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "attention_ops"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The sources alone, as a checkout has them."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, folder)
    for name in ("attention_ops", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "_build.json", "__pycache__"))
    return folder


def test_the_source_archive_holds_all_that_a_build_needs(copy: pathlib.Path) -> None:
    pytest.importorskip("setuptools", "77")
    command = [sys.executable, "setup.py", "--quiet", "sdist"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    wanted |= {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assert wanted | {"setup.py", "pyproject.toml", "README.md"} <= names
    assert not [name for name in names if name.endswith((".so", "_build.json"))]


def import_error(folder: pathlib.Path, **environment: str) -> str:
    """The last line of what an import of the package in `folder` says."""
    code = "import os, sys; sys.path.insert(0, sys.argv[1]); os.environ.update(eval(sys.argv[2])); import attention_ops"
    command = [sys.executable, "-c", code, str(folder), repr(environment)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def test_libraries_that_were_never_built(copy: pathlib.Path) -> None:
    message = import_error(copy)
    assert message.startswith("ImportError: attention_ops: expected its compiled libraries")
    assert "pip install --no-build-isolation" in message
    assert message.endswith("or leave this folder, if it is installed")


def test_libraries_for_another_torch(copy: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(copy / "attention_ops", tmp_path / "attention_ops")
    built = json.loads((PACKAGE / "_build.json").read_text())
    (tmp_path / "attention_ops" / "_build.json").write_text(json.dumps({**built, "torch": "1.2.3"}))
    message = import_error(tmp_path)
    assert "expected torch 1.2, for which it was compiled, got" in message


def test_kernels_for_another_processor(copy: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(copy / "attention_ops", tmp_path / "attention_ops")
    built = json.loads((PACKAGE / "_build.json").read_text())
    (tmp_path / "attention_ops" / "_build.json").write_text(json.dumps({**built, "isas": ["mmx"]}))
    message = import_error(tmp_path, ATTENTION_OPS_ISA="")
    assert message.endswith("expected kernels that this processor runs, got mmx")


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "2.15.0a0+git1234567", "3.0.0"])
def test_a_torch_out_of_bounds_is_refused_by_a_build(copy: pathlib.Path, tmp_path: pathlib.Path, version: str) -> None:
    torch = tmp_path / "torch"
    (torch / "utils").mkdir(parents=True)
    text = f"import types\n__version__, version = {version!r}, types.SimpleNamespace(cuda=None)"
    (torch / "__init__.py").write_text(text)
    (torch / "utils" / "cpp_extension.py").write_text("")
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "ATTENTION_OPS_CUDA": "auto"}
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    (said,) = done.stderr.strip().splitlines()
    assert (
        re.fullmatch(r"attention_ops: expected torch>=\S+,<\S+ to build it, got (.+); run `pip install .*`", said)[1]
        == version
    )


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1+cu130", "2.14.0rc1", "2.14.0a0+git1234567"])
def test_a_torch_within_bounds_is_taken(version: str) -> None:
    runpy.run_path(str(ROOT / "setup.py"))["check_torch"](version)


def test_the_readme_has_the_bound_of_pyproject() -> None:
    (bound,) = re.findall(r'dependencies = \["(torch.+)"\]', (ROOT / "pyproject.toml").read_text())
    assert f'pip install "{bound}"' in (ROOT / "README.md").read_text(encoding="utf-8")


def toolkit(said: str = "", **environment: str) -> str:
    """What a build would say of CUDA, with a torch of its own."""
    code = (
        "import os, runpy, sys, types; os.environ.update(eval(sys.argv[2])); cuda = runpy.run_path(sys.argv[1]); "
        "torch = types.SimpleNamespace(__version__='2.14.0', version=types.SimpleNamespace(cuda=eval(sys.argv[3]))); "
        "print(cuda['find'](torch).says)"
    )
    command = [sys.executable, "-c", code, str(PACKAGE / "_cuda.py"), repr(environment), repr(said or None)]
    variables = {**os.environ, "ATTENTION_OPS_CUDA": "auto"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def test_what_is_said_of_cuda() -> None:
    assert toolkit(ATTENTION_OPS_CUDA="0") == "not built: ATTENTION_OPS_CUDA=0"
    assert toolkit() == "not built: torch 2.14.0 has no CUDA"
    assert toolkit(ATTENTION_OPS_CUDA="1").endswith("needs, got torch 2.14.0 has no CUDA")
    assert toolkit(ATTENTION_OPS_CUDA="yes").endswith("expected ATTENTION_OPS_CUDA one of auto, 0, 1, got yes")
    assert toolkit("13.0", PATH="", CUDA_HOME="", CUDA_PATH="").endswith("no nvcc on PATH and none in CUDA_HOME")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_architectures_are_those_of_torchs_variable() -> None:
    assert toolkit("12.99").startswith(("12.", "not built: torch is built with CUDA 12.99"))
    says = toolkit("13.0", TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX")
    assert says.endswith("for 8.0, 9.0+PTX") or says.startswith("not built: torch is built with")
    wrong = toolkit("13.0", TORCH_CUDA_ARCH_LIST="7.5")
    assert "from 8.0 on such as 9.0+PTX, got 7.5" in wrong or wrong.startswith("not built: torch is built with")


def test_architectures_are_those_that_nvcc_knows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\nprintf 'sm_75\\nsm_80\\nsm_86\\nsm_90\\nsm_90a\\n'\n")
    nvcc.chmod(0o755)
    assert runpy.run_path(str(PACKAGE / "_cuda.py"))["architectures"](str(tmp_path)) == ["8.0", "8.6", "9.0+PTX"]


def test_code_is_made_for_each_architecture_and_ptx_where_it_is_asked_for() -> None:
    code = runpy.run_path(str(PACKAGE / "_cuda.py"))["code"]
    assert code(["8.6"]) == "-gencode=arch=compute_80,code=[sm_86]"
    assert code(["8.0", "9.0a", "12.0+PTX"]) == "-gencode=arch=compute_80,code=[sm_80,sm_90,sm_120,compute_80]"
