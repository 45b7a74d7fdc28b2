"""Small tokenizers of every kind as tokenizer.json has them, trained in a moment on a text of many scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from modelexport.assets import demo_documents
from modelexport.checkpoints.gguf.tokenizer.byte_level import BYTES
from modelexport.checkpoints.gguf.tokenizer.pretokenizers import PreTokenizer, as_json
from modelexport.checkpoints.gguf.tokenizer.sentencepiece import BYTE_TOKENS
from modelexport.checkpoints.gguf.tokenizer.vocabulary import SPACE

SCRIPTS = (
    (
        "Fran\u00e7ois na\u00efvely caf\u00e9 \u00dcber \u0141\u00f3d\u017a \u00c9COLE stra\u00dfe I\u0307stanbul"
        " e\u0301te\u0301"
    ),
    (
        "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u041e\u0434\u043d\u0430\u0436\u0434\u044b "
        "\u0432 \u0441\u0442\u0443\u0434\u0435\u043d\u0443\u044e \u0437\u0438\u043c\u043d\u044e\u044e \u043f"
        "\u043e\u0440\u0443"
    ),
    "\u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1 \u03ba\u03cc\u03c3\u03bc\u03b5 \u0391\u0398\u0397\u039d\u0391",
    (
        "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c \u0643\u064a\u0641\u064e"
        " \u062d\u0627\u0644\u0643\u061f"
    ),
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd",
    (
        "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e\u0964 \u0939\u093f\u0928\u094d"
        "\u0926\u0940"
    ),
    (
        "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01 \u0e20\u0e32\u0e29\u0e32\u0e44"
        "\u0e17\u0e22"
    ),
    "\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e\uff0c\u4f60\u597d\u3002",
    "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c \u30ab\u30bf\u30ab\u30ca\u30fc \u6f22\u5b57",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4 \u314b\u314b\u314b",
    (
        "\U0001f680 (normal) \U0001f636\u200d\U0001f32b\ufe0f \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d"
        "\U0001f466 \U0001f1e9\U0001f1ea \u2705\U0001f999\U0001f999"
    ),
    "def f(x):\n\treturn  x +\t\t1\n\n\n    # comment\r\n\r\nclass A:\n        pass\n",
    "  two   three    four     five      six       seven        eight\t \t\n \n  \n",
    "0 12 123 1234 12345 123456 1234567 3.14 1,000,000 0x1F \u0663\u0664 \u00b2\u00b3 \u2167 \u00bd",
    "I'm you're HE'LL we'Ve DON'T 'tis they'd '''\"\"\"``` o'clock it's",
    "HelloWorld camelCaseWORDS iPhone NASA's snake_case kebab-case a/b//c <html>&amp; $5+3=8 ^_^ ~|~ !!?...",
    "control \x01\x02\x7f\u0085\u00a0\u2003\u3000\u200b\ufeff end \U000e0001\u0378",
    "",
    " ",
    "\n",
    "x",
)
"""Texts of several scripts, emoji, code, whitespace, numbers, contractions and control characters."""

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPECIAL = ("<unk>", "<s>", "</s>")
_TRAINED = [*SCRIPTS, demo_documents("heldout")[0][:1500]]
ROWS = 2048
"""Of an embedding that has a row for every token."""


def byte_level(pre: PreTokenizer, size: int = 4000, **changes: Any) -> dict[str, Any]:
    """A byte-level BPE with such a pre-tokenizer, ``<|end|>`` special and ``<tool>`` not; ``changes`` of its parts.

    Its merges come of texts that were not cut, and make one token of each of :data:`SCRIPTS`: where the pre-tokenizer
    cuts these is seen from the ids. Where llama.cpp's words are others with the same outcome, they come of cut ones.
    """
    model = {"type": "BPE", "vocab": {}, "merges": []}
    cut = as_json(pre) if pre.apart else {**LEVEL, "use_regex": False}
    trained = _train({**_empty(model), "pre_tokenizer": cut}, size, list(BYTES))
    trained["pre_tokenizer"] = as_json(pre)
    trained["decoder"] = LEVEL
    trained["model"]["ignore_merges"] = pre.ignores_merges
    end = len(trained["model"]["vocab"])
    trained["added_tokens"] = [added(end, "<|end|>", special=True), added(end + 1, "<tool>", special=False)]
    return trained | changes


def sentencepiece(
    *, prefix: str = "always", size: int = 800, every_pair: bool = True, **changes: Any
) -> dict[str, Any]:
    """A BPE with byte fallback as transformers makes it of SentencePiece's.

    Args:
        prefix: where a space is put in front: "always", "first" or "never".
        every_pair: whether the merges are all pairs that make a token; otherwise one for each token.
    """
    model = {"type": "BPE", "vocab": {}, "merges": [], "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    words = {
        "type": "Split",
        "pattern": {"Regex": f"\\n+|{SPACE}+[^\\n{SPACE}]*"},
        "behavior": "Isolated",
        "invert": False,
    }
    main = {**_empty(model), "normalizer": replace, "pre_tokenizer": words}
    trained = _train(main, size, [SPACE])
    texts = [*SPECIAL, *BYTE_TOKENS, *trained["model"]["vocab"]]
    vocab = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    merges = trained["model"]["merges"]
    if every_pair:
        made = dict.fromkeys("".join(merge) for merge in merges)
        merges = [[t[:at], t[at:]] for t in made for at in range(1, len(t)) if t[:at] in vocab and t[at:] in vocab]
    trained["model"] = {**model, "vocab": vocab, "merges": merges}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefix == "always" else []
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    first = prefix == "first"
    trained["normalizer"] = None if first else {"type": "Sequence", "normalizers": [*prepend, replace]}
    trained["pre_tokenizer"] = metaspace if first else None
    trained["added_tokens"] = [added(number, text, special=True) for number, text in enumerate(SPECIAL)]
    trained["added_tokens"].append(added(len(vocab), "<tool>", special=False))
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    bos = {"id": "<s>", "ids": [1], "tokens": ["<s>"]}
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {"<s>": bos}}
    return trained | {"post_processor": template} | changes


def added(number: int, text: str, *, special: bool, **flags: bool) -> dict[str, Any]:
    """An added token as tokenizer.json has it."""
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": text, **usual, "special": special, **flags}


def ids(
    main: dict[str, Any] | bytes, texts: Sequence[str], *, around: bool = False, parsed: bool = True
) -> list[list[int]]:
    """The token ids of texts, by the tokenizers library.

    Args:
        around: with what is put around a text.
        parsed: special tokens in a text are taken for such.
    """
    tokenizer = Tokenizer.from_str(main.decode() if isinstance(main, bytes) else json.dumps(main))
    tokenizer.encode_special_tokens = not parsed
    return [tokenizer.encode(text, add_special_tokens=around).ids for text in texts]


def unigram(size: int = 500) -> dict[str, Any]:
    """A Unigram model whose words begin with a space, as T5's."""
    from tokenizers.trainers import UnigramTrainer

    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    one = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": SPACE}
    main = _empty({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]]})
    main |= {"normalizer": {"type": "Sequence", "normalizers": [strip, one]}, "pre_tokenizer": metaspace}
    tokenizer = Tokenizer.from_str(json.dumps(main))
    trainer = UnigramTrainer(vocab_size=size, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(_TRAINED, trainer)
    trained: dict[str, Any] = json.loads(tokenizer.to_str())
    return trained


def _empty(model: dict[str, Any]) -> dict[str, Any]:
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **parts, "added_tokens": [], "model": model}


def _train(main: dict[str, Any], size: int, alphabet: list[str]) -> dict[str, Any]:
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer.from_str(json.dumps(main))
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TRAINED, trainer)
    trained: dict[str, Any] = json.loads(tokenizer.to_str())
    return trained
