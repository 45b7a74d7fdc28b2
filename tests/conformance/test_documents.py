"""Every public name of the documents that the distributed layer is built from: where it is, and how it may be called.

Written off the documents by hand: the name, and its parameters as a call would give them (``=`` marks a default). A
function of ours may take more than that, but only what nobody has to give.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any, TypeVar

import pytest

GATHER = {
    "NFSWorkspace": "workspace_path=None",
    "get_configs_parallel": "config, ranks, group, workspace_path=None",
    "get_tensors_parallel": "tensor, ranks, group=None",
}
WORKSPACE = {
    "is_initialized": None,  # a property
    "read_configs_and_weights_from_rank": "self, target_rank",
    "write_configs_and_weights": "self, config_json, weights",
}
LAUNCH = {
    "init_process_group_from_backend": "backend=None",
    "init_dist": "rank, local_rank, world_size, local_world_size, master_addr, master_port, init_method, backend=None",
    "default_backend": "",
    "get_distributed_backend": "",
    "set_distributed_backend": "backend",
    "init_and_run": "func, cfg, *args, **kwargs",
    "launch_subprocesses": "func, cfg, setup=None, rank_offset=0, *args, **kwargs",
    "all_to_all": "input, group",
}
CONFIG = {
    "rank": -1, "local_rank": -1, "world_size": "???", "local_world_size": "???", "master_addr": "127.0.0.1",
    "master_port": "???", "init_method": "env://", "model_parallelism": 1, "pipeline_parallelism": 1, "backend": None,
    "model_parallel_backend": None, "pipeline_parallel_backend": None, "data_parallel_backend": None,
    "launch_method": "forkserver",
}  # fmt: skip
COLLECTIVES = {
    "is_available": "",
    "destroy_process_group": "",
    "is_initialized": "",
    "init_process_group": "backend, init_method='env://', **kwargs",
    "init_master_worker": "backend, init_method='env://', **kwargs",
    "get_rank": "",
    "get_world_size": "",
    "isend": "tensor, dst",
    "irecv": "tensor, src",
    "send": "tensor, dst",
    "recv": "tensor, src=None",
    "broadcast_multigpu": "tensor_list, src, group=WORLD",
    "broadcast": "tensor, src, group=WORLD",
    "all_reduce_multigpu": "tensor_list, op=SUM, group=WORLD",
    "all_reduce": "tensor, op=SUM, group=WORLD",
    "reduce_multigpu": "tensor_list, dst, op=SUM, group=WORLD",
    "reduce": "tensor, dst, op=SUM, group=WORLD",
    "all_gather_multigpu": "output_tensor_lists, input_tensor_list, group=WORLD",
    "all_gather": "tensor_list, tensor, group=WORLD",
    "gather": "tensor, **kwargs",
    "scatter": "tensor, **kwargs",
    "barrier": "group=WORLD",
    "new_group": "ranks=None",
    "_clear_group_cache": "group=WORLD",
    "_register_stream": "stream",
}
CONSTANTS = {
    "dist_backend": {"UNDEFINED": -1, "TCP": 0, "MPI": 1, "GLOO": 2, "NCCL": 3},
    "reduce_op": {"SUM": ..., "PRODUCT": ..., "MAX": ..., "MIN": ...},
    "group": {"WORLD": ...},
}
RANKS = {
    "barrier": "",
    "compute_and_broadcast": "fn, rank=0",
    "gather_from_all_ranks": "fn, world_size=None",  # the document says 1: see modelexport.distributed.ranks
    "gather_scalar_from_all_ranks": "fn, world_size=None",
    "is_distributed": "",
    "is_main_process": "",
    "reduce_and_broadcast": "fn1, fn2",
    "zero_first": "is_main",
    "zero_only": "",
}
SHARES = "loaded_tensors, unloaded_shards, shard_distribution"
EXCHANGE = {
    "is_float8tensor": "tensor",
    "_shard_size": "sh_ten",
    "_get_empty_tensor_for_exchange": "shard_id, needed_shards, unneeded_shards, loaded_tensors",
    "distribute_shards_to_ranks": "shard_to_ranks, shard_to_size, num_ranks, cross_parallelization_group_loads",
    "determine_main_replica_uniform_distribution": "sharded_state_dict, parallelization_group, ignore_groups=False",
    "exchange_loaded_tensors_gather_rounds": f"{SHARES}=None, parallelization_group=None",
    "exchange_loaded_tensors_gather_object": f"{SHARES}, parallelization_group=None",
    "exchange_loaded_objects_gather_object": "loaded_objects",
    "exchange_loaded_tensors_broadcast": f"{SHARES}, parallelization_group=None",
    "exchange_by_distribution": f"{SHARES}, parallelization_group=None, exchange_algo='broadcast'",
}
DISTRIBUTION = ("main_rank_for_shard", "shards_in_this_group", "shard_to_metadata", "all_ranks_for_shard")
ELSEWHERE = {"exchange": "modelexport.sharding.exchange"}
DOCUMENTS = {"gather": GATHER, "launch": LAUNCH, "collectives": COLLECTIVES, "ranks": RANKS, "exchange": EXCHANGE}
CALLS = [(module, name, call) for module, names in DOCUMENTS.items() for name, call in names.items()]


def module(name: str) -> Any:
    return importlib.import_module(ELSEWHERE.get(name, f"modelexport.distributed.{name}"))


def takes(function: Any, call: str) -> None:
    """``function`` can be called as ``call`` says, with the same defaults, and demands nothing else."""
    collectives = module("collectives")
    names = {"WORLD": collectives.group.WORLD, "SUM": collectives.reduce_op.SUM}
    wanted = inspect.signature(eval(f"lambda {call}: None", names)).parameters
    found = inspect.signature(function).parameters
    ours = [parameter for parameter in found.values() if parameter.name in wanted]
    assert [parameter.name for parameter in ours] == list(wanted)
    for parameter in ours:
        document = wanted[parameter.name]
        assert parameter.kind == document.kind, parameter
        assert parameter.default == document.default or document.default is inspect.Parameter.empty, parameter
    positional = [p.name for p in found.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    expected = [p.name for p in wanted.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional[: len(expected)] == expected, "positions"
    for parameter in found.values():
        if parameter.name not in wanted:
            assert parameter.default is not inspect.Parameter.empty, f"{parameter} must be given"


@pytest.mark.parametrize(("place", "name", "call"), CALLS)
def test_each_name_is_there_and_takes_what_the_document_says(place: str, name: str, call: str) -> None:
    assert name in module(place).__all__
    takes(getattr(module(place), name), call)


@pytest.mark.parametrize("name", WORKSPACE)
def test_the_workspace_class(name: str) -> None:
    member = inspect.getattr_static(module("workspace").NFSWorkspace, name)
    call = WORKSPACE[name]
    if call is None:
        assert isinstance(member, property)
    else:
        takes(member, call)


def test_the_config_has_the_documents_fields_in_its_order() -> None:
    signature = inspect.signature(module("launch").MultiprocessConfig)
    assert {name: p.default for name, p in list(signature.parameters.items())[: len(CONFIG)]} == CONFIG
    takes(module("launch").MultiprocessConfig.resolve, "config")


@pytest.mark.parametrize("name", CONSTANTS)
def test_the_constants(name: str) -> None:
    holder = getattr(module("collectives"), name)
    values = [getattr(holder, member) for member in CONSTANTS[name]]
    assert len({id(value) for value in values}) == len(values), "each is itself"
    for member, value in CONSTANTS[name].items():
        assert value is ... or getattr(holder, member) == value


def test_the_names_of_the_exchange_that_are_no_functions() -> None:
    exchange = module("exchange")
    assert {"ShardDistribution", "T", "logger"} <= set(exchange.__all__)
    assert exchange.ShardDistribution._fields == DISTRIBUTION
    assert issubclass(exchange.ShardDistribution, tuple)
    assert isinstance(exchange.T, TypeVar)
    assert isinstance(exchange.logger, logging.Logger)
