"""Mixtures: the block type of every tensor, as llama-quantize gives it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from modelexport.errors import UsageError
from modelexport.quantization import formats, mixtures
from modelexport.quantization.assignment import Assignment
from modelexport.quantization.mixtures import MIXTURES, MixtureFormats, MixtureModel, MixtureTensor, resolve

MODEL: dict[str, Any] = {
    "architecture": "llama",
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "experts": 0,
    "tied": False,
    "importance": False,
}
SMALL = ("MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")


@dataclass(frozen=True)
class Block:
    """What a mixture asks of a number format."""

    name: str

    @property
    def alignment(self) -> tuple[int, int]:
        return (1, 32 if self.name in SMALL else 256)

    def bits_per_weight(self, shape: tuple[int, int], dtype: object) -> float:
        return float(re.sub(r"[^0-9]", "", self.name)[0])


def tensors(layers: int, *, columns: int = 512, down: int = 1024, experts: int = 0) -> Iterator[MixtureTensor]:
    yield MixtureTensor("token_embd.weight", ("embed",), (1000, columns), None)
    yield MixtureTensor("output.weight", ("head",), (1000, columns), None)
    for i in reversed(range(layers)):  # in any order
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield MixtureTensor(f"blk.{i}.{name}.weight", (f"{i}.{name}",), (columns, columns), i)
        exps = "_exps" if experts else ""
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            shape = (columns, down) if name == "ffn_down" else (down, columns)
            names = [f"{i}.{name}.{e}" for e in range(experts)] if experts else [f"{i}.{name}"]
            yield MixtureTensor(f"blk.{i}.{name}{exps}.weight", tuple(names), shape, i)


def resolved(name: str, *, columns: int = 512, down: int = 1024, **changed: Any) -> MixtureFormats:
    model = MixtureModel(**{**MODEL, **changed})
    listed = list(tensors(model.layers, columns=columns, down=down, experts=model.experts))
    if model.tied:
        del listed[1]
    return resolve(MIXTURES[name], listed, model, Block)  # type: ignore[arg-type]


def layers_of(found: MixtureFormats, name: str, block_type: str) -> list[int]:
    kinds = {module: form.name for module, form in found.formats.items()}
    return sorted(int(m.partition(".")[0]) for m, kind in kinds.items() if m.endswith(name) and kind == block_type)


def test_q4_k_m_of_llama_3_8b() -> None:
    """Sixteen value projections and as many ffn_down have more bits: the first and last eighth, a third between."""
    found = resolved("q4_k_m")
    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert layers_of(found, "attn_v", "Q6_K") == layers_of(found, "ffn_down", "Q6_K") == more
    assert layers_of(found, "attn_output", "Q4_K") == list(range(32))
    assert (found.formats["embed"].name, found.formats["head"].name) == ("Q4_K", "Q6_K")
    assert not found.kept
    assert not found.notes


def test_glm_5_3_s_small_linears_are_kept_and_its_queries_have_8_bits() -> None:
    names = ("attn_q_a", "attn_q_b", "attn_output", "indexer.attn_q_b", "ssm_f_a", "attn_kv_a_mqa")
    listed = [MixtureTensor(f"blk.0.{name}.weight", (name,), (512, 512), 0) for name in names]
    kinds = {}
    for architecture in ("glm5-next", "glm-dsa"):
        found = resolve(MIXTURES["q4_k_m"], listed, MixtureModel(**{**MODEL, "architecture": architecture}), Block)  # type: ignore[arg-type]
        kinds[architecture] = [found.formats[name].name if name in found.formats else "kept" for name in names]
    assert kinds["glm5-next"] == ["Q8_0", "Q8_0", "Q4_K", "kept", "kept", "kept"]
    assert kinds["glm-dsa"] == ["Q4_K"] * 6


@pytest.mark.parametrize(
    ("name", "changed", "module", "block_type"),
    [
        ("q4_k_m", {"tied": True}, "embed", "Q6_K"),
        ("q8_0", {"tied": True}, "embed", "Q8_0"),
        ("q4_0", {}, "head", "Q6_K"),
        ("q4_k_m", {"architecture": "falcon"}, "head", "Q8_0"),
        ("q4_k_m", {"architecture": "falcon"}, "31.ffn_down", "Q5_K"),
        ("q2_k", {}, "0.attn_v", "Q4_K"),
        ("q2_k", {"kv_heads": 32}, "0.attn_v", "Q3_K"),
        ("q2_k_s", {}, "3.ffn_down", "Q4_K"),
        ("q2_k_s", {}, "4.ffn_down", "Q2_K"),
        ("q3_k_m", {}, "1.attn_v", "Q5_K"),
        ("q3_k_m", {}, "2.attn_v", "Q4_K"),
        ("q3_k_m", {}, "1.ffn_down", "Q5_K"),
        ("q3_k_m", {}, "2.ffn_down", "Q4_K"),
        ("q3_k_l", {}, "9.attn_output", "Q5_K"),
        ("q4_k_s", {}, "4.attn_v", "Q4_K"),
        ("q4_k_s", {"layers": 80}, "4.attn_v", "Q5_K"),
        ("iq4_xs", {}, "3.ffn_down", "Q5_K"),
        ("iq4_xs", {"importance": True}, "3.ffn_down", "IQ4_XS"),
        ("q4_0", {"importance": True}, "3.ffn_down", "Q4_1"),
        ("q4_0", {}, "3.ffn_down", "Q4_0"),
        ("q4_k_m", {"experts": 8}, "5.attn_k", "Q8_0"),
        ("q4_k_m", {"experts": 8}, "5.attn_output", "Q5_K"),
        ("q3_k_l", {"experts": 8}, "5.attn_output", "Q3_K"),
        ("q4_k_m", {"experts": 8}, "6.ffn_down.7", "Q6_K"),
        ("q4_k_m", {"experts": 16}, "5.attn_k", "Q4_K"),
        ("mxfp4_moe", {"experts": 16}, "5.ffn_up.3", "MXFP4"),
        ("mxfp4_moe", {"experts": 16}, "5.attn_k", "Q8_0"),
    ],
)
def test_rules(name: str, changed: dict[str, Any], module: str, block_type: str) -> None:
    assert resolved(name, **changed).formats[module].name == block_type


def test_rows_that_blocks_do_not_divide() -> None:
    """They have smaller blocks, or none, and it is said."""
    found = resolved("q4_k_m", columns=544, down=100)
    assert {module: found.formats[module].name for module in ("5.attn_q", "0.attn_v", "embed", "head")} == {
        "5.attn_q": "Q5_0",
        "0.attn_v": "Q8_0",
        "embed": "Q5_0",
        "head": "Q8_0",
    }
    assert "0.ffn_down" not in found.formats
    assert found.kept["0.ffn_down"] == "100 input features are no multiple of the block of any type"
    assert any(
        note == "32 linears (blk.*.attn_q.weight of the file): Q5_0 in place of Q4_K: 544 input features are no "
        "multiple of 256"
        for note in found.notes
    )


def test_one_module_of_several_tensors_has_one_type() -> None:
    """The one with more bits."""
    listed = [MixtureTensor(f"blk.0.attn_{x}.weight", ("0.qkv",), (256, 256), 0) for x in "qkv"]
    found = resolve(MIXTURES["q4_k_m"], listed, MixtureModel(**{**MODEL, "layers": 1}), Block)  # type: ignore[arg-type]
    assert found.formats["0.qkv"].name == "Q6_K"
    assert found.notes == (
        "1 linear is several tensors of the file, Q4_K and Q6_K by q4_k_m: the one with more bits is taken for both",
    )


def test_the_smallest_is_said_to_need_importance() -> None:
    assert any("--algorithm imatrix" in note for note in resolved("q2_k_s").notes)
    assert not resolved("q2_k_s", importance=True).notes


def test_names_and_numbers_are_told_apart() -> None:
    numbers = [mixture.file_type for mixture in MIXTURES.values()]
    assert len(set(numbers)) == len(numbers)
    assert all(mixtures.of_file_type(mixture.file_type) is mixture for mixture in MIXTURES.values())
    assert mixtures.of_file_type(1) is None


def test_every_block_type_has_a_number_format() -> None:
    kinds = {kind for mixture in MIXTURES.values() for kind in mixture.block_types()}
    assert {mixtures.number_format_of(kind).name for kind in kinds} <= set(formats.names())
    assert mixtures.number_format_of("MXFP4").name == "mxfp4-wo"


@pytest.mark.parametrize(
    ("text", "mixture", "head"),
    [
        ("q8_0", "q8_0", True),
        ("Q4_K_M", "q4_k_m", True),
        ("q6-k", "q6_k", True),
        ("*.mlp.*=int4:32,*=q8_0", "q8_0", True),
        ("*=int8", None, False),
        ("*head=q6_k", None, False),
        ("q4_k", None, False),
        ("*.layers.*=q6_k", None, False),
    ],
)
def test_a_mixture_is_read(text: str, mixture: str | None, head: bool) -> None:
    found = Assignment.parse(text)
    assert (None if found.mixture is None else found.mixture.name) == mixture
    done = found.resolved(lambda own: MixtureFormats(own, {"lm_head": mixtures.number_format_of("Q8_0")}, {}))
    assert (done.of_vocabulary("lm_head") is not None) is head


def test_a_linear_like_another_is_meant_by_its_patterns_and_has_its_own_format_by_a_mixture() -> None:
    """As those of draft layers are, which llama.cpp counts as blocks of their own."""
    draft, twin = "mtp.layers.0.mlp.up_proj", "model.layers.3.mlp.up_proj"
    given = {name: mixtures.number_format_of(kind) for name, kind in ((draft, "Q4_K"), (twin, "Q6_K"))}
    found = Assignment.parse("*.layers.2.*=int8,model.*=q4_k_m").resolved(lambda own: MixtureFormats(own, given, {}))
    assert found.of(draft, like=twin) is given[draft]
    assert found.of(draft) is None
    assert getattr(found.of(draft, like="model.layers.2.mlp.up_proj"), "name", "") == "int8"


@pytest.mark.parametrize(
    ("text", "group_size", "says"),
    [
        ("q8_0:32", None, "q8_0: group size 32 was given"),
        ("q8_0", 64, "q8_0: group size 64 was given"),
        ("q4_km", None, "did you mean 'q4_k_m'"),
        ("*=q4_k_mm", None, "did you mean 'q4_k_m'"),
    ],
)
def test_a_slip_is_refused(text: str, group_size: int | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Assignment.parse(text, group_size=group_size)
