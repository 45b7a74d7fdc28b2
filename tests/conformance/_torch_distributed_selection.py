"""Which tests of torch's distributed_test.py are run on our collectives, and why each of the others is not."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

SUITE = "torch.testing._internal.distributed.distributed_test"

# topic -> (its tests, ours that a test must call, at least one of them, on one rank or another)
TOPICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "groups": (
        r"test_(get_rank|get_backend|backend_(full_)?group|destroy_(full_)?group|new_subgroups|Backend_enum)",
        ("get_rank", "get_world_size", "new_group", "destroy_process_group"),
    ),
    "send and recv": (r"test_send_recv", ("send", "recv")),
    "isend and irecv": (r"test_(isend|irecv|batch_isend_irecv)", ("isend", "irecv")),
    "broadcast": (r"test_(broadcast|nccl_backend_bool_broadcast)", ("broadcast",)),
    "reduce": (r"test_(reduce|nccl_backend_bool_reduce)", ("reduce",)),
    "all_reduce": (r"test_(sparse_)?(all_reduce|nccl_backend_bool_allreduce)", ("all_reduce",)),
    "gather": (r"test_gather", ("gather",)),
    "scatter": (r"test_scatter", ("scatter",)),
    "all_gather": (r"test_(all_gather|nccl_backend_bool_allgather)", ("all_gather",)),
    "barrier": (r"test_(monitored_)?barrier", ("barrier",)),
    "all_to_all": (r"test_all_to_all", ("all_to_all", "all_to_all_single")),
}

# Tests of those topics that are not run -> why. Whatever torch itself skips is not here: it says so when it is run.
LEFT_OUT: dict[str, str] = {
    r".*_coalesced": "coalesced collectives are no part of the surface (torch has deprecated them)",
    r".*_object(_|$)": "object collectives send pickles; modelexport never unpickles data",
    r"test_monitored_barrier": "monitored_barrier is no part of the surface; a launcher names the missing rank",
    r"test_new_subgroups": "new_subgroups is no part of the surface (and torch skips these without GPUs)",
    r"test_reduce_scatter": "reduce_scatter is no part of the surface",
    r"test_all_gather_into": "all_gather_into_tensor is no part of the surface",
    r"test_Backend_enum_class": "tests an enum of torch's; nothing of ours would be called",
}

# Of other topics altogether -> what they are about.
OTHER_TOPICS: dict[str, str] = {
    r"test_.*(ddp|DDP|DistributedDataParallel)": "DistributedDataParallel",
    r"test_(accumulate_gradients|grads_same|get_data_parallel_params|static_graph|invalid_static_graph|"
    r"detect_ddp|different_graph|undefined_grad|output_unused|stateless_api|verify_model|"
    r"compute_bucket_assignment|sync_bn_logged|SyncBatchNorm|skip_all_reduce_unused)": "DistributedDataParallel",
    r"test_(average_parameters|periodic_model|\d_level_hierarchical|post_localSGD)": "averaging of models",
    r"test_DistributedSampler": "torch.utils.data",
    r"test_(coalescing_manager|nccl_high_priority_stream|get_future)": "NCCL's own",
}

# torch skips these on gloo, which can do them: what it says -> the tests that are run all the same.
LIFTED_SKIPS: dict[str, str] = {
    "Only MPI supports CPU all_to_all_single": r"test_all_to_all_single_",
    "Only MPI supports all_to_all": r"test_all_to_all",
}

# Where the document that our surface follows says otherwise than torch does today -> (the error that the test must
# then end in, the document's words).
DEVIATIONS: dict[str, tuple[str, str]] = {
    "test_gather_checks": (
        "gather_list is a required argument in gather destination",
        "without dst every rank is the destination (torch now: rank 0)",
    ),
    "test_scatter_checks": (
        "scatter_list is a required argument in scatter source",
        "without src every rank is the source (torch now: rank 0)",
    ),
}

# Left out where the ranks compare their arguments first: torch then expects the words of its own wrapper.
UNCHECKED_ONLY = re.compile(r"test_barrier_timeout")

# Some of each topic, of those that are cheap and no race against a time-out, for every run; the whole is slow.
QUICK: tuple[str, ...] = (
    "test_get_rank",
    "test_get_rank_size_group",
    "test_destroy_full_group",
    "test_get_backend",
    "test_send_recv",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_isend",
    "test_irecv",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_broadcast_group",
    "test_reduce_sum",
    "test_reduce_group_max",
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_group_product",
    "test_all_reduce_min",
    "test_all_reduce_max",
    "test_all_reduce_complex_unsupported_ops",
    "test_gather",
    "test_gather_group",
    "test_scatter_full_group",
    "test_scatter_complex",
    "test_all_gather",
    "test_all_gather_complex",
    "test_barrier_group",
    "test_all_to_all_single_equal_split",
    "test_all_to_all_single_unequal_split_group",
    "test_all_to_all",
)


@dataclass
class Selection:
    """What becomes of each test of the suite.

    Attributes:
        run: the tests to run, in the suite's order.
        left_out: tests of our topics -> why they are not run.
        others: tests of other topics -> which.
        unknown: tests that no table speaks of.
    """

    run: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def select(names: Iterable[str]) -> Selection:
    """Sorts the suite's tests by the tables above."""
    selection = Selection()
    for name in names:
        other = _first(OTHER_TOPICS, name)
        reason = _first(LEFT_OUT, name)
        if topic_of(name) is None:
            if other is None:
                selection.unknown.append(name)
            else:
                selection.others[name] = other
        elif reason is not None:
            selection.left_out[name] = reason
        else:
            selection.run.append(name)
    return selection


def topic_of(name: str) -> str | None:
    """The topic of a test, or None where it is not ours."""
    return next((topic for topic, (pattern, _) in TOPICS.items() if re.match(pattern, name)), None)


def is_lifted(name: str, reason: str) -> bool:
    """Whether a test is run although torch would skip it for ``reason``."""
    return reason in LIFTED_SKIPS and re.match(LIFTED_SKIPS[reason], name) is not None


def suite_tests() -> list[str] | None:
    """The suite's tests in order, read from its source without importing it; None where torch comes without it.

    Importing it would change this process: it sets hypothesis' profile, random seeds and environment variables.
    """
    try:
        spec = importlib.util.find_spec(SUITE)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return None
    tree = ast.parse(Path(spec.origin).read_text())
    (outer,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DistributedTest")
    (inner,) = (node for node in outer.body if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase")
    return [node.name for node in inner.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def _first(table: dict[str, str], name: str) -> str | None:
    return next((value for pattern, value in table.items() if re.match(pattern, name)), None)
