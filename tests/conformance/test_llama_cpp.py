"""llama.cpp loads the GGUF files that we write, and computes what our dequantised weights do; and we read the others'.

llama-cpp-python brings llama.cpp and the gguf package; they live in an environment of their own, named by the variable
MODELEXPORT_LLAMA_PYTHON (its interpreter). For Q8_0 and Q4_0 llama.cpp rounds activations to 8 bits in blocks of 32
(for MXFP4 and NVFP4 too; of 256 for the K types), for BF16 to bfloat16: so much it differs from float32.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from modelexport.assets import demo_documents, demo_model_path
from modelexport.checkpoints.formats import gguf as container
from modelexport.checkpoints.gguf.architectures import SCALED
from modelexport.checkpoints.gguf.file import encode_header, read_gguf, read_values, type_of
from modelexport.checkpoints.gguf.metadata import model_types
from modelexport.checkpoints.gguf.tokenizer import read_tokenizer
from modelexport.checkpoints.gguf.tokenizer.carried import ARRAYS
from modelexport.checkpoints.gguf.tokenizer.pretokenizers import BY_NAME, PRE_TOKENIZERS
from modelexport.checkpoints.safetensors.file import Checkpoint, Reader
from modelexport.checkpoints.safetensors.sharded import stored_form
from modelexport.exporting import export
from modelexport.exporting.prepare import prepare
from modelexport.inspection.evaluate.models import PlainTensors, load_dequantised
from modelexport.inspection.evaluate.streaming import through_layers
from modelexport.models.opening import open_model
from modelexport.quantization import formats, mixtures
from modelexport.quantization.formats import of_scheme
from modelexport.quantization.ggml_layouts import LAYOUTS
from modelexport.quantization.methods import WeightSlice, gguf, read_quantization_config
from modelexport.recipe import ExportRecipe
from tests.checkpoints.test_gguf_architectures import TYPES, tiny
from tests.helpers.drafts import BELOW_MODEL, BELOW_MTP, add_draft_layer
from tests.helpers.format_models import write
from tests.helpers.gguf_models import NOT_IN_TRANSFORMERS, ONLY_WRAPPED, WRAPPED, gguf_tiny_model
from tests.helpers.models import copy_checkpoint, make_llama
from tests.helpers.small_tokenizers import ROWS, SCRIPTS, byte_level, ids, sentencepiece, unigram
from tests.helpers.tiny_models import model_class, tiny_config

LLAMA = os.environ.get("MODELEXPORT_LLAMA_PYTHON")
BLOCKS = {layout.number_format: layout.name for layout in LAYOUTS.values()}
QUANTS = {"none": "BF16", "int8-wo": "Q8_0", "int4": "Q4_0", "mxfp4-wo": "MXFP4", "nvfp4-wo": "NVFP4", **BLOCKS}
LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BOUND = 0.03  # of a log-probability, on average

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(LLAMA is None, reason="MODELEXPORT_LLAMA_PYTHON names no interpreter with llama-cpp-python"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]


def ask(what: str, *files: Path, given: Any = None) -> Any:
    """What llama.cpp says of each file."""
    script = Path(__file__).with_name("llama_cpp_answers.py")
    done = subprocess.run(
        [str(LLAMA), str(script), what, *map(str, files)],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "PYTHON"))},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("ANSWER "))


def size_of(quant: str) -> int | None:
    return 32 if quant.startswith("int") else None


def exported(out: Path, quant: str, model: str | None = None, tp: int = 2) -> Path:
    export(
        model=model,
        out=str(out),
        quant=f"*_proj={quant}" if quant in BLOCKS else quant,  # alone most of these are mixtures
        group_size=size_of(quant),
        format="gguf",
        tp=tp,
        quiet=True,
        evaluate=False,
    )
    return out


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model in every type."""
    root = tmp_path_factory.mktemp("demos")
    return {quant: exported(root / quant, quant) for quant in QUANTS}


def prompt() -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    found: list[int] = tokenizer.encode(demo_documents("heldout")[0]).ids
    return [0, *found[:95]]


def scores_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """The log-probability of each token after the first."""
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        scores = torch.log_softmax(model(input_ids=tokens).logits[0].double(), dim=-1)
    return scores[:-1].gather(-1, tokens[0, 1:, None])[:, 0]


