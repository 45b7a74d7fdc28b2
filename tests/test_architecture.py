"""The package's shape: who may import whom, what stays light, and habits that a program can check."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

import modelexport
from modelexport.cli.parsers import COMMANDS

PACKAGE = Path(modelexport.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# The rooms from the top down, the rooms of a line being siblings. A module may import from lower lines and from its own
# room; inside a room, at every depth, folders and modules do not import each other in a circle.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("exporting", "resharding"),
    ("jobs",),
    ("inspection",),
    ("recipe",),
    ("models",),
    ("quantization", "checkpoints"),
    ("layers",),
    ("sharding",),
    ("distributed",),
    ("settings", "assets", "plugins"),
    ("system",),
    ("errors",),
)

# Files of these folders are entries of a catalogue: they share the base and what begins with "_", not each other.
CATALOGUES: dict[str, frozenset[str]] = {
    "modelexport.models.families": frozenset({"base", "drafts"}),
    "modelexport.checkpoints.formats": frozenset({"hf"}),
    "modelexport.quantization.formats": frozenset({"base"}),
    "modelexport.quantization.methods": frozenset({"base"}),
    "modelexport.quantization.algorithms": frozenset({"base"}),
}

# Importing these must not import torch (a second and a half) nor transformers.
LIGHT = (
    "modelexport",
    "modelexport.errors",
    "modelexport.settings",
    "modelexport.system.json_values",
    "modelexport.system.yaml_reading",
    "modelexport.recipe",
    "modelexport.cli",
    "modelexport.cli.parsers",
    "modelexport.jobs.hub",
    "modelexport.assets",
    "modelexport.models.architecture",
    "modelexport.models.families.llama",
    "modelexport.models.families.mixtral",
    "modelexport.sharding.plan",
    "modelexport.sharding.shard_plan",
    "modelexport.sharding.boxes",
    "modelexport.sharding.rules",
    "modelexport.models.modules",
    "modelexport.models.rules",
    "modelexport.models.engines",
    "modelexport.models.loading",
    "modelexport.inspection.card",
    "modelexport.models.checkpoint_formats",
    "modelexport.quantization.methods",
    "modelexport.models.opening",
    "modelexport.models.target_plan",
    "modelexport.checkpoints.safetensors.file",
    "modelexport.checkpoints.safetensors.arrays",
    "modelexport.checkpoints.staging",
    "modelexport.checkpoints.formats.hf",
    "modelexport.checkpoints.source",
    "modelexport.exporting.plan",
    "modelexport.exporting.plan.cuts",
    "modelexport.exporting.plan.linears",
    "modelexport.resharding.plan",
    "modelexport.resharding.moves",
    "modelexport.exporting.record",
    "modelexport.jobs.hosts",
    "modelexport.jobs.ranks",
    "modelexport.exporting",
    "modelexport.resharding",
    "modelexport.cli.summary",
    "modelexport.system.tables",
    "modelexport.system.dtypes",
    "modelexport.system.safetensors_header",
    "modelexport.system.limits",
    "modelexport.system.terminal",
    "modelexport.system.small_files",
    "modelexport.exporting.prepare",
    "modelexport.exporting.result",
    "modelexport.exporting.run",
    "modelexport.jobs.side_files",
)
HEAVY = ("torch", "transformers", "numba", "safetensors", "huggingface_hub", "numpy")

# Modules that may unpickle: what they read comes from this program's own launcher, never from a file.
UNPICKLE = {
    # the function and arguments of a rank, as multiprocessing itself sends them
    "modelexport.distributed.launch.rank_main",
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module's tree."""
    return tuple(ast.walk(tree_of(path)))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}


@dataclass(frozen=True)
class Import:
    """One module of ours importing another."""

    importer: str
    imported: str
    line: int
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_in(source: str, importer: str, *, package: bool, names: set[str]) -> list[Import]:
    """Every import of ours in ``source``, inside functions too; ``from x import y`` is x.y where that is a module."""
    tree = ast.parse(source)
    guarded = {
        id(child) for node in ast.walk(tree) if is_type_checking(node) for part in node.body for child in ast.walk(part)
    }
    found: list[Import] = []
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = importer.split(".")[: len(importer.split(".")) - node.level + package]
                base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [full if (full := f"{base}.{alias.name}") in names else base for alias in node.names]
        found += [
            Import(importer, target, getattr(node, "lineno", 0), id(node) in guarded)
            for target in dict.fromkeys(targets)
            if target == "modelexport" or target.startswith("modelexport.")
        ]
    return found


@functools.cache
def all_imports() -> list[Import]:
    return [
        item
        for path in MODULES
        for item in imports_in(
            path.read_text(encoding="utf-8"), module_name(path), package=path.name == "__init__.py", names=NAMES
        )
    ]


def room_of(name: str) -> str:
    """The first folder, or module, below the package; ``""`` for the package itself."""
    return name.partition(".")[2].partition(".")[0]


def line_of(room: str) -> int:
    """Number of the line of :data:`ROOMS`; the package itself, with its version, lies below all."""
    if room == "":
        return len(ROOMS)
    [line] = [number for number, rooms in enumerate(ROOMS) if room in rooms]
    return line


