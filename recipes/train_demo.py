"""Make the embedded demo model again: ``python recipes/train_demo.py --out DIR [--steps N] [--text DIR]``.

With ``--kind moe`` or ``--kind sliding`` small models of other kinds, by which algorithms are judged as well: a mixture
of 16 experts and a shared one (Qwen2-MoE, 8.0 M parameters, of which 3.3 M work for a token), and one with norms of
queries and keys and windows of 64 tokens in five of six layers (Gemma 3, 4.1 M). They learn the sources of the
standard library of the Python that trains them, in 650 and 800 steps: 20 minutes each on two cores.

Text
    The World English Bible (Debian package ``sword-text-web``, read with ``mod2imp`` of ``libsword-utils``;
    public domain, only the name is a trademark) and the Jargon File 4.4.7 (``jargon-text``, public domain).
    On Debian or Ubuntu: ``sudo apt-get install -y libsword-utils sword-text-web jargon-text``.
    With ``--text DIR`` every ``*.txt`` of DIR is used in their stead, with ``--text python`` the standard library.
Documents
    A chapter of the Bible, or paragraphs of the Jargon File until they hold about 2,500 characters: 1,924 in
    all. Every 20th is held out. With the packages of Debian 12 the tokenizer, ``heldout.txt`` (half of the
    held-out documents) and ``calibration.txt`` (300,000 characters of training text) come out byte for byte
    as they are in ``modelexport/assets/demo_model``.
Model
    A Llama of 3.67 M parameters: hidden 256, intermediate 512, 4 layers, 8 heads of 64, 4 kv heads, tied
    embeddings, byte-level BPE of 2,048. The inputs of o_proj and down_proj are 512 wide on purpose: in groups
    of 128 each of 4 ranks holds exactly one, at 8 ranks groups straddle ranks and kv heads are replicated.
Training
    1,670 steps of 16 x 256 tokens (3.6 epochs). Muon for the matrices (learning rate 4e-3, weight decay 0.1),
    AdamW (3e-3) for embedding and norms; warm-up 50 steps, linear decay over the second half, bf16 autocast
    (float32 on processors without bf16 arithmetic, where that is 80 times slower), seed 0. The embedded model took
    38 minutes on one CPU core and ended at 3.136 nats a held-out token. Its order of batches was not kept, so weights
    made here differ from it in value, not in kind.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.errors import ModelExportError, UsageError

if TYPE_CHECKING:
    import torch

APT_LINE = "sudo apt-get install -y libsword-utils sword-text-web jargon-text"
BIBLE_MODULE = "engWEB2015eb"
SWORD_MODULE_FILE = Path("/usr/share/sword/mods.d") / f"{BIBLE_MODULE}.conf"
JARGON_FILE = Path("/usr/share/doc/jargon-text/jargon.txt.gz")
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Settings:
    """What the demo model was made with; the tests make smaller ones."""

    kind: str = "llama"
    steps: int = 1670
    batch: int = 16
    window: int = 256
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    matrix_lr: float = 4e-3
    other_lr: float = 3e-3
    weight_decay: float = 0.1
    warmup: int = 50
    seed: int = 0
    document_characters: int = 2500
    heldout_every: int = 20
    heldout_first: int = 7
    calibration_characters: int = 300_000
    calibration_longest: int = 6000
    calibration_seed: int = 5


KINDS = {
    "llama": Settings(),
    "moe": Settings(kind="moe", steps=650, heads=4, kv_heads=2),
    "sliding": Settings(kind="sliding", steps=800, layers=6, heads=4, kv_heads=2),
}


def bible_documents(imp: str) -> list[str]:
    """Chapters of a Bible in SWORD's import format: ``"Genesis 8\\n"`` and a line per verse, mark-up removed.

    Headings and speakers that stand before a verse, footnotes and introductions (verse 0) are left out.
    """
    chapters: dict[tuple[str, int], list[str]] = {}
    for entry in imp.split("$$$")[1:]:
        reference, _, body = entry.partition("\n")
        match = re.fullmatch(r"(.+) (\d+):(\d+)", reference.strip())
        if match is None or int(match[2]) == 0 or int(match[3]) == 0:
            continue
        before_verse = r'<div type="x-milestone" subType="x-preverse" {}ID[^>]*>'
        body = re.sub(before_verse.format("s") + ".*?" + before_verse.format("e"), "", body, flags=re.DOTALL)
        body = re.sub(r"<(note|title)\b.*?</\1>", "", body, flags=re.DOTALL)
        verse = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", body)).strip()
        if verse:
            chapters.setdefault((match[1], int(match[2])), []).append(verse)
    return [f"{book} {chapter}\n" + "\n".join(verses) for (book, chapter), verses in chapters.items()]


def plain_documents(text: str, characters: int) -> list[str]:
    """Paragraphs of a text file (blank lines part them), unwrapped, packed to about ``characters`` each.

    Tables drawn with box characters are left out. The last document may be short.
    """
    text = re.sub(r"(?m)^ +", "", text)
    paragraphs = (re.sub(r"(?<=\S)\n(?=\S)", " ", part).strip() for part in re.split(r"\n\s*\n", text))
    documents: list[str] = []
    current: list[str] = []
    size = 0
    for paragraph in paragraphs:
        if not paragraph or re.search("[\u2500\u2502]", paragraph):
            continue
        current.append(paragraph)
        size += len(paragraph) + 1
        if size >= characters:
            documents.append("\n".join(current))
            current, size = [], 0
    if current:
        documents.append("\n".join(current))
    return documents


def debian_documents(characters: int) -> list[str]:
    """The demo model's own documents, from the Debian packages.

    Raises:
        UsageError: a package is missing; the message has the line to type.
    """
    missing = []
    if shutil.which("mod2imp") is None:
        missing.append("the program mod2imp (package libsword-utils)")
    if not SWORD_MODULE_FILE.is_file():
        missing.append(f"{SWORD_MODULE_FILE} (package sword-text-web)")
    if not JARGON_FILE.is_file():
        missing.append(f"{JARGON_FILE} (package jargon-text)")
    if missing:
        raise UsageError(
            f"not found: {'; '.join(missing)}.\nType: {APT_LINE}\n"
            "(slim container images drop /usr/share/doc; there add --reinstall and "
            "-o Dpkg::Options::=--path-include=/usr/share/doc/jargon-text/*)\n"
            "or train on text files of your own with --text DIR"
        )
    run = subprocess.run(["mod2imp", BIBLE_MODULE], capture_output=True, check=False)
    bible = bible_documents(run.stdout.decode("utf-8"))
    if run.returncode or not bible:
        said = run.stderr.decode("utf-8", "replace").strip()
        raise UsageError(f"mod2imp {BIBLE_MODULE} gave no verses (status {run.returncode}): {said[-300:]}")
    jargon = gzip.decompress(JARGON_FILE.read_bytes()).decode("utf-8")
    return bible + plain_documents(jargon, characters)


def directory_documents(directory: Path, characters: int) -> list[str]:
    """Documents of every ``*.txt`` of a directory, in the order of their names."""
    files = sorted(directory.glob("*.txt"))
    if not files:
        raise UsageError(f"--text {directory}: no *.txt file there; give a directory of UTF-8 text files")
    try:
        return [d for file in files for d in plain_documents(file.read_text(encoding="utf-8"), characters)]
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {directory}: a file is not UTF-8 ({error})") from error


def python_documents(characters: int) -> list[str]:
    """The standard library of this Python, without its tests: a module's lines in documents of about ``characters``."""
    library = Path(os.__file__).parent
    skipped = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
    documents = []
    for path in sorted(library.rglob("*.py")):
        if skipped & set(path.relative_to(library).parts):
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except UnicodeDecodeError:
            continue
        current = ""
        for line in lines:
            if len(current) >= characters and line.strip() and not line[0].isspace():
                documents.append(current.strip())
                current = ""
            current += line
        if current.strip():
            documents.append(current.strip())
    return documents