def compare(name: str, got: list[float], expected: torch.Tensor, *, routed: bool = False) -> None:
    """``routed``: a token may go to other experts, since random routers decide by next to nothing."""
    difference = (torch.tensor(got, dtype=torch.float64) - expected).abs()
    spread = expected.std()
    print(
        f"{name}: log-probabilities differ by {difference.mean():.5f} on average, {difference.max():.5f} at most "
        f"(they vary by {spread:.2f})"
    )
    assert difference.mean() <= BOUND
    assert routed or difference.max() <= 10 * BOUND


def test_llama_cpp_computes_what_our_dequantised_weights_do(demos: dict[str, Path]) -> None:
    ids = prompt()
    answers = ask("logprobs", *(demos[quant] / "model.gguf" for quant in QUANTS), given=ids)
    assert len(answers) == len(QUANTS)
    for (quant, kind), got in zip(QUANTS.items(), answers, strict=True):
        compare(f"{quant} ({kind})", got, scores_of(load_dequantised(demos[quant]), ids))


def test_mixtures_and_parts_are_loaded(tmp_path: Path) -> None:
    """The embedding, which is the head, in blocks; and a file in parts, found by the first."""
    names = {"q4_k_m": "Q6_K", "q8_0": "Q8_0", "iq4_nl": "Q6_K"}
    parts = {"q4_k_m": 700_000}
    files = []
    for name in names:
        limit = parts.get(name)
        out = str(tmp_path / name)
        export(out=out, quant=name, format="gguf", max_shard_bytes=limit, evaluate=False, quiet=True)
        files.append(min((tmp_path / name).glob("*.gguf")))
    assert files[0].name == "model-00001-of-00004.gguf"
    ids = prompt()
    for (name, kind), got, path in zip(names.items(), ask("logprobs", *files, given=ids), files, strict=True):
        compare(name, got, scores_of(load_dequantised(path.parent), ids))
        found = read_gguf(*sorted(path.parent.glob("*.gguf")))
        embedding = found.infos["token_embd.weight"]
        assert type_of(embedding.dtype, embedding.shape) == kind
        assert found.values["general.file_type"] == mixtures.MIXTURES[name].file_type


