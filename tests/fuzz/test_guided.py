"""Inputs that the guided fuzzer has found: each is read, or refused by an error of ours; and no reader is left out."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import modelexport
from tests.fuzz.guided import _corpus
from tests.fuzz.guided._execution import Fault, Place, Reader, execute
from tests.fuzz.guided._readers import READERS, TRUSTED

_PACKAGE = Path(modelexport.__file__).parent
_DECODES = frozenset(
    {"json.loads", "json.load", "pickle.loads", "struct.unpack", "yaml.safe_load", "base64.b64decode", "int.from_bytes"}
    | {"recv", "recvmsg", "unpack_from", "iter_unpack"}
    | {"read_json", "read_small", "read_yaml", "read_pickle", "read_value", "read_message"}
)
"""Calls by which bytes from elsewhere become values; those without a module are of any object."""
_NAMES = frozenset(each.rpartition(".")[2] for each in _DECODES)


@pytest.fixture(scope="module")
def executions(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Fault | str]], set[CodeType]]:
    """What came of each reader's inputs, and the code that ran."""
    outcomes, ran = {}, set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            ran.add(frame.f_code)

    for reader in READERS:
        place, inputs = Place(tmp_path_factory.mktemp(reader.name)), _corpus.load(reader.name)
        for data in inputs[:1]:
            execute(reader, data, place)  # what is imported on first use is there when time and memory count
        former = sys.getprofile()
        sys.setprofile(note)
        try:
            outcomes[reader.name] = [execute(reader, data, place) for data in inputs]
        finally:
            sys.setprofile(former)
    return outcomes, ran


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_the_corpus_is_read_or_refused(reader: Reader, executions: Any) -> None:
    outcomes = executions[0][reader.name]
    assert "read" in outcomes, f"one input in tests/fuzz/corpus/{reader.name}.jsonl must be sound"
    faults = [(number, each) for number, each in enumerate(outcomes) if isinstance(each, Fault)]
    assert not faults, "inputs by their lines in the file, from 0"


def test_no_function_that_decodes_bytes_is_left_out(executions: Any) -> None:
    ran = {(Path(code.co_filename), code.co_firstlineno) for code in executions[1]}
    decoding = {where: name for path in sorted(_PACKAGE.rglob("*.py")) for where, name in _decoding(path)}
    left_out = {name for where, name in decoding.items() if where not in ran}
    assert left_out == TRUSTED.keys()


def _decoding(path: Path) -> Iterator[tuple[tuple[Path, int], str]]:
    """The functions of a module that make values of bytes: where each begins, and its name."""
    functions, source = (ast.FunctionDef, ast.AsyncFunctionDef), path.read_text(encoding="utf-8")
    if not any(f"{name}(" in source for name in _NAMES):  # most modules, which need not be parsed
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, functions) and any(map(_decodes, ast.walk(node))):
            first = min(each.lineno for each in (node, *node.decorator_list))
            yield (path, first), f"{path.relative_to(_PACKAGE).as_posix()}:{node.name}"


def _decodes(node: ast.AST) -> bool:
    name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or name not in _NAMES:
        return False
    whole = ast.unparse(node.func)
    return whole in _DECODES or (name in _DECODES and not whole.startswith("collectives."))  # which are of tensors
