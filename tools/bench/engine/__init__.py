"""A stand-in for an LLM engine with continuous batching, for benches and tests: no model, almost no CPU.

`steps` is the scheduler of the engine without I/O, `calls` its requests and responses, `server` its HTTP server, `faults`
what a test can change while it runs, `metrics` its Prometheus page, and `process` starts it: `running_engine`.

    python tools/bench/engine --port 8000 --slots 64
"""