def digest(weight: torch.Tensor) -> str:
    return hashlib.sha256((weight.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def in_their_order(name: str, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    if name not in ("attn_q", "attn_k"):
        return weight
    heads = config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def without_scales(directory: Path) -> dict[str, torch.Tensor]:
    """The linears' weights, of NVFP4, before they are multiplied by the number beside the blocks."""
    found = open_model(directory)
    form, weights = formats.get("nvfp4-wo"), {}
    with Reader(found) as reader:
        for name, info in found.infos.items():
            if info.dtype == "U8":
                blocks = reader.read(info)
                part = WeightSlice.whole((blocks.shape[0], blocks.shape[1] * 64))
                native = gguf.decode(form, {"weight": blocks, "scale": torch.tensor(1.0)}, part)
                weights[name] = form.dequantise(native)
    return weights


def assert_same_floats(directory: Path, answer: dict[str, Any], kind: str) -> None:
    """The gguf package dequantises every linear to what we do; of NVFP4, what is multiplied by the scale beside it (we
    divide by its reciprocal)."""
    found = open_model(directory)
    assert found.config is not None
    state = load_dequantised(directory).state_dict()
    if kind == "NVFP4":
        for name, weight in without_scales(directory).items():
            scale = float(reader_of(found, name.replace("weight", "scale")))
            assert ((weight * scale - state[name]).abs() <= 2.0**-22 * state[name].abs()).all(), name
            state[name] = weight
    seen = 0
    for layer in range(found.config["num_hidden_layers"]):
        for ours, theirs in LINEARS.items():
            weight = in_their_order(theirs, state[f"model.layers.{layer}.{ours}.weight"], found.config)
            of = answer["tensors"][f"blk.{layer}.{theirs}.weight"]
            assert of == [kind, list(weight.shape), digest(weight)], (layer, ours)
            seen += 1
    assert seen == 28
    norm = state["model.norm.weight"]
    assert answer["tensors"]["output_norm.weight"] == ["F32", list(norm.shape), digest(norm)]


def reader_of(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    with Reader(checkpoint) as reader:
        return reader.read(checkpoint.infos[name])


def test_the_gguf_package_reads_the_same_numbers(demos: dict[str, Path]) -> None:
    answers = ask("tensors", *(demos[quant] / "model.gguf" for quant in QUANTS))
    for (quant, kind), answer in zip(QUANTS.items(), answers, strict=True):
        assert_same_floats(demos[quant], answer, kind)
        values = answer["values"]
        assert values["general.architecture"] == "llama"
        assert len(values["tokenizer.ggml.tokens"]) == values["llama.vocab_size"] == 2048


def test_llama_cpp_tokenises_as_the_model_does(demos: dict[str, Path]) -> None:
    from tokenizers import Tokenizer

    texts = [*demo_documents("heldout")[:20], "  It's 12345\n\n\tcaf\u00e9 \u4e16\u754c!! "]
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    (got,) = ask("tokens", demos["int4"] / "model.gguf", given=texts)
    assert got == [tokenizer.encode(text).ids for text in texts]


# ------------------------------------------------------------------ tokenizers

TEXTS = (*SCRIPTS, "a <tool> b</s>c<|end|>  d<s>", "<s>x</s>\n<|end|>", "</s> <tool><tool>\t<unk>")


def vocabulary_file(directory: Path, main: dict[str, Any], rows: int = ROWS) -> Path:
    """A GGUF file of a tokenizer.json, without tensors."""
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps(main))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    found = read_tokenizer(directory, {}, rows)
    assert found.missing is None
    path = directory / "vocabulary.gguf"
    path.write_bytes(encode_header({"general.architecture": "llama", **found.values}, [])[0])
    return path


def compare_ids(name: str, main: dict[str, Any], got: list[list[list[int]]], texts: Sequence[str] = TEXTS) -> list[str]:
    """The texts whose ids are others in one of the three ways; all have the ids that the library gives."""
    expected = [ids(main, texts, parsed=False), ids(main, texts), ids(main, texts, around=True)]
    pairs = [list(zip(texts, ours, theirs, strict=True)) for ours, theirs in zip(expected, got, strict=True)]
    wrong = dict.fromkeys(text for each in pairs for text, ours, theirs in each if ours != theirs)
    print(f"{name}: {len(texts) - len(wrong)} of {len(texts)} texts have the same ids")
    return list(wrong)


def test_llama_cpp_has_every_pre_tokenizer_of_the_table(tmp_path: Path) -> None:
    """By every name that a file may have."""
    mains = {pre: byte_level(pre) for pre in PRE_TOKENIZERS}
    files = []
    for name, pre in BY_NAME.items():
        path = vocabulary_file(tmp_path / name, mains[pre])
        path.write_bytes(encode_header({**read_values(path, ARRAYS), "tokenizer.ggml.pre": name}, [])[0])
        files.append(path)
    for (name, pre), got in zip(BY_NAME.items(), ask("encodings", *files, given=TEXTS), strict=True):
        wrong = compare_ids(name, mains[pre], got)
        assert not wrong or pre.differs, (name, wrong)


def test_llama_cpp_has_sentencepiece_s_bpe(tmp_path: Path) -> None:
    mains = {
        "a space in front": sentencepiece(),
        "no space in front": sentencepiece(prefix="never"),
        "by merges": sentencepiece(prefix="never", every_pair=False),
    }
    answers = ask("encodings", *(vocabulary_file(tmp_path / name, main) for name, main in mains.items()), given=TEXTS)
    for (name, main), got in zip(mains.items(), answers, strict=True):
        assert not compare_ids(name, main, got), name


def test_llama_cpp_has_sentencepiece_s_unigram(tmp_path: Path) -> None:
    """Special tokens are pieces like others to the library, where they are not parsed."""
    main, texts = unigram(), [text for text in TEXTS if text == text.rstrip() and "<" not in text]
    (got,) = ask("encodings", vocabulary_file(tmp_path / "unigram", main), given=texts)
    assert not compare_ids("unigram", main, got, texts)


def test_llama_cpp_puts_a_space_before_more_texts_than_metaspace(tmp_path: Path) -> None:
    """As the note on such a tokenizer says: those that begin with one, and those behind special tokens."""
    main = sentencepiece(prefix="first")
    (got,) = ask("encodings", vocabulary_file(tmp_path / "first", main), given=TEXTS)
    wrong = compare_ids("a space where there is none", main, got)
    assert wrong == [text for text in wrong if text.startswith(" ") or "<" in text]


def test_a_file_of_the_gguf_package_is_read(demos: dict[str, Path], tmp_path: Path) -> None:
    """Blocks that the package made, without a word in config.json; then quantised blocks moved, bytes and all."""
    targets = {
        kind: tmp_path / kind / "model.gguf" for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "F16", "F32")
    }
    for path in targets.values():
        path.parent.mkdir()
        shutil.copyfile(demo_model_path() / "config.json", path.parent / "config.json")
    ask("requantise", demos["none"] / "model.gguf", given={kind: str(path) for kind, path in targets.items()})
    answers = ask("tensors", *targets.values())
    for (kind, path), answer in zip(targets.items(), answers, strict=True):
        assert_same_floats(path.parent, answer, kind)
        quantization = read_quantization_config(open_model(path.parent).config)
        assert (quantization is None) == (kind in ("F16", "F32"))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "biased": {"attention_bias": True, "mlp_bias": True, "heads": 8, "kv_heads": 2, "head_dim": 32},
    "mistral": {"model_type": "mistral", "tied": True},
    "qwen2": {"model_type": "qwen2"},
    "mixtral": {"model_type": "mixtral"},
    "phi3": {"model_type": "phi3"},
    "float32": {"dtype": "float32"},
    "llama3": {"heads": 2, "rope": {**LLAMA3, "original_max_position_embeddings": 64}},
    "yarn": {"model_type": "qwen2", "heads": 2, "rope": {"rope_type": "yarn", "factor": 4.0}},
}


def reference(directory: Path) -> Any:
    """The model that a file holds, dequantised, as transformers loads it (which stacks Mixtral's experts itself)."""
    found = open_model(directory)
    quantization = read_quantization_config(found.config)
    tensors = {}
    with Reader(found) as reader:
        for name, info in found.infos.items():
            value = reader.read(info)
            if info.dtype == "U8":
                assert quantization is not None
                scheme = quantization.scheme_of(name.removesuffix(".weight"))
                assert scheme is not None
                form, part = of_scheme(scheme), WeightSlice.whole((value.shape[0], value.shape[1] * 32))
                value = form.dequantise(gguf.decode(form, {"weight": value}, part))
            tensors[name] = value.float()
    plain = directory / "plain"
    plain.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in (found.config or {}).items() if key != "quantization_config"}
    (plain / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


@pytest.mark.parametrize("quant", ["none", "int4"])
def test_other_families(tmp_path: Path, quant: str) -> None:
    ids = torch.randint(3, 200, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    files, expected = [], []
    for name, shape in FAMILIES.items():
        shape = dict(shape)
        rope = shape.pop("rope", None)
        source = make_llama(**shape)
        if rope is not None:
            rope = {"rope_theta": 1e4, "original_max_position_embeddings": 64, **rope}
            changes = {"rope_parameters": rope, "max_position_embeddings": 256}
            source = copy_checkpoint(source, tmp_path / f"source-{name}", config=changes)
        files.append(exported(tmp_path / name, quant, str(source), tp=1) / "model.gguf")
        expected.append(scores_of(reference(tmp_path / name), ids))
    for name, got, scores in zip(FAMILIES, ask("logprobs", *files, given=ids), expected, strict=True):
        compare(f"{name} {quant}", got, scores, routed=name == "mixtral")


MIXED: dict[str, dict[str, Any]] = {
    "dense": {"hidden": 256, "intermediate": 512, "layers": 17},
    "tied, grouped queries": {"hidden": 256, "intermediate": 256, "layers": 9, "kv_heads": 1, "tied": True},
    "eight experts": {"model_type": "mixtral", "hidden": 256, "intermediate": 256, "layers": 8, "experts": 8},
    "four experts": {"model_type": "mixtral", "hidden": 256, "intermediate": 256, "layers": 8},
    "fused": {"model_type": "phi3", "hidden": 256, "intermediate": 256, "layers": 8},
    "blocks of 32": {"hidden": 288, "head_dim": 64, "intermediate": 320, "layers": 8},
    "no blocks": {"hidden": 256, "intermediate": 300, "layers": 2, "tied": True},
}


def planned_types(model: Path, mixture: str, calib: Path | None, draft: str = "keep") -> dict[str, str | None]:
    """The types of the tensors of an export's file, by its plan; with a calibration text, fitted with importance."""
    how: dict[str, Any] = {
        "draft": draft,
        **({} if calib is None else {"algorithm": "imatrix", "calib": (str(calib),)}),
    }
    recipe = ExportRecipe(model=str(model), quant=mixture, format="gguf", dry_run=True, quiet=True, **how)
    target = prepare(recipe).target
    config = open_model(model).config or {}
    return {array.name: type_of(*stored_form(array)) for array in container.arrays(target.plan, config)}


@pytest.mark.parametrize("shape", MIXED)
def test_mixtures_are_llama_cpp_s(tmp_path: Path, shape: str) -> None:
    """Each tensor has the type that llama-quantize gives it; but what fits no block, F16 there, stays as it is."""
    model = make_llama(**MIXED[shape])
    plain = exported(tmp_path / "plain", "none", str(model), tp=1) / "model.gguf"
    (calib := tmp_path / "calib.jsonl").write_text(json.dumps({"input_ids": list(range(3, 100))}))
    asked = [(name, important) for name in mixtures.names() for important in (False, True)]
    numbers = [(mixtures.MIXTURES[name].file_type, important) for name, important in asked]
    (answers,) = ask("quantise", plain, given=numbers)
    for (name, important), theirs in zip(asked, answers, strict=True):
        ours = planned_types(model, name, calib if important else None)
        assert ours.keys() == theirs.keys()
        different = {
            tensor: (kind, theirs[tensor])
            for tensor, kind in ours.items()
            if kind != theirs[tensor] and (kind, theirs[tensor]) != ("BF16", "F16")
        }
        assert not different, (name, important)


OTHERWISE = {
    "gpt2": r"blk\..*",  # its weights lie transposed in the source
    "qwen3_next": r".*\.(ssm_ba|attn_gate)\.weight",  # never quantised here; one linear of two tensors
    "deepseek_v2": r".*\.attn_v_b\.weight",  # one linear with the keys, which are transposed
    "deepseek_v3": r".*\.attn_v_b\.weight",
    "glm4_moe_lite": r".*\.attn_v_b\.weight",
    "youtu": r".*\.attn_v_b\.weight",
    "laguna": r".*\.attn_gate\.weight",  # never quantised here
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), r".*\.(attn_v_b|indexer\.(attn_k|proj))\.weight"),
    "deepseek_v4": r"output_hc_fn\.weight|.*\.(hc_(attn|ffn)_fn|(attn|indexer)_compressor_ape|indexer\.proj)\.weight",
    "step3p5": r".*\.attn_gate\.weight",  # of the tiny model: a row for each of its few heads
    "kimi_linear": r".*\.(attn_v_b|ssm_beta)\.weight",
    "mistral4": r".*\.attn_v_b\.weight",
    "minicpm3": r".*\.attn_kv_b\.weight",  # the same linear, whole
    "gemma4_text": r"per_layer_token_embd\.weight",  # no linear
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), r".*\.ssm_(alpha|beta|out)\.weight"),  # columns change places
}
"""Tensors that have more bits than llama.cpp gives them, by the type of model; the summary says so."""