def points_down(item: Import) -> bool:
    """Whether the imported room lies on a lower line, or is the importer's own."""
    above, below = room_of(item.importer), room_of(item.imported)
    return above == below or above == "" or line_of(above) < line_of(below)


def circle_in(edges: Iterable[tuple[str, str]]) -> list[str]:
    """The nodes of a graph that are on a circle, or lie between two."""
    left = {edge for edge in edges if edge[0] != edge[1]}
    while left:
        kept = {(a, b) for a, b in left if any(b == c for c, _ in left) and any(a == d for _, d in left)}
        if kept == left:
            break
        left = kept
    return sorted({node for edge in left for node in edge})


def inner_edges(imports: Iterable[Import]) -> dict[str, set[tuple[str, str]]]:
    """Folder -> (child, child) for each import from one child of it (a folder or a module) into another."""
    edges: dict[str, set[tuple[str, str]]] = {}
    for item in imports:
        importer, imported = full_path(item.importer), full_path(item.imported)
        depth = next(n for n, (a, b) in enumerate(zip(importer, imported, strict=False)) if a != b)
        if depth > 1:
            edges.setdefault(".".join(importer[:depth]), set()).add((importer[depth], imported[depth]))
    return edges


def full_path(name: str) -> list[str]:
    """The parts of a module's name; a package's own code is its ``__init__``."""
    parts = name.split(".")
    return [*parts, "__init__"] if PACKAGE.parent.joinpath(*parts).is_dir() else parts


def test_imports_point_down_room_by_room() -> None:
    imports = all_imports()
    assert len(imports) > 1000
    assert not [str(item) for item in imports if not points_down(item)]


def test_no_folder_has_a_circle() -> None:
    imports = [item for item in all_imports() if item.importer != item.imported]
    found = {folder: circle_in(edges) for folder, edges in inner_edges(imports).items()}
    assert len(found) > 20
    assert not {folder: nodes for folder, nodes in found.items() if nodes}


def test_entries_of_a_catalogue_do_not_import_each_other() -> None:
    wrong = []
    for item in all_imports():
        for folder, bases in CATALOGUES.items():
            entries = [
                name.removeprefix(folder + ".").split(".")[0]
                for name in (item.importer, item.imported)
                if name.startswith(folder + ".")
            ]
            entries = [entry for entry in entries if entry not in bases and not entry.startswith("_")]
            if len(set(entries)) == 2:
                wrong.append(str(item))
    assert not wrong


def test_ranks_are_started_and_talked_to_in_one_place() -> None:
    """Everything above ``distributed`` uses it, and neither torch.distributed nor multiprocessing itself."""
    others = re.compile(r"\b(torch\.distributed|torch\.multiprocessing|multiprocessing|subprocess|os\.fork)\b")
    found = [
        module_name(path)
        for path in MODULES
        if not module_name(path).startswith("modelexport.distributed.") and others.search(path.read_text())
    ]
    named = ["modelexport.exporting.run", "modelexport.models.loading"]
    assert found == named, "a command that people are told, and the list of modules to preload, name torch.distributed"


def test_files_that_somebody_named_are_opened_in_one_place() -> None:
    """A path of a user's, or in a checkpoint, may be a pipe or a device; these modules open only what is their own."""
    opened = re.compile(r"""\.(read|write)_(bytes|text)\(|\bfdopen\(|(?<![.\w])open\([^)]*["']|\.open\(["']""")
    found = {
        module_name(path)
        for path in MODULES
        if not module_name(path).startswith("modelexport.distributed.") and opened.search(path.read_text())
    }
    assert found == {
        "modelexport.system.small_files",
        "modelexport.assets",  # of the package
        "modelexport.quantization.kernels.compiled",  # its own source
        "modelexport.checkpoints.staging.journal",  # /proc
        "modelexport.checkpoints.staging.locks",  # /proc
        "modelexport.jobs.hosts",  # /proc
        "modelexport.system.limits",  # /proc
        "modelexport.system.startup",  # /proc
        "modelexport.system.terminal",  # the standard streams
        "modelexport.checkpoints.hub_source",  # in the mirror
        "modelexport.checkpoints.mirrors.mirror",  # in the mirror
        "modelexport.checkpoints.safetensors.layout",  # in the staging directory, once its size is right
        "modelexport.quantization.calibration.hidden_states",  # in the staging directory
        "modelexport.quantization.calibration.products",  # /proc
    }


@pytest.mark.parametrize(
    ("importer", "line", "allowed"),
    [
        ("modelexport.cli", "from modelexport.exporting import export", True),
        ("modelexport.exporting.rank", "def f():\n    import modelexport.cli", False),
        ("modelexport.distributed.gather", "from modelexport.layers import merge", False),
        ("modelexport.distributed.gather", "from ..models import ties", False),
        ("modelexport.checkpoints.formats.hf", "if TYPE_CHECKING:\n    from modelexport.quantization import x", False),
        ("modelexport.resharding", "from modelexport.exporting import export", False),
        ("modelexport.errors", "from modelexport.recipe import ExportRecipe", False),
    ],
)
def test_the_rule_itself(importer: str, line: str, allowed: bool) -> None:
    [item] = imports_in(line, importer, package=False, names=NAMES)
    assert points_down(item) == allowed


