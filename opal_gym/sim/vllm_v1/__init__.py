"""The engine profile `vllm_v1`: the rules of vLLM 0.33.0's v1 scheduler, step by step.

`worker.vllm_params.engine` chooses it. It shares requests, worker loop, decisions and metrics with
the seed's engine, and brings its own batch builder, batch, waiting queue and block pool.
"""