def test_mixtures_of_every_architecture(tmp_path: Path) -> None:
    """By the names that llama.cpp has for the tensors of each."""
    files = []
    for kind in TYPES:
        model = tiny(kind)
        write(container, tmp_path / kind, model, model.plan())
        files.append(tmp_path / kind / "model.gguf")
    names = ("q4_k_m", "q3_k_m")
    answers = ask("quantise", *files, given=[(mixtures.MIXTURES[name].file_type, False) for name in names])
    for kind, path, answer in zip(TYPES, files, answers, strict=True):
        for name, theirs in zip(names, answer, strict=True):
            ours = planned_types(path.parent, name, None)
            assert ours.keys() == theirs.keys(), kind
            for tensor, found in ours.items():
                same = found == theirs[tensor] or (found, theirs[tensor]) == ("BF16", "F16")
                assert same or re.fullmatch(OTHERWISE.get(kind, ""), tensor), (kind, name, tensor, found)


def wide_model(kind: str, out: Path) -> Path:
    """A model of eight layers whose linears have rows of 256, and one draft layer."""
    if kind == "deepseek_v3":
        return add_draft_layer(make_llama(model_type=kind, hidden=256, heads=4, experts=4, layers=8), out)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    kinds = ["sliding_attention"] * 7 + ["full_attention"]
    layers = {"num_hidden_layers": 8, "layer_types": kinds, "mlp_layer_types": ["dense"] + ["sparse"] * 7}
    plain = out.with_name("plain")
    model_class(kind)(tiny_config(kind, {**sizes, "v_head_dim": 64, **layers})).save_pretrained(plain)
    return add_draft_layer(plain, out)


