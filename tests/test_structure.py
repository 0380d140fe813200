"""The shape of the sources: layers point down, files and functions are short, every operator is in every layer."""

import ast
import dataclasses
import pathlib
import re

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CPP = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cuh", ".cu"))
PYTHON_FOLDERS = ("attention_ops", "attention_ops/nn", "benchmarks", "examples", "examples/cpp", "tests")
PYTHON = sorted(path for folder in PYTHON_FOLDERS for path in (ROOT / folder).glob("*.py"))
PROGRAMS = sorted(path for path in (ROOT / "examples" / "cpp").glob("*") if path.suffix in (".h", ".cpp"))
CPP_IDS = [str(path.relative_to(CSRC)) for path in CPP]

# What each folder of csrc may include of the others. `kernels` itself and `kernels/mask` know nothing above them.
MAY_INCLUDE = {
    "kernels/mask": {"kernels", "kernels/mask"},
    "kernels": {"kernels"},
    "kernels/cpu": {"kernels", "kernels/mask", "kernels/cpu"},
    "kernels/cuda": {"kernels", "kernels/mask", "kernels/cuda"},
    "ops": {"ops", "kernels", "kernels/mask"},
    "autograd": {"autograd", "ops"},
    "autocast": {"autocast", "ops"},
    "meta": {"meta", "ops"},
    "vmap": {"vmap", "ops"},
    "cpu": {"cpu", "ops", "kernels", "kernels/mask", "kernels/cpu"},
    "cuda": {"cuda", "ops", "kernels", "kernels/mask", "kernels/cuda"},
}
# What each module of the package may import of the others.
MAY_IMPORT = {
    "__init__": {"_library", "functional", "masks", "nn", "position", "reference", "rotary", "sdpa", "visualize"},
    "_cuda": set(),
    "_isas": set(),
    "_library": {"_isas"},
    "masks": set(),
    "distributed": set(),
    "functional": {"masks", "rotary"},
    "sdpa": {"functional", "masks", "rotary"},
    "position": set(),
    "frequencies": set(),
    "rotary": {"distributed", "frequencies"},
    "reference": {"masks", "position", "rotary"},
    "visualize": set(),
    "nn/__init__": {"positions"},
    "nn/positions": {"position", "rotary"},
}


def includes(path: pathlib.Path) -> tuple[list[str], list[str]]:
    """The file's own includes, "a/b.h", and the system's, <a/b.h>."""
    text = path.read_text()
    return re.findall(r'^#include "(.*)"', text, re.M), re.findall(r"^#include <(.*)>", text, re.M)


@pytest.mark.parametrize("path", CPP, ids=CPP_IDS)
def test_includes_point_down(path: pathlib.Path) -> None:
    layer = path.parent.relative_to(CSRC).as_posix()
    assert layer in MAY_INCLUDE, f"say in this test what {layer} may include"
    for included in includes(path)[0]:
        assert (CSRC / included).exists(), f"expected a path from csrc, got {included}"
        target = pathlib.PurePosixPath(included).parent.as_posix()
        assert target in MAY_INCLUDE[layer], f"{layer} may not include {included}"


@pytest.mark.parametrize("path", CPP, ids=CPP_IDS)
def test_kernels_know_nothing_of_torch(path: pathlib.Path) -> None:
    if "kernels" not in path.parts:
        return
    own = [name for name in includes(path)[1] if not name.startswith("sys/")]  # the operating system's
    foreign = [name for name in own if "/" in name or name.startswith(("torch", "ATen", "c10"))]
    assert not foreign
    code = without_comments(path.read_text())
    assert not re.search(r"\b(at|c10|torch)::", code)


@pytest.mark.parametrize("path", CPP, ids=CPP_IDS)
def test_only_the_vector_vocabulary_names_an_instruction_set(path: pathlib.Path) -> None:
    if path.relative_to(CSRC).as_posix() in ("kernels/cpu/vec.h", "kernels/cpu/vec_pairs.h"):
        return
    code = without_comments(path.read_text())
    assert "immintrin.h" not in code
    assert not re.search(r"^\s*#\s*(el)?if.*(AVX|SSE|FMA|NEON|F16C|CPU_CAPABILITY)", code, re.M)
    assert not re.search(r"\b(_mm\d*_|__m\d{3}|__builtin_ia32_)", code)


@pytest.mark.parametrize("path", CPP, ids=CPP_IDS)
def test_no_macros_of_our_own(path: pathlib.Path) -> None:
    assert not re.search(r"^\s*#\s*define\s+\w+\(", path.read_text(), re.M)


def test_modules_import_downwards() -> None:
    for path in sorted((ROOT / "attention_ops").rglob("*.py")):
        name = path.relative_to(ROOT / "attention_ops").with_suffix("").as_posix()
        assert name in MAY_IMPORT, f"say in this test what {name} may import"
        assert package_imports(ast.parse(path.read_text())) <= MAY_IMPORT[name], name


def package_imports(tree: ast.Module) -> set[str]:
    """Modules of the package that a module imports by a relative import or by its full name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {node.module} if node.module else {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "attention_ops":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attention_ops."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {name.name.partition(".")[2] for name in node.names if name.name.startswith("attention_ops")}
    return found


@pytest.mark.parametrize("path", [*CPP, *PYTHON, *PROGRAMS], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_open_with_what_they_hold(path: pathlib.Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 400
    assert lines[0].startswith(("// ", '"""', 'r"""', "# ")), (
        f"expected a first line that says what it holds: {lines[0]}"
    )
    assert len(lines[0]) > 15


@dataclasses.dataclass(frozen=True)
class Function:
    place: str
    lines: int


def python_functions(path: pathlib.Path) -> list[Function]:
    """Functions with their length, the docstring not counted."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            extra = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            length = node.end_lineno - node.lineno + 1 - extra
            found.append(Function(f"{path.name}:{node.lineno} {node.name}", length))
    return found


