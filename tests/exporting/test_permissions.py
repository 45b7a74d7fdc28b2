"""The permissions of what an export writes: those of the user's umask."""

from __future__ import annotations

import os
from pathlib import Path

from modelexport.exporting import export


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        export(out=str(tmp_path / "ckpt"), evaluate=False, quiet=True, log=str(tmp_path / "log"))
    finally:
        os.umask(former)
    files = {path.name: path.stat().st_mode & 0o777 for path in (*(tmp_path / "ckpt").rglob("*"), tmp_path / "log")}
    assert files == dict.fromkeys(files, 0o640)
    assert {"model.safetensors", "modelexport.json", "config.json", "log"} <= files.keys()
    assert (tmp_path / "ckpt").stat().st_mode & 0o777 == 0o750