@pytest.mark.parametrize("draft", ["keep", "quantise"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "mimo_v2_flash"])
def test_mixtures_count_draft_layers(tmp_path: Path, kind: str, draft: str) -> None:
    """As blocks behind the others: which layers get more bits depends on how many there are."""
    source = wide_model(kind, tmp_path / "source")
    file = exported(tmp_path / "out", "none", str(source), tp=1) / "model.gguf"
    names = ("q4_k_m", "q3_k_m", "q2_k")
    (answers,) = ask("quantise", file, given=[(mixtures.MIXTURES[name].file_type, False) for name in names])
    for name, theirs in zip(names, answers, strict=True):
        ours = planned_types(source, name, None, draft)
        assert ours.keys() == theirs.keys()
        kept = r"blk\.8\..*|.*\.attn_[kv]_b\.weight" if draft == "keep" else r".*\.(nextn\..*|attn_[kv]_b\.weight)"
        different = {
            tensor: (kind, theirs[tensor])
            for tensor, kind in ours.items()
            if kind != theirs[tensor] and (kind, theirs[tensor]) != ("BF16", "F16") and not re.fullmatch(kept, tensor)
        }
        assert not different, name


EXACT = 0.01
"""Of a log-probability, on average: in float32 llama.cpp rounds only what it caches, to float16."""


