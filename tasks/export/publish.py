"""Publishes files in a Hugging Face Hub repository with one commit, only on explicit command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from flowmill.configs.errors import PublishError
from flowmill.models.policies.pipeline_index import MODULAR, placed_index
from flowmill.models.weights.lora_files import LORA_FILE, PEFT_CONFIG, PEFT_FILE
from flowmill.models.weights.pretrained_loading import SETTINGS
from flowmill.tasks.export.copying import exported_files
from flowmill.tasks.runs.context import RunContext

#: The folder of the card in its snippet.
HERE = '"."  # this folder'
#: The same for pipelines that load components from subfolders: transformers 5 mistakes a dot for one of them.
HERE_WHOLE = 'os.path.abspath(".")  # this folder'
_IN_PLACE = "Runs as pasted, in this folder,"
#: Files that libraries load from a folder because of their names.
_BY_NAME = {*SETTINGS, PEFT_CONFIG, PEFT_FILE, LORA_FILE, "chat_template.jinja"}
_WEIGHTS = re.compile(r"(diffusion_pytorch_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def finished_export(context: RunContext, epoch: int | None) -> dict[str, Path]:
    """Return the verified files of a run's export by name: only the files that its commit names.

    Args:
        epoch: the epoch; the last when None.
    """
    files = exported_files(context, epoch)
    if link := next((file for file in files.values() if file.is_symlink()), None):
        raise PublishError(f"'{link}' is a link, not the file that was exported. Nothing was published.")
    return files


def publish(files: Mapping[str, Path], repo: str, *, private: bool, token: str | None) -> tuple[str, Sequence[str]]:
    """Create the repository if needed, commit every file of an export to it, and return its URL and the files of an
    earlier export that the commit removed.

    Files that it has already are not sent again.

    Args:
        files: files of the export, by name.
        repo: ``owner/name``.
        private: make a new repository private.
        token: token of the Hub; that of ``hf auth login`` or HF_TOKEN when None.
    """
    import huggingface_hub as hub

    if token is None and hub.get_token() is None:
        raise PublishError(
            f"'{repo}' cannot be written: you are not logged in to the Hugging Face Hub. Run 'hf auth login', set "
            "HF_TOKEN, or name the variable that holds a token with --token-env."
        )
    api = hub.HfApi(token=token)
    with _errors(repo, api.endpoint):
        operations: list[hub.CommitOperationAdd | hub.CommitOperationDelete] = [
            hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=_for_hub(name, path, repo))
            for name, path in files.items()
        ]
        api.create_repo(repo, private=private, exist_ok=True)
        removed = left_over((each.rfilename for each in api.repo_info(repo).siblings or ()), files)
        operations += map(hub.CommitOperationDelete, removed)
        api.create_commit(repo, operations, commit_message="Publish a post-trained policy")
    return f"{api.endpoint}/{repo}", removed


def left_over(names: Iterable[str], files: Iterable[str]) -> list[str]:
    """Return the files of a repository that libraries would load with an export, or instead of it, as they do those of
    another format: an adapter next to a whole model, or weights in one file next to weights in several.

    Args:
        names: names of the repository's files.
        files: names of the export's files.
    """
    exported = set(files)
    # The second LoRA file of Wan 2.2 is in a folder of its own; folders that no export has are not looked into.
    folders = {"transformer_2", *(name.rpartition("/")[0] for name in exported), ""}
    return sorted(
        name
        for name in {*names} - exported
        for folder, _, last in [name.rpartition("/")]
        if folder in folders and (last in _BY_NAME or _WEIGHTS.fullmatch(last))
    )


@contextmanager
def _errors(repo: str, endpoint: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except HFValidationError:
        raise PublishError(f"'{repo}' is no name of a repository. Give it as owner/name.") from None
    except HfHubHTTPError as error:
        raise PublishError(_refusal(repo, error.response.status_code, str(error))) from None
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise PublishError(
            f"'{repo}' cannot be written: {endpoint} does not answer ({type(error).__name__}). Nothing was "
            "published; check the network, HF_ENDPOINT and HF_HUB_OFFLINE, and run the command again."
        ) from None
    except RuntimeError as error:
        # Raised by huggingface_hub for a large file, from the error of the connection.
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise PublishError(
            f"'{repo}': {error} {cause}. Nothing was published. Run the command again: files that were sent are "
            "not sent twice."
        ) from None
    except ValueError as error:
        # Raised by huggingface_hub if the Hub rejects the card's front matter.
        raise PublishError(f"'{repo}' refuses the card: {error}. Nothing was published.") from None


def for_hub(card: str, repo: str) -> str:
    """Return a card whose snippet loads the repository instead of the card's folder."""
    return (
        card.replace(HERE_WHOLE, json.dumps(repo)).replace(HERE, json.dumps(repo)).replace(_IN_PLACE, "Runs as pasted,")
    )


def _for_hub(name: str, path: Path, repo: str) -> Path | bytes:
    """Return a file, or its content if it must name the repository instead of the folder."""
    if name == "README.md":
        return for_hub(path.read_text(), repo).encode()
    if name == MODULAR:
        return (json.dumps(placed_index(json.loads(path.read_text()), repo), indent=2, sort_keys=True) + "\n").encode()
    return path


def _refusal(repo: str, status: int, message: str) -> str:
    owner = repo.partition("/")[0]
    if status == 401:
        return f"'{repo}' cannot be written: the Hub does not know this token. Make a new one, or log in again."
    if status == 403:
        return (
            f"'{repo}' cannot be written: the token may not write to '{owner}', or the repository is of another owner. "
            "Use a name of your own, or a token with write access there."
        )
    if status == 404:
        return f"'{repo}' cannot be written: it does not exist or is not yours to see. Check the name and the token."
    return f"'{repo}' cannot be written: the Hub answered {status}: {message.strip().splitlines()[0]}"
