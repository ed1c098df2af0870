"""The wheel: what is in it, and that it plans on its own, outside the repository, with the presets it brings along."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.planning import QUICK

ROOT = Path(__file__).parent.parent
PROBLEM = {
    "model": "opt-13b",
    "cluster": "a100-4gpu",
    "workload": "sharegpt",
    "slo": {"ttft_s": "250ms", "tpot_s": "100ms"},
    "objective": "max_goodput",
    "search": {**QUICK, "max_tp": 2, "max_pp": 1},
}


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed, away from the repository and from the tests' own settings."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return the wheel, built from a copy of what git would hand out (no leftovers of earlier builds)."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("planner", "profiler", "runtime", "topologies", "pyproject.toml", "README.md", "LICENSE"):
        _copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    run(*pip, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def _copy(source: Path, target: Path) -> None:
    import shutil

    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Return the folder of scripts of a fresh environment with the wheel in it.

    Its dependencies are those of this environment, through a path file, so that nothing is downloaded; ours is left
    out, since the wheel's own packages come first on the path.
    """
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps"]
    run(*pip, wheel, cwd=folder)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        return file.namelist()


@pytest.mark.slow
def test_the_wheel_holds_three_packages_and_nothing_else(wheel):
    top = {name.split("/")[0] for name in names(wheel)}
    assert {name for name in top if not name.endswith(".dist-info")} == {"planner", "profiler", "runtime"}
    info = next(name for name in top if name.endswith(".dist-info"))
    assert re.fullmatch(r"goodput_planner-\d+\.\d+\.\d+\.dist-info", info)
    assert any("LICENSE" in name for name in names(wheel))


@pytest.mark.slow
def test_every_data_file_and_module_is_in_the_wheel(wheel):
    inside = set(names(wheel))
    data = [path for path in (ROOT / "topologies").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(data) > 30
    missing = {f"planner/topologies/{path.relative_to(ROOT / 'topologies').as_posix()}" for path in data} - inside
    assert not missing
    for package in ("planner", "profiler", "runtime"):
        modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
        assert modules <= inside, modules - inside


@pytest.mark.slow
def test_the_installed_wheel_plans_outside_the_repository_with_its_presets(installed, tmp_path):
    file = tmp_path / "problem.yaml"
    file.write_text(yaml.safe_dump(PROBLEM))
    cache = str(tmp_path / "numba")
    where = run(installed / "python", "-c", "import planner; print(planner.__file__)", cwd=tmp_path).stdout
    assert "site-packages" in where and str(ROOT) not in where
    done = run(installed / "plan", file, "-q", "-o", "deployment.yaml", cwd=tmp_path, NUMBA_CACHE_DIR=cache)
    assert "aggregate" in done.stdout.splitlines()[0]
    deployment = yaml.safe_load((tmp_path / "deployment.yaml").read_text())
    assert deployment["provenance"]["digests"]["profile distserve-opt-13b-a100"]
    arguments = ["simulate", "deployment.yaml", "-w", "sharegpt", "--rate", "3", "--duration", "60"]
    shown = run(installed / "planner", *arguments, cwd=tmp_path, NUMBA_CACHE_DIR=cache)
    assert "ttft" in shown.stdout


@pytest.mark.slow
def test_both_scripts_answer_help_and_presets_are_found(installed, tmp_path):
    for script in ("planner", "plan"):
        assert "plan" in run(installed / script, "--help", cwd=tmp_path).stdout
    assert "16 GPUs on 2 nodes" in run(installed / "planner", "topology", "show", "h100-2x8", cwd=tmp_path).stdout


def test_help_does_not_wait_for_what_only_planning_needs():
    code = (
        "import sys; from planner.cli import _run; _run(['--help']); _run(['plan', '--help']);"
        "late = {'numba', 'scipy', 'pulp', 'networkx', 'highspy', 'numpy', 'torch'} & set(sys.modules);"
        "assert not late, late"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)


def test_the_packages_are_listed_and_the_planner_needs_no_torch():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for package in ("planner", "profiler", "runtime")
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert found <= listed and listed - found == {"planner.topologies"}
    assert project["project"]["scripts"] == {"planner": "planner.cli:main", "plan": "planner.cli:plan_main"}
    needed = project["project"]["dependencies"]
    assert not [name for name in needed if re.match(r"torch|ray|vllm", name)]


def test_the_capacity_sweep_prints_a_table_in_ten_lines_of_code():
    source = ROOT / "examples" / "capacity_sweep.py"
    done = subprocess.run([sys.executable, source], check=True, capture_output=True, text=True, cwd=ROOT)
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["requests/s", "GPUs", "layout"]
    served = [row.split() for row in rows if row.split()[1] != "-"]
    rates, gpus = [int(row[0]) for row in served], [int(row[1]) for row in served]
    assert rates == sorted(rates) and gpus == sorted(gpus) and gpus[0] == 1 and gpus[-1] > 4
    assert len(served) < len(rows) and "GPUs would serve it" in rows[-1]  # the last rate is more than the cluster takes
    code = source.read_text().split('"""')[-1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
