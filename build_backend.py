"""The build backend: setuptools', with archives that are the same to the byte wherever and whenever they are built.

Names are sorted; times are ``SOURCE_DATE_EPOCH``, or the first that a zip file can have; owners and the builder's umask
are left out.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

_FIRST = 315532800  # 1980-01-01


def build_wheel(wheel_directory: str, *args: Any, **kwargs: Any) -> str:
    """Builds a wheel; returns its name. See PEP 517."""
    name = build_meta.build_wheel(wheel_directory, *args, **kwargs)
    path = Path(wheel_directory, name)
    with zipfile.ZipFile(path) as archive:
        files = {info.filename: (archive.read(info), _mode(info.external_attr >> 16)) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        # RECORD, which has the others' hashes, is the last one by custom.
        for each in sorted(files, key=lambda each: (each.endswith(".dist-info/RECORD"), each)):
            info = zipfile.ZipInfo(each, time.gmtime(_epoch())[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3  # Unix
            info.external_attr = (stat.S_IFREG | files[each][1]) << 16
            archive.writestr(info, files[each][0])
    return name


def build_sdist(sdist_directory: str, *args: Any, **kwargs: Any) -> str:
    """Builds a source distribution; returns its name. See PEP 517."""
    name = build_meta.build_sdist(sdist_directory, *args, **kwargs)
    path = Path(sdist_directory, name)
    with tarfile.open(path) as archive:
        members = sorted((info for info in archive if info.isreg()), key=lambda info: info.name)
        contents = {info.name: archive.extractfile(info).read() for info in members}  # type: ignore[union-attr]
    with (
        open(path, "wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=_epoch()) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.size, info.mtime, info.mode = member.size, _epoch(), _mode(member.mode)
            archive.addfile(info, io.BytesIO(contents[member.name]))
    return name


def _mode(mode: int) -> int:
    return 0o755 if mode & stat.S_IXUSR else 0o644


def _epoch() -> int:
    return max(_FIRST, int(os.environ.get("SOURCE_DATE_EPOCH", _FIRST)))
