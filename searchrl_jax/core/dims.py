"""The dimension key: what each letter of a shape means, everywhere in the package.

Signatures carry shapes in these letters, `Float[Array, "B L"]` (jaxtyping), and einsum strings use the same ones. A
local variable gets a suffix (`q_BTNH`) only where two layouts of one thing meet. The letter `B` counts *rows of an
array*: after packing, a row may hold several trajectories and a trajectory may span several rows, so nothing may take B
for a number of trajectories. That number is `P * G` while rollouts are still in groups.
"""

from collections.abc import Mapping
from types import MappingProxyType

DIMENSIONS: Mapping[str, str] = MappingProxyType(
    {
        "B": "rows of a batch",
        "L": "tokens of a row: prompt, actions, tool output and padding",
        "A": "action tokens of a row, gathered",
        "T": "query tokens of one attention call",
        "S": "cached tokens that a query may look at",
        "D": "model width",
        "F": "feed-forward width",
        "N": "query heads",
        "K": "key and value heads",
        "H": "size of one head",
        "V": "vocabulary",
        "Y": "periods of the decoder, or layers where a period is one layer",
        "W": "width of the short causal convolution",
        "I": "channels of the short causal convolution",
        "J": "size of what a head of linear attention gives out",
        "E": "experts of a layer",
        "M": "tokens of all rows, one after the other",
        "X": "experts that a token chooses",
        "C": "decoding steps of one chunk",
        "P": "prompts (tasks) of a step",
        "G": "rollouts of one prompt, its group",
        "R": "turns of a trajectory",
    }
)
