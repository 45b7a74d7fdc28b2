"""Every reader of bytes that others have written."""

from __future__ import annotations

from tests.fuzz.guided import _files, _messages

READERS = (*_messages.READERS, *_files.READERS)

_OBJECT = "read_json, whose object it takes as readers that are fuzzed do"
_MESSAGE = "read_message, whose object it takes as readers that are fuzzed do"
_COMPARED = "bytes that are compared, and not parsed"
_CHECKED = "bytes that have been parsed before"
_OWN = "text that this process has made"
TRUSTED = {
    "checkpoints/formats/hf.py:config_bytes": _CHECKED,
    "checkpoints/gguf/restored_config.py:_factors": "numbers of a tensor whose size has been checked",
    "checkpoints/mirrors/mirror.py:make": _OBJECT,
    "checkpoints/torch_archive/dcp_container.py:own_config": _OBJECT,
    "distributed/collectives/master_worker/rank_session.py:_leave": _COMPARED,
    "distributed/collectives/master_worker/serving.py:serve": "a command, as Member.answer takes it",
    "distributed/launch/rank_main.py:load": "the launcher's own call, by which multiprocessing starts any process",
    "distributed/supervision/status.py:_watch": _COMPARED,
    "distributed/supervision/status.py:report": _OWN,
    "exporting/output.py:share_records": _MESSAGE,
    "exporting/output.py:step": _MESSAGE,
    "inspection/evaluate/plain_llama.py:fast_tokenizer": _OBJECT,
    "inspection/evaluate/record.py:save_evaluation": _COMPARED,
    "inspection/evaluate/text.py:_is_demos": _COMPARED,
    "jobs/side_files.py:cards": _COMPARED,
    "jobs/side_files.py:source_config": _CHECKED,
    "models/derived/__init__.py:_derived": _OWN,
    "models/derived/__init__.py:_described": _OWN,
    "models/derived/__init__.py:_skeleton": _OWN,
    "models/derived/scalings.py:_proved": _OWN,
    "models/derived/small.py:small_configs": _OWN,
    "models/in_memory.py:_write_tokenizer": _COMPARED,
    "models/in_memory.py:opened": _OBJECT,
    "models/language_part.py:_config_of": _OWN,
    "models/opening.py:read_config": _OBJECT,
    "plugins.py:_are_there": _COMPARED,
    "quantization/calibration/text.py:_loaded": "read by transformers, and refused whatever it raises",
    "quantization/methods/_reciprocal.py:_as_float": _OWN,
    "quantization/methods/_reciprocal.py:_as_int": _OWN,
    "quantization/methods/_reciprocal.py:_float32": _OWN,
}
"""Functions that decode bytes and are not fuzzed -> why."""
