"""Real engines with continuous batching, on CPUs, with a small random model: llama.cpp's server and vLLM.

`model` writes the model, `processes` starts an engine and reads its metrics, `llama_cpp_server` is the process of
llama.cpp. `servers` has servers that run whole requests: MLServer, infinity, `transformers serve`. `make engines` tests Tierlane before them, `tools/bench/engines.py` measures it.
"""
