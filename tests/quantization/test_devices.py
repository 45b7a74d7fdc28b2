"""Number formats on an accelerator: the bytes of the CPU; and what a setting of the device means."""

from __future__ import annotations

import json

import pytest

from modelexport.errors import UsageError
from modelexport.quantization import devices
from tests.helpers.warm import run_warm

EVERY_FORMAT = """
import json, torch
from modelexport.quantization import formats
from tests.helpers import fake_accelerator
from tests.quantization._weights import FORMATS, quantise, random_weight, same_bytes, widths
fake_accelerator.register()
done = []
for name, group in FORMATS:
    for observer in ("amax", "mse"):
        number_format = formats.get(name, group_size=group, observer=observer)
        unit = widths(number_format)
        weight = random_weight(19, 301 if unit == 1 else 2 * unit, torch.bfloat16, 1)
        there = quantise(number_format, weight.to("fakegpu"))
        assert all(value.device.type == "fakegpu" for value in there.values()), name
        host = {key: value.cpu() for key, value in there.items()}
        assert same_bytes(host, quantise(number_format, weight)), (name, group, observer)
        assert torch.equal(number_format.dequantise(there).cpu(), number_format.dequantise(host)), name
        errors = number_format.squared_error(weight.to("fakegpu"), there).cpu()
        assert torch.equal(errors, number_format.squared_error(weight, host)), name
        done.append(name)
print(json.dumps([len(done), len(fake_accelerator.operations)]))
"""


def test_every_format_has_the_bytes_of_the_cpu() -> None:
    done = run_warm("-c", EVERY_FORMAT)
    assert done.returncode == 0, done.stderr[-2000:]
    formats, operations = json.loads(done.stdout)
    assert formats >= 40
    assert operations >= 40


@pytest.mark.parametrize("name", ["", "gpu 1", "cuda:", "cuda:x", "cpu:1", "auto:0", "CUDA"])
def test_what_is_no_device(name: str) -> None:
    with pytest.raises(UsageError, match="auto, cpu, cuda or one of several such as cuda:1 is needed"):
        devices.check_name(name)


CHOSEN = """
from modelexport.errors import UsageError
from modelexport.quantization import devices
from tests.helpers import fake_accelerator
assert devices.chosen("auto", calibrated=True) == "cpu"
fake_accelerator.register()
assert devices.chosen("auto", calibrated=True) == "fakegpu"
assert devices.chosen("auto", calibrated=False) == "cpu"
assert devices.chosen("cpu", calibrated=True) == "cpu"
assert devices.chosen("fakegpu:0", calibrated=False) == "fakegpu:0"
assert [str(devices.of_rank("fakegpu", rank)) for rank in range(2)] == ["fakegpu:0"] * 2, "it is shared"
assert str(devices.of_rank("cpu", 3)) == "cpu"
for name in ("fakegpu:1", "cuda"):
    try:
        devices.chosen(name, calibrated=True)
    except UsageError as error:
        print(error)
"""


@pytest.mark.skipif("__import__('torch').accelerator.is_available()", reason="there is an accelerator")
def test_the_device_that_a_setting_means() -> None:
    done = run_warm("-c", CHOSEN)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.partition(": torch")[0] for line in lines] == ["--device fakegpu:1", "--device cuda"]
    words = "sees no such device with float64 (1 of fakegpu): leave it out, or type --device cpu"
    assert all(words in line for line in lines)


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="there is no GPU of CUDA")
def test_hidden_states_are_page_locked_for_cuda() -> None:
    import torch

    from modelexport.quantization.calibration.hidden_states import HiddenStates

    given = [torch.randn(2, 3, 4) for _ in range(2)]
    states = HiddenStates([(2, 3, 4)] * 2, torch.float32, torch.device("cuda"))
    for number, value in enumerate(given):
        states[number] = value.cuda()
    assert all(torch.equal(found.cpu(), value) for found, value in zip(states, given, strict=True))


SHARED = """
import torch
from modelexport.quantization import devices
from tests.helpers import fake_accelerator
fake_accelerator.register()
assert devices.free_memory("fakegpu") is None
torch.fakegpu.mem_get_info = lambda device: (1000, 2000)
print(devices.free_memory("fakegpu"), devices.free_memory("fakegpu", 3), devices.free_memory("cpu"))
"""


@pytest.mark.skipif("__import__('torch').accelerator.is_available()", reason="there is an accelerator")
def test_ranks_share_what_is_free() -> None:
    """Three of them are on the one device that there is."""
    done = run_warm("-c", SHARED)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["900", "300", "None"]
