"""Arrays get their places in safetensors files, and are found there again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modelexport.checkpoints.safetensors.arrays import Array, Share
from modelexport.checkpoints.safetensors.file import Reader, Writer, read_header
from modelexport.checkpoints.safetensors.sharded import Constant, bind, divide, lay_out, only_widened, widened
from modelexport.errors import CheckpointError
from modelexport.sharding.rules import TensorRule


def rule(name: str, dtype: str, shape: tuple[int, ...]) -> TensorRule:
    return TensorRule(name=name, dtype=dtype, shape=shape, module=name, path=name, parameter="weight", role="any")


def array(file: str, name: str, rows: tuple[int, int] = (0, 2)) -> Array:
    return Array(file, name, "I32", (rows[1] - rows[0], 2), (Share(name, (rows, (0, 2)), (0, 0)),))


def test_arrays_of_any_dtype_lie_where_readers_can_map_them(tmp_path: Path) -> None:
    """Padding is zero; a bfloat16 tensor becomes float32; a constant is there before anything is written."""
    rules = [rule("odd", "I8", (3,)), rule("wide", "I64", (2,)), rule("router", "BF16", (2, 3))]
    arrays = [
        Array("f", "odd", "I8", (5,), (Share("odd", ((0, 3),), (1,)),)),
        Array("f", "wide", "I64", (2,), (Share("wide", ((0, 2),), (0,)),)),
        widened("f", "router", "router", (2, 3)),
        Constant("f", "one", "F32", (), (), None, b"\0\0\x80\x3f", "a scale"),
    ]
    layout = lay_out(arrays, rules)
    layout.create(tmp_path)
    assert layout.create(tmp_path) == ()
    values = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.int8),
        "wide": torch.tensor([4, 5]),
        "router": torch.tensor([[1.5, -2, 3], [4, 5e-3, -6e9]], dtype=torch.bfloat16),
    }
    with Writer(layout, tmp_path) as writer:
        for name, value in values.items():
            writer.write(name, value)
    got = load_file(tmp_path / "f")
    assert got["odd"].tolist() == [0, 1, 2, 3, 0]
    assert got["wide"].tolist() == [4, 5]
    assert torch.equal(got["router"], values["router"].float())
    assert got["one"].item() == 1.0
    header = read_header(tmp_path / "f")
    assert all(info.offset % torch.finfo(torch.float32).bits % 4 == 0 for info in header.infos.values())
    found = bind(tmp_path, arrays, {"f": header.infos}, rules, config={}, format_name="any", headers={})
    with Reader(found) as reader:
        for name, value in values.items():
            assert torch.equal(reader.read(found.infos[name]), value)
    assert found.left_out == {"one": "a scale"}
    assert only_widened(header.infos["router"])
    assert not only_widened(header.infos["wide"])


def test_files_are_divided_by_size_and_name() -> None:
    arrays = [array("r0", "a"), array("r0", "b"), array("r0", "a", (2, 4)), array("r0", "c"), array("r1", "a")]

    def name(file: str, number: int, count: int) -> str:
        return f"{file}-{number}-of-{count}"

    divided = divide(arrays, max_bytes=32, name=name, one_per_key=True)
    assert [(each.file, each.name) for each in divided] == [
        ("r0-0-of-3", "a"),
        ("r0-0-of-3", "b"),
        ("r0-1-of-3", "c"),
        ("r0-2-of-3", "a"),
        ("r1-0-of-1", "a"),
    ]
    assert len({each.file for each in divide(arrays[:2], max_bytes=1, name=name)}) == 2


def test_of_very_many_problems_some_are_shown(tmp_path: Path) -> None:
    arrays = [array("f", f"t{number}") for number in range(30)]
    rules = [rule(each.name, "I32", (2, 2)) for each in arrays]
    with pytest.raises(CheckpointError, match=r"t11 I32 \[2, 2\] is missing; and 18 more$"):
        bind(tmp_path, arrays, {"f": {}}, rules, config={}, format_name="any", headers={})