def without_comments(text: str) -> str:
    """C++ with comments and the insides of literals blanked; lines keep their numbers."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'', re.S)

    def blank(match: re.Match[str]) -> str:
        if match[0].startswith(("/", "R")):
            return "\n" * match[0].count("\n")
        # A path stays: includes are read from the result.
        return '""' if not match[0].endswith(('.h"', '.cuh"')) else match[0]

    return token.sub(blank, text)


SCOPE = re.compile(r"^\s*(?:template\s*<.*>\s*)?(?:inline\s+)?(namespace|class|struct|union|enum|extern)\b", re.S)


def cpp_functions(path: pathlib.Path) -> list[Function]:
    """Function bodies at namespace or class scope, by matching braces; lambdas count for the function around them."""
    code = re.sub(r"^\s*#.*$", "", without_comments(path.read_text()), flags=re.M)
    found, open_scopes, start, i = [], 0, 0, 0
    while i < len(code):
        if code[i] == "{":
            header, end = code[start:i], closing_brace(code, i)
            if SCOPE.match(header.strip()) and not is_function(header):
                open_scopes, start = open_scopes + 1, i + 1
            else:
                if is_function(header):
                    first = start + len(header) - len(header.lstrip())
                    name = " ".join(header.split())[:60]
                    place = f"{path.name}:{code[:first].count(chr(10)) + 1} {name}"
                    found.append(Function(place, code[first : end + 1].count("\n") + 1))
                    start = end + 1
                i = end
        elif code[i] in ";}":
            start = i + 1
        i += 1
    return found


def is_function(header: str) -> bool:
    """Whether the text before a brace ends as the head of a function does: `...)`, then qualifiers or initialisers."""
    flat = re.sub(r"^\s*(public|private|protected):", "", header.strip()).strip()
    if re.match(r"(namespace|enum|extern)\b", flat) or "(" not in flat:
        return False
    if re.match(r"(template\s*<.*?>\s*)?(class|struct|union)\b[^()]*$", flat, re.S):
        return False
    return not re.search(r"=\s*$|=\s*\[.*\]\s*$|\breturn\b", flat)


def closing_brace(code: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(code)):
        depth += (code[i] == "{") - (code[i] == "}")
        if depth == 0:
            return i
    raise AssertionError("a brace is not closed")


def test_functions_are_short() -> None:
    functions = [f for path in CPP + PROGRAMS for f in cpp_functions(path)] + [
        f for path in PYTHON for f in python_functions(path)
    ]
    assert len(functions) > 100  # the readers above see something
    assert not [f for f in functions if f.lines > 80]
    long = [f for f in functions if f.lines > 40]
    assert len(long) <= 0.05 * len(functions), long


def test_the_reader_of_functions_knows_its_cases(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "case.h"
    source.write_text(
        "// A comment with a brace {\nnamespace a {\nstruct B : C<int> {\n  int x = 0;\n  int y[2] = {1, 2};\n"
        '  B() : x(1) {}\n  int f() const {\n    return g("}{");\n  }\n};\ntemplate <class T>\nvoid h(T x) {\n'
        "  auto l = [&] {\n    x();\n  };\n}\nconst int k = [] { return 1; }();\n}\n"
    )
    assert [(f.place.split()[0], f.lines) for f in cpp_functions(source)] == [
        ("case.h:6", 1),
        ("case.h:7", 3),
        ("case.h:11", 6),
    ]


@pytest.fixture(scope="module")
def operators() -> list[str]:
    import attention_ops  # noqa: F401

    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("attention_ops::")]


def has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def takes_tensors(name: str) -> bool:
    schema = torch._C._get_schema(name, "")
    return any("Tensor" in str(argument.type) for argument in schema.arguments)


def test_every_operator_is_in_every_layer(operators: list[str]) -> None:
    primitives = [name for name in operators if name.startswith("attention_ops::_") and takes_tensors(name)]
    assert len(primitives) >= 7
    for name in primitives:
        composite = has_kernel(name, "CompositeExplicitAutograd")  # of others, which have the shapes
        layers = ["CPU", *([] if composite else ["Meta"]), "FuncTorchBatched", "Batched"]
        if name != "attention_ops::_dropout_mask":  # which has no derivative
            layers.append("Autograd")
        if "_attention" in name and not name.endswith(("_backward", "_jvp")):
            # Those of gradients and tangents get what a forward has cast.
            layers += ["AutocastCPU", "AutocastCUDA"]
        assert [key for key in layers if not has_kernel(name, key)] == [], name


def test_public_operators_are_composite(operators: list[str]) -> None:
    public = [name for name in operators if not name.startswith("attention_ops::_")]
    assert {name.split("::")[1] for name in public} >= {"attention", "attention_weights", "attention_summaries"}
    for name in public:
        for key in ("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition", "Batched"):
            assert has_kernel(name, key), (name, key)


def test_an_operator_has_one_stem_in_every_folder(operators: list[str]) -> None:
    """Who knows the operator's name finds all its files."""
    stems = [path.stem for path in (CSRC / "ops").glob("*.cpp") if "TORCH_LIBRARY" in path.read_text()]
    assert stems
    for stem in stems:
        own = [name for name in operators if name.startswith(f"attention_ops::_{stem}_")]
        composite = any(
            has_kernel(name, "CompositeExplicitAutograd") for name in own
        )  # of others, which have the shapes
        for layer in ("cpu", "autograd" if composite else "meta"):
            assert (CSRC / layer / f"{stem}.cpp").exists(), f"{layer}/{stem}.cpp"
