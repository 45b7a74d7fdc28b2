"""The pre-tokenizers that llama.cpp has by name, as data, and which of them a tokenizer.json's is.

A pre-tokenizer cuts a text into words before merges. llama.cpp's are lists of regular expressions, each of which
isolates its matches in what the one before has left; a ``tokenizer.json`` has a sequence of ``Split``, ``Digits``,
``Punctuation`` and ``ByteLevel``. Both are written here as steps: a step is the alternatives of one expression, in one
spelling (:data:`_SPELLINGS` are others of the same matches). A tokenizer has the name whose steps are its own; one
without such a name is refused, never taken for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelexport.checkpoints.gguf.tokenizer.vocabulary import Unlike
from modelexport.errors import quoted, shown

Step = tuple[str, ...]
"""The alternatives of a regular expression."""

_BYTES: Step = ("<bytes>",)  # where ByteLevel is not the last step: what follows sees its alphabet
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_SYMBOLS_LINES = _SYMBOLS + r"[\r\n]*"
_SYMBOLS_SLASHES = _SYMBOLS + r"[\r\n/]*"
_SPACES: Step = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER_NO_HAN, _LOWER_NO_HAN = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_ASCII_PUNCTUATION = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
# DeepSeek's letters: those that have a case, as of its Unicode.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_WIDE_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"

# What is written otherwise and matches the same.
_SPELLINGS = {
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])": _CONTRACTIONS,
    "'(?i:[sdmt]|ll|ve|re)": _CONTRACTIONS,
    "'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])": _CONTRACTIONS,
    r"[^\r\n\p{L}\p{N}]?+\p{L}+": _LETTERS,  # nothing that the first takes is a letter, and nothing is given back
    r"[^\r\n\p{L}\p{N}]?+\p{L}++": _LETTERS,
    r" ?[^\s\p{L}\p{N}]++[\r\n]*": _SYMBOLS_LINES,
    r" ?[^\s\p{L}\p{N}]++[\r\n]*+": _SYMBOLS_LINES,
    r" ?[^\s\p{L}\p{N}\r\n]+": _SYMBOLS,  # \r and \n are \s
    r"\s*[\r\n]": _SPACES[0],  # \s* has taken all lines but the last
    r"\p{N}{1}": r"\p{N}",
    r"[0-9]{3}": "[0-9][0-9][0-9]",
}
_GPT2: Step = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", r" ?\p{L}+", r" ?\p{N}+", _SYMBOLS, *_SPACES[1:])
_LLAMA3: Step = (_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _SYMBOLS_LINES, *_SPACES)
_QWEN2: Step = (_CONTRACTIONS, _LETTERS, r"\p{N}", _SYMBOLS_LINES, *_SPACES)
_DEEPSEEK3: Step = (_ASCII_PUNCTUATION, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", *_SPACES)
_DIGIT, _DIGITS = (r"\p{N}",), (r"\p{N}+",)
_PUNCTUATION: Step = (r"[\p{P}\$\+<=>\^~\|`]+",)  # ASCII's, all of it, and Unicode's


def _cased(upper: str, lower: str, end: str) -> Step:
    """Words that change from capitals to small letters once: o200k's and its kin."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (f"{start}{upper}*{lower}+{end}", f"{start}{upper}+{lower}*{end}")