COMPUTED = [*(kind for kind in model_types() if kind not in (*NOT_IN_TRANSFORMERS, *ONLY_WRAPPED)), *WRAPPED]
"""The types of the table that transformers has models of, and language models of what also sees or hears."""


@pytest.mark.parametrize("kind", COMPUTED)
def test_every_architecture(tmp_path: Path, kind: str) -> None:
    """A tiny model of every type of the table, in float32, and language models of what also sees or hears."""
    model = gguf_tiny_model(kind)
    source, out = tmp_path / "source", tmp_path / "out"
    model.save_pretrained(source)
    exported(out, "none", str(source), tp=1)
    ids = torch.randint(3, 200, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    (got,) = ask("logprobs", out / "model.gguf", given=ids)
    expected = scores_of(model, ids)
    difference = (torch.tensor(got, dtype=torch.float64) - expected).abs()
    print(f"{kind}: {difference.mean():.5f} on average, {difference.max():.5f} at most; spread {expected.std():.2f}")
    routed = "expert" in str(open_model(out).infos.keys())  # a token may go to other experts, and is seen by later ones
    assert (difference.median() if routed else difference.mean()) <= EXACT


def test_the_thinker_of_a_whole_omni_is_written(tmp_path: Path) -> None:
    """As Qwen3-Omni is published: the talker and what makes sound beside it."""
    model = gguf_tiny_model("qwen3_omni_moe_thinker")
    model.save_pretrained(tmp_path / "thinker")
    tensors = load_file(tmp_path / "thinker" / "model.safetensors")
    found = {f"thinker.{name}": value for name, value in tensors.items()}
    found |= {"talker.model.embed_tokens.weight": torch.ones(8, 8), "code2wav.pre.weight": torch.ones(8, 8)}
    config = json.loads(tiny_config("qwen3_omni_moe").to_json_string())
    config["thinker_config"] = json.loads(model.config.to_json_string())
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_file(found, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(config))
    exported(out, "none", str(source), tp=1)
    ids = torch.randint(3, 200, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    (got,) = ask("logprobs", out / "model.gguf", given=ids)
    difference = (torch.tensor(got, dtype=torch.float64) - scores_of(model, ids)).abs()
    print(f"{difference.mean():.5f} on average, {difference.max():.5f} at most")
    assert difference.median() <= EXACT


def scaled_linears(source: Path) -> list[str]:
    """The linears and the head of a model that NVFP4's blocks hold, and by whose scale llama.cpp multiplies."""
    prepared = prepare(ExportRecipe(model=str(source), quant="none", format="gguf", dry_run=True, quiet=True))
    plan, config = prepared.target.plan, prepared.checkpoint.config or {}
    read = SCALED.get(str(container.header_values(plan, config)["general.architecture"]), frozenset())
    return [
        rule.module
        for name, held in container.matrices(plan, config).items()
        for rule in held
        if re.sub(r"^blk\.\d+\.|\.weight$", "", name) in read and rule.shape[1] % 64 == 0 and rule.role != "embedding"
    ]


def in_blocks_of_8_bits(x: torch.Tensor) -> torch.Tensor:
    """The input of a linear as ggml multiplies it by blocks of NVFP4: in Q8_0, 32 numbers with one float16 scale."""
    blocks = x.float().reshape(-1, 32)  # some models turn what they give a linear
    largest = blocks.abs().amax(1, keepdim=True)
    integers = torch.where(largest > 0, blocks * (127 / largest), 0.0).round()
    return (integers * (largest / 127).half().float()).view(x.shape).to(x.dtype)


def scores_by_rounded_inputs(directory: Path, linears: int, ids: list[int]) -> torch.Tensor:
    """The log-probability of each token after the first, by our decoded weights, each of so many quantised linears with
    its inputs rounded as ggml rounds them; else in float32."""
    tokens = torch.tensor([ids])
    with PlainTensors(open_model(directory)) as tensors:
        decoded = [name.removesuffix(".weight") for name in tensors.names if tensors.is_decoded(name)]
        assert len(decoded) == linears
        tensors.activations.update(dict.fromkeys(decoded, in_blocks_of_8_bits))
        outputs = through_layers(tensors, tokens, threads=1)
        outputs.select(0, outputs.vocabulary)
        scores = torch.log_softmax(outputs.logits(0).double(), dim=-1)
    return scores[:-1].gather(-1, tokens[0, 1:, None])[:, 0]


AT_ONCE = ("glm_moe_dsa",)
"""Types whose layers hand the tokens that they select to the next, and are not run one at a time here."""


class RoundedInputs(TorchFunctionMode):
    """Within it, linears of some weights are given their inputs as ggml rounds them.

    Args:
        addresses: of the weights' first elements.
    """

    def __init__(self, addresses: set[int]) -> None:
        super().__init__()
        self.addresses, self.met = addresses, set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and args[1].data_ptr() in self.addresses:
            self.met.add(args[1].data_ptr())
            args = (in_blocks_of_8_bits(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def scores_by_rounded_inputs_at_once(directory: Path, linears: int, ids: list[int], plain: Path) -> torch.Tensor:
    """The same as :func:`scores_by_rounded_inputs`, by transformers' whole model with the weights that we decode."""
    export(model=str(directory), out=str(plain), quant="none", evaluate=False, quiet=True)
    settings: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager", **settings).eval()
    with PlainTensors(open_model(directory)) as tensors:
        decoded = [name.removesuffix(".weight") for name in tensors.names if tensors.is_decoded(name)]
    assert len(decoded) == linears
    parameters = dict(model.named_parameters())
    addresses = set()
    for name in decoded:
        expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)_proj", name)
        if expert is None:
            addresses.add(parameters[f"{name}.weight"].data_ptr())
        else:  # gate and up are one
            stack = parameters[f"{expert[1]}.{'down' if expert[3] == 'down' else 'gate_up'}_proj"]
            addresses.add(stack[int(expert[2])].data_ptr())
    with RoundedInputs(addresses) as rounded:
        scores = scores_of(model, ids)
    assert {address for address in addresses if address not in rounded.met} <= {
        part.data_ptr() for name, stack in parameters.items() if ".experts." in name for part in stack
    }, "experts may see no token, other linears see all"
    return scores


@pytest.mark.parametrize("kind", COMPUTED)
def test_llama_cpp_multiplies_by_the_scales_of_nvfp4(tmp_path: Path, kind: str) -> None:
    """Of every tensor that the table has, in a tiny model of every type: as our decoded weights do, by inputs rounded
    to 8 bits. Without their scale weights are thousands of times too large.

    The rounding of inputs alone moves the log-probabilities of some of these models by the bound: those of
    gemma4_unified, of 24 linears one behind the other, by 0.028 on average.
    """
    source, out = tmp_path / "source", tmp_path / "out"
    gguf_tiny_model(kind).save_pretrained(source)
    linears = scaled_linears(source)
    if not linears:
        pytest.skip("no linear that its graph multiplies by a scale is as wide as a block of 64")
    quant = ",".join(f"{name}=nvfp4-wo" for name in linears)
    export(model=str(source), out=str(out), quant=quant, format="gguf", evaluate=False, quiet=True)
    ids = torch.randint(3, 200, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    (got,) = ask("logprobs-f32", out / "model.gguf", given=ids)
    if kind in AT_ONCE:
        expected = scores_by_rounded_inputs_at_once(out, len(linears), ids, tmp_path / "plain")
    else:
        expected = scores_by_rounded_inputs(out, len(linears), ids)
    difference = (torch.tensor(got, dtype=torch.float64) - expected).abs()
    print(f"{kind}: {difference.mean():.5f} on average, {difference.max():.5f} at most; spread {expected.std():.2f}")
    print(*sorted({re.sub(r"\d+", "*", name) for name in linears}))
    routed = "expert" in str(open_model(out).infos.keys())
    assert (difference.median() if routed else difference.mean()) <= BOUND


def draft_prefix(names: Iterable[str]) -> str:
    """The names of the draft layer's tensors begin with it."""
    for below in ("mtp.", "model.mtp."):
        if any(name.startswith(below) for name in names):
            return f"{below}layers.0."
    return f"model.layers.{max(int(name.split('.')[2]) for name in names if name.startswith('model.layers.'))}."


def lively(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with linears of the draft layer so large that what it computes depends on each; and the norm in front
    of a head that is not its own."""
    prefixes = ("mtp.", draft_prefix(tensors))
    return {
        name: value * 4
        if name.startswith(prefixes) and value.dim() > 1
        else value * 40
        if name.endswith(".final_layernorm.weight")
        else value
        for name, value in tensors.items()
    }


def drafting_model(source: Path, out: Path) -> Any:
    """A model of which the draft layer of another is the one decoder layer, with the norm and the head behind it."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    layer = draft_prefix(tensors)
    renamed = {
        f"{layer}shared_head.norm.": "model.norm.",
        f"{layer}shared_head.head.": "lm_head.",
        "mtp.norm.": "model.norm.",
        f"{layer}final_layernorm.": "model.norm.",
        f"{layer}pre_mlp_layernorm.": "model.layers.0.post_attention_layernorm.",
    }
    found = {name: value for name, value in tensors.items() if name.startswith(("model.embed_tokens.", "lm_head."))}
    for name, value in tensors.items():
        new = next((new + name.removeprefix(old) for old, new in renamed.items() if name.startswith(old)), "")
        if not new and name.startswith(layer):
            new = f"model.layers.0.{name.removeprefix(layer)}"
        found |= {new: value} if new else {}
    out.mkdir()
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    config |= {"layer_types": config["layer_types"][-1:] if "index_topk" in config else ["full_attention"]}
    config |= {"mlp_layer_types": ["sparse"], "indexer_types": ["full"]}
    if config["model_type"] in BELOW_MODEL:
        config |= {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
    config["index_topk"] = config["max_position_embeddings"]  # llama.cpp's drafts attend to everything
    (out / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()


def drafted(source: Path, model: Any, ids: list[int], states: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token after the first, by the draft layer."""
    tensors = load_file(source / "model.safetensors")

    def tensor(*endings: str) -> torch.Tensor:
        (name,) = (name for name in tensors if name.endswith(tuple(f".{ending}.weight" for ending in endings)))
        return tensors[name].float()

    def normed(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight = weight + 1 if model.config.model_type in BELOW_MTP else weight
        return torch.nn.functional.rms_norm(value, weight.shape, weight, model.config.rms_norm_eps)

    own = f"{draft_prefix(tensors)}embed_tokens.weight"
    own = own if own in tensors else "model.embed_tokens.weight"
    embedded = normed(tensors[own].float()[ids], tensor("enorm", "pre_fc_norm_embedding"))
    joined = torch.cat([embedded, normed(states, tensor("hnorm", "pre_fc_norm_hidden"))], dim=-1)
    with torch.inference_mode():
        logits = model(inputs_embeds=(joined @ tensor("eh_proj", "fc").t())[None]).logits[0].double()
    scores = torch.log_softmax(logits, dim=-1)
    return scores[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]


@pytest.mark.parametrize(
    "kind", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "qwen3_next", "mimo_v2_flash"]
)
def test_draft_layers(tmp_path: Path, kind: str) -> None:
    """llama.cpp computes the model as without them, and drafts as transformers' decoder layer does."""
    plain = gguf_tiny_model(kind)
    plain.save_pretrained(tmp_path / "plain")
    source = copy_checkpoint(
        add_draft_layer(tmp_path / "plain", tmp_path / "drafts"), tmp_path / "source", tensors=lively
    )
    for draft in ("keep", "drop"):
        out = str(tmp_path / draft)
        export(model=str(source), out=out, draft=draft, format="gguf", quant="none", evaluate=False, quiet=True)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 200, (24,), generator=generator).tolist()
    kept, dropped = ask("logprobs", *(tmp_path / draft / "model.gguf" for draft in ("keep", "drop")), given=ids)
    assert kept == dropped
    states = torch.randn(len(ids), plain.config.hidden_size, generator=generator)
    (got,) = ask("drafts", tmp_path / "keep" / "model.gguf", given=[ids, states.tolist()])
    expected = drafted(source, drafting_model(source, tmp_path / "one"), ids, states)
    difference = (torch.tensor(got, dtype=torch.float64) - expected).abs()
    print(
        f"{kind}: {difference.median():.5f} at the median, {difference.max():.5f} at most; spread {expected.std():.2f}"
    )
    assert (
        difference.median() <= EXACT < expected.std() / 10
    )  # a token may go to other experts, and is seen by later ones
