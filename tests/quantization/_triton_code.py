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

from modelexport.quantization.kernels import feedback_triton

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


def check(target: str, work: str) -> None:
    """Compiles what a function of this module launches; raises an AssertionError for code that is not exact."""
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


def round_back() -> None:
    for storage, zero in ((torch.int8, True), (torch.int8, False), (E4M3, False), (torch.uint8, False)):
        wide, steps = torch.ones(40, 35), torch.ones(2, 35)
        given = (wide, wide, torch.ones(40, 40), torch.zeros(40, dtype=torch.int64), steps, steps if zero else None)
        feedback_triton.round_back(*given, storage, -8.0, 7.0, wide)


def round_one_number() -> None:
    one = torch.ones(1, 1)
    feedback_triton.round_back(one, one, one, torch.zeros(1, dtype=torch.int64), one, one, torch.int8, -8.0, 7.0, one)
