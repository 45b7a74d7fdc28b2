"""The documents: commands are run or parsed, outputs are what is printed, links and names lead somewhere.

The word behind a fence says how its block is tested:

    ```console          lines behind "$ " are run, in order, in the document's directory; what they print is compared
    ```console no-run   needs the network, a large model or other machines: the parsers must know its flags
    ```python           run there too; behind ">>>", results are compared
    ```yaml             a recipe: loaded
    ```text             a picture, or the output of something else: not tested

A line "..." of an output stands for any number of lines. Seconds, rates and versions are compared by their shape,
other decimal fractions up to what rounding does.
In a document's directory are ``ckpt/``, written by the first command of README.md, and its source ``source/``, unless
the document makes them itself. After a change of outputs: ``MODELEXPORT_WRITE_DOCS=1 python -m pytest
tests/test_documents.py`` writes what is printed into the documents.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from modelexport import cli
from modelexport.assets import demo_model_path
from modelexport.cli.parsers import COMMANDS, parser_of
from modelexport.recipe import ExportRecipe
from tests.benchmarks._measuring import PERFORMANCE, replace_table

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
FIRST = "modelexport --tp 4 --out ckpt/"
WIDTH = 125
PLUGINS = ROOT / "docs" / "extending.md"  # its files, and their flags, are tested by test_plugins.py

FENCE = re.compile(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
FRACTION = re.compile(r"[+-]?\d+\.(\d+)(?:e([+-]\d+))?")
MEASURED = re.compile(r"^.*\b(KL|loss)\b.*$", re.MULTILINE)
"""Lines of figures that rounded activations decide: another CPU's products end on the other side of some."""
VARYING = (
    (re.compile(r"\d[\d,]*(\.\d+)?(?= (s|ms|tokens/s|[kMG]?B/s)\b)"), "#"),  # times and rates
    (re.compile(r"\d+\.\d+\.\d+(\+\w+)?"), "#"),  # versions
)
FOREIGN = {"--node-rank", "--master-addr", "--write", "--hypothesis-profile"}
"""Flags in running text that are of other programs, or of the benchmarks."""


@dataclass
class Block:
    """A fenced block: the words behind its fence, and its text."""

    language: str
    no_run: bool
    text: str


def blocks(path: Path) -> list[Block]:
    found = FENCE.finditer(path.read_text(encoding="utf-8"))
    return [Block(match[1], match[2] == "no-run", match[3]) for match in found]


def console(block: Block) -> Iterator[tuple[str, str]]:
    """Every command of a block, with the output shown below it."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        ends = next(number for number, line in enumerate(lines) if not line.endswith("\\\n"))
        yield "".join(lines[: ends + 1]).replace("\\\n", "").strip(), "".join(lines[ends + 1 :])


def inline(path: Path) -> list[str]:
    """Every piece of code in the running text and the tables."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", path.read_text("utf-8")))]


def with_blocks(*languages: str, run: bool) -> list[object]:
    """The documents that have such blocks, as parameters."""
    return [
        pytest.param(path, id=name)
        for path, name in zip(DOCUMENTS, IDS, strict=True)
        if any(block.language in languages and block.no_run is not run for block in blocks(path))
    ]


# ---------------------------------------------------------------------------------------- what is run


def printed(command: str) -> str:
    """Runs a command in the current directory, which is called /data; returns what it prints, errors last."""
    words = shlex.split(command, comments=True)
    if words[0] != "modelexport" or set(words) & {"|", ">", "&&"}:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120)
        return (done.stdout + done.stderr).replace(os.getcwd(), "/data")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        cli.main(words[1:])
    return (out.getvalue() + err.getvalue()).replace(os.getcwd(), "/data")


