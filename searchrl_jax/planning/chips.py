"""The TPU generations that a plan can be made for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One chip, as its maker describes it.

    Attributes:
        hbm_bytes: of main memory.
        flops: bfloat16 floating-point operations a second.
        hbm_bandwidth: bytes a second to and from main memory.
        ici_bandwidth: bytes a second between chips, all links of a chip together.

    Source:
        Google Cloud's documentation of TPU v5e, v5p and v6e (system architecture).
    """

    hbm_bytes: float
    flops: float
    hbm_bandwidth: float
    ici_bandwidth: float


CHIPS = {
    "v5e": Chip(16 * 2**30, 197e12, 819e9, 200e9),
    "v5p": Chip(95 * 2**30, 459e12, 2765e9, 600e9),
    "v6e": Chip(32 * 2**30, 918e12, 1640e9, 448e9),
}
