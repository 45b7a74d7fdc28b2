"""Pushing a checkpoint to the Hugging Face hub, once its directory stands.

One commit holds everything, so that a repository has the whole checkpoint or what it had before; weights of an earlier
push that are no longer part of it go in the same commit. What was sent of large files is not sent again, so that a push
that failed is repeated by the same command. huggingface_hub is imported only when something is pushed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelexport import __version__
from modelexport.checkpoints.source import hidden_bars
from modelexport.errors import HubError, UsageError, error_text, shown
from modelexport.models.opening import open_model
from modelexport.recipe import check_repo_id

__all__ = ["PushResult", "check_login", "push"]

_STALE = (
    *("*.safetensors", "*.safetensors.index.json", "*.gguf", "*.distcp", ".metadata", "common.pt", "metadata.json"),
    *("*.bin", "*.bin.index.json", "*.pt", "*.pth"),
)
"""Files that are weights, or say where weights are: those that are not pushed now are deleted from the repository."""
ANSWER_SECONDS = 300.0
"""Seconds that the hub may take to answer, or to take the next bytes, before a push breaks off."""
_IS_CHECKPOINT = ("config.json", "modelexport.json", ".metadata")


@dataclass(frozen=True)
class PushResult:
    """A push that is done.

    Attributes:
        checkpoint: the directory.
        repository, url: the repository's name, and its address.
        commit, commit_url: the commit that holds the checkpoint, a revision of the repository, and its address.
    """

    checkpoint: str
    repository: str
    url: str
    commit: str
    commit_url: str

    def as_json(self) -> dict[str, str]:
        """JSON-able form, for ``--json``."""
        return {"checkpoint": self.checkpoint, "pushed": self.url}


def check_login(repo_id: str) -> None:
    """Checks the login to the hub, before hours are spent on a checkpoint that is then to be pushed.

    Raises:
        UsageError: the id cannot be one.
        HubError: nobody is logged in, the token is not accepted, or the hub cannot be reached.
    """
    check_repo_id(repo_id)
    with _explained(f"--push-to-hub {repo_id}"), _answers_in_time():
        _api().whoami()


def push(directory: str | os.PathLike[str], repo_id: str, *, private: bool = False, quiet: bool = False) -> PushResult:
    """Uploads a checkpoint's directory; makes the repository where it is not there yet.

    Args:
        private: whether the repository is to be private; one that is there and public is refused.

    Raises:
        UsageError: no checkpoint, or the id cannot be one.
        CheckpointError: a file of it is missing or cut short.
        HubError: the hub refuses it or cannot be reached; the directory is as it was, and the message says which
            command tries again.

    Example:
        ::

            >>> modelexport.push("ckpt", "me/demo-int4", quiet=True).repository
            'me/demo-int4'
    """
    directory = Path(directory)
    check_repo_id(repo_id)
    if not any((directory / name).is_file() for name in _IS_CHECKPOINT):
        raise UsageError(f"{directory}: no checkpoint is there (a directory with {', '.join(_IS_CHECKPOINT[:2])})")
    open_model(directory)  # headers alone: an interrupted copy is not to take the place of a whole one
    again = f"modelexport push {shlex.quote(str(directory))} {repo_id}{' --private' if private else ''}"
    with (
        hidden_bars() if quiet else nullcontext(),
        _explained(f"{directory} is complete, but was not pushed to {repo_id}", again),
        _answers_in_time(),
    ):
        api = _api()
        url = api.create_repo(repo_id, private=True if private else None, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise HubError(
                f"{repo_id} is there already, and is public: nothing was pushed; make it private in its settings, or "
                "give another id, or leave out --private"
            )
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=str(directory),
            commit_message=f"Checkpoint written by modelexport {__version__}",
            delete_patterns=list(_STALE),
        )
    return PushResult(str(directory), repo_id, str(url), commit.oid, commit.commit_url)


def _api() -> Any:
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise HubError("nobody is logged in to the hub here: type hf auth login, or set HF_TOKEN to a write token")
    return HfApi(library_name="modelexport", library_version=__version__)


@contextmanager
def _answers_in_time() -> Iterator[None]:
    """Requests inside it fail after :data:`ANSWER_SECONDS`: the hub's client by itself waits without end.

    The client of versions before 1.0 has no setting for all its requests, and waits as long as TCP does.
    """
    from huggingface_hub.utils import get_session

    session = get_session()
    before = getattr(session, "timeout", None)
    if before is None:
        yield
        return
    session.timeout = type(before)(ANSWER_SECONDS, pool=None)  # a free connection of its own is no matter of the hub's
    try:
        yield
    finally:
        session.timeout = before


@contextmanager
def _explained(what: str, again: str | None = None) -> Iterator[None]:
    """Errors of the hub's client as one sentence: what is not done, why, and what to type."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    then = "" if again is None else f"; to try again: {again}"
    transport_error = HfHubHTTPError.__mro__[1]  # of the HTTP library that this version of the hub's client uses
    try:
        yield
    except HubError as error:
        raise HubError(f"{what}: {error}{then}") from error
    except HFValidationError as error:
        raise UsageError(f"{what}: {error_text(error)}") from error
    except HfHubHTTPError as error:
        raise HubError(f"{what}: {_refusal(error)}{then}") from error
    except ValueError as error:  # a card that the hub does not take, asked before the commit
        raise HubError(f"{what}: {error_text(error)}{then}") from error
    except (transport_error, OSError, RuntimeError) as error:  # RuntimeError: of its transfer library, written in Rust
        raise HubError(
            f"{what}: the hub cannot be reached, or the transfer broke off ({error_text(error)}){then}"
        ) from error


def _refusal(error: Any) -> str:
    status = error.response.status_code if error.response is not None else None
    if status == 401:
        return "the hub does not accept the token: type hf auth login"
    if status == 403:
        return (
            "the token has no right to write there: check the organisation's name, and that the token is one to write"
        )
    if status == 404:
        return "the hub knows no such organisation or repository, or does not show it to this token"
    detail = getattr(error, "server_message", None) or "no reason given"
    return f"the hub refused it (HTTP {status}: {shown(detail)})"
