"""Who may import whom: the design's layers, held by reading every import in the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gdlab"
# A small helper package: this number goes up only with a subject that the labs need.
MOST_LINES = 11500
FILES = sorted(path for path in PACKAGE.rglob("*.py"))

NUMERIC = {"numpy", "scipy", "ml_dtypes"}
BASE = {"part"}
DESCRIPTION = {"part", "parts", "communication", "experiment", "laws"}
ARITHMETIC = {"formats", "loss_scaler", "clipping"}

# Of a layer: the third-party packages and gdlab's own modules it may import. `lazy`: further packages
# that it may import inside a function only, where a caller hands it such an object or asks for it.
LAYERS: dict[str, dict[str, set[str]]] = {
    "laws": {"third": NUMERIC | {"pydantic"}, "own": BASE, "lazy": set()},
    "theory": {"third": NUMERIC, "own": {"laws", "theory"} | BASE, "lazy": set()},
    "formats": {"third": NUMERIC, "own": {"loss_scaler"} | BASE, "lazy": {"torch"}},
    "loss_scaler": {"third": NUMERIC, "own": BASE, "lazy": {"torch"}},
    "clipping": {"third": NUMERIC, "own": {"formats"} | BASE, "lazy": {"torch"}},
    "part": {"third": {"pydantic", "pydantic_core", "annotated_types"}, "own": set(), "lazy": set()},
    "parts": {"third": {"numpy", "pydantic"}, "own": DESCRIPTION, "lazy": {"cloudpickle"}},
    "communication": {"third": set(), "own": BASE, "lazy": set()},
    "experiment": {"third": {"numpy", "pydantic"}, "own": DESCRIPTION, "lazy": set()},
    "expected": {"third": {"numpy"}, "own": DESCRIPTION | {"theory", "formats"}, "lazy": set()},
    "records": {"third": {"numpy"}, "own": {"records"}, "lazy": set()},
    "reading": {"third": {"numpy"}, "own": DESCRIPTION | {"records"}, "lazy": set()},
    "following": {"third": {"numpy"}, "own": {"records", "reading"}, "lazy": set()},
    "trace": {"third": {"numpy"}, "own": DESCRIPTION | {"records", "reading", "following"},
              "lazy": {"pandas", "pyarrow"}},
    "descent": {
        "third": {"torch", "numpy", "ml_dtypes"},
        "own": DESCRIPTION | ARITHMETIC | {"descent"},
        "lazy": {"cloudpickle"},
    },
    "backends": {
        "third": {"torch", "numpy", "cloudpickle"},
        "own": DESCRIPTION | ARITHMETIC | {"theory", "records", "trace", "descent", "backends"},
        "lazy": {"tqdm"},
    },
    "views": {
        "third": {"numpy", "plotly"},
        "own": DESCRIPTION | {"formats", "clipping", "records", "trace", "theory", "expected", "views"},
        "lazy": {"tsdownsample"},
    },
    "autodiff": {
        "third": {"torch", "numpy", "plotly", "networkx"},
        "own": {"autodiff", "views"},
        "lazy": {"torch"},
    },
    "panel": {
        "third": {"numpy", "plotly", "ipywidgets", "anywidget", "traitlets", "IPython", "tsdownsample", "pydantic"},
        "own": DESCRIPTION | {"trace", "theory", "views", "backends", "panel", "clipping", "formats", "autodiff"},
        "lazy": {"kaleido"},
    },
}
ANYTHING = {"cli", "__init__", "__main__", "dashboard"}


def imports(path: Path) -> list[tuple[str, bool]]:
    """Return the modules that a file imports, in full, each with whether it is inside a function."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: write imports in full"
                found.append((child.module or "", inside))
                found.extend((f"{child.module}.{alias.name}", inside) for alias in child.names
                             if (child.module or "").split(".")[0] == "gdlab")  # fmt: skip
            visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def own_layer(module: str) -> str | None:
    """Return the layer that `gdlab.x.y` belongs to; None for gdlab's own lazy names."""
    parts = module.split(".")
    if len(parts) < 2:
        return None
    return parts[1] if (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file() else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_layer_may(path: Path) -> None:
    name = layer_of(path)
    if name in ANYTHING:
        return
    assert name in LAYERS, f"gdlab/{name} has no layer: add it to this test, or put the file where it belongs"
    layer = LAYERS[name]
    for module, inside in imports(path):
        top = module.split(".")[0]
        if top == "gdlab":
            own = own_layer(module)
            assert own is None or own in layer["own"], f"{path}: {name} may not import gdlab.{own}"
        elif top not in sys.stdlib_module_names:
            allowed = layer["third"] | (layer["lazy"] if inside else set())
            where = "inside a function" if inside else "at the top"
            assert top in allowed, f"{path}: {name} may not import {top} {where}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_the_panel_or_the_command_line(path: Path) -> None:
    if layer_of(path) in {"panel", "cli", "__main__"}:
        return
    for module, _ in imports(path):
        assert own_layer(module) not in {"panel", "cli"}, f"{path} imports {module}"


def test_the_panel_takes_only_launch_and_its_run_from_the_backends() -> None:
    allowed = {"", "launch", "launch_all", "warm", "Run", "RankFailed"}
    for path in (PACKAGE / "panel").rglob("*.py"):
        for module, _ in imports(path):
            if own_layer(module) == "backends":
                assert module.removeprefix("gdlab.backends").lstrip(".") in allowed, f"{path} imports {module}"


def test_importing_gdlab_loads_nothing_heavy() -> None:
    heavy = ["torch", "plotly", "ipywidgets", "anywidget", "pandas", "pyarrow", "scipy.stats", "IPython"]
    code = f"import sys, gdlab; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_describing_an_experiment_loads_nothing_heavy() -> None:
    code = (
        "import sys, gdlab as gd; gd.Experiment(problem=gd.Digits(model='mlp'), compute_time=gd.Exponential(0.05))"
        ".times.draw(0, 0); print(*[n for n in ('torch', 'plotly', 'ipywidgets', 'pandas', 'pyarrow') if n in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def lines_of_code(path: Path) -> int:
    """Count a file's lines without blank lines, comments and docstrings: explaining costs nothing."""
    text = path.read_text(encoding="utf-8")
    told: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            told.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for number, line in lines if number not in told and line.strip() and not line.strip().startswith("#"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_is_short_enough_to_read(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 350, f"{path} has {lines} lines: one idea a file"


def test_the_package_stays_small() -> None:
    total = sum(map(lines_of_code, FILES))
    assert total <= MOST_LINES, f"gdlab/ has {total} lines of code: what exceeds {MOST_LINES:,} must take something out"
