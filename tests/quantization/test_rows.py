"""Rows of a calibration text in the forms that data sets have, and the files that hold them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from modelexport.assets import demo_model_path
from modelexport.errors import UsageError
from modelexport.quantization.calibration.rows import Chat, read_row
from modelexport.quantization.calibration.text import TokenDocuments, load_tokenizer, token_batches_from

TURNS = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"text": "a", "messages": TURNS}, "a"),
        ({"messages": TURNS, "prompt": "ignored"}, Chat(TURNS)),
        ({"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}, Chat(TURNS)),
        ({"conversations": TURNS}, Chat(TURNS)),
        ({"input_ids": [1, 2]}, [1, 2]),
        ({"prompt": "2 + 2 =", "completion": " 4"}, "2 + 2 = 4"),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, Chat(TURNS)),
        ({"instruction": "2 + 2?", "input": "", "output": "4"}, Chat(TURNS, plain="2 + 2?\n\n4")),
        ({"messages": TURNS, "tools": '[{"name": "add"}]'}, Chat(TURNS, [{"name": "add"}])),
        ({"messages": TURNS, "tools": None}, Chat(TURNS)),
    ],
)
def test_the_forms_of_rows(row: dict[str, Any], found: Any) -> None:
    assert read_row(row, "here") == found


def test_what_a_message_lacks_is_not_there() -> None:
    """Columns of a data set have every key in every row; parts of text are one string."""
    said = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None}
    called = {"role": "assistant", "content": None, "tool_calls": [{}], "reasoning_content": None}
    found = read_row({"messages": [said, called]}, "here")
    assert found == Chat(
        [{"role": "user", "content": "ab"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"content": "x", "id": 3}, r'here has neither "text" .* it has "content" \(str\), "id" \(int\)'),
        ({"text": 3}, r'it has "text" \(int\)'),
        ({}, "it has no key"),
        ([3], "it is no object, but of the type list"),
        ({str(n): n for n in range(14)}, r'"11" \(int\) and 2 more'),
        ({"messages": [3]}, 'here: a message is an object with a "role"'),
        ({"conversations": [{"from": "narrator", "value": ""}]}, "a message is from narrator, where human, user"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "a part of the type video, where text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
        ({"prompt": "a", "completion": 3}, '"prompt" and "completion" are to be two strings, or two lists'),
        ({"messages": TURNS, "tools": "{"}, '"tools" are not JSON'),
        ({"messages": TURNS, "tools": {"a": 1}}, '"tools" are of the type dict'),
    ],
)
def test_a_row_of_no_known_form_is_named(row: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_row(row, "here")


TEMPLATE = (
    "{{ eos_token }}{% if tools %}{{ tools[0].name }} {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


def with_template(directory: Path, template: str | None = TEMPLATE) -> Path:
    for path in demo_model_path().glob("tokenizer*.json"):
        shutil.copy(path, directory)
    config = directory / "tokenizer_config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, **({} if template is None else {"chat_template": template})}))
    return directory


def documents(directory: Path, *rows: Any, name: str = "rows.jsonl") -> list[list[int]]:
    path = directory / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(TokenDocuments(path, directory, 2048))


def test_a_chat_begins_as_its_template_has_it(tmp_path: Path) -> None:
    """Not with a second token of that kind; and with the tools of the row."""
    tokenizer = load_tokenizer(with_template(tmp_path))
    [ids] = documents(tmp_path, {"messages": TURNS, "tools": [{"name": "add"}]})
    assert tokenizer.decode(ids) == f"{tokenizer.eos_token}add user: 2 + 2?\nassistant: 4\n"
    assert ids.count(tokenizer.eos_token_id) == 1


def test_only_instructions_do_without_a_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(with_template(tmp_path, None))
    [ids] = documents(tmp_path, {"instruction": "2 + 2?", "output": "4"})
    assert tokenizer.decode(ids[1:]) == "2 + 2?\n\n4"
    with pytest.raises(UsageError, match=r"line 1 is a chat, and the tokenizer in .* has no chat template"):
        documents(tmp_path, {"conversations": TURNS})


# ---------------------------------------------------------------------- parquet


class Table:
    """Of pyarrow's ParquetFile, what is asked of it."""

    rows: ClassVar[list[dict[str, Any]]] = []
    served: ClassVar[list[tuple[int, Any]]] = []

    def __init__(self, file: Any) -> None:
        if file.read(4) != b"PAR1":
            raise ValueError("no magic bytes")
        self.schema_arrow = SimpleNamespace(names=list(self.rows[0]))

    def iter_batches(self, batch_size: int, columns: list[str] | None) -> Iterator[Any]:
        for start in range(0, len(self.rows), batch_size):
            part = self.rows[start : start + batch_size]
            self.served.append((len(part), columns))
            kept = [{key: row[key] for key in columns or row} for row in part]
            yield SimpleNamespace(to_pylist=lambda kept=kept: kept)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(ParquetFile=Table))
    monkeypatch.setattr(Table, "served", [])
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and more")
    return path


def test_a_table_is_read_as_far_as_it_is_needed(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Table, "rows", [{"id": n, "input_ids": [n] * 10} for n in range(1000)])
    found = token_batches_from(table, "no-tokenizer-needed", vocabulary=1000, samples=2, length=10)
    assert found.shape == (2, 10)
    assert Table.served == [(64, ["input_ids"])], "of sixteen rows, those of one batch, in the one column that is known"


def test_a_row_of_a_table_that_is_of_no_use(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Table, "rows", [{"body": "x"}])
    with pytest.raises(UsageError, match=r'rows\.parquet, row 1 has neither .* it has "body" \(str\)'):
        list(TokenDocuments(table, table.parent, 8))
    monkeypatch.setattr(Table, "rows", [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}])
    with pytest.raises(UsageError, match=r"row 1 shows images, which are read of \.jsonl files"):
        list(TokenDocuments(table, table.parent, 8))
    table.write_bytes(b"text")
    with pytest.raises(UsageError, match=r"cannot be read as parquet: ValueError: no magic bytes"):
        list(TokenDocuments(table, table.parent, 8))


def test_a_table_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "pyarrow", raising=False)
    with pytest.raises(UsageError, match=r"rows\.parquet: the package that reads parquet is missing: pip install pyar"):
        TokenDocuments(tmp_path / "rows.parquet", tmp_path, 8)