_TEKKEN: Step = (*_cased(_UPPER, _LOWER, ""), r"\p{N}", _SYMBOLS_SLASHES, *_SPACES)
_O200K: Step = (*_cased(_UPPER, _LOWER, f"{_CONTRACTIONS}?"), r"\p{N}{1,3}", _SYMBOLS_SLASHES, *_SPACES)
_CASES_DIFFER = "capitals and combining marks beyond ASCII do not part words as they do in the model's tokenizer"
_SPACES_DIFFER = "spaces beyond ASCII part words otherwise than in the model's tokenizer"
_WHITESPACE_RUNS = tuple(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer of llama.cpp's.

    Attributes:
        name: ``tokenizer.ggml.pre``.
        steps: as a tokenizer.json has them.
        ignores_merges: whether a word that is a token is taken without asking the merges.
        adds_bos: whether llama.cpp puts bos before a text where the file does not say.
        apart: where llama.cpp's steps are others with the same outcome as long as no token joins certain characters:
            what no token may match, with N for each character that is a number, and - for another.
        differs: in what llama.cpp's splits differ from the tokenizer.json's; None: in nothing.
    """

    name: str
    steps: tuple[Step, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    apart: str | None = None
    differs: str | None = None

    @property
    def numbers_are_bytes(self) -> bool:
        """True if the steps look for numbers in the alphabet of bytes, and not in the text."""
        return _BYTES in self.steps


# Of several with the same steps the first is the nearest to them.
PRE_TOKENIZERS = (
    PreTokenizer("gpt-2", (_GPT2,)),
    PreTokenizer("starcoder", (_DIGIT, _GPT2)),
    PreTokenizer("llama-bpe", (_LLAMA3,), ignores_merges=True, adds_bos=True),
    PreTokenizer("glm4", (_LLAMA3,), ignores_merges=True),
    PreTokenizer("dbrx", (_LLAMA3,)),
    PreTokenizer("qwen2", (_QWEN2,)),
    PreTokenizer(
        "qwen35",
        ((_CONTRACTIONS, _MARKED_LETTERS, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", *_SPACES),),
    ),
    PreTokenizer(
        "granite-embed-multi-97m",
        (_O200K,),
        ignores_merges=True,
        differs="capitals beyond ASCII do not part words as they do in the model's tokenizer",
    ),
    PreTokenizer("gpt-4o", (_O200K,), differs=_CASES_DIFFER),
    PreTokenizer("tekken", (_TEKKEN,), ignores_merges=True, adds_bos=True, differs=_CASES_DIFFER),
    PreTokenizer(
        "kimi-k2",
        (
            (
                r"[\p{Han}]+",
                *_cased(_UPPER_NO_HAN, _LOWER_NO_HAN, f"{_CONTRACTIONS}?"),
                r"\p{N}{1,3}",
                _SYMBOLS_LINES,
                *_SPACES,
            ),
        ),
        differs="capitals and combining marks do not part words as they do in the model's tokenizer",
    ),
    PreTokenizer(
        "tiny_aya",
        ((r"\d{1,3}(?=(?:\d{3})*\b)",), _O200K),
        differs="capitals and numbers other than digits do not part words as they do in the model's tokenizer",
    ),
    PreTokenizer("deepseek-v3", ((r"\p{N}{1,3}",), (_CJK,), _DEEPSEEK3)),
    PreTokenizer(
        "deepseek-llm",
        (
            (r"[\r\n]",),
            (rf"\s?[{_CASED}]+",),
            (rf"\s?[{_WIDE_PUNCTUATION}]+",),
            (r"\s+$",),
            (_DEEPSEEK_CJK,),
            _DIGIT,
        ),
        apart="NN",
        differs=_SPACES_DIFFER,
    ),
    PreTokenizer(
        "deepseek-coder",
        ((r"[\r\n]",), (r"\s?\p{L}+",), (r"\s?\p{P}+",), (_DEEPSEEK_CJK,), _DIGIT),
        differs=_SPACES_DIFFER,
    ),
    PreTokenizer("falcon", (_PUNCTUATION, _GPT2, _BYTES, _DIGITS, ("[0-9][0-9][0-9]",)), apart="N-|-N"),
    PreTokenizer("bloom", ((_BLOOM,),)),
    PreTokenizer("viking", ((_BLOOM,), _DIGIT)),
    PreTokenizer("seed-coder", ((_CONTRACTIONS, _LETTERS, r"\p{N}", _SYMBOLS, *_SPACES),)),
    PreTokenizer("ufakzeka", (_QWEN2[1:],)),
    PreTokenizer("laguna", ((r"[^\n]+", r"[\n]+"), _QWEN2)),
    PreTokenizer(
        "minicpm5",
        ((r"\p{N}{1,3}",), (_CONTRACTIONS, _LETTERS, r"\p{N}+", _SYMBOLS_LINES, *_SPACES)),
        ignores_merges=True,
    ),
    PreTokenizer(
        "exaone-moe",
        (
            (
                _CONTRACTIONS,
                r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                r"\p{N}",
                _SYMBOLS + r"[\r\n/]?",
                *_SPACES,
            ),
        ),
    ),
    PreTokenizer(
        "jais-2",
        (
            (
                _CONTRACTIONS,
                _LETTERS,
                r"\p{N}{1,3}",
                _SYMBOLS_LINES,
                _SPACES[0],
                *_WHITESPACE_RUNS,
                r"\s{1,2}(?!\S)",
                r"\s{1}",
            ),
        ),
    ),
)
LOOK_ALIKES: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (
        *("phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert"),
        *("mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
    ),
    "starcoder": ("refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    "glm4": ("glm5",),
    "dbrx": ("smaug-bpe", "chatglm-bpe"),
    "qwen2": (
        *("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        *("bailingmoe", "bailingmoe2", "llada-moe"),
    ),
    "gpt-4o": ("llama4", "kanana2", "talkie", "minimax-m2"),
    "tiny_aya": ("cohere2moe",),
    "deepseek-v3": ("hunyuan-dense", "hy_v4", "joyai-llm"),
    "bloom": ("poro-chat", "gpt3-finnish"),
}
"""Names that llama.cpp has for the same: they are read, and the first is written."""
_BY_NAME = {pre.name: pre for pre in PRE_TOKENIZERS}
BY_NAME: Mapping[str, PreTokenizer] = _BY_NAME | {
    other: _BY_NAME[name] for name, others in LOOK_ALIKES.items() for other in others
}
"""Every name of a GGUF file that is known -> the pre-tokenizer."""
_COVERING = {_GPT2, _LLAMA3, _QWEN2, _O200K, _TEKKEN}  # every character is in a match


def find_pre_tokenizers(main: Mapping[str, Any]) -> tuple[PreTokenizer, ...]:
    """Those of llama.cpp's pre-tokenizers that cut words as a tokenizer.json does.

    Raises:
        Unlike: there is none; the reason has the tokenizer's own expressions.
    """
    steps = tuple(_steps(main.get("pre_tokenizer") or {}))
    found = tuple(pre for pre in PRE_TOKENIZERS if pre.steps == steps)
    if not found:
        expressions = " then ".join(shown("|".join(step)) for step in steps) or "nothing"
        raise Unlike(f"its pre-tokenizer is none that llama.cpp is known to have: it splits by {expressions}")
    return found


def _steps(pre: Mapping[str, Any]) -> Iterator[Step]:
    """The steps of a tokenizer.json's pre-tokenizer, which has to end in bytes."""
    parts = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    byte_level = [number for number, part in enumerate(parts) if part.get("type") == "ByteLevel"]
    if len(byte_level) != 1:
        kinds = ", ".join(shown(str(part.get("type"))) for part in parts)
        raise Unlike(f"its pre-tokenizer is {kinds or 'nothing'}, without one ByteLevel, which byte-level BPE has")
    for number, part in enumerate(parts):
        yield from _part(part)
        if number == byte_level[0] and number < len(parts) - 1:
            yield _BYTES


def _part(part: Mapping[str, Any]) -> Sequence[Step]:
    kind = part.get("type")
    if kind == "ByteLevel":
        if part.get("add_prefix_space"):
            raise Unlike("its ByteLevel puts a space before a text, which llama.cpp does not")
        return [_GPT2] if part.get("use_regex", True) else []
    if kind == "Digits":
        return [_DIGIT if part.get("individual_digits") else _DIGITS]
    if kind == "Punctuation" and part.get("behavior") == "Contiguous":
        return [_PUNCTUATION]
    if kind == "Split":
        return [_split(part)]
    raise Unlike(f"its pre-tokenizer has a step {shown(str(kind))}, which llama.cpp has not")


def _split(part: Mapping[str, Any]) -> Step:
    pattern = part.get("pattern") or {}
    expression = pattern.get("Regex")
    if not isinstance(expression, str):
        raise Unlike(f"its pre-tokenizer splits at {quoted(pattern)}, which llama.cpp does not")
    step = tuple(_SPELLINGS.get(each, each) for each in alternatives(expression))
    how = (part.get("behavior"), bool(part.get("invert")))
    # What is removed is what lies between the matches: nothing, where every character is part of one.
    if how != ("Isolated", False) and not (how == ("Removed", True) and step in _COVERING):
        raise Unlike(f"its pre-tokenizer splits by {shown(expression)} with behavior {shown(str(how[0]))}")
    return step


def alternatives(expression: str) -> list[str]:
    """A regular expression cut at its outermost bars; line breaks are escaped."""
    expression = expression.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")
    found, depth, inside, start, at = [], 0, 0, 0, 0
    while at < len(expression):
        each = expression[at]
        if each == "\\":
            at += 1
        elif each == "[":
            inside += 1
        elif each == "]" and inside:
            inside -= 1
        elif not inside:
            depth += (each == "(") - (each == ")")
            if each == "|" and not depth:
                found.append(expression[start:at])
                start = at + 1
        at += 1
    return [*found, expression[start:]]


# ------------------------------------------------------------------ as a tokenizer.json has them


def as_json(pre: PreTokenizer) -> dict[str, Any]:
    """The ``pre_tokenizer`` of a tokenizer.json that has these steps."""
    parts: list[dict[str, Any]] = []
    for step in pre.steps:
        if step == _BYTES:
            continue
        if step == _GPT2:
            parts.append(_byte_level(use_regex=True))
        elif step in (_DIGIT, _DIGITS):
            parts.append({"type": "Digits", "individual_digits": step == _DIGIT})
        elif step == _PUNCTUATION:
            parts.append({"type": "Punctuation", "behavior": "Contiguous"})
        else:
            pattern = {"Regex": "|".join(step)}
            parts.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    if _GPT2 not in pre.steps:
        parts.append(_byte_level(use_regex=False))
    return parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
