"""The wheel and the source distribution: the same bytes wherever they are built, with what they should hold."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[1]
BUILD = "import build_backend, sys; out = sys.argv[1]; build_backend.build_sdist(out); build_backend.build_wheel(out)"
TREES = ("modelexport", "docs", "recipes", "notebooks", "tests")
FILES = (
    "build_backend.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE",
    "constraints.txt",
)  # fmt: skip


def sources() -> list[str]:
    """The files of the repository that a distribution may hold, relative to its root."""
    found = [path for tree in TREES for path in (ROOT / tree).rglob("*") if path.is_file()]
    kept = [path for path in found if not {"__pycache__", ".ipynb_checkpoints"} & set(path.parts)]
    names = [str(path.relative_to(ROOT)) for path in kept if path.suffix not in (".pyc", ".nbi", ".nbc")]
    return sorted([*FILES, *names])


def build(directory: Path, *, umask: int, mtime: float) -> dict[str, bytes]:
    """Builds both of a fresh copy of the sources; returns their bytes by name."""
    for name in sources():
        copy = directory / "sources" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)
        copy.chmod(0o666 & ~umask)
        os.utime(copy, (mtime, mtime))
    (directory / "built").mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "SOURCE_DATE_EPOCH"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, str(directory / "built")],
        cwd=directory / "sources",
        env={**environment, "PYTHONPATH": "."},
        umask=umask,
        capture_output=True,
        check=True,
        timeout=120,
    )
    return {path.name: path.read_bytes() for path in (directory / "built").iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("first")
    build(directory, umask=0o022, mtime=1.6e9)
    return directory / "built"


def test_two_builds_have_the_same_bytes(built: Path, tmp_path: Path) -> None:
    first = {path.name: path.read_bytes() for path in built.iterdir()}
    assert sorted(name.rpartition(".")[2] for name in first) == ["gz", "whl"]
    assert build(tmp_path, umask=0o007, mtime=1.7e9) == first


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    [path] = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        found = {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()}
    package = [name for name in sources() if name.startswith("modelexport/")]
    assert sorted(name for name in found if ".dist-info/" not in name) == package
    assert {name.rpartition("/")[2] for name in found if ".dist-info/" in name} == {
        "METADATA", "WHEEL", "RECORD", "LICENSE", "entry_points.txt", "top_level.txt",
    }  # fmt: skip
    assert set(found.values()) == {0o644}


def test_the_source_distribution_builds_and_tests_itself(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    assert set(sources()) <= names
    generated = {name for name in names - set(sources()) if "egg-info" not in name}
    assert generated == {"PKG-INFO", "setup.cfg"}
    assert {(member.uid, member.gid, member.uname, member.mode) for member in members} == {(0, 0, "", 0o644)}