@pytest.fixture(scope="session")
def first_export(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The checkpoint that the first command of README.md writes, and what it prints."""
    directory = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        return directory / "ckpt", printed(FIRST)


@pytest.fixture
def directory(first_export: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A document's directory; its files may be written."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(first_export[0], "ckpt")
    shutil.copytree(demo_model_path(), "source")
    return tmp_path


def shape(text: str) -> str:
    """``text`` without what varies from run to run, and however it is wrapped."""
    for pattern, instead in VARYING:
        text = pattern.sub(instead, text)
    text = MEASURED.sub(lambda line: FRACTION.sub(r"~\g<0>", line[0]), text)
    return " ".join(text.split())


def agrees(shown: str, found: str) -> bool:
    """Returns whether an output is what a document shows of it."""
    parts = [shape(part).split() for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]
    words, at = shape(found).split(), 0
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        starts = range(at, len(words) - len(part) + 1) if number else [0]
        fits = (start for start in starts if same(part, words[start : start + len(part)]))
        start = next((start for start in fits if not last or start + len(part) == len(words)), None)
        if start is None:
            return False
        at = start + len(part)
    return True


def same(shown: Sequence[str], found: Sequence[str]) -> bool:
    """Returns whether two texts have the same words, and decimal fractions that no more than rounding tells apart."""
    return len(shown) == len(found) and all(a == b or nearly(a, b) for a, b in zip(shown, found, strict=True))


def nearly(shown: str, found: str) -> bool:
    """Returns whether two fractions differ by two percent or in the last digit: another CPU adds up otherwise.

    Those marked by :func:`shape` may differ by a half.
    """
    part = 0.5 if shown.startswith("~") else 0.02
    words = [word.strip("~,;") for word in (shown, found)]
    numbers = [FRACTION.fullmatch(word) for word in words]
    if not all(numbers):
        return False
    digit = float(f"1e{int(numbers[0][2] or 0) - len(numbers[0][1])}")
    return abs(float(words[0]) - float(words[1])) <= 1.001 * digit + part * abs(float(words[0]))


def as_shown(output: str) -> str:
    """An output with its long lines broken."""
    lines = [part for line in output.splitlines() for part in textwrap.wrap(line, WIDTH) or [""]]
    return "".join(f"{line}\n" for line in lines)


def run_python(text: str) -> str:
    """Runs a block of Python; returns what is wrong with the results behind its prompts."""
    if ">>>" not in text:
        exec(compile(text, "<document>", "exec"), {"__name__": "__main__"})
        return ""
    report = io.StringIO()
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    test = doctest.DocTestParser().get_doctest(text, {}, "document", None, None)
    doctest.DocTestRunner(optionflags=flags).run(test, out=report.write)
    return report.getvalue()


@pytest.mark.parametrize("path", with_blocks("console", "python", run=True))
def test_commands_print_what_is_shown(path: Path, directory: Path, first_export: tuple[Path, str]) -> None:
    found = [block for block in blocks(path) if block.language in ("console", "python") and not block.no_run]
    commands = [command for block in found if block.language == "console" for command, _ in console(block)]
    for name, maker in (("ckpt", FIRST), ("source", "cp -r")):
        if any(command.startswith(maker) for command in commands):
            shutil.rmtree(directory / name)
    document = path.read_text(encoding="utf-8")
    wrong = []
    for block in found:
        if block.language == "python":
            wrong += filter(None, [run_python(block.text)])
            continue
        for command, shown in console(block):
            if command == FIRST:
                shutil.copytree(first_export[0], "ckpt")
            output = first_export[1] if command == FIRST else printed(command)
            if not agrees(shown, output):
                wrong.append(f"$ {command}\n--- shown:\n{shown}--- printed:\n{output}")
                document = document.replace(f"$ {command}\n{shown}", f"$ {command}\n{as_shown(output)}", 1)
    if wrong and os.environ.get("MODELEXPORT_WRITE_DOCS"):
        path.write_text(document, encoding="utf-8")
    assert not wrong, "\n".join(wrong)


# ----------------------------------------------------------------------------- what is only read


def parse(command: str) -> None:
    """Parses every call of modelexport in a line as the program would.

    Raises:
        UsageError: it has an unknown flag or command, or too few arguments.
    """
    words = shlex.split(command, comments=True)
    for number, word in enumerate(words):
        started = number == 0 or words[number - 1] in ("-m", "&&", "|") or "=" in words[number - 1]
        if word.rpartition("/")[2] != "modelexport" or not started:
            continue
        given = words[number + 1 :]
        stops = [given.index(stop) for stop in ("&&", "|", ">") if stop in given]
        given = [each for each in given[: min(stops, default=None)] if each not in ("--help", "--version")]
        name = given.pop(0) if given and not given[0].startswith("-") else ""
        parser_of(name).parse_strictly(given)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path != PLUGINS], ids=lambda path: path.name)
def test_flags_are_known(path: Path) -> None:
    for block in blocks(path):
        if block.language == "console" and block.no_run:
            for command, _ in console(block):
                parse(command)
    known = {flag for name in ("", *COMMANDS) for flag in parser_of(name)._option_string_actions} | FOREIGN
    for code in inline(path):
        if code.startswith("modelexport ") and " " in code:
            parse(code)
        elif code.startswith("--"):
            assert code.split()[0].partition("=")[0] in known, code


@pytest.mark.parametrize("path", with_blocks("yaml", run=True))
def test_recipes_load(path: Path, tmp_path: Path) -> None:
    for block in blocks(path):
        if block.language == "yaml":
            recipe = tmp_path / "recipe.yaml"
            recipe.write_text(block.text, encoding="utf-8")
            ExportRecipe.load(recipe, {})


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path != PLUGINS], ids=lambda path: path.name)
def test_blocks_say_how_they_are_tested(path: Path) -> None:
    assert {block.language for block in blocks(path)} <= {"console", "python", "yaml", "text"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_links_and_names_of_files_lead_somewhere(path: Path) -> None:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert "://" in link or (path.parent / link).exists(), link
    for name in inline(path):
        if match := re.fullmatch(r"(?:modelexport/)?([\w/]+\.py)(?::([\w.]+))?", name):
            places = [place for place in (ROOT / match[1], ROOT / "modelexport" / match[1]) if place.is_file()]
            places = places or ([] if "/" in match[1] else list((ROOT / "tests").rglob(match[1])))
            if path == PLUGINS and not places and f"File `{match[1]}`:" in path.read_text(encoding="utf-8"):
                continue  # the document's own
            assert places, f"{name}: there is no such file"
            function = (match[2] or "").rpartition(".")[2]
            assert re.search(rf"(def|class) {function}\b" if function else "", places[0].read_text("utf-8")), name


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_tests_that_are_named_are_there(path: Path) -> None:
    for name in inline(path):
        file, colons, test = name.partition("::")
        if colons and file.startswith("tests/"):
            assert re.search(rf"^def {re.escape(test)}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE), name


def test_readme_is_short_and_the_index_has_every_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index


def test_architecture_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "modelexport").iterdir()):
        if (path / "__init__.py").exists():
            assert f"`{path.name}`" in text, path.name


def test_every_benchmark_has_its_place_among_the_figures() -> None:
    text = PERFORMANCE.read_text(encoding="utf-8")
    for script in sorted((ROOT / "tests" / "benchmarks").glob("bench_*.py")):
        assert f"<!-- {script.stem} -->" in replace_table(text, script.stem, "12 GB/s")


def test_a_table_goes_between_its_marks() -> None:
    page = "before\n<!-- bench_a -->\nold\n<!-- /bench_a -->\nafter\n"
    assert replace_table(page, "bench_a", "1  2\n") == page.replace("old", "```text\n1  2\n```")
    assert replace_table(page, "bench_a", "kinds:\n\n| a |\n|---|\n") == page.replace("old", "kinds:\n\n| a |\n|---|")
    with pytest.raises(ValueError, match="needed once, found 0 times"):
        replace_table(page, "bench_b", "")


def test_outputs_agree_up_to_what_varies() -> None:
    shown = "a 1.50 dB 3 MB\n...\nwrote x in 0.1 s (9 MB/s), torch 2.1.0\n"
    assert agrees(shown, "a 1.51\ndB 3 MB\nb\nwrote x in 12.5 s (1.2 MB/s), torch 2.13.0+cpu\n")
    assert not agrees(shown, "a 1.56 dB 3 MB\nwrote x in 0.1 s (9 MB/s), torch 2.1.0\n")
    assert not agrees(shown, "a 1.50 dB 4 MB\nwrote x in 0.1 s (9 MB/s), torch 2.1.0\n")
    assert not agrees(shown, "a 1.50 dB 3 MB\nwrote x in 0.1 s (9 MB/s), torch 2.1.0\nmore\n")
