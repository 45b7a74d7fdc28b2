"""open_model: any directory is opened as what it is, or refused with a sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from modelexport import plugins
from modelexport.errors import CheckpointError, PlanError
from modelexport.models.checkpoint_formats import containers, formats
from modelexport.models.opening import config_path, open_model, read_config
from modelexport.models.rules import tensor_rules
from modelexport.quantization.methods import methods
from modelexport.resharding import reshard
from tests.helpers.models import copy_checkpoint, make_llama

FORMATS = ("dcp", "hf", "megatron", "trtllm", "vllm-sharded")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The default model in a format, of two ranks; to be read only."""
    home = tmp_path_factory.mktemp("sharded")

    def get(name: str) -> Path:
        if not (home / name).exists():
            reshard(checkpoint=str(make_llama()), out=str(home / name), format=name, tp=2, quiet=True)
        return home / name

    return get


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_known_again(name: str, sharded: Callable[[str], Path]) -> None:
    found = open_model(sharded(name))
    expected = open_model(make_llama())
    assert found.format == name
    assert set(found.placements) <= set(found.infos)
    assert {key: (info.dtype, info.shape) for key, info in found.infos.items()} == {
        key: (info.dtype, info.shape) for key, info in expected.infos.items()
    }
    assert len(found.files) == 2


def without_config(directory: Path, target: Path) -> Path:
    shutil.copytree(directory, target)
    for name in ("config.json", "hf_config.json"):
        (target / name).unlink(missing_ok=True)
    return target


@pytest.mark.parametrize("name", ["dcp", "megatron", "vllm-sharded"])
def test_a_config_that_is_needed(name: str, sharded: Callable[[str], Path], tmp_path: Path) -> None:
    bare = without_config(sharded(name), tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"give --config DIR, the directory or file of the model's config\.json"):
        open_model(bare)
    for given in (make_llama(), make_llama() / "config.json", str(make_llama())):
        assert set(open_model(bare, given).infos) == set(open_model(make_llama()).infos)


@pytest.mark.parametrize("name", ["dcp", "megatron", "trtllm", "vllm-sharded"])
def test_a_config_of_another_model(name: str, sharded: Callable[[str], Path]) -> None:
    for other, text in (
        (make_llama(model_type="mixtral"), "missing|is no part|experts"),
        (make_llama(layers=3), "missing|num_hidden_layers|its shape is"),
        (make_llama(intermediate=256), "intermediate_size is|shape|is BF16|but config.json makes it"),
    ):
        with pytest.raises(CheckpointError, match=text):
            tensor_rules(open_model(sharded(name), other))


@pytest.mark.parametrize("sharding", ["whole", "hf"])
def test_a_config_of_another_model_beside_whole_names(
    sharding: str, sharded: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = make_llama() if sharding == "whole" else sharded("hf")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..* is missing"):
        tensor_rules(open_model(directory, make_llama(layers=3)))
    strange = tmp_path / "config.json"
    strange.write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(PlanError, match="no_such_model"):
        tensor_rules(open_model(directory, strange))


def test_a_config_that_is_none(tmp_path: Path) -> None:
    for given in (tmp_path / "nowhere", tmp_path, "~no-such-user-here"):
        with pytest.raises(CheckpointError, match=r"--config .* does not exist; give the model's config\.json"):
            open_model(make_llama(), given)
    for name, content in (("weights", b"\x80\xff"), ("list", b"[1]"), ("empty", b""), ("deep", b"[" * 100_000)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name}: (is not valid JSON|must hold a JSON object)"):
            read_config(tmp_path / name)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="is a directory; a regular file is needed"):
        read_config(tmp_path)


def test_the_given_config_wins(tmp_path: Path) -> None:
    keys = {**json.loads((make_llama() / "config.json").read_text()), "bos_token_id": 77}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    for path in (tmp_path, tmp_path / "config.json"):
        assert config_path(path) == tmp_path / "config.json"
        found = open_model(make_llama(), path).config
        assert found is not None
        assert found["bos_token_id"] == 77


