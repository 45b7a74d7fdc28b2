"""A model of 2.47 GB exported from a hub as it comes, beside downloading it, at several speeds of the network.

    python tests/benchmarks/bench_hub.py                       about 20 minutes, 9 GB of disk
    python tests/benchmarks/bench_hub.py --layers 2 --speeds 200

The hub runs on this machine, and paces what it sends. Downloading is ``snapshot_download`` into an empty cache, its
interpreter's start included, as everywhere. Disk: the most that everything but the source takes, looked at ten times a
second. Then an export is killed (SIGKILL, all its processes) at five moments and run to its end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from modelexport.system.tables import size_text, table
from tests.benchmarks._measuring import add_write_option, run, written
from tests.benchmarks.bench_export import make_model
from tests.helpers.hub_server import Hub, running_hub

NAME = "bench/model"
MBIT = 1_000_000 / 8
DOWNLOAD = "import sys, huggingface_hub as hub; hub.snapshot_download(sys.argv[1])"


def blocks(directory: Path) -> int:
    """Bytes of disk that everything below a directory takes."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class Disk:
    """The most that a directory takes, from now until it is stopped."""

    def __init__(self, directory: Path) -> None:
        self.peak, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, args=(directory,))
        self._thread.start()

    def _look(self, directory: Path) -> None:
        while not self._ended.wait(0.1):
            self.peak = max(self.peak, blocks(directory))

    def stop(self) -> int:
        """Ends, and returns the peak."""
        self._ended.set()
        self._thread.join()
        return self.peak


def export_command(model: str, out: Path, tp: int) -> list[str]:
    """The command that is measured."""
    command = [sys.executable, "-m", "modelexport", "--model", model, "--quant", "int4", "--tp", str(tp)]
    return [*command, "--out", str(out), "--quiet"]


def digest(directory: Path) -> str:
    """A digest of a checkpoint's weights and config."""
    found = hashlib.sha256()
    for path in sorted([*directory.glob("*.safetensors"), directory / "config.json"]):
        found.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def cache(work: Path) -> None:
    """An empty cache of the hub, from here on."""
    shutil.rmtree(work / "cache", ignore_errors=True)
    os.environ["HF_HOME"] = str(work / "cache")


def measured(command: list[str], work: Path) -> tuple[float, int, int]:
    """Seconds, peak of private memory of a process, peak of the disk."""
    disk = Disk(work)
    try:
        found = run(command, work.parent / "log", sample=True, timeout=7200)
    finally:
        peak = disk.stop()
    if found.status:
        raise SystemExit((work.parent / "log").read_text())
    return found.wall, found.process_peak, peak


def killed(hub: Hub, work: Path, seconds: float) -> None:
    """Kills an export at five moments, and runs it to its end."""
    before, kills = hub.sent, 0
    out = work / "killed"
    for number in range(5):
        process = subprocess.Popen(export_command(NAME, out, 2), start_new_session=True, stderr=subprocess.DEVNULL)
        try:
            process.wait(2.5 + seconds * (number + 1) / 12)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    if not out.exists():
        subprocess.run(export_command(NAME, out, 2), check=True)
    source = sum(path.stat().st_size for path in hub.models[NAME].glob("*.safetensors"))
    left = [path.name for path in work.iterdir() if path.name.startswith(".")]
    times = (hub.sent - before) / source
    print(f"killed {kills} times: {times:.3f} times the source was sent; left behind: {left or 'nothing'}")


def main() -> int:
    """Parses the arguments, makes the model and runs both ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--speeds", type=float, nargs="+", default=[50, 200, 1000], help="Mbit/s")
    parser.add_argument("--work", type=Path, help="directory to work in (default: a temporary one)")
    add_write_option(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as name, running_hub() as hub:
        model, work = Path(name) / "model", Path(name) / "work"
        make_model(model, given.layers)
        work.mkdir()
        hub.models[NAME] = model
        os.environ["HF_ENDPOINT"] = hub.url
        with written(__file__, given.write):
            size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
            local, memory, disk = measured(export_command(str(model), work / "local", 2), work)
            expected, output = digest(work / "local"), blocks(work / "local")
            shutil.rmtree(work / "local")
            rows = [["from a directory, tp 2", "", f"{local:.1f}", "", size_text(disk), size_text(memory)]]
            for speed in given.speeds:
                hub.rate = speed * MBIT
                cache(work)
                alone, _, disk = measured([sys.executable, "-c", DOWNLOAD, NAME], work)
                rows.append(["download alone", f"{speed:g}", f"{alone:.1f}", "1.00", size_text(disk), ""])
                for tp in (1, 2):
                    cache(work)
                    wall, memory, disk = measured(export_command(NAME, work / "out", tp), work)
                    assert digest(work / "out") == expected, "other bytes than from the directory"
                    shutil.rmtree(work / "out")
                    texts = [f"{wall:.1f}", f"{wall / alone:.2f}", size_text(disk), size_text(memory)]
                    rows.append([f"export as it comes, tp {tp}", f"{speed:g}", *texts])
            columns = ["", "Mbit/s", "s", "x download", "disk", "peak a process"]
            print(f"source {size_text(size)}, checkpoint {size_text(output)} (int4)\n")
            print("\n".join(table(columns, rows)))
            began = time.perf_counter()
            killed(hub, work, size / hub.rate)
            assert digest(work / "killed") == expected
            print(f"the same bytes ({time.perf_counter() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
