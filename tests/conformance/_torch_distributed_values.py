"""The results that torch's tests compute and do not look at: here they are looked at.

``_test_all_reduce_helper`` is told the value to expect and only counts the profiler's events (in torch 2.13); the tests
of batches of isend and irecv only wait.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


def with_values(tests: type, dist: Any) -> type:
    """``tests``, a class of torch's tests that run on ``dist``, with the missing comparisons."""

    class Tests(tests):  # type: ignore[misc,valid-type]
        _expected: Any = None

        def _test_all_reduce_helper(self, *args: Any, **kwargs: Any) -> None:
            helper = super()._test_all_reduce_helper
            self._expected = inspect.signature(helper).bind(*args, **kwargs).arguments["expected_value"]
            helper(*args, **kwargs)
            self._expected = None

        def call_dist_op(self, title: str, is_async: bool, op: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
            super().call_dist_op(title, is_async, op, tensor, *args, **kwargs)
            if self._expected is not None:
                torch.testing.assert_close(tensor, torch.full_like(tensor, self._expected), rtol=0, atol=0)

        def test_batch_isend_irecv_gloo(self) -> None:
            super().test_batch_isend_irecv_gloo()
            self._check_batch()

        def test_batch_isend_irecv_gloo_tags(self) -> None:
            super().test_batch_isend_irecv_gloo_tags()
            self._check_batch()

        def _check_batch(self) -> None:
            """Every rank sends a cube filled with its own edge length, which is its rank + 1."""
            received = [each for each in dist.last_batch if each.op is dist.irecv]
            assert len(received) == dist.get_world_size() - 1
            for each in received:
                torch.testing.assert_close(each.tensor, torch.full((each.peer + 1,) * 3, each.peer + 1.0))

    return Tests