def test_the_rule_of_circles() -> None:
    assert circle_in([("a", "b"), ("b", "c"), ("c", "d")]) == []
    assert circle_in([("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]) == ["b", "c"]


def test_every_room_has_its_line() -> None:
    assert {room_of(name) for name in NAMES} - {""} == {room for rooms in ROOMS for room in rooms}


# ------------------------------------------------------------------------ light


def test_light_modules_import_nothing_heavy() -> None:
    """One process imports them one by one, so that the first culprit is named."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1].split(','):\n"
        "    importlib.import_module(name)\n"
        "    heavy = [h for h in sys.argv[2].split(',') if h in sys.modules]\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
        "print('light')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, ",".join(LIGHT), ",".join(HEAVY)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=PACKAGE.parent,
    )
    assert result.stderr == ""
    assert result.stdout == "light\n"


def test_answers_that_need_no_torch(tmp_path: Path) -> None:
    """One process gives them all, so that the first culprit is named."""
    there = str(tmp_path)  # a target that is there, or a model without a tokenizer
    answers = [
        ["--help"],
        ["--version"],
        *([command, "--help"] for command in COMMANDS),
        ["--nonsense"],
        ["--tp", "0"],
        ["--push-to-hub", "nonsense"],
        ["--out", there, "--tp", "4", "--algorithm", "gptq"],
        ["--model", there, "--out", "ckpt", "--algorithm", "gptq"],
        ["reshard", there, "--out", there],
    ]
    code = (
        "import json, sys\n"
        "from modelexport.cli import main\n"
        "for arguments in json.loads(sys.argv[2]):\n"
        "    try:\n"
        "        main(arguments)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "    heavy = [h for h in sys.argv[1].split(',') if h in sys.modules]\n"
        "    assert not heavy, f'{arguments} imports {heavy}'\n"
        "print('light', file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, ",".join(HEAVY), json.dumps(answers)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=PACKAGE.parent,
    )
    assert result.stderr.splitlines()[-1:] == ["light"], result.stderr


# ----------------------------------------------------------------------- habits


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def test_no_code_from_data() -> None:
    """Nothing is unpickled, nor evaluated, nor loaded by torch without weights_only=True; YAML is safe."""
    for path in MODULES:
        where = module_name(path)
        for node in nodes_of(path):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                loaders = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"} & set(names)
                assert not loaders or where in UNPICKLE, f"{where}:{node.lineno} imports {loaders}"
            if not isinstance(node, ast.Call):
                continue
            name, keywords = called(node), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name == "torch.load":
                assert keywords.get("weights_only") == "True", (
                    f"{where}:{node.lineno}: torch.load without weights_only=True"
                )
            assert name not in ("eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system"), (
                f"{where}:{node.lineno}: {name}"
            )
            assert keywords.get("allow_pickle", "False") == "False", f"{where}:{node.lineno}"
            assert keywords.get("trust_remote_code", "False") == "False", f"{where}:{node.lineno}"
            assert keywords.get("shell", "False") == "False", f"{where}:{node.lineno}"


def test_text_habits() -> None:
    for path in MODULES:
        where = module_name(path)
        text = path.read_bytes().decode("ascii")
        assert not text or text.endswith("\n"), where
        assert "\t" not in text, where
        assert "\r" not in text, where


def is_public(name: str) -> bool:
    return not name.startswith("_")


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions and classes of a module that have no docstring."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node for node in tree.body if isinstance(node, kinds) and is_public(node.name)]
    return [node.name for node in public if ast.get_docstring(node) is None]


def test_what_is_public_says_what_it_does() -> None:
    for path in MODULES:
        where = module_name(path)
        tree = tree_of(path)
        if tree.body:
            assert ast.get_docstring(tree), f"{where} says nothing"
        assert undocumented(tree) == [], where


def test_nothing_happens_at_import() -> None:
    """No logging is configured, nothing is printed, no thread or process is started at a module's top level."""
    for path in MODULES:
        where = module_name(path)
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                assert called(node) not in ("logging.basicConfig", "logging.disable", "warnings.simplefilter"), (
                    f"{where}:{node.lineno}"
                )
        for statement in tree_of(path).body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or is_main_guard(statement):
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Call):
                    word = called(node)
                    assert word not in ("print", "os.environ.setdefault", "torch.set_num_threads"), (
                        f"{word} at import of {where}"
                    )
                    assert not word.endswith(".start"), f"{word} at import of {where}"


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def test_a_class_name_stands_for_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module_name(path))
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_docstrings_say_what_a_thing_is() -> None:
    """None is a riddle that begins with What or Whether."""
    for path in MODULES:
        where = module_name(path)
        for node in nodes_of(path):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                begins = re.match(r"(What|Whatever|Whether|Who|Whoever|How|Why|Where|When|Which)\b", text)
                assert not begins, f"{where}, {getattr(node, 'name', 'the module')}: {text.partition(chr(10))[0]}"
