"""``eval --tasks``: likelihoods of continuations, and what is asked of lm-eval's harness, a stand-in for it here."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from modelexport.assets import demo_model_path
from modelexport.cli import main
from modelexport.errors import UsageError
from modelexport.inspection.evaluate import continuations, load_dequantised
from modelexport.inspection.evaluate.tasks import evaluate_tasks
from modelexport.models.opening import open_model
from tests.helpers.models import make_llama
from tests.inspection._quantised import save_quantised

HARNESS = "modelexport.inspection.evaluate.harness"
SHAPE = {"hidden": 128, "layers": 2, "vocab": 211}


# ------------------------------------------------------------------------------------ likelihoods of continuations


def likelihoods(model: Any, requests: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Each by itself, by transformers' whole model."""
    found = []
    for context, behind in requests:
        with torch.inference_mode():
            logs = model(torch.tensor([[*context, *behind]])).logits[0, len(context) - 1 : -1].log_softmax(-1)
        chosen = logs.gather(-1, torch.tensor(behind)[:, None]).sum()
        found.append((float(chosen), logs.argmax(-1).tolist() == behind))
    return found


@pytest.mark.parametrize("pass_bytes", [1, 1 << 30])
def test_continuations_of_all_lengths(pass_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_quantised(make_llama(**SHAPE), tmp_path / "ckpt", "fp8")
    model = load_dequantised(checkpoint)
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 1), (7, 3), (2, 30), (40, 1), (7, 1), (90, 9)]
    requests = [torch.randint(211, (a + b,), generator=generator).tolist() for a, b in sizes]
    asked = [(ids[:a], ids[a:]) for ids, (a, _) in zip(requests, sizes, strict=True)]
    asked += [(asked[3][0], [5]), asked[1]]  # another token behind the same ones; and the same again
    greedy = asked[0][0][:1]
    with torch.inference_mode():
        for _ in range(3):
            greedy = [*greedy, int(model(torch.tensor([greedy])).logits[0, -1].argmax())]
    asked.append((greedy[:1], greedy[1:]))
    monkeypatch.setattr(continuations, "PASS_BYTES", pass_bytes)
    scorer = continuations.ContinuationScorer(open_model(checkpoint), torch.float32, torch.device("cpu"))
    found, wanted = scorer.scores(asked), likelihoods(model, asked)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], abs=1e-3)
    assert [top for _, top in found] == [top for _, top in wanted]
    assert found[-1][1]
    assert found[-2] == found[1]
    assert scorer.scores([([3], [])]) == [(0.0, True)]


def test_progress_counts_the_layers_of_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuations, "PASS_BYTES", 1)
    seen: list[tuple[int, int]] = []
    source = open_model(make_llama(**SHAPE))
    scorer = continuations.ContinuationScorer(
        source, torch.float32, torch.device("cpu"), progress=lambda *done: seen.append(done)
    )
    scorer.scores([([1, 2], [3]), ([4], [5])])
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


# --------------------------------------------------------------------------------------------- a stand-in for lm-eval


class StandIn:
    """Two tasks: one asks for likelihoods of what is behind a context, one has models write text."""

    def __init__(self) -> None:
        self.shots: list[int] = []
        self.calls: list[Any] = []
        self.manager = SimpleNamespace(all_tasks=["ends", "essay", "broken"], match_tasks=self.match, load=self.load)

    def match(self, names: list[str]) -> list[str]:
        return [name for name in names if name in self.manager.all_tasks]

    def load(self, names: list[str]) -> dict[str, Any]:
        if "broken" in names:
            raise ConnectionError("no data\nfor you")
        kinds = {"ends": "multiple_choice", "essay": "generate_until"}
        return {"tasks": {name: self.task(kinds[name]) for name in names}}

    def task(self, kind: str) -> Any:
        return SimpleNamespace(
            OUTPUT_TYPE=kind,
            get_config=lambda key: None,
            set_config=lambda key, value: self.shots.append(value),
            set_fewshot_seed=lambda seed: None,
        )

    def evaluate(self, lm: Any, task_dict: dict[str, Any], limit: float | None, log_samples: bool) -> dict[str, Any]:
        print("words of the harness")
        print("more of them", file=sys.stderr)
        ids = [lm.tok_encode(text) for text in ("The hacker", " wrote a program")]
        scores = lm._loglikelihood_tokens([(("", ""), *ids), (("", ""), lm.tok_encode("The") * 600, ids[1])])
        [rolling] = lm.loglikelihood_rolling([SimpleNamespace(args=("The hacker wrote.",))])
        self.calls.append((limit, scores, rolling, lm.prefix_token_id, lm.max_length))
        figures = {"alias": "ends", "acc,none": scores[0][0], "acc_stderr,none": 0.25, "ppl,strict": float("inf")}
        return {
            "results": {"ends": {**figures, "ppl_stderr,strict": "N/A"}},
            "n-shot": {"ends": 2},
            "n-samples": {"ends": {"original": 9, "effective": 3}},
            "higher_is_better": {"ends": {"acc": True}},
        }

    def modules(self) -> dict[str, ModuleType]:
        def module(name: str, **content: Any) -> ModuleType:
            made = ModuleType(name)
            vars(made).update(content)
            return made

        def windows(token_list: list[int], prefix_token: int, max_seq_len: int, context_len: int) -> Any:
            yield [prefix_token, *token_list[:-1]], token_list

        utils = module(
            "lm_eval.utils",
            get_rolling_token_windows=windows,
            make_disjoint_window=lambda pair: (pair[0][: len(pair[0]) - len(pair[1]) + 1], pair[1]),
        )
        return {
            "lm_eval": module("lm_eval", __version__="9.9", evaluate=self.evaluate, utils=utils, __path__=[]),
            "lm_eval.utils": utils,
            "lm_eval.api": module("lm_eval.api", __path__=[]),
            "lm_eval.api.model": module("lm_eval.api.model", TemplateLM=type("TemplateLM", (), {})),
            "lm_eval.defaults": module("lm_eval.defaults", DEFAULT_RANDOM_SEED=0, DEFAULT_OTHER_SEED=1),
            "lm_eval.tasks": module("lm_eval.tasks", TaskManager=lambda include_path: self.manager),
        }


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, HARNESS, raising=False)
    importlib.import_module(HARNESS)
    monkeypatch.setitem(sys.modules, HARNESS, sys.modules[HARNESS])  # taken out again behind the test
    return stand_in


