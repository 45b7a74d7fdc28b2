"""The checkpoint under construction, in the process that publishes it: staging, side files, record, rename."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelexport.checkpoints.formats.hf import CARD, RECORD, SideFiles, copy_side_files
from modelexport.checkpoints.safetensors.file import INDEX_NAME, Checkpoint
from modelexport.checkpoints.staging import Staging
from modelexport.errors import CheckpointError, ModelExportError
from modelexport.models import checkpoint_formats as formats
from modelexport.models.target_plan import TargetPlan
from modelexport.system.small_files import write_small
from modelexport.system.terminal import note

MakeRecord = Callable[[SideFiles, Mapping[str, Path], dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class TargetDirectorySpec:
    """Describes the files of a target besides its weights, and the conditions under which a run may be resumed.

    Attributes:
        source: the checkpoint that the weights come from; its tokenizer and the like come along.
        fingerprint: what must be equal for an interrupted run to be resumed.
        inputs: the files that the weights are made from.
        config: the content of config.json, where the format has no other.
        stale: names of files beside the source's weights that do not come along: what they say no longer holds.
        record: makes modelexport.json of what came along, every file beside the weights (name -> path) and the first
            rank's result; empty where there is nothing to record.
        card: makes README.md of the record; None: there is none, and the source's comes along like any other file.
        renamed: files beside the source's weights that come along under another name.
    """

    source: Checkpoint
    target: TargetPlan
    fingerprint: Mapping[str, Any]
    inputs: Sequence[Path]
    config: bytes
    record: MakeRecord
    stale: frozenset[str] = frozenset()
    card: Callable[[Mapping[str, Any]], str] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)


class TargetDirectory:
    """The staged checkpoint: ``begin``, then the ranks write the weights, then ``finish``. A context manager."""

    def __init__(self, out: str, files: TargetDirectorySpec, *, overwrite: bool, quiet: bool) -> None:
        self._out, self._files, self._overwrite, self._quiet = out, files, overwrite, quiet
        self._staging: Staging | None = None
        self._side: SideFiles | None = None

    def begin(self, boot: str | None = None) -> dict[str, Any]:
        """Opens the staging directory and puts everything into it but the weights.

        Args:
            boot: what :func:`~modelexport.checkpoints.staging.journal.boot_ids` says of the machines that write; None:
                this one alone does.

        Returns:
            The steps that an interrupted run has finished, with their records: none if a weight file had to be made.

        Raises:
            UsageError: the target exists, or another export is in its place.
        """
        files = self._files
        self._staging = Staging.open(
            Path(self._out), files.fingerprint, inputs=files.inputs, overwrite=self._overwrite, boot=boot
        )
        if self._staging.restarted and not self._quiet:
            machine = "the machine" if boot is None else "a machine"
            note(f"{machine} has restarted, or is another one, since an export here was cut off: it begins anew")
        if self._staging.lost and not self._quiet:
            note(f"another export here is dropped, which cannot be finished: {self._staging.lost}")
        payload = self._staging.directory
        not_the_models = {*formats.source(files.source.format).SIDE_FILES, *files.stale}
        weights = set(files.source.files)
        self._side = copy_side_files(files.source.directory, payload, weights, not_the_models, files.renamed)
        restored = getattr(formats.source(files.source.format), "restored_files", None)
        if restored is not None:
            made, missing = restored(files.source)
            self._side.left_out.update(missing)
            for name in made.keys() - set(self._side.copied):
                self._write(name, made[name])
        self._write("config.json", files.config)
        for name, content in files.target.side_files.items():
            if name != INDEX_NAME:
                self._write(name, content)
        created = files.target.layout.create(payload)
        return {} if created else dict(self._staging.done)

    def finish(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Writes index, record and card, and publishes; returns the record (empty where there is none).

        Args:
            outcome: the first rank's result.
        """
        staging, side, files = self._staging, self._side, self._files
        assert staging is not None
        assert side is not None
        payload = staging.directory
        index = files.target.side_files.get(INDEX_NAME)
        if index is not None:  # last: without it nobody takes the files for a checkpoint
            self._write(INDEX_NAME, index)
        record = files.record(side, self._beside_weights(payload), outcome)
        if record:
            self._write(RECORD, (json.dumps(record, indent=1) + "\n").encode())
            if files.card is not None:
                self._write(CARD, files.card(record).encode())
        staging.publish()
        return record

    def _write(self, name: str, content: bytes) -> None:
        assert self._staging is not None
        write_small(self._staging.directory / name, content, error=CheckpointError)

    def _beside_weights(self, directory: Path) -> dict[str, Path]:
        """Name -> path of every file but the weights, and the record and the card that are yet to be written."""
        other = {file.name for file in self._files.target.layout.files} | {RECORD}
        if self._files.card is not None:  # it is not hashed either: people edit cards
            other.add(CARD)
        paths = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
        return {name: path for name, path in paths.items() if name not in other}

    def __enter__(self) -> TargetDirectory:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._staging is not None:
            self._staging.close(ended=str(error) if isinstance(error, ModelExportError) and error.final else "")
