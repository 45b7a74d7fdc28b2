"""Rows of a calibration text that show images."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from modelexport.errors import UsageError
from modelexport.quantization.calibration.images import (
    check_processor,
    image_files,
    image_rows,
    load_processor,
    processed,
    shows_images,
)
from modelexport.quantization.calibration.text import TokenDocuments
from tests.helpers.tiny_wrappers import PROCESSED, save_chat, save_processor

pytestmark = pytest.mark.filterwarnings("ignore")


def row(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "w9 w8"}]}]}


def written(directory: Path, *rows: Any) -> Path:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.mark.parametrize("model_type", PROCESSED)
def test_a_processor_puts_as_many_tokens_as_an_image_has(tmp_path: Path, model_type: str) -> None:
    processor = load_processor(save_processor(model_type, tmp_path), "--calib")
    [first, second] = image_rows(save_chat(tmp_path))
    ids = [processed(processor, each)["input_ids"] for each in (first, second)]
    assert [(x.shape[0], int((x == 240).sum())) for x in ids] == [(1, 4), (1, 4)]


def test_an_image_is_a_file_beside_the_text_or_in_the_row(tmp_path: Path) -> None:
    content = b"the bytes of an image"
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    path = written(
        tmp_path,
        row({"type": "image", "image": "one.png"}),
        {"text": "an image of something"},
        row({"type": "image", "path": "/two.png"}, {"type": "image", "url": "file:///a%20b.png"}),
        row({"type": "image_url", "image_url": {"url": url}}),
        {"messages": [{"role": "user", "content": "no image"}]},
    )
    found = list(image_rows(path))
    assert [each.images for each in found] == [
        (tmp_path / "one.png",),
        (Path("/two.png"), Path("/a b.png")),
        (content,),
    ]
    assert found[1].messages[0]["content"] == [*[{"type": "image"}] * 2, {"type": "text", "text": "w9 w8"}]
    assert found[1].where.endswith("rows.jsonl, line 3")
    (tmp_path / "one.png").touch()
    assert image_files(path) == [tmp_path / "one.png"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image", "image": "https://host/cat.png"}, "https://host/cat.png is not on this machine: save it"),
        ({"type": "image", "url": "data:image/png;base64,@@"}, "an image is no base64"),
        ({"type": "image"}, 'neither "image" nor "url"'),
        ({"type": "image", "image": 3}, 'neither "image" nor "url"'),
        ({"type": "video", "video": "a.mp4"}, "a part of the type video, where text and images are known"),
    ],
)
def test_what_is_no_image_here_is_refused(tmp_path: Path, part: dict[str, Any], said: str) -> None:
    path = written(tmp_path, row({"type": "image", "image": "a.png"}, part))
    with pytest.raises(UsageError, match=said):
        list(image_rows(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"no image", "in no format that is known"),
        (b"\x89PNG\r\n\x1a\n" + b"x" * 50, "cannot be read"),
    ],
)
def test_a_file_that_is_no_image_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "a.png").write_bytes(content)
    [found] = image_rows(written(tmp_path, row({"type": "image", "image": "a.png"})))
    with pytest.raises(UsageError, match=rf"line 1: the image .*a.png.* {said}"):
        processed(None, found)


def test_a_model_without_a_processor_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has neither preprocessor_config.json nor processor_config.json: copy"):
        check_processor(tmp_path, "--calib rows.jsonl")


def test_rows_with_images_are_no_part_of_the_text(tmp_path: Path) -> None:
    path = written(tmp_path, row({"type": "image", "image": "a.png"}), {"input_ids": [1, 2, 3]})
    assert list(TokenDocuments(path, tmp_path, 8)) == [[], [1, 2, 3]]
    with pytest.raises(UsageError, match="line 1 shows images, and --text is of text alone"):
        list(TokenDocuments(path, tmp_path, 8, flag="--text"))


@pytest.mark.parametrize(
    "value", [3, {"messages": 3}, {"messages": [3]}, {"messages": [{"content": [3]}]}, {"text": ""}]
)
def test_other_rows_show_no_images(value: Any) -> None:
    assert not shows_images(value)