def test_what_is_asked_and_printed(harness: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save_quantised(demo_model_path(), tmp_path / "ckpt", "int4")
    line = ["eval", str(checkpoint), "--against", "demo", "--tasks", "ends", "--limit", "3", "--num-fewshot", "2"]
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (limit, ours, rolling, start, longest), (_, theirs, _, _, _) = harness.calls
    assert (limit, start, longest, harness.shots) == (3, 0, 512, [2, 2])
    lines = out.splitlines()
    assert lines[0] == "lm-eval 9.9, --limit 3, contexts of up to 512 tokens, float32"
    assert lines[1].split() == ["task", "metric", "shots", "documents", "demo", str(checkpoint)]
    cells = [f"{ours[0][0]:.4f}", "+-", "0.2500"]
    assert lines[2].split() == ["ends", "acc", "2", "3", f"{theirs[0][0]:.4f}", "+-", "0.2500", *cells]
    assert lines[3].split() == ["ends", "ppl", "(strict)", "2", "3", "?", "?"]
    # By transformers' whole model: a context that is too long begins later.
    from transformers import AutoTokenizer

    ids = [AutoTokenizer.from_pretrained(demo_model_path()).encode(text) for text in ("The hacker", " wrote a program")]
    the, whole = ids[0][:1], AutoTokenizer.from_pretrained(demo_model_path()).encode("The hacker wrote.")
    cut = [*the] * (513 - len(ids[1]))
    wanted = likelihoods(load_dequantised(demo_model_path()), [(ids[0], ids[1]), (cut, ids[1])])
    assert [score for score, _ in theirs] == pytest.approx([score for score, _ in wanted], abs=2e-3)
    [(everything, _)] = likelihoods(load_dequantised(checkpoint), [([0], whole)])
    assert rolling == pytest.approx(everything, abs=2e-3)


def test_json(harness: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "demo", "--tasks", "ends", "--window", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["harness"], found["limit"], found["window"], found["against"]) == ("9.9", None, 64, None)
    acc, perplexity = found["results"]
    assert (acc["task"], acc["metric"], acc["filter"], acc["shots"], acc["documents"]) == ("ends", "acc", "none", 2, 3)
    assert (acc["standard_error"], acc["source"], acc["higher_is_better"]) == (0.25, None, True)
    assert (perplexity["value"], perplexity["standard_error"]) == (None, None), "infinity is no JSON"
    assert harness.shots == [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["endz"]}, r"--tasks endz: the harness has no such task; did you mean 'ends'\?.*--tasks-path DIR"),
        ({"tasks": ["ends", "essay"]}, r"--tasks essay has models write text \(generate_until\).*with an engine"),
        ({"tasks": ["broken"]}, "--tasks broken: lm-eval cannot run this: ConnectionError: no data for you$"),
        ({"tasks": ["ends"], "window": 1}, r"a continuation has \d tokens, of which 1 .*larger --window"),
    ],
)
def test_tasks_that_cannot_be_run(options: dict[str, Any], message: str, harness: StandIn) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate_tasks("demo", **options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tasks ,", "--tasks: name at least one"),
        ("--tasks a --limit 0", "--limit 0: a number of documents"),
        ("--tasks a --num-fewshot -1", "--num-fewshot -1: at least 0"),
        ("--tasks a --window 0", "--window 0: at least 1"),
        ("--tasks a --tasks-path nowhere", "--tasks-path nowhere: no such directory"),
        ("--tasks a --text b", "--text is for texts"),
        ("--tasks a --save", "--save is for texts"),
        ("--num-fewshot 0", "--num-fewshot is for --tasks"),
        (
            "--tasks a",
            r"runs EleutherAI's harness: pip install 'modelexport\[eval\]', which is lm-eval 0\.4\.13 or later",
        ),
    ],
)
def test_requests_that_cannot_be_met(line: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, HARNESS, raising=False)
    with pytest.raises(UsageError, match=message):
        main_error(["eval", "demo", *line.split()])


def main_error(line: list[str]) -> None:
    from modelexport.cli.eval import run
    from modelexport.cli.parsers import parser_of

    run(parser_of("eval").parse_strictly(line[1:]))


def test_a_tokenizer_is_needed(harness: StandIn) -> None:
    with pytest.raises(UsageError, match=r"has no tokenizer, which is needed to read the tasks.*--against DIR"):
        evaluate_tasks(make_llama(**SHAPE), tasks=["ends"])
