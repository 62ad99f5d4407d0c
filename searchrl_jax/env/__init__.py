"""The search environment: tools, observations, limits and rewards of an episode. Host code, no jax."""

from searchrl_jax.env.actions import Refused, Search, Submit
from searchrl_jax.env.limits import Limits
from searchrl_jax.env.rewards import RewardSpec
from searchrl_jax.env.search_env import Episode, SearchEnv, StepResult

__all__ = ["Episode", "Limits", "Refused", "RewardSpec", "Search", "SearchEnv", "StepResult", "Submit"]
