"""The architecture, held by a test: imports point one way, and what one file alone may do is done there alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "pdn_train", "launch", "data_prep")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
# package -> the project's own modules it may import (a prefix each)
ALLOWED = {
    "kernels": ("kernels",),
    "pdn_train": ("kernels", "pdn_train"),
    "launch": ("kernels", "pdn_train", "launch"),
    "data_prep": ("data_prep", "pdn_train.shards", "pdn_train.tokenizer", "pdn_train.files", "pdn_train.telling"),
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=names)
def test_imports_point_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    own = {name for name in imports(path) if name.partition(".")[0] in PACKAGES}
    wrong = {name for name in own if not any(name == p or name.startswith(p + ".") for p in ALLOWED[package])}
    assert not wrong, f"{names(path)} imports {sorted(wrong)}"


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "kernels"], ids=names)
def test_kernels_import_torch_and_triton_only(path):
    foreign = {name.partition(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"kernels", "torch", "triton"}
    assert not foreign


def test_only_the_engine_imports_deepspeed():
    assert [names(p) for p in FILES if any(n.partition(".")[0] == "deepspeed" for n in imports(p))] == ["pdn_train/engine.py"]


def test_only_the_world_reads_the_environment():
    readers = [names(p) for p in FILES if "os.environ" in p.read_text() or "os.getenv" in p.read_text()]
    assert readers in (["pdn_train/world.py"], ["pdn_train/world.py", "launch/job.py"])


def test_the_model_knows_no_rank_and_no_optimizer():
    assert not any(
        n.startswith(("torch.distributed", "torch.optim", "deepspeed", "pdn_train.world")) for n in imports(ROOT / "pdn_train/model.py")
    )


@pytest.mark.parametrize(
    "module, banned", [("pdn_train.config", ("torch", "deepspeed")), ("launch.status", ("torch",)), ("kernels.recurrence", ("torch",))]
)
def test_cheap_modules_stay_cheap(module, banned):
    code = f"import {module}, sys; print([m for m in {banned!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_yaml_folder_cannot_shadow_pyyaml():
    assert {p.suffix for p in (ROOT / "yaml").iterdir()} <= {".yaml"}
    assert not list((ROOT / "tests").rglob("__init__.py"))
    code = "import yaml; print(yaml.safe_load('a: 1'))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "{'a': 1}"


def test_the_top_level_is_fixed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    top = {name.partition("/")[0] for name in tracked}
    allowed = {"pyproject.toml", "pdn_train", "kernels", "launch", "yaml", "data_prep", "tests", "README.md", "LICENSE", "docs"}
    assert {name for name in top if not name.startswith(".")} <= allowed


def test_the_version_leaves_the_name_kernels_alone():
    """transformers 5 reads the version of whatever distribution owns the import name `kernels` and changes its ways from 0.9 on."""
    import tomllib

    import kernels

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"].startswith("0.1.")
    assert not hasattr(kernels, "__version__")
    assert not any(d.startswith(("kernels", "transformers")) for d in project["dependencies"])
