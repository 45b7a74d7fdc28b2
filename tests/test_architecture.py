"""The package's shape: who may import whom, what stays light, and habits that a program can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import modelexport
from modelexport.cli.parsers import COMMANDS

PACKAGE = Path(modelexport.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# From the top down. A module may import from lower layers; within a layer, see SAME.
# Longest prefix decides; every module of the package must be covered.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("modelexport.__main__",),
    ("modelexport.cli",),
    ("modelexport.cli.parsers",),
    ("modelexport.cli.summary",),
    ("modelexport.exporting", "modelexport.resharding"),
    (
        "modelexport.resharding.rank",
        "modelexport.resharding.moves",
        "modelexport.exporting.rank",
        "modelexport.exporting.output",
        "modelexport.exporting.audit",
        "modelexport.exporting.record",
        "modelexport.exporting.target",
        "modelexport.exporting.after",
        "modelexport.jobs.hosts",
        "modelexport.exporting.calibrated.samples",
        "modelexport.exporting.checks",
        "modelexport.exporting.calibrated.folds",
        "modelexport.exporting.calibrated.rotation",
        "modelexport.exporting.scales",
        "modelexport.exporting.calibrated.rank",
        "modelexport.exporting.calibrated.layer",
        "modelexport.exporting.calibrated.recut",
        "modelexport.exporting.slots",
        "modelexport.exporting.calibrated.autoquant",
        "modelexport.exporting.calibrated.forward",
    ),
    ("modelexport.jobs.ranks", "modelexport.jobs.hub"),
    ("modelexport.jobs.target_directory",),
    (
        "modelexport.exporting.plan",
        "modelexport.exporting.plan.steps",
        "modelexport.exporting.plan.cuts",
        "modelexport.exporting.plan.linears",
        "modelexport.resharding.plan",
    ),
    ("modelexport.inspection",),
    ("modelexport.models",),
    ("modelexport.checkpoints", "modelexport.models.architecture", "modelexport.quantization"),
    ("modelexport.layers",),
    ("modelexport.sharding",),
    ("modelexport.distributed",),
    ("modelexport.recipe", "modelexport.resharding.recipe"),
    (
        "modelexport.settings",
        "modelexport.assets",
        "modelexport.system.tables",
        "modelexport.system.terminal",
        "modelexport.system.limits",
    ),
    ("modelexport.system.json_values", "modelexport.system.small_files", "modelexport.system.yaml_reading"),
    ("modelexport.errors", "modelexport.system.startup"),
    ("modelexport",),  # __version__
)

# Siblings that may import each other: the parts of one export step, and whatever shares a package.
# (Packages of the third kind below are further bound by BASES.)
SAME: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "modelexport.exporting.rank",
            "modelexport.exporting.audit",
            "modelexport.exporting.output",
            "modelexport.exporting.calibrated.samples",
            "modelexport.exporting.calibrated.folds",
            "modelexport.exporting.calibrated.rotation",
            "modelexport.exporting.scales",
            "modelexport.exporting.calibrated.rank",
            "modelexport.exporting.calibrated.layer",
            "modelexport.exporting.calibrated.recut",
            "modelexport.exporting.slots",
            "modelexport.exporting.calibrated.autoquant",
            "modelexport.exporting.calibrated.forward",
        }
    ),
    frozenset(
        {
            "modelexport.exporting.plan",
            "modelexport.exporting.plan.steps",
            "modelexport.exporting.plan.cuts",
            "modelexport.exporting.plan.linears",
        }
    ),
    frozenset({"modelexport.resharding.rank", "modelexport.resharding.moves"}),
    frozenset({"modelexport.exporting.target", "modelexport.exporting.record"}),
    frozenset({"modelexport.exporting.after", "modelexport.exporting.record"}),
)

# In these packages files are entries of a catalogue: they share the base and what begins with "_", not each other.
BASES: dict[str, frozenset[str]] = {
    "modelexport.models.architecture": frozenset({"base", "drafts"}),
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
    "modelexport.resharding.recipe",
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
    "modelexport.models.checkpoint_formats",  # and with it every checkpoint format
    "modelexport.quantization.methods",  # and with it every quantisation method
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
    "modelexport.exporting.target",
    "modelexport.exporting.after",
    "modelexport.jobs.hosts",
    "modelexport.exporting.checks",
    "modelexport.jobs.ranks",
    "modelexport.exporting",
    "modelexport.resharding",
    "modelexport.cli.summary",
    "modelexport.system.tables",
    "modelexport.system.limits",
    "modelexport.system.terminal",
    "modelexport.system.small_files",
)
HEAVY = ("torch", "transformers", "numba", "safetensors", "huggingface_hub", "numpy")

# Modules that may unpickle: what they read comes from this program's own launcher, never from a file.
UNPICKLE = {
    "modelexport.distributed.launch.rank_main",  # the function and arguments of a rank, as multiprocessing itself sends them
}


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


def all_imports() -> list[Import]:
    return [
        item
        for path in MODULES
        for item in imports_in(
            path.read_text(encoding="utf-8"), module_name(path), package=path.name == "__init__.py", names=NAMES
        )
    ]


def layer_of(name: str) -> tuple[int, str]:
    """(number of the layer, the prefix that put the module there); the longest prefix counts."""
    hits = [
        (len(prefix), number, prefix)
        for number, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if name == prefix or (prefix != "modelexport" and name.startswith(prefix + "."))
    ]
    assert hits, f"{name} belongs to no layer: add it to LAYERS"
    _, number, prefix = max(hits)
    return number, prefix


def is_allowed(item: Import) -> bool:
    """Whether the arrow points down, or stays where siblings may meet."""
    above, mine = layer_of(item.importer)
    below, theirs = layer_of(item.imported)
    if above != below:
        return above < below
    if mine != theirs:
        return any({mine, theirs} <= group for group in SAME)
    for package, bases in BASES.items():
        if item.importer.startswith(package + ".") and item.imported.startswith(package + "."):
            ends = (name.removeprefix(package + ".").split(".")[0] for name in (item.importer, item.imported))
            importer, imported = (name in bases or name.startswith("_") for name in ends)
            return importer or imported
    return True


def test_no_arrow_points_upwards() -> None:
    imports = all_imports()
    assert len(imports) > 50
    assert not [str(item) for item in imports if not is_allowed(item)]


def test_ranks_are_started_and_talked_to_in_one_place() -> None:
    """Everything above ``distributed`` uses it, and neither torch.distributed nor multiprocessing itself."""
    others = re.compile(r"\b(torch\.distributed|torch\.multiprocessing|multiprocessing|subprocess|os\.fork)\b")
    found = [
        module_name(path)
        for path in MODULES
        if not module_name(path).startswith("modelexport.distributed.") and others.search(path.read_text())
    ]
    named = ["modelexport.models.loading", "modelexport.exporting"]
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
        "modelexport.checkpoints.safetensors.layout",  # in the staging directory, once its size is right
        "modelexport.quantization.calibration.hidden_states",  # in the staging directory
    }


@pytest.mark.parametrize(
    ("importer", "line", "allowed"),
    [
        ("modelexport.cli", "from modelexport.exporting import export", True),
        ("modelexport.exporting", "from modelexport.cli import main", False),
        ("modelexport.exporting", "def f():\n    import modelexport.cli", False),
        ("modelexport.distributed.gather", "from modelexport.layers import merge", False),
        ("modelexport.distributed.gather", "from modelexport.errors import GatherError", True),
        ("modelexport.distributed.gather", "from modelexport.distributed import tree", True),
        ("modelexport.distributed.gather", "from . import tree", True),
        ("modelexport.distributed.gather", "from ..families import llama", False),
        ("modelexport.layers", "from modelexport.distributed.transport.tree import split", True),
        ("modelexport.sharding.plan", "from modelexport.models.architecture import Family", False),
        ("modelexport.sharding.plan", "from modelexport.distributed import gather", True),
        ("modelexport.models.families.llama", "from modelexport.models.families.base import Family", True),
        ("modelexport.models.families.llama", "from modelexport.models.families.qwen2 import FAMILY", False),
        ("modelexport.models.families.llama", "from modelexport.checkpoints import hf", False),
        ("modelexport.quantization.formats.int4", "from modelexport.quantization import kernels", True),
        ("modelexport.quantization.formats.int4", "from modelexport.quantization.formats import int8", False),
        ("modelexport.quantization.formats.int4", "from modelexport.quantization.formats import _packed", True),
        ("modelexport.quantization.methods.awq", "from modelexport.quantization.methods import gptq", False),
        ("modelexport.quantization.formats.base", "from modelexport.quantization.methods import of_method", True),
        ("modelexport.checkpoints.formats.hf", "from modelexport.quantization import formats", False),
        (
            "modelexport.checkpoints.formats.hf",
            "if TYPE_CHECKING:\n    from modelexport.quantization.formats.base import NumberFormat",
            False,
        ),
        (
            "modelexport.checkpoints.staging",
            "if TYPE_CHECKING:\n    from modelexport.exporting import Prepared",
            False,
        ),
        ("modelexport.inspection.verify", "from modelexport.checkpoints import hf", True),
        ("modelexport.checkpoints.formats.hf", "from modelexport.inspection import verify", False),
        ("modelexport.checkpoints.formats.trtllm", "from modelexport.models.architecture import family_of", False),
        ("modelexport.checkpoints.formats.trtllm", "from modelexport.sharding.shard_plan import ShardPlan", True),
        ("modelexport.sharding.reshard", "from modelexport.checkpoints import raw_io", False),
        ("modelexport.models.rules", "from modelexport.models.architecture import family_of", True),
        ("modelexport.models.rules", "from modelexport.inspection import inspect", False),
        ("modelexport.resharding", "from modelexport.exporting import export", False),
        ("modelexport.inspection.inspect", "from modelexport.exporting import export", False),
        ("modelexport.exporting.rank", "from modelexport.exporting.audit import audit", True),
        ("modelexport.errors", "from modelexport.recipe import ExportRecipe", False),
    ],
)
def test_the_rule_itself(importer: str, line: str, allowed: bool) -> None:
    names = NAMES | {"modelexport.models.families.qwen2", "modelexport.quantization.formats.int8"}
    [item] = imports_in(line, importer, package=False, names=names)
    assert is_allowed(item) == allowed


def test_every_module_has_its_layer() -> None:
    for name in NAMES:
        layer_of(name)


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([command, "--help"] for command in COMMANDS),
        ["--nonsense"],
        ["--tp", "0"],
        ["--push-to-hub", "nonsense"],
        ["--out", "EXISTS", "--tp", "4", "--algorithm", "gptq"],
        ["--model", "EXISTS", "--out", "ckpt", "--algorithm", "gptq"],
        ["reshard", "EXISTS", "--out", "EXISTS"],
    ],
)
def test_answers_that_need_no_torch(arguments: list[str], tmp_path: Path) -> None:
    """EXISTS: a target that is there, or a model without a tokenizer."""
    arguments = [str(tmp_path) if word == "EXISTS" else word for word in arguments]
    code = (
        "import sys\n"
        "from modelexport.cli import main\n"
        "try:\n"
        "    main(sys.argv[2:])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print([h for h in sys.argv[1].split(',') if h in sys.modules], file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, ",".join(HEAVY), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=PACKAGE.parent,
    )
    assert result.stderr.splitlines()[-1:] == ["[]"], result.stderr


# ----------------------------------------------------------------------- habits


def sources() -> list[object]:
    return [pytest.param(path, id=module_name(path)) for path in MODULES]


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


@pytest.mark.parametrize("path", sources())
def test_no_code_from_data(path: Path) -> None:
    """Nothing is unpickled, nor evaluated, nor loaded by torch without weights_only=True; YAML is safe."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            loaders = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"} & set(names)
            assert not loaders or module_name(path) in UNPICKLE, f"line {node.lineno} imports {loaders}"
        if not isinstance(node, ast.Call):
            continue
        name, keywords = called(node), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name == "torch.load":
            assert keywords.get("weights_only") == "True", f"line {node.lineno}: torch.load without weights_only=True"
        assert name not in ("eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system"), (
            f"line {node.lineno}: {name}"
        )
        assert keywords.get("allow_pickle", "False") == "False", f"line {node.lineno}"
        assert keywords.get("trust_remote_code", "False") == "False", f"line {node.lineno}"
        assert keywords.get("shell", "False") == "False", f"line {node.lineno}"


@pytest.mark.parametrize("path", sources())
def test_text_habits(path: Path) -> None:
    text = path.read_bytes().decode("ascii")
    assert not text or text.endswith("\n")
    assert "\t" not in text
    assert "\r" not in text


def is_public(name: str) -> bool:
    return not name.startswith("_")


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions and classes of a module that have no docstring."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node for node in tree.body if isinstance(node, kinds) and is_public(node.name)]
    return [node.name for node in public if ast.get_docstring(node) is None]


@pytest.mark.parametrize("path", sources())
def test_what_is_public_says_what_it_does(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if tree.body:
        assert ast.get_docstring(tree), "the module says nothing"
    assert undocumented(tree) == []


@pytest.mark.parametrize("path", sources())
def test_nothing_happens_at_import(path: Path) -> None:
    """No logging is configured, nothing is printed, no thread or process is started at a module's top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            assert called(node) not in ("logging.basicConfig", "logging.disable", "warnings.simplefilter"), node.lineno
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or is_main_guard(statement):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                word = called(node)
                assert word not in ("print", "os.environ.setdefault", "torch.set_num_threads"), f"{word} at import"
                assert not word.endswith(".start"), f"{word} at import"


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
