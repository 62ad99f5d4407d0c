"""Writes references.npz: what transformers makes of the small instances of families.py.

    python tests/models/record_references.py        (with torch, in the environment of the tests)

For each family, the logits of TOKENS, and for each of our parameters, by name in order, the derivative of the loss (the
mean over rows and tokens of the negative log-probability of the next token) along a direction drawn in that parameter.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from families import FAMILIES, TOKENS, common_settings, drawn, for_transformers

PATH = Path(__file__).with_name("references.npz")


def reference(family):
    """Logits [rows, tokens, V] and derivatives [parameters]."""
    spec = FAMILIES[family]
    config_class = getattr(transformers, f"{spec.model}TextConfig", None) or getattr(
        transformers, f"{spec.model}Config"
    )
    config = config_class(**{**common_settings(spec.config), **spec.settings})
    model = getattr(transformers, f"{spec.model}ForCausalLM")(config).eval()
    weights, direction = drawn(spec.config, "weights"), drawn(spec.config, "direction")
    state = for_transformers(family, weights)
    expected = {name for name in model.state_dict() if "rotary" not in name}
    if expected != set(state):
        raise ValueError(f"{family}: missing {sorted(expected - set(state))}, unknown {sorted(set(state) - expected)}")
    model.load_state_dict({name: torch.tensor(x) for name, x in state.items()})
    tokens = torch.tensor(TOKENS)
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
    loss.backward()
    derivatives = []
    nothing = {path: np.zeros_like(x) for path, x in weights.items()}
    base = for_transformers(family, nothing)
    grads = {name: x.grad.numpy().astype(np.float64) for name, x in model.named_parameters()}
    for path in sorted(direction):
        along = for_transformers(family, {**nothing, path: direction[path]})
        # A tied embedding is one parameter under one of its two names.
        derivatives.append(sum(np.sum(grad * (along[name] - base[name])) for name, grad in grads.items()))
    return {"logits": logits.detach().numpy(), "derivatives": np.array(derivatives)}


if __name__ == "__main__":
    found = {f"{family}:{name}": x for family in FAMILIES for name, x in reference(family).items()}
    np.savez_compressed(PATH, **found)
    print(f"{PATH}: {len(found)} arrays, {PATH.stat().st_size} bytes, transformers {transformers.__version__}")