def split_documents(documents: Sequence[str], settings: Settings) -> tuple[list[str], list[str]]:
    """(training, held-out) documents: every ``heldout_every``-th is held out. No text is in both."""
    every, first = settings.heldout_every, settings.heldout_first
    heldout = [text for i, text in enumerate(documents) if i % every == first]
    kept = set(heldout)
    training = [text for i, text in enumerate(documents) if i % every != first and text not in kept]
    if not heldout or not training:
        raise UsageError(f"{len(documents)} documents, but at least {first + 1} are needed; give more text")
    return training, heldout


def calibration_documents(training: Sequence[str], settings: Settings) -> list[str]:
    """A random part of the training documents, none of them long, for calibration."""
    chosen: list[str] = []
    size = 0
    for text in random.Random(settings.calibration_seed).sample(training, len(training)):
        if len(text) <= settings.calibration_longest:
            chosen.append(text)
            size += len(text)
        if size >= settings.calibration_characters:
            break
    return chosen


def train_tokenizer(training: Iterable[str], vocab_size: int) -> Any:
    """Byte-level BPE over the training documents; token 0 is the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(training, trainer)
    return tokenizer


def token_stream(tokenizer: Any, documents: Sequence[str]) -> torch.Tensor:
    """int64 ``[tokens]``: the documents one after the other, an end-of-text token before each."""
    import torch

    ids = [i for encoding in tokenizer.encode_batch(list(documents)) for i in (0, *encoding.ids)]
    return torch.tensor(ids, dtype=torch.int64)


def build_model(settings: Settings) -> torch.nn.Module:
    """A model of the kind with random weights (float32)."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2MoeConfig

    common: dict[str, Any] = {
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "intermediate_size": settings.intermediate_size,
        "max_position_embeddings": 2 * settings.window,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if settings.kind == "moe":
        config = Qwen2MoeConfig(
            **common,
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=settings.intermediate_size // 4,
            shared_expert_intermediate_size=settings.intermediate_size // 4,
            norm_topk_prob=True,
            output_router_logits=True,
            router_aux_loss_coef=0.01,
        )
    elif settings.kind == "sliding":
        kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(settings.layers)]
        config = Gemma3TextConfig(
            **common, sliding_window=settings.window // 4, layer_types=kinds, query_pre_attn_scalar=settings.head_dim
        )
    else:
        config = LlamaConfig(**common)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def orthogonalise(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly: Newton-Schulz, Muon's quintic (Jordan et al., 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon:
    """Momentum, orthogonalised (Muon), each update scaled to the RMS that AdamW's would have (0.2)."""

    momentum = 0.95

    def __init__(self, parameters: Sequence[torch.Tensor], *, weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.weight_decay = weight_decay
        self.buffers = [p.detach().clone().zero_() for p in self.parameters]

    def step(self, lr: float) -> None:
        for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum))
            parameter.data.mul_(1 - lr * self.weight_decay)
            parameter.data.add_(update, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))
            parameter.grad = None


