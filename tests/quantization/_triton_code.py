"""What Triton compiles its kernels to, for GPUs that need not be there: for processes where it does not interpret."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from modelexport.quantization.kernels import feedback_triton, microscaling_triton, reference
from modelexport.quantization.kernels import triton as plain
from modelexport.quantization.kernels.scales import shrinks
from modelexport.quantization.kernels.triton_numbers import EXACT

assert not triton.knobs.runtime.interpret, "the interpreter compiles nothing"
E4M3 = torch.float8_e4m3fn
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
INEXACT = re.compile(r"\b(fma|mad|rcp|(div|sqrt)\.(full|approx))\S*\.f\d\d\b|\S+\.ftz\S*", re.ASCII)
"""Of PTX: what rounds once where the reference rounds twice, divides otherwise than IEEE, or drops denormals."""
LOOSE = re.compile(r"\bf(add|sub|mul|div|neg|cmp)\s+\S*\s*(fast|reassoc|contract|arcp|afn)\b", re.ASCII)
"""Of LLVM's: what lets it compute otherwise than written."""
_DIVISION = {"v_fma_f32": 3, "v_fmac_f32": 2}
"""Instructions of AMD's that a division of float32 is made of, with v_div_fixup_f32."""


@contextmanager
def compiled_for(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Has launches compile for a GPU and run nothing; yields the kernels' names and what came of them."""
    found: list[tuple[str, Any]] = []

    def compile(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(self.arg_names, arguments, strict=False))
        given.update({name: options.pop(name) for name in self.arg_names if name in options})
        constants = {param.name: given[param.name] for param in self.params if param.is_constexpr}
        constants.update({name: 1 for name, value in given.items() if type(value) is int and value == 1})
        types = {name: "constexpr" if name in constants else mangle_type(given[name]) for name in self.arg_names}
        places = {(self.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(self, types, places)
        found.append((self.__name__, triton.compile(source, target=TARGETS[target], options=options)))

    launch, JITFunction.run = JITFunction.run, compile
    try:
        yield found
    finally:
        JITFunction.run = launch


def check(target: str, work: str, **instead: bool) -> None:
    """Compiles what a function of this module launches; raises an AssertionError for code that is not exact.

    ``instead``: launch options in place of the kernels' own.
    """
    EXACT.update(instead)
    with compiled_for(target) as found:
        run: Callable[[], None] = globals()[work]
        run()
    assert found
    for name, kernel in found:
        loose = LOOSE.findall(kernel.asm["llir"])
        assert not loose, f"{name}: {loose}"
        if "ptx" in kernel.asm:
            inexact = [match.group() for match in INEXACT.finditer(kernel.asm["ptx"])]
            assert not inexact, f"{name}: {inexact}"
            assert kernel.asm["cubin"]
        else:
            _check_amd(name, kernel.asm["amdgcn"])


def _check_amd(name: str, code: str) -> None:
    divisions = len(re.findall(r"\bv_div_fixup_f32\b", code))
    for instruction in ("v_fma_f32", "v_fmac_f32", "v_mad_f32", "v_mac_f32", "v_pk_fma_f32", "v_fma_mix_f32"):
        count = len(re.findall(rf"\b{instruction}(_\w+)?\b", code))
        expected = _DIVISION.get(instruction, 0) * divisions
        assert count == expected, f"{name}: {count} {instruction}, {expected} in {divisions} divisions"
    assert re.search(r"\.amdhsa_float_denorm_mode_32 3\b", code), f"{name}: drops denormals"


def round_back(storage: torch.dtype = torch.int8, shifted: bool = True, columns: int = 40, rows: int = 35) -> None:
    wide, steps = torch.ones(columns, rows), torch.ones(2, rows)
    block_of = torch.zeros(columns, dtype=torch.int64)
    given = (wide, wide, torch.ones(columns, columns), block_of, steps, steps if shifted else None)
    feedback_triton.round_back(*given, storage, -8.0, 7.0, wide)


def round_back_otherwise() -> None:
    """To other numbers; and one number alone, whose sizes a launch compiles in."""
    for storage in (torch.int8, E4M3, torch.uint8):
        round_back(storage, shifted=False)
    round_back(columns=1, rows=1)


def plain_formats() -> None:
    """Every way to store integers and FP8, from weights of every dtype, with and without zero points."""
    weight, scale = torch.ones(3, 256, dtype=torch.bfloat16), torch.ones(3, 2, dtype=torch.bfloat16)
    whole, each = torch.empty(3, 256, dtype=torch.int8), {"out": torch.empty(3, 2, dtype=torch.float64)}
    words = {bits: torch.empty(3, 256 // (32 // bits), dtype=torch.int32) for bits in (4, 8)}
    zero = torch.zeros(3, 2, dtype=torch.int8)
    plain.quantise_groups(weight, 128, words[4], scale, 7.5)
    plain.quantise_groups(weight.half(), 128, words[8], scale, 127.0, bits=8, zero=zero)
    plain.quantise_rows(weight.float(), None, whole, scale[:, :1], 127.0)
    plain.quantise_blocks(weight, 128, None, whole.view(E4M3), scale[:1], 448.0)
    plain.squared_error(weight, weight.float(), None, **each)
    plain.squared_error(weight, whole.view(E4M3), scale, **each)
    plain.squared_error(weight, words[4], scale, **each, zero=zero)
    plain.dequantise(words[8], scale, weight, bits=8, zero=zero)
    plain.dequantise(whole, scale, weight.half())
    plain.dequantise(whole.view(E4M3), scale, weight.float())


def scale_searches() -> None:
    weight, out = torch.ones(3, 128, dtype=torch.bfloat16), torch.empty(3, 16, dtype=torch.float64)
    for storage, bits in ((torch.int8, 4), (torch.int8, 8), (E4M3, 8)):
        amax = reference.row_amax(weight)
        plain.search_errors(weight, amax, storage, torch.bfloat16, 7.5, shrinks(bits), out, bits=bits)
    plain.search_errors(weight, torch.ones(3, 2), torch.int8, torch.bfloat16, 7.5, shrinks(4), out, bits=4)


def shared_exponents() -> None:
    weight, factor = torch.ones(3, 64, dtype=torch.bfloat16), torch.ones(1)
    pairs, errors = torch.empty(3, 32, dtype=torch.uint8), torch.empty(3, 2, dtype=torch.float64)
    for q, scale, divisor in (
        (pairs, torch.empty(3, 4, dtype=E4M3), factor),
        (pairs, torch.empty(3, 2, dtype=torch.uint8), None),
        (torch.empty(3, 64, dtype=E4M3), torch.empty(3, 2, dtype=torch.uint8), None),
    ):
        microscaling_triton.quantise(weight, q, scale, divisor, 126, search=True)
        microscaling_triton.dequantise(q, scale, divisor, weight)
        microscaling_triton.squared_error(weight, q, scale, divisor, errors)
