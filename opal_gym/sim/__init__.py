"""The simulated vLLM worker: models, timing, scheduler and KV cache, without Gymnasium."""