@pytest.mark.parametrize(
    ("there", "text"),
    [
        ({}, "holds no safetensors file; found nothing"),
        ({"readme.txt": b"hi"}, "holds no safetensors file; found readme.txt"),
        ({"config.json": b"{}"}, "holds no safetensors file; found config.json"),
        ({".metadata": b""}, "config.json"),
        ({".metadata": b"", "config.json": b'{"model_type": "llama"}'}, r"\.metadata: "),
        ({"metadata.json": b'{"sharded_backend": "torch_dist"}'}, "holds no safetensors file; found metadata.json"),
        ({"common.pt": b""}, "only as pickles"),
        ({"rank0.safetensors": b""}, "truncated"),
        ({"model-rank-0-part-0.safetensors": b""}, "config.json"),
        ({"config.json": b'{"architecture": "LlamaForCausalLM", "mapping": {}}'}, "TensorRT-LLM's, lacks num_hidden"),
        ({"a.safetensors": b"\xff" * 8}, "header"),
    ],
)
def test_directories_that_hold_no_checkpoint(there: dict[str, bytes], text: str, tmp_path: Path) -> None:
    for name, content in there.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=text):
        open_model(tmp_path)


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("nowhere")
    for name, text in (("none", "does not exist"), ("file", "is not a directory"), ("link", "does not exist")):
        with pytest.raises(CheckpointError, match=text):
            open_model(tmp_path / name)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_model("a\0b")


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o100])
def test_a_directory_that_may_not_be_read(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = tmp_path / "private"
    shutil.copytree(make_llama(), private)
    private.chmod(mode)
    if os.access(private / "config.json", os.R_OK):  # root may: as it would be for others
        private.chmod(0o755)
        module = next(iter(formats().values()))

        def refuse(directory: Path) -> bool:
            raise PermissionError(errno.EACCES, "Permission denied", str(directory / "config.json"))

        monkeypatch.setattr(module, "recognises", refuse)
    try:
        with pytest.raises(CheckpointError, match="private: cannot be read: Permission denied"):
            open_model(private)
    finally:
        private.chmod(0o755)


def test_mixed_directories(sharded: Callable[[str], Path], tmp_path: Path) -> None:
    """What belongs to another format is either not looked at, or makes an error; never a different model."""
    expected = open_model(make_llama())
    weights = (make_llama() / "model.safetensors").read_bytes()

    def mixed(name: str, files: dict[str, bytes]) -> Path:
        target = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(sharded(name), target)
        for file, content in files.items():
            (target / file).write_bytes(content)
        return target

    with pytest.raises(CheckpointError, match=r"\.metadata: damaged pickle"):
        open_model(mixed("hf", {".metadata": b"junk"}))
    with pytest.raises(CheckpointError, match=r"zz\.safetensors: has no DCP_SHARDING_INFO"):
        open_model(mixed("hf", {"zz.safetensors": weights}))
    with pytest.raises(CheckpointError, match="is in two files"):
        open_model(mixed("hf", {"a.safetensors": weights}))
    with pytest.raises(CheckpointError, match=r"model-rank-2-part-0\.safetensors is missing"):
        open_model(mixed("vllm-sharded", {"model-rank-3-part-0.safetensors": weights}))
    outside = json.dumps({"weight_map": {"a": "../../etc/passwd"}}).encode()
    for name in FORMATS:
        found = open_model(mixed(name, {"model.safetensors.index.json": outside, "notes.txt": b""}))
        assert (found.format, list(found.infos)) == (name, list(open_model(sharded(name)).infos))
    for name in ("dcp", "megatron", "trtllm", "vllm-sharded"):
        found = open_model(mixed(name, {"model.safetensors": b"junk", "extra.safetensors": weights}))
        assert (found.format, set(found.infos)) == (name, set(expected.infos))
        assert all(path.name not in ("model.safetensors", "extra.safetensors") for path in found.files)


def test_a_stray_metadata_json_makes_nothing_megatrons(tmp_path: Path) -> None:
    """Other programs call a file so too; it comes along, and the copy is still a distributed checkpoint."""
    source = copy_checkpoint(make_llama(), tmp_path / "source")
    (source / "metadata.json").write_text('{"version": 3}')
    for number, target in enumerate(("dcp", "megatron", "dcp")):
        out = tmp_path / f"{number}"
        reshard(checkpoint=str(source), out=str(out), tp=2, format=target, quiet=True)
        assert open_model(out).format == target
        source = out


def test_more_heads_than_anybody_has(tmp_path: Path) -> None:
    source = copy_checkpoint(make_llama(), tmp_path / "source", config={"num_attention_heads": 10**7})
    with pytest.raises(CheckpointError, match=r"num_attention_heads is 10,000,000; at most 8,192"):
        reshard(checkpoint=str(source), out=str(tmp_path / "out"), tp=2, quiet=True)


def test_names_read_from_sources_are_those_that_modules_define() -> None:
    own = {method.FORMAT for method in methods().values() if method.FORMAT is not None}
    assert set(plugins.declared("modelexport.quantization.methods", "FORMAT")) == own
    assert {name: module.NAME for name, module in formats().items()} == {name: name for name in containers()}
