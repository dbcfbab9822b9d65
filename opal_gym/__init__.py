"""opal-gym: learn schedulers for LLM serving in a simulated vLLM worker.

Importing this package registers `OpalVLLM-v0` with Gymnasium.
"""

import gymnasium

gymnasium.register(id="OpalVLLM-v0", entry_point="opal_gym.envs.opal_vllm:OpalVLLMEnv")
