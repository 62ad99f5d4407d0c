"""Checkpoints in Hugging Face format: read, strictly and tensor by tensor, and written for whoever serves them."""

from searchrl_jax.models.hf.adapters import save_adapters
from searchrl_jax.models.hf.config import PretrainedConfig
from searchrl_jax.models.hf.load import load_pretrained, read_pretrained
from searchrl_jax.models.hf.save import save_pretrained

__all__ = ["PretrainedConfig", "load_pretrained", "read_pretrained", "save_adapters", "save_pretrained"]
