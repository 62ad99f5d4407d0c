"""Checkpoints on the Hugging Face hub."""

from pathlib import Path

PREFIX = "hf://"
_FETCHED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def fetch(address: str) -> Path:
    """The local folder of `hf://owner/name`, fetched into the hub's cache where it isn't there yet.

    Raises:
        ValueError: the address has another form, or the hub can't be reached or has no such checkpoint.
    """
    name = address.removeprefix(PREFIX)
    if name.count("/") != 1 or not all(name.split("/")):
        raise ValueError(f"expected {PREFIX}owner/name, got {address}; give the two parts of the model's page")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Folders in a repository hold the same weights in other formats.
        return Path(snapshot_download(name, allow_patterns=list(_FETCHED), ignore_patterns=["*/*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{address}: expected to fetch it from the hub, but {type(error).__name__}: {why}; "
            "where there is no network, copy the checkpoint's folder here and give its path"
        ) from error
