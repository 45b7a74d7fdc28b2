"""The assignment of number formats to linears that ``--quant`` describes.

``fp8`` is one format for all of them. A list of ``pattern=format`` gives each the first whose pattern means it and
leaves the rest as they are: ``*.self_attn.*=fp8,*.mlp.*=int4:64``. A pattern is a shell wildcard over the module's full
name, or a regular expression after ``re:``; a format may be followed by its group size.

The head and the embedding of the tokens are no linears to it: they get what a pattern says that spells the last part of
their names, ``lm_head=int8`` or ``*embed_tokens=int4``, and no other.

A name may also be that of a mixture (:mod:`modelexport.quantization.mixtures`), which decides about the head and the
embedding, too: alone, behind the pattern ``*``, or, where no number format has the name, behind any. Which number
format a mixture gives a module is known once the model is: :meth:`Assignment.resolved`.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from modelexport.errors import CheckpointError, PlanError, UsageError, quoted
from modelexport.quantization import formats, mixtures
from modelexport.quantization.methods._patterns import compiled
from modelexport.quantization.mixtures import Mixture, MixtureFormats

if TYPE_CHECKING:
    import torch

    from modelexport.quantization.formats.base import NumberFormat

KEEP = "keep"
"""The ``--quant`` of a source that is quantised and stays as it is."""


@dataclass(frozen=True)
class Assignment:
    """(pattern, number format or mixture) in order; the format "none" keeps what it names."""

    rules: tuple[tuple[str, NumberFormat | Mixture | MixtureFormats], ...]
    is_list: bool = False

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        group_size: int | None = None,
        observer: str = "amax",
        scale_dtype: torch.dtype | None = None,
    ) -> Assignment:
        """Read ``--quant``.

        Args:
            group_size: of the formats that have groups and whose own is not given.
            observer, scale_dtype: see :class:`~modelexport.quantization.formats.base.NumberFormat`.

        Raises:
            UsageError: an unknown format, a group size that it has not, an item that is no ``pattern=format``.
        """
        if "=" not in text:
            name, own = _sized(text)
            if (mixture := mixtures.find(name)) is not None:
                return cls((("*", _without_groups(mixture, own or group_size)),))
            found = _number_format(name, group_size=own or group_size, observer=observer, scale_dtype=scale_dtype)
            return cls((("*", found),))
        rules: list[tuple[str, NumberFormat | Mixture]] = []
        for item in filter(None, (item.strip() for item in text.split(","))):
            pattern, equals, spelled = (part.strip() for part in item.rpartition("="))
            if not equals or not pattern:
                raise UsageError(f"--quant {text}: '{item}' is no PATTERN=FORMAT, e.g. '*.mlp.*=int4'")
            try:
                _matcher(pattern)
            except CheckpointError as error:
                raise UsageError(str(error)) from error
            name, own = _sized(spelled)
            mixture = mixtures.find(name)
            if mixture is not None and (pattern == "*" or not formats.has_name(name)):
                rules.append((pattern, _without_groups(mixture, own)))
                continue
            size = own or group_size
            if own is None and not formats.has_groups(name):
                size = None  # --group-size is for the others
            found = _number_format(name, group_size=size, observer=observer, scale_dtype=scale_dtype)
            rules.append((pattern, found))
        return cls(tuple(rules), is_list=True)

    @property
    def mixtures(self) -> list[Mixture]:
        """Every mixture of it."""
        named = (found.mixture if isinstance(found, MixtureFormats) else found for _, found in self.rules)
        return [found for found in named if isinstance(found, Mixture)]

    @property
    def mixture(self) -> Mixture | None:
        """The mixture of all that no other pattern means; None where there is none."""
        pattern, found = self.rules[-1] if self.rules else ("", None)
        return self.mixtures[-1] if pattern == "*" and isinstance(found, Mixture | MixtureFormats) else None

    def resolved(self, make: Callable[[Mixture], MixtureFormats]) -> Assignment:
        """The same with what each mixture gives the modules of a model, by ``make``."""
        rules = ((pattern, make(found) if isinstance(found, Mixture) else found) for pattern, found in self.rules)
        return replace(self, rules=tuple(rules))

    def rounds(self, module: str) -> bool:
        """Returns whether it gives a linear a number format, of mixtures before they are resolved, too."""
        found = self._of(module)
        return found is not None and (isinstance(found, Mixture | MixtureFormats) or found.quantised)

    def of(self, module: str, *, like: str = "") -> NumberFormat | None:
        """The number format of a linear; None where no pattern means it, or its mixture keeps it.

        Args:
            like: the linear by whose name patterns mean it, of which a mixture gives it its own format all the same;
                ``""``: itself.
        """
        return _given(self._of(like or module), module)

    def _of(self, module: str) -> NumberFormat | Mixture | MixtureFormats | None:
        return next((found for pattern, found in self.rules if _means(pattern, module)), None)

    def of_vocabulary(self, module: str) -> NumberFormat | None:
        """The number format of a head or an embedding; None where no pattern spells the last part of its name, and no
        mixture's means it."""
        return _given(self._of_vocabulary(module), module)

    def _of_vocabulary(self, module: str) -> NumberFormat | Mixture | MixtureFormats | None:
        return next((found for pattern, found in self.rules if self._means_vocabulary(pattern, found, module)), None)

    def _means_vocabulary(self, pattern: str, found: NumberFormat | Mixture | MixtureFormats, module: str) -> bool:
        if isinstance(found, Mixture | MixtureFormats):
            return _means(pattern, module)
        return self.is_list and _spells(pattern, module)

    def why_kept(self, module: str, *, like: str = "") -> str:
        """The reason why a mixture leaves a module as it is; "" where it does not, or none means it.

        Args:
            like: as of :meth:`of`.
        """
        found = self._of(like or module)
        if not isinstance(found, MixtureFormats) or module in found.formats:
            return ""
        return found.kept.get(module, "its rows are no rows of one tensor in a GGUF file, and blocks are of whole rows")

    @property
    def notes(self) -> list[str]:
        """Warnings about its mixtures, once they are resolved."""
        made = [found for _, found in self.rules if isinstance(found, MixtureFormats)]
        return list(dict.fromkeys(note for each in made for note in each.notes))

    def check_used(self, modules: Iterable[str], vocabulary: Iterable[str] = ()) -> None:
        """Refuse a pattern that decides about none of a model's linears: it is a slip.

        Args:
            modules: the linears.
            vocabulary: heads and embeddings.

        Raises:
            PlanError: there is one.
        """
        linears, spelled = list(modules), list(vocabulary)
        left = [*linears, *spelled]
        for pattern, found in self.rules if self.is_list else ():
            meant = [module for module in linears if _means(pattern, module)]
            meant += [module for module in spelled if self._means_vocabulary(pattern, found, module)]
            if not meant:
                example = f", such as {linears[0]}" if linears else ""
                close = _nearest_pattern(pattern, [*linears, *spelled])
                raise PlanError(
                    f"--quant '{pattern}={found.name}': no linear of the model's {len(linears)} has such a name"
                    f"{example}; {'mind the * at both ends' if close is None else f'did you mean {quoted(close)}?'}"
                )
            decided = set(meant)
            if decided.isdisjoint(left):
                raise PlanError(
                    f"--quant '{pattern}={found.name}': patterns before it mean all that it means, such as {meant[0]}; "
                    "the first one counts: put the narrower one first"
                )
            left = [module for module in left if module not in decided]


