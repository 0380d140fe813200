"""Programs without Python: the operator and its gradients from C++, and a model that was compiled ahead of time."""

import fcntl
import os
import pathlib
import runpy
import shutil
import subprocess
import sys

import pytest
import torch

import attention_ops

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ROOT / "examples" / "cpp"
PACKAGE = pathlib.Path(attention_ops.__file__).parent
LIBRARIES = [PACKAGE / "libattention_ops.so", PACKAGE / f"libattention_ops_{attention_ops.isa()}.so"]


def attempt(*command: object) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, env=variables)


def run(*command: object) -> str:
    done = attempt(*command)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def programs() -> pathlib.Path:
    """The folder of the compiled programs; only what changed is compiled again."""
    cmake = shutil.which("cmake", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("needs cmake: pip install cmake")
    folder = ROOT / "build" / f"cpp-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may run tests
        paths = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
        configured = attempt(cmake, "-S", SOURCES, "-B", folder, paths)
        if torch.version.cuda and "cannot find the CUDA" in configured.stderr:
            pytest.skip("find_package(Torch) of a torch with CUDA needs the CUDA toolkit")
        assert configured.returncode == 0, configured.stderr[-3000:]
        run(cmake, "--build", folder, "-j", os.environ.get("MAX_JOBS", "2"))
    return folder


def test_the_operator_and_its_gradients_from_cpp(programs: pathlib.Path) -> None:
    said = run(programs / "call_operator", *LIBRARIES).splitlines()
    assert said == [f"{what} agrees" for what in ("out", *(f"gradient of {x}" for x in ("query", "key", "value")))]


def test_no_python_in_the_programs(programs: pathlib.Path) -> None:
    for file in (programs / "call_operator", programs / "run_package", *LIBRARIES):
        needed = run("ldd", file)
        assert "libtorch_cpu" in needed
        assert not [name for name in ("libpython", "torch_python") if name in needed]


def test_a_package_of_aotinductor_from_cpp(programs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script, package = SOURCES / "compile_package.py", tmp_path / "model.pt2"
    run(sys.executable, script, package)
    model = runpy.run_path(str(script))["model"]()
    lines = run(programs / "run_package", package, *LIBRARIES).splitlines()
    assert len(lines) == 2
    for line in lines:
        batch, length, *numbers = line.split()
        shape = int(batch), int(length), 16
        x = torch.arange(shape[0] * shape[1] * shape[2], dtype=torch.float32).sin().view(shape)
        wanted = model(x, torch.arange(shape[0]) % shape[1] + 1)
        torch.testing.assert_close(torch.tensor([*map(float, numbers)]).view(shape), wanted)
