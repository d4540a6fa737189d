"""The folder `kernels` must stay out of the way of Hugging Face's package of that name."""

import ast
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections import defaultdict
from graphlib import TopologicalSorter
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURELIB = Path(sysconfig.get_paths()["purelib"])
FIXED = ("kernels", "references", "reports", "fixtures", "tests")


def _python(code, cwd, path=(), *, safe=False):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, path)))
    environment.pop("PYTHONSAFEPATH", None)
    flags = ["-P"] if safe else []
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("folder", FIXED)
def test_fixed_folders_are_no_packages(folder):
    assert not (ROOT / folder / "__init__.py").exists()


def test_import_kernels_is_hugging_faces_even_at_the_root():
    pytest.importorskip("kernels")
    found = _python("import kernels; print(kernels.__file__)", ROOT)
    assert Path(found).parent == PURELIB / "kernels"


IMPORT_TRANSFORMERS = "import transformers, sys; transformers.Qwen3ForCausalLM; print('fine')"


def test_transformers_imports_at_the_root_beside_kernels():
    assert _python(IMPORT_TRANSFORMERS, ROOT) == "fine"


def test_transformers_imports_at_the_root_without_kernels(tmp_path):
    """Site-packages as links, without Hugging Face's kernels, in front of the real one."""
    hidden = (
        "import sys; from importlib.machinery import PathFinder\n"
        f"real = {str(PURELIB)!r}\n"
        "class Hide(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        if name == 'kernels':\n"
        "            path = [p for p in sys.path if p != real]\n"
        "        return PathFinder.find_spec(name, path, target)\n"
        "sys.meta_path = [Hide if f is PathFinder else f for f in sys.meta_path]\n"
        "import kernels; assert kernels.__file__ is None, kernels.__file__\n"
        "del sys.modules['kernels']\n"
    )
    assert _python(hidden + IMPORT_TRANSFORMERS, ROOT) == "fine"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The built wheel, unpacked."""
    directory = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation",
            "--quiet", "--disable-pip-version-check", "--wheel-dir", str(directory),
        ],
        check=True,
    )  # fmt: skip
    (built,) = directory.glob("*.whl")
    target = directory / "unpacked"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(target)
    return target


def test_the_wheel_holds_the_packages_and_no_folder_of_ours(wheel):
    assert {p.name for p in wheel.iterdir() if not p.name.endswith(".dist-info")} == {
        "reconcile",
        "reconcile_references",
        "reconcile_kernels",
        "reconcile_reports",
        "reconcile_fixtures",
    }
    shipped = {str(p.relative_to(wheel)) for p in wheel.rglob("*") if p.is_file()}
    assert "reconcile_kernels/ternary_cuda/naive.cu" in shipped
    assert "reconcile_fixtures/cases/tiny-ternary.toml" in shipped
    assert "reconcile_fixtures/tiny-lm-ternary/model.safetensors" in shipped
    assert {f"{p}/py.typed" for p in ("reconcile", "reconcile_kernels")} <= shipped


def test_the_wheel_runs_the_embedded_case_and_leaves_transformers_working(wheel, tmp_path):
    code = (
        "import reconcile, kernels, transformers; from reconcile.cli import main\n"
        f"assert reconcile.__file__.startswith({str(wheel)!r})\n"
        "raise SystemExit(main(['run', '--only', '*.0.mlp.*', '--level', 'op']))"
    )
    pytest.importorskip("kernels")
    out = _python(code, tmp_path, [wheel], safe=True)
    assert "3 of 3" in out
    assert (tmp_path / ".reconcile" / "latest" / "report.html").exists()


def test_every_entry_point_loads():
    for group in ("cases", "formats", "kernels", "models", "reporters"):
        points = entry_points(group=f"reconcile.{group}")
        assert points, group
        for point in points:
            point.load()


def test_the_distribution_has_the_name_that_the_docs_give():
    assert distribution("reconcile-numerics").metadata["Name"] == "reconcile-numerics"


def test_the_engine_imports_no_provider_by_name():
    for file in (ROOT / "reconcile").rglob("*.py"):
        text = file.read_text()
        for provider in ("references", "kernels", "reports", "fixtures"):
            assert f"import reconcile_{provider}" not in text, file
            assert f"from reconcile_{provider}" not in text, file


def _room(file):
    """reconcile/judging/sides.py is in the room `judging`; a module at the top is its own."""
    return file.relative_to(ROOT / "reconcile").parts[0].removesuffix(".py")


def _rooms_used(file):
    """The rooms of the engine that a file imports from, where it stands in another."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for parts in (name.split(".") for name in names):
            if parts[0] == "reconcile" and len(parts) > 1 and parts[1] != _room(file):
                yield parts[1]


def test_imports_between_packages_run_one_way():
    graph = defaultdict(set)
    for file in (ROOT / "reconcile").rglob("*.py"):
        graph[_room(file)].update(_rooms_used(file))
    assert {"judging", "numbers", "diagnosis"} <= graph.keys()
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_reconcile_without_a_model_imports_no_transformers():
    assert _python("import reconcile, sys; print('transformers' in sys.modules)", ROOT) == "False"