def _given(found: NumberFormat | Mixture | MixtureFormats | None, module: str) -> NumberFormat | None:
    assert not isinstance(found, Mixture), f"{found.name} is not resolved"
    return found.formats.get(module) if isinstance(found, MixtureFormats) else found


def _number_format(
    name: str, *, group_size: int | None, observer: str, scale_dtype: torch.dtype | None
) -> NumberFormat:
    """The number format of that name.

    Raises:
        UsageError: there is none, nor a mixture; or it has no such group size.
    """
    formats.check_name(name, others=mixtures.names())
    return formats.get(name, group_size=group_size, observer=observer, scale_dtype=scale_dtype)


def _without_groups(mixture: Mixture, group_size: int | None) -> Mixture:
    """The mixture.

    Raises:
        UsageError: a group size was given.
    """
    if group_size is not None:
        raise UsageError(
            f"--quant {mixture.name}: group size {group_size} was given, and its block types have their own: leave it "
            "out"
        )
    return mixture


def _nearest_pattern(pattern: str, linears: list[str]) -> str | None:
    """The pattern with its misspelt words put right, or a ``*`` at its ends; None where none of these means a linear.

    A word is what stands between dots; words with wildcards in them are as they are.
    """
    if pattern.startswith("re:"):
        return None
    known = sorted({word for name in linears for word in name.split(".")})
    words = []
    for word in pattern.split("."):
        plain = word.strip("*")
        close = difflib.get_close_matches(plain, known, n=1) if plain and plain not in known else []
        words.append(word.replace(plain, close[0]) if close else word)
    right = ".".join(words)
    candidates = (right, f"*{right}", f"{right}*", f"*{right}*", f"*.{right}", f"{right}.*", f"*.{right}.*")
    return next((each for each in candidates if any(_means(each, name) for name in linears)), None)


def _sized(text: str) -> tuple[str, int | None]:
    name, colon, size = text.partition(":")
    if not colon:
        return text, None
    try:
        return name, int(size)
    except ValueError:
        raise UsageError(f"--quant {text}: '{size}' is no group size; e.g. {name}:128") from None


def _means(pattern: str, module: str) -> bool:
    matches = _matcher(pattern)
    return matches(module) if matches is not None else fnmatch.fnmatchcase(module, pattern)


def _spells(pattern: str, module: str) -> bool:
    return module.rpartition(".")[2] in pattern and _means(pattern, module)


def _matcher(pattern: str) -> Callable[[str], bool] | None:
    """The matcher of a regular expression; None for a wildcard."""
    return compiled(pattern[3:], "--quant").matches if pattern.startswith("re:") else None