def schedule(step: int, settings: Settings) -> float:
    """Factor on both learning rates: linear warm-up, level, then linear to zero over the second half."""
    warm = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    return warm * min(1.0, 2 * (settings.steps - step) / settings.steps)


def batches(stream: torch.Tensor, settings: Settings) -> Iterator[torch.Tensor]:
    """int64 ``[batch, window + 1]`` without end; each epoch has its own offset and order."""
    import torch

    width = settings.window
    rng = torch.Generator().manual_seed(settings.seed)
    pending: list[torch.Tensor] = []
    if len(stream) < 2 * width + 1:
        raise UsageError(f"{len(stream)} training tokens, but windows of {width} need {2 * width + 1}")
    while True:
        offset = int(torch.randint(width, (), generator=rng))
        starts = torch.arange(offset, len(stream) - width, width)
        for start in starts[torch.randperm(len(starts), generator=rng)].tolist():
            pending.append(stream[start : start + width + 1])
            if len(pending) == settings.batch:
                yield torch.stack(pending)
                pending = []


def train(model: Any, stream: torch.Tensor, settings: Settings, *, log_every: int = 10) -> list[float]:
    """Trains in place and returns the loss of every step (nats a token)."""
    import torch
    from torch.nn.functional import cross_entropy

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    matrix_ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in matrix_ids]
    muon = Muon(matrices, weight_decay=settings.weight_decay)
    adamw = torch.optim.AdamW(others, lr=settings.other_lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    began = time.monotonic()
    model.train()
    for step, batch in zip(range(settings.steps), batches(stream, settings), strict=False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            out = model(input_ids=batch[:, :-1], use_cache=False)
        loss = cross_entropy(out.logits.float().flatten(0, 1), batch[:, 1:].flatten())
        spread = getattr(out, "router_logits", None)  # that no expert is left out
        (loss if spread is None else loss + balance_loss(spread)).backward()
        factor = schedule(step, settings)
        adamw.param_groups[0]["lr"] = settings.other_lr * factor
        muon.step(settings.matrix_lr * factor)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise ModelExportError(f"step {step + 1}: the loss is {losses[-1]}; lower the learning rates")
        if (step + 1) % log_every == 0 or step + 1 == settings.steps:
            pace = (time.monotonic() - began) / (step + 1)
            print(f"step {step + 1}/{settings.steps}  loss {losses[-1]:.3f}  {pace:.2f} s a step", flush=True)
    return losses


def balance_loss(router_logits: Sequence[torch.Tensor], chosen: int = 4, weight: float = 0.01) -> torch.Tensor:
    """Experts' shares of the tokens times their mean probabilities, least where all are alike (Fedus et al., 2021)."""
    import torch

    logits = torch.cat([each.float() for each in router_logits])
    probabilities = logits.softmax(-1)
    shares = torch.zeros_like(probabilities).scatter_(-1, logits.topk(chosen).indices, 1.0).mean(0)
    return weight * len(shares) * (shares * probabilities.mean(0)).sum() / chosen


def write_text_files(
    out: Path, tokenizer: Any, heldout: Sequence[str], calibration: Sequence[str], settings: Settings
) -> None:
    """Tokenizer, every other held-out document, and the calibration documents."""
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": 2 * settings.window,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "heldout.txt").write_text("\n\n".join(heldout[::2]), encoding="utf-8")
    (out / "calibration.txt").write_text("\n\n".join(calibration), encoding="utf-8")


def make(documents: Sequence[str], out: Path, settings: Settings) -> list[float]:
    """Tokenizer, training, held-out loss, checkpoint in ``out`` (it must not exist). Returns the losses."""
    import torch

    from modelexport.inspection.evaluate import perplexity

    if out.exists():
        raise UsageError(f"--out {out} exists; remove it or name another directory")
    training, heldout = split_documents(documents, settings)
    tokenizer = train_tokenizer(training, settings.vocab_size)
    stream = token_stream(tokenizer, training)
    characters = sum(map(len, training))
    print(
        f"{len(documents)} documents, {len(heldout)} held out; {len(stream):,} training tokens, "
        f"{characters / len(stream):.2f} characters a token",
        flush=True,
    )
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_text_files(partial, tokenizer, heldout, calibration_documents(training, settings), settings)
    torch.manual_seed(settings.seed)
    model: Any = build_model(settings)
    losses = train(model, stream, settings)
    model.to(torch.bfloat16).save_pretrained(partial)
    score = perplexity(model, token_stream(tokenizer, heldout), window=settings.window)
    print(f"held-out loss {score.loss:.3f}, perplexity {score.perplexity:.1f} on {score.tokens:,} tokens")
    partial.rename(out)
    print(f"wrote {out}")
    return losses


def documents_of(text: str | None, settings: Settings) -> list[str]:
    """The documents that ``--text`` names; those of the kind where it is not given."""
    size = settings.document_characters
    if text == "python" or (text is None and settings.kind != "llama"):
        return python_documents(size)
    return debian_documents(size) if text is None else directory_documents(Path(text), size)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="target; must not exist")
    parser.add_argument("--kind", choices=list(KINDS), default="llama", help="what to make (the demo model)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps (of the kind)")
    parser.add_argument("--text", metavar="DIR", help="train on the *.txt of DIR, or on 'python', the standard library")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (1)")
    arguments = parser.parse_args(argv)
    try:
        settings = KINDS[arguments.kind]
        if arguments.steps is not None:
            settings = replace(settings, steps=arguments.steps)
        if settings.steps < 1 or arguments.threads < 1:
            raise UsageError(f"--steps {settings.steps}, --threads {arguments.threads}: at least 1 of each")
        documents = documents_of(arguments.text, settings)
        import torch

        torch.set_num_threads(arguments.threads)
        make(documents, arguments.out, settings)
    except ModelExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
